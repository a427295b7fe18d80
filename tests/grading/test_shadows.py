"""Checks do not import new files that have the name of a module of Python or of a test runner."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from coderepairrl.grading import grade_patch
from coderepairrl.rewards import make_patched_episode, make_rewards, score_episode
from coderepairrl.types import Checks, Command, Task
from rewards.folder import Repository, bwrap, grade_in_sandbox

END = b"import os\nos._exit(0)\n"
BASE = {"data.json": b"{,}\n", "src/limits/__init__.py": b"", "src/limits/util.py": b"", "docs/a.txt": b""}
COMMANDS = {
    "-m": ("python3", "-m", "json.tool", "data.json"),
    "src": ("env", "PYTHONPATH=src", "python3", "-m", "json.tool", "data.json"),
    "sub": ("sh", "-c", "cd docs && python3 -m json.tool ../data.json"),
    "-c": ("python3", "-c", "import json; json.load(open('data.json'))"),
    "runner": ("python3", "-m", "nose"),
    "new": ("env", "PYTHONPATH=docs:new", "python3", "-m", "json.tool", "data.json"),
    "start": ("env", "PYTHONPATH=.:src", "python3", "-c", "import json; json.load(open('data.json'))"),
}
CHEATS: dict[str, tuple[str, Mapping[str, bytes]]] = {
    "a module": ("-m", {"json.py": END}),
    "a package": ("-m", {"json/__init__.py": b"", "json/tool.py": END}),
    "what a module imports": ("-m", {"argparse.py": END}),
    "a link to a package": ("-m", {"json": b"docs/json_", "docs/json_/__init__.py": b"", "docs/json_/tool.py": END}),
    "the src layout": ("src", {"src/json/__init__.py": b"", "src/json/tool.py": END}),
    "a package around it": ("src", {"src/__init__.py": b"", "src/json.py": END}),
    "the folder that a shell goes to": ("sub", {"docs/json.py": END}),
    "a script of one line": ("-c", {"json/__init__.py": END}),
    "start-up code as a package": ("start", {"sitecustomize/__init__.py": END}),
    "a user's start-up code": ("start", {"src/usercustomize.py": END, "src/sitecustomize/__init__.py": END}),
    "a package in a new folder that the command names": ("new", {"new/__init__.py": b"", "new/json.py": END}),
    "a new folder of a package": ("new", {"new/json/__init__.py": b"", "new/json/tool.py": END}),
    "a missing runner, by a folder": ("runner", {"nose/__main__.py": END}),
    "what every start imports": ("start", {"src/encodings/__init__.py": END, "encodings/__init__.py": END}),
}
"""The command and the files that make it pass without a repair."""


def make_task(repository: Repository, command: str, repaired: Mapping[str, bytes] = {"data.json": b"{}\n"}) -> Task:
    return repository.task(BASE, repaired, Checks((Command(COMMANDS[command]),)))


def make_cheat(repository: Repository, files: Mapping[str, bytes]) -> bytes:
    plain = {path: content for path, content in files.items() if path != "json"}
    if "json" in files:
        (repository.folder / "json").symlink_to(files["json"].decode())
    return repository.edit(plain)


@pytest.mark.parametrize("name", CHEATS)
async def test_new_files_do_not_replace_modules(name: str, repository: Repository) -> None:
    command, files = CHEATS[name]
    task = make_task(repository, command)
    assert ((await grade_in_sandbox(task, task.reference, bwrap())).problem == "") == (command != "runner")
    await check_cheat(task, make_cheat(repository, files))


async def check_cheat(task: Task, patch: bytes) -> None:
    """Check that it does not pass, and passes without our grader: the positive control."""
    assert (await grade_in_sandbox(task, patch, bwrap())).problem.startswith("check failed (exit code 1)")
    async with bwrap().open(task) as fresh:
        assert (await fresh.exec(["git", "apply", "-"], stdin=patch)).ok
        assert (await fresh.exec(task.checks.commands[0].argv)).ok


async def test_a_patch_with_too_many_such_files_is_refused(repository: Repository) -> None:
    names = [f"{'/'.join(['d' * 200] * 5)}/{number}/json.py" for number in range(2_500)]
    patch = "".join(f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+1\n" for name in names).encode()
    assert "too many new files" in (await grade_in_sandbox(make_task(repository, "-m"), patch, bwrap())).problem


async def test_the_rest_of_such_a_patch_is_graded(repository: Repository) -> None:
    task = make_task(repository, "-m")
    patch = make_cheat(repository, {"json.py": b"raise ImportError\n", "data.json": b"[]\n"})
    assert (await grade_in_sandbox(task, patch, bwrap())).problem == ""


async def test_files_that_replace_no_module_may_be_added(repository: Repository) -> None:
    """Modules of packages or of other folders, modules of old Pythons only, programs without an extension."""
    new = ("shop/__init__.py", "shop/types.py", "shop/json/__init__.py", "shop/json/tool.py", "docs/code/util.py")
    new += ("calendar/models.py", "parser.py", "src/formatter.py", "bin/profile", "src/limits/json.py")
    repaired = {"data.json": b"{}\n"} | dict.fromkeys(new, b"x = 1\n")
    backend, task = bwrap(), make_task(repository, "-m")
    patch = make_cheat(repository, repaired)
    async with backend.open(task) as fresh:
        assert (await grade_patch(fresh, task, patch)).problem == ""
        assert (await fresh.exec(["ls", *new])).ok


async def test_names_of_the_reference_and_of_the_repository_may_be_used(repository: Repository) -> None:
    backend, task = bwrap(), make_task(repository, "-m", {"data.json": b"{}\n", "queue.py": b"x = 1\n"})
    files = {"data.json": b"[]\n", "queue/__init__.py": b"", "src/queue.py": b"", "heapq.py": b""}
    patch = make_cheat(repository, files)
    async with backend.open(task) as fresh:
        await grade_patch(fresh, task, patch)
        assert (await fresh.exec(["ls", "queue/__init__.py", "src/queue.py"])).ok
        assert not (await fresh.exec(["ls", "heapq.py"])).ok
    repository.commit({"heapq.py": b"x = 0\n"})
    patch = repository.edit({"heapq.py": b"x = 1\n"})
    async with bwrap().open(task) as fresh:
        await grade_patch(fresh, task, patch)
        assert await fresh.read("heapq.py") == b"x = 1\n"


@pytest.mark.parametrize(
    "header",
    [
        'diff --git "a/\\152son.py" "b/\\152son.py"\nnew file mode 100644\n--- /dev/null\n+++ "b/\\152son.py"',
        "--- /dev/null\n+++ b/json.py\t2026-01-01 00:00:00",
        "--- /dev/null\n+++ w/json.py",
        "--- json.py.orig\t1970-01-01 00:00:00 +0000\n+++ b/json.py\t2026-01-01 00:00:00 +0000",
    ],
)
async def test_file_names_are_read_as_git_reads_them(header: str, repository: Repository) -> None:
    """A patch written by a model may use any form that git accepts."""
    await check_cheat(make_task(repository, "-m"), f"{header}\n@@ -0,0 +1,2 @@\n+import os\n+os._exit(0)\n".encode())


async def test_the_reward_build_reads_files_with_pythons_own_modules(repository: Repository) -> None:
    task = make_task(repository, "-m")
    broken = make_cheat(repository, {"json.py": b"", "data.json": b"{,,}\n"})
    for patch, value, note in ((broken, 0.0, "data.json cannot be parsed"), (task.reference, 1.0, "")):
        [found] = await score_episode(make_rewards("build"), task, make_patched_episode(task, patch), bwrap())
        assert found.value == value and found.note.startswith(note)
