"""Optional dependencies and their install command."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from coderepairrl.errors import PrerequisiteError

EXTRAS = {
    "train": ("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "renderers"),
    "deepspeed": ("deepspeed",),
    "bitsandbytes": ("bitsandbytes",),
    "ray": ("ray",),
    "hub": ("datasets",),
    "pdf": ("svglib",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}


def require_extra(extra: str, purpose: str) -> None:
    """Raise `PrerequisiteError` if a package of `extra`, needed by `purpose`, is missing."""
    missing = [name for name in EXTRAS[extra] if not (sys.modules.get(name) or find_spec(name))]
    if missing:
        packages = "package" if len(missing) == 1 else "packages"
        raise PrerequisiteError(f"{purpose} needs the {packages} {', '.join(missing)}", fix=install_extra(extra))


def require_train() -> None:
    """Raise `PrerequisiteError` unless models can run here."""
    require_extra("train", "a model on this machine")


def install_extra(extra: str, checkout: Path = Path(__file__).parents[3]) -> str:
    """Install command of `extra`: the script of `checkout` if this is its environment, else pip.

    >>> install_extra("train", Path("/usr"))
    "pip install 'coderepairrl[train]'"
    """
    script = checkout / "scripts/setup.sh"
    if script.is_file() and Path(sys.prefix) == checkout / ".venv":
        return f"{shlex.quote(str(script))} {extra}"
    return f"pip install 'coderepairrl[{extra}]'"
