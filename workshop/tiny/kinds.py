"""``python -m workshop.tiny.kinds FOLDER``: miniatures of four kinds of tasks, and scripted demonstrations of them.

All are made of the corpus of the source ``mutants``, so that the tiny policy can read them: bugs to repair with tools
(``tools``) or in one reply (``repair``), repairs that are to be told
apart by the family of the bug (``detect``), and functions to write again
(``implement``). In each, what is held out is in no demonstration: mutations, and of ``implement`` whole functions.

The expert fails on purpose, at rates (`RIGHT`) that leave something to learn from rewards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from coderepairrl.agents.blocks import Block
from coderepairrl.errors import exit_on_error
from coderepairrl.processes.caches import user_cache
from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.tasks.folders import store
from coderepairrl.tasks.jsonl import write_jsonl
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, Mutant, exercise, mutants
from coderepairrl.tasks.mutants.slices import UNSEEN_MODULES, Function, functions, repository
from coderepairrl.tasks.mutants.source import CHECK_SECONDS, LICENCE, MutantSource, unified
from coderepairrl.tasks.sources.repair import Repair
from coderepairrl.types import Checks, Command, Task
from workshop.tiny import prompt
from workshop.tiny.demonstrations import Habits, Message, another_edit, demonstrate, misquoted, slipped

KINDS = ("detect", "repair", "tools", "implement")
FAMILIES = ("comparison", "missing return", "off by one", "operator", "wrong variable")
"""What ``detect`` asks for: the families of mutations with most mutants."""
RIGHT = {"detect": 0.6, "repair": 0.6, "tools": 0.6, "implement": 0.7}
"""How often the expert does it right."""
TRAIN, TEST = 320, 60
"""Tasks of a kind at most, of ``implement`` so many functions as there are."""
DRAWS = {"detect": 6, "repair": 4, "tools": 1, "implement": 6}
"""Demonstrations of each task."""


def tasks(kind: str) -> list[Task]:
    """The miniature tasks of `kind`, those to train on first; ids are ``KIND/MODULE.FUNCTION/...``."""
    if kind == "detect":
        return [_detect(mutant) for split in ("train", "test") for mutant in _of_families(split)]
    if kind == "implement":
        return [_implement(each) for each in functions() if each.module not in UNSEEN_MODULES]
    found: list[Task] = []
    for split, number in (("train", TRAIN), ("test", TEST)):
        options: dict[str, Any] = {"split": split, "n": number, "quoted": 1}
        made = MutantSource(**options) if kind == "tools" else Repair(source="mutants", options=options)
        found += (replace(task, id=f"{kind}/{task.id.partition('/')[2]}", kind=kind) for task in made)
    return found


def demonstrations(kind: str, of: Iterable[Task]) -> Iterator[Example]:
    """`DRAWS` examples of each task to train on, right in `RIGHT` of them."""
    exercises = {made.mutant.key: made for mutant in mutants() if (made := _exercise(mutant)) is not None}
    known = {each.key: each for each in functions()}
    sources = sorted(each.source for each in functions() if not _held_out(each))
    for task in of:
        own = task.id.partition("/")[2]
        for draw in range(DRAWS[kind] if task.split == "train" else 0):
            rng = Random(f"{task.id}/{draw}")
            right = rng.random() < RIGHT[kind]
            if kind == "tools":
                messages = demonstrate(exercises[own.removesuffix("-q")], Habits(), rng)
            elif kind == "repair":
                messages = _said(task, _edit(exercises[own.removesuffix("-q")], right, rng))
            elif kind == "detect":
                wrong = [family for family in FAMILIES if family != task.answer]
                messages = _said(task, task.answer if right else rng.choice(wrong))
            else:
                function = known[own.partition("/")[0]]
                text = function.source if right else _garbled(function, sources, rng)
                block = Block(f"{function.module}.py", (_mask(function),), tuple(text.splitlines()))
                messages = _said(task, _block(block))
            yield Example(
                id=f"{task.id}#{draw}",
                episode=f"{task.id}#{draw}",
                task_id=task.id,
                language=task.language,
                kind=kind,
                source="workshop.tiny.kinds",
                agent="nano" if kind == "tools" else "direct",
                policy="scripted",
                messages=tuple(messages),
                tools=tuple(prompt.TOOLS) if kind == "tools" else (),
            )


def make(folder: Path, of: Iterable[str] = KINDS) -> None:
    """Write the tasks and the demonstrations of each of the kinds `of`, ``KIND.jsonl`` and ``KIND.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in of:
        made = tasks(kind)
        write_jsonl(made, folder / f"{kind}.jsonl")
        write_examples(folder / f"{kind}.parquet", demonstrations(kind, made))


