"""The extension of vLLM's workers, without vLLM: a replica whose answers vLLM drops must raise."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from coderepairrl.engines.vllm.server import EXTENSION


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A worker of a server of two replicas with two workers each."""
    platforms = MagicMock()
    platforms.current_platform.is_cpu.return_value = False
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.vocab_parallel_embedding", MagicMock())
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.syspath_prepend(EXTENSION)
    extension = importlib.import_module("crrl_worker").Extension()
    extension.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2))
    extension.rank = 1
    yield extension
    sys.modules.pop("crrl_worker")


def refuse(**_: Any) -> None:
    raise ValueError("no room on the device")


def test_a_replica_whose_answers_are_dropped_raises_its_error(worker: Any, tmp_path: Path) -> None:
    worker.reload_weights = refuse
    worker._arrived = {"weight": object()}
    assert worker.reload_policy(str(tmp_path)) == {"error": "ValueError: no room on the device"}
    assert worker.load_received() == {"error": "ValueError: no room on the device"}
    worker.vllm_config.parallel_config.data_parallel_index = 1
    worker._arrived = {"weight": object()}
    for call in (lambda: worker.reload_policy(str(tmp_path)), worker.load_received):
        with pytest.raises(ValueError, match="no room"):
            call()


def test_every_worker_receives_under_a_different_rank(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []

    def receive(offer: Path, rank: int, receivers: int, seconds: float) -> tuple[dict[str, Any], str]:
        places.append(rank)
        return {}, "found"

    monkeypatch.setattr(sys.modules["crrl_worker"].wire, "receive", receive)
    for replica in (0, 1):
        for worker.rank in (0, 1):
            worker.vllm_config.parallel_config.data_parallel_index = replica
            assert worker.receive_policy("offer", 4, 1.0, "found") == {"checksum": "found"}
    assert places == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="the weights have checksum found, not another"):
        worker.receive_policy("offer", 4, 1.0, "another")
