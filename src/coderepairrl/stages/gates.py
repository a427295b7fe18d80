"""Health gates: stop a run that no longer learns or has unsound numbers.

A gate is a rule about the newest step records. After half of `run.health.patience` violating steps it warns; after all
it stops the run with exit code 4. A resumed run starts counting again. Gates read only records, and can be replayed
over any log:

  coderepairrl.stages.gates.replay_gates("runs/mine")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any, NamedTuple

from coderepairrl.config import load_run
from coderepairrl.config.schema import GateName, Run
from coderepairrl.learn.algorithms import FLAT
from coderepairrl.rollout.groups import Group
from coderepairrl.runs import open_run
from coderepairrl.stages.history import read_history
from coderepairrl.stats.intervals import sign_flip_test
from coderepairrl.types import Ending

Record = Mapping[str, Any]
Records = Sequence[Record]
Rule = Callable[[Records, Records], str]
"""Maps earlier and newest steps to a complaint, or ``""``."""

WINDOW = 20
"""Steps of a running median."""
FIRST_STEPS = 5
"""Steps of a run's beginning, for comparisons."""
TEACHER_METRIC = "learn/teacher_kl"
"""Metric of runs with a teacher, which always have a gradient."""
MAX_SKIPS = 3
"""Consecutive batches without a finite gradient."""
PERPLEXITY_FACTOR = 5.0
"""Largest multiple of the first steps' perplexity."""
KL_FACTOR = 10.0
"""Largest multiple of the running median of the KL against the initial policy."""
KL_FLOOR = 0.1
"""Nats per token: the least running median assumed, since KL begins at 0."""
TESTS_SCORE = "tests"
MIN_STEPS = 20
"""Fewest steps that a check of over-optimisation covers."""
LOOK_EVERY = 5
"""Steps between these checks (looks)."""
FALSE_ALARM_RATE = 0.05
"""Share of sound runs with an over-optimisation alarm."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Alarm of a gate about steps `first` to `last`."""

    gate: str
    stops: bool
    first: int
    last: int
    text: str
    fix: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the over-optimisation alarm."""

    def as_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)


class Gate(NamedTuple):
    """Rule with its remedy."""

    name: GateName
    rule: Rule
    fix: str


def check_gates(records: Records, run: Run) -> list[Alarm]:
    """Alarms for the newest of `records` (all ``step`` records)."""
    alarms: list[Alarm] = []
    for gate in GATES:
        is_implied = any(alarm.gate in _IMPLIED.get(gate.name, ()) for alarm in alarms)
        if gate.name in run.health.off or is_implied:
            continue
        if (alarm := _check_gate(gate, records, run)) is not None:
            alarms.append(alarm)
    if "over_optimisation" not in run.health.off and (alarm := check_over_optimisation(records, run.steps)) is not None:
        alarms.append(alarm)
    return alarms


def find_unannounced_alarms(records: Records, announced: Container[str], run: Run) -> list[Alarm]:
    """Alarms of the newest record, if the run was killed before they could stop it.

    `announced` are the logged reasons of stops after that record.
    """
    stops = [alarm for record in records[-1:] for alarm in record.get("alarms", ()) if alarm["stops"]]
    if not stops or any(alarm["text"].partition("\n")[0] in announced for alarm in stops):
        return []
    # without its alarms, which would restart the counts: they restart once the alarms are raised
    return check_gates([*records[:-1], {**records[-1], "alarms": []}], run)


def replay_gates(folder: Path | str) -> list[Alarm]:
    """Alarms over the log of the run in `folder`; counts restart after a stop.

    Raises `UsageError` without a run, `RunError` for a damaged log.
    """
    opened = open_run(Path(folder))
    settings = load_run(opened.path).run
    seen: list[dict[str, Any]] = []
    alarms: list[Alarm] = []
    for record in read_history(opened).steps:
        seen.append({**record, "alarms": []})
        now = check_gates(seen, settings)
        seen[-1]["alarms"] = [alarm.as_json() for alarm in now]
        alarms += now
    return alarms


def _check_gate(gate: Gate, records: Records, run: Run) -> Alarm | None:
    limit = MAX_SKIPS if gate.name == "skipped" else run.health.patience
    if gate.name == "nothing_sampled":  # also stop runs that are shorter than the patience
        limit = max(1, min(limit, run.steps))
    early = math.ceil(limit / 2)
    # only steps since this gate, or one that implies it, last stopped the run
    names = {gate.name, *_IMPLIED.get(gate.name, ())}
    recent = records[-limit:]
    count = next((back for back, record in enumerate(reversed(recent)) if _has_stopped(names, record)), len(recent))
    newest = len(records)

    def complain(steps: int, end: int) -> str:
        # about the `steps` records before index `end`
        first = end - steps
        return gate.rule(records[:first], records[first:end]) if newest - count <= first else ""

    if run.health.action == "stop" and (text := complain(limit, newest)):
        return Alarm(gate.name, True, records[-limit]["step"], records[-1]["step"], text, gate.fix)
    # warn once: not if the rule already held for as many steps one step ago
    if early < limit and (text := complain(early, newest)) and not complain(early, newest - 1):
        more = f"; the run stops if this lasts {limit} steps" if run.health.action == "stop" else ""
        return Alarm(gate.name, False, records[-early]["step"], records[-1]["step"], text + more, gate.fix)
    return None


def _has_stopped(names: Container[str], record: Record) -> bool:
    return any(alarm["gate"] in names and alarm["stops"] for alarm in record.get("alarms", ()))


def _metric_values(records: Records, name: str) -> list[float]:
    return [value for record in records if (value := record["metrics"].get(name)) is not None]


def _format_span(newest: Records) -> str:
    return f"in step {newest[-1]['step']}" if len(newest) == 1 else f"in {len(newest)} steps in a row"


def skipped(before: Records, newest: Records) -> str:
    """No batch had a finite gradient."""
    if not all(record.get("skipped") for record in newest):
        return ""
    return f"no finite gradient {_format_span(newest)}: {newest[-1]['skipped']}"


def nothing_sampled(before: Records, newest: Records) -> str:
    """The policy sampled no token."""
    if any(record["account"]["sampled"] for record in newest):
        return ""
    return f"nothing was sampled {_format_span(newest)}"


def zero_reward(before: Records, newest: Records) -> str:
    """Every attempt earned 0."""
    rewards, spreads = _metric_values(newest, "reward"), _metric_values(newest, "reward_std")
    if len(rewards) < len(newest) or any(rewards) or any(spreads) or _metric_values(newest, TEACHER_METRIC):
        return ""
    earlier = fmean(_metric_values(before[-WINDOW:], "reward") or [0.0])
    return f"every attempt earned 0 {_format_span(newest)}" + (f", {earlier:.3g} on average before" if earlier else "")


def no_gradient(before: Records, newest: Records) -> str:
    """Attempts earned the same, or the gradient was 0."""
    for record in newest:
        if record.get("skipped") or (record["metrics"].get("learn/grad_norm") and _has_signal(record)):
            return ""
    if any(spread > FLAT for spread in _metric_values(newest, "reward_std")):
        span = _format_span(newest)
        return f"no gradient {span}, though rewards differ: no token was trained, or none could change them"
    mean = fmean(_metric_values(newest, "reward") or [0.0])
    return f"no gradient {_format_span(newest)}: all attempts at a task earned the same (mean reward {mean:.3g})"


def _has_signal(record: Record) -> bool:
    # "advantages" differ (with a value head these are rewards); a KL term alone teaches nothing
    metrics = record["metrics"]
    if metrics.get("reward_std", 0.0) > FLAT or TEACHER_METRIC in metrics:
        return True
    return len(set(record.get("advantages", {}).values())) > 1


def perplexity(before: Records, newest: Records) -> str:
    """Samples became far more random, and the reward does not rise."""
    first, now = _metric_values(before[:FIRST_STEPS], "surprisal"), _metric_values(newest, "surprisal")
    if len(first) < FIRST_STEPS or len(now) < len(newest):
        return ""
    if min(now) <= median(first) + math.log(PERPLEXITY_FACTOR):
        return ""
    if _has_risen(_metric_values(before[-WINDOW:], "reward"), _metric_values(newest, "reward")):
        return ""
    return (
        f"the policy has become random {_format_span(newest)}: a perplexity of {_exp(median(now)):.3g} a token, where"
        f" it began with {_exp(median(first)):.3g}, and its reward does not rise"
    )


def _exp(nats: float) -> float:
    # a broken policy can give its own samples any logprob, and `math.exp` overflows above 709
    return math.exp(nats) if nats < 700 else math.inf


def kl(before: Records, newest: Records) -> str:
    """The policy is suddenly far from the initial one."""
    now, earlier = _metric_values(newest, "learn/kl"), _metric_values(before[-WINDOW:], "learn/kl")
    running = median(earlier) if earlier else 0.0
    if len(now) < len(newest) or min(now) <= KL_FACTOR * max(KL_FLOOR, running):
        return ""
    return (
        f"KL against the initial policy of {median(now):.3g} nats a token {_format_span(newest)}, after {running:.3g}"
    )


# Gates that say nothing new after an alarm of one of these.
_IMPLIED: Mapping[str, set[str]] = {
    "zero_reward": {"nothing_sampled"},
    "no_gradient": {"nothing_sampled", "zero_reward"},
}

GATES = (
    Gate(
        "skipped",
        skipped,
        "continue with --resume and a lower train.lr; if the weights themselves are damaged, begin a new run from an "
        "earlier checkpoint (model.path=RUN_FOLDER/checkpoints/STEP)",
    ),
    Gate(
        "nothing_sampled",
        nothing_sampled,
        "give prompts room: continue with --resume and a higher rollout.tokens, and a model whose context has as many",
    ),
    Gate(
        "zero_reward",
        zero_reward,
        "read some attempts (crrl report): do they reach the reward, and can this policy earn any of it? Then --resume "
        "gives it as many steps again. If it earned more before, it collapsed: begin a new run from an earlier "
        "checkpoint (model.path=RUN_FOLDER/checkpoints/STEP) with a lower train.lr",
    ),
    Gate(
        "no_gradient",
        no_gradient,
        "take tasks that the policy sometimes solves (curriculum.band=true finds them), or see in the account why no"
        " token is trained (rollout.tokens, sampling); --resume gives this run as many steps again",
    ),
    Gate(
        "perplexity",
        perplexity,
        "read some attempts (crrl report): are they language at all? Begin a new run from an earlier checkpoint, with "
        "a lower train.lr or train.beta above 0; --resume gives this one as many steps again",
    ),
    Gate("kl", kl, "continue with --resume and a lower train.lr or a higher train.beta"),
)
"""Gates in order: causes before consequences."""


def _has_risen(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the mean rose by more than the standard error of the difference."""
    if len(before) < 2 or len(now) < 2:
        return False
    error = math.sqrt(variance(before) / len(before) + variance(now) / len(now))
    return fmean(now) - fmean(before) > error


