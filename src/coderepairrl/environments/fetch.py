"""Sources of images: a registry, by skopeo; a folder in OCI layout; an archive of ``docker save``.

Registry blobs are stored, so killed fetches continue. Layers are verified when unpacked (`trees`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import IO, Any, NamedTuple

from coderepairrl.environments.manifests import (
    LIST_TYPES,
    MAX_JSON_BYTES,
    FoundImage,
    Layer,
    Reference,
    check_digest,
    choose_manifest_digest,
    digest_bytes,
    list_blobs,
    list_layers,
    parse_json_object,
)
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.processes.children import run_child
from coderepairrl.sandbox.interpreter import install_command

Say = Callable[[str], None]
GROWTH = 3
"""Ratio of a layer's unpacked to compressed size: 2.2 to 2.9 for images of Debian with Python, conda included."""
SPARE = 256 << 20  # bytes of the disk, left to other programs
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?/")
_RETRY_FIX = "run it again: what was fetched is kept"
_TIMEOUT_SECONDS = 180.0
"""Seconds for a registry's answer. Skopeo alone would wait silently for up to 20 minutes."""
_MIN_BYTES_PER_SECOND = 1 << 18
"""Bytes per second that a registry must exceed."""


class NoRoom(PrerequisiteError):
    """Too little disk space."""


class Offer(NamedTuple):
    """An available image and its costs."""

    missing: Mapping[str, int]
    """Bytes to fetch, by digest."""
    layers: Mapping[str, int]
    """Estimated bytes of unpacked layers, by digest."""
    get: Callable[[Say], FoundImage]
    """Fetches missing blobs, and builds the image of a Dockerfile. Raises as `look_up_image`."""
    hub: bool = False
    """From Docker Hub, which limits pulls."""


def look_up_image(name: str, store: Path, offered: Path | None = None) -> Offer:
    """Find image `name`; from a registry, fetch only the manifest.

    `offered` is an OCI layout or archive to try first. Raises `TaskError` for a missing or unsuitable image,
    `PrerequisiteError` if it cannot be fetched now.
    """
    reference = Reference.parse(name)
    if reference.transport in ("oci", "docker-archive"):
        return _look_up_local(Path(reference.name), reference, name, is_layout=reference.transport == "oci")
    if offered is not None:
        with suppress(_ImageMissing):
            return _look_up_local(offered, reference, name, is_layout=offered.is_dir())
    return _find_in_registry(reference, name, store)


def _look_up_local(path: Path, reference: Reference, name: str, *, is_layout: bool) -> Offer:
    image = find_in_layout(path, reference, name) if is_layout else find_in_archive(path, reference, name)
    growth = GROWTH if is_layout else 1
    # layers of an archive are uncompressed, and so are those of a folder whose two digests are equal
    layers = {each.diff_id: each.size * (1 if each.blob == each.diff_id else growth) for each in image.layers}
    return Offer({}, layers, lambda _: image)


class _ImageMissing(TaskError):
    """Image missing from a folder or archive."""


# -- a folder in OCI layout


def find_in_layout(folder: Path, reference: Reference, name: str) -> FoundImage:
    """Find an image in OCI layout by digest, tag or name; or the only one."""
    blobs = folder / "blobs"
    index = parse_json_object(_read_blob_file(folder / "index.json", name), f"{folder}/index.json")
    entry = _choose_manifest(index, blobs, reference, name)
    requested = digest = check_digest(entry.get("digest"), name)
    manifest = parse_json_object(_read_blob(blobs, digest, name), name)
    if _is_manifest_list(manifest):
        digest = choose_manifest_digest(manifest, name)
        manifest = parse_json_object(_read_blob(blobs, digest, name), name)
    return _describe_image(
        name, f"{reference.repository}@{requested}", {"asked": requested, "manifest": digest}, manifest, blobs
    )


