"""Health gates: is a run still learning anything, with sound numbers, at a usable speed?

A gate is a rule over step records: what it looks for must show in each of the newest steps. After half of the steps
that it waits for (`run.health.patience`) it warns, after all of them it stops the run with exit code 4. A resumed run
is given as many steps again (what is compared with a running median is by then compared with what the run has become).
Gates are functions of the records alone, so they can be replayed over any run's log:

    coderepairrl.stages.gates.replay("runs/mine")

Bounds are meant to fire on nothing that a run recovers from. A running median is that of the `WINDOW` steps before
the newest ones, so that a sudden change is compared with what was before it, and one odd step moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any, NamedTuple

from coderepairrl.config import load_run
from coderepairrl.config.sections.run import GateName, Run
from coderepairrl.learn.advantages import FLAT
from coderepairrl.runs import open_run
from coderepairrl.stages import overoptimisation
from coderepairrl.stages.history import read_history

Record = Mapping[str, Any]
Records = Sequence[Record]
Rule = Callable[[Records, Records], str]
"""From the steps before, and the newest ones: what is wrong with all of these, or ``""``."""

WINDOW = 20
"""Steps that a running median is taken over."""
FIRST = 5
"""Steps that a run's beginning is judged by; with fewer before the newest ones these are compared with nothing."""
TEACHER = "learn/teacher_kl"
"""The metric of a run that learns from a teacher, too: whatever its attempts earn, it has a gradient."""
SKIPS = 3
"""Batches in a row without a finite gradient. Each is skipped, and leaves the weights as they are."""
ENTROPY = 0.02
"""Share of the surprisal of the first steps. While the reward rises, little of it may be left in sound runs, too (arXiv
2505.22617)."""
PERPLEXITY = 5.0
"""Times the perplexity of the first steps."""
KL = 10.0
"""Times the running median of the KL against the initial policy."""
DRIFT = 0.2
"""Nats a token between the engine's logprobs and the learner's. In float32 it is about 1e-7. Rounded to bfloat16,
logits of 16 to 32 are off by 0.03 on the average."""
THROUGHPUT = 0.1
"""Share of the running median of tokens a second."""
KL_FLOOR = 0.1
"""Nats a token. At first the policy is its own reference, and any KL is many times the one before."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What a gate has seen in the steps `first` to `last`, and whether it stops the run."""

    gate: str
    stops: bool
    first: int
    last: int
    text: str
    fix: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Of the over-optimisation alarm: its numbers."""

    def as_json(self) -> dict[str, Any]:
        """As plain data, for the step's record."""
        return {key: value for key, value in asdict(self).items() if key != "details"}


class Gate(NamedTuple):
    """A rule, and what to do when it holds."""

    name: GateName
    rule: Rule
    fix: str


def check(records: Records, run: Run) -> list[Alarm]:
    """What the newest of `records` (the ``step`` records of a run so far) gives reason for, by the settings `run`.

    The records' own ``alarms`` are read to know where a gate has stopped the run before.
    """
    found: list[Alarm] = []
    for gate in GATES:
        implied = gate.name in _IMPLIED and any(alarm.gate in _IMPLIED[gate.name] for alarm in found)
        if gate.name not in run.health.off and not implied and (alarm := _look(gate, records, run)) is not None:
            found.append(alarm)
    if "over_optimisation" not in run.health.off and (over := overoptimisation.alarm(records, run.steps)) is not None:
        fix = "read some patches (crrl view), then change the reward"
        found.append(Alarm("over_optimisation", False, over.first, over.last, str(over), fix, over.as_json()))
    return found


def unannounced(records: Records, announced: Container[str], run: Run) -> list[Alarm]:
    """The alarms of the newest of `records`, where one stopped the run and no process lived to say so.

    `announced` are the reasons for which processes have stopped since that record. Nobody could act on a stop that no
    process lived to announce: it is announced now, by the settings `run`, and only then does the count begin again.
    """
    stops = [alarm for record in records[-1:] for alarm in record.get("alarms", ()) if alarm["stops"]]
    if not stops or any(alarm["text"].partition("\n")[0] in announced for alarm in stops):
        return []
    return check([*records[:-1], {**records[-1], "alarms": []}], run)


def replay(folder: Path | str, run: Run | None = None) -> list[Alarm]:
    """The alarms that the gates give over the log of the run in `folder`, first to last, whatever it recorded.

    `run` has the settings to judge by; without it those in the folder. After a stop the count begins again, as in a
    run that is resumed. Raises `UsageError` for a folder that is no run, and `RunError` for a damaged log.
    """
    opened = open_run(Path(folder))
    settings = run or load_run(opened.path).run
    seen: list[dict[str, Any]] = []
    alarms: list[Alarm] = []
    for record in read_history(opened).steps:
        seen.append({**record, "alarms": []})
        now = check(seen, settings)
        seen[-1]["alarms"] = [alarm.as_json() for alarm in now]
        alarms += now
    return alarms


