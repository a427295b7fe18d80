"""The tier of each test, and fixtures that any may use: a miniature Qwen3 with random weights and its own tokenizer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from coderepairrl import sandbox
from miniatures import build_miniature
from needs import skip_without_prerequisites
from tiers import find_tier

# Locally the examples are random, to find new faults; in CI they are always the same, so that only a change can make
# a test fail.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("everywhere", deadline=None)  # no time limit: the machine may be loaded
settings.load_profile("ci" if os.environ.get("CI") else "everywhere")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # `engines.tiny.model` sets it too late if a test has computed
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# ignored in background jobs of shells; child processes would ignore Ctrl-C, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier."""
    seen: set[str] = set()
    for item in items:
        if any(item.get_closest_marker(tier) for tier in ("real", "by_hand")):
            continue
        tier = find_tier(item.nodeid.removeprefix("tests/"))
        function = item.nodeid.partition("[")[0]
        item.add_marker("real" if tier.endswith("*") and function in seen else tier.rstrip("*"))
        seen.add(function)
    items.sort(key=lambda item: item.get_closest_marker("quick") is not None)  # long tests begin first


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random miniature Qwen3 (config.json, model.safetensors, tokenizer.json)."""
    return build_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def isolating() -> None:
    """Skip, or in CI fail, where no sandbox isolates."""
    with skip_without_prerequisites():
        sandbox.choose_backend()
