"""Virtual environments for the tests of a repository, built from a benchmark's specification and kept in the cache.

A build runs code of the project and of its packages, so it runs in a sandbox whose only way out is the package index.
What it leaves is a folder that sandboxes are shown read-only. The project's own modules are not in it: they come from
the workspace, which is where the bug is.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import asdict, dataclass
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from coderepairrl import sandbox as sandboxes
from coderepairrl.environments.index import index_hosts, index_settings, local_folders, proxy
from coderepairrl.environments.pythons import interpreter
from coderepairrl.environments.verify import digest_of, record_name
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.printable import printable
from coderepairrl.processes.caches import environments_cache
from coderepairrl.processes.installs import alone, check_reachable
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox
from coderepairrl.runs.storage import replace_file
from coderepairrl.types import ExecResult, Task

_FORMAT = 1
"""Raised when what a build leaves changes, so that environments of before are built again."""
_SECONDS = 1800.0
_ROOM = 4 << 30
_OUTPUT = 64 << 20
_SHOWN = 600
_BUILD = (resources.files(__package__) / "programs/build.sh").read_text()
_STRIP = (resources.files(__package__) / "programs/strip_project.py").read_text()


@dataclass(frozen=True, slots=True)
class Specification:
    """What an environment is built from.

    >>> Specification("git:https://example.org/a@" + "0" * 40, "3.9", ("pytest==7.4.0",), before="2024-12-01").extras
    ''
    """

    workspace: str
    """The project at the commit that its environment is built for, as `Task.workspace`."""
    python: str
    """``MAJOR.MINOR``."""
    requirements: tuple[str, ...] = ()
    """What is installed before the project, as pip takes it."""
    extras: str = ""
    """Of the project, in brackets: ``[test]``."""
    before: str = ""
    """Only packages that were uploaded before this date (``YYYY-MM-DD``) are taken; empty: the newest."""
    edits: tuple[str, ...] = ()
    """Shell commands that change the project's files before it is built. A task's workspace does not have them."""
    version: str = ""
    """What the project is to think its version is, where it asks git for it."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A built environment: its folder, and what was recorded of it (``environment.json``)."""

    folder: Path
    packages: dict[str, str]
    digest: str
    """SHA-256 over names, modes and contents of its files."""


async def build(specification: Specification) -> Environment:
    """The environment of `specification`, from the cache or built now.

    Raises `TaskError` where the project or its packages cannot be installed, `SandboxFault`, and `PrerequisiteError`
    where no such Python, no sandbox or no package index can be had.
    """
    python, settings = await asyncio.to_thread(interpreter, specification.python), index_settings()
    asked = json.dumps([_FORMAT, version("uv"), settings, str(python), asdict(specification), _BUILD, _STRIP])
    target = environments_cache() / hashlib.sha256(asked.encode()).hexdigest()[:16]
    with alone(target):
        if not (target / record_name).exists():
            shutil.rmtree(target, ignore_errors=True)  # what an interrupted build left
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o755)
            check_reachable(partial)
            about = await _build(specification, python, partial)
            about |= {"specification": asdict(specification), "python": str(python), "uv": version("uv")}
            about["digest"] = digest_of(partial)
            (partial / record_name).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            partial.rename(target)
    about = json.loads((target / record_name).read_text(encoding="utf-8"))
    return Environment(target, about["packages"], about["digest"])


async def _build(specification: Specification, python: Path, target: Path) -> dict[str, Any]:
    """Fill `target`; what is to be known of it, as plain data."""
    uv = await asyncio.to_thread(_uv)
    shown = [str(uv.parent), *local_folders()] + ([] if python.is_relative_to("/usr") else [str(python.parent.parent)])
    choice = sandboxes.choose()
    options = {"disk_bytes": _ROOM, "tmp_bytes": _ROOM, "memory": 2 * _ROOM, "file_bytes": _ROOM}
    backend = sandboxes.make(choice.name, binds=shown, **options)
    task = Task(f"environment/{target.stem}", "build", "python", specification.workspace, b"")
    try:
        with scratch("environment") as home:
            home.chmod(0o711)  # the guest's user passes through it to the socket
            async with proxy(home / "index.sock", index_hosts()) as refused, backend.open(task) as box:
                reached = await box.reach(str(home / "index.sock"))
                return await _install(box, specification, uv, python, reached, target, refused)
    finally:
        backend.close()


