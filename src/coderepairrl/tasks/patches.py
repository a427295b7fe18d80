"""Read, measure, apply, write and reverse patches; languages and tests by file name."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from coderepairrl.grading.steering import unquote_path

_LANGUAGES = {
    "python": "py pyi pyx",
    "java": "java",
    "kotlin": "kt kts",
    "javascript": "js jsx mjs cjs vue",
    "typescript": "ts tsx",
    "go": "go",
    "rust": "rs",
    "c": "c h",
    "cpp": "cc cpp cxx hh hpp",
    "csharp": "cs",
    "php": "php",
    "ruby": "rb",
    "scala": "scala",
    "swift": "swift",
    "shell": "sh bash",
}
_LANGUAGE_BY_ENDING = {ending: name for name, endings in _LANGUAGES.items() for ending in endings.split()}
# a line that is C++ and not C
_CPP = re.compile(rb"^[-+ @].*(\w::\w|\b(template\s*|struct\s+\w+)<|\b(namespace|constexpr|nullptr)\b)", re.MULTILINE)
_HUNK = re.compile(
    r"@@ -(?P<old>\d+(?:,(?P<removed>\d+))?) \+(?P<new>\d+(?:,(?P<added>\d+))?) @@(?P<rest>.*)", re.DOTALL
)
# a header's file name, in quotes if it has special characters
_FILE_NAME = re.compile(r"^(?:--- (\"?)a/|\+\+\+ (\"?)b/|rename (?:from|to) (\"?))([^\t\n]+)", re.MULTILINE)
# header of a file that may lack --- and +++: empty, binary, or with only its mode changed
_HEADER_ONLY = re.compile(r"^diff --git (\"?)a/(.+)\1 \1b/\2\1\n(?:new|deleted|old|index|Binary|GIT)", re.MULTILINE)
# consecutive header lines, whose values an inverse patch swaps
_LINE_PAIRS = (("--- ", "+++ "), ("old mode ", "new mode "), ("rename from ", "rename to "))
_INVERSES = {"new file mode ": "deleted file mode ", "deleted file mode ": "new file mode "}
_TEST_FOLDERS = {"test", "tests", "testsuite", "__tests__", "spec", "specs", "testdata", "test_data"}
_TEST_MODULE = re.compile(
    r"test_.*\.(pyi?|c|cc|cpp|[cm]?js)|.*_test\.(py|go|rb|cc|cpp|c|rs|dart)|tests?\.(py|rs)|.*[._](test|spec)\.[cm]?[jt]sx?|.*_spec\.rb"
    r"|.*Tests?\.(java|kt|php|scala|swift|cs)|Test[A-Z].*\.java|.*Spec\.(scala|kt|swift)",
    re.DOTALL,
)


class PatchSize(NamedTuple):
    """Size of a patch; `lines` counts added and removed ones."""

    files: int
    hunks: int
    lines: int


@dataclass(slots=True)
class _ChangedFile:
    path: str
    hunks: int = 0
    lines: int = 0


def measure_patch(patch: bytes) -> PatchSize:
    r"""Size of `patch`, from its headers.

    >>> measure_patch(b"--- a/x.py\n+++ b/x.py\n@@ -1,2 +1 @@\n-a\n-b\n+c\n")
    PatchSize(files=1, hunks=1, lines=3)
    """
    files = _parse_files(patch)
    return PatchSize(
        len({each.path for each in files}), sum(each.hunks for each in files), sum(each.lines for each in files)
    )


def list_changed_paths(patch: bytes) -> list[str]:
    r"""Files that `patch` changes, removes or renames, in order.

    >>> patch = b"diff --git a/x b/y\nrename from x\nrename to y\n--- a/z\n+++ /dev/null\n@@ -1 +0,0 @@\n--- a/no\n"
    >>> list_changed_paths(patch)
    ['x', 'y', 'z']
    """
    parts = _split_patch(patch.decode("utf-8", "surrogateescape"))
    text = "\n".join(line for line, hunk, _ in parts if hunk is None)
    named = [_unquote_name(old or new or moved, name) for old, new, moved, name in _FILE_NAME.findall(text)]
    named += [_unquote_name(quote, name) for quote, name in _HEADER_ONLY.findall(text)]
    return list(dict.fromkeys(named))


def _unquote_name(quote: str, name: str) -> str:
    if not quote:
        return name
    return unquote_path(name.removesuffix('"').encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def detect_language(patch: bytes, default: str = "text") -> str:
    r"""Programming language with most changed lines, else `default`. ``.h`` files are ``cpp`` if `patch` has C++.

    >>> detect_language(b"--- a/x.md\n+++ b/x.md\n@@ -1 +1 @@\n-a\n+b\n--- a/x.go\n+++ b/x.go\n@@ -1 +1 @@\n-a\n+b\n")
    'go'
    """
    count = Counter[str]()
    for file in _parse_files(patch):
        if name := detect_file_language(file.path):
            name = "cpp" if file.path.endswith(".h") and _CPP.search(patch) else name
            count[name] += 1 + file.lines
    return max(sorted(count), key=count.__getitem__) if count else default


def detect_file_language(path: str) -> str:
    """Programming language of a file ending; else empty.

    >>> detect_file_language("src/main.rs"), detect_file_language("README.md")
    ('rust', '')
    """
    return _LANGUAGE_BY_ENDING.get(PurePosixPath(path).suffix[1:].lower(), "")


def is_test_module(path: str) -> bool:
    """Whether test runners collect `path`, by its language's conventions.

    >>> [is_test_module(path) for path in ("a/test_b.c", "tests/b.py", "b_test.go", "src/b.test.ts", "BTest.java")]
    [True, False, True, True, True]
    """
    return _TEST_MODULE.fullmatch(PurePosixPath(path).name) is not None


def is_test_path(path: str) -> bool:
    """Whether `path` is a test module or in a folder of tests.

    >>> [is_test_path(path) for path in ("tests/data/a.txt", "a/conftest.py", "src/a/testing.py", "latest/a.py")]
    [True, True, False, False]
    """
    posix_path = PurePosixPath(path)
    folders = {part.lower() for part in posix_path.parts[:-1]}
    return posix_path.name == "conftest.py" or is_test_module(path) or bool(folders & _TEST_FOLDERS)


def _parse_files(patch: bytes) -> list[_ChangedFile]:
    files: list[_ChangedFile] = []
    parts = [*_split_patch(patch.decode("utf-8", "replace")), ("", None, list[str]())]  # a line after the last
    for (line, hunk, body), (following, _, _) in pairwise(parts):
        if hunk and files:
            files[-1].hunks += 1
            files[-1].lines += sum(each[:1] in ("+", "-") for each in body)
        elif line.startswith("--- ") and following.startswith("+++ "):
            # strips git's quotes but keeps its escapes, which change neither equality nor file endings
            old, new = (each[4:].split("\t")[0].strip().strip('"') for each in (line, following))
            files.append(_ChangedFile(old.removeprefix("a/") if new == "/dev/null" else new.removeprefix("b/")))
    return [file for file in files if file.path]


def _split_patch(patch: str) -> Iterator[tuple[str, re.Match[str] | None, list[str]]]:
    """Split `patch` into lines outside hunks, and hunk headers with match and the hunk's other lines."""
    lines, at = patch.split("\n"), 0
    while at < len(lines):
        hunk, end = _HUNK.fullmatch(lines[at]), at + 1
        if hunk:
            removed, added = (int(hunk[side] or 1) for side in ("removed", "added"))
            # a note on a missing line end belongs to the hunk
            while end < len(lines) and (removed > 0 or added > 0 or lines[end].startswith("\\")):
                sign = lines[end][:1]
                removed -= sign not in ("+", "\\")
                added -= sign not in ("-", "\\")
                end += 1
        yield lines[at], hunk, lines[at + 1 : end]
        at = end


