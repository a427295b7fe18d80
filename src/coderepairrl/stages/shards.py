"""Shards of an evaluation, one per process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from coderepairrl.errors import UsageError

T = TypeVar("T")


class Shard(NamedTuple):
    """Every `of`-th task, from the `number`-th (1, 2, ...) on.

    >>> str(Shard(2, 3)), Shard(2, 3).share("abcde")
    ('2/3', 'be')
    """

    number: int = 1
    of: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, everything: Sequence[T]) -> Sequence[T]:
        """Select its part."""
        return everything[self.number - 1 :: self.of]


WHOLE = Shard()
_PLACE = ("name", "dir")


def measured_by(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a configuration that decide what is measured.

    >>> measured_by({"run": {"name": "a", "dir": "runs", "seed": 1}, "eval": {}, "log": ["wandb"]})
    {'run': {'seed': 1}, 'eval': {}}
    """
    sections = {key: section for key, section in config.items() if key not in ("log", "keep")}
    return {**sections, "run": {key: value for key, value in config["run"].items() if key not in _PLACE}}


def parse(text: str) -> Shard:
    """Parse ``I/N``. Raises `UsageError`.

    >>> parse("2/3")
    Shard(number=2, of=3)
    """
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"{text!r} is no shard", fix="write for example 1/4 to 4/4: four parts")
    return Shard(int(number), int(of))
