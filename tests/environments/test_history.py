"""No repository of an image holds what came after the commit that is checked out."""

from __future__ import annotations

import contextlib
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from coderepairrl.environments import history
from coderepairrl.errors import TaskError
from coderepairrl.sandbox.privileges import sandbox_user

from .conftest import make_repository, open_folder

USER = sandbox_user()
OTHER = (
    "git init -q . && git config user.name n && git config user.email e && echo x > x && git add -A && git commit -qm x"
)


@pytest.fixture
def place() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


def git(folder: Path, *args: str) -> str:
    """Run git as a user who looks at the repository inside."""
    command = ["git", "-c", "safe.directory=*", *args]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def reduce(tree: Path, where: str, place: Path) -> history.ReducedHistory:
    work = place / "work"
    work.mkdir(mode=0o755)
    if USER is not None:
        subprocess.run(["chown", "-R", f"{USER}:{USER}", tree], check=True)
    return history.reduce_to_past(tree, where, work, USER)


def mentions(tree: Path, word: bytes = b"THE FIX") -> list[str]:
    """List the file of each occurrence of the word, also in loose objects and packs."""
    found: list[str] = []
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            with contextlib.suppress(zlib.error):
                data += zlib.decompress(data)
            if path.suffix == ".pack":
                ask = ["git", f"--git-dir={path.parents[2]}", "cat-file", "--batch-all-objects", "--batch"]
                data += subprocess.run(ask, capture_output=True).stdout
            found += [str(path.relative_to(tree))] * data.count(word)
    return found


def test_only_ancestors_are_left(place: Path) -> None:
    tree = place / "tree"
    repo = make_repository(tree / "testbed")
    before = git(repo, "rev-parse", "HEAD")
    assert len(mentions(tree)) > 3, "control"
    count = git(repo, "rev-list", "--count", "HEAD")
    assert reduce(tree, "testbed", place) == history.ReducedHistory(before, ())
    assert mentions(tree) == []
    assert git(repo, "rev-parse", "HEAD") == before and git(repo, "rev-list", "--count", "--all") == count
    assert git(repo, "status", "--porcelain") == "" and git(repo, "fsck", "--strict", "--full") == ""
    assert git(repo, "describe", "--tags") == "base-tag" and git(repo, "describe").startswith("v0-3-g")
    assert git(repo, "for-each-ref", "--format=%(refname)").split() == [
        "refs/heads/main", "refs/tags/base-tag", "refs/tags/v0",
    ]  # fmt: skip
    left = {path.name for path in (repo / ".git").iterdir()}
    assert left == {"HEAD", "config", "index", "info", "objects", "packed-refs", "refs"}
    assert "fix.example" not in (repo / ".git/config").read_text()
    assert git(repo, "log", "-1", "--format=%s", "--", "side.py") == "side"
    git(repo, "checkout", "-q", "HEAD~1", "--", "app.py")
    assert git(repo, "diff", "--cached", "--stat") != ""
    if USER is not None:
        assert {path.lstat().st_uid for path in (repo / ".git").rglob("*") if path.name != "index"} == {USER}


def test_changes_of_the_working_tree_stay_and_what_was_staged_does_not(place: Path) -> None:
    tree = place / "tree"
    repo = make_repository(tree / "testbed")
    (repo / "app.py").write_text("adapted\n")
    (repo / "staged").write_text("THE FIX")
    git(repo, "add", "staged")
    (repo / "staged").unlink()
    reduce(tree, "testbed", place)
    assert git(repo, "status", "--porcelain") == "M app.py"
    assert (repo / "app.py").read_text() == "adapted\n" and mentions(tree) == []


def test_borrowed_objects_are_copied_and_the_lender_is_removed(place: Path) -> None:
    """By absolute paths of the image, by relative ones, and from one to the next; never from this machine's."""
    tree = place / "tree"
    whole = make_repository(place / "whole")
    (tree / "mirror").mkdir(parents=True)
    (whole / ".git").rename(tree / "mirror/git")
    (tree / "middle/objects/info").mkdir(parents=True)
    (tree / "middle/objects/info/alternates").write_text("../../mirror/git/objects\n")
    repo = tree / "testbed"
    (repo / ".git/objects/info").mkdir(parents=True)
    (repo / ".git/objects/info/alternates").write_text("/middle/objects\n/etc\n")
    for name in ("HEAD", "refs", "config", "index"):
        subprocess.run(["cp", "-a", tree / "mirror/git" / name, repo / ".git" / name], check=True)
    for name in ("app.py", "side.py"):
        (whole / name).rename(repo / name)
    reduced = reduce(tree, "testbed", place)
    assert reduced.removed == ("middle/objects", "mirror/git")
    assert mentions(tree) == [] and git(repo, "fsck") == "" and git(repo, "status", "--porcelain") == ""


