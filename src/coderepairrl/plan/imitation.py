"""Plan of `crrl sft`, made before anything starts, and its examples: read, rendered, split and ordered."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from coderepairrl import tokens
from coderepairrl.config import Config
from coderepairrl.config.schema import Data, Eval, Tasks
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import LearnSettings, require_packages
from coderepairrl.plan import EvaluationPlan, PolicyPlan, devices, require_trackers
from coderepairrl.plan.devices import DeviceSplit
from coderepairrl.plan.learner import make_learn_settings, resolve_numerics
from coderepairrl.plan.parts import Check, make_each, part, raise_errors
from coderepairrl.plan.sizing.estimate import GB, estimate_learner_memory
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.runs.examples import EXAMPLES_FILE, Example, read_examples
from coderepairrl.runs.storage import hash_files
from coderepairrl.tasks.select import is_held_out
from coderepairrl.tokens import Codec, Row
from coderepairrl.types import Sample

ATTEMPTS_ONLY = (
    *("train.advantage", "train.balance_kinds", "train.mask_truncated", "train.overlong_buffer"),
    *("train.tie_break", "rollout.tasks_per_step", "rollout.group_size", "rollout.max_staleness"),
    "rollout.temperature",
    *("curriculum.easy_first", "curriculum.band", "curriculum.refill", "run.health"),
    *("tasks.verify", "tasks.verified_references", "engine.weights", "engine.weights_dir"),
)
"""Settings with a meaning only for learning from attempts (others: `learn.settings.SAMPLED_ONLY`)."""
_NAMED_EXAMPLES = 3
"""Unfit examples listed by id, for each reason."""


class ExampleRows(NamedTuple):
    """The sequences of one example."""

    episode: str
    task: str
    rows: tuple[Row, ...]

    @property
    def samples(self) -> Iterator[Sample]:
        """Sequences as samples for the learner."""
        for ids, trained in self.rows:
            unsampled = (0.0,) * len(ids), (-1,) * len(ids)
            yield Sample(self.episode, ids, trained, *unsampled, advantage=0.0)


@dataclass(frozen=True, slots=True)
class TrainingExamples:
    """Examples of a `crrl sft` run."""

    train: tuple[ExampleRows, ...]
    held_out: tuple[ExampleRows, ...]
    files: dict[str, str]
    """SHA-256 of each file, by its path."""
    rendered: dict[str, int]
    """Number of rendered examples, by reason."""
    dropped: dict[str, list[str]]
    """Ids of the examples left out, by reason."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(row.ids) for each in (*self.train, *self.held_out) for row in each.rows)

    def counts(self) -> dict[str, int]:
        """Numbers of examples, tasks, rows and tokens."""
        rows = [row for each in self.train for row in each.rows]
        return {
            "train": len(self.train),
            "held_out": len(self.held_out),
            "tasks": len({each.task for each in self.train}),
            "rows": len(rows),
            "tokens": sum(len(row.ids) for row in rows),
            "trained_tokens": sum(sum(row.trained) for row in rows),
            "longest": self.longest,
        }


def read_training_examples(data: Data, model: Path, codec: Codec) -> TrainingExamples:
    """Read the examples of `data` for the model in folder `model`.

    Messages are rendered by `codec` if tokens are of another tokenizer or template. Raises `UsageError` for unreadable,
    empty or duplicate input, `ConfigError` for examples that do not fit.
    """
    if not data.paths:
        raise ConfigError("data.paths is empty: there is nothing to learn from", fix="data.paths=RUN, of crrl collect")
    most = data.max_tokens or codec.context
    if most > codec.context:
        raise ConfigError(
            f"data.max_tokens={most}, and {codec.name} reads at most {codec.context} tokens",
            fix=f"data.max_tokens={codec.context}",
        )
    fitting: list[ExampleRows] = []
    files, rendered, unfit = dict[str, str](), Counter[str](), dict[str, list[str]]()
    model_digest, path_by_content = tokens.digest_tokenizer(model), dict[str, Path]()
    for path in make_each(_find_examples_file, data.paths):
        examples = read_examples(path)
        if not examples:
            raise UsageError(f"{path} has no example", fix="keep more: crrl collect --select RUN keep.above=0 -o FILE")
        files[str(path)] = hash_files([path])[path.name]
        for example in examples:
            content = _content_digest(example)
            if content in path_by_content:
                raise UsageError(
                    f"example {example.id} is in {path_by_content[content]} and in {path}",
                    fix="leave one out of data.paths",
                )
            path_by_content[content] = path
            rows, cause = _make_rows(example, codec, model_digest)
            if cause:
                rendered[cause] += 1
            if isinstance(rows, str):
                unfit.setdefault(rows, []).append(example.id)
            elif reason := _find_unfit_reason(rows, most, codec.vocab_size):
                unfit.setdefault(reason, []).append(example.id)
            else:
                fitting.append(ExampleRows(example.episode, example.task_id, tuple(rows)))
    if unfit and data.unfit == "refuse":
        raise ConfigError(
            f"{sum(map(len, unfit.values()))} examples cannot be learned from: {format_unfit(unfit)}",
            fix="data.unfit=drop leaves them out; data.max_tokens and model.thinking decide what fits",
        )
    train, held_out = list[ExampleRows](), list[ExampleRows]()
    for each in fitting:
        (held_out if is_held_out(f"sft/{each.task}", data.held_out) else train).append(each)
    if not train:
        cause = f"all were left out: {format_unfit(unfit)}" if unfit and not fitting else "all are held out"
        raise UsageError(f"there is no example to train on: {cause}", fix="lower data.held_out, or collect more tasks")
    return TrainingExamples(tuple(train), tuple(held_out), files, dict(rendered), unfit)


