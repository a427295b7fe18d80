"""Configuration changes at ``--resume``, and the settings of each step.

Changes are logged before their first step (``change``: last step before, key, old, new); a replay restores old
settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from coderepairrl.config import Config, load_run, validate
from coderepairrl.errors import ConfigError
from coderepairrl.plan.learner import check_clip
from coderepairrl.plan.policies import is_below
from coderepairrl.report.reading import flat
from coderepairrl.runs import RunFolder
from coderepairrl.stages.history import History

_PLACE = ("run.name", "run.dir", "log", "keep")
MAY_CHANGE = (
    # when it ends, what it keeps, when it is stopped: nothing of this enters a step
    *("run.dir", "run.steps", "run.checkpoint_every", "run.keep_checkpoints"),
    *("run.retries", "run.health"),
    # where and how fast the same is computed
    *("engine", "gpu", "plan", "rollout.concurrency", "rollout.max_staleness", "train.devices", "train.patience"),
    *("rollout.executor", "rollout.ray"),
    *("train.listen", "train.gradient_checkpointing"),
    # what an attempt may spend
    *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens"),
    # how far an update goes
    *("train.lr", "train.betas", "train.weight_decay", "train.warmup_updates", "train.decay_updates"),
    *("train.max_grad_norm", "train.beta", "train.entropy", "train.eps_low", "train.eps_high", "train.delta"),
    *("train.old_logprobs", "train.mismatch_correction"),
    # what is asked before it goes on
    *("tasks.verify", "tasks.learned"),
    # which tasks come next: what came before is in the log
    "curriculum",
    # how much is computed at once, which changes the order of sums and so the last bits
    "train.micro_tokens",
    # what is measured beside the training, who is told of it, and what is kept of it afterwards
    *("eval", "log", "keep"),
)
MAY_CHANGE_OF: Mapping[str, tuple[str, ...]] = {
    "train": MAY_CHANGE,
    "sft": (
        *("run.dir", "run.checkpoint_every", "run.keep_checkpoints", "run.retries", "log"),
        *("train.devices", "train.patience", "train.listen"),
    ),
    "eval": _PLACE,
    "collect": _PLACE,
}
"""Settings and sections that a resumed run may change, by command."""

WHY_NOT = {
    "run": "it is what the run is found by, and all its randomness",
    "model": "the run's weights began from it",
    "tasks": "the order of the tasks follows from them, and its means would be of other tasks",
    "agent": "its earlier episodes are another program's",
    "sandbox": "its earlier episodes worked under other conditions",
    "reward": "its earlier rewards would mean something else",
    "data": "its order of steps follows from the examples",
    "kinds": "its earlier episodes were made by other terms, and its earlier rewards would mean something else",
    "rollout": "groups that are begun, the order of tasks and the distribution that is trained on follow from it",
    "train": "half of the run would be trained by another method, or its optimiser's state be of another shape",
    "train.processes": "steps since the last checkpoint are replayed by as many processes as made them",
    "train.strategy": "steps since the last checkpoint are replayed by processes that share the same",
}
"""Reasons by the longest prefix of other settings."""
_WHY_NOT = {
    "sft": "its steps would be others",
    "eval": "all its attempts are made by the same settings",
    "collect": "all its attempts are made by the same settings",
}

_BESIDE = {"run.dir", "log"}  # No changes of the run itself.
_NOT_REPLAYED = {"train.devices", "train.patience", "train.listen"}
# Settings that decide whether the clip has an effect.
_OF_THE_CLIP = ("train.old_logprobs", "engine.name", "engine.options.dtype", "rollout.max_staleness")
_OF_PROMPTS = ("rollout.tokens", "engine.name", "engine.options")  # Settings that decide how long a prompt may be.
_LIMITS = ("rollout.tokens", "rollout.turn_tokens", "rollout.calls", "rollout.seconds")


class Change(NamedTuple):
    """Setting that changes after `step`; None: unset."""

    step: int
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} is {_format_value(self.new)} after step {self.step}, and was {_format_value(self.old)}"


def changes_at_resume(
    folder: RunFolder, history: History, config: Config, versions: Mapping[str, int], too_long: Collection[str]
) -> list[Change]:
    """Changes by `config` at the end of `history`.

    `versions` are those of reward formulas, `too_long` tasks left out by `config`. Raises `ConfigError` for changes
    that would make another run or misname its numbers.
    """
    command = folder.command()
    before, now = settings_of(folder, history), flat(config.model_dump(mode="json"))
    if refused := changed_keys(before, now, MAY_CHANGE_OF[command]):
        key = refused[0]
        raise ConfigError(
            f"{folder.path} has {key}={_format_value(before.get(key))}, and {_format_value(now.get(key))} is asked for:"
            f" {_WHY_NOT.get(command) or reason(key)}",
            fix=f"resume it as it was (crrl {command} {folder.path} --resume), or give the changed run another"
            " run.name",
        )
    changed = changed_keys(before, now)
    if any(is_below(key, _OF_THE_CLIP) for key in changed):
        check_clip(config)
    _check_versions(folder, versions)
    _check_left_out(folder, too_long, {key: before.get(key) for key in changed})
    _check_continues(history, config, changed)
    return [Change(history.step, key, before.get(key), now.get(key)) for key in changed if key not in _BESIDE]


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], but: Iterable[str] = ()) -> list[str]:
    """Dotted keys whose values differ, without those `but` names, alone or as a section."""
    return [key for key in {**before, **now} if before.get(key) != now.get(key) and not is_below(key, but)]


def _check_versions(folder: RunFolder, now: Mapping[str, int]) -> None:
    began = folder.about().get("rewards", dict.fromkeys(now, 1))
    for name in began.keys() & now.keys():
        if began[name] != now[name]:
            raise ConfigError(
                f"{folder.path} has values of {name} version {began[name]}, and this installation computes version"
                f" {now[name]}: {reason('reward')}",
                fix="give the run another run.name, or resume it with the installation that its run.json names",
            )


def left_out(tasks: Collection[str]) -> dict[str, Any]:
    """Short form, for run.json, of tasks left out by `tasks.too_long`."""
    digest = hashlib.sha256("\0".join(sorted(tasks)).encode(errors="surrogatepass")).hexdigest()
    return {"count": len(tasks), "sha256": digest}


def _check_left_out(folder: RunFolder, tasks: Collection[str], old: Mapping[str, Any]) -> None:
    began, now = folder.about().get("too_long"), left_out(tasks)
    if began in (None, now):  # None: of a run of an older version
        return
    restored = [f"{key}={_format_value(value)}" for key, value in old.items() if is_below(key, _OF_PROMPTS)]
    raise ConfigError(
        f"{folder.path} began without {began['count']:,} tasks whose prompts are too long, and by the settings of now"
        f" {now['count']:,}{' others' * (began['count'] == now['count'])} are: {reason('tasks')}",
        fix=f"resume it with {', '.join(restored)}, as it was, or give the changed run another run.name"
        if restored
        else "resume it with the agent, the tokenizer and the installation that it began with (run.json)",
    )


def with_rewards_of(folder: RunFolder, config: Config) -> Config:
    """Fill unset rewards and ``tasks.verified_references`` from the run in `folder`, if it exists.

    They followed from its tasks at the start, or from an older version's defaults.
    """
    if not folder.config.is_file():
        return config
    began = load_run(folder.path)
    verified = config.tasks.verified_references
    changes: dict[str, Any] = {}
    if verified is None:
        changes["tasks"] = config.tasks.model_copy(update={"verified_references": began.tasks.verified_references})
    if not config.reward:
        changes["reward"] = began.reward
        measured = config.eval.reward or began.eval.reward
        changes["eval"] = config.eval.model_copy(update={"reward": measured})
    return config.model_copy(update=changes)


def settings_of(folder: RunFolder, history: History) -> dict[str, Any]:
    """Settings at the end of `history`, by dotted key, from run.json and log; edits of config.toml do not count."""
    config = validate(folder.about()["config"], str(folder.path / "run.json"))
    return flat(config.model_dump(mode="json")) | {change["key"]: change["new"] for change in history.changes}


def in_force(config: Config, changes: Iterable[Mapping[str, Any]], step: int) -> Config:
    """`config` with the settings of `step`'s update, from ``change`` records.

    Settings of this process and machine stay.
    """
    old: dict[str, dict[str, Any]] = {}
    for change in changes:
        section, _, name = change["key"].partition(".")
        replayed = section == "train" or change["key"] == "rollout.tokens"
        if replayed and change["step"] >= step and change["key"] not in _NOT_REPLAYED:
            old.setdefault(section, {}).setdefault(name, change["old"])
    sections = {name: getattr(config, name) for name in old}
    return config.model_copy(
        update={name: type(own).model_validate(own.model_dump() | old[name]) for name, own in sections.items()}
    )


def reason(key: str) -> str:
    """Reason why `key` may not change.

    >>> reason("run.seed")
    'it is what the run is found by, and all its randomness'
    """
    return WHY_NOT[max((name for name in WHY_NOT if is_below(key, [name])), key=len)]


def _check_continues(history: History, config: Config, changed: Iterable[str]) -> None:
    if config.run.steps < history.step:
        raise ConfigError(
            f"the run has {history.step} steps already, and run.steps={config.run.steps}",
            fix=f"set run.steps={history.step} or more, or start a run of another name",
        )
    if history.step and "engine.weights" in changed:
        raise ConfigError(
            "engine.weights cannot change in the middle of a run: the log has checksums of the one kind",
            fix="resume it as it was, or give the changed run another run.name",
        )
    begun = {(group.phase, group.step) for group in history.begun.values()}
    half = sorted(step for name, step in begun - set(history.evaluations) if name != "train")
    if half and (keys := [key for key in changed if is_below(key, ["eval", *_LIMITS])]):
        raise ConfigError(
            f"{keys[0]} cannot change in the middle of an evaluation (after step {half[0]})",
            fix="resume as it was, and change it once that evaluation is finished",
        )


def _format_value(value: Any) -> str:
    return "unset" if value is None else repr(value)
