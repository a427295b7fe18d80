"""Published numbers of others with sources; not measured here, tasks unknown."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

from coderepairrl.errors import UsageError
from coderepairrl.registry import nearest
from coderepairrl.stats import Interval, wilson

PREFIX = "published:"
MARK = "published, not run here"


@dataclass(frozen=True, slots=True)
class Published:
    """Number of a system on a benchmark."""

    name: str
    system: str
    scaffold: str
    benchmark: str
    tasks: int
    how: str
    """Kind of number: one attempt, several, chosen by whom."""
    source: str
    percent: float | None = None
    similarity: float | None = None
    """Similarity by the authors' measure, comparable with none here."""

    @property
    def solved(self) -> int | None:
        """Solved tasks, rounded from the percentage."""
        return None if self.percent is None else round(self.percent * self.tasks / 100)

    @property
    def interval(self) -> Interval | None:
        """Wilson's interval, as if for one attempt at independent tasks; None for a similarity."""
        return None if self.solved is None else wilson(self.solved, self.tasks)


@functools.cache
def published_numbers() -> dict[str, Published]:
    """Numbers by name, in file order."""
    benchmarks = tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))["benchmarks"]
    return {
        name: Published(name=name, **common, **fields)
        for common in benchmarks
        for name, fields in common.pop("numbers").items()
    }


def find_percentage(name: str) -> Published:
    """Find a percentage by name. Raises `UsageError`.

    >>> find_percentage("thesis-base").solved, str(find_percentage("thesis-base").interval)
    (36, '0.072 [0.052, 0.098]')
    """
    if name not in published_numbers():
        raise UsageError(
            f"no published number is called {name!r}",
            fix=f"{nearest(name, published_numbers())} All: crrl compare --published",
        )
    number = published_numbers()[name]
    if number.percent is None:
        raise UsageError(
            f"{name} is a similarity by a measure of its own, which compares with nothing here",
            fix="name one of a share of resolved tasks: crrl compare --published",
        )
    return number
