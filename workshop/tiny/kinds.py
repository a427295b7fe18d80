"""``python -m workshop.tiny.kinds FOLDER``: miniatures of four kinds of tasks, and scripted demonstrations of them.

Three are made from the corpus of the source ``mutants``, so that the tiny policy can read them: bugs to repair with
tools (``tools``) or in one reply (``repair``), and repairs to classify by the family of the bug (``detect``). The
fourth, ``implement``, asks for a function of one line that is described in words: the policy is too small for those of
the corpus. Each mutation, or formula of ``implement``, has one use: it is demonstrated (mostly under other names),
trained on by rewards, or held out.

The expert fails on purpose: only a share `RIGHT` of its demonstrations is right, to leave room for rewards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from coderepairrl.agents.patching import Block
from coderepairrl.errors import exit_on_error
from coderepairrl.processes.caches import user_cache
from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.tasks.base import store_folder
from coderepairrl.tasks.jsonl import write_jsonl
from coderepairrl.tasks.mutants.corpus_tasks import (
    Check,
    Exercise,
    Function,
    Mutant,
    load_mutants,
    make_exercise,
    make_repository,
)
from coderepairrl.tasks.mutants.source import CHECK_SECONDS, LICENCE, MutantSource
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.sources.repair import Repair
from coderepairrl.types import Checks, Command, Task
from workshop.tiny import prompt
from workshop.tiny.demonstrations import Habits, Message, another_edit, demonstrate, misquoted, slipped
from workshop.tiny.disguise import disguise

KINDS = ("detect", "repair", "tools", "implement")
FAMILIES = ("comparison", "missing return", "off by one", "operator", "wrong variable")
"""Answers of ``detect``: the families of mutations with most mutants."""
RIGHT = 0.6
"""Share of right demonstrations."""
TEST = 160
"""Most held-out tasks of a kind."""
DRAWS = {"detect": 20, "repair": 8, "tools": 2, "implement": 24}
"""Demonstrations of each mutation or formula."""
DISGUISED = 0.75
"""Share of demonstrations under other names."""

Use = Literal["shown", "train", "test"]


class Formula(NamedTuple):
    """The value of a function of ``implement``: a first step of two arguments, then one with a constant."""

    first: str
    second: str
    constant: int

    @property
    def described(self) -> str:
        """The formula in words."""
        return f"{FIRST[self.first]}, {SECOND[self.second]} {self.constant}"

    @property
    def use(self) -> Use:
        """The formula's use: a quarter is held out, and half of the others are shown."""
        return _use(f"implement/{self}", held_out=0.25)

    def function(self, name: str) -> Function:
        """The formula as a function `name`, with three checks."""
        source = f"def {name}(a, b):\n    return {self.first} {self.second} {self.constant}"
        scope: dict[str, Any] = {}
        exec(source, scope)  # safe: built from the tables below
        calls = ((7, 2), (3, 5), (12, 30))
        checks = tuple(Check(f"{name}({a}, {b})", repr(scope[name](a, b))) for a, b in calls)
        return Function("calc", name, source, checks)


FIRST = {
    "(a + b)": "a plus b",
    "(a - b)": "a minus b",
    "(b - a)": "b minus a",
    "(a * b)": "a times b",
    "max(a, b)": "max of a and b",
    "min(a, b)": "min of a and b",
}
SECOND = {"+": "plus", "-": "minus", "*": "times", "//": "over", "%": "modulo"}
NAMES = "fghmnpqrstuvwxyz"
"""Names of functions."""
FORMULAS = tuple(Formula(*each) for each in product(FIRST, SECOND, range(2, 10)))


def tasks(kind: str) -> list[Task]:
    """The miniature tasks of `kind`, those to train on first; ids are ``KIND/MODULE.FUNCTION/...``."""
    if kind == "implement":
        by_use = {use: [each for each in FORMULAS if each.use == use] for use in ("train", "test")}
        return [_implement(each, use) for use in ("train", "test") for each in by_use[use]]
    if kind == "detect":
        return [_detect(mutant) for use in ("train", "test") for mutant in _of_families(use)]
    wanted = {mutant.key for mutant in load_mutants() if _use_of(mutant) != "shown"}
    selected: list[Task] = []
    for split, number in (("train", 0), ("test", TEST)):
        options: dict[str, Any] = {"split": split, "n": number, "quoted": 1}
        source = MutantSource(**options) if kind == "tools" else Repair(source="mutants", options=options)
        own_ids = ((task, task.id.partition("/")[2]) for task in source)
        selected += (replace(task, id=f"{kind}/{key}", kind=kind) for task, key in own_ids if key[:-2] in wanted)
    return selected


def demonstrations(kind: str) -> Iterator[Example]:
    """`DRAWS` examples of each mutation or formula that is shown, right in `RIGHT` of them."""
    if kind == "implement":
        keys: Iterable[tuple[str, Any]] = [(_place(each), each) for each in FORMULAS if each.use == "shown"]
    else:
        pool = _of_families("shown") if kind == "detect" else [m for m in load_mutants() if _use_of(m) == "shown"]
        keys = [(mutant.key, mutant) for mutant in pool]
    for key, what in keys:
        for draw in range(DRAWS[kind]):
            name = f"{kind}/{key}#{draw}"
            messages = _demonstrate(kind, what, Random(name))
            if messages:
                yield Example(
                    id=name,
                    episode=name,
                    task_id=f"{kind}/{key}",
                    language="python",
                    kind=kind,
                    source="workshop.tiny.kinds",
                    agent="nano" if kind == "tools" else "direct",
                    policy="scripted",
                    messages=tuple(messages),
                    tools=tuple(prompt.TOOLS) if kind == "tools" else (),
                )


