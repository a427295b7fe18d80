"""From an image's name, in a folder, an archive or a registry, to a tree: by digest, once, whole or not at all."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments import fetch
from coderepairrl.environments.fetch import NoRoom
from coderepairrl.environments.images import ReadyImage, _write_record, prepare_images
from coderepairrl.environments.verify import EnvironmentState, verify_states
from coderepairrl.errors import CodeRepairError, CombinedError, PrerequisiteError, TaskError
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.types import Task
from needs import need

from .conftest import HISTORY, make_repository, tree_of
from .made import (
    archive,
    compress_layer,
    configuration,
    digest,
    entry,
    folder,
    hard_link,
    layout,
    link,
    pack_folder,
    write_docker_archive,
)
from .test_history import mentions

USER = sandbox_user()
LAYERS = [
    archive([folder("testbed"), entry("testbed/app.py", b"1\n"), entry("testbed/old", b"1"), entry("etc/passwd",
        b"root:x:0:0:root:/root:/bin/sh\nwho:x:77:88:who:/home/who:/bin/sh\n"), entry("etc/group", b"some:x:99:\n")]),
    archive([entry("testbed/.wh.old"), entry("testbed/new", b"2"), hard_link("testbed/again", "testbed/app.py")]),
]  # fmt: skip


def prepare(name: str, **options: Path) -> ReadyImage:
    [ready] = prepare_images([name], **options)  # type: ignore[arg-type]
    return ready


def zstandard(data: bytes) -> bytes:
    need(shutil.which("zstd"), "no zstd (sudo apt-get install zstd)")
    return subprocess.run(["zstd", "-q"], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("compress", [compress_layer, zstandard, lzma.compress])
def test_a_layout_is_unpacked(tmp_path: Path, compress: object) -> None:
    asked = layout(
        tmp_path / "oci", LAYERS, "v1", compress, WorkingDir="/testbed", Env=["A=b=c", "PATH=/x"], User="who:some"
    )
    ready = prepare(f"oci:{tmp_path}/oci:v1")
    assert ready.pinned == f"oci:{tmp_path}/oci@{asked}" and prepare(ready.pinned).image == ready.image
    image = ready.image
    assert (image.workdir, image.env, image.home) == ("/testbed", {"A": "b=c", "PATH": "/x"}, "/home/who")
    assert (image.user, image.group) == (77, 99)
    tree = tree_of(ready)
    assert sorted(path.name for path in (tree / "testbed").iterdir()) == ["again", "app.py", "new"]
    assert (tree / "testbed/again").samefile(tree / "testbed/app.py")
    assert {path.lstat().st_uid for path in tree.rglob("*")} == {USER if USER is not None else os.getuid()}
    assert not list(tree.parents[1].glob(".partial*"))


def test_tags_are_resolved_once_and_digests_need_no_source(tmp_path: Path) -> None:
    first = layout(tmp_path / "oci", LAYERS, "latest", WorkingDir="/testbed")
    ready = prepare(f"oci:{tmp_path}/oci:latest")
    (tmp_path / "oci/index.json").unlink()
    second = layout(tmp_path / "oci", LAYERS[:1], "latest", WorkingDir="/testbed")
    assert first != second and prepare(f"oci:{tmp_path}/oci:latest").pinned == ready.pinned
    assert rootfs.pin_image(f"oci:{tmp_path}/oci:latest") == ready.pinned
    shutil.rmtree(tmp_path / "oci")
    assert prepare(f"registry.example/some/where:tag@{first}").image == ready.image, "it is here by its digest"
    with pytest.raises(TaskError, match="not prepared"):
        rootfs.find_image(f"registry.example/some/where:tag@{second}", USER)


def test_an_archive_of_docker_save_and_an_offered_folder(tmp_path: Path) -> None:
    asked = write_docker_archive(tmp_path / "image.tar", LAYERS, "bench/toy:1", WorkingDir="/testbed")
    by_tag = prepare(f"docker-archive:{tmp_path}/image.tar:bench/toy:1")
    assert by_tag.pinned.endswith(asked) and (tree_of(by_tag) / "testbed/new").read_text() == "2"
    other = layout(tmp_path / "oci", LAYERS[:1], "registry.example/bench:1", WorkingDir="/testbed")
    offered = prepare(f"registry.example/bench@{other}", offered=tmp_path / "oci")
    named = prepare("registry.example/bench:1", offered=tmp_path / "oci")
    assert named.pinned == offered.pinned == f"registry.example/bench@{other}"
    assert (tree_of(offered) / "testbed/old").exists()


def test_a_layout_of_many_images_in_a_chain_of_layers(tmp_path: Path) -> None:
    """As all of SWE-bench Verified is published: one folder, each image the one before with a layer more, and packs of
    the later ones in each other's repositories; named without a tag."""
    make_repository(tmp_path / "future", HISTORY)
    packs = list((tmp_path / "future/.git/objects/pack").glob("pack-*[kx]"))
    later = [entry(f"testbed/.git/objects/pack/{path.name}", path.read_bytes()) for path in packs]
    layers = [archive([folder("opt"), entry("opt/conda", b"all environments" * 100)])]
    names = []
    for number in range(3):
        script = "git init -q -b main; git config user.name n; git config user.email e;"
        make_repository(
            tmp_path / f"{number}/testbed", f"{script} echo {number} > app.py; git add -A; git commit -qm {number}"
        )
        below = [entry("testbed/.wh..wh..opq")] if number else []
        layers = [*layers, archive([*below, *later]), pack_folder(tmp_path / f"{number}")]
        names.append(f"logicstar/sweb.eval.x86_64.a_1776_a-{number}")
        layout(tmp_path / "oci", layers, names[-1], compress=lambda data: data, WorkingDir="/testbed/")
    manifests = json.loads((tmp_path / "oci/index.json").read_text())["manifests"]
    assert len(manifests) == 3
    made = prepare_images([f"{name}:latest" for name in names], offered=tmp_path / "oci")
    for number, ready in enumerate(made):
        tree = tree_of(ready)
        assert (tree / "testbed/app.py").read_text() == f"{number}\n"
        log = subprocess.run(["git", "-c", "safe.directory=*", "log", "--all", "--format=%s"],
                             cwd=tree / "testbed", capture_output=True, text=True, check=True)  # fmt: skip
        assert log.stdout == f"{number}\n" and not mentions(tree)
        assert (tree / "opt/conda").samefile(tree_of(made[0]) / "opt/conda")


