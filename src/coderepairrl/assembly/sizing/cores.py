"""Cores that all who compute share evenly, as they are simulated: one each, or as large a part of one as there is.

So work that needs n seconds of a core ends when a common count of seconds has grown by n, however many others begin and
end in between: one heap (processor sharing in virtual time; Parekh and Gallager 1993).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class Work:
    """What needs seconds of a core; `done` is called at its end."""

    done: Callable[[], None]
    under_way: bool = True


class Cores:
    """`work` is the count: seconds of a core that one who was always there has got."""

    def __init__(self, cores: float) -> None:
        self.cores, self.others, self.work = cores, 0, 0.0
        """Others compute, too, whose ends are not known here: an engine on this machine."""
        self._ends: list[tuple[float, int, Work]] = []
        self._own = 0
        self._count = count()

    @property
    def users(self) -> int:
        """How many compute."""
        return self._own + self.others

    @property
    def rate(self) -> float:
        """Seconds of a core that each gets in a second."""
        users = self._own + self.others
        return 1.0 if users <= self.cores else self.cores / users

    def advance(self, seconds: float) -> None:
        """The clock goes on."""
        self.work += seconds * self.rate

    def begin(self, seconds: float, done: Callable[[], None]) -> Work:
        """`seconds` of a core from now on."""
        work = Work(done)
        heapq.heappush(self._ends, (self.work + seconds, next(self._count), work))
        self._own += 1
        return work

    def next(self) -> float | None:
        """Seconds until some work ends, if nothing else happens; None where none is under way."""
        ends = self._ends
        while ends and not ends[0][2].under_way:
            heapq.heappop(ends)
        return max(0.0, ends[0][0] - self.work) / self.rate if ends else None

    def pop(self) -> Work:
        """The work that ends now, of which `next` has spoken."""
        ended, _, work = heapq.heappop(self._ends)
        self.work = max(self.work, ended)
        self.cut(work)
        return work

    def cut(self, work: Work) -> None:
        """End it as it is."""
        work.under_way = False
        self._own -= 1
