"""Build virtual environments from a benchmark's specification, and cache them.

Builds run untrusted code in a sandbox that reaches only the package index. A built environment lacks the project's own
modules: Python imports them from the task's workspace, which has the bug.

Conda environment files become requirements for pip, named by `RENAMED`. Packages of other languages (compilers, C
libraries), build strings, channels and hashes are omitted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

from pydantic import Base64Bytes, BaseModel, ConfigDict, ValidationError
from uv import find_uv_bin

from coderepairrl import sandbox as sandboxes
from coderepairrl.environments.index import (
    PYPI,
    explain_failed_build,
    list_wheel_folders,
    make_uv_settings,
    read_user_index,
    serve_proxy,
)
from coderepairrl.environments.pythons import find_interpreter
from coderepairrl.environments.verify import check_unchanged, digest_tree, share_equal_files
from coderepairrl.errors import CodeRepairError, PrerequisiteError, SandboxFault, TaskError, combine_errors
from coderepairrl.printable import printable, remove_login
from coderepairrl.processes.caches import BUILT, ENVIRONMENT_RECORD, environment_folder, environments_cache
from coderepairrl.processes.installs import check_reachable, lock_installation, lock_installation_async, remove_partial
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Sandbox
from coderepairrl.runs.storage import replace_file
from coderepairrl.sandbox.contents import check_path, read_workspace_entries
from coderepairrl.types import ExecResult, Task

RENAMED = {
    "blas": "",
    "cdms2": "",
    "dask-core": "dask",
    "eccodes": "",
    "gdal": "",
    "graphviz": "",
    "hdf5": "",
    "iris": "scitools-iris",
    "libnetcdf": "",
    "matplotlib-base": "matplotlib",
    "msgpack-python": "msgpack",
    "nodejs": "",
    "openjdk": "",
    "pip": "",
    "pynio": "",
    "pytables": "tables",
    "python": "",
    "python-graphviz": "graphviz",
    "python-xxhash": "xxhash",
    "pytorch": "torch",
    "tiledb": "",
    "tiledb-py": "tiledb",
}
"""Names on PyPI of conda packages that have another name there; empty: not installed."""
# a conda package: optional channel, name, version; what follows a bracket is for conda alone
_PACKAGE = re.compile(r"(?:[\w.-]+::)?(?P<name>[\w.-]+)\s*(?P<version>[^\[]*)")
# a YAML list item without its comment
_ITEM = re.compile(r"(?P<indent>\s*)-\s+(?P<text>[^#]*?)\s*(\s#.*)?$")


def parse_conda_file(text: str) -> tuple[str, list[str]]:
    """Parse the Python version (``MAJOR.MINOR``, or "") and the requirements of a conda environment file.

    >>> parse_conda_file("dependencies:\\n  - python=3.10\\n  - iris\\n  - numpy=1.2\\n  - pip:\\n    - numbagg")
    ('3.10', ['scitools-iris', 'numpy==1.2.*', 'numbagg'])
    """
    python, packages = "", list[str]()
    in_dependencies, pip_indent = False, -1
    for line in text.splitlines():
        if re.match(r"\w", line):
            in_dependencies, pip_indent = line.startswith("dependencies:"), -1
        item = _ITEM.match(line)
        if not in_dependencies or item is None:
            continue
        indent, entry = len(item["indent"]), item["text"].strip("\"'")
        if entry == "pip:":
            pip_indent = indent
        elif 0 <= pip_indent < indent:
            packages.append(entry)
        elif package := _PACKAGE.match(entry):
            name, version = package["name"].lower(), _convert_version(package["version"])
            if name == "python":
                python = ".".join(re.findall(r"\d+", version)[:2])
            if name := RENAMED.get(name, name):
                packages.append(name + version)
    return python, packages


def _convert_version(requirement: str) -> str:
    # conda's `=1.2` and `1.2` allow every version that begins with 1.2
    parts = []
    for each in filter(None, requirement.replace(" ", "").split(",")):
        if each[:2] in ("==", "!=", ">=", "<=", "~=") or each[0] in "<>":
            parts.append(each)
        else:
            # without the build string that may follow a second `=`
            parts.append(f"=={each.lstrip('=').partition('=')[0].removesuffix('*').rstrip('.')}.*")
    return ",".join(parts)


PROGRAMS = {
    "gcc": "apt-get install build-essential",
    "g++": "apt-get install build-essential",
    "make": "apt-get install build-essential",
    "gs": "apt-get install ghostscript",
    "libpng-config": "apt-get install libpng-dev",
}
"""How to install programs that environments need."""
_CCACHE = Path("/usr/lib/ccache")
"""Debian's folder of links from names of compilers to ccache."""
_CACHE_COMPILED = f"export PATH={_CCACHE}:$PATH CCACHE_DIR=/tmp/ccache CCACHE_MAXSIZE=256M"
KIND = "python"
"""Prefix of a specification's text: ``python:{...}``."""
_SPEC_FIX = "export the tasks again, or correct it; class Specification in environments/build.py has its fields"
_TIMEOUT_SECONDS = 7200.0
_MAX_BYTES = 4 << 30
_MAX_OUTPUT_BYTES = 64 << 20
_CHUNK_BYTES = 32 << 20
_MAX_FILES = 1 << 20
_SHOWN_CHARS = 600
_BUILD = (resources.files(__package__) / "programs/build.sh").read_text()
# arguments: paths, of which the first that exists is edited by the commands on standard input and printed
_EDIT_CONDA_FILE = """
for path in "$@"; do
    if [ -f "$path" ]; then
        cp "$path" /tmp/environment.yml && cd /tmp && bash -eu >&2 && exec cat environment.yml
    fi
done
exit 1
"""
_STRIP = (resources.files(__package__) / "programs/strip_project.py").read_text()


