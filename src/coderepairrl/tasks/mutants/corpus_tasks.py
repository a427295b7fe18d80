"""Tasks from the shipped corpus: a single function with one bug, a healthy one, and a script of checks.

``python -m coderepairrl.tasks.mutants.corpus_tasks`` judges the corpus's mutations and writes the verdicts.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from coderepairrl.tasks.mutants.judge import judge_mutants
from coderepairrl.tasks.mutants.mutations import Mutation, list_mutations

CORPUS = Path(__file__).parent / "corpus"
"""Modules read as data: pure functions without imports, each with a ``check_`` module of ``assert`` lines."""
UNSEEN_MODULES = frozenset({"games", "grid", "stock"})
"""Modules whose functions are never trained on. Never change them."""


@dataclass(frozen=True, slots=True)
class Check:
    """``assert CALL == WANT`` as source text; its repr is part of `digest_corpus`.

    >>> Check("mean([1, 3])", "2").statement
    'assert mean([1, 3]) == 2'
    """

    call: str
    want: str

    @property
    def statement(self) -> str:
        """Check as a line of a test script."""
        return f"assert {self.call} == {self.want}"


@dataclass(frozen=True, slots=True)
class Function:
    """A corpus function: source without docstring and annotations, and its checks."""

    module: str
    name: str
    source: str
    checks: tuple[Check, ...]

    @property
    def key(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


@cache
def load_corpus_functions() -> tuple[Function, ...]:
    """All corpus functions, by module and line."""
    functions = []
    for path in sorted(CORPUS.glob("check_*.py")):
        module = path.stem.removeprefix("check_")
        checks: dict[str, list[Check]] = {}
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assert):
                name, check = _read_check(node)
                checks.setdefault(name, []).append(check)
        for node in ast.parse((CORPUS / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef):
                functions.append(Function(module, node.name, strip_annotations(node), tuple(checks[node.name])))
    return tuple(functions)


class Repository(NamedTuple):
    """A file of functions at `path`, and the script `tests` that checks it."""

    path: str
    text: str
    tests: dict[str, str]
    command: tuple[str, ...]


def make_repository(parts: Sequence[Function]) -> Repository:
    """Functions of one module as a tiny repository, with a script that ends at the first failing check."""
    module = parts[0].module
    names = ", ".join(sorted(f.name for f in parts))
    lines = [f"from {module} import {names}", "", *(check.statement for f in parts for check in f.checks)]
    tests = {f"test_{module}.py": "\n".join(lines) + "\n"}
    text = "\n\n\n".join(f.source.strip("\n") for f in parts) + "\n"
    # -S -E and -B: 10 ms instead of 20, no environment, no bytecode in the diff
    return Repository(f"{module}.py", text, tests, ("python3", "-S", "-E", "-B", *tests))


def _read_check(node: ast.Assert) -> tuple[str, Check]:
    match node.test:
        case ast.Compare(left=ast.Call(func=ast.Name(id=name)) as call, ops=[_], comparators=[want]):
            return name, Check(ast.unparse(call), ast.unparse(want))
    raise ValueError(f"line {node.lineno}: a check of the corpus reads `assert CALL == WANT`")


def strip_annotations(node: ast.FunctionDef) -> str:
    """Source without docstring and annotations, to save tokens."""
    tree = ast.parse(ast.unparse(node))
    for sub in ast.walk(tree):
        match sub:
            case ast.FunctionDef():
                sub.returns = None
                sub.body = sub.body[1:] if ast.get_docstring(sub) is not None else sub.body
            case ast.arg():
                sub.annotation = None
    return ast.unparse(_AnnotationRemover().visit(tree)) + "\n"


class _AnnotationRemover(ast.NodeTransformer):
    """Turn ``x: T = value`` into ``x = value``, and ``x: T`` into ``pass``."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)


Split = Literal["train", "test", "unseen"]
HELD_OUT_PERCENT = 25  # of the mutants of functions that are trained on: split test
VERIFIED = CORPUS / "verified.json"
"""``[number of the failing check, its value]`` by key of each verified mutant, and a digest of the corpus."""

