"""``python -m workshop.tiny.ship MODEL FOLDER``: write the folder to ship, from a policy of the pipeline."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from coderepairrl import models

if TYPE_CHECKING:
    from torch import Tensor

_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def ship(model: str, folder: Path) -> None:
    """Write the `model`, a folder or a run, to `folder`, its weights as fp16."""
    from safetensors.torch import load_file

    source = models.resolve_model(model).folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(source / name, folder / name)
    save_weights(load_file(source / "model.safetensors"), folder / "model.safetensors")


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write fp16 safetensors, half the size; every fp16 value is an fp32 value. A tied head is stored once."""
    from safetensors.torch import save_file

    kept = {name: t.detach().half().contiguous().clone() for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(kept, path, metadata={"format": "pt"})


def main() -> None:
    """Write the folder to ship."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run of the pipeline, or a model folder")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    ship(options.model, options.folder)


if __name__ == "__main__":
    main()
