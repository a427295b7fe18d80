"""Which verified repairs become references, in which order, and who is shown them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl import rewards, runs
from coderepairrl.rewards import make_patched_episode
from coderepairrl.rewards.tests import is_group_drawn
from coderepairrl.rewards.verified import MAX_BYTES, explain_unfit
from coderepairrl.runs import RunFolder
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.stages.history import read_history
from coderepairrl.stages.references import References, read_references
from coderepairrl.types import Checks, Command, Ending, Episode, ExecResult, Score, Task, VerifiedRepair

BODY = "@@ -1,2 +1,2 @@\n def add(a, b):\n"


def diff(new: str, path: str = "calc.py", index: str = "") -> bytes:
    head = f"diff --git a/{path} b/{path}\n{index}--- a/{path}\n+++ b/{path}\n{BODY}"
    return f"{head}-    return a - b\n+    return {new}\n".encode()


CHECKS = Checks((Command(("python3", "check.py"), timeout=20.0),), {"check.py": "assert True\n"})
TASK = Task("t/add", "add() subtracts.", "python", "dir:/nowhere", diff("a + b"), CHECKS)


NOTES = b"diff --git a/NOTES b/NOTES\nnew file mode 100644\n--- /dev/null\n+++ b/NOTES\n@@ -0,0 +1 @@\n+padding\n"
FAILED = Score("tests", 0.0, passed=False)


def attempt(number: int, patch: bytes, passed: bool | None = True, ending: Ending = Ending.DONE) -> Episode:
    score = Score("tests", float(bool(passed)), passed=passed)
    return Episode(f"g-{number}", TASK.id, "train", 1, "g", number, ending, patch=patch, scores=(score,))


def taken(references: References) -> list[bytes]:
    return [repair.patch for repair in references.known.get(TASK.id, ())]


def test_the_first_different_repairs_become_references() -> None:
    references = References([TASK], max_per_task=2)
    first = [
        attempt(0, diff("a * b"), passed=False),
        attempt(1, diff("a % b"), passed=None),
        attempt(2, diff("a | b"), ending=Ending.VOID),
        attempt(3, diff("a + b", index="index 1234567..89abcde 100644\n")),  # the task's own reference
        attempt(4, diff("b + a")),
        attempt(5, diff("b + a  ", index="index 1234567..89abcde 100644\n")),
        attempt(6, diff("b + a  # in another order")),
        attempt(7, diff("b + a") + NOTES),
        attempt(8, diff("a + b  # the task's own")),
        replace(attempt(9, diff("abs(a) + b")), scores=(Score("state_tests", 1.0, passed=True), FAILED)),
    ]
    references.add(1, first)
    assert references.known == {TASK.id: (VerifiedRepair(diff("b + a"), "g-4", 1),)}
    references.add(2, [attempt(6, diff("b + a")), attempt(7, diff("sum((a, b))")), attempt(8, diff("-(-a - b)"))])
    assert taken(references) == [diff("b + a"), diff("sum((a, b))")]
    assert [repair.step for repair in references.known[TASK.id]] == [1, 2]


def test_a_repair_that_changes_checks_or_tests_is_unfit() -> None:
    good = diff("b + a")
    assert explain_unfit(TASK, good) == ""
    assert "check.py" in explain_unfit(TASK, good + diff("1", "check.py")), "restored before the checks run"
    script = replace(TASK, checks=Checks((Command(("sh", "-c", "cd . && ./run.sh"), timeout=5.0),)))
    assert "run.sh" in explain_unfit(script, good + diff("1", "run.sh")), "a command names it"
    assert explain_unfit(TASK, good + diff("1", "run.sh")) == ""
    assert "conftest.py" in explain_unfit(TASK, good + diff("1", "conftest.py")), "left out before the checks run"
    for path in ("tests/test_calc.py", "test_calc.py", "calc_test.py", "src/calc.spec.ts", "CalcTest.java"):
        assert explain_unfit(TASK, good + diff("1", path)), path
    own = replace(TASK, reference=TASK.reference + diff("1", "tests/test_calc.py"))
    assert explain_unfit(own, good + diff("2", "tests/test_calc.py")) == "", "the task's own reference changes it, too"
    for path in ("contest.py", "latest/calc.py", "attest.py", "inspect.py"):
        assert explain_unfit(TASK, good + diff("1", path)) == "", path
    assert explain_unfit(TASK, diff("'" + MAX_BYTES * "x" + "'")) == f"longer than {MAX_BYTES >> 10} KiB"
    assert explain_unfit(TASK, b"--- a\n") and explain_unfit(TASK, b"\n")


def test_a_repair_that_removes_what_the_reference_keeps_is_unfit() -> None:
    """No check asks about it, so those that are compared with the repair would learn to remove it."""

    def without(path: str, *lines: str) -> bytes:
        removed = "".join(f"-{line}\n" for line in lines)
        head = f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -9,{len(lines) + 1} +9 @@\n"
        return f"{head}{removed} # end\n".encode()

    good, gone = diff("b + a"), without("more.py", "def more(a):", "    return a")
    body = without("Calc.java", "int more(int a) {", "if (a < 0) {", "return 0;", "}", "return a;", "}")
    assert "removes more" in explain_unfit(TASK, good + gone)
    assert "removes 6 more lines" in explain_unfit(TASK, good + body)
    assert explain_unfit(TASK, good + without("more.py", "    check(a)", "    check(b)")) == ""
    for change in (gone, body):
        assert explain_unfit(replace(TASK, reference=TASK.reference + change), good + change) == "", (
            "and so does the reference"
        )


def test_a_log_gives_the_references_of_its_finished_steps_in_any_order_of_verdicts(tmp_path: Path) -> None:
    """Evaluations, void attempts and the unfinished step say nothing."""
    made = {
        "one": attempt(0, diff("b + a")),
        "two": replace(attempt(1, diff("sum((a, b))")), id="g-1"),
        "eval": replace(attempt(2, diff("a - -b")), id="eval-2", phase="eval"),
        "late": replace(attempt(3, diff("-(-a - b)")), id="late-3", step=2),
    }
    orders = list(itertools.permutations(made.values()))
    found = []
    for number, order in enumerate(orders[::5]):
        run = RunFolder(tmp_path / str(number))
        run.create("", {})
        log = run.writer()
        for episode in order:
            log.append("verdict", verdict=episode)
        log.append("step", step=1, episodes=["g-0", "g-1"])
        log.close()
        found.append(read_references(run, read_history(run), [TASK], 4).known)
    assert found[0] == {
        TASK.id: (VerifiedRepair(diff("b + a"), "g-0", 1), VerifiedRepair(diff("sum((a, b))"), "g-1", 1))
    }
    assert all(each == found[0] for each in found)
    live = References([TASK], 4)
    live.add(1, [made["one"], made["two"]])
    assert live.known == found[0]
    assert runs.codec.restore(VerifiedRepair, runs.codec.dump(live.known[TASK.id][0])) == live.known[TASK.id][0]


@pytest.mark.parametrize("name", ["patch_edits", "patch_lines"])
async def test_the_nearest_reference_counts(name: str) -> None:
    repair = VerifiedRepair(diff("sum((a, b))"), "train-1", 1)
    further = replace(TASK, verified=(repair,))
    made, backend = rewards.make_rewards(name), ScriptedBackend()
    for patch in (diff("sum((a, b))"), diff("sum([a, b])"), diff("a + b"), diff("a + c"), diff("None"), b""):
        [alone] = await rewards.score_episode(made, TASK, make_patched_episode(TASK, patch), backend)
        [with_it] = await rewards.score_episode(made, further, make_patched_episode(TASK, patch), backend)
        [own] = await rewards.score_episode(
            made, replace(TASK, reference=repair.patch), make_patched_episode(TASK, patch), backend
        )
        assert with_it.value == max(alone.value, own.value)
        assert with_it.nearest == ("train-1" if own.value > alone.value else "")
        assert not alone.nearest
    [exact] = await rewards.score_episode(made, further, make_patched_episode(TASK, repair.patch), backend)
    assert (exact.value, exact.nearest) == (1.0, "train-1")


async def test_hybrid_verifies_in_the_groups_it_tests_and_compares_in_all() -> None:
    made = rewards.make_rewards("hybrid")
    good = ScriptedBackend({}, {"git": ExecResult(0, b""), "sh": ExecResult(0, b"")})
    drawn, other = (
        next(f"g{n}" for n in itertools.count() if is_group_drawn(f"g{n}", 0.25) is want) for want in (True, False)
    )
    task = replace(TASK, checks=Checks((Command(("sh", "check"), timeout=5.0),)))
    repair = make_patched_episode(task, diff("sum((a, b))"))
    references = References([task], 4)
    [untested] = await rewards.score_episode(made, task, replace(repair, group=other), good)
    [tested] = await rewards.score_episode(made, task, replace(repair, group=drawn), good)
    assert (untested.passed, tested.passed) == (None, True)
    for score in (untested, tested):
        references.add(1, [replace(repair, id="r", scores=(score,))])
        assert len(taken(references)) == (score is tested)
    further = replace(task, verified=references.known[task.id])
    [now] = await rewards.score_episode(made, further, replace(repair, group=other), good)
    assert (now.value, now.nearest) == (1.0, "r")
    [both] = await rewards.score_episode(made, further, replace(repair, group=drawn), good)
    assert (both.value, both.nearest, both.passed) == (1.0, "r", True)
