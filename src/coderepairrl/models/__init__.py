"""Model folders in Hugging Face layout: those that ship with the package, and a user's."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from coderepairrl.errors import UsageError
from coderepairrl.registry import nearest

_BUILTIN = "builtin:"
_READ = (".safetensors", ".json", ".txt", ".jinja", ".model")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def files(folder: Path) -> list[Path]:
    """The files of a model's `folder` that a run reads: its weights, configuration, tokenizer and template."""
    return [file for file in sorted(folder.iterdir()) if file.suffix in _READ and file.is_file()]


def folder(path: str, *, weights: bool = False) -> Path:
    """The folder that `path` names: a folder, or ``builtin:NAME``.

    Raises `UsageError` when it holds no model, or none with `weights` where they are asked for.
    """
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files(__name__)))
        found = home / path.removeprefix(_BUILTIN)
        fix = nearest(path.removeprefix(_BUILTIN), (each.parent.name for each in home.glob("*/config.json")))
    else:
        found = Path(path).expanduser()
        fix = "name a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), or builtin:tiny"
        if not found.exists() and _HUB_NAME.fullmatch(path):
            fix = (
                f"hf download {path} --local-dir {path} (for a gated model accept its terms on its page, and "
                "hf auth login, before)"
            )
    if not (found / "config.json").is_file():
        raise UsageError(f"model.path={path}: {found} has no config.json", fix=fix)
    if weights and not any(found.glob("*.safetensors")):
        raise UsageError(
            f"model.path={path}: {found} has no weights (*.safetensors)", fix="download them, or set model.init=random"
        )
    return found
