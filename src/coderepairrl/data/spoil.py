"""Patches that repair nothing, or less than the reference, made from it by rule: what cheap edits earn."""

from __future__ import annotations

import hashlib
import random

from coderepairrl.rewards.parse import Block, FilePatch, parse
from coderepairrl.rewards.syntax import indentation, syntax_of

ZERO = ("empty", "header only", "blank line", "white space", "comment")
"""The classes that change nothing: a sound reward gives them 0 wherever the reference itself is more than that."""
_FAR = 200


def spoiled(reference: bytes, seed: int = 0) -> dict[str, bytes]:
    """A patch of each class, by its name; only ``empty`` where the reference changes no line of text.

    All are edits of the first file that the reference changes. Places and lines are drawn from `seed`
    and the reference. Raises `MalformedPatch`.
    """
    files = [file for file in parse(reference) if file.blocks]
    if not files:
        return {"empty": b""}
    rng = random.Random(f"{seed}:{hashlib.sha256(reference).hexdigest()}")
    file = files[0]
    block = rng.choice(file.blocks)
    shown = [line + b"\n" for hunk in file.hunks for line in hunk.side(b"-") if line.strip()] or [b"pass\n"]
    right = block.removed[0] if block.removed else rng.choice(shown)
    elsewhere = rng.randrange(2 * block.at + _FAR)
    junk = indentation(right) + b"raise NotImplementedError\n"
    marks = syntax_of(file.path)
    opener, closer = (marks.comments[0], b"") if marks.comments else marks.blocks or (b"#", b"")
    comment = indentation(right) + opener + b" note " + closer + b"\n"
    near = max(block.at + rng.randrange(-3, 4), 0)
    rewritten = Block(block.at, tuple(shown), tuple(junk for _ in shown))
    moved = [Block(each.at + _FAR, each.removed, each.added) for each in file.blocks]
    noise = Block(file.blocks[-1].at + _FAR, (rng.choice(shown),), (junk,))
    return {
        "empty": b"",
        "header only": _head(file),
        "blank line": _diff(file, [Block(block.at, (), (b"\n",))]),
        "white space": _diff(file, [Block(block.at, (right,), (right.rstrip(b"\r\n") + b" \n",))]),
        "comment": _diff(file, [Block(block.at, (), (comment,))]),
        "junk in the right file": _diff(file, [Block(elsewhere, (rng.choice(shown),), (junk,))]),
        "junk in the right hunk": _diff(file, [Block(near, (rng.choice(shown),), (junk,))]),
        "junk on the right line": _diff(file, [Block(block.at, block.removed[:1], (junk,))]),
        "right line typed again": _diff(file, [Block(block.at, (), (right,))]),
        "whole hunks rewritten": _diff(file, [rewritten]),
        "right edit, wrong place": _diff(file, moved),
        "reference and noise": _diff(file, [*file.blocks, noise]),
    }


def _head(file: FilePatch) -> bytes:
    name = (file.new or file.old).encode("utf-8", "surrogateescape")
    return b"diff --git a/%s b/%s\n" % (name, name)


def _diff(file: FilePatch, blocks: list[Block]) -> bytes:
    """`blocks` as hunks without context."""
    name = (file.new or file.old).encode("utf-8", "surrogateescape")
    text = _head(file) + b"--- a/%s\n+++ b/%s\n" % (name, name)
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
