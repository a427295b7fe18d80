"""A package index of the user's own; and what is prepared from it, killed at any point, loses nothing."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments.build import Specification, build_environment
from coderepairrl.environments.index import (
    explain_failed_build,
    find_mirrors,
    make_uv_settings,
    read_user_index,
    serve_proxy,
)
from coderepairrl.environments.verify import check_unchanged
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.processes.caches import environments_cache, git_cache
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import sandbox_user
from commands import CRRL
from projects import SHOP, build_wheel, cache, system_python

from .made import archive, entry, folder, layout
from .test_build import project

__all__ = ["cache"]
WHEEL = "crrl_test_helper-1.0-py3-none-any.whl"
LOGIN = "somebody:s%40crecy"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Packages(BaseHTTPRequestHandler):
    """An index below ``/team/simple/`` of `wheels`, that answers for one of its files as `how` says."""

    wheels = Path()
    how = ""
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.headers["Authorization"] != f"Basic {base64.b64encode(b'somebody:s@crecy').decode()}":
            return self.answer(401, b"")
        host = self.headers["Host"]
        file = f"http://{LOGIN}@{host}" if self.how == "login" else ""
        match self.path.strip("/").split("/"):
            case ["team", "simple", name] if found := list(self.wheels.glob(f"{name.replace('-', '_')}-*")):
                if self.how == "gone" and found[0].name == WHEEL:
                    return self.answer(404, b"")
                links = (f'<a href="{file}/files/{each.name}#sha256={sha256(each)}">{each.name}</a>' for each in found)
                return self.answer(200, " ".join(links).encode(), "text/html")
            case ["files", name]:
                return self.send(name)
            case ["secret"]:
                return self.answer(200, b"the keys of the kingdom")
        self.answer(404, b"")

    def send(self, name: str) -> None:
        data = (self.wheels / name).read_bytes()
        if name != WHEEL:
            return self.answer(200, data)
        if self.how in ("429", "503"):
            return self.answer(int(self.how), b"")
        self.answer(
            200, data.replace(b"def nearly", b"def nearby") if self.how == "damaged" else data, cut=self.how == "dies"
        )

    do_HEAD = do_GET

    def answer(self, code: int, data: bytes, kind: str = "application/octet-stream", cut: bool = False) -> None:
        self.send_response(code)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Packages]]:
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(Packages, "wheels", cache / "wheels")
    for name in ("setuptools", "wheel"):  # every environment has them
        build_wheel(cache / "wheels", name, code="")
    monkeypatch.setattr(Packages, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Packages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://{LOGIN}@127.0.0.1:{server.server_port}/team/simple/")
        yield Packages
        server.shutdown()


CURIOUS = SHOP | {
    "backend.py": SHOP["backend.py"]
    + """
import os, re, subprocess, urllib.error, urllib.request
seen = [f"{pid}: " + open(f"/proc/{pid}/environ").read() for pid in os.listdir("/proc") if pid.isdigit()
        and os.access(f"/proc/{pid}/environ", os.R_OK)]
seen += [str(os.environ), subprocess.run(["ps", "axeww"], capture_output=True, text=True).stdout]
here = os.environ["UV_DEFAULT_INDEX"]
plain = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for path in ("/secret", "/team/simple/../../secret", "/team/simple/%2e%2e/%2e%2e/secret", "/files/other"):
    try:
        seen.append(plain.open("http://" + here.split("/")[2] + path, timeout=9).read().decode())
    except urllib.error.HTTPError as error:
        seen.append(f"{path} is refused: {error.code}")