MAX_VALUE_CHARACTERS = 40
"""Characters of a value in an issue; longer ones are cut."""

OPENINGS = (
    "{name}() in {file} is broken: {call} gives {got} instead of {want}.",
    "Bug in {file}: {call} should be {want} but is {got}.",
    "{file}: I expected {want} from {call} and got {got}. Please repair {name}().",
)
QUOTES = (
    "\nThe wrong value comes from this line:\n    {line}",
    "\nSuspicious line:\n    {line}",
    "\nIt happens here:\n    {line}",
)


@dataclass(frozen=True, slots=True)
class Symptom:
    """Visible effect of a bug: a call, its value (or exception name), and the right value."""

    call: str
    got: str
    want: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A verified bug: the function's checks pass without it and fail with it."""

    function: Function
    mutation: Mutation
    symptom: Symptom

    @property
    def key(self) -> str:
        """Key of function and mutation (`format_mutant_key`)."""
        return format_mutant_key(self.function, self.mutation)

    @property
    def split(self) -> Split:
        """Split, from the key alone: no seed or machine moves a task."""
        if self.function.module in UNSEEN_MODULES:
            return "unseen"
        prefix, digest = self.key.rsplit("-", 1)
        percentile = int(_digest_text(f"split:{prefix}/{digest}"), 16) % 100
        return "test" if percentile < HELD_OUT_PERCENT else "train"

    @property
    def broken_line(self) -> str:
        """Line with the bug, stripped."""
        return self.mutation.apply(self.function.source).splitlines()[self.mutation.line - 1].strip()

    @property
    def fixed_line(self) -> str:
        """The same line without the bug, stripped."""
        return self.function.source.splitlines()[self.mutation.line - 1].strip()


@dataclass(frozen=True, slots=True)
class Exercise:
    """A tiny repository with a mutant, and its issue."""

    mutant: Mutant
    files: Mapping[str, str]
    """The broken repository: path to content."""
    path: str
    """The file with the bug."""
    tests: Mapping[str, str]
    """Files among `files` with its checks."""
    command: tuple[str, ...]
    fixed: str
    """Content of `path` without the bug."""
    prompt: str
    quoted: bool

    @property
    def broken_line(self) -> str:
        """Line with the bug, stripped."""
        return self._find_changed_lines()[0]

    @property
    def fixed_line(self) -> str:
        """The same line without the bug, stripped."""
        return self._find_changed_lines()[1]

    def _find_changed_lines(self) -> tuple[str, str]:
        pairs = zip(self.files[self.path].splitlines(), self.fixed.splitlines(), strict=True)
        return next((broken.strip(), fixed.strip()) for broken, fixed in pairs if broken != fixed)


def make_mutant(function: Function, mutation: Mutation, index: int, got: str) -> Mutant:
    """The mutant whose check `index` fails first, with the value `got`."""
    check = function.checks[index]
    return Mutant(function, mutation, Symptom(check.call, got, check.want))


def format_mutant_key(function: Function, mutation: Mutation) -> str:
    """Key of a function's mutation: ``module.function/kind-digest``."""
    change = f"{function.source}\0{mutation.apply(function.source)}"
    return f"{function.key}/{mutation.kind.replace(' ', '-')}-{_digest_text(change)[:8]}"


@cache
def load_mutants() -> tuple[Mutant, ...]:
    """Verified mutants of the corpus, in order, without hanging and equivalent ones.

    Verdicts ship, so that machine speed decides nothing. Raises RuntimeError if they are of another corpus.
    """
    verdicts = json.loads(VERIFIED.read_text(encoding="utf-8"))
    all_pairs = index_mutations()
    if verdicts["corpus"] != digest_corpus(all_pairs):
        raise RuntimeError(f"{VERIFIED} is not of this corpus: run python -m {__name__}")
    return tuple(make_mutant(*pair, *verdicts[key]) for key, pair in all_pairs.items() if key in verdicts)


