"""Predictions: patches in the format of SWE-bench's harness.

Keys: ``instance_id``, ``model_name_or_path``, ``model_patch``. Also read: ``patch`` and ``prefix`` (SWE-bench Pro),
``prediction`` and ``model`` (SWE-bench's guide), ``test_result.git_patch`` (OpenHands), ``org``, ``repo``, ``number``
and ``fix_patch`` (Multi-SWE-bench).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.runs import codec, write_atomic
from coderepairrl.types import Ending, Episode

_MODEL_KEYS = ("model_name_or_path", "model", "prefix")
_PATCH_KEYS = ("model_patch", "patch", "prediction", "fix_patch", "git_patch")
_FIX = 'write one object a line: {"instance_id": "...", "model_name_or_path": "...", "model_patch": "..."}'


class Prediction(NamedTuple):
    """Patch by `model` for the task `instance`."""

    instance: str
    model: str
    patch: bytes

    @property
    def is_empty(self) -> bool:
        """Whether the patch is blank."""
        return not self.patch.strip()


def write_predictions(folder: Path, model: str, episodes: Iterable[Episode]) -> None:
    """Write ``predictions.jsonl``, further attempts to ``predictions-1.jsonl``, ...; omit void ones.

    Bytes that are not UTF-8 become surrogate escapes.
    """
    lines: dict[int, list[str]] = {0: []}
    for episode in episodes:
        if episode.ending is Ending.VOID:
            continue
        row = {
            "instance_id": episode.task_id,
            "model_name_or_path": model,
            "model_patch": episode.patch.decode("utf-8", "surrogateescape"),
        }
        lines.setdefault(episode.attempt, []).append(json.dumps(row) + "\n")
    for attempt, attempt_lines in lines.items():
        name = f"predictions-{attempt}.jsonl" if attempt else "predictions.jsonl"
        write_atomic(folder / name, "".join(attempt_lines))


def list_prediction_files(run: Path, evaluation: str) -> list[Path]:
    """Files of `write_predictions` for an evaluation, by attempt."""
    paths = (run / "eval" / f"{evaluation}-00000").glob("predictions*.jsonl")
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def read_predictions(path: Path) -> list[Prediction]:
    """Read JSON lines (perhaps ``.gz``), a JSON list, or an object keyed by instance.

    Repetitions count once. The default model is the file's name; a null patch is empty; a missing last newline is
    added. Raises `UsageError` for unreadable rows, missing keys, and conflicting patches.
    """
    predictions: dict[tuple[str, str], Prediction] = {}
    stem = codec.file_stem(path)
    for where, row in _read_prediction_objects(path):
        instance = row.get("instance_id")
        if instance is None and {"org", "repo", "number"} <= row.keys():
            instance = f"{row['org']}__{row['repo']}-{row['number']}"
        if not isinstance(instance, str) or not instance:
            raise UsageError(f"{path}, {where}: no instance_id", fix=_FIX)
        test_result = row.get("test_result")  # OpenHands nests the patch in it
        fields = {**test_result, **row} if isinstance(test_result, dict) else row
        key = next((key for key in _PATCH_KEYS if key in fields), "")
        if not key:
            raise UsageError(
                f"{path}, {where}: no patch of {instance}: none of {', '.join(_PATCH_KEYS)} is among its keys, "
                f"{', '.join(fields)}",
                fix=_FIX,
            )
        patch, model = fields[key], next((row[name] for name in _MODEL_KEYS if name in row), stem)
        if not isinstance(model, str) or not isinstance(patch, str | None):
            wrong = key if isinstance(model, str) else "the model"
            raise UsageError(f"{path}, {where}: {wrong} of {instance} is not text", fix=_FIX)
        text = patch or ""
        text += "" if text.endswith("\n") or not text.strip() else "\n"
        try:
            prediction = Prediction(instance, model, text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as error:
            raise UsageError(f"{path}, {where}: {key} of {instance} is not text: {error.reason}", fix=_FIX) from None
        if predictions.setdefault((model, instance), prediction) != prediction:
            raise UsageError(
                f"{path}, {where}: a second, different patch of {model} for {instance}",
                fix="write each attempt to a separate file, with one patch for each instance",
            )
    if not predictions:
        raise UsageError(f"{path} has no predictions", fix=_FIX)
    return list(predictions.values())


def _read_prediction_objects(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects in `path`, with positions for error messages."""
    try:
        text = codec.read_foreign_text(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}", fix="name a file of predictions") from error
    if ".jsonl" in path.suffixes:
        yield from ((f"line {number}", row) for number, row in codec.parse_foreign_lines(path, text, _FIX))
        return
    try:
        document = codec.parse_foreign_json(text)
    except ValueError as error:
        raise UsageError(f"{path}, the file: not read as JSON: {error}", fix=_FIX) from None
    if isinstance(document, dict) and "instance_id" not in document:
        document = [{"instance_id": key, **row} if isinstance(row, dict) else row for key, row in document.items()]
    is_list = isinstance(document, list)
    for number, row in enumerate(document if is_list else [document], 1):
        where = f"entry {number}" if is_list else "the file"
        if not isinstance(row, dict):
            raise UsageError(f"{path}, {where}: not an object", fix=_FIX)
        yield where, row
