"""Images of a registry: Debian's own on the loopback, by tag and by digest."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coderepairrl.environments import ReadyImage, fetch, prepare_images
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import SANDBOX_USER

from .made import archive, entry, folder, layout

USER = SANDBOX_USER if os.geteuid() == 0 else None
LAYERS = [
    archive([folder("testbed"), entry("testbed/app.py", b"1\n")]),
    archive([entry("testbed/new", os.urandom(500_000))]),
]


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
    where, _ = rootfs.find_image(ready.pinned, USER)
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
    shutil.rmtree(rootfs.find_image(first, USER)[0])
    data = bytearray(large.read_bytes())
    data[1000] ^= 1
    large.write_bytes(data)
    said.clear()
    [ready] = prepare_images([first], say=said.append)
    assert any("corrupt" in line and "again" in line for line in said)
    assert (rootfs.find_image(ready.pinned, USER)[0] / "tree/testbed/new").stat().st_size == 500_000


def test_what_a_registry_does_not_have(registry: str, tmp_path: Path) -> None:
    layout(tmp_path / "oci", LAYERS, WorkingDir="/testbed")
    push(tmp_path / "oci", f"{registry}/here:1", "oci")
    for name in (f"{registry}/here:2", f"{registry}/never:1", f"{registry}/here@sha256:{64 * '0'}"):
        with pytest.raises(TaskError, match="has no image"):
            prepare(name)


class Throttling(BaseHTTPRequestHandler):
    """A registry that says to come again in ten seconds, and then has another image."""

    asked = 0

    def do_GET(self) -> None:
        Throttling.asked += self.path != "/v2/"
        self.send_response(429 if Throttling.asked == 1 and self.path != "/v2/" else 200)
        self.send_header("Retry-After", "10")
        self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo (sudo apt-get install skopeo)")
@pytest.mark.parametrize(
    ("asked", "error", "words", "fix"),
    [
        (0, PrerequisiteError, "not give it in time: it throttles us", "skopeo login"),
        (1, TaskError, "another manifest", ""),
    ],
)
def test_a_registry_is_neither_waited_for_silently_nor_believed(
    asked: int, error: type[CodeRepairError], words: str, fix: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_SECONDS", 2.0)
    monkeypatch.setattr(Throttling, "asked", asked)
    with ThreadingHTTPServer(("127.0.0.1", 0), Throttling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(error, match=words) as refused:
            prepare(f"127.0.0.1:{server.server_port}/x@sha256:{64 * '1'}")
        server.shutdown()
    assert fix in refused.value.fix
    assert not list((rootfs.images_cache() / "blobs").rglob("[0-9a-f]*"))