def _demonstrate(kind: str, what: Mutant | Formula, rng: Random) -> list[Message]:
    """Write one conversation; empty for a mutation that is not unique in its file."""
    right = rng.random() < RIGHT
    if isinstance(what, Formula):
        function = what.function(rng.choice(NAMES))
        wrong = [each for each in FORMULAS if each != what and (each[0] == what[0]) + (each[1:] == what[1:])]
        written = (what if right else rng.choice(wrong)).function(function.name)
        block = Block("calc.py", (_mask(function),), tuple(written.source.splitlines()))
        return _make_conversation(_make_implement_prompt(what, function.name), _block(block))
    exercise = make_exercise(what, rng, quoted=True)
    if exercise is None:
        return []
    if rng.random() < DISGUISED:
        exercise = disguise(exercise, rng)
    if kind == "tools":
        return demonstrate(exercise, Habits(), rng)
    if kind == "repair":
        return _make_conversation(
            f"{exercise.prompt.rstrip()}\n\n{exercise.path}\n```\n{exercise.files[exercise.path]}```\n",
            _edit(exercise, right, rng),
        )
    family = what.mutation.kind
    answer = family if right else rng.choice([other for other in FAMILIES if other != family])
    return _make_conversation(_make_detect_prompt(exercise.broken_line, exercise.fixed_line), answer)


def make(folder: Path, of: Iterable[str] = KINDS) -> None:
    """Write the tasks and the demonstrations of each of the kinds `of`, ``KIND.jsonl`` and ``KIND.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in of:
        write_jsonl(tasks(kind), folder / f"{kind}.jsonl")
        write_examples(folder / f"{kind}.parquet", demonstrations(kind))


def _use(key: str, held_out: float) -> Use:
    """Draw a use that depends on the key alone, not on the order."""
    drawn = Random(f"use/{key}").random()
    return "test" if drawn < held_out else "shown" if drawn < (1 + held_out) / 2 else "train"


def _use_of(mutant: Mutant) -> Use | None:
    """A mutant's use: those of the source's split ``train`` are shown or trained on."""
    return {"test": "test", "train": _use(mutant.key, held_out=0.0), "unseen": None}[mutant.split]


def _of_families(use: str) -> list[Mutant]:
    """Mutants of `FAMILIES` in turn, the same number of each."""
    pools: list[list[Mutant]] = []
    for family in FAMILIES:
        pool = [each for each in load_mutants() if _use_of(each) == use and each.mutation.kind == family]
        Random(f"{family}/{use}").shuffle(pool)
        pools.append(pool)
    least = min(map(len, pools))
    return list(chain.from_iterable(zip(*(pool[:least] for pool in pools), strict=True)))


def _make_detect_prompt(broken: str, fixed: str) -> str:
    return f"{', '.join(FAMILIES)}?\n- {broken}\n+ {fixed}\n"


def _detect(mutant: Mutant) -> Task:
    return Task(
        id=f"detect/{mutant.key}",
        prompt=_make_detect_prompt(mutant.broken_line, mutant.fixed_line),
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


def _place(formula: Formula) -> str:
    """The key of a formula: its two steps, by which intervals are clustered, and the constant."""
    return f"calc.{FIRST[formula.first].replace(' ', '_')}-{SECOND[formula.second]}/{formula.constant}"


def _make_implement_prompt(formula: Formula, name: str) -> str:
    return f"calc.py: write {name}(a, b): {formula.described}.\n```\n{_mask(formula.function(name))}\n```\n"


def _implement(formula: Formula, use: str) -> Task:
    function = formula.function(Random(f"name/{formula}").choice(NAMES))
    whole = make_repository((function,))
    masked = f"{_mask(function)}\n"
    files = {name: text.encode() for name, text in {whole.path: masked, **whole.tests}.items()}
    return Task(
        id=f"implement/{_place(formula)}",
        prompt=_make_implement_prompt(formula, function.name),
        language="python",
        workspace=f"dir:{store_folder(user_cache() / 'kinds', files)}",
        reference=format_diff(whole.path, masked, whole.text),
        checks=Checks((Command(whole.command, CHECK_SECONDS),), whole.tests),
        split=use,
        licence=LICENCE,
        kind="implement",
    )


def _make_conversation(asked: str, reply: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": reply.strip()}]


def _block(block: Block) -> str:
    """`block` with the shortest markers that `direct` reads: the tiny policy writes them character by character."""
    return "\n".join([block.path, "<< SEARCH", *block.search, "=====", *block.replace, ">> REPLACE"])


def _edit(exercise: Exercise, right: bool, rng: Random) -> str:
    """The repair as a block of one line; unless `right`, a wrong change, another line's change, or a misquotation."""
    old, new = exercise.broken_line, exercise.fixed_line
    if not right:
        wrong = rng.random()
        if wrong < 0.6:
            new = slipped(exercise, rng)
        elif wrong < 0.9:
            old, new = another_edit(exercise, rng)
    lines = exercise.files[exercise.path].splitlines()
    indent = next(line[: len(line) - len(line.lstrip())] for line in lines if line.strip() == old)
    if not right and old == exercise.broken_line and new == exercise.fixed_line:
        old = misquoted(old, rng)
    return _block(Block(exercise.path, (indent + old,), (indent + new,)))


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)


if __name__ == "__main__":
    with exit_on_error():
        main()
