"""Counts of rewards' notes by kind, mostly reasons for 0."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coderepairrl.types import Episode

_KINDS = 500
"""Kinds counted separately per reward: notes may quote the policy, and never repeat."""
_WIDEST = 160
_VARIABLE = re.compile(r"""`[^`]*`|"[^"]*"|'[^']*'|\S*/\S*|0x[0-9a-fA-F]+|\d+""")
"""Variable parts of a kind: quotations, paths, addresses, numbers."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Notes that differ only in names and numbers."""

    note: str
    count: int
    zeros: int


@dataclass(frozen=True, slots=True)
class Noted:
    """Notes of one reward, kinds most frequent first."""

    scores: int
    zeros: int
    kinds: Sequence[Kind]


@dataclass(slots=True)
class _Reward:
    scores: int = 0
    zeros: int = 0
    examples: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    zeros_by_kind: Counter[str] = field(default_factory=Counter)


class Notes:
    """Bounded-memory counter of episodes' notes."""

    def __init__(self) -> None:
        self._rewards: dict[str, _Reward] = {}

    def add(self, episode: Episode) -> None:
        """Count the notes of `episode`."""
        for score in episode.scores:
            counts = self._rewards.setdefault(score.name, _Reward())
            counts.scores += 1
            counts.zeros += score.value == 0
            note = plain(score.note)
            if note:
                kind = kind_of(note)
                if kind not in counts.examples and len(counts.examples) >= _KINDS:
                    kind, note = "", "(other notes)"
                counts.examples.setdefault(kind, note)
                counts.counts[kind] += 1
                counts.zeros_by_kind[kind] += score.value == 0

    def found(self) -> dict[str, Noted]:
        """Counts by reward, in order of first scores."""
        return {
            name: Noted(
                counts.scores,
                counts.zeros,
                [
                    Kind(counts.examples[kind], count, counts.zeros_by_kind[kind])
                    for kind, count in counts.counts.most_common()
                ],
            )
            for name, counts in self._rewards.items()
        }

    def zeros(self, most: int) -> list[str]:
        """Readable lines with the `most` most frequent zeros of each reward."""
        lines = []
        for name, noted in self.found().items():
            kinds = sorted((kind for kind in noted.kinds if kind.zeros), key=lambda kind: -kind.zeros)
            if kinds:
                lines.append(f"{name}: {noted.zeros} of {noted.scores} scores are 0, of which")
                lines += [f"{kind.zeros:>8}  {kind.note}" for kind in kinds[:most]]
                if rest := sum(kind.zeros for kind in kinds[most:]):
                    lines.append(f"{rest:>8}  other notes")
        return lines


def plain(text: str, widest: int = _WIDEST) -> str:
    """`text` on one printable line, cut at `widest`."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text[: 8 * widest]).split())
    return line if len(line) <= widest else line[: widest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def kind_of(note: str) -> str:
    """Common part of a kind's notes.

    >>> kind_of("exit code 1: tests/test_till.py::test_sum") == kind_of("exit code 2: tests/test_a.py::test_b")
    True
    """
    return _VARIABLE.sub("*", note)
