"""Episodes, trees of turns, become rows for the learner, and every sampled token is accounted for. Free of torch.

A row is the path to a leaf, exactly as the engine saw it. Where paths share a prefix, the prefix's tokens are
trained in the first row that has them and are context in the others, so each sampled token trains at most once.
A turn that cannot be trained (aborted, say) is pruned with everything that only leads to it; inside a path that
leads on, it stays as context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from coderepairrl.learn.advantages import GroupAdvantages, Kind, group_advantages
from coderepairrl.types import Ending, Episode, Sample, Turn, path


@dataclass(frozen=True, slots=True)
class Account:
    """Where every sampled token went: ``sampled == trained + masked + dropped``, by reason (DESIGN 6.2).

    A masked token is in a row but not trained, a dropped one is in no row. Accounts add up.

    >>> Account(sampled=5, trained=3, dropped={"void": 2}).delivered
    0.6
    """

    sampled: int = 0
    trained: int = 0
    masked: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    row_tokens: int = 0
    """Tokens in all rows, context included."""
    distinct_tokens: int = 0
    """The same, with a prefix that rows share counted once."""

    @property
    def balanced(self) -> bool:
        """The invariant."""
        return self.sampled == self.trained + sum(self.masked.values()) + sum(self.dropped.values())

    @property
    def delivered(self) -> float:
        """Fraction of the sampled tokens that are trained; 1.0 when nothing was sampled."""
        return self.trained / self.sampled if self.sampled else 1.0

    @property
    def expansion(self) -> float:
        """Tokens the learner computes over distinct tokens: the price of forks, at least 1.0."""
        return self.row_tokens / self.distinct_tokens if self.distinct_tokens else 1.0

    def __add__(self, other: Account) -> Account:
        def plus(name: str) -> int | dict[str, int]:
            a, b = getattr(self, name), getattr(other, name)
            return a + b if isinstance(a, int) else dict(Counter(a) + Counter(b))

        return Account(**{entry.name: plus(entry.name) for entry in fields(Account)})  # type: ignore[arg-type]


Denominator = Literal["episodes", "informative"]
"""What a loss is averaged over: all valid episodes, as in the papers, or those with rows alone."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a training step, their account, and the groups they come from (by `Episode.group`)."""

    samples: tuple[Sample, ...]
    episodes: int
    """How many the loss is averaged over: at least as many as have rows."""
    account: Account
    groups: Mapping[str, GroupAdvantages]


def batch(
    episodes: Sequence[Episode],
    kind: Kind = "zscore",
    *,
    max_tokens: int,
    denominator: Denominator = "episodes",
    kl: bool = False,
) -> Batch:
    """All that lies between finished episodes and the learner: advantages per group, then rows.

    `max_tokens` bounds a row. Episodes of one group need not be neighbours; rows follow the order of `episodes`.

    The loss is averaged over all episodes that are not void. Those of flat groups are among them, so that a step is as
    large as the share of the batch that there was something to learn from; with a KL term (`kl`) they have rows, of
    advantage 0, and without one they would have no gradient and have none. With ``denominator="informative"`` they are
    left out of rows and average alike, and so are episodes without a row: a single group that is not flat then makes a
    step as large as a whole batch does.

    Raises ValueError when two episodes share an id, and whatever `stitch` raises.
    """
    groups, advantage = advantages(episodes, kind, denominator=denominator, kl=kl)
    if len(advantage) != len(episodes):
        raise ValueError("two episodes of the batch share an id")
    samples: list[Sample] = []
    account = Account()
    for episode in episodes:
        rows, entry = stitch(episode, advantage[episode.id], max_tokens=max_tokens)
        samples += rows
        account += entry
    informative = len({sample.episode_id for sample in samples})
    valid = sum(episode.ending is not Ending.VOID for episode in episodes)
    return Batch(tuple(samples), valid if denominator == "episodes" else informative, account, groups)


def advantages(
    episodes: Iterable[Episode], kind: Kind = "zscore", *, denominator: Denominator = "episodes", kl: bool = False
) -> tuple[dict[str, GroupAdvantages], dict[str, float | None]]:
    """Of each group of a batch, by its name, and of each episode, by its id; the settings are those of `batch`."""
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode.group, []).append(episode)
    groups: dict[str, GroupAdvantages] = {}
    own: dict[str, float | None] = {}
    for name, group in members.items():
        rewards = [None if e.ending is Ending.VOID else e.reward for e in group]
        groups[name] = group_advantages(rewards, kind, kl=kl and denominator == "episodes")
        own |= dict(zip((e.id for e in group), groups[name].values, strict=True))
    return groups, own


