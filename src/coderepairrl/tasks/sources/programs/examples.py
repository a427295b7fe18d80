"""Check that examples of functions pass with them and fail without.

Reads ``[imports, [[module, name, docstring], ...]]``. The last line printed lists a problem or "" per function.
"""

import contextlib
import doctest
import functools
import importlib
import inspect
import io
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

SECONDS = 10


def raise_timeout(*_: object) -> None:
    """End an example that runs too long."""
    raise TimeoutError


def run_examples(scope: Mapping[str, Any], examples: str) -> bool:
    """Whether all examples pass, and at least one exists."""
    test = doctest.DocTestParser().get_doctest(examples, dict(scope), "examples", None, None)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            ran = runner.run(test)
    finally:
        signal.alarm(0)
    return ran.attempted > 0 and not ran.failed


def find_problem(module: str, name: str, examples: str) -> str:
    """Reason that a function's examples do not judge it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            imported = importlib.import_module(module)
        *outer, last = name.split(".")
        owner = functools.reduce(getattr, outer, imported)
        function = vars(owner)[last]
        if unwrap_function(function).__module__ != module:  # another module's function of that name
            raise KeyError(last)
        if not run_examples(vars(imported), examples):
            return "have examples that fail"
    except KeyError:
        return "are not where they are defined"
    except (Exception, SystemExit) as error:
        return f"cannot be run ({type(error).__name__})"
    with remove_function(owner, last, function):
        try:
            return "have examples that pass without them" if run_examples(vars(imported), examples) else ""
        except (Exception, SystemExit):
            return ""


def unwrap_function(function: Any) -> Any:
    """The function inside its decorators."""
    return inspect.unwrap(getattr(function, "__func__", function))


@contextlib.contextmanager
def remove_function(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Remove a function under its name and other references."""
    body = unwrap_function(function)
    code = getattr(body, "__code__", None)
    with contextlib.suppress(AttributeError, ValueError):  # not Python, or a closure
        body.__code__ = raise_missing.__code__
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, function)
        with contextlib.suppress(AttributeError, ValueError):
            body.__code__ = code


def raise_missing(*_: object, **__: object) -> None:
    """Replace the body of a removed function."""
    raise NotImplementedError


signal.signal(signal.SIGALRM, raise_timeout)
imports, functions = json.load(sys.stdin)
sys.path.insert(0, imports)
print("\n" + json.dumps([find_problem(*each) for each in functions]))
