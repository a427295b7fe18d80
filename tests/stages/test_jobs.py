"""A jobs file before anything is started: its graph, its commands, mistakes, and which jobs run again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.errors import CodeRepairError, ConfigError, Several
from coderepairrl.stages import jobs, jobs_file
from coderepairrl.stages.jobs_file import Job, Jobs

HEAD = 'name = "p"\nconfig = "hello"\nset = ["rollout.group_size=4", "tasks.holdout=0.25", "eval.options.n=4"]\n'
CHAIN = (
    HEAD
    + """
[jobs.collect]
policy = "http://127.0.0.1:{port}/v1"
serve = "{python} -m workshop.tiny.teacher --port {port}"
set = ["eval.attempts=1"]
[jobs.rl]
kind = "train"
policy = "{sft}"
set = ["curriculum.band=true", 'curriculum.probe="{probe}"']
[jobs.probe]
kind = "eval"
policy = "{sft}"
preset = "greedy"
[jobs.sft]
config = "sft-tiny"
set = ['data.paths=["{collect}"]', 'agent.options.user_template="{prompt}"']
"""
)
STUDY = (
    HEAD.replace("[", '["rollout.calls=3", ', 1)
    + """
seeds = [3, 5]
metrics = ["resolved", "reward"]
[defaults.eval]
preset = "greedy"
[arms.base]
eval.policy = "builtin:tiny"
[arms.rl]
set = ["rollout.group_size=2", "train.lr=1e-3", "run.steps=2"]
train = {}
eval.policy = "{train}"
[arms.other]
eval.policy = "{rl.train}"
eval.set = ["rollout.calls=2"]
"""
)


def made(tmp_path: Path, text: str, *overrides: str) -> Jobs:
    file = tmp_path / "p.toml"
    file.write_text(text)
    return jobs_file.read(str(file), overrides)


def by_name(found: Jobs) -> dict[str, Job]:
    return {job.name: job for job in found.jobs}


def test_a_reference_is_a_need_and_other_braces_are_left_alone(tmp_path: Path) -> None:
    found = by_name(made(tmp_path, CHAIN))
    assert {name: job.needs for name, job in found.items()} == {
        **{"collect": (), "sft": ("collect",), "probe": ("sft",), "rl": ("probe", "sft")}
    }
    assert list(found) == ["collect", "sft", "probe", "rl"], "each after what it needs"
    assert found["sft"].settings == ('data.paths=["jobs/p/collect"]', 'agent.options.user_template="{prompt}"')


def test_a_job_is_a_command_that_anybody_could_type(tmp_path: Path) -> None:
    found = by_name(made(tmp_path, CHAIN, "rl.train.lr=2e-5", "rl.about=x"))
    crrl, command, source, *rest = found["rl"].words()
    assert (crrl, command, source) == ("crrl", "train", "hello")
    assert {"train.lr=2e-5", "run.name=rl", "run.dir=jobs/p", "eval.before=false", "model.init=weights"} <= {*rest}
    assert 'model.path="jobs/p/sft"' in rest and found["rl"].config().train.lr == 2e-5
    words = found["collect"].words(4711)
    assert words[words.index("--policy") + 1] == "http://127.0.0.1:4711/v1" and "eval.attempts=1" in words
    assert "eval.options.n=4" not in words, "said of held-out tasks"
    assert found["collect"].server(4711)[-1] == "4711"
    assert found["probe"].words()[-6:] == ["--policy", "jobs/p/sft", "--preset", "greedy", "-o", "jobs/p/probe"]
    assert "rollout.group_size=4" not in found["sft"].words(), "it begins with a config of its own"


def test_arms_run_for_each_seed_and_see_the_jobs_of_the_same_seed(tmp_path: Path) -> None:
    found = made(tmp_path, STUDY)
    assert {job.name: job.needs for job in found.jobs if job.seed == 5} == {
        "base/seed-5/eval": (),
        "rl/seed-5/train": (),
        "rl/seed-5/eval": ("rl/seed-5/train",),
        "other/seed-5/eval": ("rl/seed-5/train",),
    }
    other = by_name(found)["other/seed-5/eval"]
    assert other.config().rollout.calls == 2 and other.config().run.seed == 5 and other.config().eval.temperature == 0
    assert not [each for each in by_name(found)["rl/seed-3/eval"].settings if each.startswith("train.")]
    assert [(each.name, each.arms) for each in found.questions()] == [
        (metric, ("base", "rl", "other")) for metric in ("resolved", "reward")
    ]
    assert [(arm, *seeds) for arm, seeds in found.arms().items()] == [(arm, 3, 5) for arm in ("base", "rl", "other")]


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        (HEAD + "[jobs.tune]", "jobs.tune does not say its kind", "train | sft"),
        (HEAD + "[jobs.eval]", "does not say whose attempts", "policy ="),
        (HEAD + "[jobs.eval]\npolicy = '{trian}'\n[jobs.train]", "needs 'trian', which is no job", "'train'"),
        (HEAD + "[jobs.train]\nneeds = ['tune']", "needs 'tune', which is no job", ""),
        (
            HEAD + "[jobs.train]\nneeds = ['eval']\n[jobs.eval]\npolicy = '{train}'",
            "circle: train -> eval -> train",
            "",
        ),
        (HEAD + "[jobs.train]\npolicy = 'http://x/v1'", "cannot train a policy behind a URL", "model folder"),
        (HEAD + "[jobs.train]\nset = ['run.name=x']", "run.name cannot be set", "name, dir and seeds"),
        (HEAD + "[arms.a.train]\nset = ['run.seed=1']", "run.seed cannot be set", "seeds"),
        (HEAD + "[jobs.train]\npreset = 'greedy'", "preset means nothing to a job of kind train", "leave it out"),
        (HEAD + "[jobs.train]\nsets = []", "unknown key 'jobs.train.sets'", "'set'"),
        (HEAD + "[jobs.train]\nset = ['train.lr']", "is not KEY=VALUE", "train.lr=3e-6"),
        (HEAD + "[jobs.eval]\npolicy = 'x'\npreset = 'gredy'", "no preset 'gredy'", "greedy"),
        (HEAD + "[jobs.collect]\npolicy = 'http://x:{port}'", "serve and policy both need {port}", "{port}/v1"),
        (HEAD + "[jobs.student]\nkind = 'command'", "runs nothing", "run ="),
        (HEAD + "[arms.train.train]\n[jobs.train]", "train is an arm and a job", "another name"),
        (HEAD + "seeds = [1, 1]\n[arms.a.train]", "each once", "seeds ="),
        (STUDY + "[questions.q]\narms = ['base', 'lr']", "no arm with an evaluation is called 'lr'", "known: base"),
        (STUDY + "[questions.q]\narms = ['rl', 'rl']", "names an arm twice", "once"),
        (HEAD + "[jobs.eval]\npolicy = '{rl.train}'\n[arms.rl.train]", "needs 'rl.train'", ""),
    ],
)
def test_what_is_wrong_between_jobs_is_said_with_what_to_do(tmp_path: Path, text: str, message: str, fix: str) -> None:
    with pytest.raises(CodeRepairError) as caught:
        made(tmp_path, text)
    assert message in str(caught.value) and fix in caught.value.fix


def test_every_mistake_is_said_at_once_with_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Several) as caught:
        made(tmp_path, HEAD + "[jobs.sft]\nset = ['run.name=x']\n[jobs.train]\npreset = 'greedy'\n[jobs.tune]")
    assert len(caught.value.problems) == 3
    text = STUDY.replace("train = {}", "train.set = ['train.lrr=1']").replace("calls=2", "calls=two")
    text += "[questions.q]\narms = ['base', 'rl']\nmetric = 'speed'\nevaluation = 'verified'\n"
    _, problem = jobs.check(made(tmp_path, text))
    said = str(problem)
    assert "rl.train: override 'train.lrr=1': unknown key 'train.lrr'" in said
    assert "other.eval: override 'rollout.calls=two'" in said
    assert "base.eval: question q: there is no metric 'speed'" in said
    assert "base.eval: question q: there is no evaluation 'verified'" in said
    _, problem = jobs.check(made(tmp_path, STUDY.replace("eval.options.n=4", "eval.tasks=4")))
    assert "seeds would be measured on different tasks" in str(problem)


def test_overrides_name_a_job(tmp_path: Path) -> None:
    found = made(tmp_path, STUDY, "eval.preset=long", "train.train.lr=0.5")
    assert {job.preset for job in found.jobs if job.kind == "eval"} == {"long"}
    assert {job.config().train.lr for job in found.jobs if job.kind == "train"} == {0.5}
    for wrong in ("rll.train.lr=1", "train=1", "train"):
        with pytest.raises(ConfigError) as caught:
            made(tmp_path, STUDY, wrong)
        assert caught.value.fix


SMALL = (
    HEAD
    + """
