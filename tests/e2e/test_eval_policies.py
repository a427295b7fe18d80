"""`crrl eval` with several policies: each has a run folder, and adapters on one model share one server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from safetensors.numpy import save_file

from coderepairrl.apps import evaluate
from coderepairrl.apps.evaluate import Evaluation
from coderepairrl.errors import UsageError
from coderepairrl.report.comparing import Arguments, answer
from coderepairrl.sync import weights
from engines import fake_vllm

SETTINGS = (
    *("path=labels.jsonl", "eval.split=train", "eval.reward=classification", "agent=direct"),
    *('agent.options={ system = "" }', "rollout.calls=1", "rollout.tokens=400", "rollout.turn_tokens=16"),
)


def planned(tmp_path: Path, policies: list[Path], *more: str, resume: bool = False) -> list[Evaluation]:
    rows = [{"id": f"q/{at}", "prompt": f"{at}?", "language": "c", "answer": "yes"} for at in range(3)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return evaluate.plan_each(
        list(map(str, policies)), "jsonl", [*SETTINGS, *more], output=tmp_path / "found", resume=resume
    )


def adapter(folder: Path, base: Path, rank: int) -> Path:
    folder.mkdir()
    about = {"r": rank, "base_model_name_or_path": str(base)}
    (folder / weights.ADAPTER_CONFIG).write_text(json.dumps(about))
    save_file({"x": np.full((rank, 4), 0.5, np.float32)}, folder / weights.ADAPTER)
    return folder


@pytest.fixture
async def wire() -> AsyncIterator[TestServer]:
    server = TestServer(fake_vllm.make_app())
    await server.start_server()
    yield server
    await server.close()


async def test_adapters_on_one_model_share_a_server(
    miniature: Path, tmp_path: Path, wire: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which was given them one after the other, after the model itself, and was begun once."""
    monkeypatch.chdir(tmp_path)
    small, large = adapter(tmp_path / "small", miniature, 2), adapter(tmp_path / "large", miniature, 8)
    engine = f'engine={{ name = "vllm", options = {{ url = "{wire.make_url("/")}" }} }}'
    policies = planned(tmp_path, [small, miniature, large], engine)
    results = await evaluate.evaluate_each(policies)
    state: fake_vllm.State = wire.app[fake_vllm.STATE]
    assert [asked["model"] for asked in state.requests] == [*["policy"] * 3, *["policy-v1"] * 3, *["policy-v2"] * 3]
    assert set(state.adapters) == {"policy-v1", "policy-v2"}
    assert [Path(result["run"]).name for result in results] == ["small", miniature.name, "large"]
    assert [result["policy"] for result in results] == [str(small), str(miniature), str(large)]
    again = planned(tmp_path, [small, miniature, large], engine, resume=True)
    after = await evaluate.evaluate_each(again, resume=True)
    assert [each["evaluations"] for each in after] == [each["evaluations"] for each in results]
    assert len(state.requests) == 9, "nobody attempts a task twice"
    assert f"crrl compare {' '.join(result['run'] for result in results)}" in evaluate.each_as_text(results, policies)


async def test_policies_of_an_engine_without_adapters_are_compared_pair_by_pair(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").symlink_to(miniature)
    results = await evaluate.evaluate_each(planned(tmp_path, [miniature, tmp_path / "other"]))
    assert len({json.dumps(result["evaluations"]["eval"]["values"]) for result in results}) == 1
    compared = answer(Arguments([result["run"] for result in results], "classification"))
    assert compared.numbers["comparisons"][0]["tasks"] == 3


def test_policies_of_one_name_are_refused(miniature: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="have one name, miniature"):
        evaluate.plan_each(["a/miniature", "b/miniature"], "jsonl", [])
