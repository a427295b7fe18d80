"""Languages, size and inverse of a patch."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from coderepairrl.grading.steering import unquote

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
_BY_ENDING = {ending: name for name, endings in _LANGUAGES.items() for ending in endings.split()}
_CPP = re.compile(rb"^[-+ @].*(\w::\w|\b(template\s*|struct\s+\w+)<|\b(namespace|constexpr|nullptr)\b)", re.MULTILINE)
_HUNK = re.compile(
    r"@@ -(?P<old>\d+(?:,(?P<removed>\d+))?) \+(?P<new>\d+(?:,(?P<added>\d+))?) @@(?P<rest>.*)", re.DOTALL
)
_NAMED = re.compile(r"^(?:--- (\"?)a/|\+\+\+ (\"?)b/|rename (?:from|to) (\"?))([^\t\n]+)", re.MULTILINE)
_WITHOUT_LINES = re.compile(r"^diff --git (\"?)a/(.+)\1 \1b/\2\1\n(?:new|deleted|old|index|Binary|GIT)", re.MULTILINE)
_PAIRS = (("--- ", "+++ "), ("old mode ", "new mode "), ("rename from ", "rename to "))
_SINGLE = {"new file mode ": "deleted file mode ", "deleted file mode ": "new file mode "}


_TEST_FOLDERS = {"test", "tests", "testsuite", "__tests__", "spec", "specs", "testdata", "test_data"}
_TEST_MODULE = re.compile(
    r"test_.*\.(pyi?|c|cc|cpp|[cm]?js)|.*_test\.(py|go|rb|cc|cpp|c|rs|dart)|tests?\.(py|rs)|.*[._](test|spec)\.[cm]?[jt]sx?|.*_spec\.rb"
    r"|.*Tests?\.(java|kt|php|scala|swift|cs)|Test[A-Z].*\.java|.*Spec\.(scala|kt|swift)",
    re.DOTALL,
)


class Size(NamedTuple):
    """Size of a patch; `lines` are added and removed ones."""

    files: int
    hunks: int
    lines: int


class _File(NamedTuple):
    path: str
    hunks: int
    lines: int


def size(patch: bytes) -> Size:
    r"""Size of `patch`, from its headers.

    >>> size(b"--- a/x.py\n+++ b/x.py\n@@ -1,2 +1 @@\n-a\n-b\n+c\n")
    Size(files=1, hunks=1, lines=3)
    """
    files = list(_patch_files(patch))
    return Size(
        len({each.path for each in files}), sum(each.hunks for each in files), sum(each.lines for each in files)
    )


def changed_paths(patch: bytes) -> list[str]:
    r"""Files that `patch` changes, in order, including removed and renamed ones.

    >>> patch = b"diff --git a/x b/y\nrename from x\nrename to y\n--- a/z\n+++ /dev/null\n@@ -1 +0,0 @@\n--- a/no\n"
    >>> changed_paths(patch)
    ['x', 'y', 'z']
    """
    lines, heads, at = patch.decode("utf-8", "surrogateescape").split("\n"), list[str](), 0
    while at < len(lines):
        if match := _HUNK.fullmatch(lines[at]):
            at = _end(lines, at, match)
        else:
            heads.append(lines[at])
            at += 1
    text = "\n".join(heads)
    named = [_unquote_name(old or new or moved, name) for old, new, moved, name in _NAMED.findall(text)]
    named += [_unquote_name(quote, name) for quote, name in _WITHOUT_LINES.findall(text)]
    return list(dict.fromkeys(named))


def _unquote_name(quote: str, name: str) -> str:
    if not quote:
        return name
    return unquote(name.removesuffix('"').encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def detect_language(patch: bytes, default: str = "text") -> str:
    r"""Programming language with most changed lines, else `default`. Headers are ``cpp`` if `patch` has C++ in it.

    >>> detect_language(b"--- a/x.md\n+++ b/x.md\n@@ -1 +1 @@\n-a\n+b\n--- a/x.go\n+++ b/x.go\n@@ -1 +1 @@\n-a\n+b\n")
    'go'
    """
    count = Counter[str]()
    for file in _patch_files(patch):
        if name := language_of(file.path):
            name = "cpp" if file.path.endswith(".h") and _CPP.search(patch) else name
            count[name] += 1 + file.lines
    return max(sorted(count), key=count.__getitem__) if count else default


def language_of(path: str) -> str:
    """Programming language of a file ending; else empty.

    >>> language_of("src/main.rs"), language_of("README.md")
    ('rust', '')
    """
    return _BY_ENDING.get(PurePosixPath(path).suffix[1:].lower(), "")


def is_test_module(path: str) -> bool:
    """Whether test runners collect `path`, by its language's conventions.

    >>> [is_test_module(path) for path in ("a/test_b.c", "tests/b.py", "b_test.go", "src/b.test.ts", "BTest.java")]
    [True, False, True, True, True]
    """
    return _TEST_MODULE.fullmatch(PurePosixPath(path).name) is not None


def is_test(path: str) -> bool:
    """Whether `path` is a test module or in a folder of tests.

    >>> [is_test(path) for path in ("tests/data/a.txt", "a/conftest.py", "src/a/testing.py", "latest/a.py")]
    [True, True, False, False]
    """
    place = PurePosixPath(path)
    folders = {part.lower() for part in place.parts[:-1]}
    return place.name == "conftest.py" or is_test_module(path) or bool(folders & _TEST_FOLDERS)


def _patch_files(patch: bytes) -> Iterator[_File]:
    lines = patch.decode("utf-8", "replace").split("\n")
    path, hunks, changed = "", 0, 0
    at = 0
    while at < len(lines):
        line = lines[at]
        if path and (match := _HUNK.fullmatch(line)):
            end = _end(lines, at, match)
            hunks += 1
            changed += sum(each[:1] in ("+", "-") for each in lines[at + 1 : end])
            at = end
            continue
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            if path:
                yield _File(path, hunks, changed)
            # git's quotes go, its escapes stay: names are compared, and their endings read
            old, new = (each[4:].split("\t")[0].strip().strip('"') for each in lines[at : at + 2])
            path = old.removeprefix("a/") if new == "/dev/null" else new.removeprefix("b/")
            hunks = changed = 0
            at += 1
        at += 1
    if path:
        yield _File(path, hunks, changed)


def apply_to_text(before: bytes, patch: bytes) -> bytes | None:
    r"""`before` with the hunks of the one-file `patch` applied exactly; None if one does not fit.

    >>> apply_to_text(b"a\nb\n", b"--- a/x\n+++ b/x\n@@ -2 +2 @@\n-b\n+c\n\\ No newline at end of file\n")
    b'a\nc'
    """
    old = lines_of(before.decode("utf-8", "surrogateescape"))
    lines = patch.decode("utf-8", "surrogateescape").split("\n")
    new, done, at = list[str](), 0, 0
    while at < len(lines):
        if not (match := _HUNK.fullmatch(lines[at])):
            at += 1
            continue
        end = _end(lines, at, match)
        number, _, count = match["old"].partition(",")
        start = int(number) - (count != "0")
        removed, added = (_side_of(lines[at + 1 : end], sign) for sign in "-+")
        if start < done or old[start : start + len(removed)] != removed:
            return None
        new += old[done:start] + added
        done, at = start + len(removed), end
    return "".join(new + old[done:]).encode("utf-8", "surrogateescape")


def lines_of(text: str) -> list[str]:
    r"""Lines with their ends, split only at newlines as git does.

    >>> lines_of("a\x0cb\nc"), lines_of("a\n"), lines_of("")
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
    lines = difflib.unified_diff(lines_of(old), lines_of(new), f"a/{path}", f"b/{path}", n=3)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{body}".encode("utf-8", "surrogateescape")


