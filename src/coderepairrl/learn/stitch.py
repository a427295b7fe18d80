"""Stitching of episodes (trees of turns) into rows, accounting for every sampled token.

A row is a leaf's context and output, exactly as the engine saw them; a turn in several rows is trained in the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from coderepairrl.config.schema import Baseline
from coderepairrl.learn.algorithms import (
    GroupAdvantages,
    break_ties,
    compute_group_advantages,
    compute_overlong_penalty,
)
from coderepairrl.tokens.trie import Trie
from coderepairrl.types import Ending, Episode, Sample, Turn, sequence

Balance = Literal["", "episodes", "tokens"]
"""Unit in which the loss is balanced between kinds of task."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Counts of sampled tokens: ``sampled == trained + masked`` (in a row) ``+ dropped``, by reason.

    >>> TokenAccount(sampled=5, trained=3, dropped={"void": 2}).delivered
    0.6
    """

    sampled: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    row_tokens: int = 0
    """Tokens in all rows, context included."""
    distinct_tokens: int = 0
    """Tokens with common prefixes of a group's rows counted once."""

    @property
    def is_balanced(self) -> bool:
        """Whether the invariant holds."""
        return self.sampled == self.trained + sum(self.masked.values()) + sum(self.dropped.values())

    @property
    def delivered(self) -> float:
        """Trained fraction of the sampled tokens."""
        return self.trained / self.sampled if self.sampled else 1.0

    @property
    def expansion(self) -> float:
        """Row tokens per distinct token."""
        return self.row_tokens / self.distinct_tokens if self.distinct_tokens else 1.0

    def __add__(self, other: TokenAccount) -> TokenAccount:
        totals: dict[str, Any] = {}
        for name in (entry.name for entry in fields(TokenAccount)):
            a, b = getattr(self, name), getattr(other, name)
            totals[name] = a + b if isinstance(a, int) else dict(Counter(a) + Counter(b))
        return TokenAccount(**totals)


@dataclass(frozen=True, slots=True)
class RewardShaping:
    """Changes to rewards and advantages."""

    buffer: int = 0
    """`train.overlong_buffer`."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Token limits by kind of task, "" for others."""
    ties: Mapping[str, float] = field(default_factory=dict)
    """`train.tie_break`."""
    mask_truncated: bool = False

    def reward(self, episode: Episode) -> float | None:
        """Reward for the baseline; None if void."""
        if episode.ending is Ending.VOID:
            return None
        if not self.buffer:
            return episode.reward
        longest = max(_Forest(episode.turns).lengths, default=0)
        return episode.reward - compute_overlong_penalty(
            longest, self.limits.get(episode.kind, self.limits[""]), self.buffer
        )

    def is_masked(self, episode: Episode) -> bool:
        """Whether the episode only counts for the baseline."""
        return self.mask_truncated and episode.ending is Ending.LIMIT


UNSHAPED = RewardShaping()


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a training step, account and groups."""

    samples: tuple[Sample, ...]
    episodes: int
    """Episodes that the loss is averaged over."""
    tokens: int
    """Tokens that a token-level loss is averaged over."""
    account: TokenAccount
    groups: Mapping[str, GroupAdvantages]
    kinds: Mapping[str, TokenAccount] = field(default_factory=dict)
    """Accounts by kind of task."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Factors on advantages (`compute_kind_scales`)."""


def build_batch(
    episodes: Sequence[Episode],
    baseline: Baseline = "zscore",
    *,
    max_tokens: int,
    informative: bool = False,
    kl: bool = False,
    weights: Mapping[str, float] = MappingProxyType({}),
    balance: Balance = "",
    shaping: RewardShaping = UNSHAPED,
) -> Batch:
    """Batch of finished episodes: advantages per group, rows of at most `max_tokens` tokens.

    The loss is averaged over all non-void episodes, or their tokens; with `informative`, only over those with rows.
    Flat groups (equal rewards) have rows only with a KL term (`kl`).
    """
    groups, advantage = compute_advantages(episodes, baseline, informative=informative, kl=kl, shaping=shaping)
    if len(advantage) != len(episodes):
        raise ValueError("two episodes of the batch share an id")
    samples: list[Sample] = []
    kinds: dict[str, TokenAccount] = {}
    distinct = {name: Trie() for name in groups}
    for episode in episodes:
        reason = "truncated" if shaping.is_masked(episode) else "flat_group"
        rows, entry = stitch_episode(
            episode, advantage[episode.id], max_tokens=max_tokens, untrained=reason, distinct=distinct[episode.group]
        )
        samples += rows
        kinds[episode.kind] = kinds.get(episode.kind, TokenAccount()) + entry
    kind_of = {episode.id: episode.kind for episode in episodes}
    scales = compute_kind_scales(
        _count_loss_units(episodes, samples, kinds, informative, balance), weights, balanced=bool(balance)
    )
    if set(scales.values()) != {1.0}:
        samples = [replace(each, advantage=each.advantage * scales[kind_of[each.episode_id]]) for each in samples]
    with_rows = len({sample.episode_id for sample in samples})
    account = sum(kinds.values(), TokenAccount())
    tokens = account.trained
    if not informative:
        flat = (each for each in episodes if advantage[each.id] is None and not shaping.is_masked(each))
        tokens += sum(_count_trainable(episode, max_tokens) for episode in flat)
    count = with_rows if informative else sum(episode.ending is not Ending.VOID for episode in episodes)
    return Batch(tuple(samples), count, tokens, account, groups, kinds, scales)


