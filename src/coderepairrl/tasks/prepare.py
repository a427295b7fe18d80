"""Fetch and build what tasks need, so that runs need no network; find missing needs.

References are rewritten in the form of the sandbox's diff, so that equal changes give equal patches: published ones
differ in renames, prefixes, context or blob names.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import stat
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from coderepairrl.environments.build import KIND, Environment, prepare_environments
from coderepairrl.environments.fetch import NoRoom
from coderepairrl.environments.images import ReadyImage, prepare_images
from coderepairrl.errors import CodeRepairError, SandboxFault, TaskError, combine_errors
from coderepairrl.grading import harness
from coderepairrl.printable import format_count, remove_login
from coderepairrl.processes.caches import ENVIRONMENT_RECORD, environment_folder, user_cache
from coderepairrl.processes.hostgit import DIFF, create_bare_repository, git
from coderepairrl.processes.scratch import scratch
from coderepairrl.runs.storage import replace_file
from coderepairrl.sandbox.commits import fetch_commits, select_cached_commits
from coderepairrl.sandbox.contents import open_local_base, read_workspace_entries
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.rootfs import DIGEST, find_image
from coderepairrl.sandbox.workspace import commit_entries, format_commit_stream, quote_path
from coderepairrl.tasks.patches import apply_to_text, list_changed_paths
from coderepairrl.types import Task


def find_missing_needs(tasks: Iterable[Task]) -> dict[str, tuple[str, ...]]:
    """Missing needs by task id: ``commit``, ``image``, ``folder``, ``environment``."""
    task_list = list(tasks)
    cached = {
        f"git:{url}@{commit}"
        for url, commits in _group_commits(task.workspace for task in task_list).items()
        for commit in select_cached_commits(url, commits)
    }
    return {
        task.id: (*_find_missing_workspace(task, cached), *(() if _has_environment(task) else ("environment",)))
        for task in task_list
    }


def _group_commits(workspaces: Iterable[str]) -> dict[str, list[str]]:
    by_url = defaultdict[str, list[str]](list)
    for workspace in workspaces:
        if workspace.startswith("git:"):
            url, _, commit = workspace.removeprefix("git:").rpartition("@")
            by_url[url].append(commit)
    return by_url


def _find_missing_workspace(task: Task, cached: set[str]) -> tuple[str, ...]:
    kind, _, location = task.workspace.partition(":")
    if kind == "git":
        return () if task.workspace in cached else ("commit",)
    if kind == "dir":
        return () if Path(location).is_dir() else ("folder",)
    try:
        if kind == "image":
            find_image(location, sandbox_user())
    except TaskError:
        return ("image",)
    return ()


def _has_environment(task: Task) -> bool:
    kind, _, folder = task.environment.partition(":")
    if kind == KIND:
        return (environment_folder(task.environment) / ENVIRONMENT_RECORD).is_file()
    return kind != "venv" or (Path(folder) / "pyvenv.cfg").is_file()


# header of a patch that changes lines of an existing file, and neither its name nor its mode
_CHANGED_LINES = re.compile(rb"(?:diff --git .*\n(?:index .*\n)?)?--- \"?a/.+\n\+\+\+ \"?b/.+\n@@ ")
_DIFF_OPTIONS = DIFF[1:]  # those of the sandbox's `git diff`, for git's plumbing commands
_REWRITE_ERRORS = (CodeRepairError, OSError, subprocess.SubprocessError)
"""Errors that leave a reference unchanged; opening the task reports them."""
_COMMIT = re.compile(rb"^[0-9a-f]{40}\n", re.MULTILINE)  # before each diff of `git diff-tree --stdin`


def rewrite_references(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Rewrite the references of `tasks` in the form of the sandbox's diff.

    References that do not apply, or whose workspace is not on this machine, stay unchanged.
    """
    task_list = tuple(tasks)
    with_reference = [each for each in task_list if each.workspace and each.reference.strip()]
    missing_by_id = find_missing_needs(with_reference)
    ready = [each for each in with_reference if not {"commit", "image", "folder"} & {*missing_by_id[each.id]}]
    try:  # fast path: one git repository for many tasks
        rewritten = _rewrite_in_folders(ready)
    except _REWRITE_ERRORS:
        rewritten = {}
    by_workspace = defaultdict[str, list[Task]](list)
    for each in ready:
        if id(each) not in rewritten:
            by_workspace[each.workspace].append(each)
    for workspace, workspace_tasks in by_workspace.items():
        rewritten |= _rewrite_in_workspace(workspace, workspace_tasks)
    return tuple(replace(each, reference=rewritten[id(each)]) if id(each) in rewritten else each for each in task_list)


