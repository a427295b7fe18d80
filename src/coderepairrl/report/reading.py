"""Tolerant reading of a run folder: damage becomes a notice."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coderepairrl.agents.tools import ToolStats, tally
from coderepairrl.errors import RunError
from coderepairrl.learn import Account
from coderepairrl.learn.account import accounts_by_kind
from coderepairrl.runs import RunFolder, logged_episodes, open_run
from coderepairrl.stats import Notes
from coderepairrl.stats.measures import kind_of, plain
from coderepairrl.types import Ending, Episode, Origin, TokenSpan

Record = Mapping[str, Any]
_LINES, _KINDS = 8, 200


@dataclass(frozen=True, slots=True)
class Row:
    """Summary of an episode, without tokens."""

    phase: str
    step: int
    ending: Ending
    reason: str
    scores: tuple[str, ...]
    tools: ToolStats
    timings: Mapping[str, float]
    tokens: int
    """Sampled and given tokens."""
    busy: tuple[tuple[float, float], ...]
    """Engine's work on it: Unix seconds from, to."""
    side_calls: int
    """Turns outside the main conversation."""


@dataclass(slots=True)
class Printed:
    """Last output of an ending without a patch, or a fault, and its count."""

    end: str
    count: int = 0
    example: str = ""


@dataclass(slots=True)
class RunData:
    """Contents of a run folder."""

    folder: RunFolder
    about: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    """Flat: ``train.lr`` and so on."""
    notices: list[str] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    """Episodes with a verdict, by id."""
    trained: dict[str, Episode] = field(default_factory=dict)
    """Valid training episodes by id, without calls and output."""
    evaluated: dict[tuple[str, int], dict[tuple[str, int], Episode]] = field(default_factory=dict)
    """Evaluation episodes by (name, step), then (group, attempt); void ones only without a valid one."""
    notes: Notes = field(default_factory=Notes)
    printed: dict[str, Printed] = field(default_factory=dict)
    faults: dict[str, Printed] = field(default_factory=dict)
    answers: dict[tuple[str, int], Record] = field(default_factory=dict)
    evaluation_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    phases: dict[str, str] = field(default_factory=dict)
    begun: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Tries by (group, attempt)."""
    interrupted: int = 0
    sessions: list[tuple[float, float]] = field(default_factory=list)
    """Unix seconds from, to, of each process on the run."""
    last: str = ""
    """Type of the last ``start``, ``stop`` or ``end`` record."""
    stopped_by: str = ""
    where: str = ""
    used: list[Record] = field(default_factory=list)
    """``start`` and ``used`` records, for `processes.meter.total`."""
    changes: list[Record] = field(default_factory=list)
    kinds: dict[str, Account] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def read(path: Path) -> RunData:
    """Read the run in `path`. Raises `UsageError` if it is no run folder."""
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
    """Flatten nested tables to dotted keys.

    >>> flat({"train": {"lr": 1e-4}, "eval": {}})
    {'train.lr': 0.0001}
    """
    settings: dict[str, Any] = {}
    for key, value in data.items():
        settings |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return settings


def _whole(folder: RunFolder, notices: list[str]) -> Iterator[Record]:
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
    # passes on the records of episodes, and stores the others' contents
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
        cause = (episode.fault.strip().splitlines() or ["unknown"])[0]
        _count_alike(data.faults, [f"{episode.reason}: {cause}"], episode.id)
    if episode.phase == "train":
        if episode.ending is not Ending.VOID:
            data.trained[episode.id] = replace(episode, tool_calls=(), printed="")
        return
    evaluation = data.evaluated.setdefault((episode.phase, episode.step), {})
    key = (episode.group, episode.attempt)
    if key not in evaluation or evaluation[key].ending is Ending.VOID:
        nothing = TokenSpan((), Origin.GIVEN)  # a report needs what was sampled, and no prompts
        evaluation[key] = replace(episode, turns=tuple(replace(t, given=nothing, messages=()) for t in episode.turns))


def _count_alike(counted: dict[str, Printed], lines: Sequence[str], episode: str) -> None:
    # alike: last lines that differ only in names and numbers
    kind = kind_of(plain(lines[-1])) if lines else ""
    if kind not in counted and len(counted) >= _KINDS:  # a policy can write lines that never repeat
        kind, lines = "others", ["(others)"]
    counted.setdefault(kind, Printed("\n".join(lines) or "(blanks)", example=episode)).count += 1