def _of_families(split: str) -> list[Mutant]:
    """Mutants of `FAMILIES` in turn, as many of each."""
    number = (TRAIN if split == "train" else TEST) // len(FAMILIES)
    pools: list[list[Mutant]] = []
    for family in FAMILIES:
        pool = [each for each in mutants() if each.split == split and each.mutation.kind == family]
        Random(f"{family}/{split}").shuffle(pool)
        pools.append(pool[:number])
    return [each for each in chain.from_iterable(zip_longest(*pools)) if each is not None]


def _detect(mutant: Mutant) -> Task:
    return Task(
        id=f"detect/{mutant.key}",
        prompt=f"{', '.join(FAMILIES)}?\n- {mutant.broken_line}\n+ {mutant.fixed_line}\n",
        language="python",
        workspace="",
        reference=b"",
        split=mutant.split,
        licence=LICENCE,
        kind="detect",
        answer=mutant.mutation.kind,
    )


def _mask(function: Function) -> str:
    return f"# MASKED: {function.name} function (lines 1-{len(function.source.splitlines())})"


def _held_out(function: Function) -> bool:
    """A quarter of the functions, whatever their order."""
    return Random(f"implement/{function.key}").random() < 0.25


def _implement(function: Function) -> Task:
    whole = repository((function,))
    masked = f"{_mask(function)}\n"
    first = function.checks[0]
    files = {name: text.encode() for name, text in {whole.path: masked, **whole.tests}.items()}
    return Task(
        id=f"implement/{function.key}/whole",
        prompt=f"{whole.path}: write {function.name}(). {first.call} should be {first.want}.\n```\n{masked}```\n",
        language="python",
        workspace=f"dir:{store(user_cache() / 'kinds', files)}",
        reference=unified(whole.path, masked, whole.text),
        checks=Checks((Command(whole.command, CHECK_SECONDS),), whole.tests),
        split="test" if _held_out(function) else "train",
        licence=LICENCE,
        kind="implement",
    )


def _exercise(mutant: Mutant) -> Exercise | None:
    """As the source ``mutants`` makes it with its usual seed and ``quoted=1``."""
    return exercise(mutant, Random(f"{mutant.key}/0"), quoted=True)


def _said(task: Task, reply: str) -> list[Message]:
    return [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": reply.strip()}]


def _block(block: Block) -> str:
    """`block` with the shortest markers that `direct` reads: the tiny policy writes them sign by sign."""
    return "\n".join([block.path, "<< SEARCH", *block.search, "=====", *block.replace, ">> REPLACE"])


def _edit(made: Exercise, right: bool, rng: Random) -> str:
    """The repair as a block of one line; where it is not `right`, a slip, another line's change, or a misquotation."""
    old, new = made.broken_line, made.fixed_line
    if not right:
        wrong = rng.random()
        if wrong < 0.6:
            new = slipped(made, rng)
        elif wrong < 0.9:
            old, new = another_edit(made, rng)
    lines = made.files[made.path].splitlines()
    indent = next(line[: len(line) - len(line.lstrip())] for line in lines if line.strip() == old)
    if not right and old == made.broken_line and new == made.fixed_line:
        old = misquoted(old, rng)
    return _block(Block(made.path, (indent + old,), (indent + new,)))


def _garbled(function: Function, others: Sequence[str], rng: Random) -> str:
    """Another function's body under the name and the arguments of `function`."""
    head = function.source.splitlines()[0]
    return "\n".join([head, *rng.choice(others).splitlines()[1:]]) + "\n"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    with exit_on_error():
        main()
