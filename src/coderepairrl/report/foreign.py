"""Logs of other programs that evaluate, read without them: inspect_ai, Harbor, verifiers, rLLM.

An attempt counts as the program that wrote the log counts it: what it leaves out of its own mean is void. A log that is
incomplete, or lacks a field, is an error.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.runs import codec

RESOLVED = "resolved"
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_EPISODE = re.compile(r"episode_(\d+)_(.+)\.json")


class Row(NamedTuple):
    """One attempt at a task."""

    where: str
    """Place in the log, for messages."""
    task: str
    attempt: int | None
    policy: str
    scores: Mapping[str, Any]
    """Scores by name; ``resolved`` is what the program calls success."""
    fault: str = ""
    """Why a score is missing."""
    condition: tuple[str, str] = ("", "")
    """Name and value of what policies must share: a data set, or a task's checksum."""


def read_log(path: Path) -> list[Row] | None:
    """Read the attempts in `path`, a file or folder; None for other formats.

    Raises `UsageError` for logs that are damaged, incomplete or lack a field.
    """
    if path.is_dir():
        if (path / "result.json").is_file() and (path / "config.json").is_file():
            return list(_read_harbor(path))
        inside = [path / name for name in ("traces.jsonl", "results.jsonl", "results.json")]
        return next((rows for file in inside if file.is_file() and (rows := read_log(file)) is not None), None)
    if path.suffix == ".eval":
        return list(_read_inspect(path, *_unpack_inspect(path)))
    if path.name == "traces.jsonl":
        return list(_read_traces(path))
    if path.name == "results.jsonl" and (path.parent / "metadata.json").is_file():
        return list(_read_rollouts(path))
    document = _read_json(path) if path.suffix == ".json" else None
    if isinstance(document, dict) and {"version", "eval", "plan"} <= document.keys():
        return list(_read_inspect(path, document, document.get("samples")))
    if isinstance(document, dict) and {"dataset_name", "agent", "items"} <= document.keys():
        return list(_read_rllm(path, document))
    return None


def _read_json(path: Path) -> Any:
    """Parse `path`; None if it is not one JSON document, of which other readers say why."""
    try:
        return codec.parse_foreign_json(codec.read_foreign_text(path))
    except ValueError:
        return None


def _get_field(record: Any, name: str, kind: type | tuple[type, ...], where: object) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, kind):
        raise UsageError(f"{where} has no field {name!r}", fix="name a whole log, as the program wrote it")
    return value


# -- inspect_ai


def _unpack_inspect(path: Path) -> tuple[Any, Any]:
    if sys.version_info >= (3, 14):
        import zipfile
    else:
        from backports.zstd import zipfile  # zipfile reads Zstandard since 3.14
    try:
        with zipfile.ZipFile(path) as log:
            if "header.json" not in log.namelist():
                return {"status": "started"}, None
            return tuple(
                codec.parse_foreign_json(log.read(name).decode()) for name in ("header.json", "summaries.json")
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="copy the log again") from error


def _read_inspect(path: Path, log: Any, samples: Any) -> Iterator[Row]:
    status = _get_field(log, "status", str, path)
    if status != "success" or log.get("invalidated"):
        state = f"ended as {status!r}" if status != "success" else "has invalidated samples"
        reason = (log.get("error") or {}).get("message", "")
        raise UsageError(
            f"{path}: the evaluation {state}{reason and f': {reason}'}", fix=f"finish it: inspect eval-retry {path}"
        )
    total = _get_field(_get_field(log, "results", dict, path), "total_samples", int, path)
    if len(samples or ()) < total:
        raise UsageError(f"{path} has {len(samples or ())} of {total} samples", fix="evaluate without --no-log-samples")
    spec = _get_field(log, "eval", dict, path)
    dataset = (spec.get("dataset") or {}).get("name") or _get_field(spec, "task", str, path)
    for sample in samples:
        task, epoch = str(_get_field(sample, "id", (str, int), path)), _get_field(sample, "epoch", int, path)
        where = f"{path}, sample {task}, epoch {epoch}"
        scores: dict[str, Any] = {}
        for name, score in (sample.get("scores") or {}).items():
            value = _get_field(score, "value", object, where)
            parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
            scores |= {key: _as_inspect_number(part) for key, part in parts.items()}
        if len(scores) == 1:
            scores[RESOLVED] = next(iter(scores.values()))
        error = sample.get("error") or ("unscored" if any(value != value for value in scores.values()) else "")
        yield Row(
            where,
            task,
            epoch,
            _get_field(spec, "model", str, path),
            {name: value for name, value in scores.items() if value == value},  # NaN: inspect_ai's "unscored"
            str(error.get("message") if isinstance(error, dict) else error),
            ("inspect_ai.dataset", dataset),
        )


def _as_inspect_number(value: Any) -> Any:
    """Convert as inspect_ai's `value_to_float`; other values stay, to be refused.

    >>> [_as_inspect_number(value) for value in ("C", "P", "I", "N", "Yes", "0.25", True, "c")]
    [1.0, 0.5, 0.0, 0.0, 1.0, 0.25, 1.0, 'c']
    """
    word = str(value).lower()
    try:
        return _GRADES[value] if value in _GRADES else _WORDS[word] if word in _WORDS else float(value)
    except (TypeError, ValueError):
        return value


# -- Harbor