def blob_of(oci: Path, data: bytes) -> Path:
    return oci / "blobs" / digest(data).replace(":", "/")


def test_a_flipped_byte_is_found_and_its_fix_repairs_shared_files_too(tmp_path: Path) -> None:
    """A pipe without a reader does not stop the check."""
    pipe = entry("testbed/pipe", type=tarfile.FIFOTYPE)
    library = entry("opt/library.py", b"the same in both images\n")
    names = []
    for number in range(2):
        extra = archive([library, pipe, entry("testbed/own", str(number).encode())])
        layout(tmp_path / "oci", [*LAYERS, extra], f"v{number}", WorkingDir="/testbed")
        names.append(f"oci:{tmp_path}/oci:v{number}")
    made = [prepare(name) for name in names]
    some = [Task(f"a/{n}", "repair it", "python", f"image:{name}", b"") for n, name in enumerate(names)]
    pinned = [ready.pinned for ready in made]
    assert verify_states([*some, some[1]]) == [
        EnvironmentState(pinned[0], "as built", 1),
        EnvironmentState(pinned[1], "as built", 2),
    ]
    folder, _ = rootfs.find_image(names[0], USER)
    for damaged, hit in (("tree/opt/library.py", [0, 1]), ("tree/testbed/own", [0]), ("manifest.json", [0])):
        path = folder / damaged
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        found = verify_states(some)
        assert [each.state for each in found] == ["changed" if n in hit else "as built" for n in range(2)]
        for each in found:
            command, _, then = each.fix.partition(", and ")
            if each.state == "changed":
                assert then == "prepare its tasks again (crrl tasks prepare)"
                subprocess.run(command.replace("rm -r", "rm -rf"), shell=True, check=True)
        assert [each.state for each in verify_states(some)] == ["missing" if n in hit else "as built" for n in range(2)]
        for name in names:
            prepare(name)
        assert [each.state for each in verify_states(some)] == ["as built"] * 2


def test_corrupt_blobs_are_refused_and_leave_no_files(tmp_path: Path) -> None:
    asked = layout(tmp_path / "oci", LAYERS, WorkingDir="/testbed")
    name = f"oci:{tmp_path}/oci@{asked}"
    config = configuration(LAYERS, WorkingDir="/testbed")
    for data, word in ((compress_layer(LAYERS[1]), "corrupt"), (config, "corrupt")):
        path = blob_of(tmp_path / "oci", data)
        path.write_bytes(data[:-3] + b"xxx")
        with pytest.raises(TaskError, match=word):
            prepare(name)
        path.write_bytes(data)
    gone = blob_of(tmp_path / "oci", compress_layer(LAYERS[0]))
    gone.rename(tmp_path / "away")
    with pytest.raises((TaskError, PrerequisiteError)):
        prepare(name)
    (tmp_path / "away").rename(gone)
    assert not [path for path in rootfs.images_folder(USER).iterdir() if path.name != "shares" and path.is_dir()]
    assert (tree_of(prepare(name)) / "testbed/new").exists()