page = plain.open(here + "crrl-test-helper/", timeout=9).read().decode()
words = " ".join([*seen, page]).replace("\\n", " ")
raise SystemExit(f"seen: {words[-500:]}; crecy: {'crecy' in words}")
"""
}


@pytest.mark.parametrize("how", ["", "login"])
async def test_packages_come_from_an_index_that_asks_for_a_login(
    index: type[Packages], how: str, tmp_path: Path, isolating: None
) -> None:
    """Files may be anywhere on its host. A build cannot read the login, and reaches no other path."""
    index.how = how
    workspace = project(tmp_path / "shop")
    made = await build_environment(Specification(workspace=workspace, python=system_python(), extras="[tests]"))
    assert made.packages["crrl_test_helper"] == "1.0"
    assert f"GET /files/{WHEEL}" in index.asked
    curious = project(tmp_path / "curious", CURIOUS)
    with pytest.raises(TaskError, match="/files/other is refused: 403") as caught:
        await build_environment(Specification(workspace=curious, python=system_python()))
    assert "crecy: False" in str(caught.value) and "kingdom" not in str(caught.value)
    assert not any("secret" in asked for asked in index.asked)


@pytest.mark.parametrize(
    ("how", "error", "words", "fix"),
    [
        ("429", PrerequisiteError, "throttles", "wait"),
        ("503", PrerequisiteError, "broke off.*503", "again"),
        ("dies", PrerequisiteError, "broke off", "again"),
        ("damaged", PrerequisiteError, "damaged", "again"),
        ("gone", TaskError, "crrl-test-helper", "UV_FIND_LINKS"),
        ("unknown", PrerequisiteError, "another login", "UV_DEFAULT_INDEX"),
        ("unreachable", PrerequisiteError, "reach", "UV_DEFAULT_INDEX"),
    ],
)
async def test_an_index_that_fails_is_named_with_what_helps(
    index: type[Packages], how: str, error: type[CodeRepairError], words: str, fix: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, isolating: None,
) -> None:  # fmt: skip
    index.how = how
    url = os.environ["UV_DEFAULT_INDEX"]
    if how == "unknown":
        monkeypatch.setenv("UV_DEFAULT_INDEX", url.replace("s%40crecy", "wrong"))
    if how == "unreachable":
        monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/team/simple/")
    asked = Specification(workspace=project(tmp_path / "shop"), python=system_python(), extras="[tests]")
    with pytest.raises(error, match=words) as caught:
        await build_environment(asked)
    assert fix in caught.value.fix and "crecy" not in str(caught.value)
    assert not asked.folder.exists(), "nothing half built is there"
    index.how = ""
    monkeypatch.setenv("UV_DEFAULT_INDEX", url)
    assert (await build_environment(asked)).packages["crrl_test_helper"] == "1.0"


def test_links_and_pages_of_others_are_given_without_their_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://me:secret@example.org/simple")
    monkeypatch.setenv(
        "UV_FIND_LINKS", "https://me:secret@example.org/wheels https://me:secret@other.example/x /wheels"
    )
    index = read_user_index()
    assert index is not None and index.paths == ("/simple/", "/wheels/")
    assert make_uv_settings(index, "http://127.0.0.1:8") == {
        "UV_DEFAULT_INDEX": "http://127.0.0.1:8/simple",
        "UV_FIND_LINKS": "http://127.0.0.1:8/wheels,https://other.example/x,/wheels",
    }


USER = sandbox_user()


def tasks(home: Path) -> Path:
    """A file of tasks: commits of two mirrors, two images of a layout, two environments from the index."""
    generator = random.Random(1)
    made: list[dict[str, Any]] = []
    for name in ("one", "two"):
        work = home / name
        for number in range(3):
            workspace = project(work, SHOP | {"blob": generator.randbytes(1 << 19).hex(), "number": str(number)})
            made.append({"workspace": workspace.replace("git:", "git:file://")})
        asked = Specification(workspace=made[-1]["workspace"], python=system_python(), extras="[tests]")
        made[-1]["environment"] = str(asked)
        layers = [archive([folder("testbed"), *(entry(f"testbed/{n}", generator.randbytes(5000)) for n in range(300))])]
        digest = layout(home / "oci", [*layers, archive([entry("testbed/own", name.encode())])], WorkingDir="/testbed")
        made.append({"workspace": f"image:oci:{home}/oci@{digest}"})
    common = {"prompt": "p", "language": "python", "reference": "--- /dev/null\n+++ b/a\n@@ -0,0 +1 @@\n+a\n"}
    lines = (json.dumps({"id": f"t{number}", **common, **each}) for number, each in enumerate(made))
    (home / "tasks.jsonl").write_text("\n".join(lines))
    return home / "tasks.jsonl"


def facts(source: Path) -> Iterator[tuple[str, str]]:
    """What is ready in the cache: each environment, image and commit, and a digest of all that is in it."""
    for record in environments_cache().glob("*/environment.json"):
        check_unchanged(record.parent)
        yield record.parent.name, json.loads(record.read_text())["digest"]
    for record in rootfs.images_folder(USER).glob("*/image.json"):
        tree = record.parent / "tree"
        about = [(str(path.relative_to(tree)), path.lstat().st_mode, content(path)) for path in sorted(tree.rglob("*"))]
        yield record.parent.name, hashlib.sha256(repr(about).encode()).hexdigest()
    for line in source.read_text().splitlines():
        url, _, commit = json.loads(line)["workspace"].rpartition("@")
        repository = git_cache() / hashlib.sha256(url.removeprefix("git:").encode()).hexdigest()[:20]
        git = ["git", f"--git-dir={repository}"]
        if (
            url.startswith("git:")
            and not subprocess.run([*git, "cat-file", "-e", commit], capture_output=True).returncode
        ):
            packed = subprocess.run([*git, "archive", commit], capture_output=True, check=True).stdout
            yield commit, hashlib.sha256(packed).hexdigest()


def content(path: Path) -> bytes:
    return os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""


def start(source: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*CRRL, "tasks", "prepare", "jsonl", f"path={source}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def count_paths(cache: Path) -> int:
    """Count files and folders, which shows how far a preparation is."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(cache))


