"""From an image's name to a tree that sandboxes open: by digest, once, whole or not at all."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coderepairrl.environments import NoRoom, ReadyImage, _write_record, fetch, prepare_images, verify_states
from coderepairrl.environments.verify import State
from coderepairrl.errors import PrerequisiteError, Several, TaskError
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import SANDBOX_USER
from coderepairrl.types import Task

from .conftest import HISTORY, repository
from .made import archive, configuration, digest, entry, folder, gzipped, hard, layout, link, packed, saved
from .test_history import mentions

USER = SANDBOX_USER if os.geteuid() == 0 else None
LAYERS = [
    archive([folder("testbed"), entry("testbed/app.py", b"1\n"), entry("testbed/old", b"1"), entry("etc/passwd",
        b"root:x:0:0:root:/root:/bin/sh\nwho:x:77:88:who:/home/who:/bin/sh\n"), entry("etc/group", b"some:x:99:\n")]),
    archive([entry("testbed/.wh.old"), entry("testbed/new", b"2"), hard("testbed/again", "testbed/app.py")]),
]  # fmt: skip


def prepare(name: str, **options: Path) -> ReadyImage:
    [ready] = prepare_images([name], **options)  # type: ignore[arg-type]
    return ready


def tree_of(ready: ReadyImage) -> Path:
    where, _ = rootfs.find_image(ready.pinned, USER)
    return where / "tree"


def zstandard(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no zstd: .ci/run installs it")
        pytest.skip("no zstd (sudo apt-get install zstd)")
    return subprocess.run(["zstd", "-q"], input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("compress", [gzipped, zstandard, lzma.compress])
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


def test_tags_are_resolved_once_and_digests_say_it_all(tmp_path: Path) -> None:
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
    asked = saved(tmp_path / "image.tar", LAYERS, "bench/toy:1", WorkingDir="/testbed")
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
    repository(tmp_path / "future", HISTORY)
    packs = list((tmp_path / "future/.git/objects/pack").glob("pack-*[kx]"))
    later = [entry(f"testbed/.git/objects/pack/{path.name}", path.read_bytes()) for path in packs]
    layers = [archive([folder("opt"), entry("opt/conda", b"all environments" * 100)])]
    names = []
    for number in range(3):
        script = "git init -q -b main; git config user.name n; git config user.email e;"
        repository(
            tmp_path / f"{number}/testbed", f"{script} echo {number} > app.py; git add -A; git commit -qm {number}"
        )
        below = [entry("testbed/.wh..wh..opq")] if number else []
        layers = [*layers, archive([*below, *later]), packed(tmp_path / f"{number}")]
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


def test_a_flipped_byte_is_found_and_what_helps_repairs_it_though_images_share_the_file(tmp_path: Path) -> None:
    """A pipe, which nobody reads, is no obstacle."""
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
    assert verify_states([*some, some[1]]) == [State(pinned[0], "as built", 1), State(pinned[1], "as built", 2)]
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


def test_what_is_corrupt_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    asked = layout(tmp_path / "oci", LAYERS, WorkingDir="/testbed")
    name = f"oci:{tmp_path}/oci@{asked}"
    config = configuration(LAYERS, WorkingDir="/testbed")
    for data, word in ((gzipped(LAYERS[1]), "corrupt"), (config, "corrupt")):
        path = blob_of(tmp_path / "oci", data)
        path.write_bytes(data[:-3] + b"xxx")
        with pytest.raises(TaskError, match=word):
            prepare(name)
        path.write_bytes(data)
    gone = blob_of(tmp_path / "oci", gzipped(LAYERS[0]))
    gone.rename(tmp_path / "away")
    with pytest.raises((TaskError, PrerequisiteError)):
        prepare(name)
    (tmp_path / "away").rename(gone)
    assert not [path for path in rootfs.images_folder(USER).iterdir() if path.name != "shares" and path.is_dir()]
    assert (tree_of(prepare(name)) / "testbed/new").exists()


def test_a_layer_that_is_not_what_the_configuration_says(tmp_path: Path) -> None:
    """Its blob is whole, by the manifest's digest: but it is another one."""
    layout(tmp_path / "oci", LAYERS, "x", lambda data: gzipped(LAYERS[0]), WorkingDir="/testbed")
    with pytest.raises(TaskError, match="its archive is"):
        prepare(f"oci:{tmp_path}/oci:x")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"WorkingDir": "/nowhere/../etc/passwd"}, None),
        ({"WorkingDir": "/"}, None),
        ({"User": "nobody-we-know"}, "nobody-we-know"),
        ({"User": "-5"}, "-5"),
        ({}, None),
    ],
)
def test_settings_that_say_too_little_or_nonsense(tmp_path: Path, settings: dict[str, str], words: str | None) -> None:
    layout(tmp_path / "oci", LAYERS, "x", **settings)
    if words is None:
        assert prepare(f"oci:{tmp_path}/oci:x").image.workdir == "/testbed"
    else:
        with pytest.raises(TaskError, match=words):
            prepare(f"oci:{tmp_path}/oci:x")


