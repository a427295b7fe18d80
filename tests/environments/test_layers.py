"""Layers: put on each other as the image specification and Podman have it, and nowhere else, whatever they say."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments import fetch, layers, manifests, trees
from coderepairrl.sandbox.privileges import SANDBOX_USER

from .conftest import give_to_one_user, list_tree
from .made import NOW, Made, archive, entry, folder, hard_link, layout, link


class Refused(Exception):
    pass


def apply(target: Path, *of: Sequence[Made] | bytes, shares: Path | None = None) -> list[dict[str, Any]]:
    """Unpack layers as `trees` does, each by a process of its own."""
    tree = target / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    reports = []
    for layer in of:
        data = layer if isinstance(layer, bytes) else archive(layer)
        command = [sys.executable, "-ISB", layers.__file__, str(tree), str(shares or "")]
        done = subprocess.run(command, input=data, capture_output=True)
        if done.returncode != 0:
            raise Refused(done.stderr.decode())
        reports.append(json.loads(done.stdout))
    return reports


def listed(tree: Path) -> dict[str, str]:
    """Map paths to content of files, targets of links, and slashes for folders."""
    found = {}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = "/" if path.is_dir() else path.read_text()
    return found


def test_later_layers_replace_hide_and_empty(tmp_path: Path) -> None:
    first = [
        folder("a"), entry("a/kept", b"1"), entry("a/gone", b"1"), folder("a/deep"), entry("a/deep/old", b"1"),
        folder("b"), entry("b/old", b"1"), folder("b/sub"), entry("b/sub/old", b"1"), entry("c", b"file"),
        folder("d"), entry("d/below", b"1"), link("e", "a"), folder("f"), entry("f/inner", b"1"),
    ]  # fmt: skip
    second = [
        entry("a/.wh.gone"), entry("a/.wh.deep"), folder("b"), folder("b/sub"), entry("b/sub/new", b"2"),
        entry("b/.wh..wh..opq"), entry("b/new", b"2"), folder("c"), entry("c/in", b"2"), entry("d", b"now a file"),
        folder("e"), entry("e/real", b"2"), link("f", "/a"), entry(".wh..wh.plnk"), entry("a/.wh.never"),
    ]  # fmt: skip
    apply(tmp_path, first, second)
    assert listed(tmp_path / "tree") == {
        "a": "/", "a/kept": "1", "b": "/", "b/new": "2", "b/sub": "/", "b/sub/new": "2", "c": "/", "c/in": "2",
        "d": "now a file", "e": "/", "e/real": "2", "f": "-> /a",
    }  # fmt: skip


def test_a_whiteout_hides_only_what_lies_below(tmp_path: Path) -> None:
    """An opaque folder keeps the files of its own layer, at whatever place the layer has the mark."""
    apply(
        tmp_path,
        [folder("a"), entry("a/old", b"1"), folder("a/x"), entry("a/x/old", b"1")],
        [entry("a/x/new", b"2"), entry("a/.wh.x"), entry("a/here", b"2"), entry("a/.wh..wh..opq")],
    )
    assert listed(tmp_path / "tree") == {"a": "/", "a/here": "2", "a/x": "/", "a/x/new": "2"}


def test_modes_times_and_links_are_kept_and_what_cannot_be_is_listed(tmp_path: Path) -> None:
    [report] = apply(
        tmp_path,
        [
            folder("secret", 0o500, mtime=NOW - 5), entry("secret/none", b"x", mode=0o000),
            entry("program", b"x", mode=0o4755, uid=12, gid=34), entry("two", b"y", mode=0o640),
            hard_link("again", "./two"),
            folder("sticky", 0o1777), link("dangling", "/no", mtime=NOW - 9), entry("pipe", type=tarfile.FIFOTYPE),
            entry("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3), hard_link("null too", "null"),
            entry("exact", b"z", pax_headers={"mtime": "1600000000.123456789"}),
            entry("capable", b"z", pax_headers={"SCHILY.xattr.security.capability": "x"}),
        ],
    )  # fmt: skip
    tree = tmp_path / "tree"
    modes = {
        name: oct(os.lstat(tree / name).st_mode & 0o7777) for name in ("secret", "secret/none", "program", "sticky")
    }
    assert modes == {"secret": "0o700", "secret/none": "0o600", "program": "0o755", "sticky": "0o1777"}
    assert (tree / "again").samefile(tree / "two") and (tree / "pipe").is_fifo()
    assert (tree / "secret").stat().st_mtime == NOW - 5 and (tree / "dangling").lstat().st_mtime == NOW - 9
    assert (tree / "exact").stat().st_mtime_ns == 1_600_000_000_123_456_789
    assert not (tree / "null").exists() and not (tree / "null too").exists()
    assert report["left_out"] == {
        "owner may not read and write": ["secret", "secret/none"],
        "set-id bits": ["program"],
        "devices": ["null"],
        "extended attributes": ["capable"],
    }
    assert report["counts"]["owners"] == 1


def test_a_folder_keeps_its_time_when_a_later_layer_changes_what_is_in_it(tmp_path: Path) -> None:
    apply(tmp_path, [folder("a", mtime=NOW - 7), entry("a/x", b"1")], [entry("a/.wh.x"), entry("a/y", b"2")])
    assert (tmp_path / "tree/a").stat().st_mtime == NOW - 7


HOSTILE: dict[str, list[Made]] = {
    "a name that climbs": [entry("../outside", b"x")],
    "one that climbs later": [folder("a"), entry("a/../../outside", b"x")],
    "no name": [entry("", b"x")],
    "a file for a root": [entry("./", b"x")],
    "a whiteout of the folder above": [folder("a"), entry("a/.wh..", b""), entry("a/.wh...", b"")],
    "a whiteout of nothing": [entry(".wh.", b"")],
    "a hard link out": [hard_link("x", "../outside")],
    "a hard link to nothing": [hard_link("x", "missing")],
    "a hard link to a folder": [folder("a"), hard_link("x", "a")],
    "links in a circle": [link("a", "b"), link("b", "a"), entry("a/x", b"x")],
    "a way through a file": [entry("a", b"x"), entry("a/b", b"x")],
    "an unknown kind": [entry("x", type=b"Z")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layers_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("untouched")
    with pytest.raises(Refused):
        apply(tmp_path, [entry("before", b"1")], HOSTILE[name])
    assert (tmp_path / "outside").read_text() == "untouched" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("way", ["/", "..", "../../../..", "/../..", "deep/../../.."])
def test_links_lead_nowhere_but_into_the_folder(way: str, tmp_path: Path) -> None:
    """Writing, hiding, emptying and linking happen in the root of the image."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("1")
    for number, path in enumerate((way, f"{way}/{victim}", str(victim))):
        apply(
            tmp_path / str(number),
            [folder("deep"), link("way", path)],
            [entry("way/new", b"2"), entry("way/.wh.kept"), folder("way/sub")],
            [entry("way/victim/kept", b"2"), hard_link("stolen", "way/new")],
            [entry("way/.wh..wh..opq")],
            [folder("way", 0o777), entry("way/x", b"3")],
        )
    assert listed(victim) == {"kept": "1"}
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "0", "1", "2"}
    assert all({path.name for path in (tmp_path / name).iterdir()} == {"tree"} for name in "012")


