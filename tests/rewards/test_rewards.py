"""Rewards by name, their sum, the `tests` reward on real processes, the exam, and `crrl score`'s logic."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl import cli
from coderepairrl.checks.reward import examine_reward
from coderepairrl.errors import ConfigError, RewardFault, SandboxFault, TaskError, UsageError
from coderepairrl.protocols import Reward, SandboxBackend
from coderepairrl.registry import protocol_members
from coderepairrl.rewards import (
    ScriptedReward,
    TestsReward,
    collect_spec_versions,
    make_patched_episode,
    make_reward,
    make_rewards,
    score_episode,
    score_files,
)
from coderepairrl.sandbox.fake import ScriptedBackend, ScriptedSandbox
from coderepairrl.types import Checks, Command, Episode, ExecResult, Score, Task, total
from rewards.folder import Local, Repository

SOURCE = b"def add(a, b):\n    return a - b\n"
FIXED = b"def add(a, b):\n    return a + b\n"
TEST = "from maths import add\nassert add(2, 3) == 5\n"
CHECK = Command(("python3", "check.py"), timeout=20.0)
GONE = SandboxFault("the guest is gone", fix="try again")


class Constant(Reward):
    """A user's own reward."""

    name = "constant"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        return Score("whatever", 0.25, note="always")


class Twin(Constant):
    """Another class with the same name."""


class NotAReward:
    pass


@pytest.fixture
def task(repository: Repository) -> Task:
    files = {"maths.py": SOURCE, "check.py": "assert False\n"}
    return repository.task(files, {"maths.py": FIXED}, Checks((CHECK,), {"check.py": TEST}), "t/add")


async def test_names_and_weights(task: Task, backend: Local) -> None:
    spec = {"patch_lines": 0.5, "patch_similarity": 0.0, f"{__name__}:Constant": 2}
    rewards = make_rewards(spec)
    assert all(protocol_members(Reward) <= {*dir(reward)} for reward, _ in rewards)
    scores = await score_episode(rewards, task, make_patched_episode(task, task.reference), backend)
    assert scores == (
        Score("patch_lines", 1.0, 0.5),
        Score("patch_similarity", 1.0, 0.0),
        Score("constant", 0.25, 2.0, "always"),
    )
    assert total(scores) == 1.0
    assert [weight for _, weight in make_rewards("tests")] == [1.0]
    assert not backend.opened  # comparing texts opens no sandbox


def test_bad_specs_say_what_to_do() -> None:
    for spec, says in (
        ("patch_line", "did you mean 'patch_lines'?"),
        ("quality", "module:Class"),
        ({}, "known rewards"),
        ({"tests": float("nan")}, "tests = 1.0"),
        ({"tests": True}, "tests = 1.0"),
        ({"tests": 10**400}, "tests = 1.0"),
        (f"{__name__}:NotAReward", "define __call__, name"),
        ({f"{__name__}:Constant": 1, f"{__name__}:Twin": 1}, "a `name` of its own"),
    ):
        with pytest.raises(ConfigError) as caught:
            make_rewards(spec)
        assert says in caught.value.fix, spec


def brief(task: Task, episode: Episode) -> float:
    """A user's own function."""
    return 0.5 if len(episode.patch) < 2000 else 0.0


