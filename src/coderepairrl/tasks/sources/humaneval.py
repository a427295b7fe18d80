"""`humaneval`: repair of the 164 functions of HumanEval (arXiv 2107.03374, ``openai/human-eval``).

``bug=mutant`` uses the first mutation (`tasks.mutants.list_mutations`), in seeded order, that fails the tests;
``bug=stub`` replaces the body by ``pass``, the original completion task.
"""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Literal

from coderepairrl.errors import TaskError
from coderepairrl.processes.caches import user_cache
from coderepairrl.protocols import SandboxBackend
from coderepairrl.tasks.base import compute_cached_json, find_code_folder
from coderepairrl.tasks.benchmark import FileBenchmark
from coderepairrl.tasks.masking import IMPLEMENT
from coderepairrl.tasks.mutants.mutations import list_mutations
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.rows import Row
from coderepairrl.types import Checks, Command, Task

PROGRAM, CHECK = "solution.py", "check_solution.py"
SECONDS = 30.0  # time limit of a task's checks
_PACKAGE = "human_eval"
_PYTHON = ("python3", "-S", "-E", "-B")
_TRIAL_SECONDS = 10.0  # time limit of the tests of one mutation
_LIMITS = (
    "import resource\n"
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    "resource.setrlimit(resource.RLIMIT_CPU, (5, 5))\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
)


class HumanEval(FileBenchmark):
    """HumanEval with a bug in each solution; `path` is ``HumanEval.jsonl.gz`` or the package ``human_eval``."""

    name = "humaneval"

    def __init__(
        self,
        path: str = "",
        *,
        bug: Literal["mutant", "stub"] = "mutant",
        seed: int = 0,
        revision: str = "",
        sandbox: str = "auto",
        cache: str = "",
    ) -> None:
        if path == _PACKAGE and not Path(path).exists():
            path = str(find_code_folder(_PACKAGE) / "data" / "HumanEval.jsonl.gz")
        super().__init__(path, hub="openai/openai_humaneval", split="test", revision=revision, cache=cache)
        self.bug, self.seed, self.sandbox = bug, seed, sandbox

    def make_task(self, row: Row) -> Task:
        """Convert a row."""
        fixed, function = _join_solution(row), row.text("entry_point")
        broken = self._broken_by_fixed[fixed] if self.bug == "mutant" else row.text("prompt") + "    pass\n"
        problem = "gives wrong results" if self.bug == "mutant" else "is not written yet"
        defined = [node for node in ast.parse(fixed).body if isinstance(node, ast.FunctionDef)]
        docstring = next((ast.get_docstring(node) or "" for node in defined if node.name == function), "")
        names = ", ".join(node.name for node in defined)
        check = f"from solution import {names}\n{row.text('test')}\n\ncheck({function})\n"
        return Task(
            id=row.text("task_id"),
            prompt=f"`{function}` in {PROGRAM} {problem}. It should do this:\n\n{docstring}\n",
            language="python",
            workspace=self.store_workspace({PROGRAM: broken}),
            reference=format_diff(PROGRAM, broken, fixed),
            checks=Checks((Command((*_PYTHON, CHECK), SECONDS),), {CHECK: check}),
            split="test",
            licence="MIT",
            kind="" if self.bug == "mutant" else IMPLEMENT,
        )

    @cached_property
    def _broken_by_fixed(self) -> dict[str, str]:
        """Programs with a bug, by correct program."""
        rows = self.rows()
        key = [self.seed, [(_join_solution(row), row.text("test")) for row in rows]]
        folder = (self.cache or user_cache()) / "benchmarks" / self.name
        try:
            return dict(compute_cached_json(folder, key, partial(self._find_mutants, rows), self.sandbox))
        except OSError as error:
            raise TaskError(f"the bugs cannot be written to {folder}: {error}", fix="set CRRL_CACHE") from error

    async def _find_mutants(self, rows: Sequence[Row], backend: SandboxBackend) -> dict[str, str]:
        trial = Task("humaneval/trial", "find a bug", "python", self.store_workspace({PROGRAM: ""}), b"")
        parallel_runs = asyncio.Semaphore(os.cpu_count() or 1)

        async def find_mutant(row: Row) -> tuple[str, str]:
            fixed = _join_solution(row)
            tests = f"{row.text('test')}\n\ncheck({row.text('entry_point')})\n"
            candidates = [mutation.apply(fixed) for mutation in list_mutations(fixed)]
            Random(f"{row.text('task_id')}/{self.seed}").shuffle(candidates)
            async with parallel_runs, backend.open(trial) as box:
                for broken in candidates:
                    program = f"{_LIMITS}{broken}\n{tests}".encode()
                    result = await box.exec((*_PYTHON, "-"), stdin=program, timeout=_TRIAL_SECONDS)
                    # 1: an exception; a program that hangs is a poor bug
                    if result.exit_code == 1 and not result.timed_out:
                        return fixed, broken
            raise row.make_error(f"its tests notice none of {len(candidates)} mutations")

        return dict(await asyncio.gather(*map(find_mutant, rows)))


def _join_solution(row: Row) -> str:
    return row.text("prompt") + row.text("canonical_solution")
