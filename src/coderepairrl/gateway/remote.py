"""Somebody else's model behind the gateway: an OpenAI-compatible endpoint, for evaluation and collection.

Whatever dialect an agent speaks, the remote is asked in Chat Completions. Text comes back, without the ids and logprobs
that training needs: every turn is masked as ``relayed``. The remote is asked again, with growing pauses, while it is
busy or cannot be reached and nothing of its reply has been passed on; what remains is a `RemoteFault`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp
from pydantic import Field, ValidationError

from coderepairrl.errors import RemoteFault, UsageError
from coderepairrl.gateway.body import Lenient
from coderepairrl.gateway.call import Usage
from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.gateway.tree import Placement, TextTree
from coderepairrl.gateway.workers import Desk
from coderepairrl.tokens import Delta, FunctionCall, Reply
from coderepairrl.types import Finish, Origin, Sampling, TokenSpan, VersionRange

FORWARDED = ("tool_choice", "parallel_tool_calls", "reasoning_effort")
"""Wishes of Chat Completions that the remote is told of; and the format of replies, from every dialect."""
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses after which the same request may succeed."""
MAX_ANSWER = 64 << 20
"""Bytes of an answer."""
MAX_PAUSE = 60.0
"""Seconds: a remote that asks for more (``retry-after``) is not waited for."""
CONNECT_SECONDS = 30.0
_SCRUBBED = 8
"""Keys of at least so many characters are cut out of whatever the remote says."""
_UNTOLD = {"prompt_tokens": 0, "completion_tokens": 0}


class _Function(Lenient):
    name: str | None = None
    arguments: str | None = None


class _Call(Lenient):
    index: int | None = None
    id: str | None = None
    function: _Function


class _Said(Lenient):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Lenient):
    message: _Said | None = None
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: list[int] | None = None


class _Cached(Lenient):
    cached_tokens: int | None = None


class _Thoughts(Lenient):
    reasoning_tokens: int | None = None


class _Used(Lenient):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Thoughts | None = None


class _Answer(Lenient):
    id: str | None = None
    model: str | None = None
    choices: list[_Choice] = Field(default_factory=list)
    usage: _Used | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


class _Busy(Exception):
    """It may work a little later, `after` seconds at least."""

    def __init__(self, fault: RemoteFault, after: float = 0.0) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.after = after


