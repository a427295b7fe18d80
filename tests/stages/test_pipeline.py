"""What a pipeline file means, what is wrong with it, and when a stage is made anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.config.sections.run import Health
from coderepairrl.errors import CodeRepairError, ConfigError, Several
from coderepairrl.report.pipeline import Stage, changes
from coderepairrl.stages import pipeline, pipeline_run, probe
from coderepairrl.stages.pipeline import Pipeline
from coderepairrl.stats.spending import Spent

HEAD = """
[pipeline]
name = "p"
config = "hello"
set = [
    "rollout.group_size=4", "eval.attempts=3", "sandbox=scripted", "tasks.options.n=64",
    "model.renderer=\\"template\\"",
]
"""
WHOLE = (
    HEAD
    + """
[stages.probe]
[stages.collect]
policy = "http://127.0.0.1:{port}/v1"
serve = "{python} -m workshop.tiny.teacher --port {port}"
set = ["eval.attempts=1"]
[stages.sft]
set = ["train.lr=1e-3"]
[stages.rl]
[stages.more]
kind = "rl"
policy = "sft"
[stages.eval]
policies = ["base", "collect", "sft", "rl", "more"]
preset = "greedy"
"""
)


def made(tmp_path: Path, text: str, *overrides: str) -> Pipeline:
    file = tmp_path / "p.toml"
    file.write_text(text)
    return pipeline.read(str(file), overrides)


def test_fine_tuning_takes_nothing_of_what_is_said_of_attempts_in_common(tmp_path: Path) -> None:
    common = 'extends = "hello"\n[run]\nname = "x"\n[run.health]\npatience = 8\n[curriculum.band]\nlow = 0.1\n'
    (tmp_path / "common.toml").write_text(common + "[train]\nbalance_kinds = true\n")
    head = (
        '[pipeline]\nname = "p"\nconfig = "common.toml"\nset = ["run.health.action=warn", "curriculum.band.low=0.2"]\n'
    )
    steps = {step.name: step for step in made(tmp_path, WHOLE.replace(HEAD, head)).steps}
    rl, sft = steps["rl"].config("builtin:tiny"), steps["sft"].config("builtin:tiny")
    assert (
        rl.curriculum.band and rl.curriculum.band.low == 0.2 and rl.run.health.patience == 8 and rl.train.balance_kinds
    )
    assert sft.curriculum.band is None and sft.run.health == Health() and not sft.train.balance_kinds


def test_each_stage_begins_with_what_the_last_one_has_trained(tmp_path: Path) -> None:
    steps = {step.name: step for step in made(tmp_path, WHOLE).steps}
    measured = [f"eval/{name}" for name in ("base", "collect", "sft", "rl", "more")]
    assert list(steps) == ["probe", "collect", "sft", "rl", "more", *measured]
    assert {name: step.policy.stage for name, step in steps.items() if step.policy.stage} == {
        **{"rl": "sft", "more": "sft"},
        **{"eval/sft": "sft", "eval/rl": "rl", "eval/more": "more"},
    }
    assert steps["sft"].policy.path == steps["probe"].policy.path == "builtin:tiny"
    assert steps["sft"].examples == (Path("pipelines/p/collect"),) and steps["sft"].needs == {"collect"}
    assert steps["eval/collect"].policy == steps["collect"].policy
    assert steps["eval/rl"].folder == Path("pipelines/p/eval/rl")


def test_a_stage_is_a_command_that_anybody_could_type(tmp_path: Path) -> None:
    steps = {step.name: step for step in made(tmp_path, WHOLE, "rl.train.lr=2e-5", "rl.about=x").steps}
    command, source, *rest = steps["rl"].words()
    assert (command, source) == ("train", "hello")
    assert {"train.lr=2e-5", "run.name=rl", "run.dir=pipelines/p", "eval.before=false", "model.init=weights"} <= {*rest}
    assert 'model.path="pipelines/p/sft"' in rest and "eval.attempts=3" in rest
    assert steps["rl"].config().train.lr == 2e-5
    assert steps["sft"].words()[0] == "sft" and 'data.paths=["pipelines/p/collect"]' in steps["sft"].words()
    words = steps["collect"].words(4711)
    assert words[words.index("--policy") + 1] == "http://127.0.0.1:4711/v1"
    assert "eval.attempts=1" in words and not {"eval.attempts=3", 'model.renderer="template"'} & {*words}
    assert "eval.attempts=3" not in steps["probe"].words() and 'model.renderer="template"' in steps["probe"].words()
    assert steps["eval/sft"].words()[-4:] == ("--preset", "greedy", "-o", "pipelines/p/eval/sft")


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        (HEAD + "[stages.sft]", "nothing to learn from", "kind collect"),
        (HEAD + "[stages.tune]", "says nothing of its kind", "probe | collect"),
        (HEAD + "[stages.rl]\npolicy = 'eval'\n[stages.eval]", "stage eval comes later", "put it before"),
        (HEAD + "[stages.collect]\n[stages.rl]\npolicy = 'collect'", "collect trains no policy", "sft or rl"),
        (HEAD + "[stages.rl]\npolicy = 'http://x/v1'", "cannot train what is behind a URL", "model folder"),
        (HEAD + "[stages.rl]\nset = ['model.path=x']", "model.path is the pipeline's own", "policy ="),
        (HEAD + "[stages.rl]\nset = ['run.name=x']", "run.name is the pipeline's own", "called as its table"),
        (HEAD + "[stages.rl]\nanyway = true", "means nothing to a stage of kind rl", "kind probe"),
        (HEAD + "[stages.rl]\nsets = []", "unknown key 'stages.rl.sets'", "'set'"),
        (HEAD + "[stages.rl]\nset = ['train.lr']", "is not KEY=VALUE", "train.lr=3e-6"),
        (HEAD + "[stages.eval]\npreset = 'gredy'", "no preset 'gredy'", "greedy"),
        (HEAD + "[stages.eval]\npolicy = 'base'", "is of kind eval", "policies"),
        (HEAD + "[stages.eval]\npolicies = ['base', 'base']", "two that are called base", "once"),
        (HEAD + "[stages.collect]\nserve = 'x'", "serve needs {port}", "{port}/v1"),
        (HEAD + "[stages.collect]\npolicy = 'http://x:{port}'", "nothing serves", "serve ="),
        (HEAD + "[stages.sft]\nexamples = ['nowhere']", "no examples nowhere", ""),
        (HEAD.replace('"hello"', '"helo"') + "[stages.rl]", "no config file helo", "hello"),
        (HEAD.replace(",\n]", ', "model.init=random"]') + "[stages.probe]", "random weights", "trains before"),
        ("[pipeline]\nname = 'p'\nconfig = 'hello'", "stages: Field required", "docs/guides/pipeline.md"),
    ],
)
def test_what_is_wrong_between_stages_is_said_with_what_to_do(
    tmp_path: Path, text: str, message: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(tmp_path, text)
    assert message in str(caught.value) and fix in caught.value.fix


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(Several) as caught:
        made(
            tmp_path, HEAD + "[stages.sft]\nset = ['run.name=x']\n[stages.rl]\nanyway = true\n[stages.eval]\npreset='x'"
        )
    assert len(caught.value.problems) == 4
    _, problem = pipeline_run.check(
        made(tmp_path, HEAD + "[stages.rl]\nset=['train.lrr=1']\n[stages.eval]\nset=['run.steps=x']")
    )
    assert problem is not None
    assert "stage rl: override 'train.lrr=1': unknown key 'train.lrr'" in str(problem)
    assert "stage eval/base: override 'run.steps=x'" in str(problem)


def test_overrides_name_a_stage(tmp_path: Path) -> None:
    found = made(tmp_path, WHOLE, "probe.anyway=true", "pipeline.name=q", "eval.preset=long", "sft.train.lr=0.5")
    assert found.folder == Path("pipelines/q") and found.file.stages["probe"].anyway
    assert found.file.stages["sft"].set == ("train.lr=1e-3", "train.lr=0.5")
    for wrong in ("rll.train.lr=1", "rl=1", "rl"):
        with pytest.raises(ConfigError) as caught:
            made(tmp_path, WHOLE, wrong)
        assert caught.value.fix


SMALL = HEAD.replace(",\n]", ', "eval.options.n=4"]') + "[stages.probe]\nset = ['eval.tasks=2']\n[stages.eval]\n"


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipeline whose stages are done, as far as their folders say."""
    monkeypatch.chdir(tmp_path)
    for each in pipeline_run.check(made(tmp_path, SMALL))[0]:
        each.step.folder.mkdir(parents=True)
        (each.step.folder / "log.jsonl").write_text('{"type":"end","step":0}\n{"type":"used"}\n')
        (each.step.folder / probe.VERDICT).write_text("{}")
        by = pipeline_run.made_by(each.step, each.tasks)
        each.step.record.write_text(json.dumps({"made_by": by, "port": 0}))
    return tmp_path


