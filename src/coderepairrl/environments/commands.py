"""Image layers made by the commands and copies of a Dockerfile.

A command runs in bubblewrap (`ImageBuilder`) on the image's files, as root of a user namespace with one user: calls
that need a real root succeed without effect. It can reach only package indexes. Its layer is the difference of file
listings before and after. Layers are cached by base image, earlier layers and command, so a killed build continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, Self

from coderepairrl.environments import layers, trees
from coderepairrl.environments.fetch import GROWTH, Say, check_room, lock_image
from coderepairrl.environments.index import (
    PYPI,
    find_mirrors,
    list_wheel_folders,
    make_installer_files,
    make_pip_settings,
    make_uv_settings,
    read_user_index,
    serve_proxy,
)
from coderepairrl.environments.manifests import FoundImage, Layer, digest_bytes
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.printable import printable
from coderepairrl.processes.caches import images_cache
from coderepairrl.processes.scratch import scratch
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.backend import delete_trees
from coderepairrl.sandbox.bwrap import ImageBuilder
from coderepairrl.sandbox.imageview import MOUNTED
from coderepairrl.sandbox.rootfs import Image
from coderepairrl.types import ExecResult, Task

_VERSION = 2
"""Part of the cache keys: increase it when equal commands give different layers."""
_DISK_BYTES = 4 << 30
_LIMITS = {"disk_bytes": _DISK_BYTES, "tmp_bytes": _DISK_BYTES, "memory": 2 * _DISK_BYTES, "file_bytes": _DISK_BYTES}
_TIMEOUT = 1800.0  # seconds
_MAX_OUTPUT = 16 << 20  # bytes
_SHOWN_CHARS = 600  # Characters of a command and its output in errors.
_MAX_LAYER_BYTES, _MAX_FILES = 16 << 30, 1 << 20
_DISK_CHECK_SECONDS = 0.5
_RETRIES = {"npm_config_fetch_retries": "2", "PIP_RETRIES": "5"}
"""Default retries of npm and pip; other sandboxes allow none."""
_COPY_TIME = 946_684_800
"""Time of files copied from the context: 2000-01-01."""
_Listing = dict[str, tuple[int, ...]]
"""Mode, inode, size, and change times, by path."""


@dataclass(frozen=True)
class BuildCommand:
    """A ``RUN`` of a Dockerfile; `where` is its file and line."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    workdir: str
    user: str
    network: bool
    where: str


@dataclass(frozen=True)
class BuildCopy:
    """A ``COPY`` of a Dockerfile, or, without sources, a folder to create; `where` is its file and line."""

    sources: tuple[str, ...]
    target: str
    """Absolute; with a slash at its end it is a folder."""
    where: str
    mode: int | None = None
    origin: str = ""
    """Stage or image that has the sources; empty for the folder of the Dockerfile."""
    texts: tuple[tuple[str, str], ...] = ()
    """Here-documents and their names."""


