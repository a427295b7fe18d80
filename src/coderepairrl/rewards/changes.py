"""Changes of a patch without no-ops, and its files outside the repair.

Comments, whitespace (indentation and line endings included) and blank lines are *classes* of edits: no-ops unless the
oracle uses them. Renames, modes, binary content and the creation or deletion of an empty file are *facts*, which are
always kept and match only an equal fact.
"""

from __future__ import annotations

import ast
import re
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from itertools import chain

from cydifflib import SequenceMatcher

from coderepairrl.rewards.parse import Block, FilePatch
from coderepairrl.rewards.syntax import (
    Syntax,
    Tokens,
    find_syntax,
    read_indentation,
    split_comments,
    split_invisible,
    split_tokens,
    strip_comment,
)

# most pairs of old and new lines of a block among which equal lines are found; beyond, only at its ends
_MOST_LINE_PAIRS = 250_000
# prefix that tells words of a comment from code (`read_changes` with `marked`)
_COMMENT_MARK = b"\0"


class EditClass(Flag):
    """Classes of edits that may be no-ops."""

    NONE = 0
    COMMENT = auto()
    WHITESPACE = auto()
    BLANK = auto()


@dataclass(frozen=True, slots=True)
class Edit:
    """Neighbouring changed lines as tokens: they replace `height` lines of the old file after its first `at` lines."""

    at: int
    height: int
    removed: tuple[Tokens, ...]
    added: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True)
class Changes:
    """Edits of one file, in order, and facts."""

    edits: tuple[Edit, ...]
    facts: frozenset[tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.edits or self.facts)

    @property
    def removed(self) -> tuple[Tokens, ...]:
        """All removed lines."""
        return tuple(line for edit in self.edits for line in edit.removed)

    @property
    def added(self) -> tuple[Tokens, ...]:
        """All added lines."""
        return tuple(line for edit in self.edits for line in edit.added)

    @property
    def insertions(self) -> tuple[int, ...]:
        """Number of old lines before each edit that only adds."""
        return tuple(edit.at for edit in self.edits if not edit.removed)


def find_edit_classes(files: Sequence[FilePatch], language: str = "") -> EditClass:
    """Classes of edits that the oracle uses. Blank lines, the cheapest edit, count only if it has no other edit."""
    used, changes = EditClass.NONE, read_changes(files, EditClass.NONE, language)
    for edit_class in (EditClass.COMMENT, EditClass.WHITESPACE):
        more_changes = read_changes(files, used | edit_class, language)
        if _count_lines(more_changes) > _count_lines(changes):
            used, changes = used | edit_class, more_changes
    return used if changes else EditClass.COMMENT | EditClass.WHITESPACE | EditClass.BLANK


def read_code_changes(oracle: Sequence[FilePatch], language: str = "") -> tuple[EditClass, dict[str, Changes]]:
    """Classes of edits that the oracle uses, and its changes, marked.

    Comments, which may repeat the repair, count only if the oracle changes no code.
    """
    bare = read_changes(oracle, EditClass.NONE, language, marked=True)
    spaced = read_changes(oracle, EditClass.WHITESPACE, language, marked=True)
    if _count_lines(spaced) > _count_lines(bare):
        return EditClass.WHITESPACE, spaced
    if bare:
        return EditClass.NONE, bare
    whitespace_too = EditClass.COMMENT | EditClass.WHITESPACE
    for kept in (EditClass.COMMENT, whitespace_too, whitespace_too | EditClass.BLANK):
        if oracle_changes := read_changes(oracle, kept, language, marked=True):
            break
    return kept, oracle_changes


def _count_lines(by_path: Mapping[str, Changes]) -> int:
    return sum(len(change.removed) + len(change.added) for change in by_path.values())


