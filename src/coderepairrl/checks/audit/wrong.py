"""Plausible wrong patches: mutants of the reference.

A mutant leaves out a part of the reference (file, hunk, line), alters an operator, constant, condition or name in an
added line (`tasks.mutants.list_mutations` for Python, else a table of operators), or empties a changed function. It
changes programs, not tests; differs from the reference and from the unchanged program in more than comments, white
space and docstrings; and parses if it is Python. Equivalence is undecidable (Budd and Angluin 1982, Acta Informatica
18, 31): a human judges mutants that the checks accept.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import NamedTuple

from coderepairrl.rewards.changes import parse_python
from coderepairrl.rewards.parse import FilePatch, parse_patch
from coderepairrl.rewards.syntax import find_syntax, split_comments, split_tokens
from coderepairrl.tasks.mutants.mutations import list_mutations
from coderepairrl.tasks.patches import detect_file_language, is_test_path, split_lines

KINDS = ("a file as it was", "a hunk as it was", "a line as it was", "a line changed", "a function emptied")
_REGULAR_FILE = "100644"
_COMMUTATIVE = ("max", "min")  # Python functions for which the order of arguments is irrelevant.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@-]+")  # Paths that git writes without quotes.
# Patterns and their replacements, for languages that are not parsed.
_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r" == ", " != "), (r" != ", " == "), (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "),
    (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " / "),
    (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"\bmin\b", "max"), (r"\bmax\b", "min"),
    (r"\b0\b", "1"), (r"\b1\b", "0"), (r"!(?=[\w(])", ""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrongPatch:
    """Mutant as a patch that git applies; `place` is ``path:line`` in the repaired file."""

    kind: str
    """One of `KINDS`."""
    place: str
    what: str
    """Code left out or changed, or the function emptied."""
    patch: bytes


class Mutants(NamedTuple):
    """Mutants of a reference."""

    patches: tuple[WrongPatch, ...]
    equivalent: int
    """Number of mutants dropped because they mean the same as the reference."""
    why_none: str = ""


Texts = Mapping[str, bytes | None]


def draw_mutants(reference: bytes, before: Texts, after: Texts, count: int, seed: str) -> Mutants:
    """Draw up to `count` mutants of `reference` by `seed`, one of each of `KINDS` in turn.

    `before` and `after` hold the contents of its files by path (None: no such file). Raises `MalformedPatch`.
    """
    files = [_File(each, before.get(each.path), after.get(each.new or each.path)) for each in parse_patch(reference)]
    parts = _split_patch(reference, len(files))
    programs = [each for each in files if each.is_mutable]
    if not programs:
        return Mutants((), 0, "it changes no text file of a program except tests")
    if parts is None and len(programs) < len(files):
        return Mutants((), 0, "it cannot be split by file")
    unchanged = [parts[at] if parts else b"" for at in range(len(files))]
    rng, mutants, seen, equivalent = Random(seed), list[WrongPatch](), set[bytes](), 0
    # one mutant of each kind in turn, until all edits of the kind are used up
    turns = deque(iter(_shuffle_edits(kind, programs, rng)) for kind in KINDS)
    while turns and len(mutants) < count:
        edit = next(turns[0], None)
        if edit is None:
            turns.popleft()
            continue
        if _is_equivalent(edit.file.path, edit.text, edit.file.after):
            equivalent += 1
            continue
        if not _is_plausible(edit, programs):
            continue
        changed = {edit.file: edit.text}
        patch = b"".join(
            _format_diff(each, changed.get(each, each.after)) if each.is_mutable else part
            for each, part in zip(files, unchanged, strict=True)
        )
        if patch not in seen:
            seen.add(patch)
            mutants.append(WrongPatch(edit.kind, f"{edit.file.path}:{edit.line}", edit.what, patch))
            turns.rotate(-1)
    return Mutants(
        tuple(mutants),
        equivalent,
        "" if mutants else "no part of it can be left out or changed so that it still parses",
    )


class _File:
    """File that the reference changes."""

    def __init__(self, patched: FilePatch, before: bytes | None, after: bytes | None) -> None:
        self.patched, self.path = patched, patched.new or patched.path
        self.before, self.after = _decode_or_none(before), _decode_or_none(after)
        is_plain = not (patched.renamed or patched.copied or patched.binary or (patched.old_mode and patched.new_mode))
        is_text = (before is None) == (self.before is None) and (after is None) == (self.after is None)
        has_language = detect_file_language(self.path) and _PLAIN_PATH.fullmatch(self.path)
        is_program = bool(has_language) and not is_test_path(self.path)
        self.is_mutable = is_program and is_plain and is_text and self.before != self.after and self.after is not None

    @cached_property
    def hunks(self) -> list[tuple[int, int, int, int]]:
        """Changed lines without context: ``old[a:b]`` became ``new[c:d]``."""
        matcher = difflib.SequenceMatcher(None, self.old, self.new, autojunk=False)
        return [(a, b, c, d) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]

    @cached_property
    def old(self) -> list[str]:
        """Lines before the reference."""
        return split_lines(self.before or "")

    @cached_property
    def new(self) -> list[str]:
        """Lines after the reference."""
        return split_lines(self.after or "")

    @cached_property
    def tree(self) -> ast.Module | None:
        """Syntax tree of the repaired file; None if not valid Python."""
        return _parse_or_none(self.after or "") if detect_file_language(self.path) == "python" else None

    @property
    def added(self) -> list[tuple[int, str | None]]:
        """Indices of added lines in `new`, each with the old line that it replaced, if known."""
        lines: list[tuple[int, str | None]] = []
        for a, b, c, d in self.hunks:
            is_paired = b - a == d - c
            lines += [(at, self.old[a + at - c] if is_paired else None) for at in range(c, d) if self.new[at].strip()]
        return lines


class _Edit(NamedTuple):
    """Change of the repaired `file` to `text` (None: no file)."""

    kind: str
    file: _File
    line: int
    what: str
    text: str | None


def _shuffle_edits(kind: str, files: Sequence[_File], rng: Random) -> list[_Edit]:
    edits = list(_find_edits(kind, files))
    rng.shuffle(edits)
    return edits


def _find_edits(kind: str, files: Sequence[_File]) -> Iterator[_Edit]:
    if kind == "a file as it was":
        if len(files) > 1:
            yield from (_Edit(kind, file, 1, "", file.before) for file in files)
        return
    for file in files:
        if kind == "a hunk as it was" and (len(file.hunks) > 1 or len(files) > 1):
            for a, b, c, d in file.hunks:
                yield _Edit(kind, file, c + 1, "", "".join([*file.new[:c], *file.old[a:b], *file.new[d:]]))
        elif kind == "a line as it was":
            for at, old_line in file.added:
                # a line without an old one is deleted: in Python if the rest still parses, else only if it ends in ;
                if old_line is not None or file.tree is not None or file.new[at].rstrip().endswith(";"):
                    yield _Edit(kind, file, at + 1, file.new[at].strip(), _replace_line(file, at, old_line or ""))
        elif kind == "a line changed":
            yield from _change_lines(kind, file)
        elif kind == "a function emptied":
            yield from _empty_functions(kind, file)


def _change_lines(kind: str, file: _File) -> Iterator[_Edit]:
    added = {at for at, _ in file.added}
    if file.tree is not None:
        for each in list_mutations(file.after or "", {at + 1 for at in added}):
            text = each.apply(file.after or "")
            new = split_lines(text)[each.line - 1].strip()
            yield _Edit(kind, file, each.line, f"{each.kind}: {new}", text)
        return
    for at in sorted(added):
        line = file.new[at]
        for pattern, replacement in _REPLACEMENTS:
            for match in re.finditer(pattern, line):
                new = line[: match.start()] + replacement + line[match.end() :]
                yield _Edit(kind, file, at + 1, f"operator or constant: {new.strip()}", _replace_line(file, at, new))


def _empty_functions(kind: str, file: _File) -> Iterator[_Edit]:
    nodes = ast.walk(file.tree) if file.tree is not None else ()
    bodies = {node: _code_statements(node) for node in nodes if isinstance(node, _FUNCTIONS)}
    innermost: dict[_Function, None] = {}  # an ordered set
    for line in (at + 1 for at, _ in file.added):
        enclosing = [node for node, body in bodies.items() if body and body[0].lineno <= line <= (node.end_lineno or 0)]
        innermost |= dict.fromkeys(sorted(enclosing, key=lambda node: (node.end_lineno or 0) - node.lineno)[:1])
    for node in innermost:
        body, end = bodies[node], node.end_lineno or 0
        start = min([body[0].lineno, *(each.lineno for each in getattr(body[0], "decorator_list", ()))]) - 1
        lines = [*file.new[:start], " " * body[0].col_offset + "pass\n", *file.new[end:]]
        yield _Edit(kind, file, node.lineno, f"def {node.name}", "".join(lines))


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


def _code_statements(node: _Function) -> list[ast.stmt]:
    """Statements after the docstring; empty if they begin on the line of ``def``."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return [] if body and body[0].lineno == node.lineno else body


