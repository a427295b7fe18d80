"""Learner process for torchrun: ``torchrun ... -m coderepairrl.learn.torchrun HOST:PORT``.

Rank 0 connects to the run (``crrl train``) and broadcasts its requests.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed

from coderepairrl.errors import CodeRepairError, LearnerFault
from coderepairrl.learn import remote
from coderepairrl.learn.distributed import LOCAL_RANK, connect_processes, gather_values
from coderepairrl.learn.learner import LearnerService
from coderepairrl.printable import logged
from coderepairrl.processes.child import die_with_parent
from coderepairrl.processes.children import Frame, Parent, encode_frame

_CONNECT_SECONDS, _RETRY_SECONDS = 3600.0, 1.0
"""Longest wait for the run to listen; pause between attempts."""
_IDLE = timedelta(days=365)
"""Longest wait for a request, while the run samples."""
_HOST = os.uname().nodename


def main() -> None:
    """Serve the run at the given address."""
    die_with_parent(os.getppid())
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        sys.exit(f"torchrun --max-restarts needs {remote.OWN_STORE}: export it where torchrun is started")
    address = sys.argv[1]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # the same as in learners that the run starts
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    connect_processes("env://")
    request_group = distributed.new_group(backend="gloo", timeout=_IDLE)
    process = {"host": _HOST, "gpu": torch.cuda.is_available(), "versions": remote.read_learner_versions()}
    processes = gather_values(process, request_group)
    run = None
    if distributed.get_rank() == 0:
        try:
            run = _connect(address, processes)
        except CodeRepairError as error:
            sys.exit(f"{error}\n{error.fix}")
    service = LearnerService()
    while True:
        request = [_receive_request(run) if run else {}]
        distributed.broadcast_object_list(request, 0, group=request_group)
        if "exit" in request[0]:
            distributed.destroy_process_group()
            sys.exit(request[0]["exit"])
        reply = _serve_request(service, request[0], request_group)
        errors = gather_values(reply if "error" in reply else None, request_group)
        if run:
            with suppress(OSError):  # the run is gone: `_receive_request` reports it
                run.send(next(filter(None, errors), reply))


def _connect(address: str, processes: list[Any]) -> Parent:
    host_port, secret = remote.parse_address(address), remote.read_secret()
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection(host_port, timeout=remote.GREETING_SECONDS)
            run = Parent(connection)
            # in one piece: a run that rejects the secret closes the connection
            connection.sendall(secret + encode_frame({"pid": os.getpid(), "machines": processes}))
            answer = run.receive()
            break
        except (OSError, EOFError, ValueError) as error:  # another program may listen there
            if time.monotonic() > deadline:
                raise LearnerFault(
                    f"no run listens at {address} within {_CONNECT_SECONDS:g} s: {error}",
                    fix=f"start crrl train with train.listen={address}; a firewall may be in the way",
                ) from None
            time.sleep(_RETRY_SECONDS)
    assert answer is not None  # None only without `block`
    if "error" in answer:
        connection.close()
        raise LearnerFault(str(answer["error"]), fix="see the output of crrl train")
    connection.settimeout(None)
    remote.enable_keepalive(connection)
    print(
        logged(f"learner of {distributed.get_world_size()} processes: connected to {address}"),
        file=sys.stderr,
        flush=True,
    )
    return run


def _receive_request(run: Parent) -> Frame:
    try:
        request = run.receive()
    except (OSError, EOFError) as error:
        print(logged(f"the connection to the run was lost: {error}"), file=sys.stderr, flush=True)
        return {"exit": 1}
    assert request is not None
    return request


def _serve_request(service: LearnerService, request: Frame, request_group: distributed.ProcessGroup) -> Frame:
    # ``start`` lists ``files`` that every machine must have
    if files := request.pop("files", {}):
        problem = ""
        if int(os.environ[LOCAL_RANK]) == 0:  # one process per machine reads them
            digests = remote.digest_files(map(Path, files))
            wrong = (path for path in files if digests[path] != files[path])
            problem = next((f"{path} is not on {_HOST}, or differs" for path in wrong), "")
        if problem := next(filter(None, gather_values(problem, request_group)), ""):
            return {
                "error": problem,
                "kind": "usage",
                "fix": "put model.path, run.dir and engine.weights_dir on a file system that all machines have at the"
                " same path",
            }
    return service.answer(request)


if __name__ == "__main__":
    main()
