"""Results published by others, with sources: not measured here, and without results of single tasks."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.errors import UsageError
from coderepairrl.registry import suggest_nearest
from coderepairrl.stats.intervals import Interval, wilson_interval

PREFIX = "published:"
MARK = "published, not run here"


@dataclass(frozen=True, slots=True)
class Published:
    """Published result of a system on a benchmark."""

    name: str
    system: str
    scaffold: str
    benchmark: str
    tasks: int
    how: str
    """How it was measured: with how many attempts, and what chose among them."""
    source: str
    percent: float | None = None
    similarity: float | None = None
    """Similarity by the authors' measure, which no reward here computes."""

    @property
    def solved(self) -> int | None:
        """Solved tasks, rounded from the percentage."""
        return None if self.percent is None else round(self.percent * self.tasks / 100)

    @property
    def interval(self) -> Interval | None:
        """Wilson's interval, as if for one attempt at independent tasks; None for a similarity."""
        return None if self.solved is None else wilson_interval(self.solved, self.tasks)


@functools.cache
def read_published() -> dict[str, Published]:
    """Read the published results by name, in the order of the file."""
    benchmarks = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))["benchmarks"]
    return {
        name: Published(name=name, **common, **fields)
        for common in benchmarks
        for name, fields in common.pop("numbers").items()
    }


def find_percentage(name: str) -> Published:
    """Find a published share of resolved tasks. Raises `UsageError` for unknown names and similarities.

    >>> find_percentage("thesis-base").solved, str(find_percentage("thesis-base").interval)
    (36, '0.072 [0.052, 0.098]')
    """
    if name not in read_published():
        raise UsageError(
            f"no published number is called {name!r}",
            fix=f"{suggest_nearest(name, read_published())} All: crrl compare --published",
        )
    number = read_published()[name]
    if number.percent is None:
        raise UsageError(
            f"{name} is a similarity by a measure that nothing here computes",
            fix="name a published share of resolved tasks: crrl compare --published",
        )
    return number
