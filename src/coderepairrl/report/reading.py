"""A run folder, read once and tolerantly: what is damaged or not there yet becomes a notice, not an error."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coderepairrl.agents.stats import ToolStats, tally
from coderepairrl.errors import RunError
from coderepairrl.learn import Account
from coderepairrl.learn.account import accounts_by_kind
from coderepairrl.runs import RunFolder, logged_episodes, open_run
from coderepairrl.stats import Notes
from coderepairrl.stats.notes import kind_of, plain
from coderepairrl.types import Ending, Episode, Origin, TokenSpan

Record = Mapping[str, Any]
_LINES, _KINDS = 8, 200
"""Of what a program printed: lines shown, and kinds of last lines that are counted apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a report needs of an episode, without its tokens."""

    phase: str
    step: int
    ending: Ending
    reason: str
    scores: tuple[str, ...]
    tools: ToolStats
    timings: Mapping[str, float]
    tokens: int
    """Sampled and given."""
    busy: tuple[tuple[float, float], ...]
    """When the engine worked on it: Unix seconds from, to."""
    side_calls: int
    """Turns beside the main conversation."""


@dataclass(slots=True)
class Printed:
    """What agent programs printed last on attempts without a patch, or why episodes are void: the `end` of one, and how
    many were alike."""

    end: str
    count: int = 0
    example: str = ""
    """Id of the first."""


@dataclass(slots=True)
class RunData:
    """The contents of a run folder."""

    folder: RunFolder
    about: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Flat: ``train.lr`` and so on."""
    notices: list[str] = field(default_factory=list)
    """What is missing or damaged, in sentences."""
    steps: list[Record] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    """Every episode with a verdict, by id."""
    trained: dict[str, Episode] = field(default_factory=dict)
    """Valid training episodes by id, without what they said and did."""
    evaluated: dict[tuple[str, int], dict[tuple[str, int], Episode]] = field(default_factory=dict)
    """Episodes of evaluations, by name and step, then by group and attempt; void ones only where nothing else is."""
    notes: Notes = field(default_factory=Notes)
    """Of the rewards, in training and evaluations."""
    printed: dict[str, Printed] = field(default_factory=dict)
    """By what is alike in the last line."""
    faults: dict[str, Printed] = field(default_factory=dict)
    """Why episodes are void, by what is alike in it."""
    answers: dict[tuple[str, int], Record] = field(default_factory=dict)
    """Of finished evaluations with tasks that are answered: `report.answers.summary`."""
    evaluation_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    """Of finished evaluations."""
    phases: dict[str, str] = field(default_factory=dict)
    """Of every episode begun, by id."""
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Tries by group and attempt."""
    interrupted: int = 0
    """Episodes without a verdict."""
    sessions: list[tuple[float, float]] = field(default_factory=list)
    """Unix seconds from, to, of each process that worked on the run."""
    last: str = ""
    """Type of the last ``start``, ``stop`` or ``end`` record."""
    stopped_by: str = ""
    where: str = ""
    """Engine and sandbox of the last process."""
    used: list[Record] = field(default_factory=list)
    """``start`` and ``used`` records: what each process has used of the machine (`processes.meter.total`)."""
    changes: list[Record] = field(default_factory=list)
    """What the run was resumed with otherwise."""
    kinds: dict[str, Account] = field(default_factory=dict)
    """The account of sampled tokens by kind of task."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled and given, by episode."""
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """When the engine worked, by episode."""


def read(path: Path) -> RunData:
    """Everything that a report needs of the run in `path`. Raises `UsageError` when it is no run folder."""
    folder = open_run(path)
    data = RunData(folder, folder.about())
    try:
        data.config = flat(tomllib.loads(folder.config.read_text()))
    except (OSError, ValueError) as error:
        data.notices.append(f"The configuration cannot be read ({error}).")
    if not folder.log.is_file():
        data.notices.append("There is no log.jsonl: nothing of this run is known but how it was meant.")
        return data
    for episode in logged_episodes(_watch(data)):
        _add(data, episode)
    data.kinds = accounts_by_kind(_whole(folder, []))
    return data


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys.

    >>> flat({"train": {"lr": 1e-4}, "eval": {}})
    {'train.lr': 0.0001}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _whole(folder: RunFolder, notices: list[str]) -> Iterator[Record]:
    """The log's records as far as they can be read."""
    with folder.log.open("rb") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                notices.append("The log's last line is incomplete: the run is writing it, or a crash cut it off.")
    try:
        yield from folder.records()
    except RunError as error:
        notices.append(f"The log is damaged, and only what stands before that is shown: {error}.")


