"""How long a run takes and where its time goes, by a simulation of its first steps (`simulation`) at the speeds that a
GPU is taken to have (`estimate`) or that a run had (``plan.run``)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from coderepairrl import engines
from coderepairrl.assembly.kinds import of_kind
from coderepairrl.assembly.sizing import attempts
from coderepairrl.assembly.sizing.attempts import Group, KindLimits, Pilot, Tasks, computed, on_cores
from coderepairrl.assembly.sizing.engine import DATA_NAMES, with_argument
from coderepairrl.assembly.sizing.estimate import GB, Estimate, estimate
from coderepairrl.assembly.sizing.replica import Server
from coderepairrl.assembly.sizing.simulation import (
    LEARNING,
    SAMPLING,
    SWITCHING,
    TOOLS,
    WAITING,
    WEIGHTS,
    Computing,
    Groups,
    Loop,
    Spent,
    simulate,
)
from coderepairrl.config import Config, override
from coderepairrl.errors import ConfigError
from coderepairrl.learn import LearnSettings
from coderepairrl.types import Limits

STEPS = 6
"""That are simulated beside the first ones, which fill the queue."""
PUBLISHED = 0.45 * GB
"""Bytes of new weights in a second: a model of 0.6B from an H100's learner (docs/measurements/performance.md)."""
MOVED = 20 * GB
"""Bytes in a second between a GPU and page-locked memory of its host: an assumption, not a measurement."""
BETTER = 0.02
"""By how much another division of the GPUs has to be better to be proposed."""
SettingsOf = Callable[[Config], LearnSettings]


class Evaluation(NamedTuple):
    """The kinds of its held-out tasks, attempts at each of these, and how often."""

    kinds: tuple[str, ...]
    attempts: int
    times: int


Evaluations = Sequence[Evaluation]


