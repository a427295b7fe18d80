"""`functions`: masked Python functions, to be written from signature and docstring (kind ``implement``).

The docstring's examples check the answer.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.processes.caches import user_cache
from coderepairrl.protocols import SandboxBackend
from coderepairrl.tasks.base import LoadedSource, compute_cached_json, digest_contents, log_left_out, store_folder
from coderepairrl.tasks.masking import IMPLEMENT, Function, find_functions, is_valid_python
from coderepairrl.tasks.mutants.package_tasks import read_tree
from coderepairrl.tasks.patches import format_diff, is_test_path
from coderepairrl.tasks.project_environment import build_project_environment
from coderepairrl.tasks.rows import ENDINGS, Row, read_rows
from coderepairrl.tasks.select import HELD_OUT, TRAIN, is_held_out
from coderepairrl.types import Checks, Command, Task

CHECK_FILE = "crrl_examples.py"
_COMMAND = ("python3", "-B", CHECK_FILE)
CHECK_SECONDS = 30.0
_PROBE_SECONDS = 600.0
_HELD_OUT = 0.25
_PROMPT = """\
`{name}` in {path} is missing. In its place there is this comment:

{comment}

Replace the comment by the function. It is specified like this:

```python
{header}
```
"""
_EXAMPLES = """\
import doctest
import importlib
import sys

sys.path.insert(0, {imports!r})
scope = dict(vars(importlib.import_module({module!r})))
test = doctest.DocTestParser().get_doctest({docstring!r}, scope, {name!r}, None, None)
ran = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test)
assert ran.attempted and not ran.failed, f"{{ran.failed}} of {{ran.attempted}} examples fail"
"""
_PROGRAM = resources.files(__package__) / "programs/examples.py"
"""Program that runs each function's examples, with and without the function."""


class _SourceTree(NamedTuple):
    name: str
    files: Mapping[str, bytes]
    licence: str


class _MaskedFunction(NamedTuple):
    path: str
    source: str
    function: Function


