"""The resources a run needs (``crrl train --dry-run``): memory per GPU, and seconds per step.

GPU speeds are assumptions; memory is tested (tests/plan/test_memory.py).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple, get_args

from coderepairrl import engines
from coderepairrl.config import Config, apply_overrides
from coderepairrl.config.schema import Strategy
from coderepairrl.errors import ConfigError
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.plan.sizing.engine import SHARE_NAMES, TENSOR_NAMES, replace_argument
from coderepairrl.plan.sizing.estimate import GB, Estimate, estimate_memory

_MOST_CHANGES = 3  # of settings at once, in a suggestion
_SWITCHES = {
    "train.lora": ("true", "false"),
    "train.precision": ("bf16", "fp32"),
    "train.gradient_checkpointing": ("true", "false"),
    "train.optimizer": ("adamw_8bit", "adamw"),
    "model.quantise": ("nf4", "none"),
}
"""Settings that change the learner's memory: the value that saves some, and the other."""
REACHED = ((14e9, 0.32), (4e9, 0.2), (0, 0.08))
"""Share of an H100's peak that a training step reached, by minimum parameters; measured with 14B, 4B, 0.6B."""
PUBLISHED_PER_SECOND = 0.45 * GB
"""Bytes of new weights per second: a 0.6B model from an H100's learner (docs/measurements/performance.md)."""
MOVED_PER_SECOND = 20 * GB
"""Bytes per second between a GPU and page-locked memory of its host: an assumption, not a measurement."""
PROMPT_TOKENS = 1000
"""Tokens at the start of an episode, at most half of it; half of the rest is sampled: an assumption."""


class DoesNotFit(ConfigError):
    """The plan needs more memory than available."""


class PlanChange(NamedTuple):
    """One change, as overrides; a suggestion has at most one per `kind`."""

    kind: str
    overrides: tuple[str, ...]
    serving: int = 0
    """Further GPUs for the engine."""
    learning: int = 0
    """Further GPUs for the learner."""


def check_memory(config: Config) -> dict[str, Any]:
    """Plan a run, to print. Raises `DoesNotFit` with the nearest change that fits, else as `estimate_memory`."""
    plan = estimate_memory(config, make_learn_settings(config))
    if isinstance(plan, str):
        return {"memory": f"not planned: {plan}"}
    if plan.problem:
        change = find_nearest_fit(plan)
        raise DoesNotFit(
            plan.problem,
            fix=f"nearest change that fits: {shlex.join(change)}" if change else "take a smaller model, or larger GPUs",
        )
    learner = {
        "learner_gb": round(plan.learner_needs / GB, 2),
        "learner_gb_with": estimate_alternatives(plan),
    }
    return plan.as_json() | learner | estimate_speed(plan)


def estimate_alternatives(planned: Estimate) -> dict[str, float]:
    """GB that a learner process needs with one setting changed, by override; refused changes are left out."""
    train = planned.config.train
    overrides = [
        *(f"{name}={values[_is_saving(planned.config, name)]}" for name, values in _SWITCHES.items()),
        f"train.micro_tokens={4 * train.micro_tokens}",  # the thesis accumulated the gradients of 4 micro-batches
        *(f"train.strategy={name}" for name in get_args(Strategy) if name != train.strategy),
    ]
    changed = {override: _estimate_changed(planned, (override,)) for override in overrides}
    return {override: round(each.learner_needs / GB, 2) for override, each in changed.items() if each}


def _is_saving(config: Config, switch: str) -> bool:
    """Whether a switch saves memory already."""
    section, _, name = switch.partition(".")
    return getattr(getattr(config, section), name) not in (None, False, _SWITCHES[switch][1])


def find_nearest_fit(planned: Estimate) -> tuple[str, ...]:
    """Overrides that make the plan fit, on the same GPUs if possible, then the fewest and cheapest; else empty."""
    everything = list(_list_memory_changes(planned))
    same_gpus = [change for change in everything if not change.serving + change.learning]
    for candidates in (same_gpus, everything):
        for count in range(1, _MOST_CHANGES + 1):
            for changes in combinations(candidates, count):
                overrides = _join_overrides(planned, changes)
                if len({change.kind for change in changes}) == count:
                    changed = _estimate_changed(planned, overrides)
                    if changed and not changed.problem:
                        return overrides
    return ()


