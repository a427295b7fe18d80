"""Backends by name, what this machine can do, and the fake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError, ExitCode, PrerequisiteError, SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.sandbox import bwrap as bwrap_module
from coderepairrl.sandbox import sandlock as sandlock_module
from coderepairrl.sandbox.bwrap import Bubblewrap, install_command
from coderepairrl.sandbox.fake import ScriptedBackend, ScriptedSandbox
from coderepairrl.types import ExecResult, Task

TASK = Task("t", "", "python", "dir:/nowhere", b"")


@pytest.mark.parametrize(
    "name", ["bwrap", "sandlock", "unsafe-local", "scripted", "coderepairrl.sandbox.fake:ScriptedBackend"]
)
def test_names_and_import_paths(name: str) -> None:
    assert isinstance(sandbox.make(name), SandboxBackend)


def test_unknown_names_and_options_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="bwarp") as caught:
        sandbox.make("bwarp")
    assert "'bwrap'" in caught.value.fix
    for options, expected in (({"memry": 1}, "'memory'"), ({"memory": "2G"}, ""), ({"processes": 0}, "")):
        with pytest.raises(ConfigError, match=next(iter(options))) as caught:
            sandbox.make("bwrap", **options)
        assert expected in caught.value.fix
    for name in ("nowhere.at.all:X", "coderepairrl.sandbox.fake:Missing"):
        with pytest.raises(ConfigError):
            sandbox.make(name)


def test_what_works_here_is_the_default(bwrap: Bubblewrap) -> None:
    assert sandbox.choose().name == "bwrap"
    assert {entry.name for entry in sandbox.available()} >= {"bwrap", "unsafe-local"}


async def test_without_bubblewrap_the_fix_is_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And nothing weaker than sandlock, which is not there either, takes its place."""
    monkeypatch.setattr(bwrap_module.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandlock_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PrerequisiteError) as caught:
        sandbox.choose()
    first, other = caught.value.fix.split("; or: ")
    assert first == install_command("bubblewrap") and other.endswith("pip install sandlock==0.9.0")
    assert caught.value.exit_code == ExitCode.PREREQUISITE
    with pytest.raises(PrerequisiteError, match="bubblewrap is not installed"):
        sandbox.make("bwrap").require()
    sandbox.make("scripted").require()  # has nothing to say
    with pytest.raises(PrerequisiteError):
        async with sandbox.make("bwrap").open(TASK):
            pass


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=debian\n", "sudo apt-get install bubblewrap"),
        ('ID=rocky\nID_LIKE="rhel centos fedora"\n', "sudo dnf install bubblewrap"),
        ("ID=arch\n", "sudo pacman -S bubblewrap"),
        ("ID=opensuse-leap\nID_LIKE='suse opensuse'\n", "sudo zypper install bubblewrap"),
    ],
)
def test_the_install_command_is_this_distributions(
    release: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "os-release").write_text(release)
    for user, expected in ((1000, command), (0, command.removeprefix("sudo "))):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert install_command("bubblewrap", tmp_path / "os-release") == expected


async def test_what_is_bound_is_seen_and_read_only(bwrap: Bubblewrap, task: Task, tmp_path: Path) -> None:
    tools = Path("/opt") if Path("/opt").is_dir() else Path("/srv")
    async with bwrap.open(task) as box:
        assert not (await box.exec(["ls", str(tools)])).ok  # control
    backend = Bubblewrap(binds=[str(tools)], env={"PATH": "/usr/bin", "MINE": "1"})
    async with backend.open(task) as box:
        assert (await box.exec(["ls", str(tools)])).ok
        assert not (await box.exec(["touch", f"{tools}/x"])).ok
        assert (await box.exec(["bash", "-c", "echo $PATH $MINE"])).output == b"/usr/bin 1\n"
    backend.close()