def _look(gate: Gate, records: Records, run: Run) -> Alarm | None:
    limit = SKIPS if gate.name == "skipped" else run.health.patience
    if gate.name == "nothing_sampled":  # a run that is shorter has not sampled anything at all
        limit = max(1, min(limit, run.steps))
    early = math.ceil(limit / 2)
    # how many steps are looked at: those since this gate, or one that says the same, last stopped the run
    names = {gate.name, *_IMPLIED.get(gate.name, ())}
    recent = records[-limit:]
    count = next((back for back, record in enumerate(reversed(recent)) if _stopped(names, record)), len(recent))

    def seen(steps: int, end: int) -> str:
        """What shows in all of so many steps before the `end`-th."""
        first = end - steps
        return gate.rule(records[:first], records[first:end]) if 0 <= len(records) - count <= first else ""

    newest = len(records)
    if run.health.action == "stop" and (text := seen(limit, newest)):
        return Alarm(gate.name, True, records[-limit]["step"], records[-1]["step"], text, gate.fix)
    if early < limit and (text := seen(early, newest)) and not seen(early, newest - 1):
        more = f"; the run stops when it lasts {limit} steps" if run.health.action == "stop" else ""
        return Alarm(gate.name, False, records[-early]["step"], records[-1]["step"], text + more, gate.fix)
    return None


def _stopped(names: Container[str], record: Record) -> bool:
    return any(alarm["gate"] in names and alarm["stops"] for alarm in record.get("alarms", ()))


def _values(records: Records, *names: str) -> list[float]:
    """A metric of those records that have it, by the first of its `names` that they know."""
    found = (
        next((m[name] for name in names if m.get(name) is not None), None) for m in (r["metrics"] for r in records)
    )
    return [value for value in found if value is not None]


def _span(newest: Records) -> str:
    return f"in step {newest[-1]['step']}" if len(newest) == 1 else f"in {len(newest)} steps in a row"


def skipped(before: Records, newest: Records) -> str:
    """No batch had a finite gradient."""
    if not all(record.get("skipped") for record in newest):
        return ""
    return f"no finite gradient {_span(newest)}: {newest[-1]['skipped']}"


def nothing_sampled(before: Records, newest: Records) -> str:
    """The policy was not asked for a single token."""
    if any(record["account"]["sampled"] for record in newest):
        return ""
    return f"nothing was sampled {_span(newest)}"


def zero_reward(before: Records, newest: Records) -> str:
    """Every attempt earned 0."""
    rewards, spreads = _values(newest, "reward"), _values(newest, "reward_std")
    if len(rewards) < len(newest) or any(rewards) or any(spreads) or _values(newest, TEACHER):
        return ""
    return f"every attempt earned 0 {_span(newest)}"


def no_gradient(before: Records, newest: Records) -> str:
    """No attempt was better than another, or the gradient was 0. A batch that was skipped is another matter."""
    if any(
        record.get("skipped") or (record["metrics"].get("learn/grad_norm") and _teaches(record)) for record in newest
    ):
        return ""
    if any(spread > FLAT for spread in _values(newest, "reward_std")):
        return f"no gradient {_span(newest)}, though rewards differ: no token was trained, or none could change them"
    mean = fmean(_values(newest, "reward") or [0.0])
    return f"no gradient {_span(newest)}: all attempts at a task earned the same (mean reward {mean:.3g})"


def _teaches(record: Record) -> bool:
    """Whether some attempt was better than another: in its group, or in the batch, by what the learner was given.

    That is an advantage, or with a value head the reward. A KL term alone, which has a gradient whatever is earned,
    teaches nothing.
    """
    metrics = record["metrics"]
    if metrics.get("reward_std", 0.0) > FLAT or TEACHER in metrics:
        return True
    return len(set(record.get("advantages", {}).values())) > 1


def entropy(before: Records, newest: Records) -> str:
    """The policy's samples have nearly no surprise left, and its reward does not rise any more."""
    first, now = _values(before[:FIRST], *_SURPRISAL), _values(newest, *_SURPRISAL)
    if len(first) < FIRST or len(now) < len(newest) or max(now) >= ENTROPY * median(first):
        return ""
    if _rises(_values(before[-WINDOW:], "reward"), _values(newest, "reward")):
        return ""
    return (
        f"the policy hardly varies {_span(newest)}: {median(now):.2g} nats a token, where it began with "
        f"{median(first):.2g}, and its reward does not rise"
    )