@dataclass(frozen=True, slots=True)
class Planned:
    """A loop with the attempts it is simulated on."""

    loop: Loop
    draws: Callable[[int], Iterator[Group]]
    kinds: KindLimits
    given: Estimate
    pilot: Pilot | None
    timed: bool
    """Whether speeds are the pilot's."""

    @classmethod
    def of(cls, given: Estimate) -> Self | None:
        """None where nothing is trained, and where speeds are not known: there is no server of ours on a known GPU, and
        no run with the same model and engine. Raises `UsageError` for a run that says nothing."""
        config = given.config
        if not config.run.steps:
            return None
        pilot = attempts.read(config.plan.run) if config.plan.run else None
        timed = pilot is not None and (pilot.model, pilot.engine) == (config.model.path, config.engine.name)
        server = given.served()
        if pilot is not None and timed:
            server = (server or Server(0.0)).at(pilot.server)
        if server is None:
            return None
        rollout = config.rollout
        loop = Loop(
            per_step=rollout.tasks_per_step,
            refill=config.curriculum.refill,
            concurrency=rollout.concurrency,
            staleness=rollout.max_staleness,
            limits=_limits(config, pilot),
            server=server,
            learning=_learning(given, pilot if timed else None),
            sync=pilot.sync if pilot is not None and timed else _sent(given) / PUBLISHED,
            shared=bool({*given.serving} & {*given.learning}),
            switch=moved.step / MOVED if (moved := given.moves()) else 0.0,
            cores=float(config.plan.cores) or (_cores() if on_cores(config) else math.inf),
            computing=Computing(on_cores(config), not given.on_gpus),
            steps=(steps := min(config.run.steps, rollout.max_staleness + 1 + STEPS)),
            later=config.run.steps - steps,
        )
        kinds = {name: _limits(of_kind(config, kind), pilot) for name, kind in config.kinds.items()}

        def draws(seed: int) -> Iterator[Group]:
            return pilot.draws(seed, kinds) if pilot else attempts.assumed(config, seed, Tasks.trained(config, kinds))

        return cls(loop, draws, kinds, given, pilot, timed)

    def run(self, **changed: Any) -> Spent:
        """Simulate it, on the same attempts whatever is `changed` of the loop."""
        return simulate(replace(self.loop, **changed), self.draws(self.given.config.run.seed))

    def evaluating(self, evaluation: Evaluation) -> float:
        """Seconds of the attempts at its tasks, while nothing is learned and nobody else has the GPU."""
        alone = replace(
            self.loop,
            per_step=len(evaluation.kinds),
            refill=0,
            staleness=0,
            learning=lambda _: 0.0,
            sync=0.0,
            switch=0.0,
            steps=1,
            later=0,
        )
        config, tasks = self.given.config, Tasks(lambda _: evaluation.kinds, evaluation.attempts, self.kinds)
        seed = config.run.seed
        groups = self.pilot.evaluated(seed, tasks) if self.pilot else attempts.assumed(config, seed, tasks)
        return simulate(alone, groups).wall

    def per_hour(self, spent: Spent) -> float:
        """Trained episodes in a GPU-hour (an hour, where no GPU is planned)."""
        rollout = self.given.config.rollout
        return rollout.tasks_per_step * rollout.group_size * 3600 / (spent.step * self._gpus)

    @property
    def _gpus(self) -> int:
        return (self.given.gpus if self.given.on_gpus else 0) or 1

    def shown(self, settings_of: SettingsOf, evaluations: Evaluations) -> dict[str, Any]:
        """As ``--dry-run`` prints it."""
        config, spent = self.given.config, self.run()
        hours = config.run.steps * spent.step / 3600
        measuring = sum(each.times * self.evaluating(each) for each in evaluations) / 3600
        return {
            "step": {
                "episodes": episodes(config),
                "tokens": round(spent.tokens / len(spent.ends)),
                "seconds": _rounded(spent.step),
                "engine": _shares(spent, spent.engine, (SAMPLING, TOOLS, WAITING, SWITCHING, WEIGHTS)),
                "learner": _shares(spent, spent.learner, (LEARNING, WAITING, SWITCHING, WEIGHTS)),
                "running": f"{spent.at_once:.1f} of {_places(self.loop)} replies at once",
                "cores": _cores_shown(spent, self.loop.cores),
                **({"evicted": f"{lost:.0%} of what is given is computed again"} if (lost := _lost(spent)) else {}),
                "ends_by": _ends(spent),
                "limit": self._limit(spent),
                "if_twice": {name: f"{_rounded(again):g} s" for name, again in self._twice()},
            },
            "run": {
                "steps": config.run.steps,
                "hours": round(hours, 1),
                **({"evaluation_hours": round(measuring, 1)} if evaluations else {}),
                **({"gpu_hours": round((hours + measuring) * self.given.gpus, 1)} if self.given.on_gpus else {}),
                f"episodes_per_{'gpu_' * self.given.on_gpus}hour": round(self.per_hour(spent)),
            },
            **({"split": split} if (split := self._splits(spent, settings_of)) else {}),
            "assumed": self._assumed(),
        }

    def _limit(self, spent: Spent) -> str:
        """What ends most attempts."""
        rollout = self.given.config.rollout
        by, reached = spent.by.most_common(1)[0][0], round(spent.tokens / spent.rows)
        if by == "done":
            return ""
        if self.given.config.kinds:
            return f"the {by} of the run and its kinds"
        if by == "time":
            return f"rollout.seconds={rollout.seconds:g}: an episode gets to {reached} of {rollout.tokens} tokens"
        return f"rollout.{by}={getattr(rollout, by)}"

    def _twice(self) -> Iterator[tuple[str, float]]:
        """Seconds of a step if one part were twice as fast, or there were twice as many places."""
        loop = self.loop
        server, learning = loop.server, loop.learning
        yield "episodes_at_once", self.run(concurrency=2 * loop.concurrency, server=_wider(server)).step
        yield "engine", self.run(server=server.at(server, 0.5)).step
        yield "learner", self.run(learning=lambda groups: learning(groups) / 2).step
        if not math.isinf(loop.cores):
            yield "cores", self.run(cores=2 * loop.cores).step
        if not loop.staleness and not loop.shared:
            yield "max_staleness=1", self.run(staleness=1).step

    def _splits(self, spent: Spent, settings_of: SettingsOf) -> dict[str, Any]:
        """Episodes in a GPU-hour by the GPUs of engine and learner, for as many GPUs; empty where there is one way."""
        given, found = self.given, dict[tuple[int, int], float]()
        if given.server is None or self.loop.shared:
            return {}
        now = len(given.serving), len(given.learning)
        settings = given.server.settings
        unit = settings.gpus // settings.replicas
        for serving in range(unit, given.gpus, unit):
            other = None if (serving, given.gpus - serving) == now else _divided(given, serving, unit, settings_of)
            if (serving, given.gpus - serving) == now:
                found[now] = self.per_hour(spent)
            elif other is not None:
                found[serving, given.gpus - serving] = other.per_hour(other.run())
        if len(found) < 2:
            return {}
        best = max(found, key=lambda each: found[each] * (1 + BETTER * (each == now)))
        rows = {f"{a}_engine_{b}_learner": f"{rate:.0f} episodes per GPU-hour" for (a, b), rate in found.items()}
        return rows | {"proposed": "as it is" if best == now else f"{best[0]} for the engine, {best[1]} to learn"}

    def _assumed(self) -> dict[str, Any]:
        gpu, plan = self.given.config.gpu, self.given.config.plan
        shown: dict[str, Any] = {"attempts": f"those of {plan.run}"}
        if self.pilot is None:
            first, *others = next(self.draws(0))[0].calls
            call = (others or [first])[0]
            shown = {
                "attempts": f"{plan.calls:g} calls on average" if plan.calls else "go on until a limit ends them",
                "tokens": f"{first.given} of prompt; a call samples {call.sampled}, and {call.given} are given to it",
                "seconds": f"{plan.call_seconds:g} between calls, {plan.attempt_seconds:g} to open, diff and grade",
            }
        if moved := self.given.moves():
            shown["switching"] = f"{moved.step / GB:.1f} GB to and from the host's memory at {MOVED / GB:g} GB/s"
        if self.given.config.train.learner:
            shown["shared_learner"] = "waits for no other run's step; the hours of its GPU are not counted"
        if self.timed:
            return shown | {"speeds": f"those of {plan.run}, its {self.pilot.processes if self.pilot else 1} learners"}
        read = f"{self.given.reading:g} " if self.given.reading != self.given.utilisation else ""
        return shown | {
            "gpu": f"{self.given.utilisation:g} of {gpu.tflops:g} TFLOP/s and {read}of {gpu.bandwidth_gb:g} GB/s",
            "new_weights": f"{_sent(self.given) / GB:.2f} GB at {PUBLISHED / GB:g} GB/s",
            "prefixes": "what a group shares is computed once in a pass, by engine and learner",
        }


