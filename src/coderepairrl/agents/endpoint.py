"""A scripted OpenAI-compatible HTTP server, for exams and tests of agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from coderepairrl.types import Endpoint, Limits

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
    """Error code of an answer whose `status` is none of success."""
    delay: float = 0.0
    crrl: Mapping[str, Any] | None = None
    """What our own gateway adds to a reply or an error."""


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
        app.router.add_post("/s/KEY/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _chat(self, http: web.Request) -> web.StreamResponse:
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
        completion = _completion(request, answer, len(self.requests))
        if request.get("stream"):
            return web.Response(body=_streamed(completion), content_type="text/event-stream")
        return web.json_response(completion)


def _completion(request: Request, answer: Answer, number: int) -> dict[str, Any]:
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


def _streamed(completion: dict[str, Any]) -> bytes:
    usage, [choice] = completion.pop("usage"), completion.pop("choices")
    message, reason = choice.pop("message"), choice.pop("finish_reason")
    for index, call in enumerate(message.get("tool_calls", ())):
        call["index"] = index
    delta = {"choices": [{**choice, "delta": message, "finish_reason": None}]}
    ended = {"choices": [{**choice, "delta": {}, "finish_reason": reason}]}
    chunks = [delta, ended, {"choices": [], "usage": usage}]
    events = [json.dumps({**completion, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
