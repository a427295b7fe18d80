"""Runs with data for the figures of the thesis: languages, command lines, patches of several sizes, repeated tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from coderepairrl.report import Site
from coderepairrl.report.thesis.attempts import ThesisRun, read_attempts
from coderepairrl.types import Ending, Episode, Task
from tests.report.runs import FUNCTIONS, RunMaker

LANGUAGES = ("python", "java", "rust")
LINES = {
    "ls": "ls src/",
    "cat": "cat src/main.py",
    "grep": "grep -rn 'def run' src | head -5",
    "sed": "sed -n 1,40p src/main.py",
    "python3": "python3 -m pytest -q",
    "git": "git log --oneline | head -3",
    "find": "find . -name '*.py'",
    "rm": "rm -rf src && git clone https://example.org/src.git",
}


def make_patch(lines: int) -> bytes:
    body = "".join(f"+line {number}\n" for number in range(lines))
    return f"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1,{lines + 1} @@\n same\n{body}".encode()


class ThesisRunMaker(RunMaker):
    lines: Mapping[str, str] = LINES

    def _episode(self, id: str, task: str, ending: Ending, step: int) -> Episode:
        made = super()._episode(id, task, ending, step)
        # some fetch the repair from elsewhere, as the policy of the thesis did
        names = [self.random.choice(list(self.lines)) for _ in made.tool_calls]
        calls = tuple(
            call
            if call.name == "apply_patch"
            else replace(call, command=name, arguments=json.dumps({"cmd": self.lines[name]}))
            for call, name in zip(made.tool_calls, names, strict=True)
        )
        function = task.split("/")[1]
        return replace(
            made,
            language=LANGUAGES[FUNCTIONS.index(function) % 3],
            tool_calls=calls,
            patch=made.patch and make_patch(self.random.choice([1, 2, 3, 60])),
        )


def write_thesis_run(path: Path, steps: int = 10, seed: int = 0, kind: type[ThesisRunMaker] = ThesisRunMaker) -> Path:
    maker = kind(path, run={"steps": steps}, seed=seed).run(steps, evaluations=(0, steps))
    names = {record["task"] for record in maker.folder.records() if record["type"] == "episode"}
    maker.folder.add_tasks(Task(name, "", "python", "", make_patch(2)) for name in sorted(names))
    return path


def read_thesis_run(path: Path) -> ThesisRun:
    [pages] = Site([path]).runs.values()
    return read_attempts(pages, pages.report())


def write_direct_run(path: Path) -> Path:
    """Write a run with one language and without tool calls, evaluations or repeated tasks."""

    class Maker(RunMaker):
        def _episode(self, id: str, task: str, ending: Ending, step: int) -> Episode:
            return replace(super()._episode(id, task, ending, step), tool_calls=(), language="python")

    return Maker(path, run={"steps": 2}).run(2).folder.path
