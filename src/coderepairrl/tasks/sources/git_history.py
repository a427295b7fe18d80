"""`git_history`: bugs mined from a local repository's repair commits that touch tests.

Follows SWE-bench (arXiv 2310.06770) and SWE-Gym (arXiv 2412.21139), with the commit message as the prompt; its author
knew the repair.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path, PurePosixPath

from coderepairrl.environments.build import Specification
from coderepairrl.environments.pythons import sandbox_version
from coderepairrl.errors import ConfigError, TaskError
from coderepairrl.grading.witness import detect_runner
from coderepairrl.tasks.base import LoadedSource, TaskLeftOut, check_day, log_left_out
from coderepairrl.tasks.commits import Change, Commit, RepositoryHistory, open_history
from coderepairrl.tasks.patches import detect_language, is_test_module, is_test_path
from coderepairrl.tasks.project_environment import PYTEST, find_install_needs, find_test_extra
from coderepairrl.types import Checks, Command, Task

TESTS = "{tests}"
"""Placeholder for the commit's test modules in a command."""
COMMAND = shlex.join((*PYTEST, TESTS))
MATCH = r"(?i)\b(fix|fixe[sd]|fixing|bug|bugs|bugfix|bugfixes|issues?|regress\w*)\b|#\d+|\bgh-\d+"
"""Messages of commits that repair something, or name an issue."""
MAX_SECONDS = 86_400.0  # the highest option `timeout`
_TRAILERS = re.compile(
    r"^([A-Z][\w-]*-by|change-id|cc|reviewed-on|git-svn-id|gitorigin-revid|signed-off|(co-)?author(ed)?)\s*:.*$"
    r"|^\(cherry picked from commit [0-9a-f]+\)$",
    re.IGNORECASE | re.MULTILINE,
)
_REVERTS = re.compile(r"\bThis reverts commit ([0-9a-f]{7,64})")
_SUPPORTED_SINCE = {
    "3.6": "2019-03-01", "3.7": "2019-03-01", "3.8": "2020-04-14", "3.9": "2021-04-05", "3.10": "2022-04-04",
    "3.11": "2023-04-24", "3.12": "2024-04-02", "3.13": "2025-04-07", "3.14": "2026-04-07",
}  # fmt: skip
"""Half a year after each Python's release, when packages supported it.

No day is before the first setuptools that builds without ``pyproject.toml`` (40.8).
"""
_PROJECT_FILES = ("pyproject.toml", "setup.cfg")
_MAX_TEST_BYTES = 8 << 20
_BATCH = 64
"""Commits whose changes one git command lists."""


