"""Logs of other programs that evaluate, read without them: inspect_ai, Harbor, verifiers, rLLM.

An attempt that the program leaves out of its own mean is void. An incomplete log, or a missing field, is an error.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.runs import codec

RESOLVED = "resolved"
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # inspect_ai's: correct, partial, incorrect, no answer
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_EPISODE = re.compile(r"episode_(\d+)_(.+)\.json")  # rLLM's: number among all attempts, and task


class LogRow(NamedTuple):
    """Attempt at a task, as another program logged it."""

    where: str
    """Place in the log, for messages."""
    task: str
    policy: str
    scores: Mapping[str, Any]
    """Scores by name; ``resolved`` is what the program calls success."""
    fault: str = ""
    """Why a score is missing."""
    condition: tuple[str, str] = ("", "")
    """Name and value that compared policies must share: a data set, or a task's checksum."""
    attempt: int | None = None


def read_log(path: Path) -> list[LogRow] | None:
    """Read the attempts in `path`, a file or folder; None for other formats.

    Raises `UsageError` for logs that are damaged, incomplete or lack a field.
    """
    attempts, numbered = Counter[tuple[str, str]](), []
    try:
        if (rows := _open_reader(path)) is None:
            return None
        for row in rows:
            attempts[row.policy, row.task] += 1
            numbered.append(row._replace(attempt=attempts[row.policy, row.task]))
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not as its program writes it: {error!r}", fix="copy the log again") from error
    return numbered


def _open_reader(path: Path) -> Iterable[LogRow] | None:
    if path.is_dir():
        if (path / "result.json").is_file() and (path / "config.json").is_file():
            return _read_harbor(path)
        inside = (path / name for name in ("traces.jsonl", "results.jsonl", "results.json"))
        return next((rows for file in inside if file.is_file() and (rows := _open_reader(file)) is not None), None)
    if path.suffix == ".eval":
        return _read_inspect(path, *_unpack_inspect(path))
    if path.name == "traces.jsonl":
        return _read_traces(path)
    if path.name == "results.jsonl" and (metadata_file := path.with_name("metadata.json")).is_file():
        metadata = _read_json(metadata_file)
        return _read_rollouts(path, metadata) if "env_id" in metadata else None
    try:
        document = _read_json(path) if path.suffix == ".json" else None
    except UsageError:  # JSON lines, or damaged: the reader of outcome files reports it
        return None
    if isinstance(document, dict) and {"version", "eval", "plan"} <= document.keys():
        return _read_inspect(path, document, document.get("samples"))
    is_rllm = isinstance(document, dict) and {"dataset_name", "agent", "items"} <= document.keys()
    return _read_rllm(path, document) if is_rllm else None


def read_text(path: Path) -> str:
    """Read UTF-8, or gzip of it. Raises `UsageError`."""
    try:
        return codec.read_foreign_text(path)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="name a log, or a file of JSON lines") from error


def _read_json(path: Path) -> Any:
    try:
        return codec.parse_foreign_json(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path} is not read as JSON: {error}", fix="copy the log again") from error


def _get_field(record: Any, name: str, kind: type | tuple[type, ...], where: object) -> Any:
    value = record.get(name)
    if not isinstance(value, kind):
        raise UsageError(f"{where} has no field {name!r}", fix="name a complete log, as the program wrote it")
    return value


def _check_complete(path: Path, count: int, planned: int, what: str, fix: str) -> None:
    if count != planned:
        raise UsageError(f"{path} has {count} of {planned} {what}", fix=f"finish it: {fix}")


# -- inspect_ai


def _unpack_inspect(path: Path) -> tuple[Any, Any]:
    if sys.version_info >= (3, 14):
        import zipfile
    else:
        from backports.zstd import zipfile  # zipfile reads Zstandard since 3.14
    try:
        with zipfile.ZipFile(path) as log:
            if "header.json" not in log.namelist():
                return {"status": "started"}, None  # inspect_ai writes it last
            return tuple(
                codec.parse_foreign_json(log.read(name).decode()) for name in ("header.json", "summaries.json")
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="copy the log again") from error


def _read_inspect(path: Path, log: Any, samples: Any) -> Iterator[LogRow]:
    status = _get_field(log, "status", str, path)
    if status != "success" or log.get("invalidated"):
        state = "has invalidated samples" if status == "success" else f"has the status {status!r}, not 'success'"
        reason = (log.get("error") or {}).get("message", "")
        raise UsageError(f"{path} {state}{reason and f': {reason}'}", fix=f"finish it: inspect eval-retry {path}")
    total = _get_field(_get_field(log, "results", dict, path), "total_samples", int, path)
    _check_complete(path, len(samples or ()), total, "samples", "inspect eval, without --no-log-samples")
    spec = _get_field(log, "eval", dict, path)
    model = _get_field(spec, "model", str, path)
    condition = ("inspect_ai.dataset", (spec.get("dataset") or {}).get("name") or _get_field(spec, "task", str, path))
    for sample in samples:
        task = str(_get_field(sample, "id", (str, int), path))
        scores: dict[str, Any] = {}
        for name, score in (sample.get("scores") or {}).items():
            value = score["value"]
            parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
            scores |= {key: _as_inspect_number(part) for key, part in parts.items()}
        if len(scores) == 1:
            scores[RESOLVED] = next(iter(scores.values()))
        scored = {name: value for name, value in scores.items() if value == value}  # NaN: inspect_ai's "unscored"
        error = sample.get("error") or ("unscored" if len(scored) < len(scores) else "")
        fault = str(error["message"] if isinstance(error, dict) else error)
        yield LogRow(f"{path}, sample {task}, epoch {sample['epoch']}", task, model, scored, fault, condition)


