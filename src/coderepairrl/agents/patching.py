"""Search and replace that preserves every other byte, and its notation as blocks (`direct.FORMAT`).

Models write ``\\n``. Matching therefore reads ``\\r\\n`` as ``\\n``, and untouched lines keep their endings.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.tokens.trie import count_common_prefix

_MOST_PLACES = 100_000
"""Most occurrences to look for: a policy can write files in which a passage occurs everywhere."""
_MOST_COMPARED = 1 << 24
"""Most characters in all occurrences, which may overlap; two always count."""


class NoMatch(Exception):
    """The passage to replace does not occur."""


class Ambiguous(Exception):
    """The passage occurs `count` times, despite any `context`."""

    def __init__(self, count: int, context: bool) -> None:
        super().__init__(count)
        self.count = count
        self.context = context


@dataclass(frozen=True, slots=True)
class Text:
    """A file as text with ``\\n`` endings, plus line ends and encoding to restore its bytes.

    >>> Text.parse(b"a\\r\\nb\\n").endings
    ('\\r\\n', '\\n')
    """

    text: str
    endings: tuple[str, ...]
    encoding: str

    @classmethod
    def parse(cls, data: bytes) -> Text:
        """Decode UTF-8, else Latin-1, which is lossless for any bytes."""
        try:
            text, encoding = data.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            text, encoding = data.decode("latin-1"), "latin-1"
        return cls(text.replace("\r\n", "\n"), tuple(re.findall(r"\r?\n", text)), encoding)

    def bytes(self) -> bytes:
        """Encode the file. Raises UnicodeEncodeError for a character that its encoding lacks."""
        lines = self.text.split("\n")
        joined = "".join(line + end for line, end in zip(lines, (*self.endings, ""), strict=True))
        return joined.encode(self.encoding)


def replace_once(data: bytes, old: str, new: str, context: str = "") -> bytes:
    """Replace the only occurrence of `old`.

    `context` selects among several: a passage that contains `old`, or a unique one before it. Raises `NoMatch`,
    `Ambiguous`, and UnicodeEncodeError.

    >>> replace_once(b"x = 1\\r\\ny = 1\\r\\n", "y = 1\\n", "y = 2\\nz = 3\\n")
    b'x = 1\\r\\ny = 2\\r\\nz = 3\\r\\n'
    """
    file = Text.parse(data)
    old, new, context = (part.replace("\r\n", "\n") for part in (old, new, context))
    places = list(_find_occurrences(file.text, old))
    if not places:
        raise NoMatch
    if len(places) > 1:
        chosen = _select_by_context(file.text, old, places, context) if context else []
        if len(chosen) != 1:
            raise Ambiguous(len(places), bool(context))
        places = chosen
    return _replace_at(file, places[0], old, new)


def replace_lines(data: bytes, old: str, new: str) -> bytes:
    """Replace the only occurrence of the whole lines `old`, each ending in ``\\n``.

    At the end of the file the last ``\\n`` is optional, and an empty last line in `new` or `old` adds or removes it.
    Raises as `replace_once`.

    >>> replace_lines(b"ab\\nb", "b\\n", "c\\n"), replace_lines(b"b", "b\\n", "b\\n\\n")
    (b'ab\\nc', b'b\\n')
    """
    file = Text.parse(data)
    old, new = (part.replace("\r\n", "\n") for part in (old, new))
    places = find_whole_lines(file.text, old)
    if not places:
        raise NoMatch
    if len(places) > 1:
        raise Ambiguous(len(places), context=False)
    if places[0] + len(old) > len(file.text):
        old, new = old[:-1], new[:-1]
    return _replace_at(file, places[0], old, new)


def find_whole_lines(text: str, lines: str) -> list[int]:
    """Offsets of the whole `lines`; at the end of `text` the last ``\\n`` is optional."""

    def begins(at: int) -> bool:
        return at == 0 or text[at - 1] == "\n"

    places = [at for at in _find_occurrences(text, lines) if begins(at)]
    last = lines[:-1]
    if last and not (places and last.endswith("\n")) and text.endswith(last) and begins(len(text) - len(last)):
        places.append(len(text) - len(last))
    return places


def _replace_at(file: Text, start: int, old: str, new: str) -> bytes:
    text = file.text[:start] + new + file.text[start + len(old) :]
    return Text(text, _merge_endings(file, start, old, new), file.encoding).bytes()


def _merge_endings(file: Text, start: int, old: str, new: str) -> tuple[str, ...]:
    """Line endings after a patch: new lines take the neighbour's."""
    lines_before = file.text.count("\n", 0, start)
    replaced, added = old.count("\n"), new.count("\n")
    prefix = count_common_prefix(old, new)
    suffix = count_common_prefix(old[prefix:][::-1], new[prefix:][::-1])
    kept_first, kept_last = old.count("\n", 0, prefix), old.count("\n", len(old) - suffix)
    neighbour = (*file.endings[lines_before : lines_before + 1], *file.endings[-1:], "\n")[0]
    return (
        file.endings[: lines_before + kept_first]
        + (neighbour,) * (added - kept_first - kept_last)
        + file.endings[lines_before + replaced - kept_last :]
    )


