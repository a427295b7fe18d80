"""Health gates on step records that were made by rule: each sees its own fault in time, and nothing else does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config.schema import GateName, Run
from coderepairrl.stages import gates

Record = dict[str, Any]
Fault = Callable[[Record], None]


def settings(steps: int = 100, **health: Any) -> Run:
    return Run.model_validate({"name": "gates", "steps": steps, "health": health})


def healthy(steps: int, seed: int, *, rising: float = 0.3) -> list[Record]:
    """A run as they are: rewards rise in noise, entropy decays to a tenth, KL grows with single spikes, machines are
    slow for a moment, some steps have flat groups, and one in fifty has no gradient, or one that is not finite."""
    rng = random.Random(seed)
    records = []
    for step in range(1, steps + 1):
        done = step / steps
        seconds = rng.lognormvariate(3, 0.4) * (5 if rng.random() < 0.05 else 1)
        tokens = rng.lognormvariate(10, 0.3)
        metrics = {
            "reward": max(0.0, 0.2 + rising * done + rng.gauss(0, 0.05)),
            "reward_std": rng.uniform(0.05, 0.3),
            "surprisal": 0.3 * math.exp(-2.3 * done) * rng.lognormvariate(0, 0.15),
            "rollout_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "learn/grad_norm": rng.lognormvariate(-2, 0.5),
            "learn/kl": 0.2 * done**2 * rng.lognormvariate(0, 0.5) * (100 if rng.random() < 0.05 else 1),
            "learn/mismatch_mean": rng.lognormvariate(math.log(0.03), 0.3),
        }
        record: Record = {"step": step, "metrics": metrics, "account": {"sampled": int(tokens)}, "skipped": ""}
        if rng.random() < 0.02:
            metrics |= {"reward_std": 0.0, "learn/grad_norm": 0.0}
        elif rng.random() < 0.01:
            record["skipped"] = "its norm is nan"
            del metrics["learn/grad_norm"]
        records.append(record)
    return records


def played(records: list[Record], run: Run) -> list[gates.Alarm]:
    """All alarms of a run that goes on after each."""
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


def scale(name: str, factor: float) -> Fault:
    return lambda record: record["metrics"].update({name: record["metrics"][name] * factor})


def each(*faults: Fault) -> Fault:
    def fault(record: Record) -> None:
        for one in faults:
            one(record)

    return fault


def unsampled(record: Record) -> None:
    record["account"] = {"sampled": 0}
    record["metrics"] = {"reward": 0.0, "reward_std": 0.0, "rollout_seconds": 1.0, "tokens_per_second": 0.0}


FAULTS: Mapping[str, Fault] = {
    "skipped": lambda record: record.update(skipped="its norm is nan"),
    "nothing_sampled": unsampled,
    "zero_reward": metric(reward=0.0, reward_std=0.0, learn__grad_norm=0.0),
    "no_gradient": metric(reward=0.5, reward_std=0.0, learn__grad_norm=0.0),
    "entropy": metric(surprisal=0.001, reward=0.1),
    "perplexity": metric(surprisal=3.0, reward=0.1),
    "kl": metric(learn__kl=30.0),
    "drift": metric(learn__mismatch_mean=0.5),
    "throughput": each(scale("tokens_per_second", 0.01), scale("rollout_seconds", 30)),
}


def test_there_is_a_fault_for_each_gate_and_each_gate_has_its_name() -> None:
    assert [gate.name for gate in gates.GATES] == list(get_args(GateName))[:-1] == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("patience", [2, 5, 10])
def test_a_fault_is_warned_of_and_stops_the_run_in_time(
    name: str, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = 40
    records = healthy(60, seed=3)
    for record in records[begin - 1 :]:
        record["skipped"] = ""
        FAULTS[name](record)
    assert not played(records[: begin - 1], settings(patience=10))
    monkeypatch.setattr(gates, "SKIPS", patience)
    monkeypatch.setattr(gates, "ENTROPY", 0.05)
    run = settings(patience=patience)
    early = math.ceil(patience / 2)
    everything = [alarm for alarm in played(records, run) if alarm.last >= begin]
    assert {alarm.gate for alarm in everything if alarm.stops} == {name}
    found = [alarm for alarm in everything if alarm.gate == name]
    warning, stop = found[:2]
    assert (warning.stops, warning.last, warning.first) == (False, begin + early - 1, begin)
    assert (stop.stops, stop.last, stop.first) == (True, begin + patience - 1, begin)
    assert f"lasts {patience} steps" in warning.text and f"{patience} steps in a row" in stop.text and stop.fix
    if name not in ("kl", "throughput"):  # which compare with what has been usual
        # A run that goes on is given as many steps again, and is stopped again if nothing was done.
        assert [alarm.last for alarm in found if alarm.stops][:2] == [begin + patience - 1, begin + 2 * patience - 1]

    only_warned = played(records, settings(patience=patience, action="warn"))
    assert name in {alarm.gate for alarm in only_warned} and not any(alarm.stops for alarm in only_warned)
    off = settings(patience=patience, off={"no_gradient", "zero_reward", name})
    assert not [alarm for alarm in played(records, off) if alarm.last >= begin and alarm.stops]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_ends_is_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step short of the patience, twice."""
    monkeypatch.setattr(gates, "SKIPS", 4)
    monkeypatch.setattr(gates, "ENTROPY", 0.05)
    run, patience = settings(patience=4), 4
    records = healthy(60, seed=3)
    for record in [*records[30 : 30 + patience - 1], *records[40 : 40 + patience - 1]]:
        FAULTS[name](record)
    found = [alarm for alarm in played(records, run) if alarm.last > 30]
    assert not any(alarm.stops for alarm in found)
    assert {alarm.gate for alarm in found} == {name}, "it is warned of"


