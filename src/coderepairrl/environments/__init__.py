"""Environments of tasks: Python environments, and images prepared in parallel; then no network is needed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

from coderepairrl.environments import dockerfile, trees
from coderepairrl.environments.build import KIND, CondaFile, Environment, Specification, build, prepare_environments
from coderepairrl.environments.fetch import NoRoom, Offer, Say, check_room, lock_image
from coderepairrl.environments.pythons import sandbox_version
from coderepairrl.environments.verify import check_environments, check_unchanged, fingerprint, fingerprints, states
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError, several
from coderepairrl.printable import counted
from coderepairrl.processes.caches import images_cache
from coderepairrl.processes.installs import check_reachable
from coderepairrl.sandbox.privileges import SANDBOX_USER
from coderepairrl.sandbox.rootfs import Image, find_image, pinned, record_of, store

__all__ = [
    "KIND",
    "CondaFile",
    "Environment",
    "NoRoom",
    "ReadyImage",
    "Specification",
    "build",
    "check_environments",
    "check_unchanged",
    "fingerprint",
    "fingerprints",
    "prepare_environments",
    "prepare_images",
    "sandbox_version",
    "states",
]
_ELSEWHERE = "free some disk space there, or set CRRL_CACHE to a folder that can be written"


class ReadyImage(NamedTuple):
    """A prepared image under its requested and pinned names."""

    name: str
    pinned: str
    image: Image


def prepare_images(
    names: Iterable[str], *, offered: Path | None = None, jobs: int = 2, say: Say = lambda _: None
) -> list[ReadyImage]:
    """Fetch and unpack missing images, `jobs` at a time.

    Names are ``NAME@DIGEST``, ``NAME:TAG``, ``oci:FOLDER``, ``docker-archive:FILE``, ``dockerfile:FOLDER:STATE``.
    `offered` is an OCI layout or archive to try first. Raises `NoRoom`, and `TaskError` and `PrerequisiteError` for all
    failures together.
    """
    user = SANDBOX_USER if os.geteuid() == 0 else None
    home = images_cache()
    try:
        for name in ("blobs", "names"):
            trees.make_open_folder(home / name)
    except OSError as error:
        raise PrerequisiteError(f"cannot write to {home}: {error}", fix=_ELSEWHERE) from error
    check_reachable(home / "blobs")
    problems: list[CodeRepairError] = []

    unique_names = list(dict.fromkeys(names))

    def ask(name: str) -> Offer | None:
        try:
            return None if _ready(name, user) else dockerfile.look_up_base(name, home / "blobs", offered)
        except CodeRepairError as error:
            problems.append(error)
            return None

    def attempt(name: str, offer: Offer | None) -> ReadyImage | None:
        try:
            return _ready(name, user) or (offer and _prepare_image(name, user, offered, say, offer))
        except CodeRepairError as error:
            problems.append(error)
        except OSError as error:
            problems.append(PrerequisiteError(f"image {name}: cannot write to {home}: {error}", fix=_ELSEWHERE))
        return None

    with ThreadPoolExecutor(jobs) as pool:
        offers = dict(zip(unique_names, pool.map(ask, unique_names), strict=True))
        _check_room({name: offer for name, offer in offers.items() if offer}, home, say)
        results = list(pool.map(attempt, offers, offers.values()))
    if problems:
        raise several(problems)
    return [ready for ready in results if ready is not None]


def _check_room(offers: Mapping[str, Offer], home: Path, say: Say) -> None:
    """Show the total size of `offers`. Raises `NoRoom`."""
    if not offers:
        return
    lacking = {digest: size for offer in offers.values() for digest, size in offer.lacking.items()}
    layers = {digest: size for offer in offers.values() for digest, size in offer.layers.items()}
    fetched, need = sum(lacking.values()), sum(lacking.values()) + sum(layers.values())
    summary = counted(len(offers), "image")
    say(f"{summary}: {fetched >> 20} MiB to fetch, about {need >> 20} MiB of disk with their files, in {home}")
    if hub := sum(offer.hub for offer in offers.values()):
        say(
            f"{counted(hub, 'image')} of Docker Hub, where 100 may be pulled in six hours without a login (as of 2025; "
            "an image can count as two or three): skopeo login docker.io"
        )
    check_room(home, need, summary)


def _ready(name: str, user: int | None) -> ReadyImage | None:
    try:
        _, image = find_image(name, user)
    except TaskError:
        return None
    return ReadyImage(name, pinned(name), image)


def _prepare_image(name: str, user: int | None, offered: Path | None, say: Say, offer: Offer) -> ReadyImage:
    home = images_cache()
    with lock_image(home / "names" / record_of(name).stem):
        key = hashlib.sha256(name.encode()).hexdigest()[:16]
        get = partial(
            dockerfile.fetch_or_build_image,
            name,
            home / "blobs",
            say,
            user=user,
            work=store(user) / f".building-{key}",
        )
        fetched = get(offer)
        try:
            image = trees.build(fetched, user, say)
        except trees.CorruptLayer as error:
            if not (mine := home / "blobs" / error.layer.blob.replace(":", "/")).is_file():
                raise
            say(f"{error}; fetching it again")
            mine.unlink()
            fetched = get(dockerfile.look_up_base(name, home / "blobs", offered))
            image = trees.build(fetched, user, say)
        for key in {name, fetched.pinned, *(f"@{digest}" for digest in fetched.digests.values())}:
            _note(record_of(f"image{key}" if key.startswith("@") else key), fetched.pinned, image.id)
    return ReadyImage(name, fetched.pinned, image)


def _note(record: Path, named: str, image: str) -> None:
    # of this thread: images made at a time may have a digest in common, that of their base
    unfinished = record.with_name(f".{record.name}.{os.getpid()}.{get_ident()}")
    unfinished.write_text(json.dumps({"pinned": named, "id": image}))
    unfinished.chmod(0o644)
    unfinished.replace(record)
