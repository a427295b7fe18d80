"""Model folders in Hugging Face layout: shipped ones, and the user's."""

from __future__ import annotations

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from coderepairrl.errors import UsageError
from coderepairrl.models import hub
from coderepairrl.registry import nearest, nearest_run

_BUILTIN = "builtin:"
_RUN = "run.json"
_ADAPTER = "adapter_config.json"
QUANTISED = "quantised.json"
"""File that records how a model's weights were quantised before being written out."""


def files(folder: Path) -> list[Path]:
    """Files of a model that a run reads: weights, configuration, tokenizer and template."""
    return [file for file in sorted(folder.iterdir()) if file.suffix in hub.READ and file.is_file()]


def quantised(folder: Path) -> str:
    """Quantised form of the written-out weights, or ""."""
    mark = folder / QUANTISED
    return str(json.loads(mark.read_text("utf-8"))["form"]) if mark.is_file() else ""


def quant_method(folder: Path) -> str | None:
    """Method (``awq``, ``fp8``, ...) of codes in place of weights, or None. Raises OSError and ValueError."""
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    codes = raw.get("quantization_config") if isinstance(raw, dict) else None
    return str(codes.get("quant_method")) if codes else None


def require_plain_weights(folder: Path) -> None:
    """Raise `UsageError` for a model with a `quant_method`. Raises as `quant_method`."""
    if method := quant_method(folder):
        raise UsageError(
            f"the weights in {folder} are quantised (quant_method={method}), and the learner reads plain weights",
            fix="name the model as it was published, with model.quantise=nf4 to hold it in 4 bits",
        )


class Named(NamedTuple):
    """Model behind a name: a folder in Hugging Face layout, and adapters, if any."""

    folder: Path
    adapter: Path | None = None
    run: Path | None = None
    """Run of the checkpoint."""


def named(path: str) -> Named:
    """Resolve `path`: a folder in Hugging Face layout or of peft adapters, ``builtin:NAME``, a fetched model of the hub
    (``org/name@revision``), a checkpoint, or a run (its newest). Raises `UsageError`."""
    location = Path(path).expanduser()
    if (location / _RUN).is_file():
        saved = sorted(
            (each for each in location.glob("checkpoints/[0-9]*") if each.name.isdigit()),
            key=lambda each: int(each.name),
        )
        if not saved:
            if "policy" in json.loads((location / _RUN).read_text("utf-8")):
                raise UsageError(f"{location} is an evaluation: it has trained no model", fix="name the run that has")
            raise UsageError(
                f"{location} has no checkpoint yet", fix="let it train on (run.checkpoint_every says how far)"
            )
        location = saved[-1]
    run = location.parent.parent if (location.parent.parent / _RUN).is_file() else None
    if not (location / _ADAPTER).is_file():
        return Named(folder(str(location) if run else path), run=run)
    try:
        if run is None:
            base = json.loads((location / _ADAPTER).read_text("utf-8"))["base_model_name_or_path"]
        elif (run / "model").is_dir():  # drawn for it, or merged
            base = run / "model"
        else:
            base = tomllib.loads((run / "config.toml").read_text("utf-8"))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{location} does not say on which model its adapters are: {error!r}") from None
    below = named(str(base))
    if below.adapter is not None:
        raise UsageError(f"{location} has adapters on adapters, {below.adapter}", fix="crrl export merges those below")
    return Named(below.folder, location, run)


WITH_LANGUAGE = ("qwen3_5", "qwen3_5_moe")
"""``model_type`` of multimodal models whose language model is a separate architecture."""


def multimodal(folder: Path) -> bool:
    """Whether the model has a separable language model. Raises OSError, ValueError."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return config.get("model_type") in WITH_LANGUAGE and "text_config" in config


def folder(path: str, *, weights: bool = False) -> Path:
    """Folder of the model that `path` names (`named`), below any adapters. Raises `UsageError` if it, or its `weights`,
    are missing."""
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files(__name__)))
        location = home / path.removeprefix(_BUILTIN)
        fix = nearest(path.removeprefix(_BUILTIN), (each.parent.name for each in home.glob("*/config.json")))
    elif hub.is_name(path):
        cached = hub.find_cached(path)
        if cached is None:
            raise UsageError(
                f"{path} is no model: there is no such folder, and it was not fetched from the hub",
                fix=f"name a folder, or start the run: it fetches the model. By hand: {hub.download_command(path)}",
            )
        location, fix = cached, f"fetch it again: {hub.download_command(path)}"
    else:
        location = Path(path).expanduser()
        if (location / _RUN).is_file() or (location / _ADAPTER).is_file():
            location = named(path).folder
        fix = _advice(path)
    if not (location / "config.json").is_file():
        problem = "it has no config.json" if location.is_dir() else "there is no such folder"
        raise UsageError(f"{_shown(path, location)} is no model: {problem}", fix=fix)
    if weights and not any(location.glob("*.safetensors")):
        raise UsageError(
            f"{_shown(path, location)} has no weights (*.safetensors)", fix="download them, or set model.init=random"
        )
    return location


def _shown(path: str, found: Path) -> str:
    return path if path == str(found) else f"{path} ({found})"


def _advice(path: str) -> str:
    location = Path(path).expanduser()
    if advice := nearest_run(location):
        return advice if location.exists() else f"there is no such run: {advice}"
    if not location.exists() and location.parent.name == "runs":
        return f"there is no run in {location.parent}"
    return (
        "name a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), a run, a checkpoint, a "
        "folder of adapters, builtin:tiny, or org/name@revision of the hub "
        "(crrl fix and crrl serve also take the URL of an API: https://.../v1)"
    )
