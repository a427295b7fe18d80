"""``python -m workshop.tiny.prune MODEL FOLDER --neurons N``: a student, the model with narrower MLPs.

Each layer keeps the neurons with the largest product of the norms of their gate, up and down weights; no data is used.
The pruned model is worse until it is distilled from the whole one (Muralidharan et al. 2024, arXiv 2407.14679;
here with the simplest choice of neurons).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from coderepairrl import models
from coderepairrl.errors import UsageError, exit_on_error
from coderepairrl.runs.storage import write_checksums
from workshop.tiny.ship import save_weights, ship

if TYPE_CHECKING:
    from torch import Tensor


def prune(model: str, folder: Path, neurons: int) -> None:
    """Write `model` with `neurons` in each layer's MLP to `folder`; the same model gives the same bits.

    Raises `UsageError` if it has no more of them than that.
    """
    from safetensors.torch import load_file

    config = json.loads((models.resolve_model(model).folder / "config.json").read_text(encoding="utf-8"))
    if not 0 < neurons < config["intermediate_size"]:
        raise UsageError(
            f"{model} has {config['intermediate_size']} neurons in a layer, and cannot keep {neurons} of them",
            fix="ask for fewer with --neurons",
        )
    ship(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        gate, up, down = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        kept = _find_largest(tensors[gate], tensors[up], tensors[down], neurons)
        tensors |= {gate: tensors[gate][kept], up: tensors[up][kept], down: tensors[down][:, kept]}
    save_weights(tensors, folder / "model.safetensors")
    narrower = json.dumps(config | {"intermediate_size": neurons}, indent=2)
    (folder / "config.json").write_text(f"{narrower}\n", encoding="utf-8")
    write_checksums(folder)


def _find_largest(gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, neurons: int) -> Tensor:
    """Sorted indices, of shape (neurons,), of the neurons to keep."""
    size_F = gate_FD.float().norm(dim=1) * up_FD.float().norm(dim=1) * down_DF.float().norm(dim=0)
    kept: Tensor = size_F.topk(neurons).indices.sort().values
    return kept


def main() -> None:
    """Write the student."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="builtin:NAME, a run, or a model folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--neurons", type=int, required=True, help="in each layer's MLP")
    options = parser.parse_args()
    prune(options.model, options.folder, options.neurons)


if __name__ == "__main__":
    with exit_on_error():
        main()