def _join_overrides(planned: Estimate, changes: Sequence[PlanChange]) -> tuple[str, ...]:
    """Overrides of all `changes`, with unused GPUs for those that take more."""
    overrides = [override for change in changes for override in change.overrides]
    engine, train = planned.config.engine.devices, planned.config.train.devices
    if any(change.kind == "apart" for change in changes):
        train = tuple(gpu for gpu in train if gpu not in engine)
    free = max((*planned.serving, *planned.learning, *engine), default=-1) + 1
    if engine and (more := sum(change.serving for change in changes)):
        overrides.append(f"engine.devices={json.dumps([*engine, *range(free, free + more)])}")
        free += more
    if planned.config.train.devices and (more := sum(change.learning for change in changes)):
        overrides.append(f"train.devices={json.dumps([*train, *range(free, free + more)])}")
    return tuple(overrides)


def _estimate_changed(planned: Estimate, overrides: tuple[str, ...]) -> Estimate | None:
    gpu_memory = (f"gpu.memory_gb={planned.memory / GB}",) if planned.memory else ()  # the driver is asked once
    try:
        changed = apply_overrides(planned.config, (*gpu_memory, *overrides))
        engines.make_engine(changed.engine.name, **changed.engine.options)
        estimate = estimate_memory(changed, make_learn_settings(changed))
    except ConfigError:  # the change contradicts another setting
        return None
    return estimate if isinstance(estimate, Estimate) else None