def test_healthy_runs_raise_hardly_any_alarm() -> None:
    """200 simulated runs of 100 steps, with spikes, stalls of a step and flat or skipped batches: none is stopped.

    So the rate of false stops is below 1.5 % of runs of such noise (95 %, the rule of three).
    """
    found = [alarm for seed in range(200) for alarm in played(healthy(100, seed), settings())]
    assert not [alarm for alarm in found if alarm.stops], found
    assert len(found) <= 4, "2 % of the runs may be warned"


@given(st.integers(0, 10_000), st.integers(11, 60), st.floats(-0.1, 0.5))
def test_no_healthy_run_is_stopped(seed: int, steps: int, rising: float) -> None:
    assert not [alarm for alarm in played(healthy(steps, seed, rising=rising), settings(steps)) if alarm.stops]


def test_what_goes_well_is_no_collapse_stall_or_spike() -> None:
    run = settings(patience=4)

    def with_fault(fault: Callable[[Record, float], None]) -> list[str]:
        records = healthy(60, seed=1)
        for record in records:
            record["skipped"] = ""
            record["metrics"]["learn/grad_norm"] = record["metrics"]["reward_std"] = 0.1
            fault(record, record["step"] / 60)
        return [alarm.gate for alarm in played(records, run)]

    def certain(record: Record, done: float) -> None:
        record["metrics"] |= {"surprisal": 0.3 * math.exp(-8 * done), "reward": done}

    def brief(record: Record, done: float) -> None:
        """Answers get shorter by a factor of a hundred, and steps with them."""
        factor = 0.01 if done > 0.5 else 1.0
        record["metrics"] |= {"tokens_per_second": 1000 * factor, "rollout_seconds": 60 * math.sqrt(factor)}

    def away(record: Record, done: float) -> None:
        record["metrics"] |= {"learn/kl": 5 * done}

    assert [with_fault(fault) for fault in (certain, brief, away)] == [[], [], []]


def test_records_of_older_versions_are_read() -> None:
    """They have neither ``surprisal`` nor ``skipped`` nor ``alarms``."""
    records = healthy(60, seed=3)
    for record in records:
        del record["skipped"]
        record["metrics"]["learn/entropy"] = record["metrics"].pop("surprisal")
        if record["step"] > 40:
            record["metrics"] |= {"learn/entropy": 1e-4, "reward": 0.1}
    assert not gates.check_gates(records[:40], settings())
    assert [alarm.gate for alarm in gates.check_gates(records[:50], settings())] == ["entropy"]


def test_a_run_that_learns_from_groups_of_equal_rewards_has_a_gradient() -> None:
    """As with a baseline of the whole batch, or a value head: attempts differ from one task to another."""

    def stopped(fault: Fault) -> list[str]:
        records = healthy(30, seed=0)
        for record in records:
            record["skipped"] = ""
            each(metric(reward=0.5, reward_std=0.0, learn__grad_norm=0.1), fault)(record)
        return sorted({alarm.gate for alarm in played(records, settings()) if alarm.stops})

    def advantages(*values: float) -> Fault:
        return lambda record: record.update(advantages={f"e{at}": value for at, value in enumerate(values)})

    assert stopped(advantages(-1.0, -1.0, 1.0, 1.0)) == []
    assert stopped(advantages(0.0, 0.0)) == ["no_gradient"], "a KL term's gradient alone"
    assert stopped(advantages(0.0, 0.0, 1.0, 1.0)) == [], "rewards, which a value head is given"
    assert stopped(advantages(0.5, 0.5)) == ["no_gradient"], "every attempt at any task earned the same"


def test_a_stop_that_no_process_lived_to_say_is_said_by_the_next() -> None:
    records = healthy(20, seed=0)
    for record in records[8:]:
        FAULTS["drift"](record)
    stop = next(alarm for alarm in played(records, settings()) if alarm.stops)
    seen: list[Record] = []
    for record in records[: stop.last]:
        seen.append({**record, "alarms": []})
        seen[-1]["alarms"] = [alarm.as_json() for alarm in gates.check_gates(seen, settings())]
    assert [(each.gate, each.last) for each in gates.unannounced(seen, (), settings())] == [("drift", stop.last)]
    assert gates.unannounced(seen, (stop.text.partition("\n")[0],), settings()) == []
    assert gates.unannounced(seen, (), settings(off=["drift"])) == []
    assert gates.unannounced(seen[:-1], (), settings()) == []
