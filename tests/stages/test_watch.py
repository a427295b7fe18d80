"""An evaluation whose attempts all meet the same obstacle says so, and stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coderepairrl.config import Config
from coderepairrl.errors import HealthGateError
from coderepairrl.rollout import Group
from coderepairrl.stages import train
from coderepairrl.stages.watch import Watch
from coderepairrl.types import Ending, Episode, Origin, Task, TokenSpan, Turn

TURN = Turn(0, None, TokenSpan((1,), Origin.GIVEN), TokenSpan((2,), Origin.POLICY, (-1.0,)))


def episode(number: int, ending: Ending, reason: str, *turns: Turn) -> Episode:
    return Episode(f"e{number}", "toy/1", "eval", 0, "g", number, ending, reason, fault="no engine", turns=turns)


DONE = Ending.DONE, "submitted", TURN
LATE = Ending.LIMIT, "time", TURN
SILENT = Ending.LIMIT, "tokens"
VOID = Ending.VOID, "engine"


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([VOID] * 3 + [DONE] + [VOID] * 4, "4 attempts are void: no engine"),
        ([SILENT] * 10, "10 attempts sampled nothing"),
    ],
)
def test_attempts_that_say_nothing_of_the_policy_stop_an_evaluation(kinds: list[Any], words: str) -> None:
    watch = Watch(100, 2, [], None, lambda line: None)
    for number, each in enumerate(kinds[:-1]):
        watch(episode(number, *each))
    with pytest.raises(HealthGateError, match=f"the last {words}"):
        watch(episode(len(kinds), *kinds[-1]))


@pytest.mark.parametrize(
    ("kinds", "stops"), [([LATE] * 20, True), ([DONE] + [SILENT] * 20, True), ([SILENT] * 20, False)]
)
def test_what_a_policy_or_a_task_can_cause_is_warned_of_once(kinds: list[Any], stops: bool) -> None:
    lines: list[str] = []
    watch = Watch(100, 1, [], None, lines.append, stops=stops)
    for number, each in enumerate(kinds):
        watch(episode(number, *each))
    assert len([line for line in lines if line.startswith("warning: the last 2 attempts")]) == 1


@pytest.mark.parametrize(
    ("kinds", "alarm"),
    [
        ([LATE, LATE, VOID], "eval: all 2 attempts ended by the time limit"),
        ([SILENT, SILENT], "eval: all 2 attempts sampled nothing"),
        ([LATE, DONE], ""),
        ([DONE, DONE], ""),
    ],
)
async def test_every_evaluation_says_when_its_numbers_say_nothing(
    kinds: Any, alarm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = tuple(episode(number, *kind) for number, kind in enumerate(kinds))
    alarms: list[str] = []

    async def gather(*_: object) -> list[Group]:
        return [Group("g", Task("toy/1", "", "", "", b""), episodes)]

    monkeypatch.setattr(train, "gather", gather)
    monkeypatch.setattr(train, "conclude", lambda *_, **__: {"summary": {"values": {}}})
    bench: Any = SimpleNamespace(
        config=Config.model_validate({"run": {"name": "x"}}),
        folder=None,
        log=SimpleNamespace(append=lambda *_, **__: None, sync=lambda: None),
        eval_tasks={"eval": ()},
        shard=SimpleNamespace(share=lambda chosen: chosen),
        progress=SimpleNamespace(alarm=alarms.append),
        model_name="",
    )
    await train.evaluate(bench, SimpleNamespace(evaluations={}), "eval", 0, 0)  # type: ignore[arg-type]
    assert [each.partition(":")[0] + ":" + each.split(":")[1] for each in alarms] == ([alarm] if alarm else [])