def test_objects_of_this_machine_are_out_of_reach(place: Path) -> None:
    """Paths and links of an image are looked up in the image, where they lead nowhere."""
    outside = make_repository(place / "outside")
    for number, lend in enumerate(("alternates", "link", "links to packs", "gitdir", "commondir")):
        tree = place / str(number) / "tree"
        repo = tree / "testbed"
        (repo / ".git/objects/info").mkdir(parents=True)
        (repo / ".git/objects/pack").mkdir()
        for name in ("HEAD", "refs", "config"):
            subprocess.run(["cp", "-a", outside / ".git" / name, repo / ".git" / name], check=True)
        if lend == "alternates":
            (repo / ".git/objects/info/alternates").write_text(f"{outside}/.git/objects\n")
        elif lend == "link":
            subprocess.run(["rm", "-r", repo / ".git/objects"], check=True)
            (repo / ".git/objects").symlink_to(outside / ".git/objects")
        elif lend == "links to packs":
            for pack in (outside / ".git/objects/pack").iterdir():
                (repo / ".git/objects/pack" / pack.name).symlink_to(pack)
        elif lend == "gitdir":
            subprocess.run(["rm", "-r", repo / ".git"], check=True)
            (repo / ".git").write_text(f"gitdir: {outside}/.git\n")
        else:
            (repo / ".git/commondir").write_text(f"{outside}/.git\n")
        with pytest.raises(TaskError):
            head = reduce(tree, "testbed", place / str(number)).head
            assert head == "", f"{lend} found it"
            raise TaskError("nothing was found")
        assert git(outside, "rev-list", "--count", "--all") != "0"


def test_package_caches_are_removed(place: Path) -> None:
    make_repository(place / "tree/testbed")
    for name in ("root/.cache/pip/wheels", "home/a/.cache/uv", "root/.cache/other", "testbed/.cache/pip"):
        (place / "tree" / name).mkdir(parents=True)
        (place / "tree" / name / "app-2.whl").write_text("a later version")
    assert reduce(place / "tree", "testbed", place).removed == ("home/a/.cache/uv", "root/.cache/pip")
    left = sorted(str(path.relative_to(place / "tree")) for path in (place / "tree").rglob("*.whl"))
    assert left == ["root/.cache/other/app-2.whl", "testbed/.cache/pip/app-2.whl"]


def test_related_repositories_and_bundles_are_removed_and_others_stay(place: Path) -> None:
    tree = place / "tree"
    repo = make_repository(tree / "testbed")
    git(place, "clone", "-q", "--mirror", str(repo), str(tree / "srv/mirror.git"))
    git(place, "clone", "-q", str(repo), str(tree / "root/copy"))
    git(repo, "bundle", "create", str(tree / "opt.bundle"), "--all")
    unrelated = make_repository(tree / "opt/tool", OTHER)
    reduced = reduce(tree, "testbed", place)
    assert set(reduced.removed) == {"srv/mirror.git", "root/copy/.git", "opt.bundle"}
    assert mentions(tree) == ["root/copy/app.py"] or mentions(tree) == []
    assert git(unrelated, "log", "--format=%s") == "x"


@pytest.mark.parametrize("how", ["shallow", "worktree", "detached", "separate", "submodule"])
def test_repositories_of_other_kinds(how: str, place: Path) -> None:
    tree = place / "tree"
    whole = make_repository(tree / "whole")
    base = git(whole, "rev-parse", "HEAD")
    repo = tree / "testbed"
    if how == "shallow":
        git(place, "clone", "-q", "--depth=2", f"file://{whole}", str(repo))
    elif how == "worktree":
        git(whole, "worktree", "add", "-q", "--detach", str(repo), base)
        (repo / ".git").write_text("gitdir: /whole/.git/worktrees/testbed\n")
    elif how == "detached":
        git(place, "clone", "-q", str(whole), str(repo))
        git(repo, "checkout", "-q", "--detach", base)
    elif how == "separate":
        git(place, "clone", "-q", f"--separate-git-dir={tree}/elsewhere", str(whole), str(repo))
        (repo / ".git").write_text("gitdir: ../elsewhere\n")
    else:
        git(place, "clone", "-q", str(whole), str(repo))
        other = make_repository(place / "other", OTHER)
        git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "sub")
        git(repo, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "with it")
        base = git(repo, "rev-parse", "HEAD")
    reduced = reduce(tree, "testbed", place)
    assert reduced.head == base
    assert (repo / ".git").is_dir() and git(repo, "status", "--porcelain") == "" and git(repo, "fsck") == ""
    if how == "shallow":
        assert git(repo, "rev-parse", "--is-shallow-repository") == "true"
    if how == "submodule":
        assert (repo / "sub/x").read_text() == "x\n" and git(repo / "sub", "log", "--format=%s") == "x"
    assert mentions(tree) == []


def test_a_repository_without_a_commit_is_removed(place: Path) -> None:
    tree = place / "1" / "tree"
    repo = make_repository(tree / "testbed")
    git(repo, "symbolic-ref", "HEAD", "refs/heads/nothing")
    assert reduce(tree, "testbed", place / "1").head == "" and not (repo / ".git").exists()
    plain = place / "2" / "tree"
    (plain / "testbed").mkdir(parents=True)
    assert reduce(plain, "testbed", place / "2") == history.ReducedHistory("", ())
