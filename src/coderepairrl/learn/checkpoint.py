"""Exact checkpoints: trained tensors, optimiser state, counters."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import safetensors

from coderepairrl.errors import UsageError
from coderepairrl.learn import loading
from coderepairrl.learn.policy import Policy, find_constants
from coderepairrl.learn.strategy import SingleProcess
from coderepairrl.runs.storage import SUMS, find_damage, restore_old_folder, write_checksums

_OPTIMIZER = "optimizer"
_COUNTERS = "learner.json"
_SCHEMA = 2


def save_checkpoint(folder: Path, policy: Policy, strategy: SingleProcess, version: int, updates: int) -> None:
    """Write a checkpoint atomically, as a Hugging Face model or peft adapter."""
    with strategy.replace_atomically(folder) as temporary:
        strategy.run_or_fail_together(lambda: policy.save(temporary, is_writer=strategy.is_writer))
        moments = (
            (f"{key}.{name}", value)
            for name, parameter in policy.parameters.items()
            for key, value in strategy.iter_moments(parameter)
        )
        strategy.run_or_fail_together(
            lambda: loading.write_tensors(temporary, _OPTIMIZER, moments, is_writer=strategy.is_writer)
        )
        if strategy.is_writer:
            counters = {"schema": _SCHEMA, "version": version, "updates": updates}
            (temporary / _COUNTERS).write_text(json.dumps(counters) + "\n")
        strategy.run_or_fail_together(lambda: write_checksums(temporary) if strategy.is_writer else None)


def restore_checkpoint(folder: Path, policy: Policy, strategy: SingleProcess) -> tuple[int, int]:
    """Restore a checkpoint; returns version and updates.

    Raises `UsageError`, changing nothing, unless it is an intact checkpoint of this model.
    """
    strategy.run_or_fail_together(lambda: restore_old_folder(folder) if strategy.is_writer else None)
    problem = find_damage(folder) if strategy.is_writer else ""
    if problem := next(filter(None, strategy.gather(problem)), ""):
        raise UsageError(f"{folder} is not a whole checkpoint: {problem}")
    try:
        counters = json.loads((folder / _COUNTERS).read_text())
        version, updates, schema = counters["version"], counters["updates"], counters["schema"]
        if schema != _SCHEMA:
            raise UsageError(f"{folder} is a checkpoint of schema {schema}; this version reads {_SCHEMA}")
        if not (folder / SUMS).exists():
            raise UsageError(f"{folder} is not a whole checkpoint: {SUMS} is missing")
        with ExitStack() as files:
            moments = files.enter_context(loading.TensorFiles(folder, _OPTIMIZER))
            by_stem = policy.parameters_by_stem
            tensors = {stem: files.enter_context(loading.TensorFiles(folder, stem)) for stem in by_stem}
            for stem, parameters in by_stem.items():
                shapes = {name: strategy.get_whole_shape(p) for name, p in parameters.items()}
                if stem == loading.MODEL:
                    shapes |= {name: buffer.shape for name, buffer in find_constants(policy.model).items()}
                tensors[stem].check(shapes)
            for stem, parameters in by_stem.items():
                for name, parameter in parameters.items():
                    strategy.set_parameter(parameter, tensors[stem][name])
            keys: dict[str, list[str]] = {}  # of the optimiser state, by parameter
            for key_and_name in moments:
                key, _, name = key_and_name.partition(".")
                keys.setdefault(name, []).append(key)
            for name, parameter in policy.parameters.items():
                strategy.set_moments(parameter, {key: moments[f"{key}.{name}"] for key in keys.get(name, ())})
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise UsageError(f"{folder} is not a whole checkpoint: {error}") from error
    return version, updates
