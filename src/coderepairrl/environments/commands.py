"""Image layers made by commands.

They run in bubblewrap (`ImageBuilder`), on the image's files, as one unprivileged user that reaches only the package
index. File lists before and after give the layer. Layers are cached by origin, so killed builds continue.
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
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple, Self

from coderepairrl.environments import layers, trees
from coderepairrl.environments.fetch import GROWTH, Say, check_room, lock_image
from coderepairrl.environments.index import index_hosts, local_folders, own_index, pip_settings, settings_inside
from coderepairrl.environments.manifests import Found, Layer, digest_of
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.printable import printable
from coderepairrl.processes.caches import images_cache
from coderepairrl.processes.scratch import scratch
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.backend import destroy
from coderepairrl.sandbox.bwrap import ImageBuilder
from coderepairrl.sandbox.rootfs import Image
from coderepairrl.types import ExecResult, Task

_VERSION = 1
"""Version of the rules for layers."""
_ROOM = 4 << 30
_LIMITS = {"disk_bytes": _ROOM, "tmp_bytes": _ROOM, "memory": 2 * _ROOM, "file_bytes": _ROOM}
_SECONDS = 1800.0
_OUTPUT, _SHOWN = 16 << 20, 600
_LARGEST, _MOST = 16 << 30, 1 << 20
_WATCH = 0.5
_Listing = dict[str, tuple[int, ...]]
"""Mode, inode, size, and change times, by path."""


@dataclass(frozen=True)
class Running:
    """A command of a Dockerfile; `where` is its file and line."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    workdir: str
    user: str
    network: bool
    where: str


class LayerBuilder:
    """Builds layers on `base` in the temporary folder `work`."""

    def __init__(self, base: Found, work: Path, user: int | None, say: Say) -> None:
        self._base, self._work, self._user, self._say = base, work, user, say
        self._key = digest_of(f"{_VERSION} {base.id}".encode())
        self._own: dict[str, bytes | Path] = {}
        self._unpacking: trees.Unpacking | None = None
        self._applied = 0
        self._lock = -1
        self._left = contextlib.ExitStack()
        self.found = replace(base, open=self._open)
        """Image so far, without its settings."""

    def __enter__(self) -> Self:
        self._lock = self._left.enter_context(lock_image(trees.make_open_folder(self._work.parent) / self._work.name))
        self._left.callback(destroy, self._work)
        destroy(self._work)  # remains of a killed build
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def add(self, archive: bytes) -> None:
        """Add a layer."""
        self._put(Layer("", len(archive), digest_of(archive)), archive)

    def run(self, command: Running) -> None:
        """Add the layer of `command`, cached or run now. Raises `TaskError`, `SandboxFault`, `PrerequisiteError`."""
        fields = {name: value for name, value in asdict(command).items() if name != "where"}
        key = hashlib.sha256(f"{self._key}{json.dumps(fields)}".encode()).hexdigest()
        archive = _kept(key)
        if archive is None:
            self._say(f"{command.where}: running {printable(command.argv[-1][:_SHOWN])}")
            try:
                archive = self._made(command, key)
            except OSError as error:
                fix = "free some disk space, or set CRRL_CACHE"
                raise PrerequisiteError(f"{command.where}: cannot be run: {error}", fix=fix) from error
            self._applied += 1  # the command has changed the tree already
        self._put(Layer("", archive.path.stat().st_size, archive.digest), archive.path)

    def _put(self, layer: Layer, content: bytes | Path) -> None:
        self._own[layer.diff_id] = content
        self._key = digest_of(f"{self._key} {layer.diff_id}".encode())
        self.found = replace(self.found, layers=(*self.found.layers, layer))

    def _open(self, layer: Layer) -> AbstractContextManager[IO[bytes]]:
        if layer.blob or layer.diff_id not in self._own:
            return self._base.open(layer)
        content = self._own[layer.diff_id]
        return contextlib.nullcontext(io.BytesIO(content)) if isinstance(content, bytes) else content.open("rb")

    def _made(self, command: Running, key: str) -> _Kept:
        tree = self._unpacked()
        at = rootfs.resolve_inside(tree, command.workdir)
        if at is None or not (tree / at).is_dir():
            raise TaskError(f"{command.where}: there is no folder {command.workdir}")
        who, group, home = trees.user_of(tree, command.user, self.found.name)
        image = Image(self.found.name, "", f"/{at}", dict(command.env), who, group, home, "", 0)
        before = _listing(tree)
        result, refused = asyncio.run(_execute(tree, image, command))
        if not result.ok:
            raise _failed(command, result, refused)
        _take(before, tree, self._work / "layer.tar", command.where)
        return _keep(self._work / "layer.tar", key)

    def _unpacked(self) -> Path:
        # applies the layers so far, and makes the mount points of sandboxes
        tree, name = self._work / "tree", self.found.name
        if self._unpacking is None:
            trees.make_open_folder(self._work)
            trees.owned(tree, self._user)
            check_room(self._work, GROWTH * sum(layer.size for layer in self.found.layers), f"building {name}")
            # without hard links to shared files, since commands may write to any file
            self._unpacking = trees.Unpacking(self.found, tree, None, self._work, self._user, self._lock, self._say)
        for layer in self.found.layers[self._applied :]:
            self._unpacking.apply(layer)
        self._applied = len(self.found.layers)
        self._unpacking.mount_points(local_folders())
        return tree