def _choose_manifest(index: dict[str, Any], blobs: Path, reference: Reference, name: str) -> dict[str, Any]:
    entries = [entry for entry in index.get("manifests", ()) if isinstance(entry, dict)]
    if reference.digest:
        matching = [entry for entry in entries if entry.get("digest") == reference.digest]
        if not matching and (blobs / reference.digest.replace(":", "/")).is_file():
            matching = [{"digest": reference.digest}]  # listed only in a nested list, or not at all
    elif reference.transport == "oci" and not reference.tag:
        matching = entries
    else:
        names = {reference.tag, f"{reference.name}:{reference.tag or 'latest'}", reference.name} - {""}
        keys = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
        matching = [entry for entry in entries if names & {(entry.get("annotations") or {}).get(key) for key in keys}]
    if not matching:
        raise _ImageMissing(f"image {name} is not in {blobs.parent}", fix="name one by its digest (index.json)")
    if len({entry.get("digest") for entry in matching}) > 1:
        raise TaskError(f"image {name}: {blobs.parent} has several", fix="name one by its digest: ...@sha256:...")
    return matching[0]


def _is_manifest_list(manifest: dict[str, Any]) -> bool:
    return manifest.get("mediaType") in LIST_TYPES or "manifests" in manifest


def _describe_image(
    name: str, pinned: str, digests: dict[str, str], manifest: dict[str, Any], blobs: Path
) -> FoundImage:
    (config_digest, _), layers = list_blobs(manifest, f"image {name}")
    config = parse_json_object(_read_blob(blobs, config_digest, name), f"the configuration of {name}")

    def open_layer(layer: Layer) -> IO[bytes]:
        return (blobs / layer.blob.replace(":", "/")).open("rb")

    id_ = config_digest.removeprefix("sha256:")
    return FoundImage(name, id_, pinned, digests, config, list_layers(config, layers, f"image {name}"), open_layer)


def _read_blob(blobs: Path, digest: str, name: str) -> bytes:
    path = blobs / digest.replace(":", "/")
    data = _read_blob_file(path, name)
    if digest_bytes(data) != digest:
        raise TaskError(f"image {name}: {path} is corrupt: its SHA-256 differs", fix="remove it, and try again")
    return data


def _read_blob_file(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_JSON_BYTES)
    except OSError as error:
        raise _ImageMissing(f"image {name}: {path}: {error.strerror}", fix="name an existing file") from error


# -- an archive of docker save


def find_in_archive(path: Path, reference: Reference, name: str) -> FoundImage:
    """Find an image in an archive by id (SHA-256 of its configuration) or tag."""
    try:
        with tarfile.open(path) as archive:
            listing = b'{"images":' + _read_member(archive, "manifest.json") + b"}"
            configs = [
                (entry, _read_member(archive, entry["Config"]))
                for entry in _select_by_tag(parse_json_object(listing, name)["images"], reference)
            ]
            chosen = next((each for each in configs if reference.digest in ("", digest_bytes(each[1]))), None)
            if chosen is None:
                raise _ImageMissing(
                    f"image {name} is not in {path}", fix="name it by a tag, or by the digest of its image id"
                )
            entry, data = chosen
            layer_names = [str(each) for each in entry["Layers"]]
            sizes = [("", archive.getmember(each).size) for each in layer_names]
    except (tarfile.TarError, EOFError, KeyError, TypeError) as error:
        raise TaskError(f"{path} is not an archive of docker save: {error}", fix="docker save -o FILE NAME") from error
    except OSError as error:
        raise _ImageMissing(f"image {name}: {path}: {error.strerror}", fix="name an existing file") from error
    config = parse_json_object(data, f"the configuration of {name}")
    layers = list_layers(config, sizes, f"image {name}")
    members = dict(zip(layers, layer_names, strict=True))

    @contextmanager
    def open_layer(layer: Layer) -> Iterator[IO[bytes]]:
        with tarfile.open(path) as again:  # one each: two may read at a time
            file = again.extractfile(members[layer])
            assert file is not None
            yield file

    digest = digest_bytes(data)
    id_, pinned = digest.removeprefix("sha256:"), f"{reference.repository}@{digest}"
    return FoundImage(name, id_, pinned, {"asked": digest}, config, layers, open_layer)