def _as_inspect_number(value: Any) -> Any:
    """Convert as inspect_ai's `value_to_float`; other values stay, to be refused.

    >>> [_as_inspect_number(value) for value in ("C", "P", "I", "N", "Yes", "0.25", True, "c")]
    [1.0, 0.5, 0.0, 0.0, 1.0, 0.25, 1.0, 'c']
    """
    if isinstance(value, str):
        value = _GRADES.get(value, _WORDS.get(value.lower(), value))
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


# -- Harbor


def _read_harbor(path: Path) -> Iterator[LogRow]:
    total = _get_field(_read_json(path / "result.json"), "n_total_trials", int, path / "result.json")
    files = sorted(path.glob("*/result.json"))
    _check_complete(path, len(files), total, "trials", f"harbor job resume -p {path}")
    for file in files:
        trial = _read_json(file)
        task, agent = _get_field(trial, "task_name", str, file), _get_field(trial, "agent_info", dict, file)
        policy = "__".join(filter(None, (agent["name"], (agent.get("model_info") or {}).get("name"))))
        rewards = dict((trial.get("verifier_result") or {}).get("rewards") or {})
        error = trial.get("exception_info") or {}
        if not rewards and not error:
            raise UsageError(f"{file} has neither reward nor exception", fix=f"verify it: harbor job regrade {path}")
        if len(rewards) == 1 or "reward" in rewards:
            rewards[RESOLVED] = rewards.get("reward", next(iter(rewards.values())))
        fault = ": ".join(str(error.get(f"exception_{each}")) for each in ("type", "message")) if error else ""
        checksum = (f"harbor.checksum.{task}", _get_field(trial, "task_checksum", str, file))
        yield LogRow(str(file), task, policy, rewards if trial.get("reward_valid", True) else {}, fault, checksum)


# -- verifiers


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    rows = codec.parse_foreign_lines(path, read_text(path), "finish it: vf-eval ... --resume")
    return [(f"{path}:{number}", row) for number, row in rows]


def _read_rollouts(path: Path, metadata: Any) -> Iterator[LogRow]:
    """``results.jsonl`` of verifiers before 0.2; a reward of at least ``pass_threshold`` is a success, as in pass@k."""
    rows, metadata_file = _read_lines(path), path.with_name("metadata.json")
    sizes = ("num_examples", "rollouts_per_example")
    planned = math.prod(_get_field(metadata, each, int, metadata_file) for each in sizes)
    _check_complete(path, len(rows), planned, "rollouts", "vf-eval ... --resume")
    model, condition = _get_field(metadata, "model", str, metadata_file), ("verifiers.environment", metadata["env_id"])
    for where, row in rows:
        reward = _get_field(row, "reward", (int, float), where)
        resolved = reward >= metadata["pass_threshold"] if "pass_threshold" in metadata else reward
        scores = {**(row.get("metrics") or {}), "reward": reward, RESOLVED: resolved}
        yield LogRow(where, str(_get_field(row, "example_id", (int, str), where)), model, scores, "", condition)


def _read_traces(path: Path) -> Iterator[LogRow]:
    """``traces.jsonl`` of verifiers since 0.2."""
    settings, attempts = _read_json(path.parent / "configs/resolved/eval.json"), Counter[str]()
    for where, episode in _read_lines(path):
        task, traces = _get_field(episode, "task", dict, where), _get_field(episode, "traces", list, where)
        if len(traces) > 1:
            raise UsageError(f"{where} has traces of {len(traces)} agents", fix="compare evaluations of one agent")
        name = task["data"].get("id") or _get_field(task, "key", str, where)
        scores: dict[str, float] = {}
        for trace in (each for each in traces if each["ok"]):
            reward = sum(each["score"] * each["weight"] for each in trace["rewards"].values())
            scores = {key: each["score"] for key, each in trace["rewards"].items()} | trace["metrics"]
            scores |= {"reward": reward, RESOLVED: reward}
        errors = [f"{error['type']}: {error['message']}" for each in (episode, *traces) for error in each["errors"]]
        attempts[name] += 1
        condition = ("verifiers.environment", episode["env"]["id"])
        yield LogRow(where, name, settings["model"], scores, "" if scores else [*errors, "not ok"][0], condition)
    for name, number in attempts.items():
        _check_complete(path, number, settings["num_rollouts"], f"rollouts of {name}", "vf-eval ... --resume")


# -- rLLM


def _read_rllm(path: Path, document: Any) -> Iterator[LogRow]:
    """``results.json`` of ``rllm eval``; tasks are named by the episodes beside it, else by their index."""
    items, model = _get_field(document, "items", list, path), f"{document['agent']}__{document['model']}"
    _check_complete(path, len(items), _get_field(document, "total", int, path), "items", "rllm eval")
    matches = (_EPISODE.fullmatch(each.name) for each in (path.parent / "episodes").glob("*.json"))
    names = {int(each[1]) // document.get("attempts", 1): each[2] for each in matches if each}
    for number, item in enumerate(items):
        where, index = f"{path}, item {number}", _get_field(item, "idx", int, path)
        if names and index not in names:
            raise UsageError(f"{path.parent}/episodes has no episode of task {index}", fix="copy the whole folder")
        scores = {**(item.get("signals") or {}), "reward": _get_field(item, "reward", (int, float), where)}
        scores[RESOLVED] = _get_field(item, "is_correct", bool, where)
        yield LogRow(where, names.get(index, str(index)), model, scores, "", ("rllm.dataset", document["dataset_name"]))
