"""What a test needs and a machine may lack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coderepairrl.errors import PrerequisiteError


def need(there: object, missing: str) -> None:
    """Skip where something is not there, as `missing` says; in CI, which installs it, fail."""
    if not there:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


@contextmanager
def prerequisites() -> Iterator[None]:
    """Skip, or in CI fail, where this machine lacks what the code within needs."""
    try:
        yield
    except PrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