def _select_by_tag(listed: list[dict[str, Any]], reference: Reference) -> list[dict[str, Any]]:
    if reference.digest or (reference.transport == "docker-archive" and not reference.tag and len(listed) == 1):
        return listed
    names = {reference.tag, f"{reference.name}:{reference.tag or 'latest'}"} - {""}
    tags = [(entry, set(entry.get("RepoTags") or ())) for entry in listed]
    return [entry for entry, repo_tags in tags if names & (repo_tags | {tag.rpartition(":")[2] for tag in repo_tags})]


def _read_member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read(MAX_JSON_BYTES)


# -- a registry


def _find_in_registry(reference: Reference, name: str, store: Path) -> Offer:
    tag_or_digest = f"@{reference.digest}" if reference.digest else f":{reference.tag or 'latest'}"
    data = _fetch_manifest(reference.name + tag_or_digest, reference.digest, name, store)
    digests = dict.fromkeys(("asked", "manifest"), digest_bytes(data))
    manifest = parse_json_object(data, name)
    if _is_manifest_list(manifest):
        digests["manifest"] = choose_manifest_digest(manifest, name)
        data = _fetch_manifest(f"{reference.name}@{digests['manifest']}", digests["manifest"], name, store)
        manifest = parse_json_object(data, name)
    config, layers = list_blobs(manifest, f"image {name}")

    def get(say: Say) -> FoundImage:
        fetched, source = manifest, f"{reference.name}@{digests['manifest']}"
        layout = store / f".layout-{digests['manifest'].removeprefix('sha256:')}"
        with lock_image(layout) as lock:
            shutil.rmtree(layout, ignore_errors=True)  # left by a killed attempt
            missing = [blob for blob in [config, *layers] if not _has_blob(store, *blob)]
            if missing:
                need = sum(size for _, size in missing)
                say(f"{name}: fetching {need >> 20} MiB of {sum(size for _, size in layers) >> 20}")
                digests["converted"] = _copy_image(
                    source, name, store, layout, _TIMEOUT_SECONDS + need / _MIN_BYTES_PER_SECOND, lock
                )
                if not all(_has_blob(store, *blob) for blob in missing):  # skopeo compressed layers that were not
                    fetched = parse_json_object(_read_blob(store, digests["converted"], name), name)
        return _describe_image(name, f"{reference.name}@{digests['asked']}", digests, fetched, store)

    missing = {digest: size for digest, size in [config, *layers] if not _has_blob(store, digest, size)}
    host, path, _ = reference.name.partition("/")
    # Docker's rule: a first part without dot and colon is a user of Docker Hub, not a host
    names_host = bool(path) and (set(".:") & set(host) or host == "localhost")
    hub = not names_host or host in ("docker.io", "index.docker.io")
    return Offer(missing, {digest: GROWTH * size for digest, size in layers}, get, bool(missing) and hub)


def _has_blob(store: Path, digest: str, size: int) -> bool:
    path = store / digest.replace(":", "/")
    return path.is_file() and path.stat().st_size == size


def _fetch_manifest(source: str, digest: str, name: str, store: Path) -> bytes:
    if digest and (store / digest.replace(":", "/")).is_file():
        return _read_blob(store, digest, name)
    data = _run_skopeo(["inspect", "--raw", *_skopeo_options(source, ""), f"docker://{source}"], name, _TIMEOUT_SECONDS)
    if digest and digest_bytes(data) != digest:
        raise TaskError(f"image {name}: the registry answered another manifest, {digest_bytes(data)}")
    path = store / digest_bytes(data).replace(":", "/")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")  # several may fetch it at a time
    partial.write_bytes(data)
    partial.replace(path)
    return data


