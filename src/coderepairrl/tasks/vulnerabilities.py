"""Pairs of a function before and after the repair of a vulnerability.

Option ``ask``: ``weakness`` and ``vulnerable`` need no workspace (kind ``detect``); for ``repair`` the vulnerable
version is the workspace, the repaired one the reference (kind ``vul_repair``).
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.printable import fence_code
from coderepairrl.registry import suggest_nearest
from coderepairrl.tasks.benchmark import FileBenchmark
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Task

Ask = Literal["weakness", "vulnerable", "repair"]
Form = Literal["think", "answer", "plain"]
VULNERABLE, SAFE = "vulnerable", "safe"
DETECT, REPAIR = "detect", "vul_repair"
"""Kinds of the tasks."""

WEAKNESSES = {
    "CWE-20": "improper input validation: input is used without a check that it has the properties that are relied on",
    "CWE-22": "path traversal: a path made of input can lead out of the folder that it is meant for",
    "CWE-78": "command injection: input becomes part of a command of the operating system, and can add others",
    "CWE-79": "cross-site scripting: input is written into a page without escaping, and runs as script in a browser",
    "CWE-89": "SQL injection: input becomes part of the text of a query, and can change what it asks",
    "CWE-125": "out-of-bounds read: memory is read before the beginning or behind the end of a buffer",
    "CWE-189": "numeric error: a calculation or conversion of numbers gives a wrong value, by rounding, sign or size",
    "CWE-190": "integer overflow: the result of a calculation is too large for its type, and wraps around",
    "CWE-200": "exposure of information: data reach somebody who is not meant to see them",
    "CWE-264": "weak access control: permissions are missing, too wide or not checked",
    "CWE-362": "race condition: the result depends on the order in which concurrent code uses what it shares",
    "CWE-399": "resource management error: memory, handles or the like are not released, or used up",
    "CWE-416": "use after free: memory is used after it was released",
    "CWE-476": "null pointer dereference: a pointer that may be null is used without a check",
    "CWE-787": "out-of-bounds write: memory is written before the beginning or behind the end of a buffer",
}
"""Descriptions by number in the Common Weakness Enumeration."""

_NO_LABEL = {"", "other", "nvd-cwe-other", "nvd-cwe-noinfo", "none"}
_FORMS: dict[Form, str] = {  # what the prompt asks for
    "think": "Think first, then give one label, in this form:\n\n"
    "<think>\nyour reasoning\n</think>\n<answer>\nthe label\n</answer>",
    "answer": "Reply with one label, in this form:\n\n<answer>\nthe label\n</answer>",
    "plain": "Reply with the label alone.",
}
_MIN_PAIRS = 20  # fewer do not show whether labels are swapped


@dataclass(frozen=True, slots=True)
class FunctionPair:
    """A function before and after its repair; `key` is unique in its source."""

    key: str
    vulnerable: str
    fixed: str
    weakness: str
    """Form ``CWE-125``."""
    language: str
    repository: str
    commit: str
    function: str
    path: str
    split: str
    description: str = ""
    """The data set's description of the weakness, used without one in `WEAKNESSES`."""

    @property
    def is_trivial(self) -> bool:
        """Whether the versions differ only in whitespace, so that one label is wrong."""
        return self.vulnerable.split() == self.fixed.split()


