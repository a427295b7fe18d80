"""Docker and Podman for real: daemon and storage are the test's own, the image is made of this machine's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import grading
from coderepairrl.checks import redteam
from coderepairrl.errors import PrerequisiteError, SandboxFault, TaskError
from coderepairrl.sandbox import container
from coderepairrl.sandbox.container import Container
from coderepairrl.types import Task

from .conftest import FAMILIES, LIMITS, Make, find_successful_attacks, pass_exam
from .images import import_image, own_podman


@pytest.fixture(scope="session")
def docker(root: Path) -> Iterator[dict[str, Any]]:
    if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("docker") is None:
        pytest.skip("needs root and Docker (sudo apt-get install docker.io)")
    home = Path(tempfile.mkdtemp(prefix="crrl-docker-"))
    socket, log = home / "socket", home / "log"
    alone = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false", "--bridge=none"]
    places = [f"--data-root={home}/data", f"--exec-root={home}/exec", f"--pidfile={home}/pid"]
    with log.open("wb") as sink:
        daemon = subprocess.Popen(["dockerd", "-H", f"unix://{socket}", *places, *alone], stdout=sink, stderr=sink)
    command = ["docker", "-H", f"unix://{socket}"]
    try:
        while subprocess.run([*command, "version"], capture_output=True).returncode != 0:
            if daemon.poll() is not None:
                pytest.fail(f"dockerd does not run here: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        import_image(command, root)
        yield {"image": "crrl-test:1", "flags": command[1:]}
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def podman(root: Path) -> Iterator[dict[str, Any]]:
    with own_podman(*(["--runtime=runc"] if shutil.which("runc") else [])) as command:
        import_image(command, root)
        yield {"image": "localhost/crrl-test:1", "flags": command[1:]}


@pytest.fixture(params=["docker", "podman"])
def runtime(request: pytest.FixtureRequest, make: Make) -> Make:
    """Makes backends of Docker or Podman."""
    options = request.getfixturevalue(request.param)
    return lambda **changed: make(request.param, **options | changed)


async def test_the_exam(runtime: Make) -> None:
    await pass_exam(runtime(**LIMITS))


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_attack_succeeds(runtime: Make, family: str) -> None:
    assert await find_successful_attacks(runtime(**redteam.TIGHT), family) == []


async def test_the_workspace_of_a_task_can_be_an_image(runtime: Make) -> None:
    backend = runtime(image="")
    task = Task("t", "", "python", f"image:{runtime()._image}", b"")
    async with backend.open(task) as box:
        assert box.workdir == "/testbed"
        listed = await box.exec(["bash", "-c", "git ls-files; git log --all --oneline | wc -l; ./run; cat .git/file"])
        assert listed.output.startswith(b"again.py\napp.py\ndeep/file\nlink\nrun\n1\nrun\n") and not listed.ok
        await box.exec(["sed", "-i", "s/a - b/a + b/", "app.py"])
        patch = await box.diff()
        assert b"+    return a + b\n" in patch and patch.count(b"diff --git") == 1
    async with backend.open(task) as box:
        assert not await grading.apply_patch(box, patch) and await box.diff() == patch
    with pytest.raises(PrerequisiteError, match="no image"):
        async with backend.open(Task("t", "", "python", "image:nothing:1", b"")):
            pass


async def test_an_image_that_has_this_package_shows_no_answers(
    runtime: Make, root: Path, tmp_path: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the place where an image of Python has an installed package."""
    plain = runtime()
    subprocess.run(["cp", "-al", root, tmp_path / "root"], check=True)
    answer = tmp_path / "root/usr/local/lib/python3.12/site-packages/coderepairrl/tasks/add/fix.patch"
    answer.parent.mkdir(parents=True)
    answer.write_text("the answer\n")
    import_image([plain.name, *plain._flags], tmp_path / "root", "crrl-answers:1")

    async def found() -> bytes:
        async with runtime(image=plain._image.replace("test", "answers")).open(task) as box:
            return (await box.exec(["find", "/usr/local", "-name", "fix.patch"])).output

    assert await found() == b""
    monkeypatch.setattr(container, "_PROBE", "")
    assert b"fix.patch" in await found(), "control"


async def test_closed_and_killed_containers_are_removed(runtime: Make, task: Task) -> None:
    """Also if the program that started the container is killed."""
    backend = runtime()
    for kill in (False, True):
        async with backend.open(task) as box:
            assert (await box.exec(["git", "status", "--porcelain"])).output == b""
            assert b"crrl-sandbox" in backend._call("ps", "--format", "{{.Names}}").stdout.encode()  # control
            if kill:
                box.guest.process.kill()
        assert backend._call("ps", "--quiet").stdout == ""
        while backend._call("ps", "--all", "--quiet").stdout:  # the daemon removes what has ended in its own time
            pass


async def test_a_guest_that_is_killed_is_a_fault(runtime: Make, task: Task) -> None:
    backend = runtime()
    async with backend.open(task) as box:
        backend._call("kill", backend._container_name(box.folder))
        with pytest.raises(SandboxFault):
            await box.exec(["true"])


FAKE = """#!/bin/sh
case "$1" in
info) echo '{info}' ;;
image) echo /testbed ;;
run) echo 'Error: OCI runtime error: cgroups in hybrid mode not supported' >&2; exit {code} ;;
esac
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Container]:
    """Docker that says `info` of itself, and whose containers end with `code`."""

    def make(info: str, code: int = 0, **options: Any) -> Container:
        (tmp_path / "docker").write_text(FAKE.format(info=info, code=code))
        (tmp_path / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return container.Docker(**options)

    return make


async def test_limits_are_kept_by_the_groups_that_the_runtime_has_or_refused(
    fake: Callable[..., Container], task: Task
) -> None:
    backend = fake('{"PidsLimit": true, "MemoryLimit": true}', cpus=2)
    backend.require()
    assert backend.missing_controllers == ("cpu",)
    words = backend._isolation_arguments("/w", 0)
    assert "--pids-limit" in words and "--memory" in words and "--cpus" not in words
    with pytest.raises(PrerequisiteError, match="cpus cannot be limited"):
        async with backend.open(task):
            pass
    backend.close()


@pytest.mark.parametrize(
    ("info", "code", "says", "fix"),
    [
        ('{"SecurityOptions": ["name=rootless"]}', 0, "rootless", "podman"),
        ("{}", 126, "cannot start containers here: .*hybrid mode", "--runtime"),
        ("{}", 1, "cannot run python:1 as a sandbox", "sandbox.options.image"),
    ],
)
def test_what_keeps_containers_from_working_is_named(
    fake: Callable[..., Container], info: str, code: int, says: str, fix: str
) -> None:
    backend = fake(info, code, image="python:1")
    with pytest.raises(PrerequisiteError, match=says) as caught:
        backend.require()
    assert fix in caught.value.fix
    backend.close()


def test_the_environment_of_a_task_is_not_for_the_python_of_an_image(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="docker cannot use"):
        container.Docker().launch(tmp_path, None, None, tmp_path)  # type: ignore[arg-type]
