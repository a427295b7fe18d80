"""Images in bubblewrap: their own programs, user, variables and folder, and every promise of a sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coderepairrl
from coderepairrl.checks import redteam
from coderepairrl.checks import sandbox as exam
from coderepairrl.environments.images import prepare_images
from coderepairrl.errors import TaskError
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Task
from sandbox.conftest import run_as_somebody
from sandbox.images import root_file_system

from .conftest import open_folder, open_overlays
from .made import archive, entry, folder, layout, link

CONDA = archive(
    [
        folder("opt"), folder("opt/env"), folder("opt/env/bin"),
        entry("opt/env/bin/activate", b"export VIRTUAL_ENV=/opt/env; PATH=/opt/env/bin:$PATH\n"),
        entry("opt/env/bin/tool", b"#!/bin/sh\necho tool of the image\n", mode=0o755),
        entry("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\nagent:x:1234:55:a:/home/agent:/bin/bash\n"),
        folder("root", 0o700), folder("home/agent", 0o750), entry("root/.profile", b"x", mode=0o000),
        entry("usr/bin/setuid", b"#!/bin/sh\nid\n", mode=0o6755), entry("app/.wh.x"),
    ]
)  # fmt: skip


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, isolating: None) -> Iterator[Bubblewrap]:
    copy = request.param == "copy"
    with open_overlays(copy=copy, memory=256 << 20, file_bytes=16 << 20, disk_bytes=64 << 20) as made:
        yield made


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One cache for all of these tests, whose images are similar."""
    monkeypatch.setenv("CRRL_CACHE", str(home))
    return home


@pytest.fixture
def oci(tmp_path: Path) -> Path:
    return tmp_path / "oci"


def task(oci: Path, *layers: bytes, **settings: object) -> Task:
    made = layout(oci, layers, compress=lambda data: data, **settings)
    [ready] = prepare_images([f"oci:{oci}@{made}"])
    return Task("t", "", "python", f"image:{ready.pinned}", b"")


async def said(box: object, script: str) -> str:
    result = await box.exec(["bash", "-c", script])  # type: ignore[attr-defined]
    return str(result.output.decode())


async def test_an_image_runs_as_it_says(backend: Bubblewrap, oci: Path, programs: bytes, testbed: bytes) -> None:
    settings = {"Env": ["A=b c", "PATH=/opt/env/bin:/usr/bin:/bin"], "User": "agent", "WorkingDir": "/testbed/"}
    one = task(oci, programs, testbed, CONDA, **settings)
    copied = "images read-only" in backend.info().workspaces
    async with backend.open(one) as box:
        assert box.workdir == "/testbed"
        assert await said(box, "pwd; id -u; id -g; echo $A; tool; cat built.so") == (
            "/testbed\n1234\n55\nb c\ntool of the image\nnot in git"
        )
        assert await said(box, "echo $HOME") == ("/tmp\n" if copied else "/home/agent\n")
        assert await said(box, ". /opt/env/bin/activate && echo $VIRTUAL_ENV && command -v tool") == (
            "/opt/env\n/opt/env/bin/tool\n"
        )
        modes = await said(box, "stat -c %u:%a /usr/bin/setuid /root /testbed /tmp")
        assert modes.split() == ["1234:755", "1234:700", "1234:755", "1234:1777"]
        assert "RW" not in await said(box, "touch /usr/x && echo RW") or not copied
        assert (await box.exec(["git", "status", "--porcelain"])).output == b"?? built.so\n"
        assert await said(box, "git describe; git log --oneline --all | wc -l") != ""
        assert (
            b"THE FIX"
            not in (
                await box.exec(["bash", "-c", "grep -rl 'THE FIX' /testbed /etc /opt /root /home /run /tmp"])
            ).output
        )
    async with backend.open(one) as box:
        assert await said(box, "ls /usr/x 2>&1") == "ls: cannot access '/usr/x': No such file or directory\n"


async def test_the_root_of_an_image_has_no_capability(
    backend: Bubblewrap, oci: Path, programs: bytes, testbed: bytes
) -> None:
    async with backend.open(task(oci, programs, testbed, CONDA)) as box:
        assert await said(box, "id -u; grep Cap /proc/self/status | tr -d 'Cap0:\\t\\n'") == "0\nInhPrmEffBndAmb"
        for attempt in ("chown 5 app.py", "echo x > /run/crrl/guest.pyc", "mv /run/crrl /run/y"):
            assert not (await box.exec(["bash", "-c", attempt])).ok, attempt
        assert (await box.exec(["test", "-e", "/run/crrl/guest.pyc"])).ok


