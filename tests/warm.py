"""`crrl` as a fork of a process that has imported it: the same program, without the seconds that its imports take.

A run's three processes import torch and transformers for 6 CPU-seconds, and most runs of tests compute for one. Here
the controller is forked from a process that has imported everything and run nothing, and engine and learner from the
controller. So are scripts (``[sys.executable, "SCRIPT.py", ...]``) with the children that they start. Parents, signals,
descriptors, folder, environment and command lines are those of started programs. Runs whose processes are started as
users start them: some of `e2e/test_train.py`, ``crrl check crash`` and the tutorials.

Where a test is the controller itself, its engine, learner and gateway's workers are forked from that process, too,
which then is their parent; tests marked `started` have them started.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import random
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

CRRL = [sys.executable, "-m", "coderepairrl.cli"]
_CHILD = [sys.executable, "-m", "coderepairrl.processes.child"]
_IMPORTED = (
    *("coderepairrl.stages", "coderepairrl.apps.fix", "coderepairrl.apps.hello", "coderepairrl.apps.serve"),
    *("coderepairrl.cli", "coderepairrl.learn.learner"),
    "coderepairrl.engines.tiny.server",
    *("coderepairrl.gateway.worker", "coderepairrl.agents.nano", "coderepairrl.sandbox.sandlock"),
    *("renderers.qwen3", "renderers.reasoning", "transformers.models.qwen3.modeling_qwen3"),
)
_WORDS = 4000
"""Bytes of a command line that are shown (`ps`)."""
_STATUS = struct.Struct("i")


class Popen(subprocess.Popen[Any]):
    """A command ``[*CRRL, ...]``, a script or a child of `Child.spawn`, forked from this test process's `_ready` one;
    another program is started."""

    _status: socket.socket | None = None

    def _execute_child(self, *given: Any, **named: Any) -> None:
        call = _named(given, named)
        words = call["args"]
        if isinstance(words, str) or not (list(words[:3]) == CRRL or _is_script(words) or _forkable(words)):
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        ours, theirs = socket.socketpair()
        files = _files(call)
        keep = [int(fd) for fd in call["pass_fds"]]
        env = dict(os.environ if call["env"] is None else call["env"])
        request = {"words": words, "cwd": os.fspath(call["cwd"] or Path.cwd()), "env": env, "keep": keep}
        request["new_session"] = call["start_new_session"]
        with theirs:
            socket.send_fds(_ready(), [json.dumps(request).encode()], [*files, theirs.fileno(), *keep])
        self._status = ours
        (self.pid,) = _STATUS.unpack(ours.recv(_STATUS.size))
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in _PIPES))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            ended: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return ended
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        with self._status:
            return self.pid, _STATUS.unpack(self._status.recv(_STATUS.size))[0]

    def poll(self) -> int | None:
        if self._status is None:
            return super().poll()
        with self._waitpid_lock:
            if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                self._handle_exitstatus(ended[1])
        return self.returncode


def run(
    command: Sequence[str], *, capture_output: bool = False, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of such a command."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


class _Job:
    """As much of `asyncio.subprocess.Process` as `stages.jobs` needs, of a forked one."""

    def __init__(self, process: Popen) -> None:
        self._process = process
        self.terminate, self.kill = process.terminate, process.kill

    async def wait(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.02)
        return code


async def job(*words: str, **options: Any) -> _Job:
    """`asyncio.create_subprocess_exec` of a run that the test process starts."""
    return _Job(Popen(words, **options))


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _named(given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    return inspect.signature(subprocess.Popen._execute_child).bind(None, *given, **named).arguments  # type: ignore[attr-defined]


def _files(call: Mapping[str, Any]) -> list[int]:
    """Descriptors of standard input, output and errors: this process's where none are given."""
    given = call["p2cread"], call["c2pwrite"], call["errwrite"]
    return [wanted if wanted >= 0 else fd for fd, wanted in enumerate(given)]