class CondaFile(BaseModel):
    """Conda environment file of a project (`parse_conda_file`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paths: tuple[str, ...]
    workspace: str = ""
    """Repository and commit that have the file, as `Task.workspace`; empty: those of the specification."""
    edits: tuple[str, ...] = ()
    """Shell commands that edit the file, ``environment.yml`` in their working folder, before it is parsed."""


class Specification(BaseModel):
    """Description of what an environment has; its text is a `Task.environment`.

    >>> example = Specification(workspace="git:https://example.org/a@" + "0" * 40, python="3.9", requirements=("six",))
    >>> str(example)[:60]
    'python:{"workspace":"git:https://example.org/a@0000000000000'
    >>> Specification.parse(str(example)) == example
    True
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace: str = ""
    """Project at the environment's commit, as `Task.workspace`; empty for packages alone, shared by many tasks."""
    python: str
    """``MAJOR.MINOR``; empty: the conda file names it."""
    conda: CondaFile | None = None
    """Packages to install with `requirements`."""
    requirements: tuple[str, ...] = ()
    """Requirements of pip to install before the project."""
    frozen: tuple[str, ...] = ()
    """Lines of ``pip freeze``, each installed without dependencies; they override `requirements` and the project's.

    A withdrawn release is replaced by the next of its series; unavailable ones are left out (`Environment.left_out`).
    """
    files: tuple[str, ...] = ()
    """Requirement files of the project; the first that exists is installed, too."""
    extras: str = ""
    """Extras of the project to install, in brackets."""
    before: str = ""
    """Date (``YYYY-MM-DD``) before which packages were uploaded; empty: the newest."""
    edits: tuple[str, ...] = ()
    """Shell commands that change the project's files before the build, not in a task's workspace."""
    sources: dict[str, str] = {}
    """Other projects whose files the build needs, as `Task.workspace` by target folder; tasks get the files, too."""
    programs: tuple[str, ...] = ()
    """Programs that the machine must have for the build or the tests (`PROGRAMS`)."""
    install: str = ""
    """Bash commands that install the project and what it needs; empty: install the project with `extras`.

    Their pip is uv's, and makes no editable installs.
    """
    version: str = ""
    """Version of a project that takes it from git tags."""

    def __str__(self) -> str:
        return f"{KIND}:{self.model_dump_json(exclude_defaults=True)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a specification. Raises `TaskError`."""
        try:
            return cls.model_validate_json(text.removeprefix(f"{KIND}:"))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "its text"
            raise TaskError(f"environment is not a specification: {field}: {first['msg']}", fix=_SPEC_FIX) from error

    @property
    def folder(self) -> Path:
        """Cache folder."""
        return environment_folder(str(self))


class _BuildReport(BaseModel):
    # printed by `strip_project.py`, which describes the fields; untrusted: the project may have changed its Python
    model_config = ConfigDict(extra="forbid", frozen=True)

    imports: str
    modules: list[str]
    built: dict[str, Base64Bytes]
    made: list[str]
    packages: dict[str, str]
    left_out: list[str]


@dataclass(frozen=True, slots=True)
class Environment:
    """A built environment."""

    folder: Path
    packages: dict[str, str]
    digest: str
    left_out: tuple[str, ...]
    """Requirements that could not be installed (`Specification.frozen`)."""
    imports: str
    """Folder of the project that holds its modules (``src``); empty for the root."""
    modules: tuple[str, ...]
    """Python files that the project installs, if known."""