class GitHistory(LoadedSource):
    """A task for each repair commit of a local repository that changes tests and code.

    Options: docs/guides/own-repositories.md. The workspace is the commit's only parent, the reference the change
    without tests. The newest quarter is ``test``. `left_out` counts reasons for omitted commits.
    """

    name = "git_history"

    def __init__(
        self,
        path: str,
        *,
        since: str | date = "",
        before: str | date = "",
        n: int = 0,
        match: str = MATCH,
        max_files: int = 10,
        max_lines: int = 500,
        command: str = COMMAND,
        timeout: float = 600.0,
        environment: bool = True,
        python: str = "",
        requirements: str | Sequence[str] = (),
        extras: str = "",
        edits: str | Sequence[str] = (),
        packages_before: str | date = "",
        repository: str = "",
    ) -> None:
        for name, day in (("since", since), ("before", before), ("packages_before", packages_before)):
            check_day(f"tasks.options.{name}", str(day))
        if min(n, max_files - 1, max_lines - 1) < 0:
            raise ConfigError("tasks.options.n must be 0 or more, max_files and max_lines 1 or more")
        if not 0 < timeout <= MAX_SECONDS:
            raise ConfigError(f"tasks.options.timeout={timeout:g}: write more than 0 and at most {MAX_SECONDS:,.0f} s")
        try:
            self.match = re.compile(match)
            self.command = shlex.split(command)
        except (re.error, ValueError) as error:
            raise ConfigError(f"tasks.options: match or command cannot be read: {error}") from None
        if not self.command:
            raise ConfigError("tasks.options.command is empty", fix=f"leave it out, or for example '{COMMAND}'")
        self.path = Path(path).expanduser().resolve()
        self.since, self.before, self.n = str(since), str(before), n
        self.max_files, self.max_lines, self.timeout = max_files, max_lines, timeout
        self.python = python
        self.is_python = bool(detect_runner(self.command)) or PurePosixPath(self.command[0]).name.startswith("python")
        self.environment = environment and self.is_python
        self.requirements = tuple(requirements.split() if isinstance(requirements, str) else requirements)
        self.extras = f"[{extras.strip('[]')}]" if extras else ""
        self.edits = (edits,) if isinstance(edits, str) and edits else tuple(edits)
        self.packages_before = str(packages_before)
        self.repository = repository
        self.left_out = Counter[str]()

    def load(self) -> list[Task]:
        """Mine the history. Raises `TaskError`, also without usable commits."""
        with open_history(self.path) as repository:
            name = self.repository or repository.name.name.removesuffix(".git")
            tasks = list(self._mine_tasks(repository, name))
        fix = "other dates, match='' for all messages, larger max_files and max_lines"
        log_left_out(str(self.path), "commit", tasks, self.left_out, fix=fix)
        test_count = len(tasks) // 4
        return [replace(task, split="test" if at < test_count else "train") for at, task in enumerate(tasks)]

    def _mine_tasks(self, history: RepositoryHistory, name: str) -> Iterator[Task]:
        if not (commits := history.list_commits()):
            raise TaskError(
                f"{self.path}: no commit has exactly one parent, so there is no change to make a task of",
                fix="name a repository with a history (of a shallow clone: git fetch --unshallow); without one, "
                "the source mutants injects bugs",
            )
        reverted = tuple(sha for commit in commits for sha in _REVERTS.findall(commit.message))
        recent = [each for each in commits if self.since <= each.day and (not self.before or each.day < self.before)]
        references = set[bytes]()
        for start in range(0, len(recent), _BATCH):
            batch = [commit for commit in recent[start : start + _BATCH] if self._is_wanted_commit(commit, reverted)]
            changes = history.list_changes(batch)
            for commit in batch:
                try:
                    task = self._make_task(history, commit, changes.get(commit.sha, []), name)
                    if task.reference in references:
                        raise TaskLeftOut("repeat another commit")
                except TaskLeftOut as left:
                    self.left_out[str(left)] += 1
                    continue
                references.add(task.reference)
                yield task
                if len(references) == self.n:
                    return

    def _is_wanted_commit(self, commit: Commit, reverted: tuple[str, ...]) -> bool:
        reason = ""
        if _REVERTS.search(commit.message) or commit.message.startswith('Revert "'):
            reason = "revert others"
        elif commit.sha.startswith(reverted):
            reason = "were reverted later"
        elif not self.match.search(commit.message):
            reason = "have a message that does not match"
        if reason:
            self.left_out[reason] += 1
        return not reason

    def _make_task(self, history: RepositoryHistory, commit: Commit, changes: Sequence[Change], name: str) -> Task:
        tests = [change for change in changes if is_test_path(change.path)]
        others = [change for change in changes if not is_test_path(change.path)]
        self._check_changes(tests, others)
        modules = [change.path for change in tests if change.blob and is_test_module(change.path)]
        if TESTS in self.command:
            modules = [path for path in modules if not self.is_python or path.endswith(".py")]
            if not modules:
                raise TaskLeftOut("touch no module of tests that the command could run")
        prompt = clean_message(commit.message)
        if not prompt:
            raise TaskLeftOut("have no message")
        reference = history.diff_commit(commit, [change.path for change in others])
        if not (language := detect_language(reference, "")):
            raise TaskLeftOut("change tests and no other code")
        argv = tuple(word for each in self.command for word in (modules if each == TESTS else [each]))
        command = Command(argv, self.timeout, detect_runner(argv))
        return Task(
            id=f"{name}/{commit.sha[:12]}",
            prompt=prompt,
            language=language,
            workspace=f"git:{self.path}@{commit.parent}",
            reference=reference,
            checks=Checks((command,), _read_test_files(history, commit, tests)),
            environment=self._specify_environment(history, commit) if self.environment else "",
            repository=name,
            created=commit.day,
        )

    def _check_changes(self, tests: Sequence[Change], others: Sequence[Change]) -> None:
        if not tests:
            raise TaskLeftOut("change no tests")
        if not others:
            raise TaskLeftOut("change tests and no other code")
        if any(change.is_special for change in (*tests, *others)):
            raise TaskLeftOut("change a symbolic link or a submodule")
        if any(change.is_binary for change in others):
            raise TaskLeftOut("change a binary file")
        if len(others) > self.max_files or sum(change.lines for change in others) > self.max_lines:
            raise TaskLeftOut("are larger than max_files or max_lines")

    def _specify_environment(self, history: RepositoryHistory, commit: Commit) -> str:
        blobs = history.list_blobs(commit.parent)
        contents = history.read_blobs({path: blobs[path] for path in _PROJECT_FILES if path in blobs})
        python = self.python or sandbox_version()
        supported_since = _SUPPORTED_SINCE.get(python, max(_SUPPORTED_SINCE.values()))
        try:
            files = {path: contents.get(path, b"") for path in blobs}
            needs = find_install_needs(files, self.command, self.requirements)
            extras = self.extras or find_test_extra(files)
        except TaskError as error:
            raise TaskLeftOut("follow a state whose pyproject.toml or setup.cfg cannot be read") from error
        return str(
            Specification(
                workspace=f"git:{self.path}@{commit.parent}",
                python=python,
                requirements=needs.requirements,
                files=needs.files,
                extras=extras,
                before=self.packages_before or max(commit.day, supported_since),
                edits=self.edits,
                version=history.find_version(commit.parent),
            )
        )


def clean_message(message: str) -> str:
    r"""Commit message without trailers (sign-offs, reviewers), with links to issues.

    >>> clean_message("Fix add()\n\nIt subtracted. Closes #3\n\nSigned-off-by: A <a@b>\nCo-authored-by: C <c@d>\n")
    'Fix add()\n\nIt subtracted. Closes #3'
    """
    return re.sub(r"\n{3,}", "\n\n", _TRAILERS.sub("", message)).strip()


def _read_test_files(history: RepositoryHistory, commit: Commit, tests: Sequence[Change]) -> dict[str, str]:
    """Changed tests, and other Python code in test folders."""
    blobs = {change.path: change.blob for change in tests if change.blob}
    for path, blob in history.list_blobs(commit.sha).items():
        if is_test_path(path) and not is_test_module(path) and PurePosixPath(path).suffix == ".py":
            blobs.setdefault(path, blob)
    contents = history.read_blobs(blobs)
    if sum(map(len, contents.values())) > _MAX_TEST_BYTES:
        raise TaskLeftOut(f"have tests of more than {_MAX_TEST_BYTES >> 20} MiB")
    return {path: data.decode("utf-8", "surrogateescape") for path, data in contents.items()}
