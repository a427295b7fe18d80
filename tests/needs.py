"""What a test needs and a machine may lack."""

from __future__ import annotations

import os

import pytest


def need(there: object, missing: str) -> None:
    """Skip where something is not there, as `missing` says; in CI, which installs it, fail."""
    if not there:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