def read_changes(
    files: Sequence[FilePatch], kept: EditClass, language: str = "", *, marked: bool = False
) -> dict[str, Changes]:
    """Changes by file, without edits of classes outside `kept`.

    `marked`: comment words differ from code words, and an invisible character is a separate token.
    """
    merged: dict[str, list[FilePatch]] = {}
    for file in _fold_renames(files):
        merged.setdefault(file.path, []).append(file)
    by_path = {}
    for path, parts in merged.items():
        change = _merge_changes(parts, _LineReader(kept, find_syntax(parts[-1].new or path, language), marked=marked))
        if change:
            by_path[path] = change
    return by_path


def read_old_lines(files: Sequence[FilePatch], kept: EditClass, language: str = "") -> dict[str, set[Tokens]]:
    """Context and removed lines of each file's hunks."""
    lines_by_path: dict[str, set[Tokens]] = {file.path: set() for file in files}
    for file in files:
        reader = _LineReader(kept, find_syntax(file.new or file.path, language), marked=True)
        for hunk in file.hunks:
            keyed_lines = reader.read_lines([line + b"\n" for line in hunk.side(b"-")])
            lines_by_path[file.path].update(key for _, key in keyed_lines)
    return lines_by_path


def _fold_renames(files: Sequence[FilePatch]) -> list[FilePatch]:
    """Join the deletion and creation of equal files into a rename."""
    deleted = {_list_side_lines(file, "removed"): file for file in files if file.old and not file.new and file.blocks}
    folded: list[FilePatch] = []
    renamed: set[int] = set()
    for file in files:
        source = deleted.pop(_list_side_lines(file, "added"), None) if file.new and not file.old else None
        if source is not None:
            renamed.add(id(source))
            file = FilePatch(source.old, file.new, renamed=True)
        folded.append(file)
    return [file for file in folded if id(file) not in renamed]


def _list_side_lines(file: FilePatch, side: str) -> tuple[bytes, ...]:
    return tuple(line for block in file.blocks for line in getattr(block, side))


def _merge_changes(parts: Sequence[FilePatch], reader: _LineReader) -> Changes:
    edits = []
    for block in sorted((block for part in parts for block in part.blocks), key=lambda block: block.at):
        removed, added = reader.read_block(block)
        if removed or added:
            edits.append(Edit(block.at, len(block.removed), tuple(removed), tuple(added)))
    return Changes(tuple(edits), frozenset(fact for part in parts for fact in _list_facts(part)))


def _list_facts(file: FilePatch) -> list[tuple[str, str]]:
    facts = []
    if file.renamed or file.copied:
        facts.append(("rename" if file.renamed else "copy", file.new))
    if file.binary:
        facts.append(("binary", file.binary))
    if file.new_mode and (file.old_mode or file.new_mode != "100644"):
        facts.append(("mode", file.new_mode))
    if not (file.blocks or file.binary) and not (file.old and file.new):
        facts.append(("create", file.new) if file.new else ("delete", file.old))
    return facts


class _LineReader:
    """Lines of one file, without ignored edits."""

    def __init__(self, kept: EditClass, syntax: Syntax, *, marked: bool = False) -> None:
        self.syntax = syntax
        self.marked = marked
        self.comments = EditClass.COMMENT in kept
        self.blank = EditClass.BLANK in kept
        self.whitespace = bool(kept & (EditClass.WHITESPACE | EditClass.BLANK))

    def read_lines(self, side: Sequence[bytes]) -> list[tuple[Tokens, Tokens]]:
        """Words and key of each meaningful line; keys also have significant indentation."""
        words_and_keys = []
        inside = False
        for line in side:
            text, marked, inside = self.read_line(line, inside)
            if not text.strip() and not marked and not (self.blank and not line.strip()):
                continue
            words = split_tokens(text, whitespace=self.whitespace) + marked
            indented = self.syntax.indentation and not self.whitespace
            words_and_keys.append((words, (read_indentation(line), *words) if indented else words))
        return words_and_keys

    def read_line(self, line: bytes, inside: bool) -> tuple[bytes, Tokens, bool]:
        """Code of `line`, its marked tokens, and whether a comment continues after it."""
        if not self.marked:
            return (line if self.comments else strip_comment(line, self.syntax)), (), False
        line, hidden = split_invisible(line)
        code, comment, inside = split_comments(line, self.syntax, inside=inside)
        words = split_tokens(comment, whitespace=self.whitespace) if self.comments else ()
        return code, hidden + tuple(_COMMENT_MARK + word for word in words), inside

    def read_block(self, block: Block) -> tuple[list[Tokens], list[Tokens]]:
        """Keys of removed and added lines, without no-ops."""
        removed, added = self.read_lines(block.removed), self.read_lines(block.added)
        old, new = [words for words, _ in removed], [words for words, _ in added]
        if list(chain.from_iterable(old)) == list(chain.from_iterable(new)):
            return [], []  # the same words with other line breaks or spaces
        equal_old, equal_new = _find_equal_lines(old, new)
        return (
            [key for i, (_, key) in enumerate(removed) if i not in equal_old],
            [key for i, (_, key) in enumerate(added) if i not in equal_new],
        )