def _side_of(body: list[str], sign: str) -> list[str]:
    side = list[str]()
    for number, line in enumerate(body):
        if line[:1] in ("", " ", "\r", sign):
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
    lines, out = patch.split("\n"), list[str]()
    at = 0
    while at < len(lines):
        line, following = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
        if match := _HUNK.fullmatch(line):
            end = _end(lines, at, match)
            out.append(f"@@ -{match['new']} +{match['old']} @@{match['rest']}")
            out += _body(lines[at + 1 : end])
            at = end
            continue
        pair = next((pair for pair in _PAIRS if line.startswith(pair[0]) and following.startswith(pair[1])), None)
        if pair is not None:
            old, new = line[len(pair[0]) :], following[len(pair[1]) :]
            if pair[0] == "--- ":
                old, new = _side(old, "a/", "b/"), _side(new, "b/", "a/")
            elif pair[0] == "rename from ":
                head = max(number for number, each in enumerate(out) if each.startswith("diff --git "))
                out[head] = f"diff --git {_with('a/', new)} {_with('b/', old)}"
            out += [pair[0] + new, pair[1] + old]
            at += 2
            continue
        out.append(_header(line))
        at += 1
    return "\n".join(out)


def _end(lines: list[str], at: int, match: re.Match[str]) -> int:
    """Index after the hunk at `at`, including a note on a missing line end."""
    removed, added = (int(match[side]) if match[side] else 1 for side in ("removed", "added"))
    at += 1
    while at < len(lines) and (removed > 0 or added > 0 or lines[at].startswith("\\")):
        sign = lines[at][:1]
        removed -= sign not in ("+", "\\")
        added -= sign not in ("-", "\\")
        at += 1
    return at


def _body(lines: list[str]) -> list[str]:
    out, sides = list[str](), (list[str](), list[str]())
    last = out
    for line in lines:
        if line.startswith("\\"):
            last.append(line)
        elif line[:1] in ("+", "-"):
            last = sides[line[0] == "-"]
            last.append(("-" if line[0] == "+" else "+") + line[1:])
        else:
            out += [*sides[0], *sides[1], line]
            sides, last = ([], []), out
    return [*out, *sides[0], *sides[1]]


def _header(line: str) -> str:
    for this, that in _SINGLE.items():
        if line.startswith(this):
            return that + line[len(this) :]
    if match := re.fullmatch(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)", line):
        return f"index {match[2]}..{match[1]}{match[3]}"
    return line


def _with(side: str, name: str) -> str:
    return f'"{side}{name[1:]}' if name.startswith('"') else side + name


def _side(name: str, this: str, that: str) -> str:
    quote = name[: name.startswith('"')]
    return quote + that + name[len(quote + this) :] if name.startswith(quote + this) else name
