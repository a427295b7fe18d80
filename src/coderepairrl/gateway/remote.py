"""Another provider's model behind the gateway, for evaluation and collection.

Every dialect is relayed as Chat Completions. Turns lack token ids and logprobs and are masked as ``relayed``. Failures
are retried until part of a reply was passed on; then they are a `RemoteFault`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Self

import aiohttp
from pydantic import ValidationError

from coderepairrl.errors import RemoteFault, UsageError
from coderepairrl.gateway.call import Usage
from coderepairrl.gateway.remote_answer import ReceivedReply, RemoteAnswer, is_json, parse_event_line
from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.gateway.tree import Placement, TextTree
from coderepairrl.tokens import Delta, FunctionCall, Reply
from coderepairrl.types import Finish, Origin, Sampling, TokenSpan, VersionRange

FORWARDED = ("tool_choice", "parallel_tool_calls", "reasoning_effort")
"""Settings that Chat Completions clients may choose; ``response_format`` of any dialect is sent, too."""
REJECTED = (400, 413, 422)
"""Statuses of requests that the remote refuses."""
BUSY = (408, 409, 425, 429, 500, 502, 503, 504, 529)
"""Statuses after which the same request may succeed."""
MAX_ANSWER = 64 << 20
"""Longest answer in bytes."""
MAX_PAUSE = 60.0
"""Seconds: a longer ``Retry-After`` ends the attempts."""
CONNECT_SECONDS = 30.0
_MIN_KEY = 8
"""Shortest key that is removed from all answers: text may contain shorter ones by chance."""
CUT = ("length", "model_length", "max_tokens", "model_context_window_exceeded")
"""Finish reasons of replies that a limit ended."""
BROKEN = ("error", "abort", "network_error", "insufficient_system_resource")
"""Finish reasons of replies that failed at the remote; these are retried."""
FILTERED = ("content_filter", "sensitive", "safety", "recitation", "prohibited_content", "blocklist", "spii")
"""Finish reasons of replies withheld by the remote's filter."""
BYTES_PER_TOKEN = 4
"""Estimate for token counts that the remote does not report."""


class RemoteRejected(RemoteFault):
    """A remote refused a request; with other messages it may answer."""


class _Retryable(Exception):
    """A failure that may pass, after `after` seconds at least."""

    def __init__(self, fault: RemoteFault, after: float = 0.0) -> None:
        super().__init__(str(fault))
        self.fault = fault
        self.after = after


