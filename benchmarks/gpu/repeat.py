"""Does a GPU give the same bits? The same steps from the same weights, in two learners.

    python benchmarks/gpu/repeat.py [--size 0.6B] [--steps 3] [--precision bf16]
    python benchmarks/gpu/repeat.py --toy        (a miniature, on a CPU too)

A resumed run repeats steps and refuses to go on where their weights differ, so that a GPU must give the same bits
twice (`torch.use_deterministic_algorithms`, which the learner asks for). Prints a checksum of the weights after each
step, of both learners, and exits with 1 if any differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging as hf_logging

from coderepairrl.learn.trainer import Trainer
from learner import DEVICE, SIZES, build_model, free, make_setting, rows  # benchmarks/gpu, where this script is


def checksums(model: Path, work: Path, size: str, steps: int, precision: str) -> list[str]:
    """Checksums of the trained weights after each step of a new learner on the model."""
    setting = make_setting(size, 4096, 1)
    if size in SIZES:
        setting = setting._replace(learn=setting.learn.with_changes(precision=precision))
    trainer = Trainer(model, setting.learn)
    digests = []
    for step in range(steps):
        trainer.step(rows(4, 96 if size == "toy" else 2048 + 128 * step, setting.config.vocab_size))
        digests.append(trainer.publish(work, "adapter")[2])
    del trainer
    free()
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.6B")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if DEVICE.type == "cpu" and not options.toy:
        parser.error("there is no GPU: only --toy makes sense here")
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    size = "toy" if options.toy else options.size
    setting = make_setting(size, 4096, 1)
    with tempfile.TemporaryDirectory() as name:
        model = build_model(setting.config, setting.dtype, Path(name) / "model")
        first, second = (checksums(model, Path(name), size, options.steps, options.precision) for _ in range(2))
    print(json.dumps({"device": str(DEVICE), "size": size, "first": first, "second": second, "same": first == second}))
    sys.exit(first != second)


if __name__ == "__main__":
    main()
