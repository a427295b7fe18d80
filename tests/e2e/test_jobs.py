"""``crrl run`` as its users call it: real jobs, killed and failing on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coderepairrl.errors import ExitCode
from coderepairrl.report import jobs as report
from coderepairrl.runs import RunFolder

from .conftest import Project, wait_until

SFT = """
extends = "sft-tiny"
[run]
name = "sft"
[model]
path = "{model}"
[data]
held_out = 0
max_tokens = 4096
"""
CHAINS = """
name = "chains"
config = "e2e.toml"
seeds = [0, 1]
set = ["run.steps=2", "run.checkpoint_every=1", "tasks.holdout=0.5", "rollout.group_size=2", "eval.tasks=0",
       "eval.options.select.n=2"]
metrics = ["reward"]

[jobs.collect]
policy = "{model}"
set = ["eval.attempts=2", "keep.endings=done,limit,crash"]

[arms.fast]
sft.config = "sft.toml"
sft.set = ['data.paths=["{{collect}}"]', "run.steps=2", "data.batch=2"]
train.policy = "{{sft}}"
eval.policy = "{{train}}"

[arms.slow]
train.policy = "{{fast.sft}}"
train.set = ["train.lr=1e-9"]
eval.policy = "{{train}}"
"""
COMMANDS = """
name = "commands"
[jobs.first]
kind = "command"
run = "{python} make.py first {folder}"
[jobs.second]
kind = "command"
run = "{python} make.py second {folder} {first}"
[jobs.other]
kind = "command"
run = "{python} make.py other {folder}"
"""
MAKE = """
import sys
from pathlib import Path
name, folder, *needed = sys.argv[1:]
if Path("broken").exists() and name == "first":
    sys.exit("error: it is broken")
Path(folder).mkdir()
(Path(folder) / "made").write_text("".join((Path(each) / "made").read_text() for each in needed) + name)
"""


@pytest.mark.real
@pytest.mark.timeout(900)
async def test_chains_in_arms_and_seeds_killed_on_the_way_become_one_table(
    project: Project, miniature: Path, isolating: None
) -> None:
    (project.path / "chains.toml").write_text(CHAINS.format(model=miniature))
    (project.path / "sft.toml").write_text(SFT.format(model=miniature))
    home = project.path / "jobs" / "chains"
    log = home / "fast/seed-0/train/log.jsonl"
    with project.started("run", "chains.toml", "--jobs", "2") as process:
        await wait_until(process, lambda: log.is_file() and b'{"type":"step"' in log.read_bytes())
    done = project.crrl("run", "chains.toml", "--jobs", "2", "--json")
    assert "collect is done" in done.stderr and "fast/seed-0/train goes on" in done.stderr
    numbers = json.loads(done.stdout)
    names = [each["name"] for each in numbers["jobs"]]
    assert len(names) == len(set(names)) == 1 + 2 * (3 + 2) and all(each["done"] for each in numbers["jobs"])
    for name in names:
        kinds = [record["type"] for record in RunFolder(home / name).records()]
        assert [kind for kind in kinds if kind != "used"][-1] == "end", name
    assert not list(home.rglob("*.old-*")), "nothing ran twice"
    [question] = numbers["questions"]
    assert {arm: mean["seeds"] for arm, mean in question["arms"].items()} == {"fast": 2, "slow": 2}
    assert [each["arm"] for each in question["contrasts"]] == ["slow"]
    again = project.crrl("run", "chains.toml")
    assert again.stderr.count(" is done") == len(names) and " begins" not in again.stderr

    page = project.crrl("report", str(home)).stdout.strip()
    assert "reward" in (project.path / page).read_text() and report.is_jobs_folder(home)
    assert project.crrl("report", str(home), "-o", "pages").stdout.strip() == "pages/index.html"


def test_a_job_that_fails_stops_only_those_that_need_it_and_the_next_call_goes_on(project: Project) -> None:
    (project.path / "commands.toml").write_text(COMMANDS)
    (project.path / "make.py").write_text(MAKE)
    (project.path / "broken").touch()
    home = project.path / "jobs" / "commands"
    failed = project.crrl("run", "commands.toml", check=False)
    assert failed.returncode == ExitCode.RUN_FAILED, failed.stderr
    assert (home / "other" / "made").read_text() == "other", "it needs nothing of what failed"
    assert "first is not finished: it is broken" in failed.stdout and "second has not begun" in failed.stdout
    assert "second: first, which it needs, failed" in failed.stderr
    assert failed.stderr.splitlines()[-1].endswith("run commands.toml continues with unfinished jobs")

    (project.path / "broken").unlink()
    done = project.crrl("run", "commands.toml", "--jobs", "3")
    assert "other is done" in done.stderr and (home / "second" / "made").read_text() == "firstsecond"
    (home / "first" / "made").write_text("changed ")
    again = project.crrl("run", "commands.toml")
    assert "second runs again: the output of first changed" in again.stderr and "first is done" in again.stderr
    assert (home / "second" / "made").read_text() == "changed second" and (home / "second.old-1").is_dir()


def test_the_lines_for_slurm_make_what_one_call_makes(project: Project) -> None:
    (project.path / "commands.toml").write_text(COMMANDS)
    (project.path / "make.py").write_text(MAKE)
    lines = project.crrl("run", "commands.toml", "--commands").stdout.splitlines()
    calls = [line.partition("--wrap=")[2].strip("')") for line in lines if not line.startswith("#")]
    early = project.crrl("run", "commands.toml", "--only", "second", check=False)
    assert early.returncode == ExitCode.RUN_FAILED and "first, which it needs, is not done" in early.stderr
    for call in calls:  # in an order in which `sbatch --dependency=afterok` may start them
        project.crrl(*call.split()[1:])
    assert (project.path / "jobs/commands/second/made").read_text() == "firstsecond"
    assert "missing" not in project.crrl("run", "commands.toml", "--table").stdout
