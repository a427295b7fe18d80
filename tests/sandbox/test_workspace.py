"""From a task's workspace to one clean commit of exact bytes, or to a clear error."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.errors import TaskError
from coderepairrl.sandbox import contents
from coderepairrl.sandbox.contents import check_workspace
from coderepairrl.sandbox.guest.files import unpack
from coderepairrl.sandbox.workspace import WorkspaceCache, prepare_workspace, write_archive
from rewards.folder import Repository, git


def sh(folder: Path, *words: str) -> str:
    """Output of a git command."""
    return git(folder, *words).decode().strip()


@pytest.fixture
def repository(folder: Path) -> Path:
    """The folder as a git repository of a commit."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "bug")
    return folder


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Map paths to mode and content, without .git."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if name.split("/")[0] == ".git" or (path.is_dir() and not path.is_symlink()):
            continue
        link = path.is_symlink()
        data = os.fsencode(os.readlink(path)) if link else path.read_bytes()  # noqa: PTH115 - a Path normalizes it
        found[name] = (path.lstat().st_mode & 0o111 and 1, data)
    return found


def test_a_plain_folder_arrives_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    """In the same commit each time."""
    (folder / "to").symlink_to(".//nowhere/")
    prepared, again = (prepare_workspace(f"dir:{folder}", tmp_path / name) for name in "pq")
    assert tree(prepared.tree) == tree(folder) and prepared.base == again.base
    assert sh(prepared.tree, "status", "--porcelain") == ""
    assert sh(prepared.tree, "fsck", "--strict") == ""


def test_a_repository_arrives_as_its_head_stores_it(repository: Path, tmp_path: Path) -> None:
    prepared = prepare_workspace(f"dir:{repository}", tmp_path / "p")
    files = tree(prepared.tree)
    assert files["app.py"] == tree(repository)["app.py"]
    assert files["bin/run"][0] == 1
    assert files["notes.txt"][1] == b"one\ntwo\n"  # its .gitattributes made git store it so


def test_only_head_can_be_reached(repository: Path, tmp_path: Path) -> None:
    """Neither later commits nor other branches nor remotes nor the message that gives the fix away."""
    (repository / "app.py").write_text("the fix\n")
    git(repository, "commit", "-qam", "the fix")
    fix = sh(repository, "rev-parse", "HEAD")
    git(repository, "branch", "fixed")
    git(repository, "reset", "-q", "--hard", "HEAD~")
    git(repository, "remote", "add", "origin", "https://example.org/x")
    bug = sh(repository, "rev-parse", "HEAD")
    for workspace in (f"dir:{repository}", f"git:{repository}@{bug}", f"git:file://{repository}@{bug}"):
        inside = prepare_workspace(workspace, tmp_path / workspace.replace("/", "_")).tree
        assert sh(inside, "rev-list", "--all", "--count") == "1"
        assert sh(inside, "remote") == ""
        with pytest.raises(subprocess.CalledProcessError):
            git(inside, "cat-file", "-e", fix)
        assert "the fix" not in sh(inside, "log", "--all", "-p")


def test_unusable_workspaces_are_refused(folder: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "unborn")
    for workspace, message in {
        f"dir:{tmp_path}/missing": "missing",
        f"dir:{folder}/app.py": "not a folder",
        f"dir:{tmp_path}/unborn": "not a usable git repository",
        "image:x@sha256:1": "no images",
        "somewhere": "is not dir:",
        "git:https://example.org/x": "is not dir:",
    }.items():
        with pytest.raises(TaskError, match=message):
            prepare_workspace(workspace, tmp_path / "p")


def test_a_file_of_tasks_cannot_show_an_agent_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "kept" / "cache"))
    private = (".ssh/keys", ".cache/huggingface/hub", ".config/gh", "../kept/cache/git/one")
    for name in (*private, "project", "../kept/cache/tasks/one"):
        folder = home / name
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    (home / "project" / "again").symlink_to("..")
    for place, how in {
        "/": "contains",
        "/etc": "is /etc",
        "/etc/ssl": "lies in /etc",
        "/proc/self": "lies in /proc",
        "/tmp": "is /tmp",
        "/usr/../home": "is /home",
        "~": "is",
        str(tmp_path): "contains",
        f"{home}/project/again": "is",
        f"{home}/.ssh": "is",
        f"{home}/.ssh/keys": "lies in",
        f"{home}/.config/gh": "lies in",
        f"{home}/.cache/huggingface/hub": "lies in",
        f"{tmp_path}/kept": "contains",
        f"{tmp_path}/kept/cache/git/one": "lies in",
    }.items():
        for refuse in (check_workspace, lambda workspace: prepare_workspace(workspace, tmp_path / "p")):
            with pytest.raises(TaskError, match=f"{how}.*which agents are not shown") as caught:
                refuse(f"dir:{place}")
            assert caught.value.fix
    for url in (f"{home}/.ssh", f"file://{home}"):
        with pytest.raises(TaskError, match="which agents are not shown"):
            prepare_workspace(f"git:{url}@{'0' * 40}", tmp_path / "p")
    for at, place in enumerate((home / "project", tmp_path / "kept/cache/tasks/one")):
        prepare_workspace(f"dir:{place}", tmp_path / f"p{at}")


