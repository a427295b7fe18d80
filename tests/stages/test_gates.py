"""Health gates and alarms on simulated records: each reports its own fault in time, and no other."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config.schema import GateName, Run
from coderepairrl.errors import HealthGateError
from coderepairrl.rollout.groups import Group
from coderepairrl.stages import gates
from coderepairrl.stages.gates import FALSE_ALARM_RATE, LOOK_EVERY, MIN_STEPS, check_over_optimisation
from coderepairrl.stages.watch import EvaluationWatch, find_common_obstacle
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, Turn

Record = dict[str, Any]
Fault = Callable[[Record], None]


def settings(steps: int = 100, **health: Any) -> Run:
    return Run.model_validate({"name": "gates", "steps": steps, "health": health})


def healthy(steps: int, seed: int, *, rising: float = 0.3) -> list[Record]:
    """Simulate a usual run: noisy rewards rise, entropy decays to a tenth, KL grows with single spikes; some steps
    have flat groups, no gradient, or one that is not finite."""
    rng = random.Random(seed)
    records = []
    for step in range(1, steps + 1):
        done = step / steps
        tokens = rng.lognormvariate(10, 0.3)
        metrics = {
            "reward": max(0.0, 0.2 + rising * done + rng.gauss(0, 0.05)),
            "reward_std": rng.uniform(0.05, 0.3),
            "surprisal": 0.3 * math.exp(-2.3 * done) * rng.lognormvariate(0, 0.15),
            "learn/grad_norm": rng.lognormvariate(-2, 0.5),
            "learn/kl": 0.2 * done**2 * rng.lognormvariate(0, 0.5) * (100 if rng.random() < 0.05 else 1),
        }
        record: Record = {"step": step, "metrics": metrics, "account": {"sampled": int(tokens)}, "skipped": ""}
        if rng.random() < 0.02:
            metrics |= {"reward_std": 0.0, "learn/grad_norm": 0.0}
        elif rng.random() < 0.01:
            record["skipped"] = "its norm is nan"
            del metrics["learn/grad_norm"]
        records.append(record)
    return records


def replay(records: list[Record], run: Run) -> list[gates.Alarm]:
    """Alarms of a run that continues after each."""
    seen: list[Record] = []
    found = []
    for record in records:
        seen.append({**record, "alarms": []})
        now = gates.check_gates(seen, run)
        seen[-1]["alarms"] = [alarm.as_json() for alarm in now]
        found += now
    return found


def metric(**values: float) -> Fault:
    return lambda record: record["metrics"].update({name.replace("__", "/"): value for name, value in values.items()})


def each(*faults: Fault) -> Fault:
    def fault(record: Record) -> None:
        for one in faults:
            one(record)

    return fault


def unsampled(record: Record) -> None:
    record["account"] = {"sampled": 0}
    record["metrics"] = {"reward": 0.0, "reward_std": 0.0}


FAULTS: Mapping[str, Fault] = {
    "skipped": lambda record: record.update(skipped="its norm is nan"),
    "nothing_sampled": unsampled,
    "zero_reward": metric(reward=0.0, reward_std=0.0, learn__grad_norm=0.0),
    "no_gradient": metric(reward=0.5, reward_std=0.0, learn__grad_norm=0.0),
    "perplexity": metric(surprisal=3.0, reward=0.1),
    "kl": metric(learn__kl=30.0),
}


def test_each_gate_has_its_name_and_a_fault_here() -> None:
    assert [gate.name for gate in gates.GATES] == list(get_args(GateName))[:-1] == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("patience", [2, 5])
def test_a_fault_is_warned_of_and_stops_the_run_in_time(
    name: str, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = 40
    records = healthy(60, seed=3)
    for record in records[begin - 1 :]:
        record["skipped"] = ""
        FAULTS[name](record)
    assert not replay(records[: begin - 1], settings(patience=10))
    monkeypatch.setattr(gates, "MAX_SKIPS", patience)
    run = settings(patience=patience)
    early = math.ceil(patience / 2)
    everything = [alarm for alarm in replay(records, run) if alarm.last >= begin]
    assert {alarm.gate for alarm in everything if alarm.stops} == {name}
    found = [alarm for alarm in everything if alarm.gate == name]
    warning, stop = found[:2]
    assert (warning.stops, warning.last, warning.first) == (False, begin + early - 1, begin)
    assert (stop.stops, stop.last, stop.first) == (True, begin + patience - 1, begin)
    assert f"lasts {patience} steps" in warning.text and f"{patience} steps in a row" in stop.text and stop.fix
    if name == "zero_reward":
        assert "on average before" in stop.text
    if name != "kl":  # compares with recent steps
        # a run that continues gets as many steps again before the next stop
        assert [alarm.last for alarm in found if alarm.stops][:2] == [begin + patience - 1, begin + 2 * patience - 1]

    only_warned = replay(records, settings(patience=patience, action="warn"))
    assert name in {alarm.gate for alarm in only_warned} and not any(alarm.stops for alarm in only_warned)
    off = settings(patience=patience, off={"no_gradient", "zero_reward", name})
    assert not [alarm for alarm in replay(records, off) if alarm.last >= begin and alarm.stops]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_ends_is_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step short of the patience, twice."""
    monkeypatch.setattr(gates, "MAX_SKIPS", 4)
    run, patience = settings(patience=4), 4
    records = healthy(60, seed=3)
    for record in [*records[30 : 30 + patience - 1], *records[40 : 40 + patience - 1]]:
        FAULTS[name](record)
    found = [alarm for alarm in replay(records, run) if alarm.last > 30]
    assert not any(alarm.stops for alarm in found)
    assert {alarm.gate for alarm in found} == {name}, "it is warned of"


