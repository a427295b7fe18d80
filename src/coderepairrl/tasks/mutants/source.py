"""`MutantSource`: the task source ``mutants``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, get_args

from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.grading.witness import detect_runner
from coderepairrl.processes.caches import environment_folder, user_cache
from coderepairrl.protocols import SandboxBackend
from coderepairrl.runs import codec
from coderepairrl.tasks.base import LoadedSource, compute_cached_json, digest_contents, find_code_folder, store_folder
from coderepairrl.tasks.mutants import documented
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, Function, Mutant, Split, load_mutants, make_exercise
from coderepairrl.tasks.mutants.package_tasks import Bug, find_bugs, read_tree
from coderepairrl.tasks.patches import format_diff
from coderepairrl.tasks.project_environment import PYTEST, ProjectEnvironment, build_project_environment
from coderepairrl.types import Checks, Command, Task
from coderepairrl.version import __version__

CHECK_SECONDS = 5.0
BUGS = 16
"""Number of bugs to find in a package by default."""
MAX_SECONDS = 86_400.0  # the highest option `timeout`
LICENCE = "Apache-2.0"  # of the shipped corpus
_CACHE_KEY = "bugs that were verified in a sandbox, documented ones under several hash seeds"
"""Part of the cache's key, so that bugs which earlier versions found in another way are not used."""


