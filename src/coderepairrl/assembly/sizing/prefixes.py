"""The prefix cache of an engine, as it is simulated: what sequences computed stays until room is needed, and then what
was used longest ago goes first, from its end.

That is what an engine does that frees the blocks of a sequence together, the last one first (vLLM), with blocks of one
token. A sequence is a chain of parts: what its group shares, and its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

Chain = Sequence[tuple[Hashable, int]]
"""Parts of a sequence by name, and the tokens of each."""


@dataclass(slots=True)
class _Held:
    users: int
    tokens: int


class Prefixes:
    """`held` are tokens of sequences under way, which nothing drives out, not even where they are more than `room`."""

    def __init__(self, room: float) -> None:
        self.room, self.held, self.idle = room, 0, 0
        self.again = 0
        """Tokens that were asked for after they had gone."""
        self._held: dict[Hashable, _Held] = {}
        self._idle: dict[Hashable, int] = {}  # in the order of their last use
        self._gone: dict[Hashable, int] = {}

    def more(self, chain: Chain) -> int:
        """Tokens that `take` would hold beside those that are."""
        return sum(tokens for name, tokens in chain if name not in self._held)

    def take(self, chain: Chain) -> int:
        """Hold a sequence; how many of its tokens are there already, from its beginning."""
        found, whole = 0, True
        for name, tokens in chain:
            there = self._take(name, tokens)
            found += there if whole else 0
            whole = whole and there >= tokens
        self._make_room()
        return found

    def give(self, chain: Chain) -> None:
        """Its sequence has ended, with so many tokens in each part: nobody needs to hold them any more."""
        for name, tokens in reversed(chain):  # so that what a part stands on is younger than the part
            held = self._held[name]
            held.users -= 1
            if not held.users:
                del self._held[name]
                self.held -= held.tokens
                self._idle[name] = tokens
                self.idle += tokens
        self._make_room()

    def forget(self) -> None:
        """New weights: only what is held is worth something, for that is computed again."""
        self._idle.clear()
        self._gone.clear()
        self.idle = 0

    def _take(self, name: Hashable, tokens: int) -> int:
        if (held := self._held.get(name)) is not None:
            held.users += 1
            return tokens
        there = self._idle.pop(name, 0)
        self.idle -= there
        self.again += min(self._gone.pop(name, 0), max(0, tokens - there))
        self._held[name] = _Held(1, tokens)
        self.held += tokens
        return min(there, tokens)

    def _make_room(self) -> None:
        while self._idle and (over := self.held + self.idle - self.room) > 0:
            name = next(iter(self._idle))
            gone = min(self._idle[name], math.ceil(over))
            self._idle[name] -= gone
            self.idle -= gone
            self._gone[name] = self._gone.get(name, 0) + gone
            if not self._idle[name]:
                del self._idle[name]
