"""Unpacking of images into folders for sandboxes.

This process decompresses layers and checks their digests; a process of the sandbox user applies them (`layers`).
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from coderepairrl.environments import history, layers
from coderepairrl.environments.fetch import Say, lock_image
from coderepairrl.environments.manifests import FoundImage, Layer
from coderepairrl.environments.verify import digest_tree
from coderepairrl.errors import PrerequisiteError, TaskError
from coderepairrl.processes.hostgit import create_bare_repository, explain_git_error, git
from coderepairrl.sandbox import rootfs
from coderepairrl.sandbox.contents import read_folder_entries
from coderepairrl.sandbox.guest.files import TOOL_CACHES, blob_id
from coderepairrl.sandbox.interpreter import find_first_python
from coderepairrl.sandbox.privileges import command_as
from coderepairrl.sandbox.rootfs import IMAGE_RECORD, MOUNTED, SHARES, Image, images_folder
from coderepairrl.sandbox.workspace import commit_entries, create_decoy, measure_tree

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"


class CorruptLayer(TaskError):
    """Unreadable layer, or one with another digest."""

    def __init__(self, source: FoundImage, layer: Layer, why: str) -> None:
        super().__init__(
            f"image {source.name}: a layer is corrupt: {why}", fix="fetch it again: remove the file, or its folder"
        )
        self.layer = layer


def unpack_image(source: FoundImage, user: int | None, say: Say) -> Image:
    """Unpack an image for sandboxes of `user`, unless done. Raises `TaskError`, `PrerequisiteError`."""
    home = images_folder(user)
    make_open_folder(home)
    target = home / source.id
    with lock_image(target) as lock:
        if (target / IMAGE_RECORD).is_file():
            return Image.read(target)
        partial = home / f".partial-{source.id}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            tree, shares = make_open_folder(partial) / "tree", home / SHARES
            for each in (tree, shares):
                create_folder_of_user(each, user)
            unpacking = ImageUnpacking(source, tree, shares, partial, user, lock)
            reports = []
            for number, layer in enumerate(source.layers, start=1):
                say(f"{source.name}: unpacking layer {number} of {len(source.layers)}")
                reports.append(unpacking.apply(layer))
            unpacking.add_mount_points()
            image = _finish_image(source, partial, reports, user)
            partial.rename(target)
        except OSError as error:
            raise PrerequisiteError(
                f"image {source.name} cannot be unpacked: {error}", fix="free some disk space, or set CRRL_CACHE"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return image


def make_open_folder(path: Path) -> Path:
    """Create the folder `path`, readable by all users."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(exist_ok=True)
            each.chmod(0o755)
    return path


def create_folder_of_user(path: Path, user: int | None) -> None:
    """Create the folder `path` for `user`."""
    if not path.is_dir():
        make_open_folder(path)
        if user is not None:
            os.chown(path, user, user)