def test_healthy_runs_raise_hardly_any_alarm() -> None:
    """200 simulated runs of 100 steps, with spikes and flat or skipped batches: none is stopped.

    So the rate of false stops is below 1.5 % of runs of such noise (95 %, the rule of three).
    """
    found = [alarm for seed in range(200) for alarm in replay(healthy(100, seed), settings())]
    assert not [alarm for alarm in found if alarm.stops], found
    assert len(found) <= 4, "2 % of the runs may be warned"


@given(st.integers(0, 10_000), st.integers(11, 60), st.floats(-0.1, 0.5))
def test_no_healthy_run_is_stopped(seed: int, steps: int, rising: float) -> None:
    assert not [alarm for alarm in replay(healthy(steps, seed, rising=rising), settings(steps)) if alarm.stops]


def test_entropy_rising_with_reward_and_steady_kl_are_no_fault() -> None:
    run = settings(patience=4)

    def with_fault(fault: Callable[[Record, float], None]) -> list[str]:
        records = healthy(60, seed=1)
        for record in records:
            record["skipped"] = ""
            record["metrics"]["learn/grad_norm"] = record["metrics"]["reward_std"] = 0.1
            fault(record, record["step"] / 60)
        return [alarm.gate for alarm in replay(records, run)]

    def explores(record: Record, done: float) -> None:
        record["metrics"] |= {"surprisal": 0.3 + 3 * done, "reward": done}

    def away(record: Record, done: float) -> None:
        record["metrics"] |= {"learn/kl": 5 * done}

    assert [with_fault(fault) for fault in (explores, away)] == [[], []]


