"""A scripted agent and model endpoint for exams and tests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

from coderepairrl.agents.chat import Chat, LimitReached, Message
from coderepairrl.agents.tools import command_names
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.types import AgentReport, Endpoint, Limits, Task, ToolCall


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


Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Scripted response to one request.

    `calls` are ``(name, arguments)``, the arguments a mapping or raw text. `tokens`, the total of ``usage``, is by
    default a quarter of the characters.
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
            return web.Response(body=_encode_stream(completion), content_type="text/event-stream")
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


def _encode_stream(completion: dict[str, Any]) -> bytes:
    usage, [choice] = completion.pop("usage"), completion.pop("choices")
    message, reason = choice.pop("message"), choice.pop("finish_reason")
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    delta = {"choices": [{**choice, "delta": message, "finish_reason": None}]}
    ended = {"choices": [{**choice, "delta": {}, "finish_reason": reason}]}
    chunks = [delta, ended, {"choices": [], "usage": usage}]
    events = [json.dumps({**completion, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
