"""Cost of an image without Docker: unpacking it and a similar one, opening 1 and 32 sandboxes on it, and the same for
sandboxes on a git commit.

    python benchmarks/images.py [--mib 200] [--sandboxes 32] [--small]

The image is made of this machine's ``/usr/bin`` and libraries, in two layers, and of a git repository of `--mib` MiB in
``/testbed``; a second one has a further layer. ``tar`` (which unpacks the layers one upon the other and ignores
whiteouts) and Podman, where it is installed, are timed on the same layers. All in a temporary folder.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

from coderepairrl.environments.images import prepare_images
from coderepairrl.sandbox import make_backend
from coderepairrl.types import Task

PARTS = (
    ["usr/bin", "bin", "sbin", "lib", "lib64"],
    ["usr/lib64", f"usr/lib/{platform.machine()}-linux-gnu", "usr/lib/git-core", "usr/lib/python3.11"],
)
PROGRAMS = """bash sh env cat ls cp mv rm mkdir rmdir ln touch chmod stat head tail wc tr cut sort uniq sleep date true
    false printf echo test sed awk grep find xargs tee tar gzip git ps kill id uname basename dirname readlink diff
    which locale timeout nproc expr mktemp patch seq cmp od getconf realpath"""
COPIES = 4
"""Sandboxes that copy the repository into memory, to show what overlays save."""
_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}


def copy_programs(root: Path, pythons: Iterable[Path]) -> None:
    """Copy this machine's programs to `root`, with the libraries that they and the modules of `pythons` load."""
    program_paths = [path for name in PROGRAMS.split() if (path := shutil.which(name, path="/usr/bin:/bin"))]
    files = {Path(path).resolve() for path in program_paths} | {Path("/usr/lib/locale/C.utf8")}
    for path in (*program_paths, *(module for python in pythons for module in python.rglob("lib-dynload/*.so"))):
        shown = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        files |= {Path(word) for word in shown.split() if word.startswith("/")}
    for path in (*files, *map(Path, ("/usr/lib/git-core", "/usr/share/git-core"))):
        inside = root / str(path if str(path).startswith("/usr") else f"/usr{path}").lstrip("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, inside, symlinks=True) if path.is_dir() else shutil.copy(path.resolve(), inside)
    for path in map(Path, program_paths):
        if not (root / "usr/bin" / path.name).exists():
            (root / "usr/bin" / path.name).symlink_to(path.resolve().name)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for name in ("root", "tmp", "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")


def pack_layer(root: Path, parts: list[str]) -> bytes:
    present = [part for part in parts if (root / part).exists() or (root / part).is_symlink()]
    command = ["tar", "-C", root, "--owner=0", "--group=0", "--one-file-system", "-c", "--", *present]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def make_repository_layer(root: Path, mib: int) -> bytes:
    """A layer with a repository of incompressible files."""
    testbed = root / "testbed"
    for number in range(mib * 8):
        (testbed / f"d{number % 50}").mkdir(parents=True, exist_ok=True)
        (testbed / f"d{number % 50}" / f"{number}.bin").write_bytes(os.urandom(128 << 10))
    who = "git config user.name n && git config user.email e"
    script = f"git init -q . && {who} && git add -A && git commit -qm x && git gc -q"
    subprocess.run(["bash", "-ec", script], cwd=testbed, check=True)
    return pack_layer(root, ["testbed"])


def make_extra_layer() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        about = tarfile.TarInfo("etc/second")
        about.size = 6
        archive.addfile(about, io.BytesIO(b"second"))
    return buffer.getvalue()


class Layout:
    """A folder in OCI layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.entries: list[dict[str, object]] = []
        self.known: dict[str, dict[str, object]] = {}

    def put(self, data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (self.folder / "blobs/sha256" / digest).write_bytes(data)
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

    def image(self, layers: list[bytes], tag: str) -> str:
        ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        for id_, layer in zip(ids, layers, strict=True):
            if id_ not in self.known:
                self.known[id_] = self.put(gzip.compress(layer, 1), "layer.v1.tar+gzip")
        config = {
            "os": "linux",
            "architecture": _ARCHITECTURE[platform.machine()],
            "config": {"WorkingDir": "/testbed"},
            "rootfs": {"type": "layers", "diff_ids": ids},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.put(json.dumps(config).encode(), "config.v1+json"),
            "layers": [self.known[id_] for id_ in ids],
        }
        about = self.put(json.dumps(manifest).encode(), "manifest.v1+json")
        self.entries.append(about | {"annotations": {"org.opencontainers.image.ref.name": tag}})
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.entries}))
        return f"oci:{self.folder}@{about['digest']}"


def used(folder: Path) -> int:
    """MiB on disk, hard links counted once."""
    return int(subprocess.run(["du", "-sm", folder], capture_output=True, text=True).stdout.split()[0])


def available() -> float:
    text = Path("/proc/meminfo").read_text()
    return int(text.partition("MemAvailable:")[2].split()[0]) / 1024


class Timer:
    """Prints wall-clock and CPU seconds since the last line; the CPU seconds include ended children."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.clock, self.cpu = time.perf_counter(), self._cpu()

    def line(self, what: str, more: str = "") -> None:
        print(
            f"| {what} | {time.perf_counter() - self.clock:.2f} | {self._cpu() - self.cpu:.2f} | {more} |", flush=True
        )
        self.restart()

    def _cpu(self) -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)


