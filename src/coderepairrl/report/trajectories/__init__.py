"""Export of episodes: trajectories with token ids, and a table of chats.

Trajectories are in Harbor's Agent Trajectory Interchange Format (ATIF) 1.7, with original ids
(harborframework.com/docs/trajectory-format). The table is Parquet, a row per episode, for `datasets`, pandas and
chat trainers.

Both hold conversations, patches and scores, but no configuration, servers or program output.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from coderepairrl.report.trajectories.chats import (
    Chat,
    SampledMessage,
    convert_to_chat_message,
    has_secrets,
    list_chats,
    redact_patch,
    redact_text,
)
from coderepairrl.runs import codec
from coderepairrl.runs.storage import replace_folder, write_table
from coderepairrl.stats.outcomes import is_resolved
from coderepairrl.types import Ending, Episode, Turn, sequence

__all__ = ["ExportSource", "write_atif", "write_parquet"]
VERSION = "ATIF-v1.7"
_MAX_DEPTH = 100  # of arguments; deeper JSON can be read, but not written
_NO_CHAT = Chat((), side=False)


def write_parquet(run: str, episodes: Iterable[Episode], path: Path) -> int:
    """Write `episodes` to `path`, atomically; return their number. Raises OSError."""
    schema = _make_arrow_schema(importlib.import_module("pyarrow"))
    return write_table(path, schema, (make_episode_row(run, episode) for episode in episodes))


def make_episode_row(run: str, episode: Episode) -> dict[str, Any]:
    """Row of an episode; without reward if void."""
    main, *further = [
        {"side": chat.side, "messages": [convert_to_chat_message(message) for message, _ in chat.messages]}
        for chat in list_chats(episode) or [_NO_CHAT]
    ]
    return {
        "messages": main["messages"],
        **_list_result_fields(run, episode),
        "resolved": is_resolved(episode),
        "id": episode.id,
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


def _list_result_fields(run: str, episode: Episode) -> dict[str, Any]:
    return {
        "run": run,
        "task": episode.task_id,
        **{key: getattr(episode, key) for key in ("phase", "step", "group", "attempt")},
        "ending": str(episode.ending),
        "reason": redact_text(episode.reason),
        "reward": None if episode.ending is Ending.VOID else episode.reward,
        "scores": [{**codec.dump(score), "note": redact_text(score.note)} for score in episode.scores],
        "patch": redact_patch(episode.patch),
    }


def _make_arrow_schema(arrow: Any) -> Any:
    # fixed, not inferred from the contents: several files load as one data set
    def struct(**fields: Any) -> Any:
        return arrow.struct(list(fields.items()))

    text, number = arrow.string(), arrow.float64()
    call = struct(id=text, type=text, function=struct(name=text, arguments=text))
    messages = struct(role=text, content=text, reasoning_content=text, tool_calls=arrow.list_(call), tool_call_id=text)
    score = struct(name=text, value=number, weight=number, note=text, passed=arrow.bool_(), nearest=text)
    other = struct(side=arrow.bool_(), messages=arrow.list_(messages))
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


class ExportSource(NamedTuple):
    """Run whose episodes are exported."""

    run: str
    agents: Mapping[str, str]  # agents by kind of task; ``""``: other kinds
    version: str  # version of this package
    model: str
    """Empty for a model behind a URL; replies may name it."""


def write_atif(source: ExportSource, episodes: Iterable[Episode], folder: Path) -> int:
    """Write `episodes` to ``ID.json`` in `folder`, atomically; return their number. Raises OSError."""
    count = 0
    with replace_folder(folder) as temporary:
        for episode in episodes:
            text = json.dumps(convert_to_atif(source, episode), separators=(",", ":"))
            (temporary / f"{quote(episode.id, safe='')}.json").write_text(text)
            count += 1
    return count


def convert_to_atif(source: ExportSource, episode: Episode) -> dict[str, Any]:
    """Convert an episode to an ATIF document: the main conversation, with others embedded.

    Agent steps have prompt ids, sampled ids and logprobs; steps that an earlier conversation has, too, are
    marked as copied. If a text contains a secret, ids and logprobs are left out: they encode it.
    """
    conversations = list_chats(episode) or [_NO_CHAT]
    with_ids = not any(map(has_secrets, conversations))
    exported_turns: set[int] = set()
    main, *further = [
        _make_document(source, episode, chat, exported_turns, with_ids=with_ids) for chat in conversations
    ]
    main["trajectory_id"] = episode.id
    for number, other in enumerate(further, 1):
        other["trajectory_id"] = f"{episode.id}-{number}"
    main["extra"] = _list_result_fields(source.run, episode)
    if further:
        main["subagent_trajectories"] = further
    if not with_ids:
        main["notes"] = "Secrets were taken out of the texts, and token ids and logprobs with them."
    return main


def _make_document(
    source: ExportSource, episode: Episode, chat: Chat, exported_turns: set[int], *, with_ids: bool
) -> dict[str, Any]:
    steps = _make_atif_steps(episode.turns, chat.messages, exported_turns, with_ids=with_ids)
    exported_turns |= {turn.index for _, turn in chat.messages if turn is not None}
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "schema_version": VERSION,
        "session_id": episode.id,
        "agent": {
            "name": source.agents.get(episode.kind, source.agents[""]),
            "version": source.version,
            **({"model_name": source.model} if source.model else {}),
        },
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
            "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
            "total_steps": len(steps),
        },
        "extra": {"side": chat.side},
    }


def _make_atif_steps(
    turns: Sequence[Turn], messages: Iterable[SampledMessage], exported_turns: set[int], *, with_ids: bool
) -> list[dict[str, Any]]:
    # a tool's result belongs to the step that called it
    steps: list[dict[str, Any]] = []
    for raw, turn in messages:
        message = convert_to_chat_message(raw)
        if message["role"] == "tool" and steps and steps[-1]["source"] == "agent":
            called = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())]
            source_call = {"source_call_id": message["tool_call_id"]} if message["tool_call_id"] in called else {}
            results = steps[-1].setdefault("observation", {"results": []})["results"]
            results.append({**source_call, "content": message["content"]})
            continue
        source = {"assistant": "agent", "system": "system"}.get(message["role"], "user")
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": message["content"]}
        if source == "agent":
            if message["tool_calls"]:
                step["tool_calls"] = [_convert_call_to_atif(call) for call in message["tool_calls"]]
            step |= _list_sampling_fields(turns, turn, message, with_ids=with_ids) if turn else {"llm_call_count": 0}
            if turn and turn.index in exported_turns:
                step["is_copied_context"] = True
        steps.append(step)
    return steps


def _convert_call_to_atif(call: Mapping[str, Any]) -> dict[str, Any]:
    # arguments that are no JSON object, or one too deep to write, become the argument ``text``
    written = call["function"]["arguments"]
    try:
        arguments = json.loads(written, parse_constant=str, parse_float=_parse_finite_float)
        arguments = arguments if _measure_depth(arguments) <= _MAX_DEPTH else None
    except (ValueError, RecursionError):
        arguments = None
    return {
        "tool_call_id": call["id"],
        "function_name": call["function"]["name"],
        "arguments": arguments if isinstance(arguments, dict) else {"text": written},
    }


def _parse_finite_float(written: str) -> float | str:
    # 1e999 is JSON, but Python would write it as Infinity, which is not
    value = float(written)
    return value if math.isfinite(value) else written


def _measure_depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_measure_depth, inner), default=0)


def _list_sampling_fields(
    turns: Sequence[Turn], turn: Turn, message: Mapping[str, Any], *, with_ids: bool
) -> dict[str, Any]:
    prompt = sequence(turns, turn.index)  # ends with the output
    prompt = prompt[: len(prompt) - len(turn.output)]
    usage = turn.remote.get("usage") or {}
    metrics: dict[str, Any] = {
        "prompt_tokens": usage.get("prompt_tokens", len(prompt)),
        "completion_tokens": usage.get("completion_tokens", len(turn.output)),
    }
    if with_ids and turn.output.ids:
        metrics |= {
            "prompt_token_ids": list(prompt),
            "completion_token_ids": list(turn.output.ids),
            "logprobs": list(turn.output.logprobs),
        }
    versions = [[span.version, span.start, span.end] for span in turn.versions]
    extra = {"finish": str(turn.finish), "policy_versions": versions, "masked": turn.masked}
    return {
        "timestamp": datetime.fromtimestamp(turn.ended, UTC).isoformat(),
        "metrics": metrics,
        "llm_call_count": 1,
        **({"model_name": redact_text(str(turn.remote["model"]))} if turn.remote.get("model") else {}),
        **({"reasoning_content": message["reasoning_content"]} if message["reasoning_content"] else {}),
        "extra": {key: value for key, value in extra.items() if value},
    }
