"""Joining a Ray cluster, and detecting a lost head: Ray itself would wait for it, or end the process."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from coderepairrl.errors import ExitCode, PrerequisiteError, RunError
from coderepairrl.processes.installs import require_extra

LISTEN_SECONDS = 10.0  # for one connection or request
GONE_SECONDS = 20.0
"""Seconds without a listener after which a head counts as lost."""
ANSWER_SECONDS = 60.0
"""Seconds without an answer after which a head counts as lost."""
LEAVE_SECONDS = 15.0  # for `ray.shutdown`
# like `ray health-check`, in a separate process, since no exception or signal ends its retries
_ASK_HEAD = "import sys, ray; ray._raylet.GcsClient(address=sys.argv[1])"

_START_FIX = (
    "start Ray on this machine and the others, with the same versions and RAY_AUTH_TOKEN (docs/guides/cluster.md), or"
    " set rollout.ray.address=local"
)
_RESTART_FIX = (
    "restart Ray on all of its machines (docs/guides/cluster.md), then repeat the command with Ray's address and, for"
    " a run, --resume"
)


def import_ray() -> Any:
    """Import Ray. Raises `PrerequisiteError` if not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # without it, a cluster started here reports usage
    # 0: no monitor. When memory runs out, the kernel ends a guest, where Ray would end an actor
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    require_extra("ray", "rollout.executor=ray")
    import ray

    return ray


def find_head(address: str) -> str | None:
    """HOST:PORT of the cluster's head; None for ``local``, a cluster to start here.

    ``auto`` is ``RAY_ADDRESS``, or else this machine's newest cluster. Raises `PrerequisiteError` if nothing listens.
    """
    ray = import_ray()
    try:
        head_address: str | None = ray._private.services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise PrerequisiteError(
            f"cannot join the Ray cluster {address}: {format_on_one_line(error)}", fix=_START_FIX
        ) from None
    if head_address is not None:
        check_listens(head_address)
    return head_address


@asynccontextmanager
async def connect_ray(address: str) -> AsyncIterator[Any]:
    """Connect Ray until exit, unless it is already connected. Raises `PrerequisiteError`."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    head_address = await asyncio.to_thread(find_head, address)
    if head_address is not None:
        await _check_answers(head_address)
    try:
        # in a thread, where it does not replace the handler of SIGTERM
        await asyncio.to_thread(
            ray.init,
            address=head_address or "local",
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise PrerequisiteError(
            f"cannot join the Ray cluster {address}: {format_on_one_line(error)}", fix=_START_FIX
        ) from error
    try:
        yield ray
    except BaseException:
        await _leave_cluster(ray, ExitCode.RUN_FAILED)
        raise
    else:
        await _leave_cluster(ray, ExitCode.DONE)


async def _leave_cluster(ray: Any, code: ExitCode) -> None:
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    await asyncio.to_thread(leaving.join, LEAVE_SECONDS)
    if leaving.is_alive():  # Ray would wait for the head, or crash
        atexit.register(_exit_process, code)


def _exit_process(code: ExitCode) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def watch_head(ray: Any) -> None:
    """Raise `RunError` after `GONE_SECONDS` without a listener at the head, or `ANSWER_SECONDS` without an answer."""
    # Ray ends the process a minute after it lost the head, without an exception, and waits for one that hangs
    address = ray.get_runtime_context().gcs_address
    client = ray._private.worker.global_worker.gcs_client
    listened = answered = time.monotonic()
    while True:
        try:
            await asyncio.to_thread(check_listens, address)
            listened = time.monotonic()
            await asyncio.to_thread(client.internal_kv_exists, b"any", namespace=b"", timeout=LISTEN_SECONDS)
            answered = time.monotonic()
        except PrerequisiteError as error:
            if time.monotonic() - listened >= GONE_SECONDS:
                raise RunError(f"the head of the Ray cluster at {address} is gone: {error}", fix=_RESTART_FIX) from None
        except ray.exceptions.RayError as error:
            if time.monotonic() - answered >= ANSWER_SECONDS:
                raise RunError(
                    f"the head of the Ray cluster at {address} does not answer: {format_on_one_line(error)}",
                    fix=_RESTART_FIX,
                ) from None
        await asyncio.sleep(GONE_SECONDS / 10)


def check_listens(address: str) -> None:
    """Raise `PrerequisiteError` without a listener; Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTEN_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise PrerequisiteError(f"nothing listens at the Ray address {address}: {error}", fix=_START_FIX) from None


async def _check_answers(address: str) -> None:
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-c", _ASK_HEAD, address)
    process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=pipe)
    stderr = b"no answer"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            _, stderr = await process.communicate()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        problem = (stderr.decode("utf-8", "replace").strip().splitlines() or ["no answer"])[-1][:300]
        raise PrerequisiteError(f"{address} is not the head of a working Ray cluster: {problem}", fix=_START_FIX)


def format_on_one_line(error: Exception) -> str:
    """Ray's message on one line, without ids, so that repeats have equal texts.

    >>> format_on_one_line(RuntimeError("The actor died.\\n\\tpid: 7\\nIts node was\\n\\nterminated."))
    'RuntimeError: The actor died. Its node was terminated.'
    """
    lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
    text = re.sub(r"pid=\d+, |\b[0-9a-f]{16,}\b", "", " ".join(filter(None, lines)))
    return f"{type(error).__name__}: {text if len(text) <= 600 else text[:300] + ' ... ' + text[-300:]}"
