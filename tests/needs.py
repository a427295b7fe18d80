"""Requirements that a machine may lack: without them tests are skipped, but fail in CI, which installs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from coderepairrl.errors import PrerequisiteError


def need(is_there: object, missing: str) -> None:
    """Skip with the reason `missing`, or in CI fail, unless `is_there`."""
    if not is_there:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)


@contextmanager
def skip_without_prerequisites() -> Iterator[None]:
    """Skip, or in CI fail, if the code within raises `PrerequisiteError`."""
    try:
        yield
    except PrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{error} (fix: {error.fix})")
