"""What an image says of itself: its manifest and its configuration, and the layers that they name."""

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

LISTS = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
LONGEST = 16 << 20
"""Bytes of a manifest or a configuration."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Layer(NamedTuple):
    """One layer: the digest of the blob, by which it is fetched (empty: it has none), its size in bytes, and the digest
    of the archive in it."""

    blob: str
    size: int
    diff_id: str


@dataclass(frozen=True)
class Found:
    """An image whose blobs are at hand."""

    name: str
    """What it was asked for by."""
    id: str
    """SHA-256 of its configuration, in hex."""
    pinned: str
    """The name with a digest."""
    digests: Mapping[str, str]
    """By what they are of: ``asked`` (perhaps of a list for several machines), ``manifest``, ``converted``."""
    config: Mapping[str, Any]
    layers: tuple[Layer, ...]
    open: Callable[[Layer], AbstractContextManager[IO[bytes]]]
    """The blob of a layer, whose digest `Layer.blob` nobody has checked."""
    patches: tuple[bytes, ...] = ()
    """Of the working folder, to be applied once the layers are there: then its repository begins anew."""


class Reference(NamedTuple):
    """An image's name in its parts: where it is (``docker``, ``oci``, ``docker-archive``, ``dockerfile``), tag and
    digest if it has.

    >>> Reference.of("docker.io/library/python:3.12@sha256:" + 64 * "0").name
    'docker.io/library/python'
    """

    transport: str
    name: str
    tag: str
    digest: str

    @classmethod
    def of(cls, where: str) -> Reference:
        """Of what a task names after ``image:``. Raises `TaskError`."""
        rest, at, digest = where.partition("@")
        if at and not DIGEST.fullmatch(digest):
            raise TaskError(f"image {where}: {digest!r} is no digest", fix="write sha256: and its 64 digits")
        transport = next(
            (name for name in ("oci", "docker-archive", "dockerfile") if rest.startswith(f"{name}:")), "docker"
        )
        if transport != "docker":
            path = rest.removeprefix(f"{transport}:")
            ends = [at.start() for at in re.finditer(":|$", path)]
            end = next((end for end in ends if Path(path[:end]).exists()), ends[0])
            return cls(transport, path[:end], path[end + 1 :], digest)
        name = rest.removeprefix("docker://")
        tag = name.rpartition("/")[2].partition(":")[2]
        name = name.removesuffix(f":{tag}") if tag else name
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", name) or not re.fullmatch(r"[\w.-]{0,128}", tag):
            raise TaskError(f"{where!r} is no name of an image", fix="write HOST/REPOSITORY@sha256:...")
        return cls(transport, name, tag, digest)


def digest_of(data: bytes) -> str:
    """Its name in a registry."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parsed(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises `TaskError`."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{what} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise TaskError(f"{what} is no JSON object")
    return found


def for_this_machine(listed: Mapping[str, Any], what: str) -> str:
    """The digest of the manifest in a list that is for this machine. Raises `TaskError`."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    offered = [entry for entry in listed.get("manifests", ()) if isinstance(entry, dict)]
    for entry in offered:
        about = entry.get("platform") or {}
        if about.get("os") == "linux" and about.get("architecture") == wanted:
            return checked(entry.get("digest"), what)
    if len(offered) == 1 and not offered[0].get("platform"):
        return checked(offered[0].get("digest"), what)
    names = sorted({str((entry.get("platform") or {}).get("architecture")) for entry in offered})
    raise TaskError(f"{what} is not for linux/{wanted}, but for {', '.join(names) or 'nothing'}")


def checked(digest: object, what: str) -> str:
    """`digest`, if it is one that can be checked. Raises `TaskError`."""
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise TaskError(f"{what} names a blob by {digest!r}, which is no SHA-256")
    return digest


def blobs_of(manifest: Mapping[str, Any], what: str) -> tuple[tuple[str, int], list[tuple[str, int]]]:
    """Digest and size of the configuration, then those of the layers. Raises `TaskError`."""
    if manifest.get("schemaVersion") == 1:
        raise TaskError(
            f"{what} has a manifest of version 1, which says too little",
            fix="skopeo copy docker://NAME oci:FOLDER, and name that: image:oci:FOLDER",
        )
    try:
        entries = [manifest["config"], *manifest["layers"]]
        found = [(checked(entry["digest"], what), int(entry["size"])) for entry in entries]
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{what} has a manifest that is none: {error}") from error
    return found[0], found[1:]


def layers_of(config: Mapping[str, Any], blobs: list[tuple[str, int]], what: str) -> tuple[Layer, ...]:
    """The layers, lowest first. Raises `TaskError` where they do not fit the configuration, or this machine."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    if (about := config.get("architecture") or wanted) != wanted or (config.get("os") or "linux") != "linux":
        raise TaskError(f"{what} is for {config.get('os') or 'linux'}/{about}, and this machine is linux/{wanted}")
    ids = (config.get("rootfs") or {}).get("diff_ids") or []
    if len(ids) != len(blobs):
        raise TaskError(f"{what} has {len(blobs)} layers, and a configuration for {len(ids)}")
    return tuple(Layer(*blob, checked(each, what)) for blob, each in zip(blobs, ids, strict=True))