def _uv() -> Path:
    """The program uv where sandboxes see it: a copy in the cache, since ours may lie in a home."""
    target = environments_cache() / f"uv-{version('uv')}" / "uv"
    with alone(target.parent):
        if not target.exists():
            target.parent.mkdir(mode=0o755, exist_ok=True)
            check_reachable(target)
            with replace_file(target) as partial:
                shutil.copy2(find_uv_bin(), partial)
    return target


async def _install(
    box: Sandbox, spec: Specification, uv: Path, python: Path, reached: str, target: Path, refused: list[str]
) -> dict[str, Any]:
    env = {"HTTPS_PROXY": reached, "ALL_PROXY": reached, "PYTHONDONTWRITEBYTECODE": "", **index_settings()}
    if spec.version:
        env["SETUPTOOLS_SCM_PRETEND_VERSION"] = spec.version
    argv = ["sh", "-c", _BUILD, "sh", str(uv), str(python), spec.before, spec.extras, *spec.requirements]
    env = {name: value for name, value in env.items() if value or name == "PYTHONDONTWRITEBYTECODE"}
    built = await box.exec(argv, env=env, stdin="\n".join(spec.edits).encode(), timeout=_SECONDS, max_bytes=_OUTPUT)
    if not built.ok:
        raise _refused(spec, built, refused)
    stripping = ["/tmp/env/bin/python", "-", box.workdir]
    stripped = await box.exec(stripping, env=env, stdin=_STRIP.encode(), timeout=_SECONDS, max_bytes=_OUTPUT)
    if not stripped.ok:
        raise _refused(spec, stripped, refused)
    about: dict[str, Any] = json.loads(stripped.output)
    packed = await box.exec(["tar", "-cf", "/workspace/.env.tar", "-C", "/tmp/env", "."], timeout=_SECONDS)
    if not packed.ok:
        raise _refused(spec, packed, refused)
    await asyncio.to_thread(_unpack, await box.read(".env.tar"), target)
    for path, content in about.pop("built").items():
        place = target / "built" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(base64.b64decode(content))
    return about


def _unpack(archive: bytes, target: Path) -> None:
    """Extract what a sandbox packed: links may only lead to interpreters, nothing lies outside of `target`."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(target, filter=_inside)


def _inside(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo | None:
    if member.issym() and member.linkname.startswith("/"):  # the interpreter, in /usr or in the cache
        return tarfile.tar_filter(member, target).replace(uid=0, gid=0, uname="", gname="")
    return tarfile.data_filter(member, target)


def _refused(spec: Specification, result: ExecResult, refused: list[str]) -> Exception:
    """Why a build failed, from what it printed and which hosts it wanted."""
    said = result.output.decode("utf-8", "replace").strip()
    if result.timed_out:
        said = f"no end within {_SECONDS:.0f} s; {said}"
    if "dns error" in said or "502 Bad Gateway" in said or ("tunnel" in said and not refused):
        return PrerequisiteError(
            f"the package index cannot be reached from here: {printable(said[-_SHOWN:])}",
            fix="prepare on a machine with a network; UV_DEFAULT_INDEX names another index",
        )
    wanted = f" (it wanted {', '.join(dict.fromkeys(refused))}, which a build may not reach)" if refused else ""
    return TaskError(
        f"no environment can be built for {spec.workspace}{wanted}: {printable(said[-_SHOWN:])}",
        fix="correct its specification, or use its image",
    )
