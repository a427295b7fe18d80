"""Folders of this project that hold answers: references, unbroken originals, other runs' tasks. No sandbox shows them.

They come into view where the package is installed below a folder that sandboxes are shown: by pip as root, in an image
of Python, in conda, or in a checkout below ``/usr``. So do those of another version, whichever one runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from coderepairrl.processes import caches

_PACKAGE = Path(__file__).resolve().parents[1]
_DEPTH = 3
"""How far below a folder that is shown environments are looked for; further, where one of these is on the way."""
_ENVIRONMENTS = ("envs", "pipx", "venvs", "uv", "tools")

IN_IMAGES = tuple(
    f"{way}/lib*/python3*/*-packages/coderepairrl"
    for way in ("", "/*", "/usr/*", "/opt/*", "/opt/*/*", "/opt/*/*/*", "/root/*", "/home/*/*", "/srv/*")
)
"""Where an image of containers may have the package."""


def folders() -> tuple[Path, ...]:
    """The package, the checkout that it may lie in, and the caches that it may have."""
    checkout = _PACKAGE.parents[1]
    own = [checkout] if _PACKAGE.parent.name == "src" and (checkout / "pyproject.toml").is_file() else []
    return (*own, _PACKAGE, *caches.folders())


def outermost_first(folders: Iterable[str]) -> list[str]:
    """The order to show `folders` in: one that lies in a folder of ours, which is hidden, comes into view again.

    That is an agent's own, in a cache.
    """
    return sorted(folders, key=lambda folder: len(Path(folder).parts))


def in_view(shown: Iterable[str]) -> list[tuple[str, str]]:
    """Each of `shown` (paths of the host) with the path, by way of it, of a folder of ours that lies in it."""
    found: list[tuple[str, str]] = []
    for path in dict.fromkeys(shown):
        real = Path(path).resolve()
        for folder in (*folders(), *installed(real)):
            if folder.is_dir() and folder.resolve().is_relative_to(real):
                seen = Path(path) / folder.resolve().relative_to(real)
                if not any(seen.is_relative_to(outer) for _, outer in found):
                    found.append((path, str(seen)))
    return found


@cache
def installed(shown: Path) -> tuple[Path, ...]:
    """Copies of the package below `shown`, wherever pip, conda, pipx and uv put packages. Takes a tenth of a second."""
    found = [
        shown / "coderepairrl",
        *shown.glob("*-packages/coderepairrl"),
        *shown.glob("python3*/*-packages/coderepairrl"),
    ]
    level = [shown]
    for depth in range(2 * _DEPTH):
        deeper = [folder for folder in level if depth < _DEPTH or set(_ENVIRONMENTS) & set(folder.parts[-2:])]
        level = [Path(path) for folder in deeper for path in _subfolders(folder)]
        for folder in level:
            if folder.name.startswith("lib"):
                found += folder.glob("python3*/*-packages/coderepairrl")
    return tuple(folder for folder in found if (folder / "tasks").is_dir())


def _subfolders(folder: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # what we may not read, a sandbox may not either
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