def make_exercise(
    mutant: Mutant, rng: Random, quoted: bool, among: Sequence[Function] | None = None
) -> Exercise | None:
    """Put `mutant` into a tiny repository, with a random function of its module in `among` (default: the corpus).

    None unless the broken line is unique in its file: the policy of `crrl hello` replaces lines.
    """
    function = mutant.function
    broken = replace(function, source=mutant.mutation.apply(function.source))
    candidates = load_corpus_functions() if among is None else among
    neighbours = [f for f in candidates if f.module == function.module and f.name != function.name]
    rng.shuffle(neighbours)
    is_first = rng.random() < 0.5
    for other in [[each] for each in neighbours] or [[]]:  # alone, if its module has no other function
        repo = make_repository((broken, *other) if is_first else (*other, broken))
        if repo.text.count(mutant.broken_line) == 1:
            break
    else:
        return None
    line = mutant.broken_line if quoted else None
    return Exercise(
        mutant=mutant,
        files={repo.path: repo.text, **repo.tests},
        path=repo.path,
        tests=repo.tests,
        command=repo.command,
        fixed=make_repository((function, *other) if is_first else (*other, function)).text,
        prompt=format_issue(repo.path, function.name, mutant.symptom, line, rng),
        quoted=quoted,
    )


def format_issue(file: str, name: str, symptom: Symptom, line: str | None, rng: Random) -> str:
    """Text of an issue that quotes `line`, if any.

    >>> format_issue("a.py", "f", Symptom("f(1)", "2", "1"), None, Random(3))
    'f() in a.py is broken: f(1) gives 2 instead of 1.'
    """
    got, want = map(_cut_value, (symptom.got, symptom.want))
    text = rng.choice(OPENINGS).format(file=file, name=name, call=symptom.call, got=got, want=want)
    quote = rng.choice(QUOTES)
    return text if line is None else text + quote.format(line=line.strip())


def _cut_value(value: str) -> str:
    return value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[: MAX_VALUE_CHARACTERS - 3]}..."


def index_mutations(functions: Sequence[Function] | None = None) -> dict[str, tuple[Function, Mutation]]:
    """Mutations of `functions` (default: the corpus) by key, one per resulting text."""
    by_key: dict[str, tuple[Function, Mutation]] = {}
    for function in load_corpus_functions() if functions is None else functions:
        by_text: dict[str, Mutation] = {}
        for mutation in list_mutations(function.source):
            by_text.setdefault(mutation.apply(function.source), mutation)
        for _, mutation in sorted(by_text.items()):
            by_key[format_mutant_key(function, mutation)] = (function, mutation)
    return by_key


def digest_corpus(corpus_pairs: Mapping[str, tuple[Function, Mutation]]) -> str:
    """Digest of everything that decides how a mutation fails."""
    return _digest_text("\n".join(f"{key} {function.checks}" for key, (function, _) in corpus_pairs.items()))


def _digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def verify_corpus(keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Failures by key of the mutations (of `keys`, if set) that fail a check in time.

    Raises RuntimeError if a corpus function fails its own checks.
    """
    healthy = judge_mutants((f.source, [(c.call, c.want) for c in f.checks]) for f in load_corpus_functions())
    if failing := [f.key for f, failure in zip(load_corpus_functions(), healthy, strict=True) if failure is not None]:
        raise RuntimeError(f"functions of the corpus fail their own checks: {', '.join(failing)}")
    all_pairs = index_mutations()
    chosen = {key: all_pairs[key] for key in (all_pairs if keys is None else keys)}
    failures = judge_mutants((m.apply(f.source), [(c.call, c.want) for c in f.checks]) for f, m in chosen.values())
    # at a negative index, the mutant hangs or does not compile
    noticed = {key: each for key, each in zip(chosen, failures, strict=True) if each is not None and each[0] >= 0}
    return {"corpus": digest_corpus(all_pairs), **noticed}


if __name__ == "__main__":
    body = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in verify_corpus().items())
    VERIFIED.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
