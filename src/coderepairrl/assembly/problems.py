"""What is wrong with a configuration, collected, so that all of it is reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from coderepairrl.errors import CodeRepairError, Several, several

T = TypeVar("T")


class _Missing(Exception):
    """A part that another one needs could not be made, and that was reported already."""


class Made(Generic[T]):
    """What one step of the assembly gave, or nothing where it failed."""

    def __init__(self, made: list[T]) -> None:
        self._made = made

    def __bool__(self) -> bool:
        return bool(self._made)

    @property
    def value(self) -> T:
        """What was made. Inside `Problems.attempt` a missing one ends the attempt quietly."""
        if not self._made:
            raise _Missing
        return self._made[0]


class Problems:
    """Goes on after a mistake, with everything that does not depend on it.

    >>> from coderepairrl.errors import ConfigError
    >>> def wrong(text): raise ConfigError(text)
    >>> problems = Problems()
    >>> model = problems.attempt(lambda: wrong("no such model"))
    >>> codec = problems.attempt(lambda: len(model.value))
    >>> reward = problems.attempt(lambda: wrong("no such reward"))
    >>> problems.report()
    Traceback (most recent call last):
    coderepairrl.errors.Several: no such model
    no such reward
    """

    def __init__(self) -> None:
        self.found: list[CodeRepairError] = []

    def attempt(self, make: Callable[[], T]) -> Made[T]:
        """What `make` gives. This project's errors are kept for `report`, any other is raised."""
        try:
            return Made([make()])
        except _Missing:
            return Made([])
        except CodeRepairError as error:
            self.add(error)
            return Made([])

    def add(self, error: CodeRepairError) -> None:
        """Report `error`, too; once, however many steps meet it."""
        for each in error.problems if isinstance(error, Several) else (error,):
            if str(each) not in map(str, self.found):
                self.found.append(each)

    def report(self) -> None:
        """Raise what was found: the error itself where it is the only one, else `Several`."""
        if self.found:
            raise several(self.found)
