"""``python -m workshop.tiny.languages FOLDER``: demonstrations in six languages, for the pipeline `languages.toml`.

The policy of `crrl hello` has seen Python alone, and asks for ``numbers.py`` where a task has ``numbers.go``. These
teach it no more than to begin: in other languages all of them are told under other names (`disguise`), they are of
`SHARE` of the training tasks only, those that training with ``tasks.holdout`` leaves out, and their expert is the
imperfect one of the last lesson of `warmstart`. Held-out pairs and unseen functions are in none of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from coderepairrl import models
from coderepairrl.errors import exit_on_error
from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.tasks.mutants.corpus_tasks import exercise, mutants
from coderepairrl.tasks.mutants.languages import LANGUAGE_NAMES
from coderepairrl.tasks.select import held_out
from coderepairrl.tokens import digest, load
from workshop.tiny.demonstrations import demonstrate
from workshop.tiny.disguise import disguise
from workshop.tiny.warmstart import LESSONS, as_example

BASE = "builtin:tiny"
EXAMPLES = 1_280
SHARE = 0.5
"""Of the training tasks of each language; ``tasks.holdout`` of the study `languages`."""
EXPERT = LESSONS["recover"]
"""Whose habits, and share of exercises in Python under other names."""


def demonstrations(count: int = EXAMPLES, seed: int = 0) -> Iterator[Example]:
    """`count` examples in the tokens of `BASE`, of each language as often; their issues quote the broken line."""
    model = models.folder(BASE)
    codec, tokens = load(model), digest(model)
    pools = {
        name: [m for m in mutants(name) if m.split == "train" and held_out(f"mutants/{m.key}-q", SHARE)]
        for name in LANGUAGE_NAMES
    }
    rng = Random(f"languages/{seed}")
    made = 0
    while made < count:
        language = LANGUAGE_NAMES[made % len(LANGUAGE_NAMES)]
        task = exercise(rng.choice(pools[language]), rng, quoted=True)
        if task is None:
            continue
        disguised = 1.0 if language != "python" else EXPERT.disguised
        shown = disguise(task, rng) if rng.random() < disguised else task
        yield as_example(f"languages/{made}", task, demonstrate(shown, EXPERT.habits, rng), codec, tokens)
        made += 1


def main() -> None:
    """Write ``languages.parquet``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    path = parser.parse_args().folder / "languages.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{path}: {write_examples(path, demonstrations()):,} examples")


if __name__ == "__main__":
    with exit_on_error():
        main()