# -- layers of commands that were run before


class _Kept(NamedTuple):
    path: Path
    digest: str


def _kept(key: str) -> _Kept | None:
    for path in (images_cache() / "commands").glob(f"{key}-*.tar"):
        digest = path.stem.rpartition("-")[2]
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                return _Kept(path, f"sha256:{digest}")
        path.unlink()
    return None


def _keep(archive: Path, key: str) -> _Kept:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    path = trees.make_open_folder(images_cache() / "commands") / f"{key}-{digest}.tar"
    archive.replace(path)
    return _Kept(path, f"sha256:{digest}")


# -- running one


async def _execute(tree: Path, image: Image, command: Running) -> tuple[ExecResult, list[str]]:
    # returns the result and the refused hosts
    from coderepairrl.environments.index import proxy  # loads aiohttp, and most images are ready without a command

    backend = ImageBuilder(tree, image, binds=local_folders(), **_LIMITS)
    try:
        with scratch("image") as home:
            home.chmod(0o711)  # the guest's user passes through it to the socket
            task = Task(f"image/{image.name}", "build", "", f"image:{image.name}", b"")
            index = own_index()
            async with proxy(home / "index.sock", index_hosts(), index) as refused, backend.open(task) as box:
                env = {"PYTHONDONTWRITEBYTECODE": ""}
                if command.network:
                    reached = await box.reach(str(home / "index.sock"))
                    names = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")
                    settings = settings_inside(index, reached)
                    env |= dict.fromkeys(names, reached) | settings | pip_settings(settings)
                running = asyncio.create_task(box.exec(command.argv, env=env, timeout=_SECONDS, max_bytes=_OUTPUT))
                watching = asyncio.create_task(_watch(tree, command.where))
                try:
                    await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():
                        watching.result()
                    return await running, refused
                finally:
                    for each in (running, watching):
                        each.cancel()
                    await asyncio.gather(running, watching, return_exceptions=True)
    finally:
        backend.close()


async def _watch(tree: Path, where: str) -> None:
    # ends the build before the disk is full, which would stop other programs
    while True:
        check_room(tree, 0, f"{where}: the command")
        await asyncio.sleep(_WATCH)


def _failed(command: Running, result: ExecResult, refused: list[str]) -> TaskError:
    printed = result.output.decode("utf-8", "replace").strip()
    outcome = f"took more than {_SECONDS:.0f} s" if result.timed_out else f"ended with {result.exit_code}"
    hosts = printable(", ".join(dict.fromkeys(refused))[:_SHOWN])
    hosts = f" (it wanted {hosts}: a build reaches the package index alone)" if refused else ""
    return TaskError(
        f"{command.where}: RUN {printable(command.argv[-1][:_SHOWN])} {outcome}{hosts}: {printable(printed[-_SHOWN:])}",
        fix="name the image that it builds, prebuilt (docker_image), or change the command",
    )


# -- what it changed


def _listing(tree: Path) -> _Listing:
    """List everything below `tree`, opening folders to their owner."""
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
        if len(listing) > _MOST:
            raise TaskError(f"an image of more than {_MOST} files")
    return listing


def _take(before: _Listing, tree: Path, target: Path, where: str) -> None:
    after = _listing(tree)
    changed = [path for path in sorted(after) if before.get(path) != after[path]]
    gone = [path for path in sorted(before) if path not in after and _is_folder(after, os.path.dirname(path))]  # noqa: PTH120
    if sum(after[path][2] for path in changed) > _LARGEST:
        raise TaskError(f"{where}: the command wrote more than {_LARGEST >> 30} GiB")
    links: dict[int, str] = {}
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for path in gone:
            folder, name = os.path.split(path)
            archive.addfile(tarfile.TarInfo(os.path.join(folder, f"{layers.HIDDEN}{name}")))  # noqa: PTH118
        for path in changed:
            if path.rpartition("/")[2].startswith(layers.HIDDEN):
                raise TaskError(f"{where}: the command left {printable(path)}, and in layers that name hides another")
            _add(archive, tree / path, path, links)


def _is_folder(listing: _Listing, path: str) -> bool:
    return not path or (path in listing and stat.S_ISDIR(listing[path][0]))


def _add(archive: tarfile.TarFile, place: Path, path: str, links: dict[int, str]) -> None:
    status = place.lstat()
    entry = tarfile.TarInfo(path)
    entry.mode = stat.S_IMODE(status.st_mode)
    entry.pax_headers = {"mtime": f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09d}"}
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.fspath(place.readlink())
    elif stat.S_ISFIFO(status.st_mode):
        entry.type = tarfile.FIFOTYPE
    elif not stat.S_ISREG(status.st_mode):
        return
    elif status.st_ino in links:
        entry.type, entry.linkname = tarfile.LNKTYPE, links[status.st_ino]
    else:
        links[status.st_ino] = path
        entry.size = status.st_size
        if not entry.mode & 0o400:  # only root could read it
            place.chmod(entry.mode | 0o400)
        with open(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:  # noqa: PTH123
            archive.addfile(entry, file)
        return
    archive.addfile(entry)
