"""References as the diff of a sandbox writes the same change, so that an attempt that makes it is equal to them.

Published ones have renames, copies, other prefixes, another context, or were made by another git: what rewards compare
would differ although the files do not.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from coderepairrl.errors import CodeRepairError
from coderepairrl.processes.caches import user_cache
from coderepairrl.processes.hostgit import DIFF, bare, git
from coderepairrl.processes.scratch import scratch
from coderepairrl.runs.storage import replace_file
from coderepairrl.sandbox.contents import base_at_hand, entries_of
from coderepairrl.sandbox.workspace import commit_stream, quoted
from coderepairrl.tasks.patches import patched, paths
from coderepairrl.tasks.ready import lacking
from coderepairrl.types import Task

_ONE_CHANGE = re.compile(
    rb"diff --git a/(?P<path>[^\s\"]+) b/(?P=path)\n(?:index .*\n)?--- a/(?P=path)\n\+\+\+ b/(?P=path)\n"
    rb"@@ -(?P<start>\d+)(?:,\d+)? \+\d+(?:,\d+)? @@.*\n"
    rb"(?P<before>(?: .*\n){0,3})(?P<removed>(?:-.*\n)+)(?P<added>(?:\+.*\n)+)(?P<after>(?: .*\n){0,3})"
)
_MORE_THAN_LINES = re.compile(
    rb"^(?:(?:---|\+\+\+) /dev/null|(?:old|new|deleted file|new file) mode |GIT binary|rename |copy )", re.MULTILINE
)
_PAIR = re.compile(rb"^[0-9a-f]{40} [0-9a-f]{40}\n", re.MULTILINE)
_NO_MATTER = re.compile(rb"^index .*\n|(?<= @@) .*$", re.MULTILINE)
"""Names of blobs, and what git takes for the function of a hunk."""


def with_diffed_references(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """`tasks` with their references as a sandbox's diff writes them.

    One stays as it is where it says the same, does not apply, or the files of its workspace are not on this machine.
    """
    everything = tuple(tasks)
    some = [each for each in everything if each.workspace and not _can_be_written_in_one_way(each.reference)]
    lacks = lacking(some)
    ready = [each for each in some if not {"commit", "image", "folder"} & {*lacks[each.id]}]
    found = _of_folders(ready)
    found |= {id(each): _written(each) for each in ready if id(each) not in found}
    return tuple(replace(each, reference=found[id(each)]) if id(each) in found else each for each in everything)


def _of_folders(tasks: Iterable[Task]) -> dict[int, bytes]:
    """References, by the `id` of the task, of those that change one file of a plain folder: a few processes for all."""
    changes = [(task, change) for task in tasks if (change := _change_of_file(task)) is not None]
    files = [(path, mode, content) for _, (path, mode, *both) in changes for content in both]
    sides = [commit_stream(f"refs/heads/{number}", [file]) for number, file in enumerate(files)]
    if not sides:
        return {}
    with scratch("reference") as folder:
        home = bare(folder / "git")
        begin, end = b"feature done\n", b"done\n"
        commits = [side.removeprefix(begin).removesuffix(end) for side in sides]
        git("fast-import", "--quiet", folder=home, stdin=b"".join([begin, *commits, end]))
        listed = git("for-each-ref", "--format=%(refname:short) %(tree)", folder=home).split()
        trees = dict(zip(map(int, listed[::2]), listed[1::2], strict=True))
        pairs = b"".join(b"%s %s\n" % (trees[at], trees[at + 1]) for at in range(0, len(sides), 2))
        diffs = _PAIR.split(git("diff-tree", "--stdin", *DIFF[1:], folder=home, stdin=pairs))[1:]
    return {id(task): _unless_the_same(task, diff) for (task, _), diff in zip(changes, diffs, strict=True)}


def _change_of_file(task: Task) -> tuple[str, str, bytes, bytes] | None:
    """Path, mode, and content before and after, where the reference changes lines of one file of a plain folder."""
    root, changed = Path(task.workspace.removeprefix("dir:")), paths(task.reference)
    if len(changed) != 1 or not task.workspace.startswith("dir:") or (root / ".git").exists():
        return None
    place = root / changed[0]
    if _MORE_THAN_LINES.search(task.reference) or place.resolve() != root.resolve() / changed[0] or not place.is_file():
        return None
    before = place.read_bytes()
    after = patched(before, task.reference)
    mode = "100755" if place.stat().st_mode & stat.S_IXUSR else "100644"
    return None if after in (None, before) else (changed[0], mode, before, after)


def _unless_the_same(task: Task, diff: bytes) -> bytes:
    """`diff`; the reference as it is where only what does not matter differs."""
    return task.reference if _NO_MATTER.sub(b"", diff) == _NO_MATTER.sub(b"", task.reference) else diff


def _written(task: Task) -> bytes:
    """The reference of `task` as a sandbox's diff writes it; of a commit, which never changes, from the cache."""
    key = hashlib.sha256(task.workspace.encode() + b"\0" + task.reference).hexdigest()[:32]
    known = user_cache() / "references" / key if task.workspace.startswith("git:") else None
    try:
        if known is not None and known.is_file():
            return known.read_bytes()
        found = _diffed(task.workspace, task.reference)
        found = task.reference if found is None else _unless_the_same(task, found)
        if known is not None:
            known.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(known) as partial:
                partial.write_bytes(found)
        return found
    except (CodeRepairError, OSError, subprocess.SubprocessError):  # opening the task says what is wrong
        return task.reference


def _can_be_written_in_one_way(patch: bytes) -> bool:
    """Whether `patch` is empty, or replaces lines at one place as git writes it, so that no other diff says the same."""
    if not patch.strip():
        return True
    found = _ONE_CHANGE.fullmatch(patch)
    if found is None or (found["before"].count(b"\n") < 3 and found["start"] != b"1"):
        return False
    sides = [{line[1:] for line in found[side].split(b"\n")[:-1]} for side in ("removed", "added")]
    around = {line[1:] for line in (found["before"] + found["after"]).split(b"\n")[:-1]}
    return not (sides[0] & sides[1] or around & (sides[0] | sides[1]))


def _diffed(workspace: str, patch: bytes) -> bytes | None:
    """The diff from `workspace` to it with `patch` applied; None where the files are not at hand or it does not apply."""
    with _base(workspace) as base, scratch("reference") as folder:
        if base is None:
            return None
        home, commit = base
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
        return None


@contextmanager
def _base(workspace: str) -> Iterator[tuple[Path, str] | None]:
    """A git directory with the files of `workspace`, and their commit; None where they are not at hand."""
    with ExitStack() as stack:
        found = stack.enter_context(base_at_hand(workspace))
        if found is None and workspace.startswith("dir:"):  # no repository
            home = bare(stack.enter_context(scratch("reference")) / "git")
            stream = commit_stream("refs/heads/main", entries_of(workspace, None))
            git("fast-import", "--quiet", folder=home, stdin=stream)
            found = home, "refs/heads/main"
        yield found