timer = Timer()


def time_other_tools(layout: Layout, work: Path) -> None:
    """Time tar and Podman on the first image."""
    plain = work / "tar"
    plain.mkdir()
    timer.restart()
    manifest = json.loads((layout.folder / "blobs" / str(layout.entries[0]["digest"]).replace(":", "/")).read_text())
    for layer in manifest["layers"]:
        blob = layout.folder / "blobs" / layer["digest"].replace(":", "/")
        subprocess.run(["tar", "-C", plain, "-xzf", blob], check=True)
    timer.line("tar, layer upon layer", f"{used(plain)} MiB")
    shutil.rmtree(plain)
    if os.geteuid() == 0 and shutil.which("podman"):
        home = work / "podman"
        flags = [f"--root={home}/root", f"--runroot={home}/run", f"--tmpdir={home}/tmp"]
        timer.restart()
        subprocess.run(["podman", *flags, "pull", "-q", f"oci:{layout.folder}:first"], check=True, capture_output=True)
        timer.line("podman pull", f"{used(home)} MiB")
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (point := line.split()[1]).startswith(f"{home}/"):
                subprocess.run(["umount", "--lazy", point], capture_output=True)


async def time_sandboxes(title: str, workspace: str, many: int, *, copy: bool = False) -> None:
    """Time sandboxes: one with git status and diff, one more, and `many` at once with a written file and git status."""
    backend = make_backend("bwrap", copy=copy)
    backend.require()
    task = Task("t", "", "", workspace, b"")
    timer.restart()
    async with backend.open(task) as box:
        timer.line(f"{title}: open the first sandbox")
        for what in ("first", "second"):
            timer.restart()
            done = await box.exec(["git", "status", "--porcelain"])
            assert done.ok, done.output
            timer.line(f"`git status` inside, {what}")
        await box.exec(["bash", "-c", "echo x > d1/new"])
        timer.restart()
        patch = await box.diff()
        timer.line("its diff", f"{len(patch)} bytes")
    timer.restart()
    async with backend.open(task):
        timer.line("open one more")
    before = available()
    timer.restart()
    async with AsyncExitStack() as stack:
        opened = await asyncio.gather(*(stack.enter_async_context(backend.open(task)) for _ in range(many)))
        timer.line(f"{title}: open {many} at once", f"{(before - available()) / many:.1f} MiB of memory each")
        timer.restart()
        command = ["bash", "-c", "echo x > new; git status -s"]
        results = await asyncio.gather(*(box.exec(command, timeout=600) for box in opened))
        assert all(each.output == b"?? new\n" for each in results), results
        timer.line("a file and `git status` in each", f"{(before - available()) / many:.1f} MiB of memory each")
        timer.restart()
    timer.line("close them")
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=200, help="of the repository")
    parser.add_argument("--sandboxes", type=int, default=32, help="at once")
    parser.add_argument("--small", action="store_true", help="an image of few programs, and nothing but the sandboxes")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="crrl-images-benchmark-"))
    work.chmod(0o755)
    os.environ["CRRL_CACHE"] = str(work / "cache")
    try:
        layout = Layout(work / "oci")
        if options.small:
            copy_programs(work / "programs", ())
            base = [pack_layer(work / "programs", [path.name for path in (work / "programs").iterdir()])]
        else:
            base = [pack_layer(Path("/"), parts) for parts in PARTS]
        layers = [*base, make_repository_layer(work / "root", options.mib)]
        first = layout.image(layers, "first")
        size = sum(map(len, layers)) >> 20
        print(f"{size} MiB in {len(layers)} layers, {used(layout.folder)} MiB compressed, on {os.cpu_count()} CPUs\n")
        print("| | seconds | CPU-s | |\n|---|---|---|---|")
        if options.small:
            prepare_images([first])
        else:
            second = layout.image([*layers, make_extra_layer()], "second")
            time_other_tools(layout, work)
            timer.restart()
            [ready] = prepare_images([first])
            files = (ready.image.report or {})["files"]
            timer.line("prepare the image", f"{used(work / 'cache')} MiB, {files} files")
            timer.restart()
            prepare_images([second])
            timer.line("prepare a second one like it", f"both {used(work / 'cache')} MiB")
        del layers
        testbed = work / "root/testbed"
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=testbed, capture_output=True, text=True, check=True)
        native = f"git:{testbed}@{commit.stdout.strip()}"
        asyncio.run(time_sandboxes("image", f"image:{first}", options.sandboxes))
        asyncio.run(time_sandboxes("commit", native, options.sandboxes))
        asyncio.run(time_sandboxes(f"commit, copied ({COPIES})", native, COPIES, copy=True))
    finally:
        subprocess.run(["rm", "-rf", work], check=True)


if __name__ == "__main__":
    main()