class Remote:
    """The model `model` at `url`, the base of an OpenAI-compatible API, as the source of a gateway's replies.

    Args:
        url: ends in ``/v1`` with most.
        model: its name there; not needed where there is only one.
        key: is sent to the remote, and cut out of whatever comes back.
        context: longest sequence in tokens; as the remote has it, if it says so, where None.
        attempts: how often one request is sent at most.
        backoff: seconds before the second attempt; doubled before each further one.
        max_tokens_name: ``max_completion_tokens`` for models that insist on it.
        extra_body: added to every request.

    Entering it asks for the remote's models. Raises `RemoteFault` when it is not there or refuses the key, and
    `UsageError` when no `model` is named and there is not just one.
    """

    masked = "relayed"
    counts = False

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        key: str = "",
        context: int | None = None,
        attempts: int = 5,
        backoff: float = 0.5,
        max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.context = context
        self.attempts = attempts
        self.backoff = backoff
        self._max_tokens_name = max_tokens_name
        self._extra_body = extra_body or {}
        self._key = key.encode()

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self._key.decode() or 'none'}"}  # some servers insist on any
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._client = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            self._choose(await self._cards())
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    @property
    def writer(self) -> None:
        """Nobody here: the remote writes them."""

    def tree(self, desk: Desk) -> TextTree:
        """Of text only."""
        return TextTree(desk)

    def forwarded(self, request: Request) -> Mapping[str, Any]:
        """What Chat Completions has words for, of a client that speaks it, and the format that any client asks for."""
        names = (*(FORWARDED if request.dialect == "chat" else ()), "response_format")
        return {name: request.wishes[name] for name in names if name in request.wishes}

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> Relayed:
        """A reply to the conversation as the client has it. The seed is not sent: few would honour it."""
        return Relayed(self, request, replace(sampling, stop=(*sampling.stop, *request.stop)))

    async def health(self) -> Mapping[str, float]:
        """No counters. Raises `RemoteFault` when it is not there."""
        await self._cards()
        return {}

    def body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """The request in Chat Completions."""
        off = Sampling()
        shaped = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
        return {
            "model": self.model,
            "messages": [_message(message) for message in request.messages],
            **({"tools": list(request.tools)} if request.tools else {}),
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            "temperature": sampling.temperature,
            **{name: value for name, value in shaped.items() if value != getattr(off, name)},
            self._max_tokens_name: sampling.max_tokens,
            **({"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}),
            **self.forwarded(request),
            **self._extra_body,
        }

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[_Answer, None]:
        """The answers to one request: one, or a stream. Raises `_Busy`, `RemoteFault`, `ApiError`."""
        raw = json.dumps(body).encode(errors="surrogatepass")
        headers = {"Content-Type": "application/json"}
        url = f"{self.url}/chat/completions"
        try:
            async with self._client.post(url, data=raw, headers=headers, allow_redirects=False) as answer:
                streamed = answer.content_type == "text/event-stream"
                async with aclosing(self._lines(answer) if streamed and answer.ok else self._whole(answer)) as pieces:
                    async for piece in pieces:
                        if answer.status != 200:
                            raise self._refusal(answer, piece)
                        yield self._read(piece)
        except (aiohttp.ClientError, OSError) as error:
            raise _Busy(self._unreachable(error)) from error

    async def _whole(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        data = bytearray()
        async for piece in answer.content.iter_any():
            data += self._bounded(piece, len(data))
        yield self._scrubbed(bytes(data))

    async def _lines(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events up to ``[DONE]``, which some servers leave out."""
        rest, total = b"", 0
        async for piece in answer.content.iter_any():
            *lines, rest = (rest + self._bounded(piece, total)).split(b"\n")
            total += len(piece)
            for data in filter(None, map(_data, lines)):
                if data == b"[DONE]":
                    return
                yield self._scrubbed(data)
        if _is_json(last := _data(rest)):  # the last line may lack its end; a part of an event is none
            yield self._scrubbed(last)

    def _bounded(self, piece: bytes, before: int) -> bytes:
        if before + len(piece) > MAX_ANSWER:
            raise RemoteFault(f"{self.url} answers with more than {MAX_ANSWER >> 20} MiB")
        return piece

    def _scrubbed(self, data: bytes) -> bytes:
        """Without the key, which no agent and no log is to see."""
        return data.replace(self._key, b"***") if len(self._key) >= _SCRUBBED else data

    def _read(self, data: bytes) -> _Answer:
        try:
            answer = _Answer.model_validate_json(data)
        except ValidationError as error:
            said = data[:200].decode(errors="replace")
            raise RemoteFault(f"{self.url} answers what is no chat completion: {said}") from error
        if answer.error is not None:
            raise RemoteFault(f"{self.url} breaks off: {json.dumps(answer.error)[:500]}")
        return answer

    def _refusal(self, answer: aiohttp.ClientResponse, data: bytes) -> Exception:
        said = data[:500].decode(errors="replace").strip()
        if answer.status in (400, 413, 422) and _too_long(said):
            return ApiError(400, "context_length_exceeded", said, param="messages", limit="context")
        fixes = {
            401: "check the key (engine.options.key_env names its variable)",
            403: "check the key, and what it may use",
            404: "check the URL, which ends in /v1 with most, and the model's name",
        }
        fault = RemoteFault(f"{self.url} answered {answer.status}: {said}", fix=fixes.get(answer.status, ""))
        if answer.status not in BUSY:
            return fault
        after = _seconds(answer.headers.get("Retry-After", ""), answer.headers.get("Date", ""))
        return _Busy(fault, after) if after <= MAX_PAUSE else fault

    def _unreachable(self, error: Exception) -> RemoteFault:
        return RemoteFault(
            f"{self.url} cannot be reached: {_why(error)}", fix="check the URL; it ends in /v1 with most"
        )

    async def _cards(self) -> list[dict[str, Any]]:
        """What it says of its models, which is nothing with some. Raises `RemoteFault`."""
        try:
            async with (
                asyncio.timeout(CONNECT_SECONDS),
                self._client.get(f"{self.url}/models", allow_redirects=False) as answer,
            ):
                data = b"".join([piece async for piece in self._whole(answer)])
                if answer.status in (401, 403):
                    raise self._refusal(answer, data)
        except (aiohttp.ClientError, OSError) as error:  # which a timeout is, too
            raise self._unreachable(error) from error
        try:
            cards = json.loads(data)["data"] if answer.ok else []
            return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (ValueError, LookupError, TypeError):
            return []

    def _choose(self, cards: list[dict[str, Any]]) -> None:
        known = {card["id"]: card for card in cards}
        if not self.model and len(known) != 1:
            some = ", ".join(sorted(known)[:12]) or "it does not say which"
            raise UsageError(
                f"{self.url} serves {len(known) or 'unknown'} models", fix=f"name one with --model-name: {some}"
            )
        self.model = self.model or next(iter(known))
        longest = known.get(self.model, {}).get("max_model_len")
        if self.context is None and isinstance(longest, int):
            self.context = longest


@dataclass
class _Heard:
    """What one attempt has brought so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)
    """Where in `calls` is the newest of each number that the server gave."""
    finish: str = ""
    whole: bool = False
    """It came all at once, and is passed on when it has been read to the end."""
    stopped_by: str = ""
    used: _Used | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def take(self, answer: _Answer) -> list[Delta]:
        """Add what `answer` says; what of a stream can be passed on at once."""
        self.used = answer.usage or self.used
        for name in ("id", "model", "prompt_token_ids"):
            if value := getattr(answer, name):
                self.about[name] = value
        deltas = []
        for choice in answer.choices[:1]:
            self.whole = choice.message is not None
            said = choice.message or choice.delta or _Said()
            if thoughts := said.reasoning_content or said.reasoning or "":
                self.reasoning += thoughts
                deltas.append(Delta(reasoning=thoughts))
            if words := (said.content or "") + (said.refusal or ""):
                self.content += words
                deltas.append(Delta(content=words))
            for call in said.tool_calls or ():
                self._call(call)
            if choice.token_ids:
                self.about["token_ids"] = [*self.about.get("token_ids", ()), *choice.token_ids]
            if self.whole or choice.finish_reason:
                self.finish = choice.finish_reason or "stop"
            if isinstance(choice.stop_reason, str):
                self.stopped_by = choice.stop_reason
        return [] if self.whole else deltas

    def _call(self, piece: _Call) -> None:
        """A tool call, or a piece of one: some servers number them, from 0 or 1; others only give a new one an id."""
        newest = len(self.calls) - 1
        at = newest if piece.index is None else self.places.get(piece.index, -1)
        if at < 0 or (piece.id and self.calls[at]["id"] not in ("", piece.id)):
            self.calls.append({"id": "", "name": "", "arguments": ""})
            at = newest + 1
        if piece.index is not None:
            self.places[piece.index] = at
        call = self.calls[at]
        call["id"] = call["id"] or piece.id or ""
        call["name"] += piece.function.name or ""
        call["arguments"] += piece.function.arguments or ""


class Relayed:
    """One reply of a `Remote`."""

    def __init__(self, remote: Remote, request: Request, sampling: Sampling) -> None:
        self.sampling = sampling
        self.versions: list[VersionRange] = []
        self.out_of_time = False
        self._remote = remote
        self._body = remote.body(request, sampling)
        self._heard = _Heard()
        self._passed_on = False

    async def run(self, deadline: float, publish: Callable[[list[Delta]], None]) -> None:
        """Ask until there is a whole reply. Raises `RemoteFault` and, for a full context, `ApiError`."""
        clock = asyncio.timeout_at(deadline)
        try:
            async with clock:
                pause = self._remote.backoff
                for left in reversed(range(self._remote.attempts)):
                    try:
                        await self._attempt(publish)
                        return
                    except _Busy as busy:
                        wait = max(pause, busy.after)
                        late = asyncio.get_running_loop().time() + wait >= deadline
                        if not left or self._passed_on or late:  # what no remote said is no reply of a model
                            raise busy.fault from busy
                        await asyncio.sleep(wait)
                        pause *= 2
        except TimeoutError:
            if not clock.expired():
                raise
            self.out_of_time = True

    async def _attempt(self, publish: Callable[[list[Delta]], None]) -> None:
        self._heard = heard = _Heard()
        async with aclosing(self._remote.ask(self._body)) as answers:
            async for answer in answers:
                deltas = heard.take(answer)
                self._passed_on = self._passed_on or bool(deltas)
                publish(deltas)
        if not heard.finish:
            cut = RemoteFault(f"{self._remote.url} broke off in the middle of a reply")
            raise _Busy(cut)
        if heard.used is None:
            raise RemoteFault(
                f"{self._remote.url} does not say how many tokens a reply took",
                fix="limits and reports need it: use a server that sends `usage`, in streams, too",
            )

    @property
    def finish(self) -> Finish:
        """As the remote says."""
        return Finish.LENGTH if self.out_of_time or self._heard.finish == "length" else Finish.STOP

    @property
    def stopped_by(self) -> str:
        """Where the remote tells, which few do."""
        return self._heard.stopped_by if self._heard.stopped_by in self.sampling.stop else ""

    @property
    def usage(self) -> Usage:
        """As the remote says."""
        used = self._heard.used
        if used is None:
            return Usage(0, 0, 0, 0, 0)
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else 0
        thoughts = used.completion_tokens_details.reasoning_tokens if used.completion_tokens_details else 0
        total = used.prompt_tokens + used.completion_tokens
        return Usage(used.prompt_tokens, cached or 0, used.completion_tokens, thoughts or 0, total)

    @property
    def remote(self) -> dict[str, Any]:
        """`Turn.remote`."""
        heard = self._heard
        usage = heard.used.model_dump(exclude_none=True) if heard.used else _UNTOLD
        return {"url": self._remote.url, **heard.about, "finish_reason": heard.finish, "usage": usage}

    def close(self) -> tuple[Reply, list[Delta]]:
        """The whole reply; tool calls are passed on at its end, and only if it has one."""
        heard = self._heard
        rest = [Delta(reasoning=heard.reasoning), Delta(content=heard.content)] if heard.whole else []
        said = heard.calls if heard.finish else []
        calls = tuple(FunctionCall(call["name"], call["arguments"] or "{}", call["id"]) for call in said)
        return Reply(heard.content, heard.reasoning, calls), [*rest, *(Delta(call=call) for call in calls)]

    def spans(self) -> tuple[TokenSpan, TokenSpan]:
        """Both empty: a remote does not say which ids it sampled with which logprobs."""
        nothing = TokenSpan((), Origin.POLICY)
        return nothing, nothing


def _why(error: Exception) -> str:
    """What a connection failed of, in words that need no Python, and without what was sent."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not valid"
    if isinstance(cause, socket.gaierror):
        return "nobody knows this host"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it broke off in the middle of an answer"
    return "it hung up" if isinstance(error, aiohttp.ServerDisconnectedError) else "it does not answer in HTTP"


def _message(message: Message) -> Message:
    """As servers want it that refuse an empty text beside tool calls."""
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def _data(line: bytes) -> bytes:
    """What a line of server-sent events says; nothing for comments and other fields."""
    return line[len(b"data:") :].strip() if line.startswith(b"data:") else b""


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _too_long(said: str) -> bool:
    low = said.lower()
    return any(text in low for text in ("context_length_exceeded", "context length", "context window", "too long"))


def _seconds(retry_after: str, date: str) -> float:
    """A ``Retry-After`` in seconds; 0 for none, or one that nobody understands.

    One that names a time means the server's clock, which said `date` (``Date``): ours may be another.
    """
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - parsedate_to_datetime(date)).total_seconds())
    except (ValueError, TypeError):  # no date, or one with and one without a zone
        return 0.0
