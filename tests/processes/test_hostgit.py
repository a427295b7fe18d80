"""Git on the host: which repositories it reads, and that no program of a repository runs."""

from __future__ import annotations

import ast
import base64
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

import coderepairrl
from coderepairrl.errors import SandboxFault, TaskError
from coderepairrl.processes import hostgit
from coderepairrl.runs import source_commit
from coderepairrl.sandbox.contents import check_workspace
from coderepairrl.sandbox.workspace import prepare_workspace
from coderepairrl.stages.fix import apply_patch, open_repository
from coderepairrl.tasks.mutants.package_tasks import read_tree
from hostile_repository import SETTINGS, TRIGGERS, Hostile

PATCH = b"""diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -1 +1 @@
-def add(a, b): return a - b
+def add(a, b): return a + b
"""
SOMEBODY = 54321


@pytest.mark.parametrize("name", sorted({*TRIGGERS, *SETTINGS}))
def test_plain_git_runs_the_programs_of_a_repository(name: str, tmp_path: Path) -> None:
    hostile = Hostile(tmp_path / "repo", tmp_path / "marks", [name])
    hostile.shell(TRIGGERS[name], check=False)
    assert hostile.ran == {name}


def test_we_run_no_program_of_a_repository(tmp_path: Path) -> None:
    names = [name for name in SETTINGS if name != "a promised object"]
    hostile = Hostile(tmp_path / "repo", tmp_path / "marks", names)
    head = hostile.shell("git rev-parse HEAD").strip()
    root = hostile.root
    hostile.age()
    hostile.forget()
    check_workspace(f"dir:{root}")
    for number, workspace in enumerate((f"dir:{root}", f"git:{root}@{head}", f"git:file://{root}@{head}")):
        prepared = prepare_workspace(workspace, tmp_path / f"p{number}")
        assert (prepared.tree / "a.py").read_text() == "def add(a, b): return a - b\n"
    assert set(read_tree(root)) >= {"a.py", "b.py"}
    assert source_commit(root) == head
    repository = open_repository(root)
    assert repository.commit == head
    assert apply_patch(repository, PATCH)
    assert (root / "a.py").read_text() == "def add(a, b): return a + b\n"
    with pytest.raises(TaskError, match="dirty: a.py"):
        prepare_workspace(f"dir:{root}", tmp_path / "dirty")
    assert source_commit(root) == head + "+"
    assert hostile.ran == set()


def test_a_promised_object_is_not_fetched(tmp_path: Path) -> None:
    hostile = Hostile(tmp_path / "repo", tmp_path / "marks", ["a promised object"])
    head = hostile.shell("git rev-parse HEAD").strip()
    with pytest.raises(TaskError, match=r"lacks the content of gone\.txt") as caught:
        prepare_workspace(f"dir:{hostile.root}", tmp_path / "p")
    assert "without a filter" in caught.value.fix
    with pytest.raises(TaskError, match=f"lacks the content of a file of {head}"):
        prepare_workspace(f"git:{hostile.root}@{head}", tmp_path / "q")
    assert hostile.ran == set()


def test_no_other_module_starts_git() -> None:
    """Except in a sandbox, by its `exec`."""
    root = Path(coderepairrl.__file__).parent
    starts = {}
    for path in sorted(root.rglob("*.py")):
        if "git" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        allowed = {
            id(node) for call in ast.walk(tree) if _is_sandbox_exec(call) or _is_type(call) for node in ast.walk(call)
        }
        if lines := [node.lineno for node in ast.walk(tree) if _names_git(node) and id(node) not in allowed]:
            starts[str(path.relative_to(root))] = lines
    assert starts.pop("checks/attacks/inside.py"), "an attack, which runs in a sandbox"
    assert starts.pop("environments/programs/strip_project.py"), "the end of a build, which runs in a sandbox"
    assert list(starts) == ["grading/__init__.py", "processes/hostgit.py"], starts
    assert "sandbox.exec([*_GIT_APPLY" in (root / "grading/__init__.py").read_text()


