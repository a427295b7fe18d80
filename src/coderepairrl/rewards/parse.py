"""Parser of Git's unified diffs, as bytes.

Reads renames, modes, binary patches, quoted paths, CRLF content, missing final newlines, mail headers, and files with
only ``---`` and ``+++`` lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from coderepairrl.errors import UsageError
from coderepairrl.grading.steering import unquote_path

_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")

# first bytes of context lines; empty ones may have lost their space
_CONTEXT = (b" ", b"", b"\r")
_SIDES = (b"a/", b"b/")
# prefixes of git's diff.mnemonicPrefix, different on the two sides: c(ommit), i(ndex), o(bject), w(orking tree)
_MNEMONIC = re.compile(rb"diff --git \"?([ciow12]/)(.+?)\"? \"?(?!\1)([ciow12]/)\2\"?")


class MalformedPatch(UsageError):
    """Not a unified diff. `line` counts from 1."""

    def __init__(self, line: int, problem: str, *, fix: str = "make the patch with `git diff` or `diff -u`") -> None:
        super().__init__(f"malformed patch, line {line}: {problem}", fix=fix)
        self.line = line


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring changed lines, with line endings, after `at` lines of the old file."""

    at: int
    removed: tuple[bytes, ...]
    added: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Hunk:
    """Function name (from git) and tagged lines of a hunk."""

    heading: bytes
    body: tuple[bytes, ...]

    def side(self, tag: bytes) -> tuple[bytes, ...]:
        """Lines of the old (``-``) or new (``+``) file, with context, without line endings."""
        return tuple(line[1:] for line in self.body if line[:1] in (*_CONTEXT, tag))


@dataclass(slots=True)
class FilePatch:
    """Patch of one file. `old` or `new` is empty where the file does not exist."""

    old: str = ""
    new: str = ""
    blocks: list[Block] = field(default_factory=list)
    hunks: list[Hunk] = field(default_factory=list)
    old_mode: str = ""
    new_mode: str = ""
    """Set when the mode changes, and for new files."""
    renamed: bool = False
    copied: bool = False
    binary: str = ""
    """SHA-256 of a binary payload; ``differ`` without payload."""

    @property
    def path(self) -> str:
        """Name that identifies the file across patches: the old one, except for new files and copies."""
        return self.new if self.copied or not self.old else self.old


def parse_patch(patch: bytes) -> tuple[FilePatch, ...]:
    """Parse `patch` into files, in order. Raises `MalformedPatch`."""
    return tuple(_Reader(patch).read_files())


