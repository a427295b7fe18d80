"""Image manifests, configurations and layers."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from coderepairrl.errors import TaskError
from coderepairrl.sandbox.rootfs import DIGEST

LIST_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MAX_JSON_BYTES = 16 << 20
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
"""This machine's, spelled as in images."""


class Layer(NamedTuple):
    """Blob digest (empty: unknown), blob size in bytes, and digest of the uncompressed archive."""

    blob: str
    size: int
    diff_id: str


@dataclass(frozen=True)
class FoundImage:
    """Image with its blobs."""

    name: str
    id: str
    """SHA-256 (hexadecimal) of its configuration."""
    pinned: str
    """Name with its digest."""
    digests: Mapping[str, str]
    """Digests ``asked`` (perhaps of a multi-architecture list), ``manifest``, ``converted`` (by skopeo)."""
    config: Mapping[str, Any]
    layers: tuple[Layer, ...]
    open: Callable[[Layer], AbstractContextManager[IO[bytes]]]
    """Opens a layer's blob, whose digest is unchecked."""
    patches: tuple[bytes, ...] = ()
    """Patches of the working folder; with any, its Git history is removed."""


class Reference(NamedTuple):
    """A parsed image name; `transport` is ``docker``, ``oci``, ``docker-archive`` or ``dockerfile``.

    >>> Reference.parse("docker.io/library/python:3.12@sha256:" + 64 * "0").name
    'docker.io/library/python'
    """

    transport: str
    name: str
    tag: str
    digest: str

    @property
    def repository(self) -> str:
        """Name with its transport, unless that is ``docker``."""
        return self.name if self.transport == "docker" else f"{self.transport}:{self.name}"

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse the text after ``image:``. Raises `TaskError`."""
        rest, at, digest = text.partition("@")
        if at and not DIGEST.fullmatch(digest):
            raise TaskError(f"image {text}: {digest!r} is not a digest", fix="write sha256: and its 64 digits")
        transport = next(
            (name for name in ("oci", "docker-archive", "dockerfile") if rest.startswith(f"{name}:")), "docker"
        )
        if transport != "docker":
            path = rest.removeprefix(f"{transport}:")
            # a path may have colons, too: the name is the shortest existing path before one, and the tag follows
            ends = [match.start() for match in re.finditer(":|$", path)]
            end = next((end for end in ends if Path(path[:end]).exists()), ends[0])
            return cls(transport, path[:end], path[end + 1 :], digest)
        name = rest.removeprefix("docker://")
        tag = name.rpartition("/")[2].partition(":")[2]
        name = name.removesuffix(f":{tag}") if tag else name
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", name) or not re.fullmatch(r"[\w.-]{0,128}", tag):
            raise TaskError(f"{text!r} is not a name of an image", fix="write HOST/REPOSITORY@sha256:...")
        return cls(transport, name, tag, digest)


def digest_bytes(data: bytes) -> str:
    """Registry digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `TaskError`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TaskError(f"{what} is not a JSON object")
    return value


def choose_manifest_digest(listed: Mapping[str, Any], what: str) -> str:
    """Digest of this machine's manifest. Raises `TaskError`."""
    offered = [entry for entry in listed.get("manifests", ()) if isinstance(entry, dict)]
    for entry in offered:
        offered_platform = entry.get("platform") or {}
        if offered_platform.get("os") == "linux" and offered_platform.get("architecture") == ARCHITECTURE:
            return check_digest(entry.get("digest"), what)
    if len(offered) == 1 and not offered[0].get("platform"):
        return check_digest(offered[0].get("digest"), what)
    names = sorted({str((entry.get("platform") or {}).get("architecture")) for entry in offered})
    raise TaskError(f"{what} is not for linux/{ARCHITECTURE}, but for {', '.join(names) or 'nothing'}")


def check_digest(digest: object, what: str) -> str:
    """Validate `digest`. Raises `TaskError`."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise TaskError(f"{what} names a blob by {digest!r}, which is not a SHA-256")
    return digest


def list_blobs(manifest: Mapping[str, Any], what: str) -> tuple[tuple[str, int], list[tuple[str, int]]]:
    """Digest and size of configuration and layers. Raises `TaskError`."""
    if manifest.get("schemaVersion") == 1:
        raise TaskError(
            f"{what} has a manifest of version 1, which is not supported",
            fix="skopeo copy docker://NAME oci:FOLDER, then name image:oci:FOLDER",
        )
    try:
        entries = [manifest["config"], *manifest["layers"]]
        blobs = [(check_digest(entry["digest"], what), int(entry["size"])) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{what} has a malformed manifest: {error}") from error
    return blobs[0], blobs[1:]


def list_layers(config: Mapping[str, Any], blobs: list[tuple[str, int]], what: str) -> tuple[Layer, ...]:
    """Layers, lowest first. Raises `TaskError` if they mismatch configuration or machine."""
    target = f"{config.get('os') or 'linux'}/{config.get('architecture') or ARCHITECTURE}"
    if target != f"linux/{ARCHITECTURE}":
        raise TaskError(f"{what} is for {target}, and this machine is linux/{ARCHITECTURE}")
    ids = (config.get("rootfs") or {}).get("diff_ids") or []
    if len(ids) != len(blobs):
        raise TaskError(f"{what} has {len(blobs)} layers, and a configuration for {len(ids)}")
    return tuple(Layer(*blob, check_digest(each, what)) for blob, each in zip(blobs, ids, strict=True))