def list_tested_groups(groups: Iterable[Group]) -> list[dict[str, list[float]]]:
    """List each group's rewards without the tests' part, and its test results, of tested attempts with a patch."""
    tested_groups = []
    for group in groups:
        rewards, passed = [], []
        for episode in group.episodes:
            tests = [score.value for score in episode.scores if score.name == TESTS_SCORE]
            if tests and episode.patch.strip() and episode.ending is not Ending.VOID:
                rewards.append(sum(s.value * s.weight for s in episode.scores if s.name != TESTS_SCORE))
                passed.append(tests[0])
        if rewards:
            tested_groups.append({"rewards": rewards, "passed": passed})
    return tested_groups


def check_over_optimisation(records: Records, planned: int) -> Alarm | None:
    """Alarm at the newest of `records` of a run of `planned` steps, if a look is due: the reward rises, repairs fall.

    Similarity rewards may pay for what tests do not. If tests are measured (`reward.tests=0`), both are compared every
    `LOOK_EVERY` steps over the newer half of all steps, at least `MIN_STEPS`, on tested non-empty attempts. For a
    measure x at steps t,

      T = sum over attempts of (t - mean t) (x - mean x)

    is the numerator of the least-squares slope, 0 on average if the mean of x is constant; its one-sided p-value is
    from the sign-flip test over groups. The alarm needs rising reward *and* falling tests, each with p below
    `FALSE_ALARM_RATE` / looks of the run: at most about that rate of false alarms a run (intersection-union test,
    Bonferroni).
    """
    done = records[-1]["step"] if records else 0
    if done < MIN_STEPS or done % LOOK_EVERY:
        return None
    looks = (planned - MIN_STEPS) // LOOK_EVERY + 1
    window = {record["step"]: record.get("tested", ()) for record in records[-max(MIN_STEPS, done // 2) :]}
    level = FALSE_ALARM_RATE / max(looks, 1)
    fall = _fit_trend(window, "passed")
    rise = _fit_trend(window, "rewards") if fall.p_fall < level else None
    if rise is None or rise.p_rise >= level:
        return None
    first, p = min(window), max(rise.p_rise, fall.p_fall)
    text = (
        f"over-optimisation? From step {first} to {done} the reward of non-empty patches rose by {rise.change:.3f}"
        f" while their share that passes tests fell by {-fall.change:.3f} (p {p:.2g})"
    )
    details = {"first": first, "last": done, "reward": rise.change, "passed": fall.change, "p": p, "text": text}
    fix = "read some patches (crrl report), then change the reward"
    return Alarm("over_optimisation", False, first, done, text, fix, details)


class _Trend(NamedTuple):
    """Fitted change over the window, with one-sided p-values."""

    change: float
    p_rise: float
    p_fall: float


def _fit_trend(window: Mapping[int, Sequence[Mapping[str, Sequence[float]]]], measure: str) -> _Trend:
    """Trend of ``rewards`` or ``passed`` over the groups of `window`, by step."""
    rows = [
        (step, number, value)
        for step, groups in window.items()
        for number, group in enumerate(groups)
        for value in group[measure]
    ]
    if not rows:
        return _Trend(0.0, 1.0, 1.0)
    middle = sum(step for step, _, _ in rows) / len(rows)
    mean = sum(value for _, _, value in rows) / len(rows)
    parts = [(step - middle) * (value - mean) for step, _, value in rows]
    total, spread = sum(parts), sum((step - middle) ** 2 for step, _, _ in rows)
    if not total:
        return _Trend(0.0, 1.0, 1.0)
    p = sign_flip_test([0.0] * len(parts), parts, [(step, group) for step, group, _ in rows])
    change = total / spread * (max(window) - min(window))
    return _Trend(change, p / 2 if total > 0 else 1.0, p / 2 if total < 0 else 1.0)
