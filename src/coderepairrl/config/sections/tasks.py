"""`[tasks]`, `[curriculum]` and `[data]`: what is learned from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coderepairrl.config.sections.base import Section, Several, Switch


class Source(Section):
    """One of several sources of training tasks, which share the batches."""

    source: str
    """A task source of `crrl tasks list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Options of the source."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the batches, relative to the sum of all weights."""
    kind: str = ""
    """Kind of its tasks that have none."""


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
    """Before the first step, refuse a reward that gives a reference less than 1, or a no-op more than 0
    (docs/guides/rewards.md): a broken grader looks like a policy that repairs nothing. Up to 50 references are all
    tested, of more 3 per environment; results are cached until task, checks, sandbox or packages change."""
    verified_references: int | None = Field(default=None, ge=0)
    """Repairs of the policy, per task, that passed its checks and become further references for `patch_edits`,
    `patch_lines` and `hybrid` (docs/guides/rewards.md); checks must run, at least as `reward.tests=0`. Unset: 4 if
    `reward` is empty, `hybrid` follows and tasks are attempted twice, else 0."""
    holdout: float | None = Field(default=None, ge=0, le=1)
    """Share of the tasks, by MD5 of their ids, that `crrl collect` attempts and training leaves out. Unset: a quarter
    for `crrl collect`, none left out of training."""
    learned: Literal["refuse", "train"] = "refuse"
    """Refuse or train on tasks whose trajectories the model was fine-tuned on (`crrl sft`)."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Refuse the run, or drop training tasks, whose first request leaves no tokens for a reply. Held-out tasks are
    never dropped, since that would change the benchmark."""

    @model_validator(mode="after")
    def _one_or_several(self) -> Tasks:
        if self.sources and (self.source != "jsonl" or self.options):
            raise ValueError("sources stand in place of source and options: leave these out")
        kinds: dict[tuple[str, str], str] = {}
        for each in self.sources:  # held-out tasks of the source have its kind, too: it must be one
            if kinds.setdefault((each.source, repr(each.options)), each.kind) != each.kind:
                raise ValueError(f"source {each.source!r} has two kinds with the same options: give its tasks theirs")
        return self


class EasyFirst(Section):
    """Draw tasks from a pool that starts with the easiest and grows to all, then by epochs. Tasks need a
    `difficulty`, or `curriculum.probe`.
    """

    steps: int = Field(default=20, ge=1)
    """Step from which all tasks are in the pool."""


class Band(Section):
    """Draw tasks whose running success rate is within a band. A success is a repair that passed its checks; without
    checks, the reward counts.
    """

    low: float = Field(default=0.15, ge=0, le=1)
    """Least success rate, counting one added success and failure: 8 failures give 0.1."""
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
    """`true`, or a table; excludes `band`."""
    band: Annotated[Band | None, Switch] = None
    """`true`, or a table; excludes `easy_first`."""
    probe: str = ""
    """A file, or a run folder of `crrl eval`, with earlier attempts (docs/guides/curriculum.md). Their success rate
    replaces `difficulty` for `easy_first`, and for `band` counts until there are newer attempts."""
    refill: int = Field(default=0, ge=0)
    """Most further groups per step that replace groups of equal rewards, until `rollout.tasks_per_step` groups have
    something to teach (dynamic sampling, arXiv 2503.14476); the loss averages over these alone. Excludes
    `train.value_head`, which learns from every episode."""

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
    """Passes over the examples, each in a new order, which determine `run.steps`; unset uses `run.steps`."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of tasks whose examples are measured before the first step and after each epoch, not trained on. They are
    chosen by salted MD5 of their ids, independently of a source's held-out tasks."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens; unset is the model's context."""
    unfit: Literal["refuse", "drop"] = "refuse"
    """Refuse the run, or drop (counted and named) examples that are longer or that the template cannot write."""