def apply_to_text(before: bytes, patch: bytes) -> bytes | None:
    r"""`before` with the hunks of the one-file `patch` applied exactly; None if one does not fit.

    >>> apply_to_text(b"a\nb\n", b"--- a/x\n+++ b/x\n@@ -2 +2 @@\n-b\n+c\n\\ No newline at end of file\n")
    b'a\nc'
    """
    old = split_lines(before.decode("utf-8", "surrogateescape"))
    new, copied = list[str](), 0  # `copied`: number of old lines that are in `new`, or replaced
    for _, hunk, body in _split_patch(patch.decode("utf-8", "surrogateescape")):
        if hunk is None:
            continue
        number, _, count = hunk["old"].partition(",")
        start = int(number) - (count != "0")  # lines count from 1; a hunk without old lines follows its number
        removed, added = (_select_side(body, sign) for sign in "-+")
        if start < copied or old[start : start + len(removed)] != removed:
            return None
        new += old[copied:start] + added
        copied = start + len(removed)
    return "".join(new + old[copied:]).encode("utf-8", "surrogateescape")


def split_lines(text: str) -> list[str]:
    r"""Lines with their ends, split only at newlines as git does.

    >>> split_lines("a\x0cb\nc"), split_lines("a\n"), split_lines("")
    (['a\x0cb\n', 'c'], ['a\n'], [])
    """
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def format_diff(path: str, old: str, new: str) -> bytes:
    r"""``git diff`` of one changed file, without blob hashes.

    >>> print(format_diff("a.py", "x = 1\n", "x = 2\n").decode(), end="")
    diff --git a/a.py b/a.py
    --- a/a.py
    +++ b/a.py
    @@ -1 +1 @@
    -x = 1
    +x = 2
    """
    lines = difflib.unified_diff(split_lines(old), split_lines(new), f"a/{path}", f"b/{path}", n=3)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{body}".encode("utf-8", "surrogateescape")