def _find_occurrences(text: str, part: str) -> Iterator[int]:
    """Yield offsets up to the limits above, overlapping ones too: ``aa`` in ``aaa`` is ambiguous."""
    at = text.find(part)
    for _ in range(min(_MOST_PLACES, max(2, _MOST_COMPARED // max(1, len(part))))):
        if at < 0:
            return
        yield at
        at = text.find(part, at + 1)


def _select_by_context(text: str, old: str, places: list[int], context: str) -> list[int]:
    # return the `places` of `old` within an occurrence of `context`, or the first after its only one
    contexts = list(_find_occurrences(text, context))
    if old in context:
        reach = len(context) - len(old)
        ends = [bisect_right(contexts, place) for place in places]  # number of contexts that begin up to each place
        return [place for place, end in zip(places, ends, strict=True) if end and contexts[end - 1] >= place - reach]
    if len(contexts) != 1:
        return []
    return [place for place in places if place >= contexts[0] + len(context)][:1]


MARKER = 7
"""Signs of a marker, unless lines of the block resemble it (`_format_block`)."""
HEAD = f"{'<' * MARKER} SEARCH"
"""The first line of a block."""

# Possessive: a policy writes the text, and could make a backtracking pattern take hours.
_OPEN = re.compile(r"[^\S\n]*+<{2,}+[^\S\n]*+SEARCH[^\S\n]*+>*+[^\S\n]*+")
_DIVIDER = re.compile(r"[^\S\n]*+={5,}+[^\S\n]*+")
_CLOSE = re.compile(r"[^\S\n]*+>{2,}+[^\S\n]*+REPLACE\b.*+")
_EXACT = re.compile(r"(<++) SEARCH|(=++)|(>++) REPLACE")


class Block(NamedTuple):
    """One edit: lines without endings, and their replacement. An empty search creates the file.

    >>> Block("a.py", ("x = 1",), ("x = 2",)).old
    'x = 1\\n'
    """

    path: str
    search: tuple[str, ...]
    replace: tuple[str, ...]

    @property
    def old(self) -> str:
        """Searched lines as text."""
        return _join_lines(self.search)

    @property
    def new(self) -> str:
        """Replacement lines as text."""
        return _join_lines(self.replace)


class Inexpressible(TaskError):
    """The change cannot be written as blocks, for example one of line ends alone."""


def extract_answer(reply: str) -> str:
    """Return the reply without its thought, or the text in its ``<answer>`` tags.

    >>> [extract_answer(text) for text in ("<think>x</think>\\n<answer>\\ny\\n</answer>", "y", "<think>cut off")]
    ['\\ny\\n', 'y', '']
    """
    text = reply.partition("</think>")[2] if reply.lstrip().startswith("<think>") else reply
    _, tag, rest = text.partition("<answer>")
    return rest.partition("</answer>")[0] if tag else text


def parse_blocks(text: str) -> list[Block]:
    """Parse complete blocks. A path is on the line above the block or its fence.

    Markers written exactly as the block's first one (same length, no blanks) take precedence, so lines between may
    resemble markers; otherwise two signs suffice (five for the divider), with optional blanks.

    >>> parse_blocks("a.py\\n<<<< SEARCH>\\n  a\\n\\n=====\\n  c\\n>> REPLACE")
    [Block(path='a.py', search=('  a', ''), replace=('  c',))]
    """
    lines = text.replace("\r\n", "\n").split("\n")
    marks = _Markers(lines)
    blocks: list[Block] = []
    free = 0  # first line after earlier blocks
    for head in marks.opening:
        if head < free or not (ends := marks.find_ends(head)):
            continue
        divider, tail = ends
        blocks.append(
            Block(
                _read_block_path(lines, head, free), tuple(lines[head + 1 : divider]), tuple(lines[divider + 1 : tail])
            )
        )
        free = tail + 1
    return blocks


def write_blocks(blocks: Iterable[Block]) -> str:
    """Format blocks for `parse_blocks`; markers lengthen if lines resemble them.

    >>> write_blocks([Block("a.py", ("x = 1",), ("x = 2",))]).split("\\n")[:4]
    ['a.py', '<<<<<<< SEARCH', 'x = 1', '=======']
    """
    return "\n".join(map(_format_block, blocks))


def compute_blocks(path: str, before: bytes, after: bytes, context_lines: int = 3) -> list[Block]:
    """Compute the blocks that turn `before` into `after`; an empty `before` is a new file.

    Each has `context_lines` around its change, more if needed to be unique. Raises `Inexpressible`.

    >>> compute_blocks("a.py", b"x = 1\\ny = 1\\n", b"x = 1\\ny = 2\\n", context_lines=0)
    [Block(path='a.py', search=('y = 1',), replace=('y = 2',))]
    """
    old, new = Text.parse(before).text, Text.parse(after).text
    created: list[Block] = []
    if not old and new:
        old = new if new.endswith("\n") else f"{new}\n"
        created = [Block(path, (), tuple(old.split("\n")[:-1]))]
    a, b, end = old.split("\n"), new.split("\n"), ""
    if a[-1] == b[-1] == "":
        del a[-1], b[-1]
        end = "\n"
    whole_file = [(0, len(a), 0, len(b))]  # keeps line ends that applying single blocks may lose
    for ranges in (_find_unique_ranges(a, b, end, context_lines), whole_file):
        blocks = created + [Block(path, tuple(a[i:j]), tuple(b[k:m])) for i, j, k, m in ranges]
        with suppress(UnicodeEncodeError):  # the file changes from Latin-1 to UTF-8
            if apply_blocks(before, blocks) == after:
                return blocks
    raise Inexpressible(
        f"{path}: search/replace blocks cannot make this change", fix="leave it out: it changes line ends only"
    )


def apply_blocks(before: bytes, blocks: Iterable[Block]) -> bytes:
    """Apply `blocks` in order. Raises `NoMatch`, `Ambiguous` and UnicodeEncodeError.

    >>> apply_blocks(b"x\\r\\n", [Block("", ("x",), ("y", "z"))])
    b'y\\r\\nz\\r\\n'
    """
    data = before
    for block in blocks:
        data = replace_lines(data, block.old, block.new) if block.search else block.new.encode()
    return data


class _Markers:
    """Numbers of lines that may be markers."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.opening = [at for at, line in enumerate(lines) if _OPEN.fullmatch(line)]
        self._dividers = [at for at, line in enumerate(lines) if _DIVIDER.fullmatch(line)]
        self._closing = [at for at, line in enumerate(lines) if _CLOSE.fullmatch(line)]
        self._exact: dict[tuple[str, int], list[int]] = {}
        for at, line in enumerate(lines):
            if match := _EXACT.fullmatch(line):
                signs = match[match.lastindex or 0]
                self._exact.setdefault((signs[0], len(signs)), []).append(at)
        self._sizes = {at: size for (sign, size), places in self._exact.items() if sign == "<" for at in places}

    def find_ends(self, head: int) -> tuple[int, int] | None:
        """Divider and last line of the block that begins at `head`, if complete before another begins."""
        if size := self._sizes.get(head, 0):
            same_size = [self._exact.get((sign, size), []) for sign in "=><"]
            if ends := _find_ends(head, *same_size):
                return ends
        return _find_ends(head, self._dividers, self._closing, self.opening)


def _find_ends(
    head: int, dividers: Sequence[int], closing: Sequence[int], opening: Sequence[int]
) -> tuple[int, int] | None:
    divider = _find_next(dividers, head)
    tail = _find_next(closing, divider) if divider is not None else None
    following = _find_next(opening, head)
    if divider is None or tail is None or (following is not None and following < tail):
        return None
    return divider, tail


def _find_next(places: Sequence[int], at: int) -> int | None:
    index = bisect_right(places, at)
    return places[index] if index < len(places) else None


def _read_block_path(lines: Sequence[str], head: int, free: int) -> str:
    def may_be_path(at: int) -> bool:
        return at >= free and lines[at] != "" and not lines[at][0].isspace()

    line = ""
    if may_be_path(head - 2) and lines[head - 1].startswith("```"):
        line = lines[head - 2]
    elif may_be_path(head - 1):
        line = lines[head - 1]
    return line.strip("`* :#")


def _format_block(block: Block) -> str:
    lines = set(block.search + block.replace)
    size = next(n for n in range(MARKER, len(lines) + MARKER + 1) if not lines & set(_markers(n)))
    head, divider, tail = _markers(size)
    above = f"{block.path}\n" if block.path else ""
    return f"{above}{head}\n{block.old}{divider}\n{block.new}{tail}\n"


def _markers(size: int) -> tuple[str, str, str]:
    return f"{'<' * size} SEARCH", "=" * size, f"{'>' * size} REPLACE"


def _find_unique_ranges(
    a: list[str], b: list[str], end_of_file: str, context_lines: int
) -> list[tuple[int, int, int, int]]:
    """Ranges of lines of `a` and `b` that replace each other, widened until each matches once, applied in order."""
    # a range is (start in a, end in a, start in b, end in b)
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    ranges = [
        (group[0][1], group[-1][2], group[0][3], group[-1][4]) for group in matcher.get_grouped_opcodes(context_lines)
    ]
    at = 0
    while at < len(ranges):
        start, end, new_start, new_end = ranges[at]
        file = "\n".join(b[:new_start] + a[start:]) + end_of_file  # the ranges before this one are applied
        expected = [len(_join_lines(b[:new_start]))]
        is_found_once = start < end and find_whole_lines(file, _join_lines(a[start:end])) == expected
        # a deletion at the file's end needs a kept line before it, whose line end may go
        if is_found_once and (new_start < new_end or end < len(a)):
            at += 1
        elif at and start == ranges[at - 1][1]:
            before = ranges[at - 1]
            ranges[at - 1 : at + 1] = [(before[0], end, before[2], new_end)]
            at -= 1
        elif at + 1 < len(ranges) and end == ranges[at + 1][0]:
            after = ranges[at + 1]
            ranges[at : at + 2] = [(start, after[1], new_start, after[3])]
        elif start == 0 and end == len(a):
            break  # it already is the whole file
        else:
            up, down = int(start > 0), int(end < len(a))
            ranges[at] = (start - up, end + down, new_start - up, new_end + down)
    return ranges


def _join_lines(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
