"""`sven`: 803 function pairs of security fixes (SVEN, arXiv 2302.05319, ``eth-sri/sven``).

Nine weaknesses in Python, C and C++; three (CWE-125, 416, 476) are among PrimeVul's most frequent nine.
"""

from __future__ import annotations

import re

from coderepairrl.tasks.patches import detect_file_language
from coderepairrl.tasks.rows import Row
from coderepairrl.tasks.vulnerabilities import FunctionPair, Vulnerabilities, parse_weakness

_COMMIT = re.compile(r"https?://[^/]+/(?P<repository>[^/]+/[^/]+)/commit/(?P<commit>\w+)")


class Sven(Vulnerabilities):
    """SVEN's pairs, from a file of rows.

    Published parts share commits, so split ``test`` is the validation part and everything related
    (`separate_pairs`).
    """

    name = "sven"

    def read_pairs(self) -> list[tuple[Row, FunctionPair]]:
        """Published pairs with rows. Raises as `read_rows`."""
        return [(row, pair) for row in self.read_published_rows() if (pair := _make_sven_pair(row)) is not None]


def _make_sven_pair(row: Row) -> FunctionPair | None:
    commit = _COMMIT.match(row.text("commit_url"))
    if commit is None:
        raise row.make_error(f"commit_url is not an address of a commit: {row.text('commit_url')!r}")
    try:
        weakness = parse_weakness(row.text("cwe"))
    except ValueError as error:
        raise row.make_error(str(error)) from error
    if weakness is None:
        return None
    return FunctionPair(
        key=row.text("pair_id").removeprefix("sven-"),
        vulnerable=row.text("func_vulnerable"),
        fixed=row.text("func_fixed"),
        weakness=weakness,
        language=detect_file_language(row.text("file_name")) or row.text("language").lower(),
        repository=commit["repository"],
        commit=commit["commit"],
        function=row.text("func_name"),
        path=row.text("file_name"),
        split="train" if row.text("split") == "train" else "test",
    )
