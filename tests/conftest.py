"""Fixtures that every test may use: a miniature Qwen3 with random weights and its own tokenizer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

import warm
from coderepairrl import sandbox
from coderepairrl.errors import PrerequisiteError
from coderepairrl.processes import children
from coderepairrl.stages import jobs
from miniatures import build_miniature

# Everywhere the examples are new ones, so that they find something; in CI they are always the same, so that a
# change is judged by what it changes.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("everywhere", deadline=None)  # no clock decides, on a loaded machine either
settings.load_profile("ci" if os.environ.get("CI") else "everywhere")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as `engines.tiny.model`, where a test has computed before it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of shells' background jobs; children would ignore Ctrl-C, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random miniature Qwen3 (config.json, model.safetensors, tokenizer.json)."""
    return build_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def isolating() -> None:
    """Skip where no sandbox isolates; in CI that is a failure."""
    try:
        sandbox.choose()
    except PrerequisiteError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines, learners and runs that a test starts are forked from a process that has imported them (`warm`)."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: the test's is to be undone when the test asks for it
        if not request.node.get_closest_marker("started"):
            patch.setattr(children, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": warm.Popen}))
            patch.setattr(jobs, "asyncio", SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": warm.job}))
        yield