def _replace_line(file: _File, at: int, line: str) -> str:
    return "".join([*file.new[:at], line, *file.new[at + 1 :]])


def _is_plausible(edit: _Edit, programs: Sequence[_File]) -> bool:
    if edit.file.tree is not None and edit.text is not None and _parse_or_none(edit.text) is None:
        return False
    others_same = all(_is_equivalent(each.path, each.before, each.after) for each in programs if each is not edit.file)
    return not (others_same and _is_equivalent(edit.file.path, edit.text, edit.file.before))


def _is_equivalent(path: str, one: str | None, other: str | None) -> bool:
    return one == other or (one is not None and other is not None and _normalize(path, one) == _normalize(path, other))


@lru_cache(maxsize=64)
def _normalize(path: str, text: str) -> str | tuple[bytes, ...]:
    """Dump the syntax tree of Python, without docstrings and irrelevant order; else list tokens without comments."""
    tree = _parse_or_none(text) if detect_file_language(path) == "python" else None
    if tree is not None:
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _COMMUTATIVE:
                node.args.sort(key=ast.dump)
        return ast.dump(tree)
    syntax, inside, words = find_syntax(path), False, list[bytes]()
    for line in split_lines(text):
        code, _, inside = split_comments(line.encode("utf-8", "surrogateescape"), syntax, inside=inside)
        words += split_tokens(code, whitespace=False)
    return tuple(words)


