"""A study before anything is started: its file, its commands, what they cost, and the jobs of Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.config import load
from coderepairrl.errors import CodeRepairError, ExitCode, RunError, Several
from coderepairrl.stages import study, study_run

CONFIG = """
extends = "hello"
[tasks]
source = "handmade"
[eval]
split = "train"
options = { select = { languages = ["python"] } }
"""
FILE = """
[study]
name = "s"
config = "own.toml"
seeds = [3, 5]
set = ["train.lr=1e-3", "eval.options.select.n=2", "run.steps=2"]
preset = "greedy"
at_evaluation = ["eval.attempts=2"]

[arms.base]
policy = "builtin:tiny"
[arms.rl]
set = ["rollout.group_size=4"]
[arms.other]
policy = "rl"
at_evaluation = ["rollout.calls=2"]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.toml"
    path.write_text(FILE)
    (tmp_path / "own.toml").write_text(CONFIG)
    return path


def test_runs_are_commands_that_anybody_could_type(file: Path) -> None:
    made = study.read("s.toml")
    units = made.units()
    assert [[str(job) for job in unit] for unit in units] == [
        ["base, seed 3: evaluation"],
        ["base, seed 5: evaluation"],
        ["rl, seed 3: training", "rl, seed 3: evaluation", "other, seed 3: evaluation"],
        ["rl, seed 5: training", "rl, seed 5: evaluation", "other, seed 5: evaluation"],
    ]
    train, own, other = (" ".join(job.words) for job in units[3])
    assert train == (
        "train own.toml eval.before=false eval.after=false train.lr=1e-3 eval.options.select.n=2 run.steps=2"
        " rollout.group_size=4 run.seed=5 run.name=seed-5 run.dir=studies/s/rl"
    )
    assert own == (
        "eval own.toml eval.options.select.n=2 run.steps=2 rollout.group_size=4 eval.attempts=2 run.seed=5"
        " --policy studies/s/rl/seed-5 --preset greedy -o studies/s/rl/seed-5-eval"
    )
    assert "rollout.group_size" not in other and "rollout.calls=2" in other
    assert "--policy studies/s/rl/seed-5 " in other and other.endswith("-o studies/s/other/seed-5-eval")
    assert units[2][2].config().eval.temperature == 0 and units[2][2].config().rollout.calls == 2
    assert [each.arms for each in made.questions] == [("base", "rl", "other")]


def test_a_configuration_may_lie_beside_the_study(file: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "own.toml").write_text('extends = "hello"\n[run]\nsteps = 7\n')
    (tmp_path / "there" / "s.toml").write_text(FILE.replace(', "run.steps=2"', ""))
    made = study.read("there/s.toml")
    assert made.units()[2][0].config().run.steps == 7


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("seeds", "seds", "unknown key 'study.seds'", "did you mean 'seeds'?"),
        ("seeds = [3, 5]", "seeds = []", "study.seeds: Tuple should have at least 1 item", ""),
        ("seeds = [3, 5]", "seeds = [3, 3]", "seed 3 is there 2 times", ""),
        ('name = "s"', 'name = "../s"', "study.name: String should match", ""),
        ('policy = "rl"', 'polcy = "rl"', "unknown key 'arms.other.polcy'", "did you mean 'policy'?"),
        ("[arms.rl]", "[armes.rl]", "unknown key 'armes'", "did you mean 'arms'?"),
        ('policy = "rl"', 'policy = "other"', "arm other evaluates itself", ""),
        ("[arms.rl]", '[arms.rl]\npolicy = "base"', "no policy of its own, and rl neither", 'policy = "base"'),
        ('preset = "greedy"', 'preset = "gredy"', "no preset 'gredy'", "did you mean 'greedy'?"),
        ('preset = "greedy"', 'baseline = "bse"', "study.baseline: there is no arm 'bse'", "did you mean 'base'?"),
        ("rollout.group_size=4", "rollout.group_size", "'rollout.group_size' is not KEY=VALUE", "write for"),
        ("rollout.group_size=4", "run.seed=4", "arms.rl: run.seed is the study's own", ""),
        ("[arms.base]", '[questions.Q]\narms = ["base"]\n[arms.base]', "at least 2 items", ""),
        ("[arms.base]", '[questions.Q]\narms = ["base", "lr"]\n[arms.base]', "there is no arm 'lr'", "known: base"),
        ("[study]", "[study", "s.toml:", "readable TOML"),
    ],
)
def test_mistakes_in_the_file_are_named(file: Path, old: str, new: str, message: str, fix: str) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(CodeRepairError) as caught:
        study.read(str(file))
    assert message in str(caught.value) and fix in caught.value.fix and caught.value.exit_code == ExitCode.USAGE


def test_a_study_that_is_not_there(file: Path) -> None:
    with pytest.raises(CodeRepairError, match="there is no study minature") as caught:
        study.read("minature")
    assert "did you mean 'miniature'?" in caught.value.fix