def _find_equal_lines(old: Sequence[Tokens], new: Sequence[Tokens]) -> tuple[set[int], set[int]]:
    start, end = count_common_ends(old, new)
    equal_old = {*range(start), *range(len(old) - end, len(old))}
    equal_new = {*range(start), *range(len(new) - end, len(new))}
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    if old and new and len(old) * len(new) <= _MOST_LINE_PAIRS:
        for i, j, size in SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
            equal_old.update(range(start + i, start + i + size))
            equal_new.update(range(start + j, start + j + size))
    return equal_old, equal_new


def count_common_ends(a: Sequence[object], b: Sequence[object]) -> tuple[int, int]:
    """Lengths of the common prefix, and of the remaining common suffix."""
    limit = min(len(a), len(b))
    start = next((i for i in range(limit) if a[i] != b[i]), limit)
    limit -= start
    return start, next((i for i in range(limit) if a[-1 - i] != b[-1 - i]), limit)


MOST_FREE_FILES = 3
"""Limit on files outside a repair that cost nothing. Of 785 resolved SWE-bench patches 2 have more."""
# bytes of the longest file that is parsed, in at most 1 s; longer ones are accepted
_MOST_SOURCE_BYTES = 1 << 16

_TEST_PATH = re.compile(
    r"""(^|/)([^/]*[._-])?(tests?|testing|__tests__|specs?)/     # a folder of tests
    |   (^|/)(tests?|conftest)([._-][^/]*)?$                     # tests.py, test_x.py, test-x.sh
    |   [^/](_tests?|-tests?|\.tests?|_spec|\.spec)\.[^/.]+$     # x_test.go, x.spec.ts
    |   (^|/)[A-Z]\w*(Tests?|TestCase|IT|Spec)\.[^/.]+$          # XTest.java, XSpec.scala
    """,
    re.VERBOSE,
)
_WARNINGS_LOCK = threading.Lock()


def is_test_file(path: str) -> bool:
    """Whether `path` names a test.

    >>> [is_test_file(path) for path in ("tests/x.py", "test_x.py", "x_test.go", "a/XTest.java", "latest.py")]
    [True, True, True, True, False]
    """
    return _TEST_PATH.search(path) is not None


def find_free_files(patch: Sequence[FilePatch], touched: Collection[str]) -> set[str]:
    """Up to `MOST_FREE_FILES` paths outside `touched`: tests, and new files that parse."""
    free = {file.path: file for file in patch if file.path not in touched and (not file.old or is_test_file(file.path))}
    return {path for path in sorted(free)[:MOST_FREE_FILES] if is_parsable(free[path])}


def is_parsable(file: FilePatch) -> bool:
    """Whether a new Python file parses; True for others."""
    if file.old or not file.new.endswith((".py", ".pyi")):
        return True
    source = b"".join(line for block in file.blocks for line in block.added)
    return len(source) > _MOST_SOURCE_BYTES or parse_python(source) is not None


def parse_python(source: bytes | str) -> ast.Module | None:
    """Syntax tree of a Python file; None if it does not parse."""
    with _WARNINGS_LOCK, warnings.catch_warnings():  # hides warnings of invalid escapes; all threads share the filters
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
