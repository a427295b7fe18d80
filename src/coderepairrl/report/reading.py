"""Contents of a run for its report: its episodes with a verdict, and notices of damage."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from coderepairrl.agents.tools import ToolStats, count_tool_calls
from coderepairrl.errors import CodeRepairError
from coderepairrl.report.rows import EpisodeRows, Record
from coderepairrl.runs import RunFolder, codec
from coderepairrl.stats.measures import Notes, fit_one_line, get_note_kind
from coderepairrl.types import Ending, Episode, Origin, TokenSpan, Turn

_SAMPLE_LINES, _MAX_KINDS = 8, 200


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """Episode with a verdict, in little memory."""

    episode: Episode
    """Without turns, calls and output."""
    tools: ToolStats
    tokens: int
    """Sampled and given tokens."""
    busy: tuple[tuple[float, float], ...]
    """Spans of the engine's work on it, in Unix seconds."""


@dataclass(slots=True)
class OutputSample:
    """Last output of an attempt without a patch, or a fault; `count` attempts ended alike."""

    end: str
    count: int = 0
    example: str = ""


@dataclass(slots=True)
class RunData:
    """Contents of a run folder."""

    folder: RunFolder
    about: Mapping[str, Any]
    rows: EpisodeRows
    config: Mapping[str, Any] = field(default_factory=dict)
    """Flat: ``train.lr`` and so on."""
    notices: list[str] = field(default_factory=list)
    judged: dict[str, JudgedEpisode] = field(default_factory=dict)
    evaluated: dict[tuple[str, int], dict[tuple[str, int], Episode]] = field(default_factory=dict)
    """Evaluation episodes by (name, step), then (group, attempt); a void one only if none is valid."""
    notes: Notes = field(default_factory=Notes)
    printed: dict[str, OutputSample] = field(default_factory=dict)
    faults: dict[str, OutputSample] = field(default_factory=dict)


def read_run(folder: RunFolder, rows: EpisodeRows) -> RunData:
    """Read the episodes of `rows`; what cannot be read becomes a notice."""
    data, follower = RunData(folder, folder.about(), rows), rows.follower
    try:
        data.config = flatten_settings(tomllib.loads(folder.config.read_text()))
    except (OSError, ValueError) as error:
        data.notices.append(f"The configuration cannot be read ({error}).")
    if not folder.log.is_file():
        data.notices.append("There is no log.jsonl: only the configuration of this run is known.")
        return data
    if follower.has_torn_line:
        data.notices.append("The log's last line is incomplete: the run is writing it, or a crash cut it off.")
    for name in rows.by_id:
        try:
            if (episode := follower.verdict(name)) is not None:
                _add_episode_data(data, episode, list(follower.turn_records(name)))
        except (CodeRepairError, ValueError, TypeError, LookupError) as error:
            follower.notice = follower.notice or str(error)
    if follower.notice:
        data.notices.append(f"{follower.notice[0].upper()}{follower.notice[1:]}.")
    return data


def flatten_settings(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys.

    >>> flatten_settings({"train": {"lr": 1e-4}, "eval": {}})
    {'train.lr': 0.0001}
    """
    settings: dict[str, Any] = {}
    for key, value in data.items():
        settings |= flatten_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return settings


def to_plain_data(value: Any) -> Any:
    """Convert to plain data, dataclasses and named tuples included; non-finite numbers become null."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value) if each.repr}
    if isinstance(value, Mapping):
        return {str(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _add_episode_data(data: RunData, episode: Episode, turns: Sequence[Record]) -> None:
    data.judged[episode.id] = JudgedEpisode(
        episode=replace(episode, tool_calls=(), printed="", fault=""),
        tools=count_tool_calls(episode.tool_calls),
        tokens=sum(len(turn[span]["ids"]) for turn in turns for span in ("given", "output", "tail")),
        busy=tuple((turn["started"], turn["ended"]) for turn in turns),
    )
    data.notes.add(episode)
    if episode.printed and not episode.patch:
        _count_output(data.printed, episode.printed.strip().splitlines()[-_SAMPLE_LINES:], episode.id)
    if episode.ending is Ending.VOID:
        cause = (episode.fault.strip().splitlines() or ["unknown"])[0]
        _count_output(data.faults, [f"{episode.reason}: {cause}"], episode.id)
    if episode.phase == "train":
        return  # not restoring the turns of training episodes halves the reading time
    evaluation = data.evaluated.setdefault((episode.phase, episode.step), {})
    key = (episode.group, episode.attempt)
    if key not in evaluation or evaluation[key].ending is Ending.VOID:
        nothing = TokenSpan((), Origin.GIVEN)  # a report needs sampled tokens only
        ordered = sorted((codec.restore(Turn, turn) for turn in turns), key=lambda turn: turn.index)
        evaluation[key] = replace(episode, turns=tuple(replace(turn, given=nothing, messages=()) for turn in ordered))


def _count_output(counted: dict[str, OutputSample], lines: Sequence[str], episode: str) -> None:
    # outputs are alike if their last lines differ only in names and numbers
    kind = get_note_kind(fit_one_line(lines[-1])) if lines else ""
    if kind not in counted and len(counted) >= _MAX_KINDS:  # a policy can write lines that never repeat
        kind, lines = "others", ["(others)"]
    counted.setdefault(kind, OutputSample("\n".join(lines) or "(blanks)", example=episode)).count += 1
