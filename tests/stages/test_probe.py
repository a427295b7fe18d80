"""A probe's verdict and difficulties, as functions of the attempts; and which attempts it plans."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl import config as configs
from coderepairrl.errors import ExitCode, RunError
from coderepairrl.report import verdict
from coderepairrl.runs import RunFolder
from coderepairrl.stages import probe
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, ToolCall, Turn

CONFIG = configs.load("hello")
NUMBERS = count()


TURN = Turn(0, None, TokenSpan((1, 2), Origin.GIVEN), TokenSpan((3,), Origin.POLICY, (-0.1,)))


def attempt(task: int, passed: bool | None, reward: float, *, patch: bytes = b"x", ending: Ending = Ending.DONE,
            reason: str = "", turns: Sequence[Turn] = (TURN,), **fields: str) -> Episode:  # fmt: skip
    number = next(NUMBERS)
    return Episode(
        *(f"e{number}", f"t{task:03}", "eval", 0, f"g{task}", number, ending, reason),
        patch=patch,
        turns=tuple(turns),
        scores=(Score("tests", reward, passed=passed),) if passed is not None else (Score("edits", reward),),
        tool_calls=(ToolCall(0, "shell", "{}", True, 1),),
        **fields,
    )


def mixed(tasks: Iterable[int] = range(12)) -> list[Episode]:
    """Each task is solved by one of two attempts."""
    return [attempt(task, passed, float(passed)) for task in tasks for passed in (True, False)]


def test_attempts_that_earn_differently_are_a_go() -> None:
    found = probe.judge(mixed(), CONFIG)
    assert found.go and (found.never, found.always) == (0, 0)
    assert found.whole.informative.value == 1 and found.whole.solve_rate is not None
    assert found.whole.solve_rate.value == found.whole.reward.value == 0.5
    assert "Go: of 12 tasks" in verdict.render(probe.result(found), "text")


def test_answers_need_no_patch_for_a_go() -> None:
    answers = [attempt(task, None, reward, patch=b"") for task in range(12) for reward in (0.0, 1.0)]
    assert probe.judge(answers, CONFIG).go


@pytest.mark.parametrize(
    ("episodes", "what", "fix"),
    [
        ([attempt(t, False, 0.0) for t in range(9) for _ in "ab"], "solved one", "crrl sft"),
        ([attempt(t, None, 0.0) for t in range(9) for _ in "ab"], "earned anything", "crrl sft"),
        ([attempt(t, False, 0.0, patch=b"") for t in range(9) for _ in "ab"], "changed anything", "crrl collect"),
        ([attempt(t, False, 0.0, turns=()) for t in range(9) for _ in "ab"], "room for a reply", "rollout.tokens"),
        ([attempt(t, True, 1.0) for t in range(9) for _ in "ab"], "nothing is left", "harder tasks"),
        ([attempt(t, t < 4, float(t < 4)) for t in range(9) for _ in "ab"], "earn the same", "group_size"),
        (
            [replace(each, ending=Ending.LIMIT, reason="calls") for each in mixed()],
            r"limits end the share 1.000 .* calls \(24 of 24\)",
            "rollout.calls",
        ),
    ],
)
def test_each_no_go_has_its_reason_and_what_to_do(episodes: list[Episode], what: str, fix: str) -> None:
    found = probe.judge(episodes, CONFIG)
    error = probe.refusal(found.reasons, "--anyway goes on")
    assert not found.go and error.exit_code is ExitCode.HEALTH_GATE
    with pytest.raises(type(error), match=what):
        raise error
    assert fix in error.fix and error.fix.endswith("--anyway goes on")
    assert probe.as_json(found)["go"] is False


def test_few_informative_groups_are_no_go_only_where_that_is_certain() -> None:
    flat = [attempt(t, False, 0.2) for t in range(100, 400) for _ in "ab"]
    assert not probe.judge([*mixed(range(3)), *flat], CONFIG).go
    assert probe.judge([*mixed(range(3)), *flat[:20]], CONFIG).go


def test_void_attempts_are_counted_and_measured_nowhere() -> None:
    void = [replace(each, ending=Ending.VOID) for each in mixed()]
    found = probe.judge([*mixed(), *void], CONFIG)
    assert (found.attempts, found.void) == (24, 24) and found.whole == probe.judge(mixed(), CONFIG).whole
    with pytest.raises(RunError, match="no attempt"):
        probe.judge(void, CONFIG)


def test_parts_are_by_kind_and_language() -> None:
    python, go = mixed(range(5)), [attempt(t, False, 0.0, language="go") for t in range(5, 9) for _ in "ab"]
    found = probe.judge([*(replace(each, language="python") for each in python), *go], CONFIG)
    assert {name: part.tasks for name, part in found.parts.items()} == {"language go": 4, "language python": 5}
    assert found.parts["language go"].informative.value == 0 and found.never == 4


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0])), min_size=1), min_size=1, max_size=8)
)
def test_difficulties_account_for_every_attempt(groups: list[list[tuple[bool, float]]]) -> None:
    episodes = [attempt(task, *each) for task, group in enumerate(groups) for each in group]
    rows = probe.difficulties(episodes)
    assert sorted(row["task"] for row in rows) == sorted({each.task_id for each in episodes})
    by_task = {row["task"]: row for row in rows}
    for task, group in enumerate(groups):
        row = by_task[f"t{task:03}"]
        assert (row["attempts"], row["solved"]) == (len(group), sum(passed for passed, _ in group))
        assert row["reward"] == pytest.approx(sum(reward for _, reward in group) / len(group))
        assert (row["spread"] == 0) == (len({reward for _, reward in group}) == 1)
    rates = [row["solved"] / row["attempts"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert rows == probe.difficulties(episodes[::-1])


def test_the_files_are_what_was_found(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "episodes").mkdir()
    folder.write_episodes("eval-00000", mixed())
    found = probe.conclude(folder, CONFIG)
    assert json.loads((tmp_path / probe.VERDICT).read_text()) == json.loads(json.dumps(probe.as_json(found)))
    lines = (tmp_path / probe.DIFFICULTY).read_text().splitlines()
    assert [json.loads(line) for line in lines] == probe.difficulties(mixed())


def test_it_attempts_training_tasks_as_training_does() -> None:
    plan = probe.resolve("hello", ["rollout.temperature=0.7", "rollout.group_size=3"])
    own = plan.config.eval
    assert {task.split for task in plan.eval_tasks["eval"]} == {"train"} and len(plan.eval_tasks["eval"]) == probe.TASKS
    assert (own.temperature, own.attempts, own.reward, own.top_p) == (0.7, 3, {}, 1.0)
    assert {reward.name for reward, _ in plan.kinds[""].rewards["eval"]} == {"patch_edits", "tests", "repeats"}
    fewer = probe.resolve("hello", ["eval.tasks=4", "eval.attempts=2", "eval.agent=direct"])
    assert len(fewer.eval_tasks["eval"]) == 4 and fewer.config.eval.attempts == 2
