"""`repair`: repairs of one file in one turn, with the code in the prompt (kind ``repair``).

Only repairs that search/replace blocks (`agents.patching`) can express.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coderepairrl.agents.patching import Inexpressible, compute_blocks
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.printable import fence_code
from coderepairrl.processes.caches import user_cache
from coderepairrl.protocols import TaskSource
from coderepairrl.sandbox.contents import read_local_files
from coderepairrl.tasks.base import LoadedSource, TaskLeftOut, log_left_out, store_folder
from coderepairrl.tasks.patches import apply_to_text, detect_file_language, format_diff, list_changed_paths
from coderepairrl.tasks.rows import Row, read_rows
from coderepairrl.types import Task

KIND = "repair"


class Repair(LoadedSource):
    """Repairs of one file, from a file of rows or another task source (options: docs/guides/kinds.md).

    `left_out` counts other repairs by reason. Raises `ConfigError` for unusable options, `TaskError` without tasks, and
    the source's errors.
    """

    name = "repair"

    def __init__(
        self,
        path: str = "",
        *,
        source: str = "",
        options: Mapping[str, Any] = MappingProxyType({}),
        context_lines: int | None = None,
        cache: str = "",
    ) -> None:
        if bool(path) == bool(source):
            raise ConfigError(
                "the task source repair needs either path or source", fix="path=FILE of rows, or source=NAME"
            )
        if context_lines is not None and context_lines < 0:
            raise ConfigError("tasks.options.context_lines is negative", fix="leave it out to show whole files")
        self.path = Path(path).expanduser()
        self.context_lines = context_lines
        self.cache = (Path(cache).expanduser() if cache else user_cache()) / "repair"
        self.left_out = Counter[str]()
        self._source: TaskSource | None = None
        if source:
            from coderepairrl.tasks.sources import make_source

            self._source = make_source(source, **options)
            self.evaluation_set = self._source.evaluation_set

    def load(self) -> list[Task]:
        """Read the rows, or prepare the source, and make tasks."""
        if self._source is not None:
            self._source.prepare()
        origin = self._source.name if self._source else str(self.path)
        tasks: list[Task] = []
        for each in self._source or read_rows(self.name, self.path):
            try:
                tasks.append(self._convert_task(each) if isinstance(each, Task) else self._convert_row(each))
            except TaskLeftOut as left:
                self.left_out[str(left)] += 1
        log_left_out(f"repair, of {origin}", "task", tasks, self.left_out, fix="prepare it, or name another source")
        return tasks

    def _convert_task(self, task: Task) -> Task:
        changed = list_changed_paths(task.reference)
        if len(changed) != 1:
            raise TaskLeftOut("change several files" if changed else "have no reference")
        [path] = changed
        contents = read_local_files(task.workspace, changed)
        if path not in contents:
            raise TaskLeftOut("have a workspace that is not available here")
        before = contents[path]
        after = apply_to_text(before or b"", task.reference)
        if before is None or after is None:
            raise TaskLeftOut("create, remove or rename their file")
        return replace(task, prompt=self._format_prompt(task.prompt, path, before, after), kind=task.kind or KIND)

    def _convert_row(self, row: Row) -> Task:
        task_id, path = row.text_or_empty("id", "instance_id"), row.text_or_empty("path") or "code.py"
        if not task_id:
            raise row.make_error("no column 'id'")
        before = row.text("before").encode("utf-8", "surrogateescape")
        change = row.text("after" if "after" in row else "patch").encode("utf-8", "surrogateescape")
        after = change if "after" in row else apply_to_text(before, change)
        if after is None:
            raise TaskLeftOut("have a patch that does not apply")
        issue = row.text_or_empty("prompt", "problem_statement", "description") or f"There is a defect in {path}."
        try:
            workspace = store_folder(self.cache / "workspaces", {path: before})
        except OSError as error:
            raise TaskError(f"the tasks cannot be written to {self.cache}: {error}", fix="set CRRL_CACHE") from error
        return Task(
            id=f"repair/{task_id}",
            prompt=self._format_prompt(issue, path, before, after),
            language=row.text_or_empty("language") or detect_file_language(path) or "text",
            workspace=f"dir:{workspace}",
            reference=format_diff(path, *(text.decode("utf-8", "surrogateescape") for text in (before, after))),
            licence=row.text_or_empty("license"),
            kind=KIND,
        )

    def _format_prompt(self, issue: str, path: str, before: bytes, after: bytes) -> str:
        if before == after:
            raise TaskLeftOut("change nothing")
        try:
            text = before.decode()
        except UnicodeDecodeError:
            raise TaskLeftOut("change a file that is not UTF-8") from None
        try:
            blocks = compute_blocks(path, before, after, self.context_lines or 0)
        except Inexpressible:
            raise TaskLeftOut("cannot be written as search/replace blocks") from None
        text = text.replace("\r\n", "\n")
        excerpts = [text] if self.context_lines is None else [block.old for block in blocks]
        code = "\n...\n".join(map(fence_code, filter(None, excerpts)))
        return f"{issue.rstrip()}\n\n{path}\n{code}\n" if code else issue