def test_killed_at_any_point_it_loses_nothing(
    cache: Path, index: type[Packages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """Two processes at once are killed at random points; two more then finish with what an undisturbed one has."""
    source, kills = tasks(tmp_path), 2
    undisturbed = start(source)
    _, printed = undisturbed.communicate()
    assert undisturbed.returncode == 0, printed.decode()
    expected, whole = dict(facts(source)), count_paths(cache)
    assert len(expected) == 10
    (cache / "again").mkdir(mode=0o755)
    monkeypatch.setenv("CRRL_CACHE", str(cache / "again"))
    generator, kept = random.Random(kills), dict[str, str]()
    for number in range(kills):
        enough = generator.randrange(whole * (number + 1) // kills)
        running = [start(source) for _ in range(2)]
        while count_paths(cache / "again") < enough and any(each.poll() is None for each in running):
            time.sleep(0.02)
        time.sleep(generator.random() / 5)
        for each in running:
            os.killpg(each.pid, signal.SIGKILL)
            each.communicate()
        ready = dict(facts(source))
        assert kept.items() <= ready.items() <= expected.items(), f"kill {number}: something is lost, or not whole"
        kept = ready
    running = [start(source) for _ in range(2)]
    printed = b"".join(each.communicate()[1] for each in running)
    assert not any(each.returncode for each in running), printed.decode()
    assert dict(facts(source)) == expected
    left = [
        path.name for path in (cache / "again").rglob("*") if "partial" in path.name or path.name.startswith("tmp_")
    ]
    assert not left, "what was begun is gone"


async def test_dockerfiles_use_this_machines_mirror_and_proxy_of_apt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("needs apt")

    async def answer(target: str) -> bytes:
        find_mirrors.cache_clear()
        async with serve_proxy(tmp_path / "socket", (), None, find_mirrors()):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "socket"))
            writer.write(f"GET {target} HTTP/1.1\r\n\r\n".encode())
            said = await reader.read()
            writer.close()
        head, _, body = said.partition(b"\r\n\r\n")
        return body if head.startswith(b"HTTP/1.1 200 ") else head[:12]

    async def echo_target(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(target), target))
        writer.close()

    server = await asyncio.start_server(echo_target, "127.0.0.1", 0)
    async with server:
        here = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        (tmp_path / "list").write_text(f"deb {here}/mirrors/debian bookworm main\n")
        settings = f'Dir::Etc::sourcelist "{tmp_path}/list"; Dir::Etc::sourceparts "-";\n'
        (tmp_path / "apt.conf").write_text(settings)
        monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
        assert await answer("http://deb.debian.org/debian/dists/x") == b"/mirrors/debian/dists/x"
        assert await answer(f"{here}/other") == b"/other"
        for refused in ("http://deb.debian.org/debian/../x", "http://example.org/debian/x", "http://127.0.0.1:1/x"):
            assert await answer(refused) == b"HTTP/1.1 403", refused
        (tmp_path / "apt.conf").write_text(settings + f'Acquire::http::Proxy "{here}";\n')
        assert await answer("http://archive.ubuntu.com/ubuntu/x") == b"http://archive.ubuntu.com/ubuntu/x"
    find_mirrors.cache_clear()


def test_a_failed_build_names_the_package_and_what_the_machine_lacks() -> None:
    printed = "  x Failed to build `psutil==5.4.2`\n  ├─▶ The build backend returned an error\n" + "x" * 900
    with pytest.raises(TaskError, match=r"for git:a: psutil==5\.4\.2, which it needs, cannot be built: x"):
        raise explain_failed_build("git:a", printed, [])
    for said in ("error: command 'gcc' failed: No such file or directory", "No such file or directory: 'c++'"):
        with pytest.raises(PrerequisiteError, match=r"no C compiler.*psutil==5\.4\.2") as caught:
            raise explain_failed_build("git:a", printed + said, [])
        assert caught.value.fix == "apt-get install build-essential"