async def build_environment(specification: Specification) -> Environment:
    """Build the environment of `specification`, or reuse the cached one.

    Raises `TaskError` (installation failed, environment changed), `SandboxFault`, and `PrerequisiteError` (no such
    Python, sandbox or package index).
    """
    target = specification.folder
    if (target / ENVIRONMENT_RECORD).exists():  # no lock is needed, and none is possible in a read-only cache
        await asyncio.to_thread(check_unchanged, target)
        return _read_environment(target)
    async with lock_installation_async(target):
        if not (target / ENVIRONMENT_RECORD).exists():
            shutil.rmtree(target, ignore_errors=True)  # remains of a deletion
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)  # remains of a killed build
            await asyncio.to_thread(remove_partial, target.parent)
            try:
                await _make_environment(specification, partial)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            partial.rename(target)
    return _read_environment(target)


async def prepare_environments(
    tasks: Iterable[Task], *, jobs: int = 2, say: Callable[[str], None] = lambda _: None
) -> list[Environment]:
    """Build or verify the environments of `tasks`, `jobs` at a time. Raises all errors together."""
    specifications = dict.fromkeys(task.environment for task in tasks if task.environment.startswith(f"{KIND}:"))
    slots, problems = asyncio.Semaphore(jobs), list[CodeRepairError]()

    async def build_one(number: int, text: str) -> Environment | None:
        async with slots:
            began = time.monotonic()
            try:
                specification = Specification.parse(text)
                built = await build_environment(specification)
            except CodeRepairError as error:
                problems.append(error)
                say(f"environment {number} of {len(specifications)}: not built")
                return None
            say(f"environment {number} of {len(specifications)}: {built.folder.name}, {time.monotonic() - began:.1f} s")
            return built

    built = await asyncio.gather(*(build_one(number, text) for number, text in enumerate(specifications, 1)))
    if problems:
        raise combine_errors(problems)
    return [each for each in built if each is not None]


