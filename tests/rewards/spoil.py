"""Patches that repair nothing, or less than the reference, derived from it, to test what cheap edits earn."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from coderepairrl.rewards.parse import Block, FilePatch, parse_patch
from coderepairrl.rewards.syntax import find_syntax, read_indentation

ZERO = ("empty", "header only", "blank line", "white space", "comment")
"""Classes that change nothing: a sound reward gives them 0 unless the reference is such a change."""
COPIES = (
    *("right lines: typed twice", "right lines: twice, the last word changed"),
    *("lines above: typed twice", "right lines: reversed"),
)
_FAR = 200
_WORD = re.compile(rb"[A-Za-z0-9_]+|[^\sA-Za-z0-9_]")
_INSIDE = re.compile(
    rb"(\s*(?:return|if|elif|while|assert|raise|yield)\s+|.*?[^=!<>]=\s*(?!=)|\s*)(.+?)(:?\s*[;,]?\s*\{?)$", re.DOTALL
)
"""Text before the expression of a line, the expression, and the text after it."""
_SWAPPED = bytes.maketrans(b"'\"", b"\"'")


def make_spoiled_patches(reference: bytes, seed: int = 0) -> dict[str, bytes]:
    """Make a patch of each class, by its name; only ``empty`` where the reference changes no line of text.

    Classes "right lines: ..." edit all lines that the reference removes, and are left out if they would change none;
    most others edit the first file of the reference. "half of the reference" has the first half of its blocks, or of
    the lines of its only block. Places and lines are drawn from `seed` and the reference. Raises `MalformedPatch`.
    """
    files = [file for file in parse_patch(reference) if file.blocks]
    if not files:
        return {"empty": b""}
    rng = random.Random(f"{seed}:{hashlib.sha256(reference).hexdigest()}")
    file = files[0]
    block = rng.choice(file.blocks)
    shown = [line + b"\n" for hunk in file.hunks for line in hunk.side(b"-") if line.strip()] or [b"pass\n"]
    right = block.removed[0] if block.removed else rng.choice(shown)
    elsewhere = rng.randrange(2 * block.at + _FAR)
    junk = read_indentation(right) + b"raise NotImplementedError\n"
    marks = find_syntax(file.path)
    opener, closer = (marks.comments[0], b"") if marks.comments else marks.blocks or (b"#", b"")
    comment = read_indentation(right) + opener + b" note " + closer + b"\n"
    near = max(block.at + rng.randrange(-3, 4), 0)
    moved = [Block(each.at + _FAR, each.removed, each.added) for each in file.blocks]
    noise = Block(file.blocks[-1].at + _FAR, (rng.choice(shown),), (junk,))
    return {
        "empty": b"",
        "header only": _make_header(file),
        "blank line": _make_diff(file, [Block(block.at, (), (b"\n",))]),
        "white space": _make_diff(file, [Block(block.at, (right,), (right.rstrip(b"\r\n") + b" \n",))]),
        "comment": _make_diff(file, [Block(block.at, (), (comment,))]),
        "junk in the right file": _make_diff(file, [Block(elsewhere, (rng.choice(shown),), (junk,))]),
        "junk in the right hunk": _make_diff(file, [Block(near, (rng.choice(shown),), (junk,))]),
        "junk on the right line": _make_diff(file, [Block(block.at, block.removed[:1], (junk,))]),
        "right edit, wrong place": _make_diff(file, moved),
        "reference and noise": _make_diff(file, [*file.blocks, noise]),
        **_edit_removed_lines(files, rng),
        **_copy_old_lines(files),
        **_reuse_reference(reference, files),
    }


def _edit_removed_lines(files: Sequence[FilePatch], rng: random.Random) -> dict[str, bytes]:
    """Classes that edit every line that the reference removes."""

    def invisible(body: bytes) -> bytes:
        at = rng.choice([match.start() for match in _WORD.finditer(body)])
        return body[:at] + "\u200b".encode() + body[at:]

    def parentheses(body: bytes) -> bytes:
        match = _INSIDE.match(body)
        return body if match is None else match[1] + b"(" + match[2] + b")" + match[3]

    def mutated(body: bytes) -> bytes:
        word = rng.choice(list(_WORD.finditer(body)))
        others = [sign for sign in (b"+", b"-", b"*", b"<", b".") if sign != word[0]]
        new = word[0] + b"_x" if word[0][-1:].isalnum() else rng.choice(others)
        return body[: word.start()] + new + body[word.end() :]

    classes: dict[str, Callable[[bytes], bytes | None]] = {
        "invisible characters": invisible,
        "parentheses": parentheses,
        "other quotes": lambda body: body.translate(_SWAPPED),
        "a token mutated": mutated,
        "deleted": lambda body: None,
    }
    made = {f"right lines: {name}": b"".join(_edit_each_line(files, edit)) for name, edit in classes.items()}
    return {name: patch for name, patch in made.items() if patch}


def _copy_old_lines(files: Sequence[FilePatch]) -> dict[str, bytes]:
    """Classes that repeat lines of the old file: those that the reference removes (also with another last word, or in
    reverse order), and the three above its first change in each file."""
    made = dict.fromkeys(COPIES, b"")
    for file in files:
        right = [block for block in file.blocks if block.removed]
        above = [line[1:] + b"\n" for line in takewhile(lambda line: line[:1] == b" ", file.hunks[0].body)][-3:]
        for name, blocks in zip(
            COPIES,
            (
                [Block(each.at + len(each.removed), (), each.removed) for each in right],
                [Block(each.at + len(each.removed), (), tuple(map(_rename_last_word, each.removed))) for each in right],
                [Block(file.blocks[0].at, (), tuple(above))] if above else [],
                [Block(each.at, each.removed, each.removed[::-1]) for each in right if len(each.removed) > 1],
            ),
            strict=True,
        ):
            made[name] += _make_diff(file, blocks) if blocks else b""
    return {name: patch for name, patch in made.items() if patch}


def _rename_last_word(line: bytes) -> bytes:
    return re.sub(rb"(\w)(\W*)$", rb"\1_x\2", line, count=1)


def _edit_each_line(files: Sequence[FilePatch], edit: Callable[[bytes], bytes | None]) -> Iterator[bytes]:
    """Diffs of `files` that apply `edit` to every removed line without its line end; None deletes the line."""

    def edited(line: bytes) -> tuple[bytes, ...]:
        body = line.rstrip(b"\r\n")
        new = edit(body) if _WORD.search(body) else body
        return () if new is None else (new + line[len(body) :],)

    for file in files:
        blocks = [Block(each.at, each.removed, sum(map(edited, each.removed), ())) for each in file.blocks]
        if blocks := [block for block in blocks if block.removed != block.added]:
            yield _make_diff(file, blocks)


def _reuse_reference(reference: bytes, files: Sequence[FilePatch]) -> dict[str, bytes]:
    """Classes that contain the reference or a part of it."""
    typed, half = [], []
    places = [(file, block) for file in files for block in file.blocks]
    for file in files:
        marks = find_syntax(file.path)
        opener, closer = (marks.comments[0], b"") if marks.comments else marks.blocks or (b"#", b"")
        lines = [(block, [line.rstrip() for line in block.added]) for block in file.blocks if block.added]
        blocks = [
            Block(block.at, (), tuple(b"%s %s %s\n" % (opener, line, closer) for line in new)) for block, new in lines
        ]
        typed += [_make_diff(file, blocks)] if blocks else []
        kept = [block for other, block in places[: (len(places) + 1) // 2] if other is file]
        half += [_make_diff(file, kept)] if kept else []
    made = {"the reference as comments": b"".join(typed), "half of the reference": b"".join(half)}
    if len(places) == 1:
        [(file, block)] = places
        removed, added = (side[: (len(side) + 1) // 2] for side in (block.removed, block.added))
        part = Block(block.at, removed, added)
        made["half of the reference"] = _make_diff(file, [part]) if part != block else b""
    ends = reference if reference.endswith(b"\n") else reference + b"\n"
    made["the reference and its test"] = ends + _make_new_file("tests/test_repair.py")
    made["the reference and 20 files"] = ends + b"".join(_make_new_file(f"junk_{i}.py") for i in range(20))
    return {name: patch for name, patch in made.items() if patch}


def _make_new_file(name: str) -> bytes:
    """A diff that adds a file of one line."""
    head = f"diff --git a/{name} b/{name}\nnew file mode 100644\n--- /dev/null\n+++ b/{name}\n"
    return f"{head}@@ -0,0 +1 @@\n+value = 1\n".encode()


def _make_header(file: FilePatch) -> bytes:
    name = (file.new or file.old).encode("utf-8", "surrogateescape")
    return b"diff --git a/%s b/%s\n" % (name, name)


def _make_diff(file: FilePatch, blocks: Sequence[Block]) -> bytes:
    """A diff with `blocks` as hunks without context."""
    name = (file.new or file.old).encode("utf-8", "surrogateescape")
    text = _make_header(file) + b"--- a/%s\n+++ b/%s\n" % (name, name)
    shift = 0
    for block in sorted(blocks, key=lambda block: block.at):
        old, new = len(block.removed), len(block.added)
        first, after = block.at + (old > 0), block.at + shift + (new > 0)
        text += b"@@ -%d,%d +%d,%d @@\n" % (first, old, after, new)
        for sign, side in ((b"-", block.removed), (b"+", block.added)):
            for line in side:
                text += sign + (line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
        shift += new - old
    return text
