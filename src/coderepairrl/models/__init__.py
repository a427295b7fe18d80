"""Model folders in Hugging Face layout: those that ship with the package, and a user's."""

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
"""A file in the folder of a model whose weights have the numbers of quantised ones: how it was quantised."""


def files(folder: Path) -> list[Path]:
    """The files of a model's `folder` that a run reads: its weights, configuration, tokenizer and template."""
    return [file for file in sorted(folder.iterdir()) if file.suffix in hub.READ and file.is_file()]


def quantised(folder: Path) -> str:
    """How the numbers of the weights in `folder` were quantised, before they were written out there; "" if they were
    not, or are no longer those."""
    mark = folder / QUANTISED
    return str(json.loads(mark.read_text("utf-8"))["form"]) if mark.is_file() else ""


def quant_method(folder: Path) -> str | None:
    """Name the method (``awq``, ``fp8``, ...) of the codes that a model's files have in place of weights; None without.

    Raises OSError and ValueError for what is no config.
    """
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    codes = raw.get("quantization_config") if isinstance(raw, dict) else None
    return str(codes.get("quant_method")) if codes else None


def require_plain_weights(folder: Path) -> None:
    """Raise `UsageError` where the model in `folder` has a `quant_method`, and what `quant_method` raises."""
    if method := quant_method(folder):
        raise UsageError(
            f"the weights in {folder} are quantised (quant_method={method}), and the learner reads plain weights",
            fix="name the model as it was published, with model.quantise=nf4 to hold it in 4 bits",
        )


class Named(NamedTuple):
    """What a model's name stands for: a folder in Hugging Face layout, and adapters on it if there are any."""

    folder: Path
    adapter: Path | None = None
    run: Path | None = None
    """The run whose checkpoint it is."""


def named(path: str) -> Named:
    """The model that `path` names: a folder in Hugging Face layout, ``builtin:NAME``, one of the hub (``org/name``,
    ``org/name@revision``) that was fetched, a folder of adapters in peft's layout, a checkpoint of a run, or a run
    folder, which stands for its newest checkpoint.

    Adapters of a run are on the model that it began from, others on the one that their ``adapter_config.json`` names.
    Raises `UsageError` when there is no such model.
    """
    found = Path(path).expanduser()
    if (found / _RUN).is_file():
        saved = sorted(
            (each for each in found.glob("checkpoints/[0-9]*") if each.name.isdigit()), key=lambda each: int(each.name)
        )
        if not saved:
            if "policy" in json.loads((found / _RUN).read_text("utf-8")):
                raise UsageError(f"{found} is an evaluation: it has trained no model", fix="name the run that has")
            raise UsageError(
                f"{found} has no checkpoint yet", fix="let it train on (run.checkpoint_every says how far)"
            )
        found = saved[-1]
    run = found.parent.parent if (found.parent.parent / _RUN).is_file() else None
    if not (found / _ADAPTER).is_file():
        return Named(folder(str(found) if run else path), run=run)
    try:
        if run is None:
            base = json.loads((found / _ADAPTER).read_text("utf-8"))["base_model_name_or_path"]
        elif (run / "model").is_dir():  # drawn for it, or merged
            base = run / "model"
        else:
            base = tomllib.loads((run / "config.toml").read_text("utf-8"))["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{found} does not say on which model its adapters are: {error!r}") from None
    below = named(str(base))
    if below.adapter is not None:
        raise UsageError(f"{found} has adapters on adapters, {below.adapter}", fix="crrl export merges those below")
    return Named(below.folder, found, run)


WITH_LANGUAGE = ("qwen3_5", "qwen3_5_moe")
"""Values of ``model_type`` of multimodal models whose language model is an architecture of its own."""


def multimodal(folder: Path) -> bool:
    """Whether the model in `folder` has a language model that can be taken out. Raises OSError, ValueError."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return config.get("model_type") in WITH_LANGUAGE and "text_config" in config


def folder(path: str, *, weights: bool = False) -> Path:
    """The folder of the model that `path` names, as `named` has it: that below adapters, where there are any.

    Raises `UsageError` when it holds no model, or none with `weights` where they are asked for.
    """
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files(__name__)))
        found = home / path.removeprefix(_BUILTIN)
        fix = nearest(path.removeprefix(_BUILTIN), (each.parent.name for each in home.glob("*/config.json")))
    elif hub.is_name(path):
        cached = hub.find_cached(path)
        if cached is None:
            raise UsageError(
                f"{path} is no model: there is no such folder, and it was not fetched from the hub",
                fix=f"name a folder, or start the run: it fetches the model. By hand: {hub.download_command(path)}",
            )
        found, fix = cached, f"fetch it again: {hub.download_command(path)}"
    else:
        found = Path(path).expanduser()
        if (found / _RUN).is_file() or (found / _ADAPTER).is_file():
            found = named(path).folder
        fix = _advice(path)
    if not (found / "config.json").is_file():
        why = "it has no config.json" if found.is_dir() else "there is no such folder"
        raise UsageError(f"{_shown(path, found)} is no model: {why}", fix=fix)
    if weights and not any(found.glob("*.safetensors")):
        raise UsageError(
            f"{_shown(path, found)} has no weights (*.safetensors)", fix="download them, or set model.init=random"
        )
    return found


def _shown(path: str, found: Path) -> str:
    """The name of a model, and where that is."""
    return path if path == str(found) else f"{path} ({found})"


def _advice(path: str) -> str:
    """What to do about a `path` where there is no model."""
    found = Path(path).expanduser()
    if advice := nearest_run(found):
        return advice if found.exists() else f"there is no such run: {advice}"
    if not found.exists() and found.parent.name == "runs":
        return f"there is no run in {found.parent}"
    return (
        "name a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), a run, a checkpoint, a "
        "folder of adapters, builtin:tiny, or org/name@revision of the hub "
        "(crrl fix and crrl serve also take the URL of an API: https://.../v1)"
    )
