"""Errors of a configuration, collected to be reported together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from coderepairrl.errors import CodeRepairError, Several, several

T = TypeVar("T")


class _Missing(Exception):
    """A required part failed, which is reported already."""


class Made(Generic[T]):
    """The result of an plan step, or nothing if it failed."""

    def __init__(self, made: list[T]) -> None:
        self._made = made

    def __bool__(self) -> bool:
        return bool(self._made)

    @property
    def value(self) -> T:
        """The result. If missing, ends an enclosing `Problems.attempt` silently."""
        if not self._made:
            raise _Missing
        return self._made[0]


class Problems:
    """Collects errors while independent steps continue.

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
        """The result of `make`. Errors of this project wait for `report`; others are raised."""
        try:
            return Made([make()])
        except _Missing:
            return Made([])
        except CodeRepairError as error:
            self.add(error)
            return Made([])

    def add(self, error: CodeRepairError) -> None:
        """Report `error` too, once however often it is added."""
        for each in error.problems if isinstance(error, Several) else (error,):
            if str(each) not in map(str, self.found):
                self.found.append(each)

    def report(self) -> None:
        """Raise the collected error, if any (`ConfigError`, `UsageError`, `TaskError`, `PrerequisiteError`); `Several`
        for more."""
        if self.found:
            raise several(self.found)
