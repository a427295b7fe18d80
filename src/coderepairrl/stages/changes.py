"""Settings that change at ``--resume``: which may, and which were in force at each step.

A change is logged as a record ``change`` with the last step before it, so that a replay uses the old value for that
step and those before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from coderepairrl.config import Config, load_run, validate_config
from coderepairrl.errors import ConfigError
from coderepairrl.plan.learner import check_clip
from coderepairrl.plan.policies import is_key_below
from coderepairrl.report.reading import flatten_settings
from coderepairrl.runs import RunFolder
from coderepairrl.stages.history import History

_OUTPUT_SETTINGS = ("run.name", "run.dir", "log", "keep")
MAY_CHANGE = (
    # when the run ends, what it keeps, when it is stopped: no step depends on these
    *("run.dir", "run.steps", "run.checkpoint_every", "run.keep_checkpoints"),
    *("run.retries", "run.health"),
    # where and how fast: the results stay the same
    *("engine", "gpu", "plan", "rollout.concurrency", "rollout.max_staleness", "train.devices", "train.patience"),
    *("rollout.executor", "rollout.ray"),
    *("train.listen", "train.gradient_checkpointing"),
    # what an attempt may spend
    *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens"),
    # how far an update goes
    *("train.lr", "train.betas", "train.weight_decay", "train.warmup_updates", "train.decay_updates"),
    *("train.max_grad_norm", "train.beta", "train.entropy", "train.eps_low", "train.eps_high", "train.delta"),
    *("train.old_logprobs", "train.mismatch_correction"),
    # what is checked before it continues
    *("tasks.verify", "tasks.learned"),
    # which tasks come next: the log has the earlier ones
    "curriculum",
    # how much is computed at a time, which changes the order of sums and so the last bits
    "train.micro_tokens",
    # what is measured during training, where it is reported, and which attempts are kept
    *("eval", "log", "keep"),
)
MAY_CHANGE_BY_COMMAND: Mapping[str, tuple[str, ...]] = {
    "train": MAY_CHANGE,
    "sft": (
        *("run.dir", "run.checkpoint_every", "run.keep_checkpoints", "run.retries", "log"),
        *("train.devices", "train.patience", "train.listen"),
    ),
    "eval": _OUTPUT_SETTINGS,
    "collect": _OUTPUT_SETTINGS,
}
"""Settings and sections that a resumed run may change, by command."""

WHY_NOT = {
    "run": "it names the run or seeds its random choices",
    "model": "the run's first weights came from it",
    "tasks": "they determine the order of tasks, and means would cover different tasks",
    "agent": "a different program made its earlier episodes",
    "sandbox": "its earlier episodes ran under different conditions",
    "reward": "its earlier rewards would have a different meaning",
    "data": "the examples determine its order of steps",
    "kinds": "its earlier episodes and rewards came from different agents, sandboxes, limits or formulas",
    "rollout": "it determines groups that have begun, the order of tasks and the distribution of training data",
    "train": "it would train the rest of the run differently, or change the shape of the optimizer's state",
    "train.processes": "steps since the last checkpoint are replayed, which takes the same number of processes",
    "train.strategy": "steps since the last checkpoint are replayed, which takes the same strategy",
}
"""Reasons against changing other settings of a training run; the longest prefix counts."""
_WHY_NOT_BY_COMMAND = {
    "sft": "its steps would be different",
    **dict.fromkeys(("eval", "collect"), "all its attempts are made with the same settings"),
}

_NOT_LOGGED = {"run.dir", "log"}  # They do not affect the run itself.
_NOT_REPLAYED = {"train.devices", "train.patience", "train.listen"}
_REPLAYED = ("train", "rollout.tokens", "curriculum.refill")  # They decide a step's batch and its update.
# Settings that decide whether clipping has an effect.
_CLIP_SETTINGS = ("train.old_logprobs", "engine.name", "engine.options.dtype", "rollout.max_staleness")
_PROMPT_SETTINGS = ("rollout.tokens", "engine.name", "engine.options")  # They decide how long a prompt may be.
_LIMIT_SETTINGS = ("rollout.tokens", "rollout.turn_tokens", "rollout.calls", "rollout.seconds")


class Change(NamedTuple):
    """Setting that changes after `step`; None is an unset value."""

    step: int
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} is {_format_value(self.new)} after step {self.step}, and was {_format_value(self.old)}"


def list_changes(
    folder: RunFolder, history: History, config: Config, versions: Mapping[str, int], too_long: Collection[str]
) -> list[Change]:
    """List the changes that `config` makes at the end of `history`.

    `versions` are those of the reward formulas, `too_long` the tasks that `config` leaves out. Raises `ConfigError` for
    settings that may not change.
    """
    command = folder.command()
    before, now = read_last_settings(folder, history), flatten_settings(config.model_dump(mode="json"))
    if refused := list_changed_keys(before, now, MAY_CHANGE_BY_COMMAND[command]):
        key = refused[0]
        raise ConfigError(
            f"{folder.path} has {key}={_format_value(before.get(key))}, which cannot become"
            f" {_format_value(now.get(key))}: {_WHY_NOT_BY_COMMAND.get(command) or explain_refusal(key)}",
            fix=f"resume it as it was (crrl {command} {folder.path} --resume), or give the changed run another"
            " run.name",
        )
    changed = list_changed_keys(before, now)
    if any(is_key_below(key, _CLIP_SETTINGS) for key in changed):
        check_clip(config)
    _check_reward_versions(folder, versions)
    _check_left_out(folder, too_long, {key: before.get(key) for key in changed})
    _check_unfinished(history, config, changed)
    return [Change(history.step, key, before.get(key), now.get(key)) for key in changed if key not in _NOT_LOGGED]


def list_changed_keys(before: Mapping[str, Any], now: Mapping[str, Any], ignored: Iterable[str] = ()) -> list[str]:
    """List dotted keys whose values differ, except `ignored` keys and sections."""
    return [key for key in {**before, **now} if before.get(key) != now.get(key) and not is_key_below(key, ignored)]


def _check_reward_versions(folder: RunFolder, now: Mapping[str, int]) -> None:
    recorded = folder.about()["rewards"]
    for name in recorded.keys() & now.keys():
        if recorded[name] != now[name]:
            raise ConfigError(
                f"{folder.path} has values of {name} version {recorded[name]}, and this installation computes version"
                f" {now[name]}: {explain_refusal('reward')}",
                fix="give the run another run.name, or resume it with the installation that its run.json names",
            )


def summarise_left_out(tasks: Collection[str]) -> dict[str, Any]:
    """Summarise, for run.json, the tasks that `tasks.too_long` leaves out."""
    digest = hashlib.sha256("\0".join(sorted(tasks)).encode(errors="surrogatepass")).hexdigest()
    return {"count": len(tasks), "sha256": digest}


def _check_left_out(folder: RunFolder, tasks: Collection[str], old: Mapping[str, Any]) -> None:
    recorded, now = folder.about().get("too_long"), summarise_left_out(tasks)
    if recorded in (None, now):  # None: not a training run, so it leaves no task out
        return
    restored = [f"{key}={_format_value(value)}" for key, value in old.items() if is_key_below(key, _PROMPT_SETTINGS)]
    fix = "resume it with the agent, the tokenizer and the installation that it began with (run.json)"
    if restored:
        fix = f"resume it with {', '.join(restored)}, as it was, or give the changed run another run.name"
    different = " different ones" if recorded["count"] == now["count"] else ""
    raise ConfigError(
        f"{folder.path} left out {recorded['count']:,} tasks with too long prompts, and the present settings leave out"
        f" {now['count']:,}{different}: {explain_refusal('tasks')}",
        fix=fix,
    )


def fill_rewards(folder: RunFolder, config: Config) -> Config:
    """Fill unset rewards and ``tasks.verified_references`` as the run in `folder` chose them, if it exists."""
    if not folder.config.is_file():
        return config
    run, changes = load_run(folder.path), dict[str, Any]()
    if config.tasks.verified_references is None:
        changes["tasks"] = config.tasks.model_copy(update={"verified_references": run.tasks.verified_references})
    if not config.reward:
        changes["reward"] = run.reward
        changes["eval"] = config.eval.model_copy(update={"reward": config.eval.reward or run.eval.reward})
    return config.model_copy(update=changes)


def read_last_settings(folder: RunFolder, history: History) -> dict[str, Any]:
    """Settings at the end of `history` by dotted key, from run.json and the log: config.toml may have been edited."""
    config = validate_config(folder.about()["config"], str(folder.path / "run.json"))
    return flatten_settings(config.model_dump(mode="json")) | {
        change["key"]: change["new"] for change in history.changes
    }


def config_at_step(config: Config, changes: Iterable[Mapping[str, Any]], step: int) -> Config:
    """Replace settings of `config` that affect training by those in force at `step`, from ``change`` records."""
    old: dict[str, dict[str, Any]] = {}
    for change in changes:
        section, _, name = change["key"].partition(".")
        affects_training = is_key_below(change["key"], _REPLAYED) and change["key"] not in _NOT_REPLAYED
        if affects_training and change["step"] >= step:  # of several changes since, the first has the value at `step`
            old.setdefault(section, {}).setdefault(name, change["old"])
    sections = {name: getattr(config, name) for name in old}
    return config.model_copy(
        update={name: type(each).model_validate(each.model_dump() | old[name]) for name, each in sections.items()}
    )


def explain_refusal(key: str) -> str:
    """Explain why `key` may not change.

    >>> explain_refusal("run.seed")
    'it names the run or seeds its random choices'
    """
    return WHY_NOT[max((name for name in WHY_NOT if is_key_below(key, [name])), key=len)]


def _check_unfinished(history: History, config: Config, changed: Iterable[str]) -> None:
    if config.run.steps < history.step:
        raise ConfigError(
            f"the run already has {history.step} steps, more than run.steps={config.run.steps}",
            fix=f"set run.steps={history.step} or more, or start a run with another run.name",
        )
    if history.step and "engine.weights" in changed:
        raise ConfigError(
            "engine.weights cannot change in the middle of a run: the log has checksums of one kind",
            fix="resume it as it was, or give the changed run another run.name",
        )
    begun = {(group.phase, group.step) for group in history.begun.values()}  # phase: "train" or an evaluation's name
    unfinished = sorted(step for name, step in begun - set(history.evaluations) if name != "train")
    if unfinished and (keys := [key for key in changed if is_key_below(key, ["eval", *_LIMIT_SETTINGS])]):
        raise ConfigError(
            f"{keys[0]} cannot change in the middle of an evaluation (after step {unfinished[0]})",
            fix="resume as it was, and change it once that evaluation is finished",
        )


def _format_value(value: Any) -> str:
    return "unset" if value is None else repr(value)
