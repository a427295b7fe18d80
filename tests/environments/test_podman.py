"""An image that we unpacked is what Podman makes of it, but for what only root could do."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coderepairrl.environments import fetch, manifests, trees
from coderepairrl.sandbox.privileges import SANDBOX_USER

from .made import archive, entry, folder, hard, layout, link


@pytest.fixture(scope="module")
def podman() -> Iterator[list[str]]:
    if os.geteuid() != 0 or shutil.which("podman") is None:
        pytest.skip("needs root and Podman (sudo apt-get install podman)")
    home = Path(tempfile.mkdtemp(prefix="crrl-podman-"))
    flags = [f"--root={home}/root", f"--runroot={home}/run", f"--tmpdir={home}/tmp", "--cgroup-manager=cgroupfs"]
    try:
        yield ["podman", *flags, "--events-backend=file"]
    finally:
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (point := line.split()[1]).startswith(f"{home}/"):
                subprocess.run(["umount", "--lazy", point], capture_output=True)
        shutil.rmtree(home)


SECOND = [
    entry("usr/bin/setuid", b"x", mode=0o6755), entry("etc/shadow", b"x", mode=0o000, uid=0, gid=42),
    folder("home/who", 0o500, uid=1000, gid=1000), entry("home/who/x", b"x", mode=0o400, uid=1000),
    folder("opt"), entry("opt/a", b"a"), hard("opt/b", "opt/a"), link("opt/c", "/opt/a"), link("opt/d", "../../../opt"),
    folder("many"), *(entry(f"many/{n}", bytes([n])) for n in range(40)), folder("gone"), entry("gone/x", b"1"),
    folder("var"), folder("var/spool", 0o1777), entry("var/null", type=b"3", devmajor=1, devminor=3),
    entry("odd \\n name", b"x"), entry("déjà", b"x"), entry("pipe", type=b"6"),
]  # fmt: skip
THIRD = [
    entry(".wh.gone"), entry("many/.wh..wh..opq"), entry("many/only", b"x"), entry("opt/.wh.a"), entry("opt/e", b"e"),
    folder("usr"), link("srv", "/opt"), entry("many/deep/er", b"x"), folder("var/spool", 0o755, mtime=1_500_000_000),
]  # fmt: skip


def tree(root: Path) -> dict[str, tuple[object, ...]]:
    """Path to kind, permissions, content, and the other names of the same file."""
    found: dict[str, tuple[object, ...]] = {}
    names: dict[int, list[str]] = {}
    for path in sorted(root.rglob("*")):
        about = path.lstat()
        name = str(path.relative_to(root))
        if stat.S_ISREG(about.st_mode):
            names.setdefault(about.st_ino, []).append(name)
            what: object = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            what = str(path.readlink()) if path.is_symlink() else ""
        time = 0 if stat.S_ISDIR(about.st_mode) else int(about.st_mtime)
        found[name] = (stat.S_IFMT(about.st_mode), stat.S_IMODE(about.st_mode), what, time, about.st_ino)
    return {name: (*about[:4], tuple(names.get(about[4], ()))) for name, about in found.items()}  # type: ignore[call-overload]


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
    found = fetch.from_layout(tmp_path / "oci", manifests.Reference("oci", f"{tmp_path}/oci", "", made), "x")
    unpacking = trees.Unpacking(found, ours, shares, trees.make_open_folder(store / "work"), user, 0, lambda _: None)
    reports = unpacking.all_layers()
    expected, differences = tree(theirs), []
    for name, (kind, mode, what, time, same) in expected.items():
        allowed = (mode & ~0o6000) | (0o600 if stat.S_ISREG(kind) else 0o700 if stat.S_ISDIR(kind) else 0)
        if stat.S_ISCHR(kind):  # type: ignore[arg-type]
            differences.append(name)
        elif mode != allowed and not stat.S_ISLNK(kind):  # type: ignore[operator]
            differences.append(name)
            expected[name] = (kind, allowed, what, time, same)
    mine = tree(ours)
    assert {name: about for name, about in expected.items() if not stat.S_ISCHR(about[0])} == mine  # type: ignore[arg-type]
    summary = trees.merge_layer_reports(reports)
    assert set(differences) - set().union(*summary["left_out"].values()) == set(), "every difference is listed"
    assert len(mine) > 800 and len(differences) > 4