def test_an_image_without_a_working_folder_and_a_hostile_one(tmp_path: Path) -> None:
    """The working folder may be reached by links, which lead nowhere but into the image."""
    bare = [archive([folder("app"), entry("app/x", b"1"), link("srv", "/app"), link("testbed", str(tmp_path))])]
    layout(tmp_path / "oci", bare, "none")
    with pytest.raises(TaskError, match="no working folder"):
        prepare(f"oci:{tmp_path}/oci:none")
    layout(tmp_path / "oci", bare, "linked", WorkingDir="/srv")
    assert prepare(f"oci:{tmp_path}/oci:linked").image.workdir == "/app"
    layout(tmp_path / "oci", [archive([entry("../x", b"1")])], "hostile")
    with pytest.raises(TaskError, match="refused"):
        prepare(f"oci:{tmp_path}/oci:hostile")


def test_users_and_mount_points_are_no_links_out(tmp_path: Path) -> None:
    """What we read of an image, and mount upon, is in the image."""
    (tmp_path / "passwd").write_text("who:x:5:5::/:\n")
    evil = [archive([folder("testbed"), link("etc", str(tmp_path)), link("tmp", "/testbed"), link("run", str(tmp_path)),
                     link("proc", "/"), entry("dev", b"a file")])]  # fmt: skip
    layout(tmp_path / "oci", evil, "x", User="who")
    with pytest.raises(TaskError, match="whom it does not know"):
        prepare(f"oci:{tmp_path}/oci:x")
    layout(tmp_path / "oci", evil, "y")
    tree = tree_of(prepare(f"oci:{tmp_path}/oci:y"))
    assert all((tree / name).is_dir() and not (tree / name).is_symlink() for name in ("tmp", "run/crrl", "proc", "dev"))
    assert {path.name for path in tmp_path.iterdir()} == {"passwd", "oci"}


def test_an_image_of_another_machine_is_refused(tmp_path: Path) -> None:
    oci = tmp_path / "oci"
    layout(oci, LAYERS, "x", WorkingDir="/testbed")
    whole = json.dumps(json.loads(configuration(LAYERS)) | {"architecture": "s390x"}).encode()
    manifest = {"schemaVersion": 2, "config": {"digest": digest(whole), "size": len(whole)},
                "layers": [{"digest": digest(gzipped(layer)), "size": 1} for layer in LAYERS]}  # fmt: skip
    for data in (whole, json.dumps(manifest).encode()):
        blob_of(oci, data).write_bytes(data)
    with pytest.raises(TaskError, match="s390x"):
        prepare(f"oci:{oci}@{digest(json.dumps(manifest).encode())}")


@pytest.mark.parametrize(
    ("name", "words"),
    [("registry/x@sha256:12", "not a digest"), ("-flag", "not a name"), ("docker-archive:{}", "not an archive")],
)
def test_what_names_no_image_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "text").write_text("text")
    with pytest.raises(TaskError, match=words):
        prepare(name.format(tmp_path / "text"))


def test_all_problems_are_reported_and_the_others_are_prepared(tmp_path: Path) -> None:
    layout(tmp_path / "oci", LAYERS, "x", WorkingDir="/testbed")
    with pytest.raises(Several):
        prepare_images(["-a", f"oci:{tmp_path}/oci:x", "-b"])
    rootfs.find_image(f"oci:{tmp_path}/oci:x", USER)


def test_layers_that_images_share_are_counted_once(tmp_path: Path) -> None:
    """Compressed ones as three times as much."""
    shared = archive([entry("opt/large", os.urandom(5 << 20))])
    for number, compress in enumerate((gzipped, gzipped, bytes)):
        own = archive([entry("testbed/own", os.urandom(1 << 20))])
        layout(tmp_path / "oci", [*LAYERS, shared, own], str(number), compress, WorkingDir="/testbed")
    for numbers, need in (("01", 3 * 7), ("2", 6), ("012", 5 + 3 * 2 + 1)):
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch, pytest.raises(NoRoom):
            patch.setattr(fetch, "SPARE", 1 << 60)
            prepare_images([f"oci:{tmp_path}/oci:{number}" for number in numbers], say=said.append)
        assert f"0 MiB to fetch, about {need} MiB" in said[0]


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
    """Both have written what they note before one of them gives it its name."""
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