def _select_side(body: list[str], sign: str) -> list[str]:
    """Old (`sign` ``-``) or new (``+``) lines of a hunk."""
    side = list[str]()
    for number, line in enumerate(body):
        if line[:1] in ("", " ", "\r", sign):  # editors strip the space of empty context lines
            unended = body[number + 1 : number + 2] and body[number + 1].startswith("\\")
            side.append(line[1:] + "\n" * (not unended))
    return side


def reverse_patch(patch: str) -> str:
    r"""Inverse of `patch`, with removed lines before added ones.

    >>> print(reverse_patch("--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@ f\n-a\n"), end="")
    --- /dev/null
    +++ b/x
    @@ -0,0 +1 @@ f
    +a
    """
    parts, out, at = list(_split_patch(patch)), list[str](), 0
    while at < len(parts):
        line, hunk, body = parts[at]
        following = parts[at + 1][0] if at + 1 < len(parts) else ""
        at += 1
        if hunk:
            out.append(f"@@ -{hunk['new']} +{hunk['old']} @@{hunk['rest']}")
            out += _reverse_body(body)
            continue
        pair = next((pair for pair in _LINE_PAIRS if line.startswith(pair[0]) and following.startswith(pair[1])), None)
        if pair is None:
            out.append(_reverse_header(line))
            continue
        at += 1
        old, new = line[len(pair[0]) :], following[len(pair[1]) :]
        if pair[0] == "--- ":
            old, new = _swap_prefix(old, "a/", "b/"), _swap_prefix(new, "b/", "a/")
        elif pair[0] == "rename from ":
            last_header = max(number for number, each in enumerate(out) if each.startswith("diff --git "))
            out[last_header] = f"diff --git {_add_prefix('a/', new)} {_add_prefix('b/', old)}"
        out += [pair[0] + new, pair[1] + old]
    return "\n".join(out)


def _reverse_body(lines: list[str]) -> list[str]:
    out, removed, added = list[str](), list[str](), list[str]()
    last = out
    for line in lines:
        if line.startswith("\\"):
            last.append(line)
        elif line[:1] == "+":
            last = removed
            last.append("-" + line[1:])
        elif line[:1] == "-":
            last = added
            last.append("+" + line[1:])
        else:
            out += [*removed, *added, line]
            removed, added, last = [], [], out
    return [*out, *removed, *added]


def _reverse_header(line: str) -> str:
    for prefix, inverse in _INVERSES.items():
        if line.startswith(prefix):
            return inverse + line[len(prefix) :]
    if match := re.fullmatch(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)", line):
        return f"index {match[2]}..{match[1]}{match[3]}"
    return line


def _add_prefix(side: str, name: str) -> str:
    return f'"{side}{name[1:]}' if name.startswith('"') else side + name


def _swap_prefix(name: str, old: str, new: str) -> str:
    quote = name[: name.startswith('"')]  # the opening quote, or empty
    return quote + new + name[len(quote + old) :] if name.startswith(quote + old) else name
