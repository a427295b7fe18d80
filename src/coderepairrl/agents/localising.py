"""Elements and lines of files, shown to a model and parsed from its answers.

Answers may name only existing paths, names and line numbers. Definitions in any language are recognised by their first
line and end with their indentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coderepairrl.agents.patching import Text
from coderepairrl.printable import fence_code

_DEFINITION = re.compile(
    r"^(?P<indent>[ \t]*)(?:(?:export|default|public|private|protected|internal|static|final|abstract|virtual|override|"
    r"async|pub(?:\([a-z]+\))?|unsafe|const|inline|open|suspend|sealed|data)\s+)*"
    r"(?:(?:class|def|func|function|fn|fun|interface|struct|enum|trait|impl|module|namespace|type|object|sub)\b\s*"
    r"(?:\([^)]{0,200}\)\s*|<[^>]{0,200}>\s*)?(?P<named>[A-Za-z_$](?:[\w$]|[.:]{1,2}(?=\w))*)"
    r"|(?:[A-Za-z_][\w<>\[\],:*&?]*\s+){1,4}[*&]?(?P<typed>[A-Za-z_][\w:~]*)\s*\([^;]*$)"
)
"""A definition: by a keyword, or (C, Java) by types before a name with parameters."""
_STATEMENT = re.compile(
    r"\s*(?:return|else|elif|if|for|while|switch|case|throw|raise|new|await|yield|assert|print|import|from|goto|delete|not)\b"
)
"""Statements that look like a definition."""
# the last or a middle line of a definition, at the depth of its first
_CLOSES = re.compile(r"^\s*[}\])]|^\s*(?:end|else|elif|except|finally|rescue|ensure|catch|case|default)\b")
_WORD = re.compile(r"[^\s`'\"*,()<>|]+")
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
# 12, L12, lines 12-15, 12 to 15; U+2013 is a dash
_RANGE = re.compile(r"(?:^|[\s:#,(L`])(?:lines?\s*)?L?(\d{1,7})(?:\s*(?:-|\u2013|to)\s*L?(\d{1,7}))?(?=$|[\s,.;)`])")
_ITEM_NUMBER = re.compile(r"^\s*\d+[.)]\s+")  # "1. " of a list, which is no line number
_LONGEST_LINE = 400
"""Characters of a line that are read: no definition and no path is longer."""
_MOST_NAMES = 20
"""Most elements or places of an answer: one that names everything is useless."""


@dataclass(frozen=True, slots=True)
class Element:
    """A definition at lines `first` to `last`, counted from 1."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A source file, compared by identity."""

    path: str
    lines: tuple[str, ...]
    elements: tuple[Element, ...]

    @classmethod
    def parse(cls, path: str, data: bytes) -> Source:
        """Parse a file. Raises UnicodeDecodeError unless it is UTF-8.

        >>> source = Source.parse("a.py", b"class A:\\n    def f(self):\\n        return 1\\n\\nx = A()\\n")
        >>> [(each.name, each.first, each.last) for each in source.elements]
        [('A', 1, 3), ('f', 2, 3)]
        """
        data.decode("utf-8")
        lines = tuple(Text.parse(data).text.rstrip("\n").split("\n"))
        return cls(path, lines, tuple(_parse_elements(lines)))

    @property
    def whole(self) -> Place:
        """All lines."""
        return Place(self, 1, len(self.lines))

    @property
    def outline(self) -> str:
        """First line of each definition; empty if none."""
        first_lines = "\n".join(self.lines[each.first - 1][:_LONGEST_LINE] for each in self.elements)
        return f"{self.path}\n{fence_code(first_lines)}" if first_lines else ""


