"""Literal search and replace that preserves every other byte.

Models write ``\\n``. Matching therefore reads ``\\r\\n`` as ``\\n``, and untouched lines keep their endings.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_PLACES = 100_000
"""Beyond, all that matters is that a passage is ambiguous: a policy can write files in which every place is one."""


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
    """A file as text with ``\\n`` endings, plus what restores its bytes.

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
    places = list(_occurrences(file.text, old))
    if not places:
        raise NoMatch
    if len(places) > 1:
        chosen = _in_context(file.text, old, places, context) if context else []
        if len(chosen) != 1:
            raise Ambiguous(len(places), bool(context))
        places = chosen
    return _put(file, places[0], old, new)


def replace_lines(data: bytes, old: str, new: str) -> bytes:
    """Replace the only occurrence of the whole lines `old`, each ending in ``\\n``.

    At the end of the file the last ``\\n`` is optional, and an empty last line in `new` or `old` adds or removes it.
    Raises as `replace_once`.

    >>> replace_lines(b"ab\\nb", "b\\n", "c\\n"), replace_lines(b"b", "b\\n", "b\\n\\n")
    (b'ab\\nc', b'b\\n')
    """
    file = Text.parse(data)
    old, new = (part.replace("\r\n", "\n") for part in (old, new))
    places = places_of_lines(file.text, old)
    if not places:
        raise NoMatch
    if len(places) > 1:
        raise Ambiguous(len(places), context=False)
    if places[0] + len(old) > len(file.text):
        old, new = old[:-1], new[:-1]
    return _put(file, places[0], old, new)


def places_of_lines(text: str, lines: str) -> list[int]:
    """Offsets of the whole `lines`; at the end of `text` the last ``\\n`` is optional."""

    def begins(at: int) -> bool:
        return at == 0 or text[at - 1] == "\n"

    places = [at for at in _occurrences(text, lines) if begins(at)]
    last = lines[:-1]
    if last and not (places and last.endswith("\n")) and text.endswith(last) and begins(len(text) - len(last)):
        places.append(len(text) - len(last))
    return places


def _put(file: Text, start: int, old: str, new: str) -> bytes:
    text = file.text[:start] + new + file.text[start + len(old) :]
    return Text(text, _endings(file, start, old, new), file.encoding).bytes()


def _endings(file: Text, start: int, old: str, new: str) -> tuple[str, ...]:
    """Line endings after a patch: new lines take the neighbour's."""
    before = file.text.count("\n", 0, start)
    replaced, added = old.count("\n"), new.count("\n")
    prefix = _shared(old, new)
    first = old.count("\n", 0, prefix)
    last = old[len(old) - _shared(old[prefix:][::-1], new[prefix:][::-1]) :].count("\n")
    neighbour = (*file.endings[before : before + 1], *file.endings[-1:], "\n")[0]
    return (
        file.endings[: before + first]
        + (neighbour,) * (added - first - last)
        + file.endings[before + replaced - last :]
    )


def _shared(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _occurrences(text: str, part: str) -> Iterator[int]:
    """Yield up to `_MOST_PLACES` offsets, overlapping ones too: ``aa`` in ``aaa`` is ambiguous."""
    at = text.find(part)
    for _ in range(_MOST_PLACES):
        if at < 0:
            return
        yield at
        at = text.find(part, at + 1)


def _in_context(text: str, old: str, places: list[int], context: str) -> list[int]:
    around = list(_occurrences(text, context))
    if old in context:
        reach = len(context) - len(old)
        ends = [bisect_right(around, place) for place in places]  # for each place, how many contexts begin up to there
        return [place for place, end in zip(places, ends, strict=True) if end and around[end - 1] >= place - reach]
    if len(around) != 1:
        return []
    return [place for place in places if place >= around[0] + len(context)][:1]