[jobs.train]
set = ["run.steps=1", "curriculum.band=true", 'curriculum.probe="./probe.jsonl"']
[jobs.eval]
policy = "{train}"
[jobs.other]
kind = "eval"
policy = "builtin:tiny"
"""
)


def finish(job: Job, found: Jobs, output: str) -> None:
    """Write what `job` leaves behind."""
    folder = job.folder / "checkpoints" / "00001" if job.kind == "train" else job.folder
    folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "run.json").write_text("{}")
    (job.folder / "log.jsonl").write_text('{"type":"end","step":0}\n')
    for name in ("config.json", "model.safetensors") if job.kind == "train" else ():
        (folder / name).write_text(output)
    by = jobs.made_by(job, {each.name: each for each in found.jobs if each.name in job.needs})
    job.record.write_text(json.dumps({"made_by": by, "ended": True, "port": 0}))


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which all jobs of SMALL are done."""
    monkeypatch.chdir(tmp_path)
    Path("probe.jsonl").write_text('{"task": "a", "attempts": 1, "solved": 1}\n')
    found = made(tmp_path, SMALL)
    for job in found.jobs:
        finish(job, found, "weights")
    return tmp_path


def doing(path: Path, text: str = SMALL, *overrides: str) -> dict[str, str]:
    return {name: jobs.in_words(each) for name, each in jobs.standing(made(path, text, *overrides)).items()}