@pytest.mark.parametrize(
    "place", ["/tmp/checks", "/var/tmp/checks", "/tmp", "/dev/shm/x", "/workspace", "/opt/../tmp/x"]
)
def test_what_a_sandbox_would_hide_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}, for it has a") as caught:
        sandbox.make("bwrap", [place])
    assert "CRRL_CACHE" in caught.value.fix
    with pytest.raises(ConfigError, match="'checks' does not begin with a slash"):
        sandbox.make("bwrap", binds=["/opt", "checks"])


def test_what_cannot_be_bound_is_named(bwrap: Bubblewrap) -> None:
    backend = Bubblewrap(binds=["/nowhere"])
    with pytest.raises(PrerequisiteError, match="nowhere") as caught:
        backend.require()
    assert "sandbox.options.binds" in caught.value.fix
    backend.close()


async def test_an_allow_list_leaves_no_other_program(bwrap: Bubblewrap, task: Task) -> None:
    """The commands of the original's shell, and ways to what is not among them."""
    allowed = ["ls", "cd", "pwd", "find", "cat", "head", "tail", "grep", "awk", "sed", "sort", "git"]
    others = ("touch x", "python3 -c pass", "env true", "perl -e 1")
    async with bwrap.open(task) as box:
        assert [(await box.exec(["bash", "-c", command])).ok for command in others[:3]] == [True] * 3  # control
    backend = Bubblewrap(commands=allowed)
    async with backend.open(task) as box:
        script = "cd bin && pwd && cd .. && find . -name app.py | head -1 && grep -c return app.py && git status -s"
        done = await box.exec(["bash", "-c", f"{script}; git log --oneline | awk '{{ print NF }}'"])
        assert done.output == b"/workspace/bin\n./app.py\n1\n2\n", done.output
        assert [(await box.exec(["bash", "-c", command])).exit_code for command in others] == [127] * 4
        await box.exec(["bash", "-c", "find . -maxdepth 0 -exec touch x \\;; awk 'BEGIN { system(\"touch x\") }'"])
        assert not (await box.exec(["cat", "x"])).ok
        await box.write("app.py", b"x\n")
        assert b"+x\n" in await box.diff()
    backend.close()
    with pytest.raises(PrerequisiteError, match="no nonsense here"):
        Bubblewrap(commands=["nonsense"]).require()


# -- the fake


async def test_the_fake_keeps_files_and_answers_from_its_script() -> None:
    def rewrite(argv: tuple[str, ...], box: ScriptedSandbox) -> ExecResult:
        box.files["a.py"] = b"x = 2\n"
        return ExecResult(0, b"done")

    backend = ScriptedBackend({"a.py": b"x = 1\n"}, {"fix": rewrite, "ls -l": b"listing", "die": SandboxFault("x")})
    async with backend.open(TASK) as box:
        assert isinstance(box, Sandbox)
        assert (await box.exec(["ls", "-l"])).output == b"listing"
        assert (await box.exec(["ls"])).exit_code == 127
        assert await box.diff() == b""
        await box.exec(["fix"])
        await box.write("new.py", b"no newline")
        assert (await box.diff()).count(b"diff --git") == 2 and b"-x = 1\n+x = 2\n" in await box.diff()
        with pytest.raises(SandboxFault):
            await box.exec(["die"])
        with pytest.raises(FileNotFoundError):
            await box.read("missing")
        with pytest.raises(PermissionError):
            await box.write("../x", b"")
    assert backend.sandboxes[0].calls[0] == ("ls", "-l")
    with pytest.raises(SandboxFault):
        await backend.sandboxes[0].read("a.py")
    with pytest.raises(SandboxFault):
        async with ScriptedBackend(fault=SandboxFault("no room")).open(TASK):
            pass


@pytest.mark.parametrize("limit", ["processes", "tmp_bytes"])
def test_unsafe_local_refuses_limits_it_could_not_keep(limit: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot bound {limit}"):
        sandbox.make("unsafe-local", **{limit: 8})
