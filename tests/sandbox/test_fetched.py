"""Cached commits are complete or absent, whichever process was killed; errors say what to do."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from pathlib import Path

import pytest

from coderepairrl.errors import CodeRepairError, PrerequisiteError, SandboxFault, TaskError
from coderepairrl.processes.caches import git_cache
from coderepairrl.processes.hostgit import git
from coderepairrl.sandbox.commits import fetch_commits
from rewards.folder import Repository


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def mirror(tmp_path: Path) -> tuple[str, list[str]]:
    """The URL of a repository, and its commits."""
    work, commits = tmp_path / "mirror", []
    work.mkdir()
    repository = Repository(work)
    for number in range(2):
        repository.commit({"blob": os.urandom(200_000), "number": str(number)})
        commits.append(git("rev-parse", "HEAD", folder=work / ".git").decode().strip())
    return f"file://{work}", commits


def number(url: str, commit: str) -> bytes:
    folder = fetch_commits(url, [commit])
    assert git("fsck", "--full", "--no-dangling", folder=folder) == b""
    return git("cat-file", "blob", f"{commit}:number", folder=folder)


def test_leftovers_of_a_killed_fetch_do_not_matter(mirror: tuple[str, list[str]], cache: Path) -> None:
    """Parts of a repository, and locks and temporary files of git."""
    url, [first, second] = mirror
    assert number(url, first) == b"0"
    [repository] = git_cache().glob("*[0-9a-f]")
    half = repository.with_suffix(".partial")
    (half / "objects" / "info").mkdir(parents=True)
    for name in ("shallow.lock", "packed-refs.lock", "objects/pack/tmp_pack_aBcDeF", "objects/pack/tmp_idx_aBcDeF"):
        (repository / name).write_bytes(b"half")
    assert number(url, second) == b"1" and number(url, first) == b"0"
    assert not [path for path in repository.rglob("*") if path.name.startswith("tmp_") or path.suffix == ".lock"]
    repository.rename(repository.with_name("elsewhere"))
    assert number(url, first) == b"0" and not half.exists()


def test_a_repository_gets_its_name_when_it_is_complete(mirror: tuple[str, list[str]]) -> None:
    """A process killed between two of its files leaves no repository of that name."""
    url, [first, _] = mirror
    seen = []

    def spy(self: Path, target: Path) -> Path:
        seen.append(sorted(path.name for path in self.iterdir()))
        return rename(self, target)

    rename = Path.rename
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", spy)
        number(url, first)
    assert seen == [["HEAD", "config", "info", "objects", "refs"]]


def test_the_git_of_a_killed_process_keeps_its_lock(mirror: tuple[str, list[str]], tmp_path: Path) -> None:
    """No other process fetches there until that git ends."""
    url, [first, _] = mirror
    number(url, first)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    [lock] = git_cache().glob("*.lock")
    with lock.open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        options = {"folder": Path("/dev/null"), "lock": ours.fileno()}
        gits = threading.Thread(target=git, args=("hash-object", str(fifo)), kwargs=options)
        gits.start()
        with fifo.open("wb") as end:  # it runs now, until this is closed
            ours.close()
            with lock.open("w") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end.write(b"")
        gits.join()


def test_a_read_only_cache_serves_what_it_has(
    mirror: tuple[str, list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, [first, second] = mirror
    assert number(url, first) == b"0"

    def refuse(self: Path, *args: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert number(url, first) == b"0"
    with pytest.raises(PrerequisiteError, match="cannot write to .*Read-only") as caught:
        number(url, second)
    assert "CRRL_CACHE" in caught.value.fix


def test_failed_fetches_name_their_fix(mirror: tuple[str, list[str]], cache: Path) -> None:
    """A commit that was pushed away, a host that is not there, a folder that is gone."""
    url, [first, _] = mirror
    cases: list[tuple[str, type[CodeRepairError], str, str]] = [
        (url, TaskError, "has no commit", "force push"),
        ("http://127.0.0.1:9/a/b.git", SandboxFault, "Failed to connect|refused", "run the command again"),
        ("file:///no/such/mirror", TaskError, "no such folder", "name"),
    ]
    for where, error, words, fix in cases:
        with pytest.raises(error, match=words) as caught:
            fetch_commits(where, ["1" * 40])
        assert fix in caught.value.fix, where
    assert number(url, first) == b"0"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_loses_nothing(mirror: tuple[str, list[str]], cache: Path) -> None:
    url, commits = mirror
    cache.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", cache], check=True)
    try:
        assert number(url, commits[0]) == b"0"
        for _ in range(2):
            with pytest.raises(PrerequisiteError, match="no room") as caught:
                number(url, commits[1])
        assert "free some disk space" in caught.value.fix and number(url, commits[0]) == b"0"
        subprocess.run(["mount", "-o", "remount,size=4m", cache], check=True)
        assert number(url, commits[1]) == b"1"
    finally:
        subprocess.run(["umount", cache], check=True)