def test_only_what_changed_runs_again(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict.fromkeys(("train", "eval", "other"), "is done")
    assert doing(done) == doing(done, SMALL, "eval.about=x") == whole
    assert doing(done, SMALL, "other.preset=greedy")["other"].startswith(
        "runs again: eval.temperature 1.0 then, 0.0 now"
    )
    found = doing(done, SMALL, "train.train.lr=1e-3")
    assert found["train"] == "runs again: train.lr 0.0006 then, 0.001 now" and found["other"] == "is done"
    assert found["eval"] == "is done; runs again if the output of train changed"
    (done / "jobs/p/train/checkpoints/00001/model.safetensors").write_text("other weights")
    assert doing(done) == {**whole, "eval": "runs again: the output of train changed"}
    (done / "probe.jsonl").write_text('{"task": "a", "attempts": 1, "solved": 0}\n')
    assert doing(done)["train"] == "runs again: probe.jsonl changed"
    monkeypatch.setattr(jobs, "__version__", "99")
    assert doing(done)["other"] == "runs again: version 0.1.0 then, 99 now"


def test_a_job_that_was_killed_goes_on_and_foreign_folders_stay(done: Path) -> None:
    record = done / "jobs/p/train.job.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "ended": False}))
    assert doing(done)["train"] == "goes on"
    assert doing(done)["eval"] == "is done; runs again if the output of train changed"
    (done / "jobs/p/train/log.jsonl").unlink()
    assert doing(done)["train"] == "runs"
    record.write_text("{")
    with pytest.raises(CodeRepairError, match="cannot be read"):
        doing(done)
    record.unlink()
    with pytest.raises(CodeRepairError, match="was not made by this file"):
        doing(done)


def test_what_is_stale_is_in_no_table(done: Path) -> None:
    notes = jobs.table(made(done, SMALL, "train.train.lr=1e-3")).notes
    assert notes[0] == "train is not what the file asks for now: train.lr 0.0006 then, 0.001 now."
    assert notes[1] == "eval is not what the file asks for now: it needs train, which is not done."
    assert notes[2].startswith("2 of 3 jobs are missing")


async def test_a_job_alone_is_refused_where_its_need_is_not_done_or_another_process_has_it(done: Path) -> None:
    changed = made(done, SMALL, "train.train.lr=1e-3")
    assert await jobs.run(changed, 1, print, ["eval"]) == {"eval": "train, which it needs, is not done"}
    [other] = [job for job in changed.jobs if job.name == "other"]
    with jobs._alone(other):
        assert await jobs.run(changed, 1, print, ["other"]) == {"other": "another process runs other"}
    assert await jobs.run(changed, 1, print, ["other"]) == {}


def test_a_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, STUDY)
    shown = CliRunner().invoke(app, ["run", "p.toml", "--dry-run"])
    assert shown.exit_code == 0 and "rl/seed-3/train" in shown.stdout, shown.output
    plan = json.loads(CliRunner().invoke(app, ["run", "p.toml", "--dry-run", "--json"]).stdout)
    rows = [(row["job"], row["doing"], row["attempts"]) for row in plan if "seed-3" in row["job"]]
    evaluations = [(f"{arm}/seed-3/eval", "runs", 4) for arm in ("base", "rl", "other")]
    assert rows == [evaluations[0], ("rl/seed-3/train", "runs", 2 * 8 * 2), *evaluations[1:]]
    assert not (tmp_path / "jobs").exists()


