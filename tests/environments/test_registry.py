"""Images of a registry: Debian's own on the loopback, and ones that throttle, lie and die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coderepairrl.environments import fetch, prepare_images
from coderepairrl.environments.images import ReadyImage
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import SANDBOX_USER

from .made import archive, entry, folder, layout

USER = SANDBOX_USER if os.geteuid() == 0 else None
LAYERS = [
    archive([folder("testbed"), entry("testbed/app.py", b"1\n")]),
    archive([entry("testbed/new", os.urandom(500_000))]),
]
needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo (sudo apt-get install skopeo)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("docker-registry") is None or shutil.which("skopeo") is None:
        missing = "needs a registry (sudo apt-get install docker-registry skopeo)"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    home, port = tmp_path_factory.mktemp("registry"), free_port()
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(home)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (home / "config.yml").write_text(json.dumps(config))
    with (home / "log").open("wb") as log:
        server = subprocess.Popen(["docker-registry", "serve", home / "config.yml"], stdout=log, stderr=log)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def push(oci: Path, place: str, form: str) -> str:
    """Give the image in a layout to a registry; the digest of the manifest there."""
    said = oci.parent / "digest"
    command = ["skopeo", "--insecure-policy", "copy", "-q", "--dest-tls-verify=false", f"--format={form}"]
    subprocess.run(
        [*command, f"--digestfile={said}", f"oci:{oci}", f"docker://{place}"], check=True, capture_output=True
    )
    return said.read_text().strip()


def prepare(name: str) -> ReadyImage:
    [ready] = prepare_images([name])
    return ready


@pytest.mark.parametrize("form", ["oci", "v2s2"])
def test_tags_and_digests_of_a_registry(registry: str, tmp_path: Path, cache: Path, form: str) -> None:
    layout(tmp_path / "oci", LAYERS, WorkingDir="/testbed", Env=[f"FORM={form}"])
    pushed = push(tmp_path / "oci", f"{registry}/bench/toy-{form}:1", form)
    ready = prepare(f"{registry}/bench/toy-{form}:1")
    assert ready.pinned == f"{registry}/bench/toy-{form}@{pushed}"
    report = ready.image.report or {}
    assert report["asked"] == pushed and (report["converted"] == pushed) == (form == "oci")
    for name in (ready.pinned, f"{registry}/bench/toy-{form}:1@{pushed}", f"elsewhere.example/x@{report['converted']}"):
        assert prepare(name).image == ready.image
    where, _ = rootfs.find(ready.pinned, USER)
    assert (where / "tree/testbed/app.py").read_text() == "1\n"
    blobs = [path for path in (cache / "images/blobs").rglob("*") if path.is_file()]
    shutil.rmtree(where)
    with urllib.request.urlopen(f"http://{registry}/v2/_catalog") as answer:  # control: it is alive
        assert b"bench/toy" in answer.read()
    again = prepare(ready.pinned)
    assert again.image.id == ready.image.id
    assert blobs == [path for path in (cache / "images/blobs").rglob("*") if path.is_file()], (
        "nothing was fetched again"
    )


def test_layers_that_are_here_are_not_fetched_again_and_corrupt_ones_are(
    registry: str, tmp_path: Path, cache: Path
) -> None:
    layout(tmp_path / "1/oci", LAYERS, WorkingDir="/testbed")
    layout(tmp_path / "2/oci", [*LAYERS, archive([entry("testbed/more", b"2")])], WorkingDir="/testbed")
    first = f"{registry}/share@{push(tmp_path / '1/oci', f'{registry}/share:1', 'oci')}"
    second = f"{registry}/share@{push(tmp_path / '2/oci', f'{registry}/share:2', 'oci')}"
    prepare(first)
    store = cache / "images/blobs/sha256"
    large = max(store.iterdir(), key=lambda path: path.stat().st_size)
    before = large.stat().st_mtime_ns
    said: list[str] = []
    prepare_images([second], say=said.append)
    assert (
        "1 image: 0 MiB to fetch, about 1 MiB of disk" in said[0]
        and "fetching 0 MiB" in said[1]
        and large.stat().st_mtime_ns == before
    )
    shutil.rmtree(rootfs.find(first, USER)[0])
    data = bytearray(large.read_bytes())
    data[1000] ^= 1
    large.write_bytes(data)
    said.clear()
    [ready] = prepare_images([first], say=said.append)
    assert any("corrupt" in line and "again" in line for line in said)
    assert (rootfs.find(ready.pinned, USER)[0] / "tree/testbed/new").stat().st_size == 500_000


def test_what_a_registry_does_not_have(registry: str, tmp_path: Path) -> None:
    layout(tmp_path / "oci", LAYERS, WorkingDir="/testbed")
    push(tmp_path / "oci", f"{registry}/here:1", "oci")
    for name in (f"{registry}/here:2", f"{registry}/never:1", f"{registry}/here@sha256:{64 * '0'}"):
        with pytest.raises(TaskError, match="has no image"):
            prepare(name)


def test_killed_at_any_moment_it_goes_on(registry: str, tmp_path: Path, cache: Path) -> None:
    many = [archive([folder("testbed"), entry(f"testbed/{n}", os.urandom(3_000_000))]) for n in range(6)]
    layout(tmp_path / "oci", many, compress=lambda data: data, WorkingDir="/testbed")
    name = f"{registry}/killed@{push(tmp_path / 'oci', f'{registry}/killed:1', 'oci')}"
    program = f"from coderepairrl.environments import prepare_images; prepare_images([{name!r}])"
    for wait in (0.5, 0.8):
        process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stderr=subprocess.DEVNULL)
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    ready = prepare(name)
    where, _ = rootfs.find(ready.pinned, USER)
    assert {path.name: path.stat().st_size for path in (where / "tree/testbed").iterdir()} == dict.fromkeys(
        "012345", 3_000_000
    )
    assert {path.name for path in where.parent.iterdir() if path.is_dir()} == {where.name, "shares"}
    assert not [path for path in (cache / "images/blobs").iterdir() if path.is_dir() and path.name != "sha256"]


class Registry(BaseHTTPRequestHandler):
    """Answers each request as `how` says."""

    how = ""
    later = "0"

    def do_GET(self) -> None:
        if self.how == "dies":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if self.path == "/v2/":
            code, body = 200, b"{}"
        elif self.how == "throttles":
            code, body = 429, b'{"errors":[{"code":"TOOMANYREQUESTS","message":"pull rate limit"}]}'
        elif self.how == "refuses":
            code, body = 403, b'{"errors":[{"code":"DENIED","message":"requested access to the resource is denied"}]}'
        else:
            code, body = 200, b'{"schemaVersion": 2, "layers": []}'
        self.send_response(code)
        self.send_header("Retry-After", self.later)
        self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@needs_skopeo
@pytest.mark.parametrize(
    ("how", "words", "fix"),
    [
        pytest.param("throttles", "throttles us", "skopeo login", marks=pytest.mark.real),  # skopeo tries again
        ("refuses", "not for everybody", "skopeo login"),
        ("lies", "another manifest|does not match", ""),
        pytest.param("dies", "cannot be fetched", "run it again", marks=pytest.mark.real),
    ],
)
def test_a_registry_that_misbehaves_is_named_with_what_helps(
    how: str, words: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "how", how)
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        name = f"127.0.0.1:{server.server_port}/x@sha256:{64 * '1'}"
        with pytest.raises(CodeRepairError, match=words) as refused:
            prepare(name)
        server.shutdown()
    assert fix in refused.value.fix
    assert not list((rootfs.images_cache() / "blobs").rglob("[0-9a-f]*"))


@needs_skopeo
def test_a_registry_that_says_to_come_again_later_is_not_waited_for_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "how", "throttles")
    monkeypatch.setattr(Registry, "later", "600")
    monkeypatch.setattr(fetch, "_SECONDS", 2.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(PrerequisiteError, match="not give it in time: it throttles us") as refused:
            prepare(f"127.0.0.1:{server.server_port}/x@sha256:{64 * '1'}")
        server.shutdown()
    assert "skopeo login" in refused.value.fix


def test_without_skopeo_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="not installed") as refused:
        prepare("docker.io/library/python:3.12")
    assert "install skopeo" in refused.value.fix and "--images" in refused.value.fix
