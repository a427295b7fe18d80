"""Export of episodes: trajectories with token ids, and a table of chats: Parquet, for `datasets` and chat trainers.

Both hold conversations, patches and scores, but no configuration, servers or program output.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from coderepairrl.report.trajectories.atif import Origin, write_atif
from coderepairrl.report.trajectories.chats import chats, clean, clean_patch, message
from coderepairrl.runs import codec
from coderepairrl.runs.storage import replace_file
from coderepairrl.stats import is_resolved
from coderepairrl.types import Ending, Episode

__all__ = ["Origin", "write_atif", "write_parquet"]
_ROWS = 128


def write_parquet(run: str, episodes: Iterable[Episode], path: Path) -> int:
    """Write `episodes` to `path`, atomically; return their number. Raises OSError."""
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    schema, count = _schema(arrow), 0
    with replace_file(path) as temporary, parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        table_rows = (episode_row(run, episode) for episode in episodes)
        while rows := list(islice(table_rows, _ROWS)):
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


def episode_row(run: str, episode: Episode) -> dict[str, Any]:
    """Row of an episode; without reward if void."""
    main, *further = [
        {"side": chat.side, "messages": [message(sent) for sent, _ in chat.said]} for chat in chats(episode)
    ] or [{"messages": []}]
    void = episode.ending is Ending.VOID
    return {
        "messages": main["messages"],
        "reward": None if void else episode.reward,
        "resolved": is_resolved(episode),
        "task": episode.task_id,
        "phase": episode.phase,
        "step": episode.step,
        "group": episode.group,
        "attempt": episode.attempt,
        "id": episode.id,
        "run": run,
        "ending": str(episode.ending),
        "reason": clean(episode.reason),
        "patch": clean_patch(episode.patch),
        "scores": [{**codec.dump(score), "note": clean(score.note)} for score in episode.scores],
        "offered_tools": sorted({tool for turn in episode.turns for tool in turn.tools}),
        "sampled_tokens": episode.sampled,
        "seconds": episode.timings.get("total"),
        "policy_versions": sorted({span.version for turn in episode.turns for span in turn.versions}),
        "kind": episode.kind,
        "language": episode.language,
        "repository": episode.repository,
        "difficulty": episode.difficulty,
        "other_conversations": further,
    }


def _schema(arrow: Any) -> Any:
    # independent of the contents: several files load as one data set
    text, number = arrow.string(), arrow.float64()
    function = arrow.struct([("name", text), ("arguments", text)])
    call = arrow.struct([("id", text), ("type", text), ("function", function)])
    messages = arrow.struct(
        [
            *((name, text) for name in ("role", "content", "reasoning_content")),
            ("tool_calls", arrow.list_(call)),
            ("tool_call_id", text),
        ]
    )
    score = arrow.struct(
        [
            ("name", text),
            ("value", number),
            ("weight", number),
            ("note", text),
            ("passed", arrow.bool_()),
            ("nearest", text),
        ]
    )
    other = arrow.struct([("side", arrow.bool_()), ("messages", arrow.list_(messages))])
    return arrow.schema(
        [
            *(("messages", arrow.list_(messages)), ("reward", number), ("resolved", arrow.bool_()), ("task", text)),
            *(("phase", text), ("step", arrow.int64()), ("group", text), ("attempt", arrow.int64()), ("id", text)),
            *((name, text) for name in ("run", "ending", "reason", "patch")),
            *(("scores", arrow.list_(score)), ("offered_tools", arrow.list_(text))),
            *(("sampled_tokens", arrow.int64()), ("seconds", number)),
            ("policy_versions", arrow.list_(arrow.int64())),
            *((name, text) for name in ("kind", "language", "repository")),
            *(("difficulty", number), ("other_conversations", arrow.list_(other))),
        ]
    )
