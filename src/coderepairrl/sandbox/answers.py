"""Folders of this project that hold answers: references, unbroken originals, other runs' tasks. No sandbox shows them.

They come into view where the package is installed below a folder that sandboxes are shown: by pip as root, in an image
of Python, in conda, or in a checkout below ``/usr``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def folders() -> tuple[Path, ...]:
    """The package, the checkout that it may lie in, and the caches that it may have."""
    checkout = _PACKAGE.parents[1]
    own = [checkout] if _PACKAGE.parent.name == "src" and (checkout / "pyproject.toml").is_file() else []
    bases = (os.environ.get("XDG_CACHE_HOME") or "~/.cache", "~/.cache", "/var/cache")
    found = [*own, _PACKAGE]
    for cache in (os.environ.get("CRRL_CACHE"), *(f"{base}/coderepairrl" for base in bases)):
        with contextlib.suppress(RuntimeError):  # there is no home, and so no folder in it
            found += [Path(cache).expanduser().absolute()] if cache else []
    return tuple(found)


def in_view(shown: Iterable[str]) -> list[tuple[str, str]]:
    """Each of `shown` (paths of the host) with the path, by way of it, of a folder of ours that lies in it."""
    found: list[tuple[str, str]] = []
    for path in dict.fromkeys(shown):
        real = Path(path).resolve()
        for folder in folders():
            if folder.is_dir() and folder.resolve().is_relative_to(real):
                seen = Path(path) / folder.resolve().relative_to(real)
                if not any(seen.is_relative_to(outer) for _, outer in found):
                    found.append((path, str(seen)))
    return found