def _count_loss_units(
    episodes: Iterable[Episode],
    samples: Iterable[Sample],
    kinds: Mapping[str, TokenAccount],
    informative: bool,
    balance: Balance,
) -> dict[str, float]:
    """Trained tokens or episodes of each kind: its part of the loss."""
    if balance == "tokens":
        return {kind: float(account.trained) for kind, account in kinds.items()}
    trained = {sample.episode_id for sample in samples}
    valid = (each for each in episodes if each.ending is not Ending.VOID)
    counts = Counter(each.kind for each in valid if not informative or each.id in trained)
    return {kind: float(counts[kind]) for kind in kinds}


def compute_kind_scales(
    masses: Mapping[str, float], weights: Mapping[str, float], *, balanced: bool
) -> dict[str, float]:
    """Factor of each kind: its weight or, if `balanced`, one that distributes the same total loss by weight.

    `masses`: from `_count_loss_units`.

    >>> compute_kind_scales({"detect": 10, "repair": 30}, {}, balanced=True)
    {'detect': 2.0, 'repair': 0.6666666666666666}
    >>> compute_kind_scales({"detect": 10, "repair": 30}, {"detect": 3}, balanced=False)
    {'detect': 3, 'repair': 1.0}
    """
    factors = {kind: weights.get(kind, 1.0) for kind in masses}
    if not balanced:
        return factors
    total = sum(masses.values())
    weight = sum(factors[kind] for kind, mass in masses.items() if mass)
    return {kind: factors[kind] / weight * total / mass if mass else 1.0 for kind, mass in masses.items()}


def compute_advantages(
    episodes: Iterable[Episode],
    baseline: Baseline = "zscore",
    *,
    informative: bool = False,
    kl: bool = False,
    shaping: RewardShaping = UNSHAPED,
) -> tuple[dict[str, GroupAdvantages], dict[str, float | None]]:
    """Advantages by group name, and by episode id; settings as in `build_batch`."""
    kl = kl and not informative
    members: dict[str, list[Episode]] = {}
    kinds: dict[str, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode.group, []).append(episode)
        kinds.setdefault(episode.kind, []).append(episode)
    rewards = {name: [shaping.reward(each) for each in group] for name, group in members.items()}
    groups = {name: compute_group_advantages(group, baseline, kl=kl) for name, group in rewards.items()}
    by_episode: dict[str, float | None] = {}
    for name, group in members.items():
        by_episode |= dict(zip((each.id for each in group), groups[name].values, strict=True))
    if baseline == "batch":
        for same_kind in kinds.values():
            values = compute_group_advantages([shaping.reward(each) for each in same_kind], "zscore", kl=kl).values
            by_episode |= dict(zip((each.id for each in same_kind), values, strict=True))
    for name, group in members.items():
        for score, weight in shaping.ties.items():
            scores = [next((each.value for each in episode.scores if each.name == score), 0.0) for episode in group]
            values = break_ties([by_episode[each.id] for each in group], rewards[name], scores, weight)
            by_episode |= dict(zip((each.id for each in group), values, strict=True))
        by_episode |= {each.id: None for each in group if shaping.is_masked(each)}
        groups[name] = replace(groups[name], values=tuple(by_episode[each.id] for each in group))
    return groups, by_episode


def stitch_episode(
    episode: Episode,
    advantage: float | None,
    *,
    max_tokens: int,
    untrained: str = "flat_group",
    distinct: Trie | None = None,
) -> tuple[tuple[Sample, ...], TokenAccount]:
    """Rows of one episode and the account of its tokens.

    Dropped: void episodes (``void``), those without an advantage (`untrained`), turns with a context beyond
    `max_tokens` (``overlong``), tails after a stop string (``stop_string``). Masked in a row, else dropped: turns
    outside the main conversation (``side``), or sampled with top-p and the like (``sampling``). `distinct_tokens`
    counts those new to `distinct`.
    """
    if episode.ending is Ending.VOID or advantage is None:
        reason = "void" if episode.ending is Ending.VOID else untrained
        return (), TokenAccount(sampled=episode.sampled, dropped=_count_tokens([(reason, episode.sampled)]))
    turns = episode.turns
    forest = _Forest(turns)
    reasons = _list_reasons(episode, forest.lengths, max_tokens)
    in_rows = forest.find_context(turn.index for turn in turns if not reasons[turn.index])
    inner = {forest.parents[index] for index in in_rows}
    rows: list[Sample] = []
    trained: set[int] = set()
    distinct = Trie() if distinct is None else distinct
    tokens_before = len(distinct)
    for leaf in sorted(in_rows - inner):
        fresh = {index for index in forest.path(leaf) if not reasons[index]} - trained
        trained |= fresh
        rows.append(replace(forest.row(episode.id, leaf, fresh, advantage), group=episode.group))
        distinct.add(rows[-1].ids, leaf)
    total = sum(sum(row.trained) for row in rows)
    weighted = tuple(replace(row, weight=sum(row.trained) / total) for row in rows)
    return weighted, TokenAccount(
        sampled=episode.sampled,
        trained=total,
        masked=_count_tokens((reasons[i], len(turns[i].output)) for i in in_rows if reasons[i]),
        dropped=_count_tokens(
            [(reasons[turn.index], len(turn.output)) for turn in turns if turn.index not in in_rows]
            + [("stop_string", len(turn.tail)) for turn in turns]
        ),
        row_tokens=sum(len(row.ids) for row in rows),
        distinct_tokens=len(distinct) - tokens_before,
    )