def test_a_run_that_learns_from_groups_of_equal_rewards_has_a_gradient() -> None:
    """As with a baseline of the whole batch, or a value head: attempts differ from one task to another."""

    def stopped(fault: Fault) -> list[str]:
        records = healthy(30, seed=0)
        for record in records:
            record["skipped"] = ""
            each(metric(reward=0.5, reward_std=0.0, learn__grad_norm=0.1), fault)(record)
        return sorted({alarm.gate for alarm in replay(records, settings()) if alarm.stops})

    def advantages(*values: float) -> Fault:
        return lambda record: record.update(advantages={f"e{at}": value for at, value in enumerate(values)})

    assert stopped(advantages(-1.0, -1.0, 1.0, 1.0)) == []
    assert stopped(advantages(0.0, 0.0)) == ["no_gradient"], "a KL term's gradient alone"
    assert stopped(advantages(0.0, 0.0, 1.0, 1.0)) == [], "rewards, which a value head is given"
    assert stopped(advantages(0.5, 0.5)) == ["no_gradient"], "every attempt at any task earned the same"


def test_a_stop_that_was_killed_before_its_message_is_announced_at_resume() -> None:
    records = healthy(20, seed=0)
    for record in records[8:]:
        FAULTS["perplexity"](record)
    stop = next(alarm for alarm in replay(records, settings()) if alarm.stops)
    seen: list[Record] = []
    for record in records[: stop.last]:
        seen.append({**record, "alarms": []})
        seen[-1]["alarms"] = [alarm.as_json() for alarm in gates.check_gates(seen, settings())]
    assert [(each.gate, each.last) for each in gates.find_unannounced_alarms(seen, (), settings())] == [
        ("perplexity", stop.last)
    ]
    assert gates.find_unannounced_alarms(seen, (stop.text.partition("\n")[0],), settings()) == []
    assert gates.find_unannounced_alarms(seen, (), settings(off=["perplexity"])) == []
    assert gates.find_unannounced_alarms(seen[:-1], (), settings()) == []


Records = list[Mapping[str, Any]]
Level = Callable[[float], float]
"""From the share of the run that is done."""


def log(
    steps: int, passed: Level, reward: Level, patches: Level = lambda done: 1.0, *, seed: int = 0, groups: int = 4
) -> Records:
    """Records of a run: groups of 8 attempts, some tasks harder than others, some patches empty."""
    rng = random.Random(seed)
    records: Records = []
    for step in range(1, steps + 1):
        done, kept = step / steps, []
        for _ in range(groups):
            hard = rng.uniform(0.5, 1.5)
            attempts = [None for _ in range(8) if rng.random() < patches(done)]
            if attempts:
                kept.append(
                    {
                        "rewards": [rng.gauss(reward(done) * hard, 0.2) for _ in attempts],
                        "passed": [float(rng.random() < passed(done) * hard) for _ in attempts],
                    }
                )
        records.append({"step": step, "tested": kept})
    return records


def first_alarm(records: Records) -> int:
    """The step of the first alarm; 0 if there is none."""
    for done in range(1, len(records) + 1):
        if check_over_optimisation(records[:done], len(records)):
            return done
    return 0


def rising(done: float) -> float:
    return 0.2 + 0.4 * done


def falling(done: float) -> float:
    return 0.45 - 0.4 * done


