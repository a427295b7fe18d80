"""What a machine offers: each prerequisite with the command that installs it."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from coderepairrl import sandbox
from coderepairrl.errors import PrerequisiteError
from coderepairrl.printable import logged
from coderepairrl.processes import hostgit
from coderepairrl.sandbox.interpreter import install_command


class Entry(NamedTuple):
    """One line of a report. An entry that is not `required` may fail without consequence."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    required: bool = True


def machine() -> list[Entry]:
    """Everything that a run on this machine depends on."""
    return [_python(), _git(), *_packages(), *_sandboxes(), _memory(), _disk(), _gpu()]


def line(entry: Entry) -> str:
    """One entry as text, with its fix below it if it fails."""
    mark = "ok  " if entry.ok else "FAIL" if entry.required else "no  "
    fix = f"\n      {'':<28} fix: {entry.fix}" if entry.fix and not entry.ok else ""
    name = entry.name if len(entry.name) <= 28 else f"{entry.name}:"
    return f"{mark}  {name:<28} {logged(entry.detail)}{fix}"


def _python() -> Entry:
    return Entry("python", sys.version_info >= (3, 11), f"{platform.python_version()} at {sys.executable}")


def _git() -> Entry:
    version = hostgit.version()
    if version is None:
        return Entry("git", False, "not found", install_command("git"))
    return Entry("git", True, version)


def _packages() -> list[Entry]:
    entries = []
    for package in ("torch", "transformers", "renderers", "aiohttp"):
        try:
            entries.append(Entry(package, True, metadata.version(package)))
        except metadata.PackageNotFoundError:
            entries.append(Entry(package, False, "not installed", "scripts/setup.sh"))
    return entries


def _sandboxes() -> list[Entry]:
    found = [Entry(f"sandbox {name}", ok, detail, fix, required=False) for name, ok, detail, fix in sandbox.available()]
    return [_isolation([entry.name.removeprefix("sandbox ") for entry in found if entry.ok]), *found]


def _isolation(usable: Sequence[str]) -> Entry:
    """What a run takes that names no sandbox; `usable` are all that work here."""
    name = "a sandbox that isolates"
    try:
        choice = sandbox.choose()
    except PrerequisiteError as error:
        if named := [other for other in usable if other != "unsafe-local"]:
            return Entry(name, True, f"only when named: sandbox={named[0]}")
        return Entry(name, False, "none", error.fix)
    return Entry(name, True, f"{choice.name}, {choice.why}")


def _memory() -> Entry:
    lines = Path("/proc/meminfo")
    if not lines.exists():
        return Entry("memory", True, "unknown on this system", required=False)
    available = next(line for line in lines.read_text().splitlines() if line.startswith("MemAvailable"))
    gib = int(available.split()[1]) / (1 << 20)
    return Entry("memory", gib >= 2, f"{gib:.1f} GiB available", "close other programs: 2 GiB are needed")


def _disk() -> Entry:
    gib = shutil.disk_usage(Path.cwd()).free / (1 << 30)
    return Entry("disk", gib >= 1, f"{gib:.1f} GiB free here", "free 1 GiB, or set run.dir to another disk")


def _gpu() -> Entry:
    path = shutil.which("nvidia-smi")
    if path is None:
        return Entry("gpu", False, "no NVIDIA driver; the tiny engine runs on the CPU", required=False)
    query = [path, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    return Entry("gpu", result.returncode == 0, result.stdout.strip() or result.stderr.strip(), required=False)