def test_commands_submit_each_job_after_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, STUDY)
    shown = CliRunner().invoke(app, ["run", "p.toml", "--commands"])
    assert shown.exit_code == 0, shown.output
    assert "# rl/seed-3/train: crrl train hello eval.before=false" in shown.stdout
    stand_in = 'n=0\nsbatch() { echo "$@" >> submitted; wc -l < submitted; }\n'
    subprocess.run(["bash", "-euc", stand_in + shown.stdout], check=True)
    lines = Path("submitted").read_text().splitlines()
    assert lines[2] == "--parsable --job-name=p-rl-seed-3-train --wrap=crrl run p.toml --only rl/seed-3/train"
    assert [line.partition("--dependency=")[2].partition(" ")[0] for line in lines] == [
        *("", "", "", "afterok:3", "", "afterok:5", "afterok:3", "afterok:5")
    ]
    with pytest.raises(ConfigError, match="override 'rollout.calls=two'"):
        jobs.commands(made(tmp_path, STUDY.replace("calls=2", "calls=two")), print)


def test_a_command_is_any_program_and_its_script_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("make.py").write_text("print(1)")
    text = HEAD + "[jobs.student]\nkind = 'command'\nrun = '{python} ./make.py {folder}'\n"
    text += "[jobs.train]\npolicy = '{student}'"
    found = by_name(made(tmp_path, text))
    assert found["student"].words()[1:] == ["./make.py", "jobs/p/student"] and found["train"].needs == ("student",)
    before = jobs.made_by(found["student"], {})
    Path("make.py").write_text("print(2)")
    assert jobs._differences(before, jobs.made_by(found["student"], {})) == ["make.py changed"]


@pytest.mark.parametrize("name", jobs_file.shipped())
def test_shipped_files_are_sound(name: str) -> None:
    found = jobs_file.read(name)
    assert found.questions() and all(job.config() for job in found.jobs)
