"""Evaluation without training: no learner, no training task, any policy, any sources side by side."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import learn, models
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.report.comparison import Question
from coderepairrl.report.verdict import answer
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.stages import evaluation
from coderepairrl.stages.arguments import plan_evaluations, preset_settings
from coderepairrl.stages.evaluation import Evaluation, evaluate_all
from coderepairrl.stages.results import format_results, read_results
from coderepairrl.tasks import JsonlSource

AGENT = 'agent.options={ system = "compact", tools = "compact", user_template = "{prompt}" }'
SETTINGS = (
    *("reward.patch_edits=1.0", "eval.source=handmade", "eval.split=test", "tasks.options.path=nowhere.jsonl"),
    *("rollout.calls=2", "rollout.tokens=3000", "rollout.turn_tokens=8", "rollout.seconds=60", AGENT),
)


async def measure(plan: AgentPlan, folder: RunFolder, *, resume: bool = False) -> dict[str, Any]:
    return await evaluation.measure(Evaluation(plan, folder, resume=resume), quiet=True)


def chosen(model: Path, *more: str) -> AgentPlan:
    return evaluation.plan_evaluation(str(model), [*SETTINGS, *more])


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
    found = await measure(chosen(miniature, *more), folder)
    assert found.keys() == {"eval", "cwe"}
    assert found["cwe"]["tasks"] == 3 and found["cwe"]["values"].keys() >= {"classification"}
    assert found["eval"]["tasks"] == 2 and found["eval"]["values"].keys() >= {"patch_edits"}
    assert open_run(folder.path).tasks().keys() >= {"cwe/0", "cwe/1", "cwe/2"}
    assert {task.id: task for task in JsonlSource(folder.path / "tasks.jsonl")} == open_run(folder.path).tasks()
    with pytest.raises(UsageError, match="is an evaluation: it has trained no model"):
        models.resolve_model(str(folder.path))
    with pytest.raises(UsageError, match="already holds a run"):
        await measure(chosen(miniature, *more), folder)
    episodes = [record for record in folder.records() if record["type"] == "episode"]
    assert await measure(chosen(miniature, *more), folder, resume=True) == found
    again = [record for record in folder.records() if record["type"] == "episode"]
    assert again == episodes, "nothing was measured again"
    with pytest.raises(ConfigError, match="has rollout.calls=2, which cannot become 3: all its attempts"):
        await measure(chosen(miniature, *more, "rollout.calls=3"), folder, resume=True)


async def test_an_evaluation_goes_on_with_the_weights_that_it_began_with(
    miniature: Path, tmp_path: Path, isolating: None
) -> None:
    """Whatever lies in their place now: the folder's name and the settings are the same."""
    model, folder = tmp_path / "model", RunFolder(tmp_path / "evaluated")
    shutil.copytree(miniature, model)
    await measure(chosen(model, "eval.tasks=1"), folder)
    weights = model / "model.safetensors"
    assert folder.about()["model"][weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = list(folder.records())
    with pytest.raises(UsageError, match=r"began from another model .*: model\.safetensors has changed"):
        await measure(chosen(model, "eval.tasks=1"), folder, resume=True)
    assert list(folder.records()) == before
    weights.write_bytes(whole)
    await measure(chosen(model, "eval.tasks=1"), folder, resume=True)


async def test_agents_side_by_side_under_the_same_limits(miniature: Path, tmp_path: Path, isolating: None) -> None:
    also = 'eval.also={ plain = { agent = { name = "direct", options = { files = "oracle", system = "" } } } }'
    plan = chosen(miniature, also, "rollout.tokens=4000")
    folder = RunFolder(tmp_path / "evaluated")
    found = await measure(plan, folder)
    assert found["eval"]["tasks"] == found["plain"]["tasks"] == 2
    conditions = open_run(folder.path).about()["conditions"]
    [nano], [direct] = (conditions[name]["agents"] for name in ("eval", "plain"))
    assert (nano["name"], direct["name"]) == ("nano", "direct, shown files of the reference")
    limits = ("calls", "tokens", "seconds", "turn_tokens")
    assert [nano[key] for key in limits] == [direct[key] for key in limits]
    turns = {name: [len(each.turns) for each in folder.episodes(f"{name}-00000")] for name in found}
    assert set(turns["plain"]) == {1} and max(turns["eval"]) > 1
    text = format_results([read_results(folder)])
    assert "plain       direct, shown files of the reference" in text
    compared = answer([f"{folder.path}@eval", f"{folder.path}@plain"], Question("reward"))
    assert compared.numbers["settings"]["agent.name"] == ["nano", "direct"]
    with pytest.raises(ConfigError, match="unknown agent .dirct."):
        chosen(miniature, 'eval.also={ plain = { agent = "dirct" } }')


def test_an_agent_of_the_settings_keeps_its_options_when_it_is_named(isolating: None) -> None:
    """The tiny policy knows the short prompt alone: by the long one no request would fit."""
    [named] = plan_evaluations("hello", ["eval.tasks=1"], ["builtin:tiny"], agents=["direct", "nano"])
    [plain] = plan_evaluations("hello", ["eval.tasks=1"], ["builtin:tiny"])
    other = named.plan.config.eval.each["nano"].agent
    assert other == plain.plan.config.agent and other.options["tools"] == "compact"
    assert (named.plan.config.agent.name, named.plan.config.agent.options) == ("direct", {})


@pytest.mark.parametrize(
    ("what", "given", "more", "message"),
    [
        ("handmade", [], {"policies": ()}, "no policy is named"),
        ("handmade", [], {"shard": "3/2"}, "'3/2' is not a shard"),
        ("handmade", [], {"shard": "9/9"}, "shard 9/9 has none"),
        ("handmade", [], {"prices": "1,2"}, "--prices is for a policy behind a URL"),
        ("handmade", ["nme=3"], {}, "has no option 'nme'"),
        ("handmade", ["eval.split=none"], {}, "no evaluation has a held-out task"),
        ("hello", [], {"policies": ["other.toml"]}, "both have settings"),
        ("nowhere", [], {"policies": (), "resume": True}, "no policy is named"),
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
        await evaluate_all(plan_evaluations(what, given, **{"policies": ["builtin:tiny"], **more}))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_a_preset_is_known_by_its_name() -> None:
    assert "eval.temperature=0.0" in preset_settings("greedy") and preset_settings(None) == ()
    with pytest.raises(UsageError, match="no preset 'gredy'"):
        preset_settings("gredy")
