"""Limits of an episode and its replies."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from coderepairrl.gateway.request import ApiError
from coderepairrl.types import Limits

REQUESTS_PER_CALL = 16
"""Requests per permitted call, including token counts, retries and refusals."""


class ReplyBudget(NamedTuple):
    """Tokens of a reply; `limit` names the episode limit that reduced them, or is empty."""

    max_tokens: int
    limit: str


class EpisodeBudget:
    """Counts an episode's calls and requests.

    `limit` is the first limit met (``calls``, ``tokens``, ``context``, ``time``), or empty; `tokens` the longest
    allowed conversation; `context` the model's limit; `deadline` in loop time.
    """

    def __init__(self, limits: Limits, context: int | None) -> None:
        self.limit = ""
        self.calls = 0
        self.tokens = limits.tokens
        self._limits = limits
        self.start_clock()
        self._token_limit = "tokens"
        self._requests = 0
        if context is not None and context < limits.tokens:
            self.tokens, self._token_limit = context, "context"

    def start_clock(self) -> None:
        """Count seconds from now."""
        self.deadline = asyncio.get_running_loop().time() + self._limits.seconds

    @property
    def max_calls(self) -> int:
        """Announced limit, plus two for closing remarks."""
        return self._limits.calls + 2

    @property
    def is_exhausted(self) -> bool:
        """Whether further calls are refused."""
        is_late = asyncio.get_running_loop().time() >= self.deadline
        return bool(self.limit) or is_late or self.calls >= self.max_calls

    def count_request(self) -> None:
        """Count a request. Raises `ApiError` beyond the limit."""
        self._requests += 1
        if self._requests > REQUESTS_PER_CALL * self.max_calls:
            message = f"too many requests for an episode of {self._limits.calls} model calls"
            raise self._limit_error("calls", message)

    def check_call(self) -> None:
        """Raise `ApiError` if no further call may start."""
        if self.calls >= self.max_calls:
            raise self._limit_error("calls", f"the episode's {self._limits.calls} + 2 model calls are used up")
        if asyncio.get_running_loop().time() >= self.deadline:
            raise self._limit_error("time", f"the episode's {self._limits.seconds:g} seconds are used up")

    def budget_reply(self, prompt: int, tokens: int) -> ReplyBudget:
        """Budget at most `tokens` after `prompt` tokens. Raises `ApiError` if none remain."""
        room = self.tokens - prompt
        if room <= 0:
            raise self.prompt_too_long_error(prompt)
        tokens = min(tokens, self._limits.turn_tokens)
        return ReplyBudget(min(tokens, room), self._token_limit if room < tokens else "")

    def prompt_too_long_error(self, prompt: int) -> ApiError:
        """Record the limit; return an error that all providers' agents recognise."""
        return self._limit_error(
            self._token_limit,
            f"prompt is too long: {prompt} tokens > {self.tokens} maximum; "
            f"this model's maximum context length is {self.tokens} tokens",
        )

    def record_limit(self, limit: str) -> None:
        """Record `limit` unless one is recorded already."""
        self.limit = self.limit or limit

    def record_context(self, context: int) -> None:
        """Record the token limit if `context`, known for a remote only after its reply, exceeds it."""
        if context > self.tokens:
            self.record_limit(self._token_limit)

    def _limit_error(self, limit: str, message: str) -> ApiError:
        self.record_limit(limit)
        if limit in ("tokens", "context"):
            return ApiError(400, "context_length_exceeded", message, param="messages", limit=limit)
        return ApiError(400, "episode_limit_reached", message, limit=limit)
