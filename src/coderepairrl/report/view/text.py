"""Untrusted text, made safe to view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from coderepairrl.printable import visible

_SHOWN = 256 << 10  # bytes of a patch: a policy can write any number
_LONGEST_CHARACTER = 4  # bytes of UTF-8, so at most as many tokens


def templates(package: str, **filters: Callable[..., Any]) -> Environment:
    """Templates of `package`, escaping, with strict variables."""
    environment = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= filters
    return environment


class Piece(NamedTuple):
    """Text of a token. A character over several tokens is at the first; `part` marks the others."""

    text: str
    part: bool = False


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Piece]:
    """Text of each token; concatenated, the text of all.

    >>> pieces((1, 2), lambda ids: bytes({1: 0xC3, 2: 0xA9}[i] for i in ids).decode(errors="replace"))
    [Piece(text='é', part=False), Piece(text='', part=True)]
    """
    texts: list[Piece] = []
    at = 0
    while at < len(ids):
        text, width = decode(ids[at : at + 1]), 1
        for wider in range(2, min(_LONGEST_CHARACTER, len(ids) - at) + 1):
            if not text.endswith("\ufffd"):
                break
            together = decode(ids[at : at + wider])
            if not together.endswith("\ufffd"):
                text, width = together, wider
        texts.append(Piece(text))
        texts += [Piece("", part=True)] * (width - 1)
        at += width
    return texts


class DiffLine(NamedTuple):
    """Line of a patch; kind ``file``, ``hunk``, ``add``, ``del`` or ``same``."""

    kind: str
    text: str


def diff_lines(patch: bytes) -> list[DiffLine]:
    r"""Lines of a unified diff; a long one is cut, with a remark.

    >>> [line.kind for line in diff_lines(b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- a\n+b\n")]
    ['file', 'file', 'file', 'hunk', 'del', 'add']
    """
    lines: list[DiffLine] = []
    body = False
    excerpt = patch[:_SHOWN]
    for text in excerpt.decode("utf-8", "replace").removesuffix("\n").split("\n") if patch else ():
        if text.startswith("diff --git "):
            body = False
        elif text.startswith("@@ "):
            body = True
        if not body:
            kind = "file"
        elif text.startswith("@@ "):
            kind = "hunk"
        else:
            kind = {"+": "add", "-": "del"}.get(text[:1], "same")
        lines.append(DiffLine(kind, visible(text)))
    if left_out := len(patch) - len(excerpt):
        lines.append(DiffLine("file", f"({left_out:,} bytes more are not shown)"))
    return lines