class MutantSource(LoadedSource):
    """Bugs injected into healthy Python code, verified by checks (options: docs/guides/mutants.md).

    In the corpus, split ``test`` holds out pairs of function and mutation, and ``unseen`` whole functions; the first
    quarter of a package's bugs is ``test``. Task ids are ``mutants/MODULE.FUNCTION/KIND-DIGEST-q`` (quoted) or ``-u``;
    intervals are clustered by the part before the last slash. Raises `ConfigError` for unusable options,
    `TaskError` for unusable code, `SandboxFault`, `PrerequisiteError`, and as `build_project_environment`.
    """

    name = "mutants"

    def __init__(
        self,
        path: str = "",
        *,
        split: str | None = None,
        n: int = 0,
        seed: int = 0,
        quoted: float | str = "both",
        command: str = "",
        requirements: str | Sequence[str] = (),
        environment: bool = True,
        documented: bool = False,
        only: str = "*",
        timeout: float = 60.0,
        sandbox: str = "auto",
        sandbox_options: Mapping[str, Any] = MappingProxyType({}),
        cache: str = "",
    ) -> None:
        if split not in (None, *get_args(Split)) or (path and split == "unseen"):
            raise ConfigError(f"the task source mutants has no split {split!r}", fix="train, test, or unseen (corpus)")
        if n < 0:
            raise ConfigError("tasks.options.n must not be negative", fix="say how many bugs to inject: n=64")
        if not (quoted == "both" or (not isinstance(quoted, str) and 0 <= quoted <= 1)):
            raise ConfigError(f"tasks.options.quoted is a share from 0 to 1 or 'both', not {quoted!r}")
        if not 0 < timeout <= MAX_SECONDS:
            raise ConfigError(f"tasks.options.timeout={timeout:g}: write more than 0 and at most {MAX_SECONDS:,.0f} s")
        self.path = path
        self.documented = documented
        if documented and not path:
            raise ConfigError("tasks.options.documented needs code", fix="path=FOLDER, or an installed package's name")
        self.n = n or (BUGS if path and not documented else 0)
        self.seed = seed
        self.quoted = quoted
        self.command = _split_test_command(command) if command else list(PYTEST)
        self.requirements = requirements.split() if isinstance(requirements, str) else list(requirements)
        self.environment = environment
        self.only = only
        self.timeout = timeout
        self.sandbox = sandbox
        self.sandbox_options = dict(sandbox_options)
        self.cache = (Path(cache).expanduser() if cache else user_cache()) / "mutants"
        self._workspaces = self.cache / "workspaces"
        self._splits: tuple[str, ...] = get_args(Split) if split is None else (split,)

    def load(self) -> list[Task]:
        """Inject and verify bugs, and write workspaces, unless cached."""
        try:
            if self.path and not self.documented:
                return self._make_package_tasks()
            pool, neighbours = self._load_documented() if self.documented else (load_mutants(), None)
            tasks = [task for split in self._splits for task in self._make_corpus_split(split, pool, neighbours)]
            if not tasks:
                raise TaskError(
                    f"{self.path} has no function of split {self._splits} whose docstring's examples notice a bug",
                    fix="name a package whose docstrings have examples of plain values",
                )
            return tasks
        except OSError as error:
            raise TaskError(f"the tasks cannot be written to {self.cache}: {error}", fix="set CRRL_CACHE") from error

    def _load_documented(self) -> tuple[list[Mutant], list[Function]]:
        candidates = documented.find_documented_functions(find_code_folder(self.path))
        sandbox = (self.sandbox, self.sandbox_options)
        empty = f"dir:{store_folder(self._workspaces, {'judge.py': b''})}"
        key = (_CACHE_KEY, __version__, [(each.key, each.source, str(each.checks)) for each in candidates], sandbox)
        find = partial(documented.verify_functions, candidates, empty)
        verified = compute_cached_json(self.cache / "documented-mutants", key, find, *sandbox)
        mutants = [codec.restore(Mutant, each) for each in verified]
        return mutants, list(dict.fromkeys(mutant.function for mutant in mutants))

    def _make_corpus_split(
        self, split: str, mutants: Sequence[Mutant], neighbours: Sequence[Function] | None
    ) -> list[Task]:
        pool = [mutant for mutant in mutants if mutant.split == split]
        Random(f"{split}/{self.seed}").shuffle(pool)
        tasks: list[Task] = []
        for mutant in pool:
            variants: tuple[bool, ...] = (True, False)
            if self.quoted != "both":
                variants = (Random(f"quote/{mutant.key}/{self.seed}").random() < float(self.quoted),)
            for quoted in variants:
                if self.n and len(tasks) == self.n:
                    return tasks
                candidate = make_exercise(mutant, Random(f"{mutant.key}/{self.seed}"), quoted, neighbours)
                if candidate is not None:
                    tasks.append(self._make_exercise_task(candidate))
        return tasks

    def _make_exercise_task(self, exercise: Exercise) -> Task:
        files = {name: content.encode() for name, content in exercise.files.items()}
        return Task(
            id=f"mutants/{exercise.mutant.key}-{'q' if exercise.quoted else 'u'}",
            prompt=exercise.prompt,
            language="python",
            workspace=f"dir:{store_folder(self._workspaces, files)}",
            reference=format_diff(exercise.path, exercise.files[exercise.path], exercise.fixed),
            checks=Checks((Command(exercise.command, CHECK_SECONDS),), exercise.tests),
            split=exercise.mutant.split,
            licence="" if self.documented else LICENCE,
        )

    def _make_package_tasks(self) -> list[Task]:
        """Tasks of both splits, from one sequence of bugs so that they share none."""
        files = read_tree(Path(self.path).expanduser().resolve())
        project = build_project_environment(
            files, self.command, self.requirements, self.cache / "projects", build=self.environment
        )
        files |= project.built
        command = [*(("env", f"PYTHONPATH={project.imports}") if project.imports else ()), *self.command]
        verified = self._find_bugs(files, command, project)
        test_count = len(verified) // 4
        return [
            self._make_bug_task(bug, split, files, project.environment)
            for split, bugs in (("train", verified[test_count:]), ("test", verified[:test_count]))
            if split in self._splits
            for bug in bugs
        ]

    def _find_bugs(self, files: Mapping[str, bytes], command: list[str], project: ProjectEnvironment) -> list[Bug]:
        """Bugs that the tests notice, cached."""
        folder = environment_folder(project.environment).name if project.environment else ""
        sandbox = (self.sandbox, self.sandbox_options)
        options = (self.only, self.seed, self.timeout, self.n)
        key = (_CACHE_KEY, __version__, digest_contents(files), command, *options, folder, sandbox)

        async def find(backend: SandboxBackend) -> Any:
            verified = await find_bugs(
                files,
                command,
                backend,
                most=self.n,
                only=self.only,
                seed=self.seed,
                timeout=self.timeout,
                environment=project.environment,
                modules=project.modules,
                leave_out=self.command == list(PYTEST),
            )
            return codec.dump(verified)

        return [codec.restore(Bug, entry) for entry in compute_cached_json(self.cache / "bugs", key, find, *sandbox)]

    def _make_bug_task(self, bug: Bug, split: str, files: Mapping[str, bytes], environment: str) -> Task:
        rng = Random(f"{bug.key}/{self.seed}")
        quoted = rng.random() < (0.5 if self.quoted == "both" else float(self.quoted))
        line = bug.broken.split("\n")[bug.mutation.line - 1].strip()
        prompt = f"{bug.path}: {bug.mutation.function} is broken. `{shlex.join(bug.command)}` fails:\n\n{bug.output}\n"
        if quoted and line:
            prompt += f"\nThe traceback leads to this line:\n    {line}\n"
        tests = {
            name: data.decode("utf-8", "surrogateescape")
            for name, data in files.items()
            if name.endswith(".py") and (name.split("/")[-1].startswith("test_") or "/tests/" in f"/{name}")
        }
        command = Command(bug.command, self.timeout, detect_runner(bug.command))
        return Task(
            id=f"mutants/{bug.key}-{'q' if quoted else 'u'}",
            prompt=prompt,
            language="python",
            workspace=f"dir:{store_folder(self._workspaces, {**files, bug.path: bug.broken.encode()})}",
            reference=format_diff(bug.path, bug.broken, bug.fixed),
            checks=Checks((command,), tests, bug.fail_to_pass, bug.pass_to_pass),
            environment=environment,
            split=split,
        )


def _split_test_command(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"tasks.options.command={command!r}: {error}", fix="write it as in a shell") from None
    if not words:
        raise ConfigError("tasks.options.command is empty", fix="leave it out, or name what runs the tests")
    return words