def format_unfit(unfit: dict[str, list[str]]) -> str:
    """Number of dropped examples for each reason, with some ids."""
    return "; ".join(
        f"{len(names)} {reason} ({', '.join(names[:_NAMED_EXAMPLES])}{', ...' if len(names) > _NAMED_EXAMPLES else ''})"
        for reason, names in unfit.items()
    )


def count_steps(data: Data, examples: int) -> int:
    """Steps in `data.epochs` epochs; the last step may have fewer examples."""
    assert data.epochs is not None
    return math.ceil(_count_example_uses(data.epochs, examples) / data.batch)


def count_seen(data: Data, examples: int, step: int) -> int:
    """Examples learned from by the end of `step`, repetitions included.

    >>> [count_seen(Data(batch=2, epochs=1.0), 3, step) for step in (1, 2)]
    [2, 3]
    """
    full = step * data.batch
    return full if data.epochs is None else min(full, _count_example_uses(data.epochs, examples))


def list_step_examples(data: Data, examples: int, seed: int, step: int) -> list[int]:
    """Indices of the examples of `step`, from 1; each epoch has an order drawn by `seed`.

    >>> data = Data(batch=2, epochs=1.0)
    >>> sorted(list_step_examples(data, 3, 0, 1) + list_step_examples(data, 3, 0, 2))
    [0, 1, 2]
    """
    first, last = (step - 1) * data.batch, count_seen(data, examples, step)
    orders: dict[int, list[int]] = {}
    for epoch in range(first // examples, (last - 1) // examples + 1):
        orders[epoch] = Random(f"{seed}/{epoch}").sample(range(examples), examples)
    return [orders[at // examples][at % examples] for at in range(first, last)]


def _count_example_uses(epochs: float, examples: int) -> int:
    return max(1, round(epochs * examples))


def _find_examples_file(name: str) -> Path:
    path = Path(name).expanduser()
    file = path / EXAMPLES_FILE if path.is_dir() else path
    if not file.is_file():
        problem = "has no examples" if path.is_dir() else "is not there"
        raise UsageError(f"data.paths: {path} {problem}", fix="crrl collect ... -o RUN, then data.paths=RUN")
    return file


def _make_rows(example: Example, codec: Codec, digest: str) -> tuple[list[Row] | str, str]:
    """Make an example's sequences, or say why it has none, and why it was rendered."""
    if example.exact and example.tokenizer == digest:
        return [Row(example.ids, example.trained)], ""
    cause = "of another tokenizer or template" if example.exact else "without tokens"
    if not example.messages:
        return f"have tokens of another tokenizer ({example.tokenizer[:8] or 'unknown'}), and no messages", ""
    try:
        return tokens.make_conversation_rows(codec, example.messages, example.tools), cause
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # the messages may be another program's
        return f"cannot be rendered: {error or type(error).__name__}", ""


def _content_digest(example: Example) -> str:
    """Digest of an example's content: ids repeat across runs."""
    return hashlib.sha256(repr((example.id, example.task_id, example.messages, example.ids)).encode()).hexdigest()


def _find_unfit_reason(rows: Sequence[Row], most: int, vocabulary: int) -> str:
    if any(not 0 <= each < vocabulary for row in rows for each in row.ids):
        return f"have ids outside the vocabulary of {vocabulary}"
    if any(len(row.ids) > most for row in rows):
        return f"are longer than {most} tokens"
    if not all(any(row.trained) for row in rows):
        return "have nothing to learn"
    return "begin with a token to learn" if any(row.trained[0] for row in rows) else ""


class ImitationPlan(PolicyPlan):
    """A run that learns from examples."""

    @part
    def examples(self) -> TrainingExamples:
        """Examples to learn from."""
        return read_training_examples(self.raw_config.data, self.folder, self.codec)

    @part
    def config_with_steps(self) -> Config:
        """Configuration with the steps that follow from `data.epochs`."""
        config, data = self.raw_config, self.raw_config.data
        if data.epochs is not None and self.can_make("examples"):
            run = config.run.model_copy(update={"steps": count_steps(data, len(self.examples.train))})
            config = config.model_copy(update={"run": run})
        return resolve_numerics(config)

    @part
    def learner(self) -> LearnSettings:
        """Settings of the learner."""
        return make_learn_settings(self.config_with_steps)

    @part
    def has_evaluation(self) -> bool:
        """Whether tasks are attempted."""
        evaluation = self.raw_config.eval
        return evaluation.is_due and (self.raw_config.tasks != Tasks() or bool(evaluation.source))

    @part
    def devices(self) -> DeviceSplit:
        """GPUs of engine and learner."""
        return devices.split_devices(self.raw_config, self.has_evaluation and self.engine.capabilities.uses_gpus)

    @part
    def evaluation_plan(self) -> AgentPlan | None:
        """Evaluations on tasks; None if no tasks are named, or no evaluation is due."""
        if not self.has_evaluation:
            return None
        plan = EvaluationPlan(self)
        plan.raw_config = self.config_with_steps
        raise_errors(plan.errors())
        return plan

    @part
    def config(self) -> Config:
        """Configuration with the evaluated reward and steps."""
        return self.evaluation_plan.config if self.evaluation_plan else self.config_with_steps

    @part
    def memory_warning(self) -> str:
        """Warning that the learner may not fit on a GPU, or an empty string."""
        longest = self.examples.longest
        estimate = estimate_learner_memory(self.config_with_steps, self.learner, longest)
        if estimate is None or estimate[0] <= estimate[1]:
            return ""
        needed, limit = (size / GB for size in estimate)
        return (
            f"this may not fit: a learner needs about {needed:.0f} GB for rows of {longest:,} tokens, and a GPU has"
            f" {limit:.0f}; train adapters (train.lora=true), set train.gradient_checkpointing=true, lower"
            " data.max_tokens, or share the model among processes (train.strategy=fsdp2)"
        )

    def _checks(self) -> list[Check]:
        return [
            *super()._checks(),
            lambda: _check_sft_settings(self.raw_config),
            lambda: _check_decay(self.config_with_steps),
            lambda: _check_tasks_are_named(self.raw_config.eval, self.has_evaluation),
            lambda: require_packages(self.learner),
            lambda: devices.require_secret(self.raw_config),
            lambda: _check_held_out(self.raw_config, self.examples),
            lambda: require_trackers(self.raw_config.log),
            lambda: self.engine.check_model(self.folder) if self.has_evaluation else None,
            lambda: self.engine.require() if self.has_evaluation else None,
        ]


def resolve_imitation(config: Config) -> ImitationPlan:
    """Resolve and check every part of `config`; steps follow from `data.epochs`. Raises as `plan_run`."""
    plan = ImitationPlan()
    plan.raw_config = config
    raise_errors(plan.errors())
    return plan


def _check_sft_settings(config: Config) -> None:
    if config.train.algorithm != "sft":
        raise ConfigError(
            f"train.algorithm={config.train.algorithm} learns from rewards: crrl train does that",
            fix='begin with sft-tiny, sft-thesis, or a file with train.algorithm = "sft"',
        )
    changed = []
    for key in ATTEMPTS_ONLY:
        name, _, field = key.partition(".")
        section = getattr(config, name)
        if (getattr(section, field) or None) != (type(section).model_fields[field].get_default() or None):
            changed.append(key)
    if changed:
        keys = ", ".join(changed)
        meaning = "has no meaning" if len(changed) == 1 else "have no meaning"
        raise ConfigError(
            f"{keys} {meaning} for train.algorithm=sft, which learns from no attempts", fix=f"leave {keys} out"
        )


def _check_tasks_are_named(evaluation: Eval, has_evaluation: bool) -> None:
    if evaluation.is_due and evaluation != Eval() and not has_evaluation:
        raise ConfigError(
            "eval is set, and no tasks are named to evaluate on",
            fix="eval.source=SOURCE (crrl tasks list), or leave eval out",
        )


def _check_decay(config: Config) -> None:
    if problem := config.describe_early_decay():
        raise ConfigError(problem, fix="raise it, or set train.warmup_ratio in its place")


def _check_held_out(config: Config, examples: TrainingExamples) -> None:
    data = config.data
    if data.held_out and not examples.held_out:
        raise UsageError(
            f"data.held_out={data.held_out:g} holds out none of {len({each.task for each in examples.train})} tasks",
            fix="raise it, or set data.held_out=0",
        )