def _read_harbor(path: Path) -> Iterator[Row]:
    total = _get_field(_read_json(path / "result.json"), "n_total_trials", int, path / "result.json")
    trials = sorted(each.parent for each in path.glob("*/config.json"))
    finished = sum((each / "result.json").is_file() for each in trials)
    if finished < max(total, len(trials)):
        raise UsageError(f"{path} has {finished} of {total} trials", fix=f"finish it: harbor job resume -p {path}")
    attempts: Counter[tuple[str, str]] = Counter()
    for file in (each / "result.json" for each in trials):
        trial = _read_json(file)
        task, agent = _get_field(trial, "task_name", str, file), _get_field(trial, "agent_info", dict, file)
        model = (agent.get("model_info") or {}).get("name")
        policy = _get_field(agent, "name", str, file) + (f"__{model}" if model else "")
        rewards = dict((trial.get("verifier_result") or {}).get("rewards") or {})
        error = trial.get("exception_info") or {}
        if not rewards and not error:
            raise UsageError(
                f"{file} has neither a reward nor an exception", fix=f"verify it: harbor job regrade {path}"
            )
        if len(rewards) == 1 or "reward" in rewards:
            rewards[RESOLVED] = rewards.get("reward", next(iter(rewards.values())))
        attempts[policy, task] += 1
        yield Row(
            str(file),
            task,
            attempts[policy, task],
            policy,
            rewards if trial.get("reward_valid", True) else {},
            ": ".join(filter(None, (error.get("exception_type"), error.get("exception_message")))),
            (f"harbor.checksum.{task}", _get_field(trial, "task_checksum", str, file)),
        )


# -- verifiers


def _read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = codec.read_foreign_text(path)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="copy it again") from error
    for number, row in codec.parse_foreign_lines(path, text, "resume it: vf-eval ... --resume"):
        yield f"{path}:{number}", row


def _read_rollouts(path: Path) -> Iterator[Row]:
    """``results.jsonl`` of verifiers before 0.2; a reward of at least ``pass_threshold`` is a success, as in pass@k."""
    about = path.parent / "metadata.json"
    metadata, rows = _read_json(about), list(_read_lines(path))
    examples, each = (_get_field(metadata, name, int, about) for name in ("num_examples", "rollouts_per_example"))
    if len(rows) != examples * each:
        raise UsageError(f"{path} has {len(rows)} of {examples * each} rollouts", fix="finish it: vf-eval ... --resume")
    attempts: Counter[str] = Counter()
    for where, row in rows:
        task, reward = (
            str(_get_field(row, "example_id", (int, str), where)),
            _get_field(row, "reward", (int, float), where),
        )
        attempts[task] += 1
        resolved = reward >= metadata["pass_threshold"] if "pass_threshold" in metadata else reward
        yield Row(
            where,
            task,
            attempts[task],
            _get_field(metadata, "model", str, about),
            {**(row.get("metrics") or {}), "reward": reward, RESOLVED: resolved},
            condition=("verifiers.environment", _get_field(metadata, "env_id", str, about)),
        )


def _read_traces(path: Path) -> Iterator[Row]:
    """``traces.jsonl`` of verifiers since 0.2."""
    config = path.parent / "configs/resolved/eval.json"
    settings, episodes, attempts = _read_json(config), list(_read_lines(path)), Counter[str]()
    model, rollouts = (_get_field(settings, *each, config) for each in (("model", str), ("num_rollouts", int)))
    for where, episode in episodes:
        task, traces = _get_field(episode, "task", dict, where), _get_field(episode, "traces", list, where)
        if len(traces) > 1:
            raise UsageError(f"{where} has traces of {len(traces)} agents", fix="compare evaluations of one agent")
        name = _get_field(task, "data", dict, where).get("id") or _get_field(task, "key", str, where)
        scores = {}
        for trace in (each for each in traces if each.get("ok")):
            rewards = _get_field(trace, "rewards", dict, where)
            reward = sum(each["score"] * each["weight"] for each in rewards.values())
            scores = {key: each["score"] for key, each in rewards.items()} | trace.get("metrics", {})
            scores |= {"reward": reward, RESOLVED: reward}
        errors = [error for each in (episode, *traces) for error in each.get("errors", ())]
        attempts[name] += 1
        fault = "" if scores else ": ".join(errors[-1][key] for key in ("type", "message")) if errors else "not ok"
        condition = ("verifiers.environment", _get_field(_get_field(episode, "env", dict, where), "id", str, where))
        yield Row(where, name, attempts[name], model, scores, fault, condition)
    if short := next((task for task, number in attempts.items() if number < rollouts), ""):
        raise UsageError(
            f"{path} has {attempts[short]} of {rollouts} rollouts of {short}", fix="finish it: vf-eval ... --resume"
        )


# -- rLLM


def _read_rllm(path: Path, document: Any) -> Iterator[Row]:
    """``results.json`` of ``rllm eval``; tasks are named by the episodes beside it, else by their index."""
    items, attempts = _get_field(document, "items", list, path), document.get("attempts", 1)
    if len(items) != _get_field(document, "total", int, path):
        raise UsageError(f"{path} has {len(items)} of {document['total']} items", fix="run rllm eval again")
    found = (_EPISODE.fullmatch(each.name) for each in (path.parent / "episodes").glob("*.json"))
    names = {int(each[1]) // attempts: each[2] for each in found if each}
    for number, item in enumerate(items):
        where = f"{path}, item {number}"
        index = _get_field(item, "idx", int, where)
        if names and index not in names:
            raise UsageError(
                f"{path.parent / 'episodes'} has no episode of task {index}", fix="copy the whole run folder"
            )
        yield Row(
            where,
            names.get(index, str(index)),
            item.get("attempt", 0),
            "__".join(_get_field(document, name, str, path) for name in ("agent", "model")),
            {
                **(item.get("signals") or {}),
                "reward": _get_field(item, "reward", (int, float), where),
                RESOLVED: _get_field(item, "is_correct", bool, where),
            },
            condition=("rllm.dataset", _get_field(document, "dataset_name", str, path)),
        )
