"""Images made by hand: layers of any entries, as a folder in OCI layout or as an archive of ``docker save``."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Made = tuple[tarfile.TarInfo, bytes]
NOW = 1_600_000_000


def entry(name: str, data: bytes = b"", **fields: Any) -> Made:
    """An entry of a layer, by default a regular file; `fields` set other attributes."""
    made = tarfile.TarInfo(name)
    made.size, made.mode, made.mtime = len(data), 0o644, NOW
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


def folder(name: str, mode: int = 0o755, **fields: Any) -> Made:
    return entry(name, type=tarfile.DIRTYPE, mode=mode, **fields)


def link(name: str, target: str, **fields: Any) -> Made:
    return entry(name, type=tarfile.SYMTYPE, linkname=target, mode=0o777, **fields)


def hard_link(name: str, target: str) -> Made:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def archive(entries: Sequence[Made]) -> bytes:
    """Pack entries as a layer."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for about, data in entries:
            tar.addfile(about, io.BytesIO(data))
    return made.getvalue()


def pack_folder(root: Path) -> bytes:
    """Pack a folder as a layer that belongs to root."""
    made = io.BytesIO()

    def as_root(about: tarfile.TarInfo) -> tarfile.TarInfo:
        about.uid = about.gid = 0
        about.uname = about.gname = ""
        return about

    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, path.name, filter=as_root)
    return made.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def configuration(layers: Sequence[bytes], architecture: str = "amd64", **settings: Any) -> bytes:
    diffs = {"type": "layers", "diff_ids": [digest(layer) for layer in layers]}
    return json.dumps({"os": "linux", "architecture": architecture, "config": settings, "rootfs": diffs}).encode()


def compress_layer(data: bytes) -> bytes:
    """Compress without a time stamp, so that equal data have equal bytes."""
    return gzip.compress(data, mtime=0)


def layout(
    target: Path, layers: Sequence[bytes], tag: str = "", compress: Any = compress_layer, **settings: Any
) -> str:
    """Add an image to the OCI layout `target`; return its digest. `settings`: ``Env``, ``User``, ..."""
    blobs = target / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / digest(data)[7:]).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(data), "size": len(data)}

    config = put(configuration(layers, **settings), "config.v1+json")
    listed = [put(compress(layer), "layer.v1.tar+gzip") for layer in layers]
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    about = put(json.dumps(manifest | {"config": config, "layers": listed}).encode(), "manifest.v1+json")
    index = target / "index.json"
    entries = json.loads(index.read_text())["manifests"] if index.exists() else []
    entries.append(about | ({"annotations": {"org.opencontainers.image.ref.name": tag}} if tag else {}))
    index.write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
    (target / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(about["digest"])


def write_docker_archive(target: Path, layers: Sequence[bytes], tag: str, **settings: Any) -> str:
    """Write an image as ``docker save`` does; return its id."""
    config = configuration(layers, **settings)
    names = [f"{digest(layer)[7:]}/layer.tar" for layer in layers]
    manifest = [{"Config": f"{digest(config)[7:]}.json", "RepoTags": [tag], "Layers": names}]
    files = [(f"{digest(config)[7:]}.json", config), *zip(names, layers, strict=True)]
    target.write_bytes(
        archive([entry(name, data) for name, data in [*files, ("manifest.json", json.dumps(manifest).encode())]])
    )
    return digest(config)