def _rewrite_in_folders(tasks: Iterable[Task]) -> dict[int, bytes]:
    """Rewrite one-file references of plain folders, in one git repository; return them by `id(task)`."""
    changes = [(task, change) for task in tasks if (change := _read_file_change(task)) is not None]
    if not changes:
        return {}
    # one fast-import stream with two parentless commits per task, of its file before and after; marks number them
    begin, committer, end = b"feature done\n", b"\ncommitter", b"done\n"
    files = [(path, mode, content) for _, (path, mode, *both) in changes for content in both]
    commits = []
    for number, file in enumerate(files, 1):
        commit = format_commit_stream("refs/heads/main", [file]).removeprefix(begin).removesuffix(end)
        commit = commit.replace(committer, b"\nmark :%d%s" % (number, committer), 1)
        commits.append(b"reset refs/heads/main\n" + commit)
    with scratch("reference") as folder:
        home = create_bare_repository(folder / "git")
        marks = folder / "marks"
        git("fast-import", "--quiet", f"--export-marks={marks}", folder=home, stdin=b"".join([begin, *commits, end]))
        sha_by_mark = dict(line.split() for line in marks.read_bytes().splitlines())
        pairs = b"".join(  # diff-tree reads COMMIT PARENT
            b"%s %s\n" % (sha_by_mark[b":%d" % (before + 1)], sha_by_mark[b":%d" % before])
            for before in range(1, len(files), 2)
        )
        diffs = _COMMIT.split(git("diff-tree", "--stdin", *_DIFF_OPTIONS, folder=home, stdin=pairs))[1:]
    return {id(task): diff for (task, _), diff in zip(changes, diffs, strict=True)}


def _read_file_change(task: Task) -> tuple[str, str, bytes, bytes] | None:
    """Read path, mode, and contents before and after, of a one-file change in a plain folder; else None."""
    root, changed = Path(task.workspace.removeprefix("dir:")), list_changed_paths(task.reference)
    if len(changed) != 1 or not task.workspace.startswith("dir:") or (root / ".git").exists():
        return None
    file = root / changed[0]
    if not _CHANGED_LINES.match(task.reference) or file.resolve() != root.resolve() / changed[0]:  # a symbolic link
        return None
    if not file.is_file() or not os.access(file, os.R_OK):
        return None
    before = file.read_bytes()
    after = apply_to_text(before, task.reference)
    mode = "100755" if file.stat().st_mode & stat.S_IXUSR else "100644"
    return None if after in (None, before) else (changed[0], mode, before, after)


def _rewrite_in_workspace(workspace: str, tasks: Iterable[Task]) -> dict[int, bytes]:
    """Rewrite references of one `workspace`; return them by `id(task)`. Cached for commits and image digests."""
    cacheable = workspace.startswith("git:") or DIGEST.fullmatch(workspace.rpartition("@")[2])
    rewritten, uncached = dict[int, bytes](), list[tuple[Task, Path | None]]()
    for task in tasks:
        key = hashlib.sha256(workspace.encode() + b"\0" + task.reference).hexdigest()[:32]
        cache_file = user_cache() / "references" / key if cacheable else None
        if cache_file is not None and cache_file.is_file():
            rewritten[id(task)] = cache_file.read_bytes()
        else:
            uncached.append((task, cache_file))
    if not uncached:
        return rewritten
    with suppress(*_REWRITE_ERRORS), _open_base(workspace) as base:
        if base is None:
            return rewritten
        for task, cache_file in uncached:
            with suppress(*_REWRITE_ERRORS):
                rewritten[id(task)] = _diff_patch(*base, task.reference) or task.reference
                if cache_file is not None:
                    cache_file.parent.mkdir(parents=True, exist_ok=True)
                    with replace_file(cache_file) as partial:
                        partial.write_bytes(rewritten[id(task)])
    return rewritten


def _diff_patch(home: Path, commit: str, patch: bytes) -> bytes:
    """Diff that `patch` makes in `commit` of the git directory `home`; empty if it does not apply."""
    with scratch("reference") as folder:
        (folder / "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(folder / "index"),
            "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.fsdecode(quote_path(f"{home}/objects")),
        }
        # with prefixes a/ and b/, without them, and without Windows line ends
        for level, text in (("-p1", patch), ("-p0", patch), ("-p1", patch.replace(b"\r\n", b"\n"))):
            try:
                apply_patch = ("apply", "--cached", "--whitespace=nowarn", level, "-")
                git("read-tree", commit, then=apply_patch, folder=home, stdin=text, env=env)
            except subprocess.CalledProcessError:
                continue
            return git("diff-index", "--cached", *_DIFF_OPTIONS, commit, folder=home, env=env)
        return b""


@contextmanager
def _open_base(workspace: str) -> Iterator[tuple[Path, str] | None]:
    """Open `workspace` as a git directory and a commit; None if not on this machine."""
    with open_local_base(workspace) as base:
        if base is not None or not workspace.startswith("dir:"):
            yield base
            return
    with scratch("reference") as folder:  # the workspace is a folder without a repository
        yield folder / "git", commit_entries(folder / "git", read_workspace_entries(workspace, None))


