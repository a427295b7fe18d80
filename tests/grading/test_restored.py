"""Files of the checks are restored, whatever links a patch puts in their place."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from coderepairrl.grading import grade_patch, restore_files
from coderepairrl.types import Checks, Command, Task
from grading.cheats import REPAIRED, SOURCE
from rewards.folder import Local, Repository, grade_in_sandbox

CHECK = "import sys\nsys.path.insert(0, {up!r})\nfrom limits import clamp\nassert clamp({n}, 0, 9) == {want}\n"
LOW, HIGH = ({"n": -1, "want": 0}, {"n": 10, "want": 9})
ALL = f"for check in tests/[ab].py; do {sys.executable} -S -B $check || exit 1; done"
COMMAND = Command(("sh", "-c", ALL), 20.0)
"""Names no file, so that a patch may replace all of them."""
LINKS: dict[str, dict[str, str]] = {
    "to the check that passes": {"tests/a.py": "b.py"},
    "of links": {"tests/a.py": "c.py", "tests/c.py": "d.py", "tests/d.py": "b.py"},
    "both to a missing file": {"tests/a.py": "c.py", "tests/b.py": "c.py"},
}
"""Links of a patch, and their targets."""


def make_task(repository: Repository) -> Task:
    """Make a task whose code ignores the upper limit, which ``tests/a.py`` notices and ``tests/b.py`` does not."""
    tests = {path: CHECK.format(up=".", **values) for path, values in (("tests/a.py", HIGH), ("tests/b.py", LOW))}
    return repository.task({"limits.py": SOURCE, **tests}, {"limits.py": REPAIRED}, Checks((COMMAND,), tests))


def make_links(repository: Repository, links: dict[str, str]) -> bytes:
    for path, target in links.items():
        link = repository.folder / path
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return repository.diff()


@pytest.mark.parametrize("name", LINKS)
async def test_a_check_is_not_restored_through_a_link(name: str, repository: Repository) -> None:
    task = make_task(repository)
    patch = make_links(repository, LINKS[name])
    assert (await grade_in_sandbox(task, task.reference)).problem == ""
    problem = (await grade_in_sandbox(task, patch)).problem
    assert problem.startswith("check failed (exit code 1)"), problem
    async with Local().open(task) as fresh:  # the positive control: written through the links it passes
        await fresh.exec(["git", "apply", "-"], stdin=patch)
        for path, text in task.checks.restore.items():
            await fresh.write(path, text.encode())
        assert (await fresh.exec(COMMAND.argv)).ok


async def test_a_link_in_place_of_a_folder_becomes_a_folder(repository: Repository, tmp_path: Path) -> None:
    task, backend = make_task(repository), Local()
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    for target in ("other", "../elsewhere", str(outside), "/nowhere", "tests"):
        repository.put(dict.fromkeys(task.checks.restore) | {"other/a.py": b""})
        (repository.folder / "tests").rmdir()
        patch = make_links(repository, {"tests": target})
        async with backend.open(task) as fresh:
            problem = (await grade_patch(fresh, task, patch)).problem
            assert problem.startswith("check failed (exit code 1)"), f"{target}: {problem}"
            shown = await fresh.exec(["sh", "-c", "ls tests; ls -A other; test -h tests"])
            assert shown.output == b"a.py\nb.py\na.py\n" and shown.exit_code == 1, shown
            assert await fresh.read("other/a.py") == b""
    assert list(outside.iterdir()) == []


async def test_a_hard_link_to_a_check_keeps_its_content(repository: Repository) -> None:
    task = make_task(repository)
    async with Local().open(task) as fresh:
        await fresh.exec(["sh", "-c", "echo of another > other && chmod 755 other && ln -f other tests/a.py"])
        assert await restore_files(fresh, task.checks) == ""
        assert await fresh.read("other") == b"of another\n"
        assert await fresh.read("tests/a.py") == task.checks.restore["tests/a.py"].encode()
        assert (await fresh.exec(["test", "-x", "tests/a.py"])).ok, "its mode stays"


async def test_a_file_or_folder_in_place_of_a_check_costs_the_score(repository: Repository) -> None:
    task = make_task(repository)
    for files in ({"tests": ""}, {"tests/a.py/x": ""}):
        repository.put(dict.fromkeys(task.checks.restore))
        (repository.folder / "tests").rmdir()
        problem = (await grade_in_sandbox(task, repository.edit(files))).problem
        assert problem.startswith("the patch leaves no way to restore tests/a.py")


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", "", ".", "tests/..", "tests/", "a\0b"])
async def test_names_outside_the_workspace_are_refused(path: str, repository: Repository) -> None:
    task = make_task(repository)
    task = replace(task, checks=replace(task.checks, restore={path: ""}))
    async with Local().open(task) as fresh:
        assert "no way to restore" in await restore_files(fresh, task.checks)
        assert not os.path.lexists(Path(fresh.workdir).parent / "evil")
