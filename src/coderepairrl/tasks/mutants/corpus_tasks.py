"""Tasks of the shipped corpus: one function with one bug, beside a healthy one, and a script of checks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Literal

from coderepairrl.tasks.mutants.grammars import mutations_in
from coderepairrl.tasks.mutants.issues import Symptom, issue
from coderepairrl.tasks.mutants.languages import LANGUAGES
from coderepairrl.tasks.mutants.mutations import Mutation
from coderepairrl.tasks.mutants.slices import CORPUS, UNSEEN_MODULES, Check, Function, functions, repository

Split = Literal["train", "test", "unseen"]
HELD_OUT_PERCENT = 25
PER_FUNCTION = 6
"""Mutations of a function in another language than Python, where each has to be compiled to be verified."""


def verified(language: str = "python") -> Path:
    """Key of each verified mutant to ``[check that fails, what it gives]``; key ``corpus``: a digest of the corpus."""
    return CORPUS / ("verified.json" if language == "python" else f"{language}.json")


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
        """Decided by the key alone, so that no seed and no machine moves a task between splits.

        A function that is ``unseen`` is so in every language.
        """
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
    tests: Mapping[str, str]
    """Those of the files that check it."""
    command: tuple[str, ...]
    """Runs them."""
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
def mutants(language: str = "python") -> tuple[Mutant, ...]:
    """Every verified mutant of the corpus, in order; hanging and equivalent ones are left out.

    Verdicts are shipped, so that no machine's speed decides what hangs. Raises RuntimeError when they are not those
    of this corpus; ``python -m coderepairrl.tasks.mutants.verify`` makes them anew (half a minute for Python).
    """
    symptoms = json.loads(verified(language).read_text(encoding="utf-8"))
    known = pairs(language)
    if symptoms["corpus"] != corpus_digest(known):
        raise RuntimeError(f"{verified(language)} is not of this corpus: run python -m {__package__}.verify {language}")
    found = []
    for key, (function, mutation) in known.items():
        if key in symptoms:
            index, got = symptoms[key]
            found.append(Mutant(function, mutation, _symptom(function, function.checks[index], got)))
    return tuple(found)


def _symptom(function: Function, check: Check, got: str) -> Symptom:
    """Of a check that gives `got`, as one writes it in the language of `function`."""
    if function.language == "python":
        return Symptom(check.call, got, check.want)
    layout = LANGUAGES[function.language]
    return Symptom(layout.call(check.call, function.module), got, layout.value(check.want))


def exercise(mutant: Mutant, rng: Random, quoted: bool) -> Exercise | None:
    """`mutant` in a repository of its own, with a random neighbour from the same module.

    None when no neighbour leaves the broken line unique in its file: the policy of `crrl hello` replaces lines, and
    an ambiguous one would ask for more than it can say.
    """
    function = mutant.function
    broken = replace(function, source=mutant.mutation.apply(function.source))
    of_module = functions(function.language)
    neighbours = [f for f in of_module if f.module == function.module and f.name != function.name]
    rng.shuffle(neighbours)
    first = rng.random() < 0.5
    for other in neighbours:
        made = repository((broken, other) if first else (other, broken))
        if made.text.count(mutant.broken_line) == 1:
            break
    else:
        return None
    line = mutant.broken_line if quoted else None
    return Exercise(
        mutant=mutant,
        files={made.path: made.text, **made.tests},
        path=made.path,
        tests=made.tests,
        command=made.command,
        fixed=repository((function, other) if first else (other, function)).text,
        prompt=issue(made.path, _spelled(function), mutant.symptom, line, rng),
        quoted=quoted,
    )


def _spelled(function: Function) -> str:
    return function.name if function.language == "python" else LANGUAGES[function.language].spelled(function.name)


def pairs(language: str = "python") -> dict[str, tuple[Function, Mutation]]:
    """Every (function, mutation) by its key, mutations that yield the same text counted once.

    Of other languages than Python `PER_FUNCTION` of each function, those with the smallest digests.
    """
    by_key: dict[str, tuple[Function, Mutation]] = {}
    for function in functions(language):
        # a line that is lost cannot be quoted
        possible = [m for m in mutations_in(function.source, language) if m.kind != "missing statement"]
        found = sorted(possible, key=lambda m: m.apply(function.source))
        for _, same in groupby(found, key=lambda m: m.apply(function.source)):
            mutation = next(iter(same))
            by_key[pair_key(function, mutation)] = (function, mutation)
    if language == "python":
        return by_key
    chosen: Counter[str] = Counter()
    kept = set()
    for key in sorted(by_key, key=_digest):
        function, _ = by_key[key]
        if chosen[function.name] < PER_FUNCTION:
            chosen[function.name] += 1
            kept.add(key)
    return {key: pair for key, pair in by_key.items() if key in kept}


def corpus_digest(known: Mapping[str, tuple[Function, Mutation]]) -> str:
    """Changes with everything that decides how a mutation fails."""
    return _digest("\n".join(f"{key} {function.checks}" for key, (function, _) in known.items()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