def doing(path: Path, text: str = SMALL, *overrides: str, only: tuple[str, ...] = ()) -> dict[str, str]:
    planned, problem = pipeline_run.check(made(path, text, *overrides), only)
    if problem is not None:
        raise problem
    return {each.step.name: each.doing for each in planned}


def test_only_what_has_changed_is_made_anew(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doing(done) == {"probe": "kept", "eval/base": "kept"}
    assert doing(done, SMALL, "probe.eval.attempts=2") == {"probe": "anew", "eval/base": "kept"}
    assert doing(done, SMALL, "eval.preset=greedy") == {"probe": "kept", "eval/base": "anew"}
    assert doing(done, SMALL, "probe.about=x", "probe.anyway=true") == {"probe": "kept", "eval/base": "kept"}
    assert doing(done, SMALL, "eval.eval.options.n=5") == {"probe": "kept", "eval/base": "anew"}, "other tasks"
    assert set(doing(done, SMALL.replace("size=4", "size=5")).values()) == {"anew"}
    (done / "pipelines/p/probe" / probe.VERDICT).unlink()
    assert doing(done) == {"probe": "goes on", "eval/base": "kept"}, "killed before its verdict was written"
    (done / "pipelines/p/probe/log.jsonl").write_text('{"type":"end","step":0}\n{"type"')
    assert doing(done) == {"probe": "goes on", "eval/base": "kept"}
    monkeypatch.setattr(pipeline_run, "__version__", "99")
    assert doing(done) == {"probe": "anew", "eval/base": "anew"}


def test_a_collection_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = HEAD + "[stages.collect]\nset = ['eval.tasks=2']\n[stages.sft]\n"
    [collected, _] = pipeline_run.check(made(tmp_path, text))[0]
    assert collected.attempts == 2 * 4, "as many as its command makes"
    collected.step.folder.mkdir(parents=True)
    (collected.step.folder / "log.jsonl").write_text('{"type":"start","step":0}\n')
    by = pipeline_run.made_by(collected.step, collected.tasks)
    collected.step.record.write_text(json.dumps({"made_by": by, "port": 0}))
    assert doing(tmp_path, text) == {"collect": "goes on", "sft": "runs"}


def test_a_policy_that_has_become_another_is_noticed(done: Path, tmp_path: Path) -> None:
    record = done / "pipelines/p/eval/base.json"
    data = json.loads(record.read_text())
    data["made_by"]["policy"]["model.safetensors"] = "0" * 64
    record.write_text(json.dumps(data))
    planned, _ = pipeline_run.check(made(done, SMALL))
    assert [each.doing for each in planned] == ["kept", "anew"]
    assert planned[1].differs[0].startswith("policy.model.safetensors 000000000000... then")


def test_what_a_stage_reads_is_never_stale(done: Path) -> None:
    more = SMALL.replace("[stages.eval]", "[stages.rl]\nset = ['run.steps=1']\n[stages.eval]")
    with pytest.raises(
        CodeRepairError, match="eval/rl reads what stage rl makes, which is left out, and it is not done"
    ):
        doing(done, more, only=("eval",))
    alone = {"probe": "kept"} | dict.fromkeys(("rl", "eval/base", "eval/rl"), "left out")
    assert doing(done, more, only=("probe",)) == alone
    assert doing(done, more)["eval/rl"] == "runs"
    with pytest.raises(CodeRepairError, match="there is no stage evil"):
        doing(done, more, only=("evil",))


def test_what_cannot_be_known_to_be_as_the_file_says_is_not_read(done: Path) -> None:
    more = SMALL.replace("[stages.eval]", "[stages.rl]\nset = ['run.steps=no']\n[stages.eval]")
    with pytest.raises(CodeRepairError, match=r"stage rl: .*run.steps"):
        doing(done, more, only=("eval",))
    assert doing(done, more, only=("probe",))["probe"] == "kept"


def test_files_that_settings_name_are_part_of_what_a_stage_was_made_by(tmp_path: Path) -> None:
    probed = tmp_path / "difficulty.jsonl"
    probed.write_text('{"task": "a", "attempts": 1, "solved": 1}\n')
    sets = ("curriculum.band=true", f"curriculum.probe={probed}", "train.teacher=builtin:tiny")
    text = HEAD + f"[stages.rl]\nset = {json.dumps(sets)}"
    before = pipeline_run.made_by(made(tmp_path, text).steps[0], "")
    assert set(before["files"]["teacher"]) >= {"model.safetensors"}
    probed.write_text('{"task": "a", "attempts": 1, "solved": 0}\n')
    after = pipeline_run.made_by(made(tmp_path, text).steps[0], "")
    assert before["files"]["probe"] != after["files"]["probe"]
    assert {**before, "files": {}} == {**after, "files": {}}


def test_a_folder_of_somebody_else_is_not_touched(done: Path) -> None:
    (done / "pipelines/p/probe.json").unlink()
    with pytest.raises(CodeRepairError, match="was not made by this pipeline"):
        doing(done)


@pytest.mark.parametrize("finished", [False, True])
def test_where_nothing_was_evaluated_nothing_is_compared(tmp_path: Path, finished: bool) -> None:
    folder = tmp_path / "eval" / "base"
    assert changes([Stage("eval/base", "eval", "base", "", folder, finished, None, Spent(), "", "")]) == ([], [])


def test_a_dry_run_shows_the_whole_plan_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, SMALL)
    shown = CliRunner().invoke(app, ["pipeline", "p.toml", "--dry-run"])
    assert shown.exit_code == 0 and "probe" in shown.stdout and "eval/base" in shown.stdout, shown.output
    plan = json.loads(CliRunner().invoke(app, ["pipeline", "p.toml", "--dry-run", "--json"]).stdout)
    rows = [(row["stage"], row["doing"], row["attempts"]) for row in plan]
    assert rows == [("probe", "runs", 8), ("eval/base", "runs", 12)]
    assert not (tmp_path / "pipelines").exists()
