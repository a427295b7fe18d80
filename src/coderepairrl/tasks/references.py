"""Rewrite references as sandboxes write them, so that an equal change gives an equal patch.

Published ones differ in renames, prefixes, context or blob names.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from coderepairrl.errors import CodeRepairError
from coderepairrl.processes.caches import user_cache
from coderepairrl.processes.hostgit import DIFF, bare, git
from coderepairrl.processes.scratch import scratch
from coderepairrl.runs.storage import replace_file
from coderepairrl.sandbox.contents import base_at_hand, entries_of
from coderepairrl.sandbox.rootfs import DIGEST
from coderepairrl.sandbox.workspace import commit_stream, quoted
from coderepairrl.tasks.patches import patched, paths
from coderepairrl.tasks.ready import lacking
from coderepairrl.types import Task

_LINES_ALONE = re.compile(rb"(?:diff --git .*\n(?:index .*\n)?)?--- \"?a/.+\n\+\+\+ \"?b/.+\n@@ ")
_UNWRITTEN = (CodeRepairError, OSError, subprocess.SubprocessError)
"""Errors that leave a reference unchanged; opening the task reports them."""
_COMMIT = re.compile(rb"^[0-9a-f]{40}\n", re.MULTILINE)  # before each diff of `git diff-tree --stdin`


def with_diffed_references(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Rewrite the references of `tasks` as sandboxes write them.

    Unchanged if one does not apply, or the workspace's files are not on this machine.
    """
    everything = tuple(tasks)
    some = [each for each in everything if each.workspace and each.reference.strip()]
    lacks = lacking(some)
    ready = [each for each in some if not {"commit", "image", "folder"} & {*lacks[each.id]}]
    try:
        rewritten = _of_folders(ready)
    except _UNWRITTEN:
        rewritten = {}
    left = defaultdict[str, list[Task]](list)
    for each in ready:
        if id(each) not in rewritten:
            left[each.workspace].append(each)
    for workspace, some in left.items():
        rewritten |= _of_workspace(workspace, some)
    return tuple(replace(each, reference=rewritten[id(each)]) if id(each) in rewritten else each for each in everything)


def _of_folders(tasks: Iterable[Task]) -> dict[int, bytes]:
    """Rewritten one-file references of plain folders, by `id` of the task."""
    changes = [(task, change) for task in tasks if (change := _change_of_file(task)) is not None]
    files = [(path, mode, content) for _, (path, mode, *both) in changes for content in both]
    if not files:
        return {}
    begin, mark, end = b"feature done\n", b"\ncommitter", b"done\n"
    sides = [
        b"reset refs/heads/main\n"
        + commit_stream("refs/heads/main", [file])
        .removeprefix(begin)
        .replace(mark, b"\nmark :%d%s" % (number, mark), 1)
        .removesuffix(end)
        for number, file in enumerate(files, 1)
    ]
    with scratch("reference") as folder:
        home = bare(folder / "git")
        marks = folder / "marks"
        git("fast-import", "--quiet", f"--export-marks={marks}", folder=home, stdin=b"".join([begin, *sides, end]))
        commits = dict(line.split() for line in marks.read_bytes().splitlines())
        both = ((commits[b":%d" % (at + 1)], commits[b":%d" % at]) for at in range(1, len(sides), 2))
        pairs = b"".join(b"%s %s\n" % each for each in both)
        diffs = _COMMIT.split(git("diff-tree", "--stdin", *DIFF[1:], folder=home, stdin=pairs))[1:]
    return {id(task): diff for (task, _), diff in zip(changes, diffs, strict=True)}


def _change_of_file(task: Task) -> tuple[str, str, bytes, bytes] | None:
    """Path, mode, and contents before and after, of a one-file change in a plain folder; else None."""
    root, changed = Path(task.workspace.removeprefix("dir:")), paths(task.reference)
    if len(changed) != 1 or not task.workspace.startswith("dir:") or (root / ".git").exists():
        return None
    place = root / changed[0]
    if not _LINES_ALONE.match(task.reference) or place.resolve() != root.resolve() / changed[0]:
        return None
    if not place.is_file() or not os.access(place, os.R_OK):
        return None
    before = place.read_bytes()
    after = patched(before, task.reference)
    mode = "100755" if place.stat().st_mode & stat.S_IXUSR else "100644"
    return None if after in (None, before) else (changed[0], mode, before, after)


def _of_workspace(workspace: str, tasks: Iterable[Task]) -> dict[int, bytes]:
    """Rewritten references of one `workspace`, by `id` of the task.

    Cached for commits, and images by digest, which never change.
    """
    cacheable = workspace.startswith("git:") or DIGEST.fullmatch(workspace.rpartition("@")[2])
    rewritten, uncached = dict[int, bytes](), list[tuple[Task, Path | None]]()
    for task in tasks:
        key = hashlib.sha256(workspace.encode() + b"\0" + task.reference).hexdigest()[:32]
        cached = user_cache() / "references" / key if cacheable else None
        if cached is not None and cached.is_file():
            rewritten[id(task)] = cached.read_bytes()
        else:
            uncached.append((task, cached))
    if not uncached:
        return rewritten
    with suppress(*_UNWRITTEN), _base(workspace) as base:
        if base is None:
            return rewritten
        for task, cached in uncached:
            with suppress(*_UNWRITTEN):
                rewritten[id(task)] = _diffed(*base, task.reference) or task.reference
                if cached is not None:
                    cached.parent.mkdir(parents=True, exist_ok=True)
                    with replace_file(cached) as partial:
                        partial.write_bytes(rewritten[id(task)])
    return rewritten


def _diffed(home: Path, commit: str, patch: bytes) -> bytes:
    with scratch("reference") as folder:
        (folder / "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(folder / "index"),
            "GIT_OBJECT_DIRECTORY": str(folder / "objects"),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": os.fsdecode(quoted(f"{home}/objects")),
        }
        for level, text in (("-p1", patch), ("-p0", patch), ("-p1", patch.replace(b"\r\n", b"\n"))):
            try:
                applying = ("apply", "--cached", "--whitespace=nowarn", level, "-")
                git("read-tree", commit, then=applying, folder=home, stdin=text, env=env)
            except subprocess.CalledProcessError:
                continue
            return git("diff-index", "--cached", *DIFF[1:], commit, folder=home, env=env)
        return b""


@contextmanager
def _base(workspace: str) -> Iterator[tuple[Path, str] | None]:
    with ExitStack() as stack:
        base = stack.enter_context(base_at_hand(workspace))
        if base is None and workspace.startswith("dir:"):  # no repository
            home = bare(stack.enter_context(scratch("reference")) / "git")
            stream = commit_stream("refs/heads/main", entries_of(workspace, None))
            git("fast-import", "--quiet", folder=home, stdin=stream)
            base = home, "refs/heads/main"
        yield base