def _names_git(node: ast.AST) -> bool:
    """Whether it is a command line that begins with git, or a search for git."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return bool(node.elts) and isinstance(node.elts[0], ast.Constant) and node.elts[0].value == "git"
    runs = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("which", "run", "system", "Popen")
    return runs and any(isinstance(arg, ast.Constant) and str(arg.value).split()[:1] == ["git"] for arg in node.args)


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal"


def _is_sandbox_exec(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "exec"


# -- repositories of other users


def plain_git_reads(root: Path) -> bool:
    done = subprocess.run(["git", "status"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 or "dubious ownership" in done.stderr, done.stderr
    return done.returncode == 0


def we_read(root: Path) -> bool:
    try:
        hostgit.find_repository(root)
    except TaskError as error:
        assert "belongs to another user" in str(error) and f"safe.directory {root}" in error.fix
        return False
    return True


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hostile]:
    """A repository where other users can reach it, and a home without settings."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(0o755)
        monkeypatch.setenv("HOME", folder)
        yield Hostile(home / "repo", home / "marks", ["fsmonitor"])


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "GIT_CONFIG_GLOBAL", "SUDO_UID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hostile(tmp_path: Path) -> Hostile:
    """A repository without settings of its own."""
    return Hostile(tmp_path / "repo", tmp_path / "marks", [])


def give(root: Path, *names: str) -> None:
    for name in names:
        os.chown(root / name, SOMEBODY, SOMEBODY)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
@pytest.mark.parametrize("given", [[".git"], ["."], [".", ".git"]])
def test_root_does_not_read_another_users_repository_nor_does_git(mine: Hostile, given: list[str]) -> None:
    assert we_read(mine.root) and plain_git_reads(mine.root)
    assert mine.ran, "plain git runs its program"
    mine.forget()
    give(mine.root, *given)
    assert not we_read(mine.root) and not plain_git_reads(mine.root)
    for read in (
        lambda: prepare_workspace(f"dir:{mine.root}", mine.root.parent / "p"),
        lambda: prepare_workspace(f"git:{mine.root}@{'0' * 40}", mine.root.parent / "q"),
        lambda: check_workspace(f"dir:{mine.root}"),
        lambda: read_tree(mine.root),
        lambda: open_repository(mine.root),
    ):
        with pytest.raises(TaskError, match="belongs to another user"):
            read()
    assert source_commit(mine.root) == ""
    assert not mine.ran