async def _make_environment(specification: Specification, partial: Path) -> None:
    for program in specification.programs:
        if shutil.which(program) is None:
            raise PrerequisiteError(
                f"this machine has no {program}, which the environment of {specification.workspace} needs",
                fix=PROGRAMS.get(program, f"install {program}"),
            )
    resolved = await _add_conda_packages(specification) if specification.conda else specification
    python = await asyncio.to_thread(find_interpreter, resolved.python)
    partial.mkdir(mode=0o755)
    check_reachable(partial)
    record = await _build_in_sandbox(resolved, python, partial)
    fields = json.loads(remove_login(specification.model_dump_json()))
    record |= {"specification": fields, "python": str(python), "uv": version("uv")}
    hashes = await asyncio.to_thread(share_equal_files, partial)
    record["digest"] = await asyncio.to_thread(digest_tree, partial, hashes)
    (partial / ENVIRONMENT_RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _read_environment(folder: Path) -> Environment:
    record = json.loads((folder / ENVIRONMENT_RECORD).read_text(encoding="utf-8"))
    left_out, modules = (tuple(record.get(name, ())) for name in ("left_out", "modules"))
    return Environment(folder, record["packages"], record["digest"], left_out, record["imports"], modules)


async def _add_conda_packages(specification: Specification) -> Specification:
    file = specification.conda
    assert file is not None
    workspace = file.workspace or specification.workspace
    argv = ["bash", "-c", _EDIT_CONDA_FILE, "bash", *file.paths]
    with contextlib.closing(sandboxes.make_backend(_choose_sandbox())) as backend:
        async with backend.open(Task("environment/conda", "build", "python", workspace, b"")) as box:
            edits = "\n".join(file.edits).encode()
            result = await box.exec(argv, stdin=edits, timeout=_TIMEOUT_SECONDS, max_bytes=_CHUNK_BYTES)
    if not result.ok:
        output = printable(result.output[-_SHOWN_CHARS:].decode("utf-8", "replace"))
        raise TaskError(
            f"{workspace} has none of {', '.join(file.paths)}, or the edits fail: {output}",
            fix="correct its specification",
        )
    python, conda_packages = parse_conda_file(result.output.decode("utf-8", "replace"))
    packages = (*conda_packages, *specification.requirements)
    return specification.model_copy(update={"python": specification.python or python, "requirements": packages})


def _choose_sandbox() -> str:
    """Sandbox of builds. Raises `PrerequisiteError` without bubblewrap: others have no /tmp, or no limits on disk."""
    choice = sandboxes.choose_backend()
    if choice.fix:
        raise PrerequisiteError(f"environments are built in the sandbox bwrap only: {choice.why}", fix=choice.fix)
    return choice.name


async def _build_in_sandbox(specification: Specification, python: Path, target: Path) -> dict[str, Any]:
    uv = await asyncio.to_thread(_copy_uv)
    folders = [str(uv.parent), *list_wheel_folders()]
    folders += [] if python.is_relative_to("/usr") else [str(python.parent.parent)]
    options = {
        "disk_bytes": _MAX_BYTES,
        "tmp_bytes": 2 * _MAX_BYTES,
        "memory": 2 * _MAX_BYTES,
        "file_bytes": _MAX_BYTES,
    }
    backend = sandboxes.make_backend(_choose_sandbox(), binds=folders, **options)
    index = read_user_index()
    with contextlib.closing(backend), scratch("environment") as home:
        home.chmod(0o711)  # the sandbox's user must reach the socket in it
        (home / "nothing").mkdir()
        workspace = specification.workspace or f"dir:{home / 'nothing'}"
        task = Task(f"environment/{target.stem}", "build", "python", workspace, b"")
        async with serve_proxy(home / "index.sock", PYPI, index) as refused, backend.open(task) as box:
            proxy_url = await box.reach(str(home / "index.sock"))
            env = {"HTTPS_PROXY": proxy_url, "ALL_PROXY": proxy_url, **make_uv_settings(index, proxy_url)}
            return await _install(box, specification, uv, python, env, target, refused)


def _copy_uv() -> Path:
    # sandboxes may not see the folder of the installed uv
    target = environments_cache() / f"uv-{version('uv')}" / "uv"
    with lock_installation(target.parent):
        if not target.exists():
            target.parent.mkdir(mode=0o755, exist_ok=True)
            check_reachable(target)
            with replace_file(target) as partial:
                shutil.copy2(find_uv_bin(), partial)
    return target


async def _install(
    box: Sandbox, spec: Specification, uv: Path, python: Path, env: dict[str, str], target: Path, refused: list[str]
) -> dict[str, Any]:
    env = {**env, "PYTHONDONTWRITEBYTECODE": ""}
    install = spec.install
    if spec.version and install:  # not by a variable: the commands may build other projects, too
        install = f"git tag {shlex.quote(spec.version)}\n{install}"
    elif spec.version:
        env["SETUPTOOLS_SCM_PRETEND_VERSION"] = spec.version
    for folder, workspace in spec.sources.items():
        for path, mode, data in await asyncio.to_thread(list, read_workspace_entries(workspace, None)):
            if mode != "120000":
                await box.write(f"{folder}/{path}", data)
    if compiled := _find_compiler_cache(spec):
        install = f"{_CACHE_COMPILED}\n{install}"
        saved = await asyncio.to_thread(compiled.read_bytes) if compiled.exists() else b""
        # without an archive, or with a damaged one, this fails, and everything is compiled
        await box.exec(["sh", "-c", "mkdir /tmp/ccache && tar -xC /tmp/ccache"], stdin=saved, timeout=_TIMEOUT_SECONDS)
    argv = ["sh", "-c", _BUILD, "sh", str(uv), str(python), spec.before, spec.extras, ":".join(spec.files)]
    argv += [install, "\n".join(spec.frozen), *spec.requirements]
    built = await box.exec(
        argv, env=env, stdin="\n".join(spec.edits).encode(), timeout=_TIMEOUT_SECONDS, max_bytes=_MAX_OUTPUT_BYTES
    )
    if compiled:
        async with lock_installation_async(compiled):
            with replace_file(compiled) as partial, partial.open("wb") as archive:
                await _copy_out(box, "/tmp/ccache", archive)
    if not built.ok:
        raise _explain_output(spec, built, refused)
    stripping = ["/tmp/env/bin/python", "-", box.workdir, *spec.sources]
    stripped = await box.exec(
        stripping, env=env, stdin=_STRIP.encode(), timeout=_TIMEOUT_SECONDS, max_bytes=_MAX_OUTPUT_BYTES
    )
    if not stripped.ok:
        raise _explain_output(spec, stripped, refused)
    facts = _read_build_output(stripped.output, target)
    with tempfile.TemporaryFile() as archive:
        await _copy_out(box, "/tmp/env", archive)
        await asyncio.to_thread(_unpack, archive, target, python)
    for path, content in facts.built.items():
        built_file = target / BUILT / path
        built_file.parent.mkdir(parents=True, exist_ok=True)
        built_file.write_bytes(content)
    return facts.model_dump(include={"imports", "modules", "made", "packages", "left_out"})


def _read_build_output(output: bytes, target: Path) -> _BuildReport:
    # only the last line, since builds print, too
    try:
        facts = _BuildReport.model_validate_json(output.strip().rpartition(b"\n")[2])
    except ValidationError as error:
        raise _reject_build(f"no valid report of its packages: {error.errors()[0]['msg']}") from error
    for path in facts.built:
        if "\0" in path:
            raise _reject_build(f"a path with a NUL byte: {path!r}")
        check_path(path, f"the environment {target.stem}")
    return facts


def _find_compiler_cache(spec: Specification) -> Path | None:
    """Archive of ccache's files from earlier builds of the repository, or None. Only builds see it."""
    if "gcc" not in spec.programs or not _CCACHE.is_dir():
        return None
    repository = spec.workspace.rpartition("@")[0]
    return environments_cache() / "compiled" / f"{hashlib.sha256(repository.encode()).hexdigest()[:16]}.tar"


async def _copy_out(box: Sandbox, folder: str, archive: IO[bytes]) -> None:
    packed = await box.exec(["tar", "-cf", f"{folder}.tar", "-C", folder, "."], timeout=_TIMEOUT_SECONDS)
    if not packed.ok:
        raise SandboxFault(f"cannot pack {folder}: {packed.output[-200:].decode('utf-8', 'replace')}")
    for start in count(1, _CHUNK_BYTES):  # tail counts bytes from 1
        piece = await box.exec(
            ["sh", "-c", f"tail -c +{start} {folder}.tar | head -c {_CHUNK_BYTES}"], max_bytes=_CHUNK_BYTES
        )
        await asyncio.to_thread(archive.write, piece.output)
        if start > _MAX_BYTES:
            raise _reject_build(f"more than {_MAX_BYTES >> 30} GiB")
        if len(piece.output) < _CHUNK_BYTES:
            break
    archive.seek(0)


def _unpack(archive: IO[bytes], target: Path, python: Path) -> None:
    # untrusted: absolute links may lead only below /usr or to `python`, links come last, no path may pass through one
    try:
        with tarfile.open(fileobj=archive) as tar:
            members = [_relocate_entry(member, target, python) for member in islice(tar, _MAX_FILES + 1)]
            if len(members) > _MAX_FILES:
                raise _reject_build(f"more than {_MAX_FILES} files")
            links = {PurePosixPath(each.name) for each in members if each.issym()}
            for each in members:
                if links.intersection(PurePosixPath(each.name).parents):
                    raise _reject_build(f"a path through a link: {each.name!r}")
                if each.islnk() and PurePosixPath(os.path.normpath(each.linkname)) in links:
                    raise _reject_build(f"a hard link to a link: {each.name!r}")  # tarfile would make the link first
            for each in sorted(members, key=tarfile.TarInfo.issym):
                tar.extract(each, target, filter="fully_trusted")
    # ValueError: a NUL in a name; KeyError: a hard link to nothing; RecursionError: nested headers
    except (tarfile.TarError, EOFError, ValueError, KeyError, RecursionError) as error:
        raise _reject_build(f"not a tar archive: {error}") from error


def _relocate_entry(member: tarfile.TarInfo, target: Path, python: Path) -> tarfile.TarInfo:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise _reject_build(f"a path outside it: {member.name!r}")
    if name.parts[:1] in ((BUILT,), (ENVIRONMENT_RECORD,)):
        raise _reject_build(f"a reserved name: {name.parts[0]}")
    if member.issparse():
        raise _reject_build(f"a sparse file: {member.name!r}")
    link_target = PurePosixPath(os.path.normpath(member.linkname))
    if member.issym() and member.linkname.startswith("/"):
        if not any(link_target.is_relative_to(place) for place in ("/usr", python.parent.parent)):
            raise _reject_build(f"a link to a path outside it: {member.linkname!r}")
        checked = tarfile.tar_filter(member, str(target))
    else:
        checked = tarfile.data_filter(member, str(target))
    mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return checked.replace(mode=mode, uid=0, gid=0, uname="", gname="", deep=False)


def _reject_build(problem: str) -> TaskError:
    return TaskError(
        f"an environment is rejected after its build: {printable(problem[:_SHOWN_CHARS])}",
        fix="look at what the project's build does",
    )


def _explain_output(spec: Specification, result: ExecResult, refused: list[str]) -> CodeRepairError:
    printed = result.output.decode("utf-8", "replace").strip()
    if result.timed_out:
        printed = f"not finished within {_TIMEOUT_SECONDS:.0f} s; {printed}"
    return explain_failed_build(spec.workspace or "these packages", printed, refused)
