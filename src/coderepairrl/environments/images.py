"""Preparation of images, in parallel; later uses need no network."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import get_ident
from typing import NamedTuple

from coderepairrl.environments import dockerfile, trees
from coderepairrl.environments.fetch import Offer, Say, check_room, lock_image
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError, combine_errors
from coderepairrl.printable import format_count
from coderepairrl.processes.caches import images_cache
from coderepairrl.processes.installs import check_reachable
from coderepairrl.sandbox.privileges import sandbox_user
from coderepairrl.sandbox.rootfs import Image, find_image, image_record_path, images_folder, pin_image

_FREE_SPACE = "free some disk space there, or set CRRL_CACHE to a folder that can be written"


class ReadyImage(NamedTuple):
    """A prepared image, with its requested name and the same name with its digest."""

    name: str
    pinned: str
    image: Image


def prepare_images(
    names: Iterable[str], *, offered: Path | None = None, jobs: int = 2, say: Say = lambda _: None
) -> list[ReadyImage]:
    """Fetch and unpack missing images, `jobs` at a time.

    Names are ``NAME@DIGEST``, ``NAME:TAG``, ``oci:FOLDER``, ``docker-archive:FILE``, ``dockerfile:FOLDER:STATE``.
    `offered` is an OCI layout or archive to try first. Raises `NoRoom`, or one error for all images that failed
    (`TaskError`, `PrerequisiteError`).
    """
    user = sandbox_user()
    home = images_cache()
    try:
        for name in ("blobs", "names"):
            trees.make_open_folder(home / name)
    except OSError as error:
        raise PrerequisiteError(f"cannot write to {home}: {error}", fix=_FREE_SPACE) from error
    check_reachable(home / "blobs")
    problems: list[CodeRepairError] = []
    unique_names = list(dict.fromkeys(names))

    def look_up(name: str) -> Offer | None:
        try:
            return None if _find_ready(name, user) else _look_up(name, user, offered)
        except CodeRepairError as error:
            problems.append(error)
            return None

    def prepare(name: str, offer: Offer | None) -> ReadyImage | None:
        try:
            return _find_ready(name, user) or (offer and _prepare_image(name, user, offered, say, offer))
        except CodeRepairError as error:
            problems.append(error)
        except OSError as error:
            problems.append(PrerequisiteError(f"image {name}: cannot write to {home}: {error}", fix=_FREE_SPACE))
        return None

    with ThreadPoolExecutor(jobs) as pool:
        offers = dict(zip(unique_names, pool.map(look_up, unique_names), strict=True))
        _check_space({name: offer for name, offer in offers.items() if offer}, home, say)
        results = list(pool.map(prepare, offers, offers.values()))
    if problems:
        raise combine_errors(problems)
    return [ready for ready in results if ready is not None]


def _check_space(offers: Mapping[str, Offer], home: Path, say: Say) -> None:
    """Report the total size of `offers`. Raises `NoRoom`."""
    if not offers:
        return
    to_fetch = {digest: size for offer in offers.values() for digest, size in offer.missing.items()}
    layers = {digest: size for offer in offers.values() for digest, size in offer.layers.items()}
    fetch_bytes, disk_bytes = sum(to_fetch.values()), sum(to_fetch.values()) + sum(layers.values())
    summary = format_count(len(offers), "image")
    say(f"{summary}: {fetch_bytes >> 20} MiB to fetch, about {disk_bytes >> 20} MiB of disk in all, in {home}")
    if hub := sum(offer.hub for offer in offers.values()):
        say(
            f"{format_count(hub, 'image')} from Docker Hub, which allows 100 pulls in six hours without login (as of"
            " 2025; an image can count as two or three): skopeo login docker.io"
        )
    check_room(home, disk_bytes, summary)


def _look_up(name: str, user: int | None, offered: Path | None) -> Offer:
    work = images_folder(user) / f".building-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return dockerfile.look_up_image(name, images_cache() / "blobs", offered, user=user, work=work)


def _find_ready(name: str, user: int | None) -> ReadyImage | None:
    try:
        _, image = find_image(name, user)
    except TaskError:
        return None
    return ReadyImage(name, pin_image(name), image)


def _prepare_image(name: str, user: int | None, offered: Path | None, say: Say, offer: Offer) -> ReadyImage:
    record = image_record_path(name)
    with lock_image(record.with_suffix("")):
        fetched = offer.get(say)
        try:
            image = trees.unpack_image(fetched, user, say)
        except trees.CorruptLayer as error:
            if not (cached := images_cache() / "blobs" / error.layer.blob.replace(":", "/")).is_file():
                raise
            say(f"{error}; fetching it again")
            cached.unlink()
            fetched = _look_up(name, user, offered).get(say)
            image = trees.unpack_image(fetched, user, say)
        for key in {name, fetched.pinned, *(f"@{digest}" for digest in fetched.digests.values())}:
            _write_record(image_record_path(f"image{key}" if key.startswith("@") else key), fetched.pinned, image.id)
    return ReadyImage(name, fetched.pinned, image)


def _write_record(record: Path, pinned: str, image: str) -> None:
    # one file per thread: images that are prepared at the same time may share a base, whose digest names the record
    unfinished = record.with_name(f".{record.name}.{os.getpid()}.{get_ident()}")
    unfinished.write_text(json.dumps({"pinned": pinned, "id": image}))
    unfinished.chmod(0o644)
    unfinished.replace(record)