class _Reader:
    """Cursor over the lines of a patch; errors name the line at the cursor."""

    def __init__(self, patch: bytes) -> None:
        self.lines = patch.split(b"\n")  # not splitlines: a lone CR, FF or NEL is content
        if not self.lines[-1]:
            self.lines.pop()
        self.at = 0
        self.sides = _SIDES

    def peek(self, ahead: int = 0) -> bytes:
        index = self.at + ahead
        return self.lines[index].removesuffix(b"\r") if index < len(self.lines) else b""

    def make_error(self, problem: str) -> MalformedPatch:
        return MalformedPatch(min(self.at, len(self.lines) - 1) + 1, problem)

    def read_files(self) -> Iterator[FilePatch]:
        has_file = False
        after_file = False  # only blank lines since a file
        while self.at < len(self.lines):
            line = self.peek()
            if line.startswith(b"diff --git ") or self.at_plain_header():
                has_file = after_file = True
                yield self.read_file()
            elif line.startswith((b"diff --cc ", b"diff --combined ", b"@@@ ")):
                raise self.make_error("a combined diff of a merge has no single old file")
            elif line.startswith(b"@@ "):
                raise self.make_error("a hunk before any file header")
            elif after_file and line.startswith((b"+", b" ", b"-")) and line.strip() and line.rstrip() != b"--":
                raise self.make_error("a changed or context line outside its hunk; the hunk header counts fewer lines")
            else:
                after_file = after_file and not line.strip()
                self.at += 1  # prose around the diff: a mail header, a commit message, a signature
        if not has_file and any(line.strip() for line in self.lines):
            self.at = 0
            raise self.make_error("no file header (`diff --git a/FILE b/FILE`, or `--- a/FILE` and `+++ b/FILE`)")

    def at_plain_header(self) -> bool:
        return self.peek().startswith(b"--- ") and self.peek(1).startswith(b"+++ ")

    def read_file(self) -> FilePatch:
        file = FilePatch()
        if self.peek().startswith(b"diff --git "):
            match = _MNEMONIC.fullmatch(self.peek())
            self.sides = (match[1], match[3]) if match else _SIDES
            file.old, file.new = self.read_git_names()
            self.at += 1
            self.read_extended_headers(file)
        if self.at_plain_header():
            old, new = self.decode_name(self.peek()[4:]), self.decode_name(self.peek(1)[4:])
            if not (file.renamed or file.copied):
                file.old, file.new = old, new
            self.at += 2
            if not self.peek().startswith(b"@@ "):
                raise self.make_error("expected a hunk (`@@ -1,3 +1,3 @@`) after the file names")
        while self.peek().startswith(b"@@"):
            self.read_hunk(file)
        if not (file.old or file.new):
            raise self.make_error("the file has no name")
        return file

    def read_git_names(self) -> tuple[str, str]:
        """Names in ``diff --git a/X b/X``."""
        text = self.peek()[len(b"diff --git ") :]
        if b'"' in text:
            match = re.fullmatch(rb'("(?:[^"\\]|\\.)*"|\S+) ("(?:[^"\\]|\\.)*"|\S+)', text)
            if match is None:
                raise self.make_error("cannot read the quoted file names")
            return self.decode_name(match[1]), self.decode_name(match[2])
        middle, first = len(text) // 2, text.find(b" ")
        if first < 0:
            raise self.make_error("`diff --git` needs two file names")
        old, new = self.decode_name(text[:middle]), self.decode_name(text[middle + 1 :])
        if text[middle : middle + 1] == b" " and old == new:
            return old, new
        # names with spaces may be cut wrongly here: the headers that follow decide
        return self.decode_name(text[:first]), self.decode_name(text[first + 1 :])

    def read_extended_headers(self, file: FilePatch) -> None:
        while self.at < len(self.lines):
            line = self.peek()
            word, _, rest = line.partition(b" mode ")
            mode = rest.decode("ascii", "replace")
            if word == b"old":
                file.old_mode = mode
            elif word == b"new":
                file.new_mode = mode
            elif word == b"new file":
                file.old, file.new_mode = "", mode
            elif word == b"deleted file":
                file.new, file.old_mode = "", mode
            elif line.startswith((b"rename from ", b"copy from ")):
                file.renamed, file.copied = line[:1] == b"r", line[:1] == b"c"
                file.old = self.decode_name(line.partition(b" from ")[2], prefixed=False)
            elif line.startswith((b"rename to ", b"copy to ")):
                file.new = self.decode_name(line.partition(b" to ")[2], prefixed=False)
            elif line == b"GIT binary patch":
                self.at += 1
                file.binary = self.read_binary()
                return
            elif line.startswith(b"Binary files ") and line.endswith(b" differ"):
                file.binary = "differ"
            elif not line.startswith((b"index ", b"similarity index ", b"dissimilarity index ")):
                return
            self.at += 1

    def read_binary(self) -> str:
        """Return the digest of the payload that makes the new file; git may add one that restores the old file."""
        if not re.fullmatch(rb"(literal|delta) \d+", self.peek()):
            raise self.make_error("expected `literal SIZE` or `delta SIZE` of a binary patch")
        digest, is_first = hashlib.sha256(), True
        while re.match(rb"(literal|delta) \d+$", self.peek()):
            while self.at < len(self.lines) and self.peek():
                if is_first:
                    digest.update(self.peek() + b"\n")
                self.at += 1
            self.at += 1
            is_first = False
        return digest.hexdigest()

    def read_hunk(self, file: FilePatch) -> None:
        header = _HUNK.match(self.peek())
        if header is None:
            raise self.make_error("not a hunk header (`@@ -1,3 +1,3 @@`)")
        first, old_remaining, _, new_remaining = (1 if number is None else int(number) for number in header.groups())
        at = first if old_remaining == 0 else max(first - 1, 0)  # for an empty range git names the line before it
        heading = self.peek()[header.end() :].strip()
        self.at += 1
        start = self.at
        while old_remaining > 0 or new_remaining > 0 or self.peek().startswith(b"\\"):
            if self.at >= len(self.lines):
                raise self.make_error("the patch ends inside a hunk")
            tag = self.lines[self.at][:1]
            is_old, is_new = tag in _CONTEXT or tag == b"-", tag in _CONTEXT or tag == b"+"
            if is_old > old_remaining or is_new > new_remaining or not (is_old or is_new or tag == b"\\"):
                raise self.make_error("not a line that the hunk header announces; the hunk is cut or miscounted")
            old_remaining, new_remaining = old_remaining - is_old, new_remaining - is_new
            self.at += 1
        body = tuple(self.lines[start : self.at])
        file.blocks += _split_blocks(at, body)
        file.hunks.append(Hunk(heading, body))

    def decode_name(self, raw: bytes, *, prefixed: bool = True) -> str:
        """File name without quotes, timestamp and ``a/`` or ``b/``; empty for ``/dev/null``."""
        quoted = raw.startswith(b'"')
        raw = unquote_path(raw[1:].rpartition(b'"')[0]) if quoted else raw.partition(b"\t")[0]
        if raw == b"/dev/null":
            return ""
        if prefixed and raw[:2] in self.sides:
            raw = raw[2:]
        return raw.removeprefix(b"./").decode("utf-8", "surrogateescape")


def _split_blocks(at: int, body: Iterable[bytes]) -> Iterator[Block]:
    """Blocks of a hunk after `at` lines of the old file; a removal after an addition begins the next one."""
    start, removed, added, side = at, list[bytes](), list[bytes](), list[bytes]()
    for line in (*body, b" "):  # a context line ends the last block
        tag, text = line[:1], line[1:] + b"\n"
        if tag == b"\\":  # "\ No newline at end of file" belongs to the line above
            side[-1:] = [last.removesuffix(b"\n") for last in side[-1:]]
            continue
        if tag in _CONTEXT or (tag == b"-" and added):
            if removed or added:
                yield Block(start, tuple(removed), tuple(added))
            start, removed, added = at + (tag in _CONTEXT), [], []
        side = {b"-": removed, b"+": added}.get(tag, [])
        side.append(text)
        at += tag != b"+"
