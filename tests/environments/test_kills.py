"""`crrl tasks prepare`, killed at any point again and again, loses nothing and takes nothing half-built for whole."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.environments import Specification, check_unchanged
from coderepairrl.processes.caches import environments_cache, git_cache
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.privileges import SANDBOX_USER
from commands import CRRL
from projects import SHOP, cache, system_python

from .made import archive, entry, folder, layout
from .test_build import project
from .test_index import Packages, index

__all__ = ["cache", "index"]
USER = SANDBOX_USER if os.geteuid() == 0 else None


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


def paths(cache: Path) -> int:
    """How many there are: what tells how far a preparation is."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(cache))


def test_killed_at_any_point_it_loses_nothing(
    cache: Path, index: type[Packages], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolating: None
) -> None:
    """Two at once, killed at some point of the way; then two that come to the end, with what one undisturbed has."""
    source, kills = tasks(tmp_path), 2
    undisturbed = start(source)
    _, printed = undisturbed.communicate()
    assert undisturbed.returncode == 0, printed.decode()
    expected, whole = dict(facts(source)), paths(cache)
    assert len(expected) == 10
    (cache / "again").mkdir(mode=0o755)
    monkeypatch.setenv("CRRL_CACHE", str(cache / "again"))
    generator, kept, seconds = random.Random(kills), dict[str, str](), time.monotonic()
    for number in range(kills):
        enough = generator.randrange(whole * (number + 1) // kills)
        running = [start(source) for _ in range(2)]
        while paths(cache / "again") < enough and any(each.poll() is None for each in running):
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
    print(f"{kills} kills of two processes: {time.monotonic() - seconds:.0f} s, {whole} paths")
