"""Model folders in Hugging Face layout: those that ship with the package, and a user's."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from coderepairrl.errors import UsageError
from coderepairrl.registry import nearest

_BUILTIN = "builtin:"


def folder(path: str) -> Path:
    """The folder that `path` names: a folder, or ``builtin:NAME``. Raises `UsageError` when it holds no model."""
    if path.startswith(_BUILTIN):
        home = Path(str(resources.files(__name__)))
        found = home / path.removeprefix(_BUILTIN)
        fix = nearest(path.removeprefix(_BUILTIN), (each.parent.name for each in home.glob("*/config.json")))
    else:
        found = Path(path).expanduser()
        fix = "name a folder in Hugging Face layout (config.json, tokenizer.json, *.safetensors), or builtin:tiny"
    if not (found / "config.json").is_file():
        raise UsageError(f"model.path={path}: {found} has no config.json", fix=fix)
    return found