class Vulnerabilities(FileBenchmark):
    """Tasks about published pairs.

    `classes`, comma-separated, are the weaknesses used; other and trivial pairs are left out.
    """

    classes: tuple[str, ...] = ()
    """Default weaknesses; empty for all."""

    def __init__(
        self,
        path: str = "",
        *,
        ask: Ask = "weakness",
        form: Form = "think",
        classes: str = "",
        cache: str = "",
    ) -> None:
        super().__init__(path, cache=cache)
        self.ask, self.form = ask, form
        if classes:
            self.classes = tuple(dict.fromkeys(self._parse_class(each.strip()) for each in classes.split(",")))
        self._pairs: dict[str, FunctionPair] = {}

    def _parse_class(self, written: str) -> str:
        weakness = parse_weakness(written) if re.fullmatch(_CWE_NUMBER, written.strip()) else None
        if weakness not in WEAKNESSES:
            raise ConfigError(
                f"{self.name}: classes: {written!r} is not a known weakness", fix=suggest_nearest(written, WEAKNESSES)
            )
        return weakness

    def read_published_rows(self) -> list[Row]:
        """All rows of `path`. Raises as `read_rows`."""
        return super()._read_rows()

    @abstractmethod
    def read_pairs(self) -> list[tuple[Row, FunctionPair]]:
        """Published pairs with the vulnerable version's row. Raises as `read_rows`."""

    def _read_rows(self) -> list[Row]:
        published = [(row, pair) for row, pair in self.read_pairs() if not pair.is_trivial]
        separated = separate_pairs([pair for _, pair in published])
        rows = {pair.key: row for row, pair in published}
        chosen = [pair for pair in separated if not self.classes or pair.weakness in self.classes]
        if not chosen:
            most = Counter(pair.weakness for pair in separated).most_common(9)
            raise TaskError(
                f"{self.name}: no pair has a weakness of {', '.join(self.classes) or 'any kind'}",
                fix=f"there are {', '.join(f'{name} ({count})' for name, count in most) or 'none'}",
            )
        self._pairs = {pair.key: pair for pair in chosen}
        questions = (VULNERABLE, SAFE) if self.ask == "vulnerable" else (self.ask,)
        return [
            Row(self.name, rows[key].where, {**rows[key].values, "pair": key, "asked": question})
            for key in self._pairs
            for question in questions
        ]

    def make_task(self, row: Row) -> Task:
        """Convert a row of `_read_rows`."""
        pair, ask = self._pairs[row.text("pair")], row.text("asked")
        task = Task(
            id=f"{self.name}/{pair.key}/{ask}",
            prompt="",
            language=pair.language,
            workspace="",
            reference=b"",
            split=pair.split,
            repository=pair.repository,
            kind=DETECT,
        )
        if ask == "repair":
            return self._make_repair_task(pair, task)
        language = {"c": "C", "cpp": "C++", "python": "Python"}.get(pair.language, pair.language)
        if ask == "weakness":
            question = f"Which weakness does this {language} function have? Its label is one of these:"
            weaknesses = set(self.classes) or {each.weakness for each in self._pairs.values()} & WEAKNESSES.keys()
            by_number = sorted(weaknesses, key=lambda name: int(name.removeprefix("CWE-")))
            labels = {each: WEAKNESSES[each] for each in by_number}
            code, answer = pair.vulnerable, pair.weakness
        else:
            question = f"Is this {language} function vulnerable? The label is one of these:"
            labels = {VULNERABLE: "an attacker can make use of a weakness in it", SAFE: "nothing of that kind is in it"}
            code, answer = pair.vulnerable if ask == VULNERABLE else pair.fixed, ask
        listed = "\n".join(f"- {name}: {text}" for name, text in labels.items())
        prompt = f"{question}\n\n{listed}\n\n{fence_code(code.rstrip(), pair.language)}\n\n{_FORMS[self.form]}"
        return replace(task, prompt=prompt, answer=answer)

    def _make_repair_task(self, pair: FunctionPair, task: Task) -> Task:
        before, after = (text.rstrip("\n") + "\n" for text in (pair.vulnerable, pair.fixed))
        description = WEAKNESSES.get(pair.weakness) or pair.description
        words = f" ({description})" if description else ""
        return replace(
            task,
            prompt=f"The function {f'`{pair.function}` ' if pair.function else ''}in {pair.path} has the weakness "
            f"{pair.weakness}{words}.\nRepair it, and change nothing else. The file has this function alone.",
            workspace=self.store_workspace({pair.path: before}),
            reference=format_diff(pair.path, before, after),
            kind=REPAIR,
        )


_CWE_NUMBER = r"(?i:CWE)-0*(\d+)"


def parse_weakness(written: str) -> str | None:
    """Normalize a weakness; None if it has no number. Raises ValueError.

    >>> parse_weakness("CWE-022"), parse_weakness("Other")
    ('CWE-22', None)
    """
    if match := re.fullmatch(_CWE_NUMBER, written.strip()):
        return f"CWE-{match[1]}"
    if written.strip().lower() in _NO_LABEL:
        return None
    raise ValueError(f"{written!r} is not a label of a weakness, such as CWE-125")


def separate_pairs(pairs: Sequence[FunctionPair]) -> list[FunctionPair]:
    """Give each group of related pairs the most held-out split of its members: train < valid < test.

    Related pairs share a commit, a function of a repository, or a version's text.
    """
    groups = group_connected(
        [
            (
                ("commit", pair.repository, pair.commit or pair.key),
                ("function", pair.repository, pair.function or pair.key),
                ("text", " ".join(pair.vulnerable.split())),
                ("text", " ".join(pair.fixed.split())),
            )
            for pair in pairs
        ]
    )
    splits = ("train", "valid", "test")
    group_split: dict[int, str] = {}
    for group, pair in zip(groups, pairs, strict=True):
        group_split[group] = max(group_split.get(group, "train"), pair.split, key=splits.index)
    return [replace(pair, split=group_split[group]) for group, pair in zip(groups, pairs, strict=True)]


def group_connected(keys: Sequence[Iterable[Hashable]]) -> list[int]:
    """Group number of each item; items with a common key, even indirectly, share one.

    >>> group_connected(["ab", "c", "bd", "de"])
    [0, 1, 0, 0]
    """
    parent = list(range(len(keys)))  # union-find: a root is its own parent

    def find_root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    first_with_key: dict[Hashable, int] = {}
    for at, item_keys in enumerate(keys):
        for key in item_keys:
            lower, higher = sorted((find_root(at), find_root(first_with_key.setdefault(key, at))))
            parent[higher] = lower
    return [find_root(at) for at in range(len(keys))]


def check_direction(benchmark: str, pairs: Iterable[FunctionPair]) -> None:
    """Raise `TaskError` if labels seem swapped: a repair adds checks and seldom shortens code."""
    growths = [len(pair.fixed) - len(pair.vulnerable) for pair in pairs]
    unequal = [growth for growth in growths if growth]
    shorter = sum(growth < 0 for growth in unequal)
    if len(unequal) >= _MIN_PAIRS and shorter > 2 / 3 * len(unequal):
        raise TaskError(
            f"{benchmark}: in {shorter} of {len(unequal)} pairs the repaired function is the shorter one: the labels "
            "seem to be swapped",
            fix="read some pairs; then set inverted=true to swap the labels, or inverted=false to keep them",
        )
