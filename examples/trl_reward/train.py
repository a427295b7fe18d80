"""Two steps of TRL's `GRPOTrainer` on tasks and the reward of this project, on a CPU.

    pip install . trl==1.16.0      # in a checkout; the base install: TRL brings torch
    python examples/trl_reward/train.py

A model of 1.4 million random parameters is shown a bug report and a diff that ends before the repaired line, and writes
that line. Two steps teach it nothing: use a model of your own, and more of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset
from reward import repair_line
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

from coderepairrl.models import find_model_folder
from coderepairrl.tasks import make_source
from coderepairrl.types import Task


def build_rows(tasks: Iterable[Task]) -> Iterator[dict[str, str]]:
    """Rows of tasks whose repair adds one line."""
    for task in tasks:
        reference = task.reference.decode()
        lines = reference.splitlines(keepends=True)
        added = [at for at, line in enumerate(lines) if line.startswith("+") and not line.startswith("+++ ")]
        if len(added) == 1:
            head, tail = "".join(lines[: added[0]]) + "+", "\n" + "".join(lines[added[0] + 1 :])
            yield {"prompt": f"{task.prompt}\n\n{head}", "head": head, "tail": tail, "reference": reference}


def train(output: Path, steps: int = 2) -> GRPOTrainer:
    """Train for `steps` steps of 4 tasks with 8 answers; return the trainer."""
    tiny = find_model_folder("builtin:tiny")  # configuration and tokenizer; the weights are drawn
    arguments = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    set_seed(0)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)),
        reward_funcs=repair_line,
        args=arguments,
        train_dataset=Dataset.from_list(list(build_rows(make_source("mutants", split="train", n=64)))),
        processing_class=AutoTokenizer.from_pretrained(tiny),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("trl-reward"), help="folder for TRL's files")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    train(options.output, options.steps)
