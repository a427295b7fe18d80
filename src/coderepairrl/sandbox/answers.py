"""Folders with answers (references, unbroken originals, other runs' tasks), hidden from sandboxes.

They would be visible where a copy of the package lies below a shown folder: installed by pip as root, in a Python
image, in conda, or as a checkout below ``/usr``.
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
"""Levels below a shown folder searched for environments; deeper below one of `_ENVIRONMENTS`."""
_ENVIRONMENTS = ("envs", "pipx", "venvs", "uv", "tools")

IN_IMAGES = tuple(
    f"{way}/lib*/python3*/*-packages/coderepairrl"
    for way in ("", "/*", "/usr/*", "/opt/*", "/opt/*/*", "/opt/*/*/*", "/root/*", "/home/*/*", "/srv/*")
)
"""Places of the package in container images."""


def folders() -> tuple[Path, ...]:
    """The package, its checkout and its caches, as far as they exist."""
    checkout = _PACKAGE.parents[1]
    checkouts = [checkout] if _PACKAGE.parent.name == "src" and (checkout / "pyproject.toml").is_file() else []
    return (*checkouts, _PACKAGE, *caches.folders())


def outermost_first(folders: Iterable[str]) -> list[str]:
    """Sort `folders` in mounting order: an agent's folder inside a hidden cache must become visible again."""
    return sorted(folders, key=lambda folder: len(Path(folder).parts))


def in_view(shown: Iterable[str]) -> list[tuple[str, str]]:
    """Pair each host path in `shown` with the paths, below it, of the folders of ours it contains."""
    pairs: list[tuple[str, str]] = []
    for path in dict.fromkeys(shown):
        real = Path(path).resolve()
        for folder in (*folders(), *installed(real)):
            if folder.is_dir() and folder.resolve().is_relative_to(real):
                seen = Path(path) / folder.resolve().relative_to(real)
                if not any(seen.is_relative_to(outer) for _, outer in pairs):
                    pairs.append((path, str(seen)))
    return pairs


@cache
def installed(shown: Path) -> tuple[Path, ...]:
    """Copies of the package below `shown` in places used by pip, conda, pipx and uv. Takes 0.1 s."""
    copies = [
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
                copies += folder.glob("python3*/*-packages/coderepairrl")
    return tuple(folder for folder in copies if (folder / "tasks").is_dir())


def _subfolders(folder: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # what we may not read, a sandbox may not either
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
