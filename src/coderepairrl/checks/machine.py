"""Prerequisites of the machine, with commands that install them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from coderepairrl import sandbox
from coderepairrl.errors import PrerequisiteError
from coderepairrl.printable import logged
from coderepairrl.processes import hostgit
from coderepairrl.processes.installs import install_extra
from coderepairrl.registry import Finding
from coderepairrl.sandbox.interpreter import install_command


def examine_machine() -> list[Finding]:
    """Findings about all prerequisites of runs."""
    git = hostgit.read_git_version()
    sandboxes = sandbox.check_backends()
    gib = shutil.disk_usage(Path.cwd()).free / (1 << 30)
    return [
        Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} at {sys.executable}"),
        Finding("git", True, git) if git else Finding("git", False, "not found", install_command("git")),
        *_package_findings(),
        _isolation_finding([finding.name for finding in sandboxes if finding.ok]),
        *(finding._replace(name=f"sandbox {finding.name}") for finding in sandboxes),
        _memory_finding(),
        Finding("disk", gib >= 1, f"{gib:.1f} GiB free here", "free 1 GiB, or set run.dir to another disk"),
        _gpu_finding(),
    ]


def format_finding(finding: Finding) -> str:
    """Format `finding`, with its fix below if it failed."""
    mark = "ok  " if finding.ok else "FAIL" if finding.required else "no  "
    fix = f"\n      {'':<28} fix: {finding.fix}" if finding.fix and not finding.ok else ""
    name = finding.name if len(finding.name) <= 28 or not finding.detail else f"{finding.name}:"
    return f"{mark}  {name:<28} {logged(finding.detail)}".rstrip() + fix


def _package_findings() -> list[Finding]:
    findings = []
    for package in ("torch", "transformers", "renderers"):
        try:
            findings.append(Finding(package, True, metadata.version(package)))
        except metadata.PackageNotFoundError:
            detail = "not installed: models can only run elsewhere, behind a URL"
            findings.append(Finding(package, False, detail, install_extra("train"), required=False))
    return findings


def _isolation_finding(usable: Sequence[str]) -> Finding:
    # For a run that names no sandbox.
    name = "a sandbox that isolates"
    try:
        choice = sandbox.choose_backend()
    except PrerequisiteError as error:
        if isolating := [other for other in usable if other != "unsafe-local"]:
            return Finding(name, True, f"only when named: sandbox={isolating[0]}")
        return Finding(name, False, "none", error.fix)
    return Finding(name, True, f"{choice.name}, {choice.why}")


def _memory_finding() -> Finding:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return Finding("memory", True, "unknown on this system", required=False)
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    gib = int(available.split()[1]) / (1 << 20)
    return Finding("memory", gib >= 2, f"{gib:.1f} GiB available", "close other programs: 2 GiB are needed")


def _gpu_finding() -> Finding:
    path = shutil.which("nvidia-smi")
    if path is None:
        return Finding("gpu", False, "no NVIDIA driver; the tiny engine runs on the CPU", required=False)
    query = [path, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    return Finding("gpu", result.returncode == 0, result.stdout.strip() or result.stderr.strip(), required=False)
