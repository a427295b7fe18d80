"""`[tasks]`, `[curriculum]` and `[data]`: what is learned from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from coderepairrl.config.sections.base import Section, Several, Switch


class Source(Section):
    """One of several sources of training tasks, whose tasks share the batches."""

    source: str
    """A task source of `crrl data list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Passed to the source."""
    weight: float = Field(default=1.0, gt=0)
    """Its part of the batches, over the sum of all weights."""
    kind: str = ""
    """The kind of its tasks that have none themselves."""


class Tasks(Section):
    """What is trained on."""

    source: str = "jsonl"
    """A task source of `crrl data list`, or `module:Class`."""
    options: dict[str, Any] = {}
    """Passed to the source, for example `path`."""
    split: str = "train"
    """Tasks of this split are trained on."""
    sources: tuple[Source, ...] = ()
    """Several sources in place of `source`, as `[[tasks.sources]]`, each with its part of the batches."""
    verify: bool = True
    """Before the first step, ask every reward that measures repair about references, in the sandbox
    (docs/guides/rewards.md): all up to 50, else 3 of each environment. One that earns less than 1 is refused, and so is
    a patch without effect that earns more than 0. What held is remembered until task, checks, sandbox or packages
    change."""
    verified_references: int | None = Field(default=None, ge=0)
    """So many repairs of the policy's own that passed a task's checks in earlier steps become further references of the
    task; `patch_edits`, `patch_lines` and `hybrid` compare with the nearest (docs/guides/rewards.md). Needs checks to
    be run: `reward.tests=0` at least. Unset: 4 where `reward` is empty, `hybrid` follows and tasks are attempted twice,
    else 0."""
    holdout: float | None = Field(default=None, ge=0, le=1)
    """Share of the tasks, by the MD5 of their ids, that `crrl collect` attempts and training leaves out. Unset,
    `crrl collect` takes a quarter, and training leaves out none."""
    learned: Literal["refuse", "train"] = "refuse"
    """Of tasks whose trajectories the model was fine-tuned on (`crrl sft`): refuse to train on them again, or do so."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Of training tasks whose first request leaves no room for a reply, in tokens: refuse the run, or leave them out.
    Held-out ones are never left out: it would be another benchmark."""

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
    """Easy tasks first: tasks are drawn at random from a pool that begins with the easiest and grows step by step; once
    it has all of them come epochs. Tasks need a `difficulty`, or `curriculum.probe` says how often each was solved."""

    steps: int = Field(default=20, ge=1)
    """The step from which on all tasks are in."""


class Band(Section):
    """Tasks of middling difficulty for the policy as it is: those whose running success rate lies within a band. A
    success is a repair that passed its checks; where none are run, the reward stands for it."""

    low: float = Field(default=0.15, ge=0, le=1)
    """The rate is at least this. One success and one failure are added to it: of 8 failures it is 0.1."""
    high: float = Field(default=0.85, ge=0, le=1)
    """And at most this."""

    @model_validator(mode="after")
    def _something_within(self) -> Band:
        if self.low > self.high:
            raise ValueError(f"low={self.low:g} exceeds high={self.high:g}")
        return self


class Curriculum(Section):
    """Which tasks are attempted when (docs/guides/curriculum.md); by default all of them in each epoch, in an order
    drawn by `run.seed`."""

    easy_first: Annotated[EasyFirst | None, Switch] = None
    """`true`, or a table."""
    band: Annotated[Band | None, Switch] = None
    """`true`, or a table. Not both."""
    probe: str = ""
    """Attempts at the tasks before the run (docs/guides/curriculum.md): a run folder of `crrl eval`, or a file.
    For `easy_first` a task that was solved less often is harder, in place of its `difficulty`; for `band` they count
    until there are newer ones."""
    refill: int = Field(default=0, ge=0)
    """Up to so many further groups a step in place of those whose attempts all earned the same, until
    `rollout.tasks_per_step` groups have something to teach (dynamic sampling, arXiv 2503.14476). The loss is then
    averaged over the episodes of these groups alone. Not with a `train.value_head`, which learns from every episode."""

    @model_validator(mode="after")
    def _one_order(self) -> Curriculum:
        if self.easy_first is not None and self.band is not None:
            raise ValueError("easy_first and band are two orders: leave one out")
        if self.probe and self.easy_first is None and self.band is None:
            raise ValueError("probe is read by easy_first and band alone: add one of them, or leave it out")
        return self


class Data(Section):
    """What `crrl sft` learns from (docs/guides/sft.md)."""

    paths: Annotated[tuple[str, ...], Several] = ()
    """Runs of `crrl collect`, or Parquet files of such examples; several as a list."""
    batch: int = Field(default=32, ge=1)
    """Examples of a step."""
    epochs: float | None = Field(default=None, gt=0)
    """How often each example comes, in a new order each time; it decides `run.steps`. Unset: `run.steps` decides."""
    held_out: float = Field(default=0.05, ge=0, lt=1)
    """Share of the tasks whose examples are measured, before the first step and after each epoch, and not trained on:
    those whose ids have the lowest MD5, salted, so that they are others than those a source holds out."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest sequence; unset: as long as the model reads."""
    unfit: Literal["refuse", "drop"] = "refuse"
    """What becomes of examples that are longer, or that the model's template cannot write: nothing starts, or they are
    left out, counted and named."""
