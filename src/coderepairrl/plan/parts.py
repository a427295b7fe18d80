"""Parts of plans, each made once on first use; the errors of all are reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Generic, Self, TypeVar

from coderepairrl.errors import CodeRepairError, combine_errors

A = TypeVar("A")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Check = Callable[[], object]
"""A check, which raises `CodeRepairError` for a mistake."""


class part(Generic[T_co]):
    """A property of `PlanParts`, made on first use and kept; an error is kept, too, and raised at each use."""

    def __init__(self, make: Callable[[Any], T_co]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, parts: PlanParts, owner: type) -> T_co:
        if self.name not in parts.results:
            try:
                parts.results[self.name] = self.make(parts)
            except CodeRepairError as error:
                parts.results[self.name] = error
        value = parts.results[self.name]
        if isinstance(value, CodeRepairError):
            raise value
        return value  # type: ignore[no-any-return]

    def __set__(self, parts: PlanParts, value: Any) -> None:
        parts.results[self.name] = value


class PlanParts:
    """Parts that may need each other, and checks of them.

    >>> from coderepairrl.errors import ConfigError
    >>> def fail(text): raise ConfigError(text)
    >>> class Shop(PlanParts):
    ...     @part
    ...     def model(self): fail("no such model")
    ...     @part
    ...     def codec(self): return len(self.model)
    ...     def _checks(self): return [lambda: fail("no such reward")]
    >>> raise_errors(Shop().errors())
    Traceback (most recent call last):
    coderepairrl.errors.CombinedError: no such model
    no such reward
    """

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        """Parts by name; an error in place of one that cannot be made."""

    def _checks(self) -> list[Check]:
        return []

    def errors(self) -> list[CodeRepairError]:
        """Make every part in order of definition, then run the checks; return errors, some more than once."""
        # base classes first; a part that a subclass replaces keeps its place in the order
        members = {name: each for base in reversed(type(self).__mro__) for name, each in vars(base).items()}
        makes = [partial(getattr, self, name) for name, each in members.items() if isinstance(each, part)]
        return collect_errors([*makes, *self._checks()])

    def can_make(self, name: str) -> bool:
        """Whether the part `name` can be made. Its error is left to `errors`."""
        return not collect_errors([partial(getattr, self, name)])

    def replace(self, **parts: Any) -> Self:
        """Copy, with other `parts`; parts made from the old ones stay."""
        other = copy(self)
        other.results = self.results | parts
        return other


def collect_errors(checks: Iterable[Check]) -> list[CodeRepairError]:
    """Errors of all `checks`."""
    errors = []
    for check in checks:
        try:
            check()
        except CodeRepairError as error:
            errors.append(error)
    return errors


def raise_errors(errors: Sequence[CodeRepairError]) -> None:
    """Raise `errors`, if any, as one error: the only one, or a `CombinedError`."""
    if errors:
        raise combine_errors(errors)


def make_each(make: Callable[[A], T], values: Iterable[A]) -> list[T]:
    """Call `make` with each value. Raises the errors of all that fail together."""
    results: list[T] = []
    errors: list[CodeRepairError] = []
    for value in values:
        try:
            results.append(make(value))
        except CodeRepairError as error:
            errors.append(error)
    raise_errors(errors)
    return results