def test_reward_up_and_tests_down_raises_it() -> None:
    records = log(60, falling, rising)
    step = first_alarm(records)
    assert MIN_STEPS <= step <= 60
    assert step % LOOK_EVERY == 0
    found = check_over_optimisation(records[:step], 60)
    assert found is not None
    assert found.details["reward"] > 0 > found.details["passed"]
    assert (found.first, found.last) == (step - max(MIN_STEPS, step // 2) + 1, step)
    assert found.details["p"] < FALSE_ALARM_RATE / 9
    assert "rose by" in found.text
    run = {"name": "gates", "steps": 60}
    seen = [{**record, "metrics": {}, "account": {"sampled": 1}, "skipped": ""} for record in records[:step]]
    gate = next(each for each in gates.check_gates(seen, Run.model_validate(run)) if each.gate == "over_optimisation")
    assert (gate.stops, gate.first, gate.last) == (False, found.first, found.last)
    off = Run.model_validate({**run, "health": {"off": ["over_optimisation"]}})
    assert not [each for each in gates.check_gates(seen, off) if each.gate == "over_optimisation"]
    assert all(check_over_optimisation(records[:done], 60) is None for done in range(MIN_STEPS))


@pytest.mark.parametrize(
    ("passed", "reward", "patches"),
    [
        (rising, rising, lambda done: 1.0),
        (lambda done: 0.3, rising, lambda done: 1.0),
        (falling, lambda done: 0.4, lambda done: 1.0),
        (falling, falling, lambda done: 1.0),
        (lambda done: 0.1, rising, lambda done: 1.0 - 0.9 * done),
        (lambda done: 0.1, rising, lambda done: 0.1 + 0.9 * done),
    ],
    ids=["learns", "tests stay", "only tests fall", "both fall", "fewer patches", "more patches"],
)
def test_other_runs_raise_no_alarm(passed: Level, reward: Level, patches: Level) -> None:
    assert first_alarm(log(40, passed, reward, patches)) == 0


def test_false_alarms_are_as_rare_as_stated() -> None:
    """The worst case: the reward surely rises, tests stay where they are. Of 120 runs 6 are expected at most."""
    runs = [log(MIN_STEPS, lambda done: 0.2, rising, seed=seed, groups=2) for seed in range(120)]
    assert sum(first_alarm(run) > 0 for run in runs) <= 12


def test_records_keep_rewards_and_tests_of_tested_groups() -> None:
    def episode(patch: bytes, scores: Sequence[Score], ending: Ending = Ending.DONE) -> Episode:
        return Episode("e", "t", "train", 1, "g", 0, ending, patch=patch, scores=tuple(scores))

    paid, watched = Score("patch_lines", 0.5, 2.0), Score("tests", 1.0, 0.0)
    both = [paid, Score("file_match", 1.0, 0.0), watched]
    kept = [
        episode(b"diff", both),
        episode(b" ", both),
        episode(b"diff", [], Ending.VOID),
        episode(b"diff", [Score("patch_lines", 0.25, 2.0), Score("tests", 0.0, 5.0)]),
    ]
    task = Task("t", "p", "python", "dir:/", b"")
    groups = [Group("g", task, tuple(kept)), Group("h", task, (episode(b"diff", [paid]),))]
    assert gates.list_tested_groups(groups) == [{"rewards": [1.0, 0.5], "passed": [1.0, 0.0]}]


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
def test_void_or_silent_attempts_in_a_row_stop_an_evaluation(kinds: list[Any], words: str) -> None:
    watch = EvaluationWatch(100, 2, [], None, lambda line: None)
    for number, each in enumerate(kinds[:-1]):
        watch(episode(number, *each))
    with pytest.raises(HealthGateError, match=f"the last {words}"):
        watch(episode(len(kinds), *kinds[-1]))


@pytest.mark.parametrize(
    ("kinds", "stops"), [([LATE] * 20, True), ([DONE] + [SILENT] * 20, True), ([SILENT] * 20, False)]
)
def test_obstacles_that_a_policy_or_task_can_cause_are_warned_of_once(kinds: list[Any], stops: bool) -> None:
    lines: list[str] = []
    watch = EvaluationWatch(100, 1, [], None, lines.append, stops=stops)
    for number, each in enumerate(kinds):
        watch(episode(number, *each))
    assert len([line for line in lines if line.startswith("warning: the last 2 attempts")]) == 1


@pytest.mark.parametrize(
    ("kinds", "warning"),
    [
        ([LATE, LATE, VOID], "all 2 attempts ended by the time limit"),
        ([SILENT, SILENT], "all 2 attempts sampled nothing"),
        ([LATE, DONE], ""),
        ([DONE, DONE], ""),
    ],
)
def test_an_obstacle_of_all_attempts_is_warned_of(kinds: Any, warning: str) -> None:
    episodes = [episode(number, *kind) for number, kind in enumerate(kinds)]
    assert find_common_obstacle(episodes).partition(":")[0] == warning