async def test_nothing_of_the_host_is_seen(
    backend: Bubblewrap, oci: Path, programs: bytes, testbed: bytes, cache: Path, tmp_path: Path
) -> None:
    """Neither files, nor the place of the image, nor the builder's name server."""
    leaky = archive([entry("etc/resolv.conf", b"nameserver 10.9.8.7\n"), entry("etc/hosts", b"10.9.8.7 builder\n")])
    (tmp_path / "secret").write_text("of the host")
    async with backend.open(task(oci, programs, testbed, leaky)) as box:
        mounts = await said(box, "cat /proc/self/mountinfo")
        if "images an overlay" not in backend.info().workspaces:  # else a mount says what it shows
            mounts = mounts.partition("\n")[2]
        assert str(cache) not in mounts and "trees-" not in mounts
        assert "10.9.8.7" not in await said(box, "cat /etc/resolv.conf /etc/hosts")
        seen = await said(box, "find / -xdev -name 'crrl*' -o -xdev -name secret -o -xdev -path '*pytest-of*'")
        assert seen.split() == ["/run/crrl"]
        assert await said(box, "ls /run/crrl") == "guest.pyc\npython\nworkspace\n"


async def test_an_image_without_python_or_git_works(backend: Bubblewrap, oci: Path, tmp_path: Path) -> None:
    """The guest brings its own."""
    root = tmp_path / "root"
    root_file_system(root, "bash tar cat")
    (root / "testbed/x").write_text("1")
    made = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True).stdout
    async with backend.open(task(oci, made)) as box:
        assert await said(box, "cat x; command -v python3 git || echo neither") == "1neither\n"
        await box.write("x", b"2")
        assert b"+2" in await box.diff()


async def test_images_that_cannot_be_opened_name_their_fix(
    backend: Bubblewrap, oci: Path, programs: bytes, testbed: bytes, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="not prepared") as refused:
        backend.check_image("nothing@sha256:" + 64 * "0")
    assert "crrl tasks prepare" in refused.value.fix
    with pytest.raises(TaskError, match="not prepared"):
        async with backend.open(Task("t", "", "", "image:nothing:1", b"")):
            pass
    one = task(oci, programs, testbed)
    backend.check_image(one.workspace.removeprefix("image:"))
    shown = Bubblewrap(binds=["/opt"])
    linked = task(oci, programs, testbed, archive([link("opt", "/usr")]))
    with pytest.raises(TaskError, match="a file or a link"):
        async with shown.open(linked):
            pass
    shown.close()
    chosen = Bubblewrap(commands=["ls"])
    with pytest.raises(TaskError, match="commands"):
        async with chosen.open(one):
            pass
    chosen.close()


def test_an_image_that_lost_a_file_is_refused_at_the_start_and_unpacked_again(
    backend: Bubblewrap, oci: Path, programs: bytes, testbed: bytes
) -> None:
    image = task(oci, programs, testbed, archive([entry("testbed/lost.py", b"x")])).workspace.removeprefix("image:")
    unpacked, _ = rootfs.find_image(image, backend.user)
    backend.check_image(image)
    for lost in ("tree/testbed/lost.py", "git/refs/heads/main", "manifest.json"):
        content = (unpacked / lost).read_bytes()
        (unpacked / lost).unlink()
        with pytest.raises(TaskError, match="is not as it was unpacked") as refused:
            backend.check_image(image)
        assert str(unpacked) in refused.value.fix
        (unpacked / lost).write_bytes(content)
    (unpacked / "tree/testbed/lost.py").chmod(0o755)
    with pytest.raises(TaskError, match=r"unpacked: lost\.py"):
        backend.check_image(image)
    subprocess.run(["rm", "-r", unpacked], check=True)
    task(oci, programs, testbed, archive([entry("testbed/lost.py", b"x")]))
    backend.check_image(image)


async def test_an_image_that_has_this_package_shows_no_answers(
    backend: Bubblewrap, oci: Path, programs: bytes, testbed: bytes
) -> None:
    where = "usr/local/lib/python3.12/site-packages/coderepairrl/tasks/fix.patch"
    async with backend.open(task(oci, programs, testbed, archive([entry(where, b"answer")]))) as box:
        assert await said(box, "find /usr/local -name fix.patch; ls -d /usr/local/lib/python3.12/*/*") == (
            "/usr/local/lib/python3.12/site-packages/coderepairrl\n"
        )


