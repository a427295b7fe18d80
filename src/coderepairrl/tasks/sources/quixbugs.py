"""`quixbugs`: 40 classic algorithms with one-line bugs, in Python and Java (``jkoppel/QuixBugs``).

Programs may loop; upstream's limits per test are 5 s in Python, 3 s in Java.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from coderepairrl.environments.build import Specification
from coderepairrl.environments.pythons import sandbox_version
from coderepairrl.grading import witness
from coderepairrl.tasks.benchmark import FileBenchmark, encode_patch
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.rows import Row, read_checkout_text
from coderepairrl.types import Checks, Command, Task

TEST_SECONDS = 5.0
_START_SECONDS = 30.0
_PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider")
_JAVA_TESTS = "java_testcases/junit"


class QuixBugs(FileBenchmark):
    """QuixBugs in `language`: a workspace is a program, its tests and modules that they import.

    `path` is a checkout, or a file of rows. Java tests need a JDK, and JUnit 4 and Hamcrest at `jars`.
    """

    name = "quixbugs"

    def __init__(
        self,
        path: str = "",
        *,
        language: Literal["python", "java"] = "python",
        environment: bool = True,
        jars: str = witness.JARS,
        cache: str = "",
    ) -> None:
        super().__init__(path, cache=cache)
        self.language, self.environment, self.jars = language, environment, jars

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        files = row.files("files")
        buggy = row.text("buggy_file")
        tests = {name: content for name, content in files.items() if name != buggy}
        fail_to_pass, pass_to_pass = row.names("FAIL_TO_PASS"), row.names("PASS_TO_PASS")
        environment = ""
        if self.language == "java":
            test_class = f"java_testcases.junit.{Path(buggy).stem}_TEST"
            checks = witness.make_junit_checks(
                tests, list(files), test_class, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass, jars=self.jars
            )
        else:
            test = next(name for name in tests if Path(name).name == f"test_{Path(buggy).name}")
            test_count = len(fail_to_pass) + len(pass_to_pass) or 20  # a guess, if they are not named
            seconds = _START_SECONDS + TEST_SECONDS * test_count
            command = Command((*_PYTEST, test), seconds, "pytest", TEST_SECONDS)
            checks = Checks((command,), tests, fail_to_pass, pass_to_pass)
            if self.environment:
                environment = str(Specification(python=sandbox_version(), requirements=("pytest",)))
        fields = {"licence": "MIT", "environment": environment, "language": self.language}
        return self.make_file_task(row, files, encode_patch(row.text("patch")), checks, **fields)

    def _read_rows(self) -> list[Row]:
        rows = self._read_checkout(
            "python_programs", _read_python_rows if self.language == "python" else _read_java_rows
        )
        return [row for row in rows if row.values.get("language", self.language) == self.language]


def _read_python_rows(root: Path) -> list[Row]:
    """Rows of a checkout; references keep the docstring, which upstream's corrected files drop."""
    shared = {"conftest.py": read_checkout_text(root / "conftest.py")}
    rows = []
    for test in sorted((root / "python_testcases").glob("test_*.py")):
        program = test.name.removeprefix("test_")
        buggy = f"python_programs/{program}"
        broken = read_checkout_text(root / buggy)
        corrected = read_checkout_text(root / "correct_python_programs" / program)
        body, statement = _split_source(broken)
        files = {buggy: broken, f"python_testcases/{test.name}": read_checkout_text(test), **shared}
        for helper in ("load_testdata", "node"):
            if helper in files[f"python_testcases/{test.name}"]:
                files[f"python_testcases/{helper}.py"] = read_checkout_text(root / "python_testcases" / f"{helper}.py")
        name = program.removesuffix(".py")
        data = root / "json_testcases" / f"{name}.json"
        if data.is_file():
            files[f"json_testcases/{data.name}"] = read_checkout_text(data)
        fixed = broken.replace(body, _cut_first_solution(corrected).strip("\n"), 1)
        rows.append(_make_quixbugs_row("python", name, buggy, files, broken, fixed, statement))
    return rows


def _read_java_rows(root: Path) -> list[Row]:
    """Rows of a checkout; Java has no docstrings, so issues are the Python ones."""
    rows = []
    for test in sorted((root / _JAVA_TESTS).glob("*_TEST.java")):
        program = test.name.removesuffix("_TEST.java")
        buggy = f"java_programs/{program}.java"
        broken = read_checkout_text(root / buggy)
        fixed = read_checkout_text(root / "correct_java_programs" / f"{program}.java")
        fixed = fixed.replace("package correct_java_programs;", "package java_programs;")
        files = {buggy: broken, f"{_JAVA_TESTS}/{test.name}": read_checkout_text(test)}
        for name, folder in (
            ("Node", "java_programs"),
            ("WeightedEdge", "java_programs"),
            ("QuixFixOracleHelper", _JAVA_TESTS),
        ):
            if any(re.search(rf"\b{name}\b", content) for content in files.values()):
                files[f"{folder}/{name}.java"] = read_checkout_text(root / folder / f"{name}.java")
        statement = _split_source(read_checkout_text(root / "python_programs" / f"{program.lower()}.py"))[1]
        rows.append(_make_quixbugs_row("java", program, buggy, files, broken, fixed, statement))
    return rows


def _make_quixbugs_row(
    language: str, program: str, buggy: str, files: Mapping[str, str], broken: str, fixed: str, statement: str
) -> Row:
    values = {
        "instance_id": f"quixbugs-{language}__{program}",
        "language": language,
        "problem_statement": statement,
        "buggy_file": buggy,
        "files": dict(files),
        "patch": format_diff(buggy, broken, fixed).decode("utf-8", "surrogateescape"),
    }
    return Row("quixbugs", buggy, values)


def _split_source(source: str) -> tuple[str, str]:
    """Code of a program, and the text below it."""
    tree = ast.parse(source)
    lines = source.split("\n")
    texts = [node for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    code = [node for node in tree.body if node not in texts]
    statement = str(texts[0].value.value).strip() if texts and isinstance(texts[0].value, ast.Constant) else ""
    return "\n".join(lines[code[0].lineno - 1 : code[-1].end_lineno]), statement


def _cut_first_solution(source: str) -> str:
    """Source before alternatives, which are strings or repeat the function."""
    tree = ast.parse(source)
    lines, seen, last = source.split("\n"), set[str](), 0
    for node in tree.body:
        name = getattr(node, "name", "")
        if (isinstance(node, ast.Expr) and last) or name in seen:
            break
        seen |= {name} - {""}
        last = node.end_lineno or last
    return "\n".join(lines[:last])
