"""Costs of attempts: calls, tokens, seconds, money."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from coderepairrl.types import Episode, Turn

_MILLION = 1e6


class Prices(NamedTuple):
    """Money per million tokens. Cached tokens cost the same by default."""

    prompt: float
    sampled: float
    cached: float | None = None


class Spent(NamedTuple):
    """Model calls, tokens (cached prompts included), and seconds."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    attempt_seconds: float = 0.0
    unreported: int = 0
    """Calls without reported tokens, missing from the sums."""

    def plus(self, other: Spent) -> Spent:
        """Add `other`."""
        return Spent(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.sampled_tokens + other.sampled_tokens,
            self.attempt_seconds + other.attempt_seconds,
            self.unreported + other.unreported,
        )

    def money(self, prices: Prices) -> float:
        """Price of the tokens.

        >>> Spent(1, 1_000_000, 500_000, 100_000).money(Prices(2.0, 10.0, cached=1.0))
        2.5
        """
        cached = prices.prompt if prices.cached is None else prices.cached
        fresh = self.prompt_tokens - self.cached_tokens
        return (fresh * prices.prompt + self.cached_tokens * cached + self.sampled_tokens * prices.sampled) / _MILLION


def spent(episodes: Iterable[Episode]) -> Spent:
    """Costs of `episodes`, void ones included."""
    total = Spent()
    for episode in episodes:
        lengths: list[int] = []
        for turn in episode.turns:
            total = total.plus(_of(turn, lengths))
        total = total.plus(Spent(attempt_seconds=episode.timings.get("total", 0.0)))
    return total._replace(attempt_seconds=round(total.attempt_seconds, 3))


def _of(turn: Turn, lengths: list[int]) -> Spent:
    """Cost of one call; appends its sequence's length to `lengths`."""
    prompt = len(turn.given)
    if turn.fork is not None:
        prompt += turn.fork.tokens
    elif turn.base is not None:
        prompt += lengths[turn.base] if turn.base < len(lengths) else 0
    lengths.append(prompt + len(turn.output))
    usage: Any = turn.remote.get("usage")
    if turn.remote and not usage:
        return Spent(1, unreported=1)
    if not usage:
        return Spent(1, prompt, 0, turn.sampled)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Spent(1, usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