class Redirected(Bubblewrap):
    """Opens each ``dir:`` workspace as an image with the same files in ``/testbed``, and with their history."""

    def __init__(self, oci: Path, programs: bytes, **options: Any) -> None:
        super().__init__(**options)
        self.oci, self.programs = oci, programs
        self.known: dict[str, Task] = {}

    def open(self, given: Task) -> Any:
        if given.workspace not in self.known:
            made = self.oci.parent / f"root-{len(self.known)}"
            shutil.copytree(given.workspace.removeprefix("dir:"), made / "testbed", symlinks=True)
            script = (
                "git init -q . && git config user.name n && git config user.email e && git add -A && git commit -qm x"
            )
            if not (made / "testbed/.git").exists():
                subprocess.run(["bash", "-ec", script], cwd=made / "testbed", check=True)
            layer = subprocess.run(["tar", "-C", made, "-c", "."], capture_output=True, check=True).stdout
            self.known[given.workspace] = task(self.oci, self.programs, layer)
        return super().open(self.known[given.workspace])


@pytest.mark.parametrize("copy", [False, True])
async def test_the_exam(oci: Path, programs: bytes, isolating: None, copy: bool) -> None:
    made = Redirected(oci, programs, copy=copy, memory=256 << 20, file_bytes=16 << 20, disk_bytes=64 << 20)
    checks = await exam.examine_sandbox(made)
    made.close()
    assert [(check.name, check.detail) for check in checks if not check.ok] == [] and len(checks) > 10


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", sorted({attack.family for attack in redteam.list_attacks()}))
async def test_no_attack_succeeds(oci: Path, programs: bytes, isolating: None, family: str) -> None:
    made = Redirected(oci, programs, **redteam.TIGHT)
    outcomes = await redteam.run_attacks(made, [family], controls=False)
    made.close()
    succeeded = {outcome.name for outcome in outcomes if outcome.succeeded}
    # it asks who it is: root already, of no capability; and an overlay keeps what is written beside the workspace
    assert succeeded <= {"a set-user-id program", "any other folder"} and outcomes


PROGRAM = """
import asyncio, os
from coderepairrl.environments.images import prepare_images
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Task
assert os.getuid() != 0
[ready] = prepare_images([NAME])
async def ask(copy):
    backend = Bubblewrap(copy=copy)
    backend.require()
    async with backend.open(Task("t", "", "", f"image:{ready.pinned}", b"")) as box:
        script = "id -u; git log --oneline --all | wc -l; cat /etc/hidden; echo fixed > app.py; grep -r 'THE FIX' ."
        said = (await box.exec(["bash", "-c", script])).output
        if not copy:
            script = "rm -rf /usr/lib/python3* && mkdir /usr/lib/python3 && ls /usr/lib/python3 | wc -l"
            said += (await box.exec(["bash", "-c", script])).output
        patch = await box.diff()
    print(said, patch.count(b"+fixed"), backend.info().workspaces)
    backend.close()
asyncio.run(ask(False))
asyncio.run(ask(True))
"""


def copy_imported_packages(target: Path) -> None:
    """Copy this package and the installed packages that it imports: other users cannot read root's folders."""
    program = (
        "import sys, coderepairrl.environments.images, coderepairrl.sandbox.bwrap\n"
        "print(*(each.__file__ for each in sys.modules.values() if getattr(each, '__file__', None)))"
    )
    files = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    sources = {Path(coderepairrl.__file__).parent}
    for parts in (Path(file).parts for file in files if "/site-packages/" in file):
        sources.add(Path(*parts[: parts.index("site-packages") + 2]))  # also of namespace packages
    for source in sources:
        if source.is_dir():
            shutil.copytree(source, target / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_prepares_and_opens_images(
    oci: Path, programs: bytes, testbed: bytes, isolating: None, cache: Path
) -> None:
    hidden = archive([entry("etc/hidden", b"mode 000\n", mode=0, uid=5)])
    with open_folder() as home:
        made = layout(home / "oci", [programs, testbed, hidden], compress=lambda data: data)
        copy_imported_packages(home)
        program = PROGRAM.replace("NAME", repr(f"oci:{home}/oci@{made}"))
        done = run_as_somebody(home, program)
        assert done.returncode == 0, done.stderr
        ours = run_as_somebody(home, program, CRRL_CACHE=str(cache))
        assert "PrerequisiteError" in ours.stderr and f"cannot write to {cache}" in ours.stderr
        overlay, copied = done.stdout.splitlines()
        assert overlay.startswith(r"b'0\n4\nmode 000\n0\n' 1 ") or "no overlay" in overlay
        assert copied.startswith(r"b'0\n4\nmode 000\n' 1 copied")