def list_fates(episode: Episode, *, max_tokens: int) -> tuple[tuple[str, str], ...]:
    """Each turn's fate in `stitch_episode`: ``trained``, ``masked`` (in a row) or ``dropped``, with the reason."""
    turns = episode.turns
    if episode.ending is Ending.VOID:
        return (("dropped", "void"),) * len(turns)
    forest = _Forest(turns)
    reasons = _list_reasons(episode, forest.lengths, max_tokens)
    in_rows = forest.find_context(turn.index for turn in turns if not reasons[turn.index])
    untrained = ["masked" if turn.index in in_rows else "dropped" for turn in turns]
    return tuple((fate if reason else "trained", reason) for fate, reason in zip(untrained, reasons, strict=True))


def _count_trainable(episode: Episode, max_tokens: int) -> int:
    pairs = zip(episode.turns, list_fates(episode, max_tokens=max_tokens), strict=True)
    return sum(len(turn.output) for turn, (fate, _) in pairs if fate == "trained")


def _list_reasons(episode: Episode, lengths: Sequence[int], max_tokens: int) -> list[str]:
    side = set(episode.side)

    def find_reason(turn: Turn) -> str:
        if turn.masked or turn.index in side:
            return turn.masked or "side"
        if not turn.sampling.trainable:
            return "sampling"
        if lengths[turn.index] > max_tokens:
            return "overlong"
        return "" if turn.output else "empty"

    return [find_reason(turn) for turn in episode.turns]


class _Forest:
    """Trees of turns: a parent is the last turn wholly in the context."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.lengths: list[int] = []
        """Tokens of each turn's context and output."""
        self.parents: list[int | None] = []
        for turn in turns:  # turns are ordered: parents come first
            shared = turn.fork.tokens if turn.fork else 0
            if turn.base is not None:
                shared = self.lengths[turn.base]
            if not shared + len(turn.given) and turn.output:
                raise ValueError(f"turn {turn.index} was sampled from an empty prompt: its first token has no logprob")
            self.lengths.append(shared + len(turn.given) + len(turn.output))
            at = turn.fork.turn if turn.fork else turn.base
            while at is not None and self.lengths[at] > shared:
                at = self.parents[at]
            self.parents.append(at)

    def path(self, leaf: int) -> Iterator[int]:
        """Yield `leaf` and its ancestors."""
        at: int | None = leaf
        while at is not None:
            yield at
            at = self.parents[at]

    def find_context(self, goals: Iterable[int]) -> set[int]:
        """Find `goals` and their ancestors."""
        context: set[int] = set()
        for goal in goals:
            for at in self.path(goal):
                if at in context:
                    break
                context.add(at)
        return context

    def row(self, episode_id: str, leaf: int, fresh: set[int], advantage: float) -> Sample:
        """Row of `leaf`, trained on the outputs of `fresh`."""
        ids = sequence(self.turns, leaf)
        trained = [False] * len(ids)
        logprobs = [0.0] * len(ids)
        versions = [-1] * len(ids)
        for index in self.path(leaf):
            turn, end = self.turns[index], self.lengths[index]
            output = slice(end - len(turn.output), end)
            trained[output] = [index in fresh] * len(turn.output)
            logprobs[output] = turn.output.logprobs
            versions[output] = _turn_versions(turn)
        return Sample(episode_id, ids, tuple(trained), tuple(logprobs), tuple(versions), advantage)


def _turn_versions(turn: Turn) -> list[int]:
    versions = [-1] * len(turn.output)
    for span in turn.versions:
        for at in range(span.start, min(span.end, len(versions))):
            versions[at] = span.version
    if -1 in versions:
        raise ValueError(f"turn {turn.index} does not say which version sampled its token {versions.index(-1)}")
    return versions


def _count_tokens(entries: Iterable[tuple[str, int]]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for reason, tokens in entries:
        counts[reason] += tokens
    return dict(+counts)
