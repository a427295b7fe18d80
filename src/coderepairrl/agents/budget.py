"""Remaining calls, tokens and seconds of an episode."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from coderepairrl.types import Limits

Spent = Literal["calls", "tokens", "time"]

REPLY_FLOOR = 256
"""Tokens that a reply may always ask for, so that a last patch is not cut short."""


class Budget:
    """Limits and what remains of them. L calls allow exactly L actions.

    >>> budget = Budget(Limits(calls=1, tokens=1000, seconds=60), clock=lambda: 0.0)
    >>> budget.spent(), budget.act(), budget.spent()
    (None, None, 'calls')
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._started = clock()
        self._calls = 0
        self._tokens_left = limits.tokens

    @property
    def calls_left(self) -> int:
        """Remaining actions."""
        return self._limits.calls - self._calls

    @property
    def tokens_left(self) -> int:
        """Tokens left after the last reply, before later tool results."""
        return self._tokens_left

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self._limits.seconds - (self._clock() - self._started)

    def act(self) -> None:
        """Count a tool call, failed or not, or a reply that did nothing."""
        self._calls += 1

    def saw(self, tokens: int, remaining: int | None = None) -> None:
        """Record the conversation's length in tokens as the endpoint reports it.

        `remaining` is the endpoint's own count, which considers the model's context.
        """
        left = self._limits.tokens - tokens
        self._tokens_left = left if remaining is None else min(left, remaining)

    def exhausted(self) -> Spent | None:
        """Limit that forbids another action; never tokens, which a call has already spent."""
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