@dataclass(frozen=True, slots=True)
class Place:
    """Lines `first` to `last` of a file, counted from 1."""

    source: Source
    first: int
    last: int

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines of text."""
        return self.source.lines[self.first - 1 : self.last]


def _parse_elements(lines: Sequence[str]) -> Iterable[Element]:
    open_: list[tuple[int, str, int]] = []  # definitions around the current line: depth, name, first line
    elements: list[Element] = []
    last = 0

    def close(depth: int) -> None:
        while open_ and open_[-1][0] >= depth:
            _, name, first = open_.pop()
            elements.append(Element(name, first, last))

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        close(depth + 1 if _CLOSES.match(line[:_LONGEST_LINE]) else depth)
        last = number
        if (match := _DEFINITION.match(line[:_LONGEST_LINE])) and not _STATEMENT.match(line):
            open_.append((depth, match["named"] or match["typed"], number))
    close(0)
    return sorted(elements, key=lambda each: each.first)


def find_paths(answer: str, paths: Sequence[str]) -> list[str]:
    """List mentioned `paths`, in order.

    >>> find_paths("1. `src/a.py`\\n- b.py: because", ["b.py", "src/a.py", "c.py"])
    ['src/a.py', 'b.py']
    """
    existing, answer_lines = set(paths), [line.strip() for line in answer.split("\n")]
    words = (word for line in answer_lines for word in ([line] if line in existing else _WORD.findall(line)))
    cleaned = (variant for word in words for variant in (word, word.strip(".:;"), word.removeprefix("./")))
    return list(dict.fromkeys(word for word in cleaned if word in existing))


def find_elements(answer: str, sources: Sequence[Source]) -> list[Place]:
    """Elements named in `answer`, in the file named last before them, else any.

    >>> source = Source.parse("a.py", b"def f():\\n    pass\\n\\ndef g():\\n    pass\\n")
    >>> [(place.first, place.last) for place in find_elements("a.py: g", [source])]
    [(4, 5)]
    """
    by_name: dict[tuple[Source, str], list[Place]] = {}
    for source in sources:
        for each in source.elements:
            last_name = _NAME.findall(each.name)[-1]
            by_name.setdefault((source, last_name), []).append(Place(source, each.first, each.last))
    named = (
        (source, name)
        for files, line in _split_by_file(answer, sources)
        for source in files
        for name in _NAME.findall(line)
    )
    return _merge_places(place for name in named for place in by_name.get(name, ()))


def find_lines(answer: str, sources: Sequence[Source], around: int) -> list[Place]:
    """Lines that `answer` numbers, plus `around` on each side.

    >>> source = Source.parse("a.py", b"x = 1\\n" * 50)
    >>> [(place.first, place.last) for place in find_lines("a.py: 12-15\\na.py:40, 17", [source], 2)]
    [(10, 19), (38, 42)]
    """
    ranges = (
        (source, int(match[1]), int(match[2] or match[1]))
        for files, line in _split_by_file(answer, sources)
        for source in files[:1]
        for match in _RANGE.finditer(line)
    )
    return _merge_places(
        Place(source, max(first - around, 1), min(last + around, len(source.lines)))
        for source, first, last in ranges
        if 1 <= first <= last <= len(source.lines)
    )


def _split_by_file(answer: str, sources: Sequence[Source]) -> Iterable[tuple[Sequence[Source], str]]:
    # yield each line without its path, and the files that it may be about: the last one named, else all
    paths = {source.path: source for source in sources}
    current: Sequence[Source] = sources
    for line in answer.split("\n"):
        line = _ITEM_NUMBER.sub("", line[:_LONGEST_LINE])
        for path in sorted(paths, key=len, reverse=True):
            if re.search(rf"(?<![\w/.-]){re.escape(path)}(?![\w/-])", line):
                current = [paths[path]]
                line = line.replace(path, " ")
                break
        yield current, line


def _merge_places(places: Iterable[Place]) -> list[Place]:
    """Merge touching ranges: files in order of mention, then by line."""
    by_path: dict[str, list[Place]] = {}
    distinct: dict[Place, None] = {}  # in order
    for place in places:
        distinct[place] = None
        if len(distinct) == _MOST_NAMES:
            break
    for place in distinct:
        by_path.setdefault(place.source.path, []).append(place)
    merged: list[Place] = []
    for file_places in by_path.values():
        start = len(merged)
        for place in sorted(file_places, key=lambda each: each.first):
            if len(merged) > start and place.first <= merged[-1].last + 1:
                merged[-1] = Place(place.source, merged[-1].first, max(merged[-1].last, place.last))
            else:
                merged.append(place)
    return merged


def number_lines(place: Place) -> str:
    """Format lines with numbers.

    >>> print(number_lines(Source.parse("a.py", b"x = 1\\ny = 2\\n").whole))
    a.py
    ```
    1|x = 1
    2|y = 2
    ```
    """
    numbered_lines = (f"{number}|{line}\n" for number, line in enumerate(place.lines, place.first))
    return f"{place.source.path}\n{fence_code(''.join(numbered_lines))}"


def format_excerpt(place: Place) -> str:
    """Format lines verbatim, as an edit must repeat them."""
    text = "".join(f"{line}\n" for line in place.lines)
    return f"{place.source.path}\n{fence_code(text)}"