def _parse_or_none(text: str) -> ast.Module | None:
    # `splitlines` splits at form feeds, which Python's line numbers ignore
    return parse_python(text) if len(text.splitlines()) == len(split_lines(text)) else None


def _decode_or_none(content: bytes | None) -> str | None:
    try:
        return content.decode("utf-8") if content is not None and b"\0" not in content else None
    except UnicodeDecodeError:
        return None


def _split_patch(patch: bytes, files: int) -> list[bytes] | None:
    """Split `patch` by file; None if git did not write it."""
    parts = [part for part in re.split(rb"(?=^diff --git )", patch, flags=re.MULTILINE) if part.startswith(b"diff ")]
    complete = [part if part.endswith(b"\n") else part + b"\n" for part in parts]
    return complete if len(complete) == files else None


def _format_diff(file: _File, text: str | None) -> bytes:
    """Format the diff from the file before the reference to `text` (None: no file)."""
    if text == file.before:
        return b""
    path, mode = file.path, file.patched.new_mode or _REGULAR_FILE
    old, new = (
        f"{side}/{path}" if content is not None else "/dev/null"
        for side, content in zip("ab", (file.before, text), strict=True)
    )
    head = f"diff --git a/{path} b/{path}\n"
    head += f"new file mode {mode}\n" if file.before is None else ""
    body = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(file.old, split_lines(text or ""), old, new)
    ]
    return (head + "".join(body)).encode("utf-8", "surrogateescape")
