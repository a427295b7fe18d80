from __future__ import annotations

from pathlib import Path

import pytest

from rewards.folder import Local, Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "repository"
    folder.mkdir()
    return Repository(folder)


@pytest.fixture
def backend() -> Local:
    return Local()
