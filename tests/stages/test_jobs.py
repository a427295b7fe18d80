"""A jobs file before anything is started: its graph, its commands, mistakes, and which jobs run again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import rehearsal
from coderepairrl.config import load_config
from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.report.jobs import read_jobs_folder
from coderepairrl.stages import jobs, jobs_file
from coderepairrl.stages.command import compute_needs
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


def read_jobs(tmp_path: Path, text: str, *overrides: str) -> Jobs:
    file = tmp_path / "p.toml"
    file.write_text(text)
    return jobs_file.read_jobs_file(str(file), overrides)


def by_name(found: Jobs) -> dict[str, Job]:
    return {job.name: job for job in found.jobs}


def test_a_reference_is_a_need_and_other_braces_are_left_alone(tmp_path: Path) -> None:
    found = by_name(read_jobs(tmp_path, CHAIN))
    assert {name: job.needs for name, job in found.items()} == {
        **{"collect": (), "sft": ("collect",), "probe": ("sft",), "rl": ("probe", "sft")}
    }
    assert list(found) == ["collect", "sft", "probe", "rl"], "each after what it needs"
    assert found["sft"].settings == ('data.paths=["jobs/p/collect"]', 'agent.options.user_template="{prompt}"')


def test_a_job_is_a_plain_command(tmp_path: Path) -> None:
    found = by_name(read_jobs(tmp_path, CHAIN, "rl.train.lr=2e-5", "rl.about=x"))
    crrl, command, source, *rest = found["rl"].command_line()
    assert (crrl, command, source) == ("crrl", "train", "hello")
    assert {"train.lr=2e-5", 'run.name="rl"', 'run.dir="jobs/p"', "eval.before=false", "model.init=weights"} <= {*rest}
    assert 'model.path="jobs/p/sft"' in rest and found["rl"].config().train.lr == 2e-5
    words = found["collect"].command_line(4711)
    assert words[words.index("--policy") + 1] == "http://127.0.0.1:4711/v1" and "eval.attempts=1" in words
    assert "eval.options.n=4" not in words, "they are about held-out tasks"
    assert found["collect"].server_command_line(4711)[-1] == "4711"
    assert found["probe"].command_line()[-6:] == ["--policy", "jobs/p/sft", "--preset", "greedy", "-o", "jobs/p/probe"]
    assert "rollout.group_size=4" not in found["sft"].command_line(), "it begins with a config of its own"


def test_arms_run_for_each_seed_and_see_the_jobs_of_the_same_seed(tmp_path: Path) -> None:
    found = read_jobs(tmp_path, STUDY)
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
    by = jobs.collect_inputs(job, {each.name: each for each in found.jobs if each.name in job.needs})
    job.record.write_text(json.dumps({"made_by": by, "ended": True, "port": 0}))


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which all jobs of SMALL are done."""
    monkeypatch.chdir(tmp_path)
    Path("probe.jsonl").write_text('{"task": "a", "attempts": 1, "solved": 1}\n')
    found = read_jobs(tmp_path, SMALL)
    for job in found.jobs:
        finish(job, found, "weights")
    return tmp_path


def list_states(path: Path, text: str = SMALL, *overrides: str) -> dict[str, str]:
    states = jobs.read_job_states(read_jobs(path, text, *overrides))
    return {name: jobs.describe_job_state(state) for name, state in states.items()}


