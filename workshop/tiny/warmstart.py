"""``python -m workshop.tiny.warmstart FOLDER``: write the inputs of the pipeline `workshop/tiny/hello.toml`.

A model with random weights and the examples of three lessons, scripted and imperfect demonstrations (`demonstrations`)
of training tasks: first the policy learns to copy what it reads, from exercises mostly under new names (`disguise`);
then it may also memorise the functions; then it learns its expert's bad habits, and to continue after replacing a line
by itself. None has held-out mutants or unseen functions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.runs.storage import write_checksums
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, load_mutants, make_exercise
from coderepairrl.tokens import Codec, digest_tokenizer, load_codec
from workshop.tiny import prompt, tokenizer
from workshop.tiny.demonstrations import Habits, Message, demonstrate, habits, row
from workshop.tiny.disguise import disguise

ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": tokenizer.CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
SHARPNESS = 1.5
"""Initial weight of the query and key norms: above 1, attention learns sooner to pick out single tokens."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """The examples of one stage."""

    examples: int
    disguised: float
    """Share of exercises under other names."""
    quoted: float
    """Share of issues that quote the broken line."""
    habits: Habits = field(default_factory=Habits)


_RECOVER = Lesson(6_000, disguised=0.25, quoted=0.6, habits=replace(Habits(), unchanged=0.35, resign=0.25))
LESSONS = {
    "copy": Lesson(24_000, disguised=0.7, quoted=0.7, habits=habits(0.9)),
    "recite": Lesson(42_000, disguised=0.25, quoted=0.5, habits=habits(0.9)),
    "recover": _RECOVER,
    "control": replace(_RECOVER, examples=14_400),
}
"""Examples of each stage. `bar` compares reinforcement learning with ``control``: more examples like ``recover``."""
STAGES = ("copy", "recite", "recover")
"""The lessons of the pipeline, by the names of its stages."""


def write_model(folder: Path, seed: int = 0) -> None:
    """Write tokenizer, template and a Qwen3 of `ARCHITECTURE` with random float32 weights; the same seed gives the same
    bits."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer.save(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    config = Qwen3Config(
        vocab_size=1 + max(ids.values()),
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=None,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
        **ARCHITECTURE,
    )
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, SHARPNESS)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, SHARPNESS)
    model.save_pretrained(folder)
    write_checksums(folder)


def examples(name: str, model: Path, seed: int = 0) -> Iterator[Example]:
    """Make the examples of the lesson `name`, in the tokens of `model`."""
    lesson, codec, tokens = LESSONS[name], load_codec(model), digest_tokenizer(model)
    pool = [mutant for mutant in load_mutants() if mutant.split == "train"]
    rng = Random(f"{name}/{seed}")
    count = 0
    while count < lesson.examples:
        quoted = rng.random() < lesson.quoted
        task = make_exercise(rng.choice(pool), rng, quoted)
        if task is None:
            continue
        shown = disguise(task, rng) if rng.random() < lesson.disguised else task
        yield as_example(f"{name}/{count}", task, demonstrate(shown, lesson.habits, rng), codec, tokens)
        count += 1


def as_example(name: str, task: Exercise, messages: Sequence[Message], codec: Codec, tokens: str) -> Example:
    """A demonstration of `task` in the tokens of `codec`, whose digest is `tokens`."""
    ids, trained = row(codec, messages)
    return Example(
        id=name,
        episode=name,
        task_id=f"mutants/{task.mutant.key}-{'q' if task.quoted else 'u'}",
        language="python",
        source="workshop",
        agent="nano",
        policy="scripted-expert",
        messages=tuple(messages),
        tools=tuple(prompt.TOOLS),
        ids=tuple(ids),
        trained=tuple(trained),
        tokenizer=tokens,
    )


def write(folder: Path, lessons: Sequence[str]) -> None:
    """Write a model with random weights (``random``) and the examples of `lessons` into `folder`."""
    model = folder / "random"
    write_model(model)
    for name in lessons:
        count = write_examples(folder / f"{name}.parquet", examples(name, model))
        print(f"{folder / name}.parquet: {count:,} examples", flush=True)


def main() -> None:
    """Write the inputs of the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder, STAGES)


if __name__ == "__main__":
    main()