def stitch(episode: Episode, advantage: float | None, *, max_tokens: int) -> tuple[tuple[Sample, ...], Account]:
    """Rows of one episode and the account of its tokens.

    A void episode is dropped as ``void``; one without an advantage as ``flat_group``. Turns whose path is longer
    than `max_tokens` are dropped as ``overlong``, and the row ends before them. A turn drawn with anything but a
    bare temperature counts as masked for ``sampling``, a stop string's tail as dropped for ``stop_string``.
    Raises ValueError for a turn without a prompt, or with a token of no version.
    """
    if episode.ending is Ending.VOID or advantage is None:
        reason = "void" if episode.ending is Ending.VOID else "flat_group"
        return (), Account(sampled=episode.sampled, dropped=_counts([(reason, episode.sampled)]))
    turns = episode.turns
    lengths = _lengths(turns)
    why = [_untrained(turn, lengths[turn.index], max_tokens) for turn in turns]
    kept = _leading_to(turns, [turn.index for turn in turns if not why[turn.index]])
    bases = {turns[index].base for index in kept}
    rows: list[Sample] = []
    trained: set[int] = set()
    for leaf in sorted(kept - bases):
        chain = path(turns, leaf)
        fresh = {turn.index for turn in chain if not why[turn.index]} - trained
        trained |= fresh
        rows.append(_row(episode.id, chain, fresh, advantage))
    total = sum(sum(row.trained) for row in rows)
    weighted = tuple(replace(row, weight=sum(row.trained) / total) for row in rows)
    return weighted, Account(
        sampled=episode.sampled,
        trained=total,
        masked=_counts((why[i], len(turns[i].output)) for i in kept if why[i]),
        dropped=_counts(
            [(why[turn.index], len(turn.output)) for turn in turns if turn.index not in kept]
            + [("stop_string", len(turn.tail)) for turn in turns]
        ),
        row_tokens=sum(len(row.ids) for row in rows),
        distinct_tokens=sum(len(turns[i].given) + len(turns[i].output) for i in kept),
    )


def fates(episode: Episode, *, max_tokens: int) -> tuple[tuple[str, str], ...]:
    """What becomes of each turn's output: ``trained``, ``masked`` (in a row all the same) or ``dropped``, and why.

    As `stitch` has it, for an episode that has an advantage.
    """
    turns = episode.turns
    if episode.ending is Ending.VOID:
        return (("dropped", "void"),) * len(turns)
    lengths = _lengths(turns)
    why = [_untrained(turn, lengths[turn.index], max_tokens) for turn in turns]
    kept = _leading_to(turns, [turn.index for turn in turns if not why[turn.index]])
    return tuple(
        (("masked" if index in kept else "dropped") if reason else "trained", reason)
        for index, reason in enumerate(why)
    )


def _lengths(turns: Sequence[Turn]) -> list[int]:
    """Length of the path to each turn, its output included, in tokens. A turn's base comes before it."""
    lengths: list[int] = []
    for turn in turns:
        before = (lengths[turn.base] if turn.base is not None else 0) + len(turn.given)
        if not before and turn.output:
            raise ValueError(f"turn {turn.index} was sampled from an empty prompt: its first token has no logprob")
        lengths.append(before + len(turn.output))
    return lengths


def _untrained(turn: Turn, length: int, max_tokens: int) -> str:
    """Why the turn's output is not trained; empty if it is."""
    if turn.masked or not turn.sampling.trainable:
        return turn.masked or "sampling"
    if length > max_tokens:
        return "overlong"
    return "" if turn.output else "empty"


def _leading_to(turns: Sequence[Turn], goals: Iterable[int]) -> set[int]:
    """The turns on a path to any of `goals`, the goals included."""
    kept: set[int] = set()
    for goal in goals:
        at: int | None = goal
        while at is not None and at not in kept:
            kept.add(at)
            at = turns[at].base
    return kept


def _row(episode_id: str, chain: Sequence[Turn], fresh: set[int], advantage: float) -> Sample:
    ids: list[int] = []
    trained: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for turn in chain:
        n = len(turn.given)
        ids += turn.given.ids + turn.output.ids
        trained += [False] * n + [turn.index in fresh] * len(turn.output)
        logprobs += (0.0,) * n + turn.output.logprobs
        versions += [-1] * n + _versions(turn)
    return Sample(episode_id, tuple(ids), tuple(trained), tuple(logprobs), tuple(versions), advantage)


def _versions(turn: Turn) -> list[int]:
    """Policy version of each output token."""
    versions = [-1] * len(turn.output)
    for span in turn.versions:
        for at in range(span.start, min(span.end, len(versions))):
            versions[at] = span.version
    if -1 in versions:
        raise ValueError(f"turn {turn.index} does not say which version sampled its token {versions.index(-1)}")
    return versions


def _counts(entries: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sums per reason, without the zeros."""
    counts: Counter[str] = Counter()
    for reason, tokens in entries:
        counts[reason] += tokens
    return {reason: tokens for reason, tokens in counts.items() if tokens}