class Functions(LoadedSource):
    """Functions specified by docstrings, each masked in a copy of its files (options: docs/guides/kinds.md).

    `left_out` counts omitted functions. A quarter, by id (``functions/PATH:NAME``), has split ``test``. Raises
    `ConfigError` for unusable options, `TaskError` for unusable code, `SandboxFault`, `PrerequisiteError`, and as
    `build_project_environment`.
    """

    name = "functions"

    def __init__(
        self,
        path: str,
        *,
        examples: bool = True,
        quality: bool = True,
        requirements: str | Sequence[str] = (),
        environment: bool = True,
        sandbox: str = "auto",
        sandbox_options: Mapping[str, Any] = MappingProxyType({}),
        cache: str = "",
    ) -> None:
        if not path:
            raise ConfigError("tasks.options.path is empty", fix="name a Python file, a folder, or a file of rows")
        self.path = Path(path).expanduser()
        self.examples, self.quality = examples, quality
        self.requirements = requirements.split() if isinstance(requirements, str) else list(requirements)
        self.environment = environment
        self.sandbox, self.sandbox_options = sandbox, dict(sandbox_options)
        self.cache = (Path(cache).expanduser() if cache else user_cache()) / "functions"
        self.left_out = Counter[str]()

    def load(self) -> list[Task]:
        """Mask functions, run their examples, and write missing workspaces."""
        try:
            tasks = [task for tree in self._read_trees() for task in self._make_tasks(tree)]
        except OSError as error:
            fix = "name readable code; if it is the cache, set CRRL_CACHE to a writable folder"
            raise TaskError(f"{self.path}: {error}", fix=fix) from error
        fix = "quality=false keeps functions with poor docstrings, examples=false those without examples"
        log_left_out(str(self.path), "function", tasks, self.left_out, fix=fix)
        return tasks

    def _read_trees(self) -> list[_SourceTree]:
        if self.path.name.endswith(ENDINGS) and not self.path.is_dir():
            return _group_rows(read_rows(self.name, self.path))
        if self.path.is_file():
            return [_SourceTree("", {self.path.name: self.path.read_bytes()}, "")]
        return [_SourceTree("", read_tree(self.path.resolve()), "")]

    def _make_tasks(self, tree: _SourceTree) -> list[Task]:
        chosen = [each for path, data in sorted(tree.files.items()) for each in self._select_functions(path, data)]
        build = self.environment and self.examples and bool(chosen)
        projects = self.cache / "projects"
        project = build_project_environment(tree.files, _COMMAND, self.requirements, projects, build=build)
        imports, environment, files = project.imports, project.environment, {**tree.files, **project.built}
        if chosen and self.examples:
            problems = self._find_example_problems(files, chosen, imports, environment)
            self.left_out.update(problem for problem in problems if problem)
            chosen = [each for each, problem in zip(chosen, problems, strict=True) if not problem]
        id_counts = Counter[str]()
        return [self._make_task(tree, files, each, imports, environment, id_counts) for each in chosen]

    def _select_functions(self, path: str, data: bytes) -> Iterator[_MaskedFunction]:
        if not path.endswith(".py") or is_test_path(path):
            return
        try:
            source = data.decode("utf-8")
            candidates = find_functions(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.left_out["files cannot be parsed"] += 1
            return
        for function in candidates:
            if problem := self._find_problem(function, source):
                self.left_out[problem] += 1
            else:
                yield _MaskedFunction(path, source, function)

    def _find_problem(self, function: Function, source: str) -> str:
        if self.quality and function.problem:
            return function.problem
        if "<locals>" in function.name:
            return "are nested in functions"
        if self.examples and ">>>" not in function.docstring:
            return "have no examples"
        return "" if is_valid_python(function.mask(source)) else "are the only statement of their class"

    def _find_example_problems(
        self, files: Mapping[str, bytes], chosen: Sequence[_MaskedFunction], imports: str, environment: str
    ) -> list[str]:
        functions = [
            [_format_module_name(path, imports), function.name, function.docstring] for path, _, function in chosen
        ]
        backend_choice = (self.sandbox, self.sandbox_options)
        key = [_PROGRAM.read_text(), digest_contents(files), functions, imports, environment, backend_choice]

        async def probe(backend: SandboxBackend) -> list[str]:
            workspace = f"dir:{store_folder(self.cache / 'workspaces', files)}"
            task = Task("functions/whole", "run examples", "python", workspace, b"", environment=environment)
            return await _probe_examples(backend, task, json.dumps([imports or ".", functions]))

        problems: list[str] = compute_cached_json(self.cache / "examples", key, probe, *backend_choice)
        return problems

    def _make_task(
        self,
        tree: _SourceTree,
        files: Mapping[str, bytes],
        masked_function: _MaskedFunction,
        imports: str,
        environment: str,
        id_counts: Counter[str],
    ) -> Task:
        path, source, function = masked_function
        masked = function.mask(source)
        full_path = f"{tree.name}/{path}" if tree.name and not path.startswith(f"{tree.name}/") else path
        name = f"functions/{full_path}:{function.name}"
        id_counts[name] += 1  # a function may be defined twice
        task_id = name if id_counts[name] == 1 else f"{name}-{function.start}"
        checks = Checks()
        if self.examples:
            where = {"imports": imports or ".", "module": _format_module_name(path, imports)}
            script = _EXAMPLES.format(**where, docstring=function.docstring, name=function.name)
            checks = Checks((Command(_COMMAND, CHECK_SECONDS),), {CHECK_FILE: script})
        return Task(
            id=task_id,
            prompt=_PROMPT.format(name=function.name, path=path, comment=function.comment, header=function.header),
            language="python",
            workspace=f"dir:{store_folder(self.cache / 'workspaces', {**files, path: masked.encode()})}",
            reference=format_diff(path, masked, source),
            checks=checks,
            environment=environment,
            split=HELD_OUT if is_held_out(task_id, _HELD_OUT) else TRAIN,
            licence=tree.licence,
            kind=IMPLEMENT,
        )


async def _probe_examples(backend: SandboxBackend, task: Task, text: str) -> list[str]:
    async with backend.open(task) as sandbox:
        await sandbox.write(CHECK_FILE, _PROGRAM.read_bytes())
        result = await sandbox.exec(_COMMAND, stdin=text.encode(), timeout=_PROBE_SECONDS, max_bytes=1 << 24)
    last = result.output.decode("utf-8", "replace").rstrip().rpartition("\n")[2]
    try:
        problems: list[str] = json.loads(last)
    except ValueError:
        how = "took too long" if result.timed_out else f"ended with exit code {result.exit_code}: {last[-300:]}"
        raise TaskError(f"the examples of {task.workspace} {how}", fix="leave them out: examples=false") from None
    return problems


def _format_module_name(path: str, imports: str) -> str:
    """Import name of a file.

    >>> _format_module_name("src/a/b.py", "src"), _format_module_name("a/__init__.py", "")
    ('a.b', 'a')
    """
    parts = path.removeprefix(f"{imports}/" if imports else "").removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _group_rows(rows: Sequence[Row]) -> list[_SourceTree]:
    files: dict[str, dict[str, bytes]] = defaultdict(dict)
    licences: dict[str, str] = {}
    for number, row in enumerate(rows):
        path = row.text("path", "max_stars_repo_path")
        group = row.text_or_empty("package", "max_stars_repo_name") or f"{number}"
        if path in files[group]:
            raise row.make_error(f"{path} is in {group} twice")
        files[group][path] = row.text("content").encode("utf-8", "surrogateescape")
        licences.setdefault(group, row.text_or_empty("license"))
    return [_SourceTree(group, group_files, licences[group]) for group, group_files in files.items()]
