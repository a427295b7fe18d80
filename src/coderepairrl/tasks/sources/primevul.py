"""`primevul`: pairs of vulnerable and repaired C and C++ functions (PrimeVul, arXiv 2403.18624).

Reads PrimeVul's release v0.1, and the hub copy that the original's code used, whose labels are reported as swapped
(`vulnerabilities.check_direction`). Versions of a function share `hash` in the copy, the commit in the releases.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from cydifflib import SequenceMatcher

from coderepairrl.errors import TaskError
from coderepairrl.tasks.patches import detect_file_language
from coderepairrl.tasks.rows import ENDINGS, Row, read_hub_rows, read_rows
from coderepairrl.tasks.vulnerabilities import Ask, Form, FunctionPair, Vulnerabilities, check_direction, parse_weakness

TOP = (
    "CWE-20",
    "CWE-125",
    "CWE-189",
    "CWE-200",
    "CWE-264",
    "CWE-362",
    "CWE-399",
    "CWE-416",
    "CWE-476",
)
"""The nine weaknesses that the thesis classified."""
SPLITS = ("train", "valid", "test")
_FUNCTION_NAME = re.compile(r"([\w~:]+)\s*\(")
"""The name before the first parenthesis."""


class PrimeVul(Vulnerabilities):
    """PrimeVul's paired functions.

    `path` is a folder with the ``*_paired`` files, or one of them; default: `hub`. ``classes`` default to the thesis's
    for ``ask="weakness"``. `inverted` swaps the labels; None refuses swapped ones.
    """

    name = "primevul"

    def __init__(
        self,
        path: str = "",
        *,
        ask: Ask = "weakness",
        form: Form = "think",
        classes: str = "",
        inverted: bool | None = None,
        hub: str = "ASSERT-KTH/PrimeVul",
        revision: str = "",
        cache: str = "",
    ) -> None:
        super().__init__(path, ask=ask, form=form, classes=classes, cache=cache)
        self.hub, self.revision, self.inverted = hub, revision, inverted
        if not classes and ask == "weakness":
            self.classes = TOP

    def read_pairs(self) -> list[tuple[Row, FunctionPair]]:
        """Pairs of all splits with the vulnerable version's row. Raises as `rows`."""
        pairs = [
            (vulnerable, pair)
            for split, rows in self._read_splits()
            for vulnerable, fixed in self._match_rows(rows)
            if (pair := _make_primevul_pair(vulnerable, fixed, split)) is not None
        ]
        if self.inverted is None:
            check_direction(self.name, (pair for _, pair in pairs))
        return pairs

    def _read_splits(self) -> Iterator[tuple[str, list[Row]]]:
        if self.path is None:
            for split in SPLITS:
                yield split, read_hub_rows(self.name, self.hub, f"{split}_paired", self.revision)
            return
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        files = [file for file in files if file.name.endswith(ENDINGS)]
        splits = {file: split for file in files for split in SPLITS if f"{split}_paired" in file.name}
        if self.path.is_file():
            splits = {self.path: splits.get(self.path, "train")}
        if not splits:
            raise TaskError(
                f"{self.name}: {self.path} has no file of pairs",
                fix="name a folder with primevul_train_paired.jsonl and the others",
            )
        yield from ((split, read_rows(self.name, file)) for file, split in splits.items())

    def _match_rows(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
        by_hash: defaultdict[str, list[Row]] = defaultdict(list)
        for row in rows:
            column = next((name for name in ("hash", "func_hash") if name in row), "func")
            by_hash[str(row.values[column])].append(row)
        groups: defaultdict[Hashable, list[Row]] = defaultdict(list)
        for digest, same_hash in by_hash.items():
            has_both_versions = len({self._is_vulnerable(row) for row in same_hash}) == 2
            for row in same_hash:
                commit = row.text_or_empty("project"), row.text_or_empty("commit_id")
                groups[digest if has_both_versions or "commit_id" not in row else commit].append(row)
        for group in groups.values():
            yield from self._match_group(group)

    def _match_group(self, group: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
        """Match the most similar first: a repair leaves most of a function unchanged."""
        vulnerable = [row for row in group if self._is_vulnerable(row)]
        fixed = [row for row in group if not self._is_vulnerable(row)]
        if len(vulnerable) != len(fixed):
            raise group[0].make_error(
                f"{len(vulnerable)} vulnerable and {len(fixed)} repaired functions belong together: not all are pairs"
            )
        if len(vulnerable) == 1:
            yield vulnerable[0], fixed[0]
            return
        by_similarity = sorted(
            (-_measure_similarity(before, after), before.text("func"), after.text("func"), at, to)
            for at, before in enumerate(vulnerable)
            for to, after in enumerate(fixed)
        )
        unmatched, unmatched_fixed = set(range(len(vulnerable))), set(range(len(fixed)))
        for *_, at, to in by_similarity:
            if at in unmatched and to in unmatched_fixed:
                unmatched.remove(at)
                unmatched_fixed.remove(to)
                yield vulnerable[at], fixed[to]

    def _is_vulnerable(self, row: Row) -> bool:
        for column in ("target", "is_vulnerable"):
            if column in row:
                value = row.values[column]
                if value not in (0, 1):
                    raise row.make_error(f"column {column!r} is neither 0 nor 1: {value!r}")
                return bool(value) != bool(self.inverted)
        raise row.make_error("no column 'target' or 'is_vulnerable'")


def _measure_similarity(first: Row, other: Row) -> float:
    sides = (first.text("func").splitlines(), other.text("func").splitlines())
    return float(SequenceMatcher(None, *sides, autojunk=False).ratio())


def _make_primevul_pair(vulnerable: Row, fixed: Row, split: str) -> FunctionPair | None:
    cwes = vulnerable.values.get("cwe") or []
    names = [cwes] if isinstance(cwes, str) else list(cwes)
    try:
        weaknesses = [parse_weakness(str(name)) for name in names]
    except ValueError as error:
        raise vulnerable.make_error(str(error)) from error
    if not weaknesses or None in weaknesses:
        return None
    code = vulnerable.text("func")
    match = _FUNCTION_NAME.search(code)
    function = match[1] if match else ""
    descriptions = vulnerable.values.get("cwe_description") or ""
    digest = hashlib.sha256(f"{code}\0{fixed.text('func')}".encode()).hexdigest()[:12]
    return FunctionPair(
        key=f"{split}-{vulnerable.values['idx'] if 'idx' in vulnerable else digest}",
        vulnerable=code,
        fixed=fixed.text("func"),
        weakness=str(weaknesses[0]),
        language=detect_file_language(vulnerable.text_or_empty("file_name")) or "c",
        repository=vulnerable.text_or_empty("project"),
        commit=vulnerable.text_or_empty("commit_id"),
        function=function,
        path=vulnerable.text_or_empty("file_name") or f"{re.sub(r'[^A-Za-z0-9_]+', '_', function) or 'function'}.c",
        split=split,
        description=str(descriptions[0] if isinstance(descriptions, list) else descriptions),
    )