async def opened(task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
    async with sandbox.open(task) as fresh:
        return Score("whatever", float((await fresh.exec(["true"])).ok), note="by itself")


STUCK = threading.Event()


def stuck(task: Task, episode: Episode) -> float:
    STUCK.wait()
    return 1.0


def leaves(task: Task, episode: Episode) -> float:
    raise SystemExit(3)


async def test_functions_of_your_own(task: Task, backend: Local) -> None:
    rewards = make_rewards({f"{__name__}:brief": 2.0, f"{__name__}:opened": 1.0})
    scores = await score_episode(rewards, task, make_patched_episode(task, task.reference), backend)
    assert scores == (Score("brief", 0.5, 2.0), Score("opened", 1.0, 1.0, "by itself"))
    with pytest.raises(RewardFault, match="reward leaves raised RuntimeError .* SystemExit: 3"):
        await score_episode(make_rewards(f"{__name__}:leaves"), task, make_patched_episode(task, b""), backend)


async def test_a_reward_that_never_answers_is_a_fault(
    task: Task, backend: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sleeper(Constant):
        async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("coderepairrl.rewards.SECONDS", 0.05)
    unchecked = replace(task, checks=Checks())
    try:
        for reward in (make_rewards(f"{__name__}:stuck")[0][0], Sleeper()):
            with pytest.raises(RewardFault, match="gave no answer for task t/add within 0.05 s"):
                await score_episode([(reward, 1.0)], unchecked, make_patched_episode(task, b""), backend)
    finally:
        STUCK.set()


async def test_a_text_reward_tells_its_own_faults_from_the_models(task: Task, backend: Local) -> None:
    reward = make_reward("patch_lines")
    malformed = await reward(task, make_patched_episode(task, b"I fixed it!\n"), backend)
    assert malformed.value == 0.0
    assert (await reward(task, make_patched_episode(task, b" \n"), backend)).note == "empty patch"
    unreferenced = await reward(replace(task, reference=b""), make_patched_episode(task, task.reference), backend)
    assert (unreferenced.value, unreferenced.note) == (0.0, "the task has no reference patch")
    assert "line 1" in malformed.note
    with pytest.raises(TaskError, match="t/add: reference: malformed patch, line"):
        await reward(replace(task, reference=task.reference[:-20]), make_patched_episode(task, task.reference), backend)


async def judge(task: Task, patch: bytes, backend: SandboxBackend) -> Score:
    return await TestsReward()(task, make_patched_episode(task, patch), backend)


async def test_empty_and_stale_patches_run_no_check(task: Task, backend: Local, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    marking = replace(task, checks=replace(task.checks, commands=(Command(("touch", str(mark))),)))
    assert await judge(marking, b"", backend) == Score("tests", 0.0, note="empty patch", passed=False)
    assert not backend.opened
    stale = task.reference.replace(b"a - b", b"a % b")
    for patch in (stale, b"I fixed it!\n", task.reference[:-20]):
        found = await judge(marking, patch, backend)
        assert found.value == 0.0 and found.note.startswith("the patch does not apply")
    assert not mark.exists()
    assert (await judge(marking, task.reference, backend)).value == 1.0 and mark.exists(), "the control"
    with pytest.raises(TaskError, match="no checks"):
        await judge(replace(task, checks=Checks()), b"", backend)


async def test_tests_that_pay_nothing_are_for_tasks_with_checks(task: Task, backend: Local) -> None:
    unchecked = replace(task, checks=Checks())
    weighted = make_rewards({"patch_edits": 1.0, "tests": 0.0})
    for each, names in ((task, ["patch_edits", "tests"]), (unchecked, ["patch_edits"])):
        scores = await score_episode(weighted, each, make_patched_episode(each, task.reference), backend)
        assert [score.name for score in scores] == names
    with pytest.raises(TaskError, match="no checks"):
        await score_episode(make_rewards("tests"), unchecked, make_patched_episode(unchecked, b""), backend)


async def test_all_commands_must_pass_in_time(task: Task, backend: Local) -> None:
    slow = Command(("sleep", "20"), timeout=0.2)
    for commands, value in [((CHECK, CHECK), 1.0), ((CHECK, Command(("false",))), 0.0), ((slow, CHECK), 0.0)]:
        found = await judge(replace(task, checks=replace(task.checks, commands=commands)), task.reference, backend)
        assert found.value == value
    assert "not finished within 0.2 s" in found.note


async def test_equal_patches_are_tested_once_and_faults_are_forgotten(
    task: Task, repository: Repository, backend: Local
) -> None:
    reward = TestsReward()
    attempts = [reward(task, make_patched_episode(task, task.reference), backend) for _ in range(4)]
    assert await asyncio.gather(*attempts) == [Score("tests", 1.0, passed=True)] * 4
    assert len(backend.opened) == 1
    other = repository.edit({"maths.py": SOURCE + b"x = 1\n"})
    assert (await reward(task, make_patched_episode(task, other), backend)).value == 0.0
    harder = replace(task, checks=replace(task.checks, commands=(CHECK, Command(("false",)))))
    assert (await reward(harder, make_patched_episode(task, task.reference), backend)).value == 0.0
    assert len(backend.opened) == 4, "one for each command"
    broken: list[bool] = [True]
    dying = Local(lambda sandbox: ScriptedSandbox({}, {"git": GONE}) if broken else sandbox)
    with pytest.raises(RewardFault):
        await reward(task, make_patched_episode(task, task.reference), dying)
    broken.clear()
    assert (await reward(task, make_patched_episode(task, task.reference), dying)).value == 1.0


async def test_sampled_tests_say_nothing_of_other_groups(task: Task, backend: Local) -> None:
    rewards = make_rewards({"patch_lines": 1.0, "sampled_tests": 0.0})
    found = []
    for number in range(40):
        episode = replace(make_patched_episode(task, task.reference), group=f"train-00001-{number:03d}")
        found.append([one.name for one in await score_episode(rewards, task, episode, backend)])
    tested = found.count(["patch_lines", "tests"])
    assert 3 <= tested <= 20
    assert tested + found.count(["patch_lines"]) == 40


async def test_crlf_and_binary_repairs_apply(repository: Repository, backend: Local) -> None:
    code = r"assert open('a.bin','rb').read()==b'\0new\xff' and open('b.txt','rb').read()==b'x\r\nz\r\n'"
    task = repository.task({"a.bin": b"\0old", "b.txt": "x\r\ny\r\n"}, {}, Checks((Command(("python3", "-c", code)),)))
    patch = repository.edit({"a.bin": b"\0new\xff", "b.txt": "x\r\nz\r\n", "c/d": "1"}, "--binary")
    assert (await judge(replace(task, reference=patch), patch, backend)).value == 1.0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"git": b"", "python3": GONE}, "the guest is gone"),
        ({"git": ExecResult(127, b"git: not found")}, "git apply"),
        ({"git": ExecResult(-9, b"", timed_out=True)}, "git apply"),
    ],
)
async def test_a_dying_sandbox_or_one_without_git_is_no_zero(
    task: Task, script: dict[str, bytes | ExecResult | SandboxFault], words: str
) -> None:
    with pytest.raises(RewardFault, match=words) as caught:
        await judge(task, task.reference, ScriptedBackend({}, script))
    assert caught.value.boundary == "reward"