def test_nothing_is_written_through_a_link_or_into_another_file(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("untouched")
    outside = str(tmp_path / "outside")
    layers_ = [
        [entry("one", b"1"), hard_link("two", "one"), link("out", outside)],
        [entry("out", b"2"), entry("two", b"2"), hard_link("out2", "one")],
    ]
    apply(tmp_path, *layers_)
    assert listed(tmp_path / "tree") == {"one": "1", "two": "2", "out": "2", "out2": "1"}
    assert (tmp_path / "outside").read_text() == "untouched"


def test_broken_archives_are_refused(tmp_path: Path) -> None:
    whole = archive([entry("a", bytes(100_000))])
    for number, data in enumerate((b"no archive at all" * 100, whole[:60_000], whole[:700])):
        with pytest.raises(Refused):
            apply(tmp_path / str(number), data)


def test_equal_files_of_images_are_one_file_and_those_of_one_image_are_not(tmp_path: Path) -> None:
    shares = tmp_path / "shares"
    shares.mkdir()
    large = os.urandom(layers.SMALL + 5)
    layer = [entry("a", b"same"), entry("b", b"same"), entry("large", large), entry(".git/x", b"same"), entry("e", b"")]
    other = [entry("a", b"same"), entry("b", b"same", mode=0o755), entry("large", large), entry(".git/x", b"same")]
    reports = [apply(tmp_path / name, each, shares=shares)[0] for name, each in (("1", layer), ("2", other))]
    one, two = tmp_path / "1/tree", tmp_path / "2/tree"
    assert [(one / name).samefile(two / name) for name in ("a", "b", "large", ".git/x")] == [True, False, True, False]
    assert not (one / "a").samefile(one / "b")
    assert [report["shared"] for report in reports] == [0, 4 + len(large)]
    assert (two / "large").read_bytes() == large and oct((two / "b").stat().st_mode)[-3:] == "755"
    assert not [path for path in two.rglob(".*") if len(path.name) == 65]


def test_a_share_that_was_lost_with_the_machine_is_not_used(tmp_path: Path) -> None:
    shares = tmp_path / "shares"
    shares.mkdir()
    apply(tmp_path / "1", [entry("a", b"content")], shares=shares)
    (tmp_path / "1/tree/a").write_text("")
    apply(tmp_path / "2", [entry("a", b"content")], shares=shares)
    assert (tmp_path / "2/tree/a").read_text() == "content"


def test_deep_folders_and_sparse_files(tmp_path: Path) -> None:
    deep = "/".join(["d"] * 1200)
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    made = subprocess.run(["tar", "-C", tmp_path, "-cS", "sparse"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(made)) as archived:
        assert archived.getmembers()[0].issparse(), "control"
    apply(tmp_path / "to", [entry(f"{deep}/x", b"1")], made, [entry(".wh.d")])
    assert (tmp_path / "to/tree/sparse").read_bytes() == sparse.read_bytes()
    assert [path.name for path in (tmp_path / "to/tree").iterdir()] == ["sparse"]


def test_a_header_takes_bounded_memory(tmp_path: Path) -> None:
    """Compressed, a megabyte is a header of a gigabyte, of which `tarfile` keeps several copies."""
    script = tmp_path / "layers.py"
    script.write_text(Path(layers.__file__).read_text().replace("MEMORY = 2 << 30", "MEMORY = 128 << 20"))
    size = 100 << 20
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, size
    data = header.tobuf() + f"{size} comment=".encode().ljust(size - 1, b"a") + b"\n" + archive([entry("after", b"1")])
    tree = tmp_path / "tree"
    tree.mkdir()
    done = subprocess.run([sys.executable, "-ISB", str(script), str(tree), ""], input=data, capture_output=True)
    assert done.returncode == layers.REFUSED and b"memory" in done.stderr and not any(tree.iterdir()), done.stderr


SECOND = [
    entry("usr/bin/setuid", b"x", mode=0o6755), entry("etc/shadow", b"x", mode=0o000, uid=0, gid=42),
    folder("home/who", 0o500, uid=1000, gid=1000), entry("home/who/x", b"x", mode=0o400, uid=1000),
    folder("opt"), entry("opt/a", b"a"), hard_link("opt/b", "opt/a"), link("opt/c", "/opt/a"),
    link("opt/d", "../../../opt"),
    folder("many"), *(entry(f"many/{n}", bytes([n])) for n in range(40)), folder("gone"), entry("gone/x", b"1"),
    folder("var"), folder("var/spool", 0o1777), entry("var/null", type=b"3", devmajor=1, devminor=3),
    entry("odd \\n name", b"x"), entry("déjà", b"x"), entry("pipe", type=b"6"),
]  # fmt: skip
THIRD = [
    entry(".wh.gone"), entry("many/.wh..wh..opq"), entry("many/only", b"x"), entry("opt/.wh.a"), entry("opt/e", b"e"),
    folder("usr"), link("srv", "/opt"), entry("many/deep/er", b"x"), folder("var/spool", 0o755, mtime=1_500_000_000),
]  # fmt: skip


def test_equal_to_podman(podman: list[str], programs: bytes, tmp_path: Path, cache: Path) -> None:
    made = layout(tmp_path / "oci", [programs, archive(SECOND), archive(THIRD)], "x", WorkingDir="/opt")
    subprocess.run([*podman, "pull", "-q", f"oci:{tmp_path}/oci:x"], check=True, capture_output=True)
    [image] = subprocess.run([*podman, "images", "-q"], check=True, capture_output=True, text=True).stdout.split()
    theirs = Path(
        subprocess.run([*podman, "image", "mount", image], check=True, capture_output=True, text=True).stdout.strip()
    )
    store, user = cache / "trees", SANDBOX_USER
    ours, shares = store / "tree", store / "shares"
    for each in (ours, shares):
        trees.create_folder_of_user(each, user)
    found = fetch.find_in_layout(tmp_path / "oci", manifests.Reference("oci", f"{tmp_path}/oci", "", made), "x")
    unpacking = trees.ImageUnpacking(found, ours, shares, trees.make_open_folder(store / "work"), user, 0)
    reports = [unpacking.apply(layer) for layer in found.layers]
    expected, differences = give_to_one_user(list_tree(theirs))
    mine = list_tree(ours)
    assert expected == mine
    summary = trees.merge_layer_reports(reports)
    assert set(differences) - set().union(*summary["left_out"].values()) == set(), "every difference is listed"
    assert len(mine) > 600 and len(differences) > 4
