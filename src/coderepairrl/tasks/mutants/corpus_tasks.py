"""Tasks of the shipped corpus: one function with one bug, beside a healthy one, and a script of checks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from random import Random
from typing import Literal

from coderepairrl.tasks.mutants.issues import Symptom, issue
from coderepairrl.tasks.mutants.mutations import Mutation, mutations
from coderepairrl.tasks.mutants.slices import CORPUS, UNSEEN_MODULES, Function, check_script, functions, module_source

Split = Literal["train", "test", "unseen"]
HELD_OUT_PERCENT = 25
VERIFIED = CORPUS / "verified.json"
"""Key of each verified mutant to ``[check that fails, what it gives]``; key ``corpus`` is a digest of the corpus."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A verified bug: the function's own checks pass without it and fail with it."""

    function: Function
    mutation: Mutation
    symptom: Symptom

    @property
    def key(self) -> str:
        """``module.function/kind-digest``: which function and which mutation, on every machine the same."""
        return pair_key(self.function, self.mutation)

    @property
    def split(self) -> Split:
        """Decided by the key alone, so that no seed and no machine moves a task between splits."""
        if self.function.module in UNSEEN_MODULES:
            return "unseen"
        return (
            "test"
            if int(_digest("split:" + "/".join(self.key.rsplit("-", 1))), 16) % 100 < HELD_OUT_PERCENT
            else "train"
        )

    @property
    def broken_line(self) -> str:
        """The line with the bug, without indentation."""
        return self.mutation.apply(self.function.source).splitlines()[self.mutation.line - 1].strip()

    @property
    def fixed_line(self) -> str:
        """The same line as it should be."""
        return self.function.source.splitlines()[self.mutation.line - 1].strip()


@dataclass(frozen=True, slots=True)
class Exercise:
    """A tiny repository around a mutant, and its issue."""

    mutant: Mutant
    files: Mapping[str, str]
    """The broken repository: path to content."""
    path: str
    """The file with the bug."""
    fixed: str
    """That file as it should be."""
    prompt: str
    quoted: bool

    @property
    def broken_line(self) -> str:
        """The line with the bug, without indentation."""
        return self._differing()[0]

    @property
    def fixed_line(self) -> str:
        """The same line as it should be."""
        return self._differing()[1]

    def _differing(self) -> tuple[str, str]:
        pairs = zip(self.files[self.path].splitlines(), self.fixed.splitlines(), strict=True)
        return next((broken.strip(), fixed.strip()) for broken, fixed in pairs if broken != fixed)


def pair_key(function: Function, mutation: Mutation) -> str:
    """``module.function/kind-digest`` of a (function, mutation) pair."""
    place = f"{function.source}\0{mutation.apply(function.source)}"
    return f"{function.key}/{mutation.kind.replace(' ', '-')}-{_digest(place)[:8]}"


@cache
def mutants() -> tuple[Mutant, ...]:
    """Every verified mutant of the corpus, in order; hanging and equivalent ones are left out.

    Verdicts are shipped, so that no machine's speed decides what hangs. Raises RuntimeError when they are not those
    of this corpus; ``python -m coderepairrl.tasks.mutants.verify`` makes them anew (half a minute).
    """
    symptoms = json.loads(VERIFIED.read_text(encoding="utf-8"))
    known = pairs()
    if symptoms["corpus"] != corpus_digest(known):
        raise RuntimeError(f"{VERIFIED} is not of this corpus: run python -m coderepairrl.tasks.mutants.verify")
    found = []
    for key, (function, mutation) in known.items():
        if key in symptoms:
            index, got = symptoms[key]
            check = function.checks[index]
            found.append(Mutant(function, mutation, Symptom(check.call, got, check.want)))
    return tuple(found)


def exercise(mutant: Mutant, rng: Random, quoted: bool) -> Exercise | None:
    """`mutant` in a repository of its own, with a random neighbour from the same module.

    None when no neighbour leaves the broken line unique in its file: the policy of `crrl hello` replaces lines, and
    an ambiguous one would ask for more than it can say.
    """
    function = mutant.function
    broken = mutant.mutation.apply(function.source)
    neighbours = [f for f in functions() if f.module == function.module and f.name != function.name]
    rng.shuffle(neighbours)
    first = rng.random() < 0.5
    for other in neighbours:
        sources = (broken, other.source) if first else (other.source, broken)
        content = module_source(sources)
        if content.count(mutant.broken_line) == 1:
            break
    else:
        return None
    path = f"{function.module}.py"
    parts = (function, other) if first else (other, function)
    checks = check_script(function.module, [f.name for f in parts], [c for f in parts for c in f.checks])
    line = mutant.broken_line if quoted else None
    return Exercise(
        mutant=mutant,
        files={path: content, f"test_{path}": checks},
        path=path,
        fixed=module_source([f.source for f in parts]),
        prompt=issue(path, function.name, mutant.symptom, line, rng),
        quoted=quoted,
    )


def pairs() -> dict[str, tuple[Function, Mutation]]:
    """Every (function, mutation) by its key, mutations that yield the same text counted once."""
    by_key: dict[str, tuple[Function, Mutation]] = {}
    for function in functions():
        found = sorted(mutations(function.source), key=lambda m: m.apply(function.source))
        for _, same in groupby(found, key=lambda m: m.apply(function.source)):
            mutation = next(iter(same))
            by_key[pair_key(function, mutation)] = (function, mutation)
    return by_key


def corpus_digest(known: Mapping[str, tuple[Function, Mutation]]) -> str:
    """Changes with everything that decides how a mutation fails."""
    return _digest("\n".join(f"{key} {function.checks}" for key, (function, _) in known.items()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