def perplexity(before: Records, newest: Records) -> str:
    """The policy's samples are far more random than they were at first, and its reward does not rise."""
    first, now = _values(before[:FIRST], *_SURPRISAL), _values(newest, *_SURPRISAL)
    if len(first) < FIRST or len(now) < len(newest) or min(now) <= median(first) + math.log(PERPLEXITY):
        return ""
    if _rises(_values(before[-WINDOW:], "reward"), _values(newest, "reward")):
        return ""
    began, became = (_e_to(median(values)) for values in (first, now))
    return (
        f"the policy has become random {_span(newest)}: a perplexity of {became:.3g} a token, where it began with "
        f"{began:.3g}, and its reward does not rise"
    )


def _e_to(nats: float) -> float:
    """Infinite beyond what a float holds: a broken policy gives its own samples any logprob."""
    return math.exp(nats) if nats < 700 else math.inf


def kl(before: Records, newest: Records) -> str:
    """The policy is suddenly far from the initial one; known with a KL term only."""
    now, known = _values(newest, "learn/kl"), _values(before[-WINDOW:], "learn/kl")
    running = median(known) if known else 0.0
    if len(now) < len(newest) or min(now) <= KL * max(KL_FLOOR, running):
        return ""
    return f"KL against the initial policy of {median(now):.3g} nats a token {_span(newest)}, after {running:.3g}"


def drift(before: Records, newest: Records) -> str:
    """Engine and learner give the same tokens other logprobs."""
    now = _values(newest, "learn/mismatch_mean")
    if len(now) < len(newest) or min(now) <= DRIFT:
        return ""
    return (
        f"the engine's logprobs are not the learner's {_span(newest)}: they differ by {median(now):.3g} nats a token, "
        "which is more than rounding"
    )


def throughput(before: Records, newest: Records) -> str:
    """Steps take no less time than before, and give far fewer tokens in it: answers that are short are no stall."""
    known = [record for record in before[-WINDOW:] if record["account"]["sampled"]]
    if len(known) < FIRST or not all(record["account"]["sampled"] for record in newest):
        return ""
    rates, usual = _values(newest, "tokens_per_second"), _values(known, "tokens_per_second")
    spent, usually = _values(newest, "rollout_seconds"), _values(known, "rollout_seconds")
    if len(rates) < len(newest) or len(spent) < len(newest) or not usual or not usually:
        return ""
    if max(rates) >= THROUGHPUT * median(usual) or min(spent) < median(usually):
        return ""
    return f"{median(rates):.3g} tokens a second {_span(newest)}, after {median(usual):.3g}"


_SURPRISAL = ("surprisal", "learn/entropy")
"""Runs of older versions have the second alone."""
_IMPLIED: Mapping[str, set[str]] = {
    "zero_reward": {"nothing_sampled"},
    "no_gradient": {"nothing_sampled", "zero_reward"},
}
"""Gates that have nothing to add where one of those has raised an alarm."""

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
        "read some attempts (crrl view): do they reach the reward, and can this policy earn any of it? Then --resume "
        "gives it as many steps again",
    ),
    Gate(
        "no_gradient",
        no_gradient,
        "take tasks that the policy sometimes solves (curriculum.band=true finds them), or see in the account why no"
        " token is trained (rollout.tokens, sampling); --resume gives this run as many steps again",
    ),
    Gate(
        "entropy",
        entropy,
        "such a policy explores no more: begin a new run from an earlier checkpoint, with a lower train.lr or "
        "train.beta above 0; --resume gives this one as many steps again",
    ),
    Gate(
        "perplexity",
        perplexity,
        "read some attempts (crrl view): are they language at all? Begin a new run from an earlier checkpoint, with a "
        "lower train.lr or train.beta above 0; --resume gives this one as many steps again",
    ),
    Gate("kl", kl, "continue with --resume and a lower train.lr or a higher train.beta"),
    Gate(
        "drift",
        drift,
        "serve and train in the same precision, and look for what the engine serves (logs/); then --resume, with "
        "train.old_logprobs=recomputed and train.mismatch_correction=token if the difference must be lived with",
    ),
    Gate(
        "throughput",
        throughput,
        "look for what slows the engine or the sandboxes (other programs, swapping, a full disk, logs/), then --resume",
    ),
)
"""In the order in which they are asked: causes before what follows from them."""


def _rises(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the mean is higher by more than its standard error."""
    if len(before) < 2 or len(now) < 2:
        return False
    error = math.sqrt(variance(before) / len(before) + variance(now) / len(now))
    return fmean(now) - fmean(before) > error
