"""``crrl study`` as its users call it, with real runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.errors import CodeRepairError, ExitCode, PrerequisiteError
from coderepairrl.stages import study, study_run

from .conftest import Project, until

STUDY = """
[study]
name = "{name}"
config = "e2e.toml"
seeds = [0, 1]
set = ["run.steps=1", "tasks.verify=false", "rollout.group_size=2", "eval.tasks=0", "eval.options.select.n=4"]
metric = "reward"
[arms.base]
policy = "{model}"
[arms.rl]
[arms.again]
policy = "rl"
"""


def written(project: Project, miniature: Path, name: str, text: str = STUDY) -> None:
    (project.path / f"{name}.toml").write_text(text.format(name=name, model=miniature))


def numbers(stdout: str) -> Any:
    """But for what the study is called."""
    return json.loads(re.sub(r"\bstudy\d?\b", "study", stdout))


async def test_a_run_that_fails_is_reported_the_others_go_on_and_so_does_the_next_call(
    project: Project, miniature: Path, isolating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.path)
    text = STUDY.replace("[0, 1]", "[0]").replace("[arms.rl]", "").replace('"rl"', '"{model}"')
    text = text.replace('"run.steps=1"', '"reward=patch_edits"')
    written(project, miniature, "study", text)
    taken = Path("studies/study/base/seed-0-eval")
    taken.mkdir(parents=True)
    (taken / "of-somebody-else").write_text("!")
    made, lines = study.read("study.toml"), list[str]()
    study_run.require(made)
    [failure] = await study_run.run(made.units(), 1, lines.append)
    assert str(failure.job) == "base, seed 0: evaluation" and failure.reason.endswith("has other files in it")
    assert str(study_run.failed([failure], made)).startswith("1 run did not finish\nbase, seed 0: evaluation: ")
    assert "1 of 2 runs: again, seed 0: evaluation took" in lines[-1], "the other went on"
    notes = study_run.table(made).notes
    assert notes[0] == f"base, seed 0: evaluation has not begun: {failure.reason}."
    (taken / "of-somebody-else").unlink()
    lines.clear()
    assert await study_run.run(made.units(), 1, lines.append) == []
    assert [line.partition(": evaluation")[0] for line in lines] == ["base, seed 0", "2 of 2 runs: base, seed 0"]
    done = CliRunner().invoke(app, ["study", "study.toml", "--table"])
    assert "again - base = +0.0 points" in done.stdout and "missing" not in done.stdout

    written(project, miniature, "study", text.replace("group_size=2", "group_size=3"))
    with pytest.raises(CodeRepairError, match=r"otherwise than the study says now: rollout.group_size 2 then, 3 now"):
        study_run.require(study.read("study.toml"))


def runs_of(process: subprocess.Popen[str]) -> bool:
    """Whether a study has begun a run: what is logged may be of the runs of one that was killed before it."""
    started = f"coderepairrl.processes.child\0{process.pid}\0coderepairrl.cli".encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if started in path.read_bytes():
                return True
    return False


@pytest.mark.timeout(900)
async def test_killed_at_any_moment_it_comes_to_the_same_table(
    project: Project, miniature: Path, isolating: None
) -> None:
    written(project, miniature, "study1")
    written(project, miniature, "study2")
    undisturbed = numbers(project.crrl("study", "study1.toml", "--jobs", "2", "--json").stdout)
    folder = project.path / "studies" / "study2"

    def logged(run: str, what: str) -> bool:
        log = folder / run / "log.jsonl"
        return log.is_file() and what.encode() in log.read_bytes()

    with project.started("study", "study2.toml", "--jobs", "2") as process:
        await until(process, lambda: logged("rl/seed-0", '"type":"turn"'))
        process.send_signal(signal.SIGKILL)
    with project.started("study", "study2.toml") as process:
        await until(process, lambda: runs_of(process))
        await until(process, lambda: logged("rl/seed-1", '"type":"turn"') or logged("again/seed-0-eval", '"turn"'))
        process.send_signal(signal.SIGTERM)
        _, printed = process.communicate(timeout=200)
        assert process.returncode == ExitCode.INTERRUPTED, printed
    assert numbers(project.crrl("study", "study2.toml", "--json").stdout) == undisturbed
    assert project.crrl("study", "study2.toml").stderr == "", "nothing is left to do"


@pytest.mark.by_hand
@pytest.mark.timeout(900)
def test_the_shipped_miniature_answers_every_question_by_name(project: Project, isolating: None) -> None:
    done = project.crrl("study", "miniature", "--jobs", "2", "--json")
    found = json.loads(done.stdout)
    assert [each.partition(":")[0] for each in found["verdicts"]] == ["RQ0", "RQ1", "RQ2", "RQ3"]
    for question in found["questions"]:
        for contrast in question["contrasts"]:
            assert contrast["interval"]["low"] < contrast["interval"]["high"]
    print("\n".join(found["verdicts"]))


@pytest.mark.timeout(900)
def test_on_a_real_ray(project: Project, miniature: Path, isolating: None) -> None:
    pytest.importorskip("ray")
    written(project, miniature, "study", STUDY.replace("[0, 1]", "[0]"))
    done = project.crrl("study", "study.toml", "--ray", "local", "--json")
    [question] = json.loads(done.stdout)["questions"]
    assert [each["arm"] for each in question["contrasts"]] == ["rl", "again"]


def test_without_ray_the_extra_is_named(
    project: Project, miniature: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    written(project, miniature, "study")
    monkeypatch.chdir(project.path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PrerequisiteError, match="ray is not installed") as caught:
        study_run.on_ray(study.read("study.toml"), "local", print)
    assert caught.value.fix == "pip install 'coderepairrl[ray]'"