class ImageUnpacking:
    """Applies layers to `tree`, hard-linking equal files to `shares`, if given."""

    def __init__(
        self, source: FoundImage, tree: Path, shares: Path | None, work: Path, user: int | None, lock: int
    ) -> None:
        self.source, self.lock = source, lock
        shutil.copy(layers.__file__, work / "layers.py")
        (work / "layers.py").chmod(0o644)
        python, _ = find_first_python(user, ["-ISc", "import tarfile, hashlib, json"])
        script = [str(python), "-I", "-S", "-B", "-X", "utf8", str(work / "layers.py"), str(tree)]
        script.append(str(shares) if shares else "")
        self.argv = command_as(user, script)

    def apply(self, layer: Layer) -> dict[str, Any]:
        """Apply one layer; returns its report. Raises `CorruptLayer`, `TaskError`, `PrerequisiteError`."""
        with self.source.open(layer) as blob:
            if layer.blob:
                actual = f"sha256:{hashlib.file_digest(blob, 'sha256').hexdigest()}"  # type: ignore[arg-type]
                if actual != layer.blob:
                    raise CorruptLayer(self.source, layer, f"it is {actual}, not {layer.blob}")
                blob.seek(0)
            try:
                report, diff_id = self._run_extraction(decompress_blob(blob))
            except (zlib.error, lzma.LZMAError, zstd.ZstdError, EOFError, gzip.BadGzipFile) as error:
                raise CorruptLayer(self.source, layer, str(error)) from error
        if diff_id != layer.diff_id:
            raise CorruptLayer(self.source, layer, f"its archive is {diff_id}, not {layer.diff_id}")
        return report

    def add_mount_points(self, further: Sequence[str] = ()) -> None:
        """Add mount points, host and DNS files."""
        self._run_extraction(io.BytesIO(_make_mount_points_archive(further)))

    def _run_extraction(self, archive: IO[bytes]) -> tuple[dict[str, Any], str]:
        # returns report and digest
        digest = hashlib.sha256()
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                self.argv, stdin=subprocess.PIPE, stdout=output, stderr=errors, cwd="/", env={}, pass_fds=[self.lock]
            )
            assert child.stdin is not None
            try:
                while data := archive.read(1 << 20):
                    digest.update(data)
                    child.stdin.write(data)
                child.stdin.close()
            except BrokenPipeError:  # its exit code and stderr say why
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
            except BaseException:
                child.kill()
                child.wait()
                raise
            code = child.wait()
            output.seek(0)
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
            if code == layers.NO_ROOM:
                raise PrerequisiteError(
                    f"no room to unpack image {self.source.name}: {reason}",
                    fix="free some disk space, or set CRRL_CACHE",
                )
            if code != 0:
                raise TaskError(
                    f"image {self.source.name} has a layer that is refused: {reason or f'exit code {code}'}"
                )
            return json.loads(output.read()), f"sha256:{digest.hexdigest()}"


def decompress_blob(blob: IO[bytes]) -> IO[bytes]:
    """Open a blob for reading its decompressed bytes."""
    magic = blob.read(6)
    blob.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=blob)  # type: ignore[return-value]
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(blob)
    if magic.startswith(b"\xfd7zXZ"):
        return lzma.LZMAFile(blob)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return zstd.ZstdFile(blob)  # type: ignore[return-value]
    return blob