def episodes(config: Config) -> int:
    """Of a step at most, with all that it may sample again; no more are trained than without."""
    return (config.rollout.tasks_per_step + config.curriculum.refill) * config.rollout.group_size


def shown(given: Estimate, settings_of: SettingsOf, evaluations: Evaluations = ()) -> dict[str, Any]:
    """Step and run of a plan; where speeds are not known the episodes of a step alone."""
    planned = Planned.of(given)
    return (
        {"step": {"episodes": episodes(given.config)}} if planned is None else planned.shown(settings_of, evaluations)
    )


def _limits(config: Config, pilot: Pilot | None) -> Limits:
    """Those of an attempt. Of one that is drawn from a run the agent's own limit of calls has ended it already, and the
    gateway's is what counts."""
    rollout = config.rollout
    return Limits(rollout.calls + (2 if pilot else 0), rollout.tokens, rollout.seconds, rollout.turn_tokens)


def _learning(given: Estimate, pilot: Pilot | None) -> Callable[[Groups], float]:
    config, gpu = given.config, given.config.gpu
    processes = config.train.processes
    if pilot is None:
        speed = processes * gpu.tflops * 1e12 * given.utilisation
        return lambda groups: given.training_flops(groups) / speed
    train, token = config.train, pilot.token * pilot.processes / processes
    return lambda groups: token * sum(n for _, n, _ in computed(groups, train.micro_tokens, train.minibatches))


def _sent(given: Estimate) -> int:
    """Bytes of new weights."""
    lora, size = given.settings.lora, 2 if given.settings.precision == "bf16" else 4
    if lora is None:
        return size * given.model.parameters
    return size * given.model.adapters(lora.rank, lora.targets)


def _divided(given: Estimate, serving: int, unit: int, settings_of: SettingsOf) -> Planned | None:
    """The same run with as many GPUs, of which `serving` are the engine's; None where that does not fit."""
    gpus = sorted({*given.serving, *given.learning})
    options = with_argument(given.config.engine.options.get("args", ()), DATA_NAMES, str(serving // unit))
    changes = (
        f"engine.devices={gpus[:serving]}",
        f"train.devices={gpus[serving:]}",
        f"train.processes={len(gpus) - serving}",
    )
    try:
        config = override(given.config, changes)
        config = config.model_copy(
            update={"engine": config.engine.model_copy(update={"options": config.engine.options | {"args": options}})}
        )
        engines.make(config.engine.name, **config.engine.options)
        found = estimate(config, settings_of(config))
    except ConfigError:  # a division that contradicts another setting is none
        return None
    return Planned.of(found) if isinstance(found, Estimate) and not found.problem else None


def _wider(server: Server) -> Server:
    return server._replace(slots=2 * server.slots)


def _places(loop: Loop) -> int:
    return min(loop.concurrency, loop.server.slots * loop.server.replicas)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _shares(spent: Spent, side: Mapping[str, float], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {spent.share(side, name):.0%}" for name in names if side.get(name))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cores_shown(spent: Spent, cores: float) -> str:
    """How many are busy, and how much longer work takes that shares them."""
    busy = f"{spent.computing / spent.wall:.1f}"
    if math.isinf(cores):
        return f"{busy} busy, as many as are wanted"
    return f"{busy} of {cores:g} busy, work on them takes {spent.wanted / spent.computing:.1f} times as long as alone"


def _lost(spent: Spent) -> float:
    """The share of what is given to the engine that it computes again since its cache was full, to a percent."""
    return round(spent.again / spent.asked, 2) if spent.asked else 0.0


def _ends(spent: Spent) -> str:
    return ", ".join(f"{name} {number / spent.rows:.0%}" for name, number in spent.by.most_common())
