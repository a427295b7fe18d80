"""`humaneval_java`: HumanEval in Java with injected bugs (``lin-tan/clm``, arXiv 2302.05020).

Checkouts are of the fork ``ASSERT-KTH/human-eval-java``, which has JUnit tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from coderepairrl.grading import witness
from coderepairrl.tasks.benchmark import FileBenchmark, encode_patch
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.rows import Row, read_checkout_text, read_rows
from coderepairrl.types import Task

_MAIN, _TESTS = "src/main/java/humaneval/buggy", "src/test/java/humaneval"
NOT_SINCE_JDK_11 = ("DO_ALGEBRA", "STRING_TO_MD5")
"""Classes that need Nashorn or javax.xml.bind, which newer Java lacks."""


class HumanEvalJava(FileBenchmark):
    """HumanEval-Java: 161 of 163 buggy classes; two do not run on current Java.

    `path` is a checkout, or a file of rows. Tests need a JDK, and JUnit 4 and Hamcrest at `jars`.
    """

    name = "humaneval_java"

    def __init__(self, path: str = "", *, jars: str = witness.JARS, cache: str = "") -> None:
        super().__init__(path, cache=cache)
        self.jars = jars

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        files = row.files("files")
        tests = {name: content for name, content in files.items() if name != row.text("buggy_file")}
        checks = witness.make_junit_checks(
            tests,
            list(files),
            row.text("test_class"),
            fail_to_pass=row.names("FAIL_TO_PASS"),
            pass_to_pass=row.names("PASS_TO_PASS"),
            jars=self.jars,
        )
        program = Path(row.text("buggy_file")).stem
        fields = {
            "prompt": row.text_or_empty("problem_statement") or f"{program} gives wrong results.",
            "licence": "BSD-3-Clause",
            "language": "java",
        }
        return self.make_file_task(row, files, encode_patch(row.text("patch")), checks, **fields)

    def _read_rows(self) -> list[Row]:
        rows = self._read_checkout(_MAIN, _read_humaneval_java_rows)
        return [row for row in rows if not row.text("instance_id").endswith(NOT_SINCE_JDK_11)]


def _read_humaneval_java_rows(root: Path) -> list[Row]:
    descriptions = _read_descriptions(root / "HumanEval.jsonl")
    rows = []
    for path in sorted((root / _MAIN).glob("*.java")):
        test = root / _TESTS / f"TEST_{path.name}"
        buggy, buggy_file = read_checkout_text(path), f"{_MAIN}/{path.name}"
        fixed = read_checkout_text(root / "src/main/java/humaneval/correct" / path.name)
        fixed = fixed.replace("package humaneval.correct;", "package humaneval.buggy;")
        comment = re.search(r"/\*+(.*?)\*/", buggy, re.DOTALL)
        values = {
            "instance_id": f"humaneval-java__{path.stem}",
            "problem_statement": _clean_comment(comment[1]) if comment else descriptions.get(path.stem, ""),
            "buggy_file": buggy_file,
            "files": {buggy_file: buggy, f"{_TESTS}/{test.name}": read_checkout_text(test)},
            "patch": format_diff(buggy_file, buggy, fixed).decode("utf-8", "surrogateescape"),
            "test_class": f"humaneval.TEST_{path.stem}",
        }
        rows.append(Row("humaneval_java", buggy_file, values))
    return rows


def _read_descriptions(path: Path) -> dict[str, str]:
    descriptions = {}
    for row in read_rows("humaneval_java", path):
        tree = ast.parse(row.text("prompt") + row.text("canonical_solution"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        function = row.text("entry_point")
        descriptions[function.upper()] = ast.get_docstring(functions[function]) or ""
    return descriptions


def _clean_comment(comment: str) -> str:
    return "\n".join(re.sub(r"^\s*\* ?", "", line) for line in comment.strip().split("\n")).strip()