def _list_memory_changes(planned: Estimate) -> Iterator[PlanChange]:
    """Changes that save memory: first those that cost only time, last shorter episodes."""
    config, train = planned.config, planned.config.train
    length, context = config.rollout.tokens, planned.server.settings.context if planned.server else 0

    def switch(name: str) -> list[PlanChange]:
        return [] if _is_saving(config, name) else [PlanChange(name, (f"{name}={_SWITCHES[name][0]}",))]

    if context > length:
        yield PlanChange("context", (f"engine.options.context={length}",))
    yield from switch("train.gradient_checkpointing")
    budget = train.micro_tokens
    while budget > length:
        budget = max(length, budget // 2)
        yield PlanChange("budget", (f"train.micro_tokens={budget}",))
    if planned.server:
        now = planned.server.settings.share
        for share in sorted((0.95, *(tenth / 10 for tenth in range(9, 0, -1))), key=lambda share: abs(share - now)):
            yield PlanChange("share", (_set_engine_argument(config, SHARE_NAMES, f"{share:g}"),))
    together = {*planned.serving} & {*planned.learning} and not planned.turns
    if together and train.processes == 1 and config.engine.weights == "file":
        yield PlanChange("turns", ("engine.share_devices=turns",))
    yield from switch("train.precision")
    if train.processes > 1 and train.strategy != "fsdp2":
        yield PlanChange("strategy", ("train.strategy=fsdp2",))
    yield from switch("train.optimizer")
    yield from switch("train.lora")
    if not planned.model.has_experts:
        yield from switch("model.quantise")
    if both := set(config.engine.devices) & set(train.devices):
        yield PlanChange("apart", ("engine.share_devices=false",), learning=len(both))
    for processes in (2, 4, 8):
        if processes > train.processes:
            overrides = (f"train.processes={processes}", "train.strategy=fsdp2")
            yield PlanChange("strategy", overrides, learning=processes - train.processes)
    if planned.server:
        for tensor in (2, 4, 8):
            if tensor > planned.server.settings.tensor and planned.model.heads % tensor == 0:
                gpus = tensor * planned.server.settings.gpus // planned.server.settings.tensor
                more = max(0, gpus - len(config.engine.devices or planned.serving))
                yield PlanChange("tensor", (_set_engine_argument(config, TENSOR_NAMES, str(tensor)),), serving=more)
    for shorter in (length // 2, length // 4):
        less = [f"rollout.tokens={shorter}", f"train.micro_tokens={min(shorter, train.micro_tokens)}"]
        if config.rollout.turn_tokens > shorter:
            less.append(f"rollout.turn_tokens={shorter}")
        if planned.server:
            less.append(f"engine.options.context={shorter}")
        yield PlanChange("length", tuple(less))


def _set_engine_argument(config: Config, names: tuple[str, ...], value: str) -> str:
    return f"engine.options.args={json.dumps(replace_argument(config.engine.options.get('args', ()), names, value))}"


class Rate(NamedTuple):
    """Tokens per second, and the source of that number."""

    tokens: float
    source: str


def estimate_speed(planned: Estimate) -> dict[str, Any]:
    """Estimate step and run, as ``--dry-run`` prints."""
    config = planned.config
    rollout, plan = config.rollout, config.plan
    trained = rollout.tasks_per_step * rollout.group_size
    episodes = trained + config.curriculum.refill * rollout.group_size
    episode_tokens = min(plan.tokens or rollout.tokens, rollout.tokens)
    at_once = min(
        rollout.concurrency, episodes * (1 + rollout.max_staleness), _count_concurrent_episodes(planned, episode_tokens)
    )
    engine, learner = _estimate_engine_rate(planned, episode_tokens, at_once), _estimate_learner_rate(planned)
    if engine is None or learner is None or not config.run.steps:
        return {"step": {"episodes": episodes}}
    prompt = min(PROMPT_TOKENS, episode_tokens // 2)
    sampled = min((episode_tokens - prompt) / 2, rollout.seconds * engine.tokens / at_once)
    tokens = round(prompt + 2 * sampled)
    moved = planned.compute_transfers()
    seconds = {
        "rollout_seconds": episodes * sampled / engine.tokens,
        "learn_seconds": trained * tokens / learner.tokens,
        "weights_seconds": _count_published_bytes(planned) / PUBLISHED_PER_SECOND,
        "switch_seconds": moved.step / MOVED_PER_SECOND if moved else 0.0,
    }
    work = seconds["rollout_seconds"], seconds["learn_seconds"]
    overlap = rollout.max_staleness > 0 and not {*planned.serving} & {*planned.learning}
    step = (max(work) if overlap else sum(work)) + seconds["weights_seconds"] + seconds["switch_seconds"]
    gpus_elsewhere = config.train.processes if config.train.listen else 0
    hours = config.run.steps * step / 3600
    gpus = len({*planned.serving, *planned.learning}) + gpus_elsewhere if planned.on_gpus else 1
    return {
        "step": {
            "episodes": episodes,
            "tokens": trained * tokens,
            **{name: _round_digits(value) for name, value in seconds.items() if value},
            "seconds": _round_digits(step),
            "limit": _describe_limit(planned, tokens, episode_tokens),
        },
        "run": {
            "steps": config.run.steps,
            "hours": round(hours, 1),
            **({"gpu_hours": round(hours * gpus, 1)} if planned.on_gpus else {}),
            f"episodes_per_{'gpu_' * planned.on_gpus}hour": round(trained * 3600 / (step * gpus)),
        },
        "assumed": {
            "engine": f"{engine.tokens:,.0f} sampled tokens/s: {engine.source}",
            "learner": f"{learner.tokens:,.0f} tokens/s: {learner.source}",
            "tokens": f"{prompt} of prompt, half of the others sampled; tools cost the engine nothing",
            "step": "engine and learner overlap: the larger counts" if overlap else "engine and learner take turns",
            "new_weights": f"{_count_published_bytes(planned) / GB:.2f} GB at {PUBLISHED_PER_SECOND / GB:g} GB/s",
            **({"switching": f"{moved.step / GB:.1f} GB at {MOVED_PER_SECOND / GB:g} GB/s"} if moved else {}),
        },
    }


def _count_concurrent_episodes(planned: Estimate, tokens: int) -> int:
    """Episodes a local server takes at once, each with half of its `tokens` on average."""
    if planned.server is None:
        return planned.config.rollout.concurrency
    settings, cached_tokens = planned.server.settings, planned.server.kv_tokens
    each = settings.slots if cached_tokens is None else min(settings.slots, 2 * cached_tokens // tokens)
    return max(1, settings.replicas * each)


def _estimate_engine_rate(planned: Estimate, tokens: int, at_once: int) -> Rate | None:
    """Tokens per second that `at_once` episodes sample together; None if unknown."""
    if measured := planned.config.plan.engine_tokens_per_second:
        return Rate(measured, "plan.engine_tokens_per_second")
    if planned.server is None or planned.memory is None:
        return None
    gpu, settings, memory = planned.config.gpu, planned.server.settings, planned.server.memory
    computing, reading = _find_reached_share(planned.model.active), _find_reached_share(planned.model.parameters)
    per_replica = at_once / settings.replicas
    # a decoding step reads the weights, and on average half of each episode's tokens
    read = memory.weights + per_replica * (memory.kv_token * tokens / 2 + memory.kv_sequence)
    # 2 FLOPs per weight and token, for a sampled token and one input token
    flops = per_replica * 2 * 2 * planned.model.multiplied * settings.replicas / settings.gpus
    seconds = read / (gpu.bandwidth_gb * GB * reading) + flops / (gpu.tflops * 1e12 * computing)
    source = f"{at_once} episodes at once, {computing:g} of {gpu.tflops:g} TFLOP/s, {reading:g} of {gpu.bandwidth_gb:g}"
    return Rate(at_once / seconds, f"{source} GB/s")


def _estimate_learner_rate(planned: Estimate) -> Rate | None:
    """Tokens per second of trained episodes, over all processes; None if unknown."""
    if measured := planned.config.plan.learner_tokens_per_second:
        return Rate(measured, "plan.learner_tokens_per_second")
    if planned.memory is None:
        return None
    gpu, processes, reached = (
        planned.config.gpu,
        planned.config.train.processes,
        _find_reached_share(planned.model.active),
    )
    source = f"{processes} {'process' if processes == 1 else 'processes'}, {reached:g} of {gpu.tflops:g} TFLOP/s"
    return Rate(processes * gpu.tflops * 1e12 * reached / count_training_flops(planned), source)


def count_training_flops(planned: Estimate) -> float:
    """Count FLOPs per token in all passes, recomputation and reference included.

    A float32 head counts twice, as it has half the speed; products of attention are left out.
    """
    model, settings = planned.model, planned.settings
    recomputed = (settings.old_logprobs == "recomputed") * (1 - 1 / settings.minibatches)
    # forward passes before the updates: one of the reference, one for old logprobs (and values)
    before = (settings.beta > 0) + (1 if settings.value_head else recomputed)
    extra = settings.gradient_checkpointing + before / settings.updates_per_batch
    passes = (2 if settings.lora else 3) + extra
    slowdown = 2 if settings.precision == "bf16" else 1
    head = model.embedding * (passes + 1) * slowdown / 2  # only sampled tokens are scored, about half
    return settings.updates_per_batch * 2 * (model.multiplied * passes + head)


def _count_published_bytes(planned: Estimate) -> int:
    return planned.trained * (2 if planned.settings.precision == "bf16" else 4)


def _describe_limit(planned: Estimate, tokens: int, episode_tokens: int) -> str:
    rollout = planned.config.rollout
    if tokens < episode_tokens:
        return f"rollout.seconds={rollout.seconds:g}: an episode gets to {tokens} of {episode_tokens} tokens"
    return "" if planned.config.plan.tokens else f"rollout.tokens={rollout.tokens}"


def _find_reached_share(parameters: int) -> float:
    return next(share for least, share in REACHED if parameters >= least)


def _round_digits(seconds: float) -> float:
    return float(f"{seconds:.4g}")
