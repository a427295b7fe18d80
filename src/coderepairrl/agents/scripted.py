"""A scripted agent, model endpoint and folder (NO isolation) for exams and tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from aiohttp import web

from coderepairrl.agents.chat import Chat, LimitReached, Message
from coderepairrl.agents.tools import command_names
from coderepairrl.errors import SandboxFault
from coderepairrl.processes.hostgit import git
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Agent, Sandbox, SandboxBackend
from coderepairrl.types import AgentReport, Endpoint, ExecResult, Limits, Task, ToolCall


@dataclass(frozen=True, slots=True)
class Say:
    """Call the model with `text` as the next user message."""

    text: str
    max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Shell:
    """Run a bash command in the sandbox."""

    cmd: str
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Write:
    """Write a whole file."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Pause."""

    seconds: float


Action = Say | Shell | Write | Wait
Script = Sequence[Action] | Callable[[Task], Sequence[Action]]


class ScriptedAgent(Agent):
    """Performs `script`, a list of actions or a function of the task.

    A limit of the gateway ends the script and is reported; errors of actions are raised.
    """

    name = "scripted"
    placement: Literal["host", "sandbox"] = "host"

    def __init__(self, script: Script = ()) -> None:
        self.script = script

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Perform the script. Raises `GatewayFault`."""
        history: list[Message] = [{"role": "user", "content": task.prompt}]
        calls: list[ToolCall] = []
        turn = -1
        async with Chat(endpoint, {}) as chat:
            for action in self.script(task) if callable(self.script) else self.script:
                started = time.monotonic()
                if isinstance(action, Say):
                    history.append({"role": "user", "content": action.text})
                    try:
                        reply = await chat.complete(history, (), action.max_tokens, endpoint.limits.seconds)
                    except LimitReached as reached:
                        return AgentReport(reached.limit, tuple(calls))
                    history.append(reply.message)
                    turn += 1
                    continue
                ok, size = await _perform(action, sandbox)
                command = " ".join(command_names(action.cmd)) if isinstance(action, Shell) else ""
                seconds = time.monotonic() - started
                name = type(action).__name__.lower()
                calls.append(ToolCall(turn, name, str(asdict(action)), ok, size, seconds, command))
        return AgentReport("submitted", tuple(calls))


async def _perform(action: Action, sandbox: Sandbox) -> tuple[bool, int]:
    if isinstance(action, Shell):
        done = await sandbox.exec(["bash", "-c", action.cmd], timeout=action.timeout)
        return done.ok, len(done.output)
    if isinstance(action, Write):
        await sandbox.write(action.path, action.text.encode())
    elif isinstance(action, Wait):
        await asyncio.sleep(action.seconds)
    return True, 0


_ENVIRONMENT = {"PATH": os.defpath, "HOME": "/nonexistent", "LC_ALL": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1"}
_IDENTITY = ("-c", "user.name=exam", "-c", "user.email=exam@localhost")


class FolderSandbox:
    """A git repository of `files`. Commands run as ordinary child processes."""

    def __init__(self, workdir: Path, files: Mapping[str, bytes]) -> None:
        self.workdir = str(workdir)
        self._root = workdir.resolve()
        for name, data in files.items():
            (workdir / name).parent.mkdir(parents=True, exist_ok=True)
            (workdir / name).write_bytes(data)
        git("init", "-q", "-b", "main", self.workdir)
        self._git("-c", "core.autocrlf=false", "add", "-A")
        self._git(*_IDENTITY, "commit", "-q", "--allow-empty", "-m", "task")
        self._base = self._git("rev-parse", "HEAD").decode().strip()

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_bytes: int = 1 << 20,
        cwd: str | None = None,
    ) -> ExecResult:
        """Run `argv` in a new session, killed at the end."""
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self._root / (cwd or "."),
            env={**_ENVIRONMENT, **(env or {})},
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        output = bytearray()
        timed_out = truncated = False
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(stdin)
                    process.stdin.close()
                while data := await process.stdout.read(1 << 16):
                    truncated = truncated or len(output) + len(data) > max_bytes
                    output += data[: max_bytes - len(output)]
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await process.wait()
        code = 128 - code if code < 0 else code
        return ExecResult(code, bytes(output), timed_out, truncated, time.monotonic() - started)

    async def read(self, path: str) -> bytes:
        """Read a file of the repository."""
        return self._resolve_inside(path).read_bytes()

    async def write(self, path: str, data: bytes, *, follow: bool = True) -> None:
        """Replace or create a file. Raises `SandboxFault` without `follow`: this class cannot refuse links."""
        if not follow:
            raise SandboxFault("a plain folder cannot refuse symbolic links: grade in a sandbox")
        target = self._resolve_inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def reach(self, address: str) -> str:
        """Raise `SandboxFault`: no bridge is needed, since commands share the host's network."""
        raise SandboxFault("a plain folder has no bridge: its commands reach the host's loopback directly")

    async def diff(self) -> bytes:
        """Diff against the first commit, including new and committed files."""
        self._git("add", "-A", "-f")
        return self._git("diff", "--cached", "--binary", self._base)

    def _resolve_inside(self, path: str) -> Path:
        target = (self._root / path).resolve()
        if not target.is_relative_to(self._root):
            raise PermissionError(f"{path} is outside")
        return target

    def _git(self, *arguments: str) -> bytes:
        return git(*arguments, folder=self._root / ".git", tree=self._root)