def _copy_image(source: str, name: str, store: Path, layout: Path, seconds: float, lock: int) -> str:
    # returns the OCI manifest's digest; skopeo inherits the lock, so the next attempt waits if it outlives us
    try:
        words = ["copy", "--quiet", *_skopeo_options(source, "src-"), "--dest-shared-blob-dir", str(store)]
        _run_skopeo([*words, f"docker://{source}", f"oci:{layout}:image"], name, seconds, lock)
        index = parse_json_object((layout / "index.json").read_bytes(), f"{layout}/index.json")
    finally:
        shutil.rmtree(layout, ignore_errors=True)
    return check_digest(index["manifests"][0]["digest"], name)


def _skopeo_options(source: str, side: str) -> list[str]:
    return ["--retry-times", "3", *([f"--{side}tls-verify=false"] if _LOOPBACK.match(source) else [])]


def _run_skopeo(arguments: list[str], name: str, seconds: float, *held: int) -> bytes:
    """Run skopeo, which inherits descriptors `held`; returns its output."""
    program = shutil.which("skopeo")
    if program is None:
        raise PrerequisiteError(
            f"skopeo, which fetches image {name}, is not installed",
            fix=f"{install_command('skopeo')}; or crrl tasks prepare --images, a folder in OCI layout or an archive",
        )
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
        # a policy on signatures is not needed, since every blob is checked by its digest
        command = [program, "--insecure-policy", f"--command-timeout={seconds:.0f}s", *arguments]
        done = run_child(["sh", "-c", 'exec "$@" 2>"$0"', errors.name, *command], stdout=output, pass_fds=held)
        output.seek(0)
        if done.returncode == 0:
            return output.read()
        raise _explain_skopeo_error(Path(errors.name).read_text(errors="replace"), name)


def _explain_skopeo_error(printed: str, name: str) -> CodeRepairError:
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    words = lines[-1] if lines else "skopeo printed nothing"
    if message := re.search(r'msg="((?:[^"\\]|\\.)*)"', words):
        words = message[1].replace('\\"', '"')
    lower = printed.lower()
    host = name.partition("/")[0]
    if re.search(r"too ?many ?requests|(status|code):? 429\b", lower):
        fix = f"wait, or log in, which raises the limit: skopeo login {host}; {_RETRY_FIX}"
        return PrerequisiteError(f"the registry of image {name} throttles us: {words}", fix=fix)
    if "deadline exceeded" in lower:
        words = f"the registry of image {name} did not give it in time: it throttles us silently, or is slow"
        return PrerequisiteError(words, fix=f"wait, or log in, which raises a limit: skopeo login {host}; {_RETRY_FIX}")
    if "x509" in lower or "certificate" in lower:
        words = f"the registry of image {name} is not trusted: {words}"
        return PrerequisiteError(words, fix="compare this machine's clock with another one (date)")
    if any(sign in lower for sign in ("unauthorized", "denied", "authentication required")):
        return PrerequisiteError(f"image {name} is private, or does not exist: {words}", fix=f"skopeo login {host}")
    if any(sign in lower for sign in ("manifest unknown", "name unknown", "name invalid", "not found")):
        return TaskError(f"the registry has no image {name}: {words}", fix="name an existing one by its digest")
    if "no space left" in lower or "disk quota" in lower:
        return PrerequisiteError(
            f"no room to fetch image {name}: {words}", fix="free some disk space, or set CRRL_CACHE"
        )
    return PrerequisiteError(f"image {name} cannot be fetched: {words}", fix=_RETRY_FIX)


@contextmanager
def lock_image(target: Path) -> Iterator[int]:
    """Lock `target`; yields the descriptor of the lock."""
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def check_room(folder: Path, need: int, what: str) -> None:
    """Raise `NoRoom` unless `need` bytes are free."""
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < need + SPARE:
        raise NoRoom(
            f"{what} needs {need >> 20} MiB in {folder}, whose disk has {free >> 20} MiB left",
            fix="free some disk space, or set CRRL_CACHE to a folder of another disk",
        )
