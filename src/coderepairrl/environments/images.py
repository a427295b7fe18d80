"""Images made ready: fetched and unpacked, several at a time, each once. Afterwards no network is needed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coderepairrl.environments import dockerfile, trees
from coderepairrl.environments.fetch import Say
from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError, several
from coderepairrl.processes.caches import images_cache
from coderepairrl.processes.installs import check_reachable
from coderepairrl.sandbox.privileges import SANDBOX_USER
from coderepairrl.sandbox.rootfs import Image, find, pinned, record_of, store


class ReadyImage(NamedTuple):
    """An image that sandboxes can open: what it was asked for by, the name with its digest, and what is known of it."""

    name: str
    pinned: str
    image: Image


def prepare_images(
    names: Iterable[str], *, offered: Path | None = None, jobs: int = 2, say: Say = lambda _: None
) -> list[ReadyImage]:
    """Fetch and unpack the images `names` (``NAME@DIGEST``, ``NAME:TAG``, ``oci:FOLDER``, ``docker-archive:FILE``,
    ``dockerfile:FOLDER:STATE``) for sandboxes of this user, `jobs` at a time; those that are ready are left alone.

    `offered` is a folder in OCI layout, or an archive of ``docker save``, that is asked before a registry. All of them
    are tried; raises `TaskError` and `PrerequisiteError` for those that cannot be had, together.
    """
    user = SANDBOX_USER if os.geteuid() == 0 else None
    home = images_cache()
    try:
        for name in ("blobs", "names"):
            trees.folder(home / name)
    except OSError as error:
        raise PrerequisiteError(f"cannot write to {home}: {error}", fix="set CRRL_CACHE") from error
    check_reachable(home / "blobs")
    problems: list[CodeRepairError] = []

    def attempt(name: str) -> ReadyImage | None:
        try:
            return _prepare(name, user, offered, say)
        except CodeRepairError as error:
            problems.append(error)
            return None

    with ThreadPoolExecutor(jobs) as pool:
        made = list(pool.map(attempt, dict.fromkeys(names)))
    if problems:
        raise several(problems)
    return [ready for ready in made if ready is not None]


def _prepare(name: str, user: int | None, offered: Path | None, say: Say) -> ReadyImage:
    try:
        _, image = find(name, user)
        return ReadyImage(name, pinned(name), image)
    except TaskError:
        pass
    home = images_cache()
    with trees.alone(home / "names" / record_of(name).stem):
        key = hashlib.sha256(name.encode()).hexdigest()[:16]
        look = partial(
            dockerfile.find, name, home / "blobs", say, offered, user=user, work=store(user) / f".building-{key}"
        )
        found = look()
        try:
            image = trees.build(found, user, say)
        except trees.CorruptLayer as error:
            if not (mine := home / "blobs" / error.layer.blob.replace(":", "/")).is_file():
                raise
            say(f"{error}; fetching it again")
            mine.unlink()
            found = look()
            image = trees.build(found, user, say)
        for key in {name, found.pinned, *(f"@{digest}" for digest in found.digests.values())}:
            _note(record_of(f"image{key}" if key.startswith("@") else key), found.pinned, image.id)
    return ReadyImage(name, found.pinned, image)


def _note(record: Path, named: str, image: str) -> None:
    unfinished = record.with_name(f".{record.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"pinned": named, "id": image}))
    unfinished.chmod(0o644)
    unfinished.replace(record)