async def test_the_exam_passes_what_is_sound_and_shows_what_is_not(backend: Local) -> None:
    for name in ("patch_lines", "patch_edits", "tests", "tests_graded"):
        checks = await examine_reward(make_rewards(name)[0][0], backend)
        assert len(checks) >= 9
        assert [check for check in checks if not check.ok] == []
    checks = await examine_reward(make_rewards("patch_similarity")[0][0], backend)
    failed = {check.name for check in checks if not check.ok}
    assert "a blank line earns 0" in failed  # the thesis formula's known weakness
    assert "the reference earns 1" not in failed
    assert not all(check.ok for check in await examine_reward(ScriptedReward(default=1.0), backend))


def test_score_files(task: Task, repository: Repository, tmp_path: Path) -> None:
    good, other, bad, empty, none = (tmp_path / name for name in ("good", "other", "bad", "empty", "none"))
    good.write_bytes(task.reference)
    other.write_bytes(repository.edit({"maths.py": SOURCE.replace(b"a - b", b"a * b")}))
    bad.write_bytes(b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n")
    empty.touch()
    for name in ("patch_lines", "patch_similarity"):
        assert (score_files(name, good, good), score_files(name, good, empty)) == (1.0, 0.0)
        assert 0.0 < score_files(name, good, other) < 1.0
    for oracle, patch, says in (
        (none, good, "oracle .*: No such file"), (bad, good, "oracle .*line"), (empty, good, "oracle .*empty"),
        (good, none, "patch .*: No such file"), (good, bad, "patch .*line"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            score_files("patch_lines", oracle, patch)
    with pytest.raises(UsageError, match="cannot compare two files") as caught:
        score_files("tests", good, good)
    assert "patch_edits" in caught.value.fix


@pytest.mark.parametrize("bug", [ValueError("odd"), SystemExit(0), TimeoutError(), "high", None, 1e300, -(10**400)])
async def test_a_bug_in_a_reward_is_a_fault_and_no_zero(task: Task, bug: object) -> None:
    class Odd(Reward):
        name = "odd"

        async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
            if isinstance(bug, BaseException):
                raise bug
            return bug if bug is None else Score("odd", bug)  # type: ignore[arg-type,return-value]

    with pytest.raises(RewardFault, match=f"odd (raised|returned).*{task.id}"):
        await score_episode([(Odd(), 1.0)], task, make_patched_episode(task, b""), ScriptedBackend())


def test_the_command_scores_by_patch_edits_unless_told_otherwise(task: Task, tmp_path: Path) -> None:
    (tmp_path / "oracle.patch").write_bytes(task.reference)
    (tmp_path / "other.patch").write_bytes(task.reference.replace(b"+    return a + b", b"+    return (a - b)"))
    files = ["score", "--oracle", str(tmp_path / "oracle.patch"), "--patch"]

    def value(patch: str, *options: str) -> float:
        done = CliRunner().invoke(cli.app, [*files, str(tmp_path / patch), "--json", *options])
        found = json.loads(done.stdout)
        assert {found["reward"]: found["version"]} == collect_spec_versions(options[-1] if options else "patch_edits")
        return float(found["value"])

    assert value("oracle.patch") == 1.0
    assert value("other.patch") == 0.0
    assert value("other.patch", "--reward", "patch_lines") > 0.5