def match_files(root: Path, pattern: str, where: str) -> list[tuple[str, Path]]:
    """Names and paths below `root` for a source of ``COPY``; links stay inside. Raises `TaskError`."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise TaskError(f"{where}: COPY {pattern}: outside of the folder", fix="move it into the folder")
    matches = [("", "")]
    for part in parts:
        listed = [(at, sorted(os.listdir(root / at))) for _, at in matches if (root / at).is_dir()]  # noqa: PTH208
        matches = [
            (name, resolved)
            for at, names in listed
            for name in names
            if fnmatchcase(name, part) and (resolved := rootfs.resolve_inside(root, name, at)) is not None
        ]
    if not matches:
        raise TaskError(f"{where}: COPY {pattern}: there is no such file", fix="correct the path")
    return [(name, root / at) for name, at in matches]


class LayerBuilder:
    """Builds layers on top of `base` in the temporary folder `work`, for sandboxes that run as `user`."""

    def __init__(self, base: FoundImage, work: Path, user: int | None, say: Say) -> None:
        self._base, self._work, self._user, self._say = base, work, user, say
        self._key = digest_bytes(f"{_VERSION} {base.id}".encode())
        self._contents: dict[str, bytes | Path] = {}
        self._unpacking: trees.ImageUnpacking | None = None
        self._applied = 0
        self._lock = -1
        self._stack = contextlib.ExitStack()
        self.image = replace(base, open=self._open_layer)
        """Image so far, without its configuration."""

    def __enter__(self) -> Self:
        self._lock = self._stack.enter_context(lock_image(trees.make_open_folder(self._work.parent) / self._work.name))
        self._stack.callback(delete_trees, self._work)
        delete_trees(self._work)  # remains of a killed build
        trees.make_open_folder(self._work)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, archive: bytes) -> None:
        """Add a layer."""
        self._append_layer(Layer("", len(archive), digest_bytes(archive)), archive)

    def run(self, command: BuildCommand) -> None:
        """Add the layer of `command`: from the cache, or by running it.

        Raises `TaskError`, `SandboxFault` and `PrerequisiteError`.
        """

        def make(target: Path) -> None:
            self._say(f"{command.where}: running {printable(command.argv[-1][:_SHOWN_CHARS])}")
            self._run_layer_command(command, target)
            self._applied += 1  # the command has changed the tree already

        self._add_cached(asdict(command), command.where, make)

    def copy(self, part: BuildCopy, source: Path | LayerBuilder) -> None:
        """Add the layer of `part`: from a folder, or (cached) from the files of another image.

        Raises `TaskError` and `PrerequisiteError`.
        """
        if isinstance(source, Path):
            buffer = io.BytesIO()
            self._write_copies(part, source, buffer, _COPY_TIME)
            self.add(buffer.getvalue())
            return

        def make(target: Path) -> None:
            with target.open("wb") as file:
                self._write_copies(part, source.unpack(), file, None)

        self._add_cached(asdict(part) | {"origin": source._key}, part.where, make)

    def _add_cached(self, fields: Mapping[str, Any], where: str, make: Callable[[Path], None]) -> None:
        content = {name: value for name, value in fields.items() if name != "where"}
        key = hashlib.sha256(f"{self._key}{json.dumps(content)}".encode()).hexdigest()
        archive = _find_cached_layer(key)
        if archive is None:
            try:
                layer = self._work / "layer.tar"
                make(layer)
                folder = trees.make_open_folder(images_cache() / "commands")
                archive = layer.replace(folder / f"{key}-{_digest_file(layer)}.tar")
            except OSError as error:
                fix = "free some disk space, or set CRRL_CACHE"
                raise PrerequisiteError(f"{where}: cannot run: {error}", fix=fix) from error
        self._append_layer(Layer("", archive.stat().st_size, f"sha256:{archive.stem.rpartition('-')[2]}"), archive)

    def _append_layer(self, layer: Layer, content: bytes | Path) -> None:
        self._contents[layer.diff_id] = content
        self._key = digest_bytes(f"{self._key} {layer.diff_id}".encode())
        self.image = replace(self.image, layers=(*self.image.layers, layer))

    def _open_layer(self, layer: Layer) -> AbstractContextManager[IO[bytes]]:
        if layer.blob or layer.diff_id not in self._contents:
            return self._base.open(layer)
        content = self._contents[layer.diff_id]
        return contextlib.nullcontext(io.BytesIO(content)) if isinstance(content, bytes) else content.open("rb")

    def _run_layer_command(self, command: BuildCommand, target: Path) -> None:
        tree = self.unpack()
        at = rootfs.resolve_inside(tree, command.workdir)
        if at is None or not (tree / at).is_dir():
            raise TaskError(f"{command.where}: the image has no folder {command.workdir}")
        user, group, home = trees.find_image_user(tree, command.user, self.image.name)
        image = Image(self.image.name, "", f"/{at}", dict(command.env), user, group, home, "", 0)
        before = _list_files(tree)
        result, refused = asyncio.run(_execute_command(tree, image, command))
        if not result.ok:
            raise _explain_failure(command, result, refused)
        _write_layer(before, tree, target, command.where)

    def unpack(self) -> Path:
        """Apply the layers so far to the tree, and make the mount points of sandboxes. Returns the tree."""
        tree, name = self._work / "tree", self.image.name
        if self._unpacking is None:
            trees.create_folder_of_user(tree, self._user)
            check_room(self._work, GROWTH * sum(layer.size for layer in self.image.layers), f"building {name}")
            # without hard links to shared files, since commands may write to any file
            self._unpacking = trees.ImageUnpacking(self.image, tree, None, self._work, self._user, self._lock)
        for layer in self.image.layers[self._applied :]:
            self._unpacking.apply(layer)
        self._applied = len(self.image.layers)
        self._unpacking.add_mount_points(list_wheel_folders())
        return tree

    def _write_copies(self, part: BuildCopy, root: Path, output: IO[bytes], time: int | None) -> None:
        files = [each for pattern in part.sources for each in match_files(root, pattern, part.where)]
        is_folder_target = part.target.endswith("/") or len(files) + len(part.texts) > 1
        is_folder_target = is_folder_target or any(path.is_dir() for _, path in files) or self._names_folder(part)
        target = part.target.strip("/")
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
            if is_folder_target:
                _add_folder_to_archive(archive, target)
            for name, path in files:
                is_folder = path.is_dir()
                file_target = PurePosixPath(target, name if is_folder_target else "")
                for each in sorted(path.rglob("*")) if is_folder else [path]:
                    at = str(PurePosixPath(target, each.relative_to(path)) if is_folder else file_target)
                    if time is not None and each.is_dir() and not each.is_symlink():
                        _add_folder_to_archive(archive, at)  # a checkout's folders have the modes of its user's umask
                    else:
                        _add_to_archive(archive, each, at, mode=part.mode, time=time)
            for name, text in part.texts:
                entry = tarfile.TarInfo(str(PurePosixPath(target, name if is_folder_target else "")))
                entry.size, entry.mtime, entry.mode = len(text.encode()), _COPY_TIME, part.mode or 0o644
                archive.addfile(entry, io.BytesIO(text.encode()))

    def _names_folder(self, part: BuildCopy) -> bool:
        ending = PurePosixPath(part.target).suffix
        if ending and all(PurePosixPath(each).suffix == ending for each in part.sources):
            return False  # certainly a file, so that nothing need be unpacked
        tree = self.unpack()
        at = rootfs.resolve_inside(tree, part.target)
        return at is not None and (tree / at).is_dir()


# -- cache of layers


def _find_cached_layer(key: str) -> Path | None:
    """Find the undamaged archive ``KEY-DIGEST.tar``; deletes damaged ones."""
    for path in (images_cache() / "commands").glob(f"{key}-*.tar"):
        if _digest_file(path) == path.stem.rpartition("-")[2]:
            return path
        path.unlink()
    return None


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- running a command


async def _execute_command(tree: Path, image: Image, command: BuildCommand) -> tuple[ExecResult, list[str]]:
    """Run `command`; return its result and the hosts that it was refused."""
    files, variables = make_installer_files(MOUNTED)
    backend = ImageBuilder(tree, image, files, binds=list_wheel_folders(), **_LIMITS)
    with contextlib.closing(backend), scratch("image") as home:
        home.chmod(0o711)  # the guest's user must reach the socket in it
        task = Task(f"image/{image.name}", "build", "", f"image:{image.name}", b"")
        index = read_user_index()
        mirrors = find_mirrors() if command.network else None
        served = serve_proxy(home / "index.sock", PYPI, index, mirrors)
        async with served as refused, backend.open(task) as box:
            env = {"PYTHONDONTWRITEBYTECODE": ""} | variables
            if command.network:
                reached = await box.reach(str(home / "index.sock"))
                names = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")
                settings = make_uv_settings(index, reached)
                env |= dict.fromkeys(names, reached) | settings | make_pip_settings(settings) | _RETRIES
            running = asyncio.create_task(box.exec(command.argv, env=env, timeout=_TIMEOUT, max_bytes=_MAX_OUTPUT))
            watching = asyncio.create_task(_watch_disk(tree, command.where))
            try:
                await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
                return await running, refused
            finally:
                for each in (running, watching):
                    each.cancel()
                await asyncio.gather(running, watching, return_exceptions=True)


async def _watch_disk(tree: Path, where: str) -> None:
    """Raise before the disk is full, which would stop other programs."""
    while True:
        check_room(tree, 0, f"{where}: the command")
        await asyncio.sleep(_DISK_CHECK_SECONDS)


def _explain_failure(command: BuildCommand, result: ExecResult, refused: list[str]) -> TaskError:
    printed = result.output.decode("utf-8", "replace").strip()
    outcome = f"took more than {_TIMEOUT:.0f} s" if result.timed_out else f"ended with {result.exit_code}"
    hosts = printable(", ".join(dict.fromkeys(refused))[:_SHOWN_CHARS])
    hosts = f" (it wanted {hosts}: a build reaches only package indexes)" if refused else ""
    return TaskError(
        f"{command.where}: RUN {printable(command.argv[-1][:_SHOWN_CHARS])} {outcome}{hosts}: "
        f"{printable(printed[-_SHOWN_CHARS:])}",
        fix="name a prebuilt image (docker_image) instead of the Dockerfile, or change the command",
    )


# -- differences as a layer


def _list_files(tree: Path) -> _Listing:
    """List everything below `tree`; makes folders readable that their owner cannot read."""
    listing: _Listing = {}
    left = [tree]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    left.append(Path(entry.path))
                    if status.st_mode & 0o700 != 0o700:
                        Path(entry.path).chmod(stat.S_IMODE(status.st_mode) | 0o700)
                        status = entry.stat(follow_symlinks=False)
                times = (status.st_mtime_ns, status.st_ctime_ns)
                listing[os.path.relpath(entry.path, tree)] = (status.st_mode, status.st_ino, status.st_size, *times)
        if len(listing) > _MAX_FILES:
            raise TaskError(f"an image has more than {_MAX_FILES} files")
    return listing


def _write_layer(before: _Listing, tree: Path, target: Path, where: str) -> None:
    after = _list_files(tree)
    changed = [path for path in sorted(after) if before.get(path) != after[path]]
    folders = {"", *(path for path, (mode, *_) in after.items() if stat.S_ISDIR(mode))}
    deleted = [path for path in sorted(before) if path not in after and os.path.dirname(path) in folders]  # noqa: PTH120
    if sum(after[path][2] for path in changed) > _MAX_LAYER_BYTES:
        raise TaskError(f"{where}: the command wrote more than {_MAX_LAYER_BYTES >> 30} GiB")
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in deleted:
            folder, name = os.path.split(path)
            archive.addfile(tarfile.TarInfo(os.path.join(folder, f"{layers.HIDDEN}{name}")))  # noqa: PTH118
        for path in changed:
            if path.rpartition("/")[2].startswith(layers.HIDDEN):
                raise TaskError(f"{where}: the command left {printable(path)}, a name that hides a file in layers")
            _add_to_archive(archive, tree / path, path)


def _add_folder_to_archive(archive: tarfile.TarFile, path: str) -> None:
    # by a whiteout of a missing entry in it: an entry for itself would change the base's folder
    archive.addfile(tarfile.TarInfo(str(PurePosixPath(path, f"{layers.HIDDEN}crrl"))))


def _add_to_archive(
    archive: tarfile.TarFile, source: Path, path: str, *, mode: int | None = None, time: int | None = None
) -> None:
    status = source.lstat()
    entry = archive.gettarinfo(source, path)
    if entry is None or entry.ischr() or entry.isblk():  # None: a socket
        return
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode, entry.mtime = stat.S_IMODE(status.st_mode) if mode is None else mode, time or 0
    if time is None:
        entry.pax_headers = {"mtime": f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09d}"}
    elif entry.islnk():  # the files of a checkout may share content by chance
        entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", status.st_size
    if not entry.isreg():
        archive.addfile(entry)
        return
    if not os.access(source, os.R_OK):
        source.chmod(entry.mode | 0o400)
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123
        archive.addfile(entry, file)