def test_a_folder_that_becomes_private_is_soon_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private folders are looked up again after a minute."""
    home, keys = tmp_path / "home", tmp_path / "disk/keys"
    home.mkdir()
    keys.mkdir(parents=True)
    (keys / "file").write_text("x")
    monkeypatch.setenv("HOME", str(home))
    check_workspace(f"dir:{keys}")
    (home / ".ssh").symlink_to(keys)
    monkeypatch.setattr(contents, "_PERIOD_SECONDS", contents._PERIOD_SECONDS / 1000)  # a minute later, that is
    with pytest.raises(TaskError, match=r"\.ssh, which agents are not shown"):
        check_workspace(f"dir:{keys}")


def test_an_unreadable_file_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "app.py").chmod(0)
    if os.geteuid() == 0:  # who reads everything, so the refusal is played

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TaskError, match="cannot be read.*repository") as caught:
        prepare_workspace(f"dir:{folder}", tmp_path / "p")
    assert caught.value.fix


def test_a_tree_that_climbs_out_is_refused(tmp_path: Path) -> None:
    """A commit made by hand whose entries are `..` or `.git/hooks`: no file of ours is written by it."""
    evil = tmp_path / "evil"
    evil.mkdir()
    Repository(evil)

    def made(kind: str, data: bytes) -> str:
        return git(evil, "hash-object", "-t", kind, "-w", "--literally", "--stdin", stdin=data).decode().strip()

    inner = made("tree", b"100644 x\0" + bytes.fromhex(made("blob", b"x")))
    for number, name in enumerate((b"..", b".git", b".GIT")):
        outer = made("tree", b"40000 " + name + b"\0" + bytes.fromhex(inner))
        commit = sh(evil, "commit-tree", outer, "-m", "x")
        with pytest.raises(TaskError, match="not allowed in a repository"):
            prepare_workspace(f"git:{evil}@{commit}", tmp_path / f"p{number}")


def test_prepared_workspaces_are_kept_while_used_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces = WorkspaceCache(
        tmp_path / "state", lambda workspace, root, _: prepare_workspace(workspace, root), keep=2
    )
    rmtree = shutil.rmtree

    def remove(path: Path, **options: Any) -> None:
        assert not workspaces._lock.locked(), "the event loop would wait for it"
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    (tmp_path / "state").mkdir()
    prepared = []
    for number in range(5):
        (tmp_path / f"w{number}").mkdir()
        (tmp_path / f"w{number}" / "f").write_text(str(number))
        prepared.append(workspaces.acquire(f"dir:{tmp_path}/w{number}"))
        if number:
            workspaces.release(prepared[number])
    assert prepared[0].root.exists()  # in use throughout
    assert len(list((tmp_path / "state").iterdir())) <= 3
    again = workspaces.acquire(f"dir:{tmp_path}/w0")
    assert again is prepared[0]


def test_unpacking_restores_what_was_packed(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "closed" / "deep").mkdir(parents=True)
    (source / "a").write_bytes(bytes(range(256)) * 9000)
    (source / "b").hardlink_to(source / "a")
    (source / os.fsdecode(b"caf\xe9\n")).write_bytes(b"")
    (source / "to").symlink_to(".//nowhere/")
    (source / "folder").symlink_to("closed")
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o4755)
    os.mkfifo(source / "pipe", 0o640)
    for path in (source / "closed" / "deep", source / "closed"):
        path.chmod(0o500)
    os.utime(source / "to", ns=(5, 1_600_000_000_123_456_789), follow_symlinks=False)
    write_archive(source, tmp_path / "packed")
    target.mkdir()
    unpack(os.open(tmp_path / "packed", os.O_RDONLY), str(target))
    found, expected = (sorted((str(path.relative_to(root)), path.lstat()) for path in [root, *root.rglob("*")])
                       for root in (target, source))  # fmt: skip
    assert [name for name, _ in found] == [name for name, _ in expected] and len(found) == 10
    for (name, one), (_, other) in zip(found, expected, strict=True):
        assert (one.st_mode, one.st_mtime_ns) == (other.st_mode, other.st_mtime_ns), name
    link = os.readlink(target / "to")  # noqa: PTH115 - a Path spells it another way
    assert link == ".//nowhere/" and (target / "a").samefile(target / "b")
    assert (target / "a").read_bytes() == (source / "a").read_bytes()