class Remote:
    """An OpenAI-compatible API as source of replies.

    Args:
        model: may be empty if the remote serves only one.
        key: removed from all answers.
        context: longest sequence in tokens; None: as the remote reports.
        backoff: seconds before the second attempt, then doubled.
        max_tokens_name: ``max_completion_tokens`` for models that require it.
        extra_body: fields added to every request.

    Entering raises `RemoteFault`, and `UsageError` for an ambiguous empty `model`.
    """

    masked = "relayed"
    codec = None
    tree_type = TextTree

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
        headers = {"Authorization": f"Bearer {self._key.decode() or 'none'}"}  # some servers require the header
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._client = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            self._choose_model(await self._fetch_model_cards())
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    def forwarded_settings(self, request: Request) -> Mapping[str, Any]:
        """Settings that the remote gets: `FORWARDED` (Chat only) and ``response_format``."""
        names = (*(FORWARDED if request.dialect == "chat" else ()), "response_format")
        return {name: request.client_settings[name] for name in names if name in request.client_settings}

    def begin(self, request: Request, placement: Placement, sampling: Sampling, seed: int) -> RelayedReply:
        """Prepare a reply. Few servers use a seed, so none is sent."""
        request = replace(request, messages=placement.relayed)
        return RelayedReply(self, request, replace(sampling, stop=(*sampling.stop, *request.stop)))

    async def health(self) -> Mapping[str, float]:
        """Return no counters. Raises `RemoteFault` when unreachable."""
        await self._fetch_model_cards()
        return {}

    def build_body(self, request: Request, sampling: Sampling) -> dict[str, Any]:
        """Build a Chat Completions body."""
        defaults = Sampling()
        filters = {name: getattr(sampling, name) for name in ("top_p", "top_k", "min_p")}
        return {
            "model": self.model,
            "messages": [_with_null_content(message) for message in request.messages],
            **({"tools": list(request.tools)} if request.tools else {}),
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            "temperature": sampling.temperature,
            **{name: value for name, value in filters.items() if value != getattr(defaults, name)},
            self._max_tokens_name: sampling.max_tokens,
            **({"stream": True, "stream_options": {"include_usage": True}} if request.stream else {}),
            **self.forwarded_settings(request),
            **self._extra_body,
        }

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[RemoteAnswer, None]:
        """Yield the response or its chunks. Raises `_Retryable`, `RemoteFault`, `ApiError`."""
        raw = json.dumps(body).encode(errors="surrogatepass")
        headers = {"Content-Type": "application/json"}
        url = f"{self.url}/chat/completions"
        try:
            async with self._client.post(url, data=raw, headers=headers, allow_redirects=False) as answer:
                is_stream = answer.content_type == "text/event-stream" and answer.ok
                reading = self._read_event_data(answer) if is_stream else self._read_whole(answer)
                async with aclosing(reading) as pieces:
                    async for piece in pieces:
                        if answer.status != 200:
                            raise self._refusal_error(answer, piece)
                        yield self._parse_answer(piece)
        except (aiohttp.ClientError, OSError) as error:
            raise _Retryable(self._unreachable_fault(error)) from error

    async def _read_whole(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        data = bytearray()
        async for piece in answer.content.iter_any():
            data += self._check_length(piece, len(data))
        yield self._remove_key(bytes(data))

    async def _read_event_data(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        rest, total = b"", 0
        async for piece in answer.content.iter_any():
            *lines, rest = (rest + self._check_length(piece, total)).split(b"\n")
            total += len(piece)
            for data in filter(None, map(parse_event_line, lines)):
                if data == b"[DONE]":  # some servers omit it
                    return
                yield self._remove_key(data)
        if is_json(last := parse_event_line(rest)):  # without final newline; a truncated event is ignored
            yield self._remove_key(last)

    def _check_length(self, piece: bytes, before: int) -> bytes:
        if before + len(piece) > MAX_ANSWER:
            raise RemoteFault(f"{self.url} answers with more than {MAX_ANSWER >> 20} MiB")
        return piece

    def _remove_key(self, data: bytes) -> bytes:
        return data.replace(self._key, b"***") if len(self._key) >= _MIN_KEY else data

    def _parse_answer(self, data: bytes) -> RemoteAnswer:
        try:
            answer = RemoteAnswer.model_validate_json(data)
        except ValidationError as error:
            start = data[:200].decode(errors="replace")
            raise RemoteFault(f"{self.url} sent an answer that is not a chat completion: {start}") from error
        if answer.error:
            raise RemoteFault(f"{self.url} reported an error: {json.dumps(answer.error)[:500]}")
        return answer

    def _refusal_error(self, answer: aiohttp.ClientResponse, data: bytes) -> Exception:
        text = data[:500].decode(errors="replace").strip()
        if answer.status in REJECTED and _is_context_error(text):
            return ApiError(400, "context_length_exceeded", text, param="messages", limit="context")
        fixes = {
            401: "check the key (engine.options.key_env names its variable)",
            403: "check the key and its permissions",
            404: "check the model's name, and the URL, which usually ends in /v1",
        }
        kind = RemoteRejected if answer.status in REJECTED else RemoteFault
        fault = kind(f"{self.url} answered {answer.status}: {text}", fix=fixes.get(answer.status, ""))
        if answer.status not in BUSY:
            return fault
        after = _parse_retry_after(answer.headers.get("Retry-After", ""), answer.headers.get("Date", ""))
        return _Retryable(fault, after) if after <= MAX_PAUSE else fault

    def _unreachable_fault(self, error: Exception) -> RemoteFault:
        return RemoteFault(
            f"{self.url} cannot be reached: {_describe_connection_error(error)}",
            fix="check the URL; it usually ends in /v1",
        )

    async def _fetch_model_cards(self) -> list[dict[str, Any]]:
        try:
            async with (
                asyncio.timeout(CONNECT_SECONDS),
                self._client.get(f"{self.url}/models", allow_redirects=False) as answer,
            ):
                data = b"".join([piece async for piece in self._read_whole(answer)])
                if answer.status in (401, 403):
                    raise self._refusal_error(answer, data)
        except (aiohttp.ClientError, OSError) as error:  # includes TimeoutError
            raise self._unreachable_fault(error) from error
        try:
            cards = json.loads(data)["data"] if answer.ok else []
            return [card for card in cards if isinstance(card, dict) and isinstance(card.get("id"), str)]
        except (ValueError, LookupError, TypeError, RecursionError):
            return []

    def _choose_model(self, cards: list[dict[str, Any]]) -> None:
        cards_by_id = {card["id"]: card for card in cards}
        if not self.model and len(cards_by_id) != 1:
            names = ", ".join(sorted(cards_by_id)[:12]) or "it does not list them"
            raise UsageError(
                f"{self.url} serves {len(cards_by_id) or 'unknown'} models", fix=f"name one with --model-name: {names}"
            )
        self.model = self.model or next(iter(cards_by_id))
        longest = cards_by_id.get(self.model, {}).get("max_model_len")
        if self.context is None and isinstance(longest, int):
            self.context = longest


class RelayedReply:
    """A reply of a `Remote`."""

    def __init__(self, remote: Remote, request: Request, sampling: Sampling) -> None:
        self.sampling = sampling
        self.versions: list[VersionRange] = []
        self.out_of_time = False
        self._remote = remote
        self._body = remote.build_body(request, sampling)
        self._received = ReceivedReply()
        self._passed_on = False

    async def run(self, deadline: float, publish: Callable[[list[Delta]], None]) -> None:
        """Retry until the reply is whole. Raises `RemoteFault`, and `ApiError` for a full context."""
        clock = asyncio.timeout_at(deadline)
        try:
            async with clock:
                pause = self._remote.backoff
                for attempts_left in reversed(range(self._remote.attempts)):
                    try:
                        await self._attempt(publish)
                        return
                    except _Retryable as failure:
                        wait = max(pause, failure.after)
                        is_late = asyncio.get_running_loop().time() + wait >= deadline
                        # an outage is a fault, even when time is up
                        if not attempts_left or self._passed_on or is_late:
                            raise failure.fault from failure
                        await asyncio.sleep(wait)
                        pause *= 2
        except TimeoutError:
            if not clock.expired():
                raise
            self.out_of_time = True

    async def _attempt(self, publish: Callable[[list[Delta]], None]) -> None:
        self._received = received = ReceivedReply()
        async with aclosing(self._remote.ask(self._body)) as answers:
            async for answer in answers:
                deltas = received.take(answer)
                self._passed_on = self._passed_on or bool(deltas)
                publish(deltas)
        if not received.finish:
            raise _Retryable(RemoteFault(f"{self._remote.url} broke off in the middle of a reply"))
        ended = f"{self._remote.url} ended a reply with finish_reason {received.finish}"
        # a reply that the filter ended is kept
        has_reply = received.content or received.reasoning or received.calls
        if received.finish.lower() in FILTERED and not has_reply:
            raise RemoteFault(ended, fix="switch off the provider's filter, or use another model")
        if received.error or received.finish.lower() in BROKEN:
            raise _Retryable(RemoteFault(f"{ended}: {json.dumps(received.error)[:500]}" if received.error else ended))

    @property
    def finish(self) -> Finish:
        """The remote's finish reason; LENGTH when out of time."""
        return Finish.LENGTH if self.out_of_time or self._received.finish.lower() in CUT else Finish.STOP

    @property
    def stopped_by(self) -> str:
        """Stop string, if the remote reports one."""
        return self._received.stopped_by if self._received.stopped_by in self.sampling.stop else ""

    @property
    def usage(self) -> Usage:
        """Reported token counts, else estimates from text lengths."""
        used = self._received.usage
        if used is None:
            reply, _ = self.close()
            prompt = len(json.dumps(self._body)) // BYTES_PER_TOKEN
            sampled = len(json.dumps(str(reply))) // BYTES_PER_TOKEN
            return Usage(prompt, 0, sampled, 0, prompt + sampled)
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else 0
        thoughts = used.completion_tokens_details.reasoning_tokens if used.completion_tokens_details else 0
        prompt, sampled = used.counts().values()
        return Usage(prompt, cached or 0, sampled, thoughts or 0, prompt + sampled)

    @property
    def remote(self) -> dict[str, Any]:
        """`Turn.remote`; ``usage`` is empty if not reported."""
        received = self._received
        usage = received.usage.model_dump(exclude_none=True) | received.usage.counts() if received.usage else {}
        returned = {"returned": received.returned} if received.returned else {}
        return {"url": self._remote.url, **received.extra, **returned, "finish_reason": received.finish, "usage": usage}

    def close(self) -> tuple[Reply, list[Delta]]:
        """Return the reply and its last deltas, with complete tool calls."""
        received = self._received
        rest = [Delta(reasoning=received.reasoning), Delta(content=received.content)] if received.is_whole else []
        complete = received.calls if received.finish else []
        calls = tuple(FunctionCall(call["name"], call["arguments"] or "{}", call["id"]) for call in complete)
        return Reply(received.content, received.reasoning, calls), [*rest, *(Delta(call=call) for call in calls)]

    def spans(self) -> tuple[TokenSpan, TokenSpan]:
        """Two empty spans: remotes give no reliable ids and logprobs."""
        nothing = TokenSpan((), Origin.POLICY)
        return nothing, nothing


def _describe_connection_error(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not valid"
    if isinstance(cause, socket.gaierror):
        return "unknown host"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer broke off"
    return "it disconnected" if isinstance(error, aiohttp.ServerDisconnectedError) else "its answer is not HTTP"


def _with_null_content(message: Message) -> Message:
    # some servers refuse empty content next to tool calls
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def _is_context_error(text: str) -> bool:
    low = text.lower()
    return any(phrase in low for phrase in ("context_length_exceeded", "context length", "context window", "too long"))


def _parse_retry_after(retry_after: str, date: str) -> float:
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - parsedate_to_datetime(date)).total_seconds())
    except (ValueError, TypeError):  # not a date, or only one of the two with a time zone
        return 0.0