@needs_root
def test_safe_directories_are_those_of_git(mine: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    give(mine.root, ".", ".git")
    home = mine.root.parent
    for lines, safe in {
        (f"directory = {mine.root}",): True,
        ("directory = *",): True,
        ("directory = ~/repo",): True,
        (f"directory = {home}",): False,
        (f"directory = {mine.root}", "directory ="): False,
        ("directory =", f"directory = {mine.root}"): True,
    }.items():
        (home / ".gitconfig").write_text("\n".join(["[safe]", *lines]))
        assert we_read(mine.root) == plain_git_reads(mine.root) == safe, lines
    (home / ".gitconfig").unlink()
    mine.shell(f"chown -R 0:0 .git; git config safe.directory '*'; chown -R {SOMEBODY} .git")
    assert not we_read(mine.root) and not plain_git_reads(mine.root), "its own settings do not count"
    monkeypatch.setenv("SUDO_UID", str(SOMEBODY))
    assert we_read(mine.root) and plain_git_reads(mine.root), "under sudo the calling user's are read, too"


@needs_root
def test_a_user_reads_neither_roots_repository_nor_anothers(mine: Hostile) -> None:
    script = """
import os, sys, codecs, encodings.idna
from coderepairrl.processes import hostgit
from coderepairrl.errors import TaskError
os.setgid(54321), os.setuid(54321)
try:
    repository = hostgit.find_repository(__import__("pathlib").Path(sys.argv[1]))
    with hostgit.open_view(repository) as view: print("reads", len(view.head()))
except TaskError as error: print("refused", error.fix)
"""
    for owner, word in ((0, "refused"), (SOMEBODY + 1, "refused"), (SOMEBODY, "reads 40")):
        mine.shell(f"chown -R {owner}:{owner} .")
        command = [sys.executable, "-c", script, str(mine.root)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": "/tmp"})
        assert done.stdout.startswith(word), (owner, done)
    assert not mine.ran


# -- repositories that lead elsewhere, or only seem to


@pytest.fixture
def private(tmp_path: Path) -> Hostile:
    return Hostile(tmp_path / "private", tmp_path / "marks", ["fsmonitor"])


LEADS_ELSEWHERE = {
    "a .git file": "echo 'gitdir: ../private/.git' > .git",
    "a .git link": "ln -s ../private/.git .git",
    "a linked working tree of its own making": """mkdir .git; cp ../private/.git/HEAD .git/
        echo ../../private/.git > .git/commondir; echo ../../private/.git > .git/gitdir""",
    "a working tree elsewhere": "git init -q; git commit -qm x --allow-empty; git config core.worktree ../../private",
    "borrowed objects": """git init -q; echo ../../../private/.git/objects > .git/objects/info/alternates
        git update-ref HEAD $(git -C ../private rev-parse HEAD); git reset -q --hard""",
    "linked objects": "git init -q; git commit -qm x --allow-empty; mv .git/objects ../o; ln -s ../../o .git/objects",
    "settings that never end": "git init -q; git commit -qm x --allow-empty; rm .git/config; mkfifo .git/config",
    "a head that never ends": "git init -q; git commit -qm x --allow-empty; rm .git/HEAD; mkfifo .git/HEAD",
}


@pytest.mark.parametrize("how", LEADS_ELSEWHERE)
def test_a_repository_that_leads_elsewhere_is_refused(how: str, private: Hostile, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    subprocess.run(["bash", "-ec", LEADS_ELSEWHERE[how]], cwd=here, check=True, env=os.environ | WHO)
    private.forget()
    for read in (lambda: prepare_workspace(f"dir:{here}", tmp_path / "p"), lambda: open_repository(here)):
        with pytest.raises(TaskError, match="not a usable git repository") as caught:
            read()
        assert caught.value.fix
    assert source_commit(here) == ""
    assert not private.ran


WHO = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
ORDINARY = {
    "packed refs": "git pack-refs --all; git gc -q",
    "no branch": "git checkout -q --detach",
    "a split index": "git update-index --split-index; git status",
    "a sparse index": "git sparse-checkout set --cone --sparse-index d; git status",
    "line ends": """git config core.autocrlf true; rm a.py; git checkout a.py
        git ls-files --eol a.py | grep w/crlf; touch -d 2001-01-01 a.py""",
    "no modes": "git config core.fileMode false; chmod +x a.py",
    "own exclusions": "echo x > new; echo new > .git/info/exclude",
    "a name that ends in a newline": "mv ../repo $'../repo\\n'; ln -s $'repo\\n' ../repo",
    "many hashes": "rm -rf .git sub; git init -q --object-format=sha256; git add -A; git commit -qm x",
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_repositories_of_all_kinds_are_read(kind: str, hostile: Hostile, tmp_path: Path) -> None:
    hostile.shell("mkdir d; echo in > d/in.txt; git add -A; git commit -qm more; set -e\n" + ORDINARY[kind])
    root = (tmp_path / "repo").resolve()
    assert hostile.shell(f"cd '{root}'; git status --porcelain") == ""
    prepared = prepare_workspace(f"dir:{root}", tmp_path / "p")
    assert (prepared.tree / "a.py").read_bytes() == b"def add(a, b): return a - b\n"
    assert (prepared.tree / "d/in.txt").read_text() == "in\n"
    assert open_repository(root / "d").root == root
    (root / "d/in.txt").write_text("out\n")
    with pytest.raises(TaskError, match=r"dirty: d/in\.txt"):
        prepare_workspace(f"dir:{root}", tmp_path / "q")


@pytest.mark.parametrize(
    ("settings", "change"),
    {
        "usual place": ("mkdir -p .config/git; echo .idea/ > .config/git/ignore", "mkdir .idea; echo x > .idea/x"),
        "named file": ("echo '*.swp' > mine; git config --global core.excludesFile '~/mine'", "echo x > .a.py.swp"),
        "no file": ("git config --global core.excludesFile /dev/null", "true"),
        "no modes": ("git config --global core.fileMode false", "git config --unset core.fileMode; chmod +x a.py"),
        "outranked": ("mkdir -p .config/git; echo '!new' > .config/git/ignore", "echo new > .git/info/exclude; > new"),
        "line ends": (
            "git config --global core.autocrlf true",
            "printf 'a\\r\\n' > b; git add b; git -c user.name=a -c user.email=b commit -qm b; touch b",
        ),
    }.values(),
)
def test_global_settings_of_the_user_apply_as_in_git(
    settings: str, change: str, hostile: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    subprocess.run(["bash", "-ec", settings], cwd=home, check=True)
    subprocess.run(["bash", "-ec", change], cwd=hostile.root, check=True)
    plain = subprocess.run(["git", "status", "--porcelain"], cwd=hostile.root, check=True, capture_output=True)
    assert plain.stdout == b""
    check_workspace(f"dir:{hostile.root}")
    (hostile.root / "other").write_text("x\n")
    with pytest.raises(TaskError, match="dirty: other"):
        check_workspace(f"dir:{hostile.root}")


def test_a_git_directory_elsewhere_must_name_its_folder(hostile: Hostile) -> None:
    hostile.shell("git init -q --separate-git-dir=../away")
    with pytest.raises(TaskError, match="there is no such folder") as caught:
        hostgit.find_repository(hostile.root / "absent")
    assert "init" not in caught.value.fix
    with pytest.raises(TaskError, match="does not say to which") as caught:
        open_repository(hostile.root)
    assert f"git config core.worktree {hostile.root} there" in caught.value.fix
    hostile.shell("git --git-dir=../away config core.worktree $PWD")
    assert open_repository(hostile.root).root == hostile.root


def test_linked_working_trees_and_submodules_are_read(hostile: Hostile, tmp_path: Path) -> None:
    hostile.shell("git worktree add -q ../linked; git submodule absorbgitdirs; test -f sub/.git")
    for root in (tmp_path / "linked", tmp_path / "repo" / "sub"):
        assert open_repository(root).root == root
        assert prepare_workspace(f"dir:{root}", tmp_path / f"p-{root.name}").tree.is_dir()
    (tmp_path / "linked").rename(tmp_path / "moved")
    with pytest.raises(TaskError, match="belongs to another folder") as caught:
        open_repository(tmp_path / "moved")
    assert "git worktree repair" in caught.value.fix
    hostile.shell("git worktree repair ../moved")
    assert open_repository(tmp_path / "moved").root == tmp_path / "moved"


def test_a_bare_repository_is_read_by_its_path(hostile: Hostile, tmp_path: Path) -> None:
    head = hostile.shell("git clone -q --bare . ../bare.git; git rev-parse HEAD").strip()
    for number, url in enumerate((f"{tmp_path}/bare.git", f"file://{tmp_path}/bare.git")):
        assert (prepare_workspace(f"git:{url}@{head}", tmp_path / f"p{number}").tree / "a.py").exists()


@pytest.mark.parametrize(
    "url", ["ext::sh -c touch% marked", "-upload-pack=touch marked", "x::y", "ssh://-oProxyCommand=x/y"]
)
def test_a_url_starts_nothing(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TaskError, SandboxFault)):
        prepare_workspace(f"git:{url}@{'1' * 40}", tmp_path / "p")
    assert not list(tmp_path.rglob("marked"))
    for commit_name in ("--upload-pack=touch marked", "main", "+refs/*:refs/*"):
        with pytest.raises(TaskError, match="is not a commit"):
            prepare_workspace(f"git:file:///x@{commit_name}", tmp_path / "q")


def test_a_login_in_a_url_is_on_no_command_line_and_in_no_message(tmp_path: Path) -> None:
    """Command lines are read while the server has the request."""
    seen: dict[str, list[str]] = {"logins": [], "commands": []}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen["logins"].append(self.headers.get("Authorization", ""))
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen["commands"].append(path.read_bytes().decode(errors="replace"))
            self.send_error(403)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever).start()
        place = f"127.0.0.1:{server.server_port}"
        login = base64.b64decode(b"bWU6cyU0MGNyZXQtd29yZA==").decode()  # no traceback shall quote it
        with pytest.raises(SandboxFault) as caught:
            prepare_workspace(f"git:http://{login}@{place}/x@{'1' * 40}", tmp_path / "p")
        server.shutdown()
    assert base64.b64decode(seen["logins"][0].removeprefix("Basic ")) == unquote(login).encode()
    fetching = [command for command in seen["commands"] if place in command]
    assert fetching and not any(login[-9:] in command for command in fetching)
    message = "".join(traceback.format_exception(caught.value))
    assert place in message and login[-9:] not in message


@pytest.mark.parametrize("name", ["index", "packed-refs", "refs/heads/main", "../.gitignore", "../sub/.gitattributes"])
def test_a_pipe_or_a_device_that_git_would_read_is_refused(name: str, hostile: Hostile) -> None:
    path = hostile.root / ".git" / name
    path.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda place: place.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make(path)
        refused = pytest.raises(TaskError, match="is not a file|symbolic link")
        with refused, hostgit.open_view(hostgit.find_repository(hostile.root)) as view:
            view.head()
            view.changes()
