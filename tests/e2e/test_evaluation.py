"""Evaluation without training: no learner, no training task, any policy, any sources side by side."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import learn, models
from coderepairrl.apps import evaluate as evaluate_app
from coderepairrl.apps.evaluate import as_text
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.report.comparing import Arguments, answer
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.stages import evaluation
from coderepairrl.tasks import JsonlSource

AGENT = 'agent.options={ system = "compact", tools = "compact", user_template = "{prompt}" }'
SETTINGS = (
    *("reward.patch_edits=1.0", "eval.source=handmade", "eval.split=test", "tasks.options.path=nowhere.jsonl"),
    *("rollout.calls=2", "rollout.tokens=3000", "rollout.turn_tokens=8", "rollout.seconds=60", AGENT),
)


def chosen(model: Path, *more: str) -> AgentPlan:
    return evaluation.resolve(str(model), [*SETTINGS, *more])


async def test_a_model_is_measured_on_two_sources_without_a_learner(
    miniature: Path, tmp_path: Path, isolating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_learner(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is trained")

    monkeypatch.setattr(learn.Learner, "start", no_learner)
    labels = tmp_path / "labels.jsonl"
    rows = [{"id": f"cwe/{at}", "prompt": f"{at}?", "language": "c", "answer": "x", "kind": "label"} for at in range(3)]
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (
        f'eval.also={{ cwe = {{ source = "jsonl", split = "train", options = {{ path = "{labels}" }} }} }}',
        'kinds.label={ agent = { name = "direct", options = { system = "" } }, reward = "classification" }',
    )
    folder = RunFolder(tmp_path / "evaluated")
    found = await evaluation.measure(chosen(miniature, *more), folder, quiet=True)
    assert found.keys() == {"eval", "cwe"}
    assert found["cwe"]["tasks"] == 3 and found["cwe"]["values"].keys() >= {"classification"}
    assert found["eval"]["tasks"] == 2 and found["eval"]["values"].keys() >= {"patch_edits"}
    assert open_run(folder.path).tasks().keys() >= {"cwe/0", "cwe/1", "cwe/2"}
    assert {task.id: task for task in JsonlSource(folder.path / "tasks.jsonl")} == open_run(folder.path).tasks()
    with pytest.raises(UsageError, match="is an evaluation: it has trained no model"):
        models.named(str(folder.path))
    with pytest.raises(UsageError, match="already holds a run"):
        await evaluation.measure(chosen(miniature, *more), folder, quiet=True)
    episodes = [record for record in folder.records() if record["type"] == "episode"]
    assert await evaluation.measure(chosen(miniature, *more), folder, resume=True, quiet=True) == found
    again = [record for record in folder.records() if record["type"] == "episode"]
    assert again == episodes, "nothing was measured again"
    with pytest.raises(UsageError, match=r"another evaluation was begun there \(rollout\)"):
        await evaluation.measure(chosen(miniature, *more, "rollout.calls=3"), folder, resume=True, quiet=True)


async def test_an_evaluation_goes_on_with_the_weights_that_it_began_with(
    miniature: Path, tmp_path: Path, isolating: None
) -> None:
    """Whatever lies in their place now: the folder's name and the settings are the same."""
    model, folder = tmp_path / "model", RunFolder(tmp_path / "evaluated")
    shutil.copytree(miniature, model)
    await evaluation.measure(chosen(model, "eval.tasks=1"), folder, quiet=True)
    weights = model / "model.safetensors"
    assert folder.about()["model"][weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = list(folder.records())
    with pytest.raises(UsageError, match=r"not the one that was measured: model\.safetensors has changed"):
        await evaluation.measure(chosen(model, "eval.tasks=1"), folder, resume=True, quiet=True)
    assert list(folder.records()) == before
    weights.write_bytes(whole)
    await evaluation.measure(chosen(model, "eval.tasks=1"), folder, resume=True, quiet=True)


async def test_agents_side_by_side_under_the_same_limits(miniature: Path, tmp_path: Path, isolating: None) -> None:
    also = 'eval.also={ plain = { agent = { name = "direct", options = { files = "oracle", system = "" } } } }'
    plan = chosen(miniature, also, "rollout.tokens=4000")
    folder = RunFolder(tmp_path / "evaluated")
    found = await evaluation.measure(plan, folder, quiet=True)
    assert found["eval"]["tasks"] == found["plain"]["tasks"] == 2
    conditions = open_run(folder.path).about()["conditions"]
    [nano], [direct] = (conditions[name]["agents"] for name in ("eval", "plain"))
    assert (nano["name"], direct["name"]) == ("nano", "direct, shown files of the reference")
    limits = ("calls", "tokens", "seconds", "turn_tokens")
    assert [nano[key] for key in limits] == [direct[key] for key in limits]
    turns = {name: [len(each.turns) for each in folder.episodes(f"{name}-00000")] for name in found}
    assert set(turns["plain"]) == {1} and max(turns["eval"]) > 1
    text = as_text(evaluate_app.found(folder), plan.config)
    assert "plain       direct, shown files of the reference" in text
    compared = answer(Arguments([f"{folder.path}@eval", f"{folder.path}@plain"], "reward"))
    assert compared.numbers["settings"]["agent.name"] == ["nano", "direct"]
    with pytest.raises(ConfigError, match="unknown agent .dirct."):
        chosen(miniature, 'eval.also={ plain = { agent = "dirct" } }')


def test_an_agent_of_the_settings_keeps_its_options_when_it_is_named(isolating: None) -> None:
    """The tiny policy knows the short prompt alone: by the long one no request would fit."""
    named = evaluate_app.plan("hello", ["eval.tasks=1"], policy="builtin:tiny", agents=["direct", "nano"])
    plain = evaluate_app.plan("hello", ["eval.tasks=1"], policy="builtin:tiny")
    other = named.plan.config.eval.each["nano"].agent
    assert other == plain.plan.config.agent and other.options["tools"] == "compact"
    assert (named.plan.config.agent.name, named.plan.config.agent.options) == ("direct", {})


@pytest.mark.parametrize(
    ("what", "given", "more", "message"),
    [
        ("handmade", [], {"policy": None}, "no policy is named"),
        ("handmade", [], {"preset": "gredy"}, "no preset 'gredy'"),
        ("handmade", [], {"shard": "3/2"}, "'3/2' is no shard"),
        ("handmade", [], {"shard": "9/9"}, "shard 9/9 has none"),
        ("handmade", [], {"prices": "1,2"}, "--prices is for a policy behind a URL"),
        ("handmade", ["nme=3"], {}, "has no option 'nme'"),
        ("handmade", ["eval.split=none"], {}, "no evaluation has a held-out task"),
        ("hello", [], {"policy": "other.toml"}, "both have settings"),
        ("nowhere", [], {"policy": None, "resume": True}, "no policy is named"),
    ],
)
async def test_mistakes_cost_no_run_folder(
    what: str,
    given: list[str],
    more: dict[str, Any],
    message: str,
    isolating: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CodeRepairError, match=message) as caught:
        await evaluate_app.evaluate(evaluate_app.plan(what, given, **{"policy": "builtin:tiny", **more}))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "runs").exists()