Say = Callable[[str], None]
_BATCH = 32
"""Commits per fetch; a killed or failed one loses no more."""
_WAITS = (1.0, 5.0)
"""Seconds before retries of a fetch with a transient failure."""


class Prerequisites(NamedTuple):
    """Commits (as in `Task.workspace`), images and environments on this machine."""

    commits: list[str]
    images: list[ReadyImage]
    environments: list[Environment]


async def prepare_tasks(
    tasks: Iterable[Task], *, images: Path | None = None, jobs: int = 2, say: Say = lambda _: None
) -> Prerequisites:
    """Fetch commits and images and build environments of `tasks`, `jobs` at a time; existing ones are kept.

    `images` is a folder in OCI layout or an archive of ``docker save``, tried before a registry. Raises
    `PrerequisiteError` before fetching if the disk lacks room for the images, else one `CodeRepairError` at the end.
    """
    task_list = list(tasks)
    problems: list[CodeRepairError] = []
    needs_by_kind = {
        "commit": {task.workspace for task in task_list if task.workspace.startswith("git:")},
        "environment": {task.environment for task in task_list if task.environment.startswith("python:")},
    }
    if needed := " and ".join(format_count(len(needs), kind) for kind, needs in needs_by_kind.items() if needs):
        say(f"{needed}, of unknown size, to fetch or build")
    ready_images: list[ReadyImage] = []
    environments: list[Environment] = []
    try:
        if names := list_image_names(task_list):
            ready_images = await asyncio.to_thread(prepare_images, names, offered=images, jobs=jobs, say=say)
    except NoRoom:
        raise
    except CodeRepairError as error:
        problems.append(error)
    commits = await asyncio.to_thread(_fetch_workspaces, task_list, problems, say, jobs)
    try:
        environments = await prepare_environments(task_list, jobs=jobs, say=say)
    except CodeRepairError as error:
        problems.append(error)
    try:
        await asyncio.to_thread(harness.install_judges, [task.checks for task in task_list])
    except CodeRepairError as error:
        problems.append(error)
    await asyncio.to_thread(rewrite_references, task_list)
    if problems:
        raise combine_errors(problems)
    return Prerequisites(commits, ready_images, environments)


def _fetch_workspaces(tasks: Iterable[Task], problems: list[CodeRepairError], say: Say, jobs: int) -> list[str]:
    """Fetch from `jobs` repositories at a time; return the commits present, and record problems."""
    workspaces = list(dict.fromkeys(task.workspace for task in tasks if task.workspace.startswith("git:")))
    by_url = _group_commits(workspaces)
    present_count = 0

    def fetch_repository(url: str, commits: list[str]) -> list[str]:
        nonlocal present_count
        cached = select_cached_commits(url, commits)
        present_count += len(cached)
        missing = [commit for commit in commits if commit not in cached]
        batches = [missing[start : start + _BATCH] for start in range(0, len(missing), _BATCH)]
        while batches:
            batch = batches.pop(0)
            try:
                _fetch_with_retries(url, batch, say)
            except CodeRepairError as error:
                if isinstance(error, TaskError) and len(batch) > 1:  # bisect, since one bad commit fails a batch
                    half = len(batch) // 2
                    batches = [batch[:half], batch[half:], *batches]
                    continue
                if not isinstance(error, TaskError):  # the other batches would fail likewise
                    batch, batches = [commit for each in (batch, *batches) for commit in each], []
                problems.append(error)
                say(f"{format_count(len(batch), 'commit')} of {remove_login(url)} not fetched")
                continue
            present_count += len(batch)
            say(f"commits: {present_count} of {len(workspaces)} are here ({remove_login(url)}: {len(batch)} more)")
        return select_cached_commits(url, commits)

    with ThreadPoolExecutor(jobs) as pool:
        fetched = zip(by_url, pool.map(fetch_repository, by_url, by_url.values()), strict=True)
        present = {f"git:{url}@{commit}" for url, commits in fetched for commit in commits}
    return [workspace for workspace in workspaces if workspace in present]


def _fetch_with_retries(url: str, commits: list[str], say: Say) -> Path:
    for wait in _WAITS:
        try:
            return fetch_commits(url, commits)
        except SandboxFault as error:
            say(f"{error}; trying again in {wait:.0f} s")
            time.sleep(wait)
    return fetch_commits(url, commits)


def list_image_names(tasks: Iterable[Task]) -> list[str]:
    """Names of the images that tasks run in."""
    workspaces = (workspace for task in tasks for workspace in (task.workspace, task.checks.workspace))
    kinds = (workspace.partition(":") for workspace in workspaces)
    return list(dict.fromkeys(name for kind, _, name in kinds if kind == "image"))