@functools.cache
def _ready() -> socket.socket:
    """The connection to a process that is ready to fork; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), " " * _WORDS]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    atexit.register(_hang_up, ours, process)
    return ours


def _hang_up(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait()


class _Forking(subprocess.Popen[bytes]):
    """A child of the controller (jobs are some, too), forked from it; a program that is no module of ours is
    started."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        call = _named(given, named)
        words = call["args"]
        if isinstance(words, str) or not _forkable(words):
            super()._execute_child(*given, **named)  # type: ignore[misc]
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = _fork()
        if not self.pid:
            keep = {int(fd): int(fd) for fd in call["pass_fds"]}
            env = dict(os.environ if call["env"] is None else call["env"])
            cwd = os.fspath(call["cwd"] or Path.cwd())
            _become(words, cwd, env, _files(call), keep, new_session=call["start_new_session"])
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in _PIPES))


def _forkable(words: Sequence[str]) -> bool:
    return list(words[:3]) == _CHILD and words[4] in _IMPORTED


def _is_script(words: Sequence[str]) -> bool:
    return words[0] == sys.executable and words[1].endswith(".py")


def _fork() -> int:
    """`os.fork`. Python 3.12 warns of threads whose locks a child might wait for: ours begins anew with `_become`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        return os.fork()


def _become(
    words: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    standard: Sequence[int],
    keep: Mapping[int, int] = MappingProxyType({}),
    *,
    new_session: bool = False,
) -> NoReturn:
    """Be the program that ``words`` would start, in this process, which was just forked.

    It has the descriptors `keep`: by each number there, the file that this process has by its value."""
    code = 1
    try:
        _prepare(words, cwd, env, standard, keep, new_session=new_session)
        _run(words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(
    words: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    standard: Sequence[int],
    keep: Mapping[int, int],
    *,
    new_session: bool,
) -> None:
    """What a program is given before it runs: signals, descriptors, folder, environment, command line."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if new_session:
        os.setsid()
    wanted = {**keep, **dict(enumerate(standard))}
    above = 1 + max([*wanted, *wanted.values()])  # no number is taken before its file was moved
    moved = {fd: fcntl.fcntl(file, fcntl.F_DUPFD, above) for fd, file in wanted.items()}
    for fd, file in moved.items():
        os.dup2(file, fd)
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if fd not in wanted:
            try:
                os.close(fd)
            except OSError:  # that of the list itself
                continue
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _show(words)
    random.seed()
    tempfile.tempdir = None
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # a folder that the parent made is for it to remove
    path = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [*([] if env.get("PYTHONSAFEPATH") else [cwd]), *filter(None, path)]


def _run(words: Sequence[str]) -> None:
    if _is_script(words):
        sys.argv[:] = words[1:]
        sys.path.insert(0, str(Path(words[1]).parent))
        runpy.run_path(words[1], run_name="__main__")
        return
    if words[2] == "coderepairrl.cli":
        sys.argv[:] = words[2:]
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        return
    asyncio._set_running_loop(None)
    importlib.import_module("coderepairrl.processes.child").die_with(int(words[3]))
    sys.argv[:] = words[4:]
    sys.modules[words[4]].main()


def _show(words: Sequence[str]) -> None:
    """Have /proc show the command line `words`, in the place of this process's first one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(words).encode()[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _serve(requests: socket.socket) -> None:
    """Fork a process for each request, and say how it ended."""
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                ended: Callable[[], None] = key.data
                selector.unregister(key.fileobj)
                ended()
                continue
            data, files, _flags, _address = socket.recv_fds(requests, 1 << 20, 32)
            if not data:
                return
            request = json.loads(data)
            standard, kept = files[:3], files[4:]
            words = request["words"]
            if _forkable(words):
                words[3] = str(os.getpid())
            pid = _fork()
            if not pid:
                keep = dict(zip(request["keep"], kept, strict=True))
                _become(words, request["cwd"], request["env"], standard, keep, new_session=request["new_session"])
            status = socket.socket(fileno=files[3])
            with contextlib.suppress(BrokenPipeError):
                status.sendall(_STATUS.pack(pid))
            for file in (*standard, *kept):
                os.close(file)
            process = os.pidfd_open(pid)
            selector.register(process, selectors.EVENT_READ, functools.partial(_ended, pid, process, status))


def _ended(pid: int, process: int, status: socket.socket) -> None:
    os.close(process)
    with status, contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        status.sendall(_STATUS.pack(os.waitpid(pid, 0)[1]))


def _main() -> None:
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for name in ("coderepairrl.processes.children", "asyncio.unix_events"):
        module: Any = importlib.import_module(name)
        module.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _Forking})
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)


if __name__ == "__main__":
    _main()