class FolderBackend(SandboxBackend):
    """Opens a copy of a task's folder as a `FolderSandbox`."""

    name = "folder"

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[FolderSandbox]:
        """Create a temporary repository, removed on exit."""
        with scratch("folder") as folder:
            ignored = shutil.ignore_patterns(".git")  # git would run programs that its settings name
            files = shutil.copytree(task.workspace.removeprefix("dir:"), Path(folder, "repo"), ignore=ignored)
            yield FolderSandbox(files, {})


Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Scripted response to one request.

    `calls` are ``(name, arguments)``, the arguments a mapping or raw text. `tokens` in `usage` is by default a quarter
    of the characters.
    """

    text: str | None = None
    calls: tuple[tuple[str, Any], ...] = ()
    tokens: int | None = None
    status: int = 200
    code: str = ""
    """Error code, with a `status` other than 200."""
    delay: float = 0.0
    crrl: Mapping[str, Any] | None = None
    """Fields that our gateway adds to a reply or an error."""


Behaviour = Callable[[Request], Answer]


@dataclass
class ScriptedEndpoint:
    """Serves ``/s/KEY/v1/chat/completions`` on a loopback port and records requests.

    `script` is a list of answers, the last repeated, or a function of the request.
    """

    script: Sequence[Answer] | Behaviour
    requests: list[Request] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)

    def endpoint(self, limits: Limits | None = None) -> Endpoint:
        """Address and limits for the agent."""
        return Endpoint(f"http://127.0.0.1:{self._port}/s/KEY/v1", "KEY", "policy", limits or Limits())

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/s/KEY/v1/chat/completions", self._answer_chat)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer_chat(self, http: web.Request) -> web.StreamResponse:
        request: Request = await http.json()
        self.requests.append(request)
        self.authorizations.append(http.headers.get("Authorization", ""))
        if callable(self.script):
            answer = self.script(request)
        else:
            answer = self.script[min(len(self.requests), len(self.script)) - 1]
        await asyncio.sleep(answer.delay)
        if answer.status != 200:
            error = {"message": "scripted", "type": "invalid_request_error", "code": answer.code or None}
            return web.json_response({"error": error, "crrl": answer.crrl}, status=answer.status)
        completion = _build_completion_body(request, answer, len(self.requests))
        if request.get("stream"):
            return web.Response(body=_stream(completion), content_type="text/event-stream")
        return web.json_response(completion)


def _build_completion_body(request: Request, answer: Answer, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                },
            }
            for index, (name, arguments) in enumerate(answer.calls)
        ]
    sampled = len(json.dumps(message)) // 4
    tokens = len(json.dumps(request["messages"])) // 4 + sampled if answer.tokens is None else answer.tokens
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if answer.calls else "stop"}],
        "usage": {"prompt_tokens": tokens - sampled, "completion_tokens": sampled, "total_tokens": tokens},
        "crrl": answer.crrl,
    }


def _stream(completion: dict[str, Any]) -> bytes:
    usage, [choice] = completion.pop("usage"), completion.pop("choices")
    message, reason = choice.pop("message"), choice.pop("finish_reason")
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    delta = {"choices": [{**choice, "delta": message, "finish_reason": None}]}
    ended = {"choices": [{**choice, "delta": {}, "finish_reason": reason}]}
    chunks = [delta, ended, {"choices": [], "usage": usage}]
    events = [json.dumps({**completion, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
