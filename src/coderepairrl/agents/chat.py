"""A conversation with an OpenAI-compatible endpoint over HTTP, and its remaining calls, tokens and seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import aiohttp

from coderepairrl.errors import AgentFault, GatewayFault
from coderepairrl.types import Endpoint, Limits

Message = dict[str, Any]


class LimitReached(Exception):
    """A `limit` of the episode (``calls``, ``tokens`` or ``time``) ended the conversation. Not an error."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's message, and the exact length of the conversation including it.

    Only our gateway sets `remaining_tokens`, `malformed` and `turn`.
    """

    message: Message
    tool_calls: tuple[Mapping[str, Any], ...]
    context_tokens: int
    remaining_tokens: int | None = None
    malformed: tuple[str, ...] = ()
    """Tool calls that could not be parsed."""
    turn: int | None = None
    """Index of the gateway's turn."""
    cut_off: bool = False
    """Whether the token limit ended it."""


class Chat:
    """Client of Chat Completions. It never retries: a gateway fault voids the episode, which is rerun."""

    def __init__(self, endpoint: Endpoint, options: Mapping[str, Any]) -> None:
        self._endpoint = endpoint
        self._options = options

    async def __aenter__(self) -> Self:
        headers = {
            "Authorization": f"Bearer {self._endpoint.api_key}",
            "X-Stainless-Retry-Count": "0",  # an equal request is a new call, not a retry
        }
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int, seconds: float
    ) -> Reply:
        """Request the model's next message.

        Raises `LimitReached`, `GatewayFault` for a failing endpoint, and `AgentFault` for a rejected request.
        """
        body = {
            "model": self._endpoint.model,
            "messages": messages,
            "tools": tools,
            "tool_choice": "auto",
            "max_tokens": max_tokens,
            **self._options,
        }
        url = f"{self._endpoint.base_url.rstrip('/')}/chat/completions"
        try:
            async with asyncio.timeout(seconds), self._session.post(url, json=body) as response:
                status = response.status
                answer = await response.json(content_type=None)
        except TimeoutError:
            raise LimitReached("time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise GatewayFault(f"no answer from the endpoint: {error!r}") from error
        if status >= 400:
            raise _convert_error_answer(status, answer)
        return _parse_reply(answer)


def _convert_error_answer(status: int, answer: Any) -> Exception:
    body = answer if isinstance(answer, dict) else {}
    error = body.get("error") or answer
    code = str(error.get("code") or "") if isinstance(error, dict) else ""
    limit = str((body.get("crrl") or {}).get("limit") or "")
    if code == "context_length_exceeded" or limit in ("tokens", "context"):
        return LimitReached("tokens")
    if code == "episode_limit_reached":
        return LimitReached("time" if limit == "time" else "calls")
    text = f"the endpoint answered {status}: {error}"
    return GatewayFault(text) if status >= 500 or status == 429 else AgentFault(text, how=f"HTTP {status}")


def _parse_reply(answer: Any) -> Reply:
    try:
        message = answer["choices"][0]["message"]
        # Null fields are not part of the conversation; all others are sent back unchanged.
        fields = {key: value for key, value in message.items() if value is not None or key == "content"}
        gateway_fields = answer.get("crrl") or {}
        usage = answer.get("usage") or {}
        tokens = gateway_fields.get("context_tokens")
        if tokens is None:
            tokens = usage["prompt_tokens"] + usage["completion_tokens"]
        return Reply(
            message=fields,
            tool_calls=tuple(message.get("tool_calls") or ()),
            context_tokens=int(tokens),
            remaining_tokens=gateway_fields.get("remaining_tokens"),
            malformed=tuple(gateway_fields.get("malformed") or ()),
            turn=gateway_fields.get("turn"),
            cut_off=answer["choices"][0].get("finish_reason") == "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise GatewayFault(f"not a chat completion with usage ({error!r}): {str(answer)[:200]}") from error


Spent = Literal["calls", "tokens", "time"]

REPLY_FLOOR = 256
"""Least tokens requested for a reply, so that a last patch is not cut short."""


class Budget:
    """Limits and their remainders. L calls allow exactly L actions.

    >>> budget = Budget(Limits(calls=1, tokens=1000, seconds=60))
    >>> budget.spent(), budget.act(), budget.spent()
    (None, None, 'calls')
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._started = time.monotonic()
        self._calls = 0
        self.tokens_left = limits.tokens
        """Tokens left after the last reply, before later tool results."""

    @property
    def calls_left(self) -> int:
        """Remaining actions."""
        return self._limits.calls - self._calls

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self._limits.seconds - (time.monotonic() - self._started)

    def act(self) -> None:
        """Count a tool call, failed or not, or a reply that did nothing."""
        self._calls += 1

    def record_tokens(self, tokens: int, remaining: int | None = None) -> None:
        """Record the conversation's length in tokens as the endpoint reports it.

        `remaining` is the endpoint's own count, which considers the model's context.
        """
        left = self._limits.tokens - tokens
        self.tokens_left = left if remaining is None else min(left, remaining)

    def exhausted(self) -> Spent | None:
        """Limit that forbids another action. Not ``tokens``: the reply that asks for the action has spent them."""
        if self.calls_left <= 0:
            return "calls"
        return "time" if self.seconds_left <= 0 else None

    def spent(self) -> Spent | None:
        """Limit that forbids another reply."""
        return self.exhausted() or ("tokens" if self.tokens_left <= 0 else None)

    def reply_tokens(self) -> int:
        """Longest reply to request: half of the remaining tokens beyond a reserve of a tenth.

        >>> Budget(Limits(tokens=10_240)).reply_tokens(), Budget(Limits(tokens=1_000)).reply_tokens()
        (4096, 450)
        """
        share = (self.tokens_left - self._limits.tokens // 10) // 2
        return min(self.tokens_left, self._limits.turn_tokens, max(REPLY_FLOOR, share))
