"""Search/replace blocks in a reply: format, and similarity to the reference."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import zip_longest

from cydifflib import SequenceMatcher

from coderepairrl.agents.blocks import read
from coderepairrl.errors import TaskError
from coderepairrl.rewards.answers import AnswerReward
from coderepairrl.rewards.parse import MalformedPatch, parse
from coderepairrl.rewards.thesis.formats import tagged_answer, unfenced
from coderepairrl.types import Task

Block = tuple[tuple[str, ...], tuple[str, ...]]
"""Searched lines and their replacement."""

# Possessive, and in parts that are found one after the other: a policy writes the text, and could make a pattern that
# tries every way take hours.
_PERFECT = tuple(map(re.compile, (r"<<<<<<< SEARCH\n", r"\n=======\n", r"\n>>>>>>> REPLACE")))
_PRIMARY = tuple(map(re.compile, (r"(?<!<)<{3,}+\s*+SEARCH\s*?>*+\n", r"\n=++\n", r"\n>{3,}+\s*+REPLACE")))
_SHORT = re.compile(r"(?<!<)<{2,}+\s*+SEARCH"), re.compile(r"(?<!>)>{2,}+\s*+REPLACE")
_DEVIATIONS = (
    (re.compile(r"SEARCH\s+[^\n]"), 0.05),
    (re.compile(r"REPLACE\s+[^\n]"), 0.05),
    (re.compile(r"<< SEARCH|>> REPLACE"), 0.1),
    (re.compile(r"=\s+\n"), 0.05),
    (re.compile(r"(?:SEARCH|REPLACE)[^\n]"), 0.1),
)


def blocks(text: str) -> list[Block]:
    r"""Complete blocks of `text` (`agents.blocks.read`), whatever their file.

    >>> blocks("<<<<<<< SEARCH\n  a\n\n  b\n=======\n  c\n>>>>>>> REPLACE")
    [(('  a', '', '  b'), ('  c',))]
    """
    return [(each.search, each.replace) for each in read(text)]


class SearchReplaceFormat(AnswerReward):
    """Format of the answer's search/replace blocks, in [0, 1].

    For the first fenced block between ``<answer>`` tags: 1, less 0.4 without SEARCH, 0.4 without REPLACE, 0.2 without a
    divider; below 0.5 the rest is skipped. A single perfect block earns 1. Else less 0.1 for each marker of another
    length, 0.05 each for text behind SEARCH and REPLACE, 0.15 each if dividers are not as many as SEARCHes and
    REPLACEs, 0.1 for markers cut short, 0.05 for blanks behind the divider, 0.3 for the wrong order, 0.1 for a marker
    that does not end its line, 0.2 if no block can be read and 0.1 if only a tolerant reader can; at least 0.

    Source: the original's code, with blank lines in blocks. Known weaknesses: several perfect blocks earn about 0.7;
    ignores content.
    """

    name = "search_replace_format"
    version = 2

    def judge(self, answer: str, task: Task) -> float:
        """Format of the tagged answer."""
        return block_format(unfenced(tagged_answer(answer)))


def block_format(text: str) -> float:
    """`SearchReplaceFormat` of a text."""
    if not text:
        return 0.0
    searches, replaces, dividers = text.count("SEARCH"), text.count("REPLACE"), text.count("=======")
    value = 1.0 - 0.4 * (not searches) - 0.4 * (not replaces) - 0.2 * (not dividers and "DIVIDER" not in text)
    if value < 0.5:
        return max(value, 0.0)
    if searches == replaces == 1 and _in_order(text, _PERFECT):
        return 1.0
    value -= 0.1 * ("<<<<<<< SEARCH" not in text and bool(_SHORT[0].search(text)))
    value -= 0.1 * (">>>>>>> REPLACE" not in text and bool(_SHORT[1].search(text)))
    value -= 0.15 * (searches > 1 and searches != dividers) + 0.15 * (replaces > 1 and replaces != dividers)
    value -= sum(cost for pattern, cost in _DEVIATIONS if pattern.search(text))
    value -= 0.3 * (0 <= text.rfind("REPLACE") < text.find("SEARCH"))
    if searches and replaces:
        value -= 0.2 if not blocks(text) else 0.1 * (not _in_order(text, _PRIMARY))
    return min(max(value, 0.0), 1.0)


def _in_order(text: str, parts: Iterable[re.Pattern[str]]) -> bool:
    at = 0
    for part in parts:
        match = part.search(text, at)
        if match is None:
            return False
        at = match.end()
    return True


class SearchReplaceSimilarity(AnswerReward):
    """Similarity of the answer's blocks to the reference's, in [0, 1].

    Blocks are paired in order, missing ones empty. A pair scores the mean difflib ratio, over lines, of its search and
    replace parts; the reward is the mean over pairs. Each hunk of a reference diff is one block with context.

    Source: the original's code, with blank lines in blocks. Known weaknesses: order matters; context earns.
    """

    name = "search_replace_similarity"
    version = 2

    def judge(self, answer: str, task: Task) -> float:
        """Compare blocks. Raises `TaskError` for a reference without any."""
        reference, answered = _reference(task), blocks(unfenced(tagged_answer(answer)))
        if not answered:
            return 0.0
        ratios = [
            float(SequenceMatcher(None, mine[side], expected[side]).ratio())
            for mine, expected in zip_longest(answered, reference, fillvalue=((), ()))
            for side in (0, 1)
        ]
        return sum(ratios) / len(ratios)


def _reference(task: Task) -> list[Block]:
    text = task.reference.decode("utf-8", "replace")
    reference = blocks(text)
    if not reference:
        try:
            hunks = [hunk for file in parse(task.reference) for hunk in file.hunks]
        except MalformedPatch as problem:
            raise TaskError(f"task {task.id}: reference: {problem}", fix=problem.fix) from problem
        reference = [(_text(hunk.side(b"-")), _text(hunk.side(b"+"))) for hunk in hunks]
    if not reference:
        raise TaskError(f"task {task.id}: the reference has no search/replace block and no hunk", fix="give it one")
    return reference


def _text(lines: tuple[bytes, ...]) -> tuple[str, ...]:
    return tuple(line.decode("utf-8", "replace").removesuffix("\r") for line in lines)