LINKED = [archive([folder("app"), entry("app/x", b"1"), link("srv", "/app"), link("testbed", "/usr")])]


@pytest.mark.parametrize(
    ("layers", "settings", "workdir"),
    [
        (LAYERS, {"WorkingDir": "/nowhere/../etc/passwd"}, "/testbed"),
        (LAYERS, {"WorkingDir": "/"}, "/testbed"),
        (LAYERS, {}, "/testbed"),
        (LINKED, {"WorkingDir": "/srv"}, "/app"),
    ],
)
def test_a_working_folder_is_found_in_the_image(
    layers: list[bytes], settings: dict[str, str], workdir: str, tmp_path: Path
) -> None:
    """Also by links, which are followed inside the image only."""
    layout(tmp_path / "oci", layers, "x", **settings)
    assert prepare(f"oci:{tmp_path}/oci:x").image.workdir == workdir


def first_layer(data: bytes) -> bytes:
    return compress_layer(LAYERS[0])


@pytest.mark.parametrize(
    ("name", "layers", "settings", "words"),
    [
        ("oci:{}/oci:x", LAYERS, {"User": "nobody-we-know"}, "nobody-we-know"),
        ("oci:{}/oci:x", LAYERS, {"User": "-5"}, "-5"),
        ("oci:{}/oci:x", LAYERS, {"compress": first_layer, "WorkingDir": "/testbed"}, "its archive is"),
        ("oci:{}/oci:x", LINKED, {}, "no working folder"),
        ("oci:{}/oci:x", LAYERS, {"architecture": "s390x", "WorkingDir": "/testbed"}, "s390x"),
        ("oci:{}/oci:x", [archive([entry("../x", b"1")])], {}, "refused"),
        ("registry/x@sha256:12", LAYERS, {}, "not a digest"),
        ("-flag", LAYERS, {}, "not a name"),
        ("docker-archive:{}/oci/index.json", LAYERS, {}, "not an archive"),
    ],
)
def test_an_image_that_cannot_be_is_refused(
    name: str, layers: list[bytes], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    layout(tmp_path / "oci", layers, "x", **settings)
    with pytest.raises(TaskError, match=words):
        prepare(name.format(tmp_path))


def test_users_and_mount_points_are_no_links_out(tmp_path: Path) -> None:
    """What we read of an image, and mount upon, is in the image."""
    (tmp_path / "passwd").write_text("who:x:5:5::/:\n")
    evil = [archive([folder("testbed"), link("etc", str(tmp_path)), link("tmp", "/testbed"), link("run", str(tmp_path)),
                     link("proc", "/"), entry("dev", b"a file")])]  # fmt: skip
    layout(tmp_path / "oci", evil, "x", User="who")
    with pytest.raises(TaskError, match="a user or group that it does not have"):
        prepare(f"oci:{tmp_path}/oci:x")
    layout(tmp_path / "oci", evil, "y")
    tree = tree_of(prepare(f"oci:{tmp_path}/oci:y"))
    assert all((tree / name).is_dir() and not (tree / name).is_symlink() for name in ("tmp", "run/crrl", "proc", "dev"))
    assert {path.name for path in tmp_path.iterdir()} == {"passwd", "oci"}


def test_all_problems_are_reported_and_the_others_are_prepared(tmp_path: Path) -> None:
    layout(tmp_path / "oci", LAYERS, "x", WorkingDir="/testbed")
    with pytest.raises(CombinedError):
        prepare_images(["-a", f"oci:{tmp_path}/oci:x", "-b"])
    rootfs.find_image(f"oci:{tmp_path}/oci:x", USER)


def test_layers_that_images_share_are_counted_once(tmp_path: Path) -> None:
    """Compressed layers count three times their size."""
    shared = archive([entry("opt/large", os.urandom(5 << 20))])
    for number, compress in enumerate((compress_layer, compress_layer, bytes)):
        own = archive([entry("testbed/own", os.urandom(1 << 20))])
        layout(tmp_path / "oci", [*LAYERS, shared, own], str(number), compress, WorkingDir="/testbed")
    for numbers, room in (("01", 3 * 7), ("2", 6), ("012", 5 + 3 * 2 + 1)):
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NoRoom):
            patch.setattr(fetch, "SPARE", 1 << 60)
            prepare_images([f"oci:{tmp_path}/oci:{number}" for number in numbers], say=said.append)
        assert f"0 MiB to fetch, about {room} MiB" in said[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = archive([folder("testbed"), *(entry(f"testbed/{n}", os.urandom(1 << 20)) for n in range(12))])
    layout(tmp_path / "oci", [large], "x", WorkingDir="/testbed")
    monkeypatch.setattr(fetch, "SPARE", -(1 << 40))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", cache], check=True)
    try:
        with pytest.raises(PrerequisiteError, match="room|space") as refused:
            prepare(f"oci:{tmp_path}/oci:x")
        assert "free some disk space" in refused.value.fix
        assert not list(rootfs.images_folder(USER).glob(".partial*")) and not list(
            rootfs.images_folder(USER).glob("[0-9a-f]*")
        )
    finally:
        subprocess.run(["umount", cache], check=True)


def test_images_made_at_a_time_may_note_one_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write their record before one of them renames it."""
    both = threading.Barrier(2, timeout=60)
    replace = Path.replace

    def together(self: Path, target: Path) -> Path:
        both.wait()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", together)
    noted = tmp_path / "sha256-1.json"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: _write_record(noted, name, "id"), ("one", "two")))
    assert json.loads(noted.read_text())["pinned"] in ("one", "two") and list(tmp_path.iterdir()) == [noted]


PUSHED = [
    archive([folder("testbed"), entry("testbed/app.py", b"1\n")]),
    archive([entry("testbed/new", os.urandom(500_000))]),
]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    there = shutil.which("docker-registry") and shutil.which("skopeo")
    need(there, "needs a registry (sudo apt-get install docker-registry skopeo)")
    home = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
    """Push the image of a layout to a registry; return the digest of its manifest there."""
    said = oci.parent / "digest"
    command = ["skopeo", "--insecure-policy", "copy", "-q", "--dest-tls-verify=false", f"--format={form}"]
    subprocess.run(
        [*command, f"--digestfile={said}", f"oci:{oci}", f"docker://{place}"], check=True, capture_output=True
    )
    return said.read_text().strip()


@pytest.mark.parametrize("form", ["oci", "v2s2"])
def test_tags_and_digests_of_a_registry(registry: str, tmp_path: Path, form: str) -> None:
    layout(tmp_path / "oci", PUSHED, WorkingDir="/testbed", Env=[f"FORM={form}"])
    pushed = push(tmp_path / "oci", f"{registry}/bench/toy-{form}:1", form)
    ready = prepare(f"{registry}/bench/toy-{form}:1")
    assert ready.pinned == f"{registry}/bench/toy-{form}@{pushed}"
    report = ready.image.report or {}
    assert report["asked"] == pushed and (report["converted"] == pushed) == (form == "oci")
    for name in (ready.pinned, f"{registry}/bench/toy-{form}:1@{pushed}", f"elsewhere.example/x@{report['converted']}"):
        assert prepare(name).image == ready.image
    where, _ = rootfs.find_image(ready.pinned, USER)
    assert (where / "tree/testbed/app.py").read_text() == "1\n"


def test_layers_that_are_here_are_not_fetched_again_and_corrupt_ones_are(
    registry: str, tmp_path: Path, cache: Path
) -> None:
    layout(tmp_path / "1/oci", PUSHED, WorkingDir="/testbed")
    layout(tmp_path / "2/oci", [*PUSHED, archive([entry("testbed/more", b"2")])], WorkingDir="/testbed")
    first = f"{registry}/share@{push(tmp_path / '1/oci', f'{registry}/share:1', 'oci')}"
    second = f"{registry}/share@{push(tmp_path / '2/oci', f'{registry}/share:2', 'oci')}"
    prepare(first)
    store = cache / "images/blobs/sha256"
    large = max(store.iterdir(), key=lambda path: path.stat().st_size)
    before = large.stat().st_mtime_ns
    said: list[str] = []
    prepare_images([second], say=said.append)
    assert "1 image: 0 MiB to fetch, about 1 MiB of disk" in said[0] and "fetching 0 MiB" in said[1]
    assert large.stat().st_mtime_ns == before
    shutil.rmtree(rootfs.find_image(first, USER)[0])
    data = bytearray(large.read_bytes())
    data[1000] ^= 1
    large.write_bytes(data)
    said.clear()
    [ready] = prepare_images([first], say=said.append)
    assert any("corrupt" in line and "again" in line for line in said)
    assert (rootfs.find_image(ready.pinned, USER)[0] / "tree/testbed/new").stat().st_size == 500_000


def test_images_that_a_registry_does_not_have_are_named(registry: str, tmp_path: Path) -> None:
    layout(tmp_path / "oci", PUSHED, WorkingDir="/testbed")
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
def test_a_registry_that_throttles_or_lies_is_named(
    asked: int, error: type[CodeRepairError], words: str, fix: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(Throttling, "asked", asked)
    with ThreadingHTTPServer(("127.0.0.1", 0), Throttling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(error, match=words) as refused:
            prepare(f"127.0.0.1:{server.server_port}/x@sha256:{64 * '1'}")
        server.shutdown()
    assert fix in refused.value.fix
    assert not list((rootfs.images_cache() / "blobs").rglob("[0-9a-f]*"))