def _watch(data: RunData) -> Iterator[Record]:
    """Pass on the records that make episodes, and keep the contents of the others."""
    open_since: dict[tuple[str, int], float] = {}
    pending: set[str] = set()
    for record in _whole(data.folder, data.notices):
        kind, time = record["type"], record["time"]
        if kind == "start" or not data.sessions:
            data.sessions.append((time, time))
            open_since.clear()
        data.sessions[-1] = (data.sessions[-1][0], time)
        if kind in ("start", "used"):
            data.used.append(record)
        if kind in ("start", "stop", "end"):
            data.last, data.stopped_by = kind, record.get("reason", "")
            if kind == "start":
                data.where = f"engine {record.get('engine', '?')}, sandbox {record.get('sandbox', '?')}"
        elif kind == "episode":
            data.begun[record["group"], record["attempt"]] += 1
            pending.add(record["id"])
            data.phases[record["id"]] = record["phase"]
            open_since.setdefault((record["phase"], record["step"]), time)
        elif kind == "verdict":
            pending.discard(record["verdict"]["id"])
        elif kind == "step":
            data.steps.append(record)
        elif kind == "change":
            data.changes.append(record)
        elif kind == "eval":
            # Its episodes may all be from an earlier process: then this one spent no time on it.
            key = record["name"], record["step"]
            data.evaluation_seconds[key] = time - open_since.get(key, time)
            if labelled := record["summary"].get("answers"):
                data.answers[key] = labelled
        elif kind == "turn":
            _count(data, record["episode"], record["turn"])
        # Of a training episode's turns the counts are enough; without their tokens reading takes half the time.
        if (kind == "turn" and data.phases.get(record["episode"]) != "train") or kind in ("episode", "verdict"):
            yield record
    data.interrupted = len(pending)


def _count(data: RunData, episode: str, turn: Record) -> None:
    data.tokens[episode] += sum(len(turn[span]["ids"]) for span in ("given", "output", "tail"))
    data.busy.setdefault(episode, []).append((turn["started"], turn["ended"]))


def _add(data: RunData, episode: Episode) -> None:
    data.rows[episode.id] = Row(
        phase=episode.phase,
        step=episode.step,
        ending=episode.ending,
        reason=episode.reason,
        scores=tuple(score.name for score in episode.scores),
        tools=tally(episode.tool_calls),
        timings=episode.timings,
        tokens=data.tokens.pop(episode.id, 0),
        busy=tuple(data.busy.pop(episode.id, ())),
        side_calls=len(episode.side),
    )
    data.notes.add(episode)
    if episode.printed and not episode.patch:
        _count_alike(data.printed, episode.printed.strip().splitlines()[-_LINES:], episode.id)
    if episode.ending is Ending.VOID:
        why = (episode.fault.strip().splitlines() or ["unknown"])[0]
        _count_alike(data.faults, [f"{episode.reason}: {why}"], episode.id)
    if episode.phase == "train":
        if episode.ending is not Ending.VOID:
            data.trained[episode.id] = replace(episode, tool_calls=(), printed="")
        return
    known = data.evaluated.setdefault((episode.phase, episode.step), {})
    key = (episode.group, episode.attempt)
    if key not in known or known[key].ending is Ending.VOID:
        nothing = TokenSpan((), Origin.GIVEN)  # a report needs what was sampled, and no prompts
        known[key] = replace(episode, turns=tuple(replace(t, given=nothing, messages=()) for t in episode.turns))


def _count_alike(counted: dict[str, Printed], lines: Sequence[str], episode: str) -> None:
    """Count `lines`, which are of `episode`, with those of which the last differs in names and numbers only."""
    kind = kind_of(plain(lines[-1])) if lines else ""
    if kind not in counted and len(counted) >= _KINDS:  # a policy can write lines that never repeat
        kind, lines = "others", ["(others)"]
    counted.setdefault(kind, Printed("\n".join(lines) or "(blanks)", example=episode)).count += 1