def _make_mount_points_archive(further: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, mode in (
            ("proc", 0o555),
            ("sys", 0o555),
            ("dev", 0o755),
            ("tmp", 0o1777),
            ("run", 0o755),
            (MOUNTED, 0o755),
            *((folder.strip("/"), 0o755) for folder in further),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name, text in (("etc/hosts", _HOSTS), ("etc/resolv.conf", ""), ("etc/hostname", "sandbox\n")):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


# -- the finished tree


def _finish_image(source: FoundImage, partial: Path, reports: Sequence[dict[str, Any]], user: int | None) -> Image:
    tree = partial / "tree"
    config = source.config.get("config") or {}
    where = _find_working_folder(source, tree, config)
    work = make_open_folder(partial / "work")
    if source.patches:
        _apply_patches(source, tree / where, work, user)
    reduced = history.reduce_to_past(tree, where, work, user)
    shutil.rmtree(work)
    (partial / "layers.py").unlink()
    base, manifest, size = _commit_files(tree / where, partial / "git")
    if source.patches:
        create_decoy(tree / where, partial / "git")
        history.give_same_owner(tree / where, tree / where / ".git")
    (partial / "manifest.json").write_text(json.dumps(manifest))
    user_id, group, home = find_image_user(tree, str(config.get("User") or ""), source.name)
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or ())
    report = merge_layer_reports(reports) | {"removed": list(reduced.removed), **source.digests}
    hidden, digest = tuple(_find_package_copies(tree)), digest_tree(partial, record=IMAGE_RECORD)
    image = Image(
        source.name, source.id, f"/{where}", env, user_id, group, home, base, size, reduced.head, hidden, report, digest
    )
    (partial / IMAGE_RECORD).write_text(json.dumps(asdict(image)))
    for path in partial.glob("*.json"):
        path.chmod(0o644)
    return image


def _apply_patches(image: FoundImage, folder: Path, work: Path, user: int | None) -> None:
    history.remove_repository(folder)  # it shows what the patches undo
    home = create_bare_repository(work / "patching")
    for patch in image.patches:
        try:
            git("apply", "--whitespace=nowarn", "-", folder=home, tree=folder, stdin=patch, prefix=command_as(user, []))
        except subprocess.CalledProcessError as error:
            raise TaskError(f"image {image.name}: its patch does not apply: {explain_git_error(error)}") from error


def _find_working_folder(image: FoundImage, tree: Path, config: Mapping[str, Any]) -> str:
    for candidate in (str(config.get("WorkingDir") or "").strip("/"), "testbed"):
        if candidate:
            where = rootfs.resolve_inside(tree, candidate)
            if where and (tree / where).is_dir():
                return where
    raise TaskError(
        f"image {image.name} has no working folder, and no /testbed", fix="build it with WORKDIR set to the repository"
    )


def find_image_user(tree: Path, spec: str, name: str) -> tuple[int, int, str]:
    """Ids and home of an image's user. Raises `TaskError` if unknown."""
    # rows of passwd: name, password, user id, group id, comment, home, shell; of group: name, password, group id, users
    user_name, _, wanted_group = (spec or "0").partition(":")
    users = [row.split(":") for row in rootfs.read_text_inside(tree, "etc/passwd").splitlines()]
    groups = [row.split(":") for row in rootfs.read_text_inside(tree, "etc/group").splitlines()]
    user_row = next((row for row in users if len(row) > 5 and user_name in (row[0], row[2])), None)
    try:
        user = int(user_row[2] if user_row else user_name)
        group = int(user_row[3]) if user_row else 0
        if wanted_group:
            row = next((row for row in groups if len(row) > 2 and wanted_group in (row[0], row[2])), None)
            group = int(row[2] if row else wanted_group)
    except ValueError:
        raise TaskError(f"image {name} runs as {spec!r}, a user or group that it does not have") from None
    if not 0 <= user < (1 << 32) - 1 or not 0 <= group < (1 << 32) - 1:
        raise TaskError(f"image {name} runs as {spec!r}, which is not a valid id")
    return user, group, user_row[5] if user_row and user_row[5].startswith("/") else "/"


def _commit_files(source: Path, target: Path) -> tuple[str, dict[str, tuple[str, str]], int]:
    """Create a repository at `target` with the files of `source` as its one commit.

    Returns its id; git mode and blob id by path; and the size in bytes on 4 KiB pages.
    """
    entries = sorted(
        entry
        for entry in read_folder_entries(source)
        if TOOL_CACHES.isdisjoint(entry[0].split("/")) and not entry[0].endswith(".pyc")
    )
    # uncompressed: it is rarely read, and compressing would take most of the time
    base = commit_entries(target, entries, "-c", "pack.compression=0", timeout=3600)
    for file in (target, *target.rglob("*")):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return base, {path: (mode, blob_id(data)) for path, mode, data in entries}, measure_tree(source)


def _find_package_copies(tree: Path) -> list[str]:
    """Folders in the image with this package, and so with references."""
    return [
        f"/{Path(parent, name).relative_to(tree)}"
        for parent, folders, _ in os.walk(tree)
        for name in folders
        if name == "coderepairrl" and parent.endswith("-packages") and not Path(parent, name).is_symlink()
    ]


def merge_layer_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the reports of all layers."""
    total: dict[str, Any] = {key: sum(report[key] for report in reports) for key in ("files", "bytes", "shared")}
    counts = Counter[str]()
    left_out: dict[str, list[str]] = {}
    for report in reports:
        counts.update(report["counts"])
        for kind, names in report["left_out"].items():
            left_out[kind] = [*left_out.get(kind, []), *names][: layers.MAX_LISTED]
    return total | {"counts": dict(counts), "left_out": left_out}
