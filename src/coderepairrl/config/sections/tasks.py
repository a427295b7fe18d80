"""`[tasks]`, `[curriculum]` and `[data]`: tasks and examples to learn from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coderepairrl.config.sections.base import Section, Several, Switch


class Source(Section):
    """One of several sources of training tasks that share the batches."""

    source: str
    """A task source of `crrl tasks list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the source."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the tasks of a batch, relative to the sum of all weights."""
    kind: str = ""
    """Kind (section `kinds`) of its tasks that name none; empty: the run's settings."""


class Tasks(Section):
    """The training tasks."""

    source: str = "jsonl"
    """A task source of `crrl tasks list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the source, for example `path`."""
    split: str = "train"
    """Split of the training tasks."""
    sources: tuple[Source, ...] = ()
    """Several weighted sources instead of `source`, as `[[tasks.sources]]`."""
    verify: bool = True
    """Test the reward before the first step, since a broken grader looks like a policy that repairs nothing: a
    reference must earn 1, a patch that changes nothing 0 (docs/guides/rewards.md). Up to 50 references are all tested,
    of more 3 per environment; results are cached until task, checks, sandbox or packages change."""
    verified_references: int | None = Field(default=None, ge=0)
    """Repairs per task, made by the policy and passed by the checks, that become further references of `patch_edits`,
    `patch_lines` and `hybrid` (docs/guides/rewards.md); checks must run, at least as `reward.tests=0`. Unset: 4 if
    `reward` is empty, all tasks have checks and references, and tasks come up twice; else 0."""
    holdout: float | None = Field(default=None, ge=0, le=1)
    """Share of the tasks, by MD5 of their ids, that `crrl collect` attempts and training leaves out. Unset: `crrl
    collect` attempts a quarter, and training takes all."""
    learned: Literal["refuse", "train"] = "refuse"
    """Refuse, or train on, tasks whose attempts the model was fine-tuned on (`crrl sft`): it may know them by heart."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """For training tasks whose first request leaves no tokens for a reply: refuse the run, or drop them. Evaluated
    tasks are never dropped, since that would change the benchmark."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Tasks:
        if self.sources and (self.source != "jsonl" or self.options):
            raise ValueError("sources stand in place of source and options: leave these out")
        kinds: dict[tuple[str, str], str] = {}
        for each in self.sources:  # evaluated tasks of a source take its kind, so it must have one only
            if kinds.setdefault((each.source, repr(each.options)), each.kind) != each.kind:
                raise ValueError(
                    f"source {each.source!r} has two kinds with the same options: write `kind` in its tasks"
                )
        return self


class EasyFirst(Section):
    """Draw tasks from a pool that begins with the easiest and grows to all; then take all in epochs. Tasks need a
    `difficulty`, or `curriculum.probe`.
    """

    steps: int = Field(default=20, ge=1)
    """Steps until the pool has all tasks."""


class Band(Section):
    """Prefer tasks whose success rate over recent attempts is within a band, since a group that always succeeds or
    always fails teaches nothing. A success is a repair that passes its checks; without checks the reward counts.
    """

    low: float = Field(default=0.15, ge=0, le=1)
    """Least success rate, with one success and one failure added: 8 failures give 0.1."""
    high: float = Field(default=0.85, ge=0, le=1)
    """Greatest success rate."""

    @model_validator(mode="after")
    def _something_within(self) -> Band:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} exceeds high={self.high:g}")
        return self


class Curriculum(Section):
    """Order of the tasks (docs/guides/curriculum.md); by default epochs in an order drawn by `run.seed`."""

    easy_first: Annotated[EasyFirst | None, Switch] = None
    """The easiest tasks first: `true`, or a table. Not with `band`."""
    band: Annotated[Band | None, Switch] = None
    """Tasks that the policy sometimes solves: `true`, or a table. Not with `easy_first`."""
    probe: str = ""
    """A file, or a run folder of `crrl eval`, with earlier attempts (docs/guides/curriculum.md). Their success rate
    replaces `difficulty` for `easy_first`, and serves `band` until the run has attempted the task."""
    refill: int = Field(default=0, ge=0)
    """Most further groups per step, which replace groups of equal rewards until `rollout.tasks_per_step` groups have
    different ones (dynamic sampling, arXiv 2503.14476); the loss averages over these alone. 0 is off: refilling
    costs attempts. Excludes `train.value_head`, which learns from every episode."""

    @model_validator(mode="after")
    def _one_order(self) -> Curriculum:
        if self.easy_first is not None and self.band is not None:
            raise ValueError("easy_first and band are two orders: leave one out")
        if self.probe and self.easy_first is None and self.band is None:
            raise ValueError("probe is read by easy_first and band alone: add one of them, or leave it out")
        return self


class Data(Section):
    """Examples for `crrl sft` (docs/guides/sft.md)."""

    paths: Annotated[tuple[str, ...], Several] = ()
    """Runs of `crrl collect`, or Parquet files of such examples."""
    batch: int = Field(default=32, ge=1)
    """Examples per step."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the examples, each in a new order; they decide the number of steps. Unset: `run.steps` does."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks, by salted MD5 of their ids, whose examples are not trained on; their loss is measured before
    the first step and after each epoch."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest example in tokens; unset is the model's context."""
    unfit: Literal["refuse", "drop"] = "refuse"
    """Examples longer than `max_tokens`, or that the template cannot write: refuse the run, or drop, count and name
    them."""