def test_only_what_changed_runs_again(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict.fromkeys(("train", "eval", "other"), "is done")
    assert list_states(done) == list_states(done, SMALL, "eval.about=x") == whole
    of_steps = ("rollout.group_size=2", "rollout.temperature=2", "run.steps=9", "tasks.verify=false", "eval.every=3")
    assert list_states(done, SMALL, *(f"{name}.{each}" for name in ("other", "eval") for each in of_steps)) == whole
    assert list_states(done, SMALL, "train.plan.tokens=99") == whole
    common = list_states(done, SMALL.replace("rollout.group_size=4", "rollout.group_size=2"))
    assert common["train"].startswith("runs again: rollout.group_size 4 then") and common["other"] == "is done"
    for read in ("rollout.calls=3", "run.seed=9", "run.retries=0", "eval.tasks=2"):
        assert list_states(done, SMALL, f"other.{read}")["other"].startswith(f"runs again: {read.partition('=')[0]} ")
    assert list_states(done, SMALL, "other.preset=greedy")["other"].startswith(
        "runs again: eval.temperature 1.0 then, 0.0 now"
    )
    found = list_states(done, SMALL, "train.train.lr=1e-3")
    assert found["train"] == "runs again: train.lr 0.0006 then, 0.001 now" and found["other"] == "is done"
    assert found["eval"] == "is done; runs again if the output of train changed"
    (done / "jobs/p/train/checkpoints/00001/model.safetensors").write_text("other weights")
    assert list_states(done) == {**whole, "eval": "runs again: the output of train changed"}
    (done / "probe.jsonl").write_text('{"task": "a", "attempts": 1, "solved": 0}\n')
    assert list_states(done)["train"] == "runs again: probe.jsonl changed"
    monkeypatch.setattr(jobs, "__version__", "99")
    assert list_states(done)["other"] == "runs again: version 0.1.0 then, 99 now"


def test_mistakes_of_finished_jobs_are_reported_with_their_names(done: Path) -> None:
    found = read_jobs(done, SMALL, "eval.rollout.cals=2", "other.rollout.cals=2")
    with pytest.raises(CodeRepairError, match="eval, other: .*unknown key 'rollout.cals'"):
        raise jobs.plan_jobs(found)[1] or AssertionError
    assert jobs.read_job_states(found)["other"].doing == "runs again"


def test_a_job_that_was_killed_goes_on_and_foreign_folders_stay(done: Path) -> None:
    for name in ("other", "train"):
        record = done / f"jobs/p/{name}.job.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "ended": False}))
    assert list_states(done, SMALL, "other.run.steps=9")["other"].startswith("runs again"), "--resume refuses it"
    assert list_states(done)["train"] == "goes on"
    assert list_states(done)["eval"] == "is done; runs again if the output of train changed"
    (done / "jobs/p/train/log.jsonl").unlink()
    assert list_states(done)["train"] == "runs"
    summary = {"name": "p", "jobs": [{"name": "train", "kind": "train", "about": "", "stale": ""}]}
    (done / "jobs/p/jobs.json").write_text(json.dumps(summary))
    for torn in ("", "{", "{}", "[]"):
        record.write_text(torn)
        for read in (lambda: list_states(done), lambda: read_jobs_folder(done / "jobs/p")):
            with pytest.raises(CodeRepairError, match=r"train\.job\.json is damaged") as refused:
                read()
            assert "rm -r" in refused.value.fix and "crrl run" in refused.value.fix
    record.unlink()
    with pytest.raises(CodeRepairError, match="was not made by this file"):
        list_states(done)


def test_a_command_is_any_program_and_its_script_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("make.py").write_text("print(1)")
    text = HEAD + "[jobs.student]\nkind = 'command'\nrun = '{python} ./make.py {folder}'\n"
    text += "[jobs.train]\npolicy = '{student}'"
    found = by_name(read_jobs(tmp_path, text))
    assert found["student"].command_line()[1:] == ["./make.py", "jobs/p/student"]
    assert found["train"].needs == ("student",)
    before = {"made_by": jobs.collect_inputs(found["student"], {}), "ended": True}
    Path("make.py").write_text("print(2)")
    assert jobs._list_differences(before, jobs.collect_inputs(found["student"], {})) == ["make.py changed"]


MISTAKES = {
    "the file's own, also with overrides": ("jobs = 3", "jobs: Input should be a valid dictionary"),
    "a key of an arm's job": ("[arms.rl]\ntrain.lr = 3", "unknown key 'arms.rl.train.lr'"),
    "none": ("", "there are no jobs"),
    "a quotation": ("[jobs.x]\nkind = 'command'\nrun = \"x '{folder}\"", "jobs.x.run: No closing quotation"),
    "a taken name": ("[jobs.python]\nkind = 'train'", "no job or arm can be called 'python'"),
    "a default": ("defaults.collect.preset = 'greedy'\njobs.collect.policy = 'x'", "preset means nothing to a job of"),
    "a default of a program": (
        "defaults.command.set = ['a=1']\n[jobs.x]\nkind = 'command'\nrun = 'x'",
        "jobs.x.set means nothing to a job of kind command",
    ),
    "a preset": ("defaults.eval.preset = 'gready'\njobs.eval.policy = 'x'", "no preset 'gready'"),
    "no kind": ("[jobs.tune]", "jobs.tune does not say its kind"),
    "nobody's attempts": ("[jobs.eval]", "has no policy to attempt tasks with"),
    "a need": ("[jobs.eval]\npolicy = '{trian}'\n[jobs.train]", "needs 'trian', which is not a job"),
    "a need of all seeds": ("[jobs.eval]\npolicy = '{rl.train}'\n[arms.rl.train]", "needs 'rl.train'"),
    "a model elsewhere": ("[jobs.train]\npolicy = 'http://x/v1'", "cannot train a policy behind a URL"),
    "a name": ("[jobs.train]\nset = ['run.name=x']", "run.name cannot be set"),
    "a seed": ("[arms.a.train]\nset = ['run.seed=1']", "run.seed cannot be set"),
    "a port": ("[jobs.collect]\npolicy = 'http://x:{port}'", "serve and policy both need {port}"),
    "a program": ("[jobs.student]\nkind = 'command'", "runs nothing"),
    "an arm": ("[arms.train.train]\n[jobs.train]", "train is an arm and a job"),
    "a seed twice": ("seeds = [1, 1]\n[arms.a.train]", "each once"),
    "a question": ("[arms.a]\neval.policy = 'x'\n[questions.q]\narms = ['a', 'lr']", "no arm with an evaluation is"),
    "a criterion": (
        "[arms]\na.eval.policy = 'x'\nb.eval.policy = 'y'\n[questions]\nq.arms = ['a', 'b']\n[criteria]\nc = ['q']",
        "criteria.c: no question with at_least is called 'q'",
    ),
    "a circle": (
        "[jobs.train]\npolicy = '{sft}'\n[jobs.sft]\npolicy = '{train}'",
        "circle: train -> sft -> train",
    ),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_file_are_reported(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(CodeRepairError) as error:
        read_jobs(tmp_path, HEAD + text, *(["a.b=1"] if text == "jobs = 3" else []))
    assert message in str(error.value)


def test_overrides_name_a_job_and_seeds_are_measured_on_the_same_tasks(tmp_path: Path) -> None:
    found = read_jobs(tmp_path, STUDY, "eval.preset=long", "train.train.lr=0.5")
    assert {job.preset for job in found.jobs if job.kind == "eval"} == {"long"}
    assert {job.config().train.lr for job in found.jobs if job.kind == "train"} == {0.5}
    for wrong in ("rll.train.lr=1", "train=1", "train"):
        with pytest.raises(ConfigError):
            read_jobs(tmp_path, STUDY, wrong)
    _, problem = jobs.plan_jobs(read_jobs(tmp_path, STUDY.replace("eval.options.n=4", "eval.tasks=4")))
    assert "seeds would be measured on different tasks" in str(problem)


def test_a_model_that_was_not_fetched_is_a_mistake_of_its_job(tmp_path: Path) -> None:
    _, problem = jobs.plan_jobs(
        read_jobs(tmp_path, HEAD + "[jobs.sft]\nconfig = 'sft-thesis'\nset = ['data.paths=[\"x\"]']")
    )
    assert "sft: Qwen/Qwen3-14B is not on this machine" in str(problem)


def test_stale_jobs_are_left_out_of_the_table(done: Path) -> None:
    notes = jobs.write_jobs_table(read_jobs(done, SMALL, "train.train.lr=1e-3")).notes
    assert notes[0] == "train is not what the file asks for now: train.lr 0.0006 then, 0.001 now."
    assert notes[1] == "eval is not what the file asks for now: it needs train, which is not done."
    assert notes[2].startswith("2 of 3 jobs are missing")


async def test_a_job_alone_is_refused_where_its_need_is_not_done_or_another_process_has_it(done: Path) -> None:
    changed = read_jobs(done, SMALL, "train.train.lr=1e-3")
    assert await jobs.run_jobs(changed, 1, print, ["eval"]) == {"eval": "train, which it needs, is not done"}
    [other] = [job for job in changed.jobs if job.name == "other"]
    with jobs._lock_job(other):
        assert await jobs.run_jobs(changed, 1, print, ["other"]) == {"other": "another process runs other"}
    assert await jobs.run_jobs(changed, 1, print, ["other"]) == {}


def test_folders_may_have_spaces_and_jobs_may_be_numbers(tmp_path: Path) -> None:
    text = "dir = 'my jobs'\n[jobs.1]\nkind = 'train'\n[jobs.x]\nkind = 'command'\nrun = 'cp -r {1} {folder}'"
    found = by_name(read_jobs(tmp_path, HEAD + text))
    assert found["x"].command_line() == ["cp", "-r", "my jobs/p/1", "my jobs/p/x"]
    assert (found["1"].config().run.name, found["1"].config().run.dir) == ("1", "my jobs/p")


def test_a_serving_command_may_need_jobs_and_is_an_input_of_attempts(tmp_path: Path) -> None:
    text = HEAD + "[jobs.train]\n[jobs.eval]\npolicy = 'http://127.0.0.1:{port}/v1'\nserve = 'x {train} {port} --top 1'"
    eval_ = by_name(read_jobs(tmp_path, text))["eval"]
    assert eval_.needs == ("train",) and eval_.server_command_line(7) == ["x", "jobs/p/train", "7", "--top", "1"]
    assert "http://127.0.0.1:{port}/v1" in eval_.command_line(), "no port is known yet"
    other = by_name(read_jobs(tmp_path, text.replace("--top 1", "--top 2")))["eval"]
    record = {"made_by": jobs.collect_inputs(eval_, {}), "ended": True}
    assert jobs._list_differences(record, jobs.collect_inputs(other, {}))


def test_the_comments_of_lines_for_slurm_stay_comments(tmp_path: Path) -> None:
    text = HEAD + '[jobs.x]\nkind = \'command\'\nrun = """echo \'1\n2\' {folder}"""'
    lines = jobs.make_slurm_script(read_jobs(tmp_path, text), print).splitlines()
    assert [line[:4] for line in lines] == ["# x:", "# 2'", "job1"]


def test_the_last_error_of_a_program_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: old\nTraceback:\n  x\nFileNotFoundError: no such program: 'x'\nbye\n")
    assert jobs.find_last_error(log) == "FileNotFoundError: no such program: 'x'"
    assert jobs.find_last_error(log, log.stat().st_size) == ""


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with jobs._run_process(["no-such-program", "x"], log) as process:
        assert await process.wait() == 1
    assert jobs.find_last_error(log) == "no-such-program: No such file or directory"


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/study.toml"))


@pytest.mark.parametrize("name", [*jobs_file.shipped_jobs_files(), *map(str, EXAMPLES)])
def test_shipped_files_are_sound(name: str) -> None:
    found = jobs_file.read_jobs_file(name)
    assert found.questions() and all(job.config() for job in found.jobs)


@pytest.mark.parametrize("name", ["thesis", "scaffolds"])
def test_the_guide_has_the_planned_hours_of_all_trainings(name: str) -> None:
    trainings = [job for job in jobs_file.read_jobs_file(name).jobs if job.kind == "train"]
    hours = [
        compute_needs(load_config(job.source, (*job.overrides(), "gpu.memory_gb=80")))["run"]["gpu_hours"]
        for job in trainings
    ]
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "jobs.md").read_text()
    [row] = [line for line in guide.splitlines() if line.startswith(f"| `{name}` |")]
    assert f", {sum(hours):.0f} GPU-hours are" in row and f"of {hours[0]:.0f}" in row


def test_the_rehearsal_of_the_thesis_is_its_study_with_another_arm(tmp_path: Path) -> None:
    where = argparse.Namespace(work=tmp_path, clone="/mirrors/{repository}")
    rows = dict.fromkeys(("swe_gym", "multilingual", "verified"), "rows.jsonl")
    found = jobs_file.read_jobs_file(str(rehearsal.write_study(where, rows, {}, {})))
    shipped = jobs_file.read_jobs_file("thesis")
    assert [*found.arms()] == [*shipped.arms(), "edits"] and all(job.config() for job in found.jobs)
    assert [each.name for each in found.questions()] == [each.name for each in shipped.questions()]