def test_all_mistakes_of_all_arms_are_told_at_once_and_nothing_is_started(file: Path, tmp_path: Path) -> None:
    file.write_text(
        FILE.replace("rollout.group_size=4", "rollout.grup_size=4").replace("rollout.calls=2", "agent=nanno")
        + '[arms.last]\nset = ["train.lr=-1"]\n[arms.sample]\nset = ["eval.tasks=3"]\n'
        '[questions.Q]\narms = ["base", "last"]\nevaluation = "later"\nmetric = "resolvd"\n'
    )
    done = CliRunner().invoke(app, ["study", str(file)])
    problem = done.exception
    assert isinstance(problem, Several) and problem.exit_code == ExitCode.USAGE
    for expected in (
        "unknown key 'rollout.grup_size'",
        "nanno",
        "train.lr: Input should be greater than 0",
        "eval.tasks draws a sample by run.seed",
        "question Q is about evaluation 'later'",
        "question Q: there is no metric 'resolvd'",
    ):
        assert expected in str(problem), str(problem)
    assert "arm rl: " in str(problem) and "arms base, last: question Q" in str(problem)
    assert not (tmp_path / "studies").exists()


def test_a_dry_run_counts_what_there_is_to_do(file: Path) -> None:
    costs, problem = study_run.check(study.read(str(file)))
    assert problem is None
    assert [(each.arm, each.runs, each.training_episodes, each.evaluation_episodes) for each in costs] == [
        ("base", 2, 0, 2 * 2 * 2),
        ("rl", 4, 2 * 2 * 8 * 4, 2 * 2 * 2),
        ("other", 2, 0, 2 * 2 * 2),
    ]
    done = CliRunner().invoke(app, ["study", str(file), "--dry-run"])
    assert done.exit_code == 0 and "all    0 of 8" in done.stdout, done.output


@pytest.mark.parametrize("name", study.shipped())
def test_shipped_studies_are_sound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as can be said without the models and data that they need."""
    monkeypatch.chdir(tmp_path)
    made = study.read(name)
    assert made.file.study.name == name
    for job in made.jobs():
        config = job.config()
        assert config.run.name
        for question in made.questions:
            assert job.arm not in question.arms or question.evaluation in config.eval.each
    used = {arm for question in made.questions for arm in question.arms}
    assert used == set(made.file.arms), "an arm that no question asks about costs for nothing"
    assert load(made.file.study.config)


@pytest.mark.real
@pytest.mark.parametrize("name", ["miniature", "ablations"])
def test_studies_that_need_nothing_else_can_be_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study_run.require(study.read(name))


STUBS = {
    # a Slurm that runs an array at once, one task after the other, and then what depends on it
    "sbatch": """
for word; do script=$word; done
case "$*" in *--dependency*) echo "$1" >>"$CALLS"; exec bash "$script";; esac
count=$(sed -n 's/^#SBATCH --array=1-//p' "$script")
for task in $(seq "$count"); do
    SLURM_JOB_ID=9_$task SLURM_ARRAY_TASK_ID=$task bash "$script" >&2 || echo "task $task: $?" >>"$CALLS"
done
echo "9;cluster"
""",
    "scontrol": 'echo "scontrol $*" >>"$CALLS"',
    "crrl": """
echo "crrl $*" >>"$CALLS"
case "$*" in *"--run 2") ;; *) exit 0 ;; esac
trap 'exit 130' USR1
kill -USR1 "$PPID"
while :; do sleep 0.05; done
""",
}


def test_slurm_jobs_run_each_policy_go_on_after_their_time_and_end_in_the_table(file: Path, tmp_path: Path) -> None:
    """The scripts' logic, with stand-ins that run everything here: it proves nothing about Slurm."""
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    done = CliRunner().invoke(app, ["study", "s.toml", "--slurm"])
    assert done.exit_code == 0, done.output
    calls = tmp_path / "calls"
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "CRRL": "crrl"}
    env["SLURM_SUBMIT_DIR"] = str(tmp_path)
    ran = subprocess.run(["bash", "-eu", "-c", done.stdout], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert calls.read_text().splitlines() == [
        "crrl study s.toml --run 1",
        "crrl study s.toml --run 2",
        "scontrol requeue 9_2",
        "task 2: 130",
        "crrl study s.toml --run 3",
        "crrl study s.toml --run 4",
        "--dependency=afterany:9",
        "crrl study s.toml --table",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "5"], "the study has 4 policies to run"),
        (["--run", "1", "--table"], "these options exclude each other"),
    ],
)
def test_what_the_command_line_cannot_mean(file: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["study", str(file), *words])
    assert isinstance(done.exception, CodeRepairError) and message in str(done.exception)


async def test_a_log_that_cannot_be_read_or_written_is_one_failed_run(file: Path) -> None:
    made = study.read(str(file))
    train = next(job for job in made.jobs() if job.kind == "train")
    train.folder.mkdir(parents=True)
    log = train.folder / "log.jsonl"
    for line in (b'{"type":"end"}\n', b'{"type":"end",\xff\n'):
        log.write_bytes(line)
        with pytest.raises(RunError, match="is no end of a run"):
            train.state()
    log.unlink()
    train.folder.with_name(f"{train.folder.name}.log").mkdir()
    failures = await study_run.run([[train]], 1, lambda line: None)
    assert [(each.job, "Is a directory" in each.reason) for each in failures] == [(train, True)]
