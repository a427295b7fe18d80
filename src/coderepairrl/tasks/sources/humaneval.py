"""`humaneval`: the 164 functions of HumanEval (arXiv 2107.03374, ``openai/human-eval``) as repair.

HumanEval has no bugs. They are made here: with ``bug=mutant`` one mutation of the canonical solution
(`tasks.mutants.mutations`), the first in an order drawn by the seed with which the problem's own tests fail; with
``bug=stub`` the solution's body is ``pass``, which is the completion task of the original.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Literal

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import user_cache
from coderepairrl.tasks.benchmark import Files
from coderepairrl.tasks.mutants.mutations import mutations
from coderepairrl.tasks.mutants.source import unified
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

PROGRAM, CHECK = "solution.py", "check_solution.py"
SECONDS = 30.0
_TRIAL_SECONDS = 10.0
_LIMITS = (
    "import resource\n"
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
)


class HumanEval(Files):
    """HumanEval with a bug in each solution.

    `path` is ``HumanEval.jsonl.gz``; without it the rows are the hub's. Mutants are run on this machine, once, to find
    those that the tests notice; what was found is kept in `cache`.
    """

    name = "humaneval"

    def __init__(
        self,
        path: str = "",
        *,
        bug: Literal["mutant", "stub"] = "mutant",
        seed: int = 0,
        revision: str = "",
        cache: str = "",
    ) -> None:
        super().__init__(path, hub="openai/openai_humaneval", split="test", revision=revision, cache=cache)
        self.bug, self.seed = bug, seed
        self._broken: dict[str, str] = {}

    def described(self) -> list[Task]:
        """The tasks of all rows, with the bugs that are made first. Raises `TaskError` and `PrerequisiteError`."""
        if self.bug == "mutant" and not self._broken:
            self._broken = self._mutants()
        return super().described()

    def task(self, row: Row) -> Task:
        """The task of a row."""
        fixed, function = _fixed(row), row.text("entry_point")
        broken = self._broken[fixed] if self.bug == "mutant" else row.text("prompt") + "    pass\n"
        what = "gives wrong results" if self.bug == "mutant" else "is not written yet"
        tree = ast.parse(fixed)
        defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        described = next((ast.get_docstring(node) or "" for node in defined if node.name == function), "")
        names = ", ".join(node.name for node in defined)
        check = f"from solution import {names}\n{row.text('test')}\n\ncheck({function})\n"
        return Task(
            id=row.text("task_id"),
            prompt=f"`{function}` in {PROGRAM} {what}. It should do this:\n\n{described}\n",
            language="python",
            workspace=self.stored({PROGRAM: broken}),
            reference=unified(PROGRAM, broken, fixed),
            checks=Checks((Command(("python3", "-S", "-E", "-B", CHECK), SECONDS),), {CHECK: check}),
            split="test",
            licence="MIT",
        )

    def _mutants(self) -> dict[str, str]:
        """The broken program of each whole one."""
        rows = self.rows()
        asked = json.dumps([self.seed, [(_fixed(row), row.text("test")) for row in rows]])
        folder = (self.cache or user_cache()) / "benchmarks" / self.name
        known = folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.json"
        if not known.exists():
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                found = dict(zip(map(_fixed, rows), pool.map(self._mutant, rows), strict=True))
            try:
                folder.mkdir(parents=True, exist_ok=True)
                making = known.with_suffix(f".{os.getpid()}")
                making.write_text(json.dumps(found), encoding="utf-8")
                making.replace(known)
            except OSError as error:
                raise TaskError(f"the bugs cannot be written to {folder}: {error}", fix="set CRRL_CACHE") from error
        read: dict[str, str] = json.loads(known.read_text(encoding="utf-8"))
        return read

    def _mutant(self, row: Row) -> str:
        fixed = _fixed(row)
        tests = f"{row.text('test')}\n\ncheck({row.text('entry_point')})\n"
        made = [mutation.apply(fixed) for mutation in mutations(fixed)]
        Random(f"{row.text('task_id')}/{self.seed}").shuffle(made)
        found = next((broken for broken in made if _fails(f"{broken}\n{tests}")), "")
        if not found:
            raise row.wrong(f"its tests notice none of {len(made)} mutations")
        return found


def _fixed(row: Row) -> str:
    return row.text("prompt") + row.text("canonical_solution")


def _fails(program: str) -> bool:
    """Whether the program fails by an exception, soon; one that has to be stopped is no good bug."""
    argv: Sequence[str] = (sys.executable, "-S", "-E", "-B", "-")
    try:
        done = subprocess.run(
            argv, input=_LIMITS + program, text=True, capture_output=True, timeout=_TRIAL_SECONDS, cwd=Path("/")
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 1
