"""`aider_polyglot`: 225 Exercism exercises in six languages (``Aider-AI/polyglot-benchmark``).

The reference is the example solution. As in aider's harness, skipped tests are enabled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from coderepairrl.tasks.benchmark import FileBenchmark
from coderepairrl.tasks.masking import IMPLEMENT
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.rows import Row, read_checkout_text
from coderepairrl.types import Checks, Command, Task

Language = Literal["python", "javascript", "java", "go", "rust", "cpp"]
TEST_SECONDS = 10.0  # for each test
SECONDS = 180.0  # for all tests of an exercise
_PRACTICE = "exercises/practice"
_STATEMENT = ("introduction.md", "instructions.md", "instructions.append.md")
_MANIFEST = ".meta/Cargo-example.toml"  # for Rust examples that need other crates than the stub
_JEST_SHIM = "crrl_jest.mjs"
_CATCH_FILES = ("test/catch.hpp", "test/tests-main.cpp")  # Catch2, the test framework for C++
_CPP_SCRIPT = """
out=$(mktemp -d) && results=$1 && shift &&
g++ -std=c++17 -DEXERCISM_RUN_ALL_TESTS -I. "$@" test/tests-main.cpp -o "$out/tests" -lpthread &&
exec "$out/tests" -r junit -o "$results"
"""


class AiderPolyglot(FileBenchmark):
    """Exercises in `language`; `path` is a checkout, or a file of rows (docs/guides/benchmarks.md).

    Java tasks have no checks: they need Gradle and JUnit 5 from a registry.
    """

    name = "aider_polyglot"

    def __init__(self, path: str = "", *, language: Language = "python", cache: str = "") -> None:
        super().__init__(path, cache=cache)
        self.language = language

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        examples = row.files("example_files")
        solutions, tests = row.names("solution_files"), row.names("test_files")
        files = {name: text for name, text in row.files("files").items() if not _is_hidden(name)}
        files |= {name: _enable_tests(self.language, files[name]) for name in tests if name in files}
        restored = {name: text for name, text in files.items() if name in tests or name in _CATCH_FILES}
        patches = [
            format_diff(target, files.get(target, ""), text)
            for target, text in _match_examples(row, examples, solutions).items()
            if files.get(target, "") != text
        ]
        fail_to_pass = tuple(name.replace("::", ".") for name in row.names("FAIL_TO_PASS"))
        return self.make_file_task(
            row,
            files,
            b"".join(patches),
            self._make_checks(restored, tests, files, fail_to_pass),
            licence="MIT",
            language=self.language,
            kind=IMPLEMENT,
        )

    def _make_checks(
        self, restored: Mapping[str, str], tests: Sequence[str], files: Iterable[str], fail_to_pass: tuple[str, ...]
    ) -> Checks:
        modules = [PurePosixPath(name).stem for name in tests if name.endswith("_test.py")]
        match self.language:
            case "python":
                command = Command(("python3", "-m", "unittest", *modules), SECONDS, "unittest", TEST_SECONDS)
            case "javascript":
                restored = {**restored, _JEST_SHIM: (resources.files(__package__) / "programs/jest.mjs").read_text()}
                argv = ("node", "--import", f"./{_JEST_SHIM}", "--test", "--test-reporter=tap", *tests)
                command = Command(argv, SECONDS, "node")
            case "rust":
                argv = ("cargo", "test", "--offline", "--no-fail-fast", "--", "--include-ignored")
                command = Command(argv, SECONDS, "cargo")
            case "go":
                command = Command(("go", "test", "-json", "./..."), SECONDS, "go")
            case "cpp":
                sources = sorted(name for name in files if name.endswith(".cpp") and "/" not in name)
                command = Command(("sh", "-c", _CPP_SCRIPT, "sh", "{results}", *sources), SECONDS, "junit")
            case _:
                return Checks()
        return Checks((command,), restored, fail_to_pass)

    def _read_rows(self) -> list[Row]:
        rows = self._read_checkout(f"{self.language}/{_PRACTICE}", self._read_exercises)
        return [row for row in rows if row.values.get("language", self.language) == self.language]

    def _read_exercises(self, root: Path) -> list[Row]:
        configurations = sorted((root / self.language / _PRACTICE).glob("*/.meta/config.json"))
        return [_read_exercise(path.parent.parent, self.language) for path in configurations]


def _read_exercise(folder: Path, language: str) -> Row:
    config: Mapping[str, Any] = json.loads((folder / ".meta" / "config.json").read_text("utf-8"))["files"]
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): path for path in paths}
    statement_files = [folder / ".docs" / name for name in _STATEMENT]
    statement = [read_checkout_text(path).strip() for path in statement_files if path.is_file()]
    example_names = [*config.get("example", config.get("exemplar", ())), _MANIFEST]
    values = {
        "instance_id": f"polyglot-{language}__{folder.name}",
        "problem_statement": "\n\n".join(statement),
        "solution_files": config["solution"],
        "test_files": config["test"],
        "files": {
            name: read_checkout_text(path) for name, path in files.items() if not _is_hidden(name) and _is_text(path)
        },
        "example_files": {name: read_checkout_text(files[name]) for name in example_names if name in files},
    }
    return Row("aider_polyglot", f"{language}/{folder.name}", values)


def _match_examples(row: Row, examples: Mapping[str, str], solutions: tuple[str, ...]) -> dict[str, str]:
    """Example texts by solution file: by equal name, else by suffix, else a new file."""
    matched: dict[str, str] = {}
    for name, text in examples.items():
        path = PurePosixPath(name)
        same_name = [each for each in solutions if PurePosixPath(each).name == path.name]
        same_suffix = [each for each in solutions if PurePosixPath(each).suffix == path.suffix and each not in matched]
        new_file = f"{PurePosixPath(solutions[0]).parent}/{path.name}".removeprefix("./")
        target = [*same_name, *same_suffix, new_file][0]
        matched[target] = text
    if not matched:
        raise row.make_error("no example solution")
    return matched


def _enable_tests(language: str, text: str) -> str:
    if language == "javascript":
        return re.sub(r"\bxtest\(", "test(", text)
    return re.sub(r"^\s*@Disabled\(.*?\)\n", "", text, flags=re.MULTILINE) if language == "java" else text


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") and part not in (".eslintrc", ".babelrc") for part in name.split("/"))


def _is_text(path: Path) -> bool:
    return b"\0" not in path.read_bytes()[:8000]  # as git decides
