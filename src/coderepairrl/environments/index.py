"""Package index settings for builds outside and inside sandboxes."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import SplitResult, unquote, urlsplit

_PYPI = ("pypi.org", "files.pythonhosted.org")
_SETTINGS = {
    "UV_DEFAULT_INDEX": ("UV_INDEX_URL", "PIP_INDEX_URL"),
    "UV_FIND_LINKS": ("PIP_FIND_LINKS",),
    "UV_NO_INDEX": ("PIP_NO_INDEX",),
}
"""Variables of uv, and pip's equivalents."""
_PORTS = {"http": 80, "https": 443}


class Index(NamedTuple):
    """The user's package index, with a login hidden from builds."""

    origin: str
    """``https://HOST:PORT``."""
    login: str
    paths: tuple[str, ...]
    """Allowed paths and everything below; others must be named by a page."""

    @classmethod
    def of(cls, url: str, links: Sequence[str] = ()) -> Self:
        """Index at `url`, including `links` of the same origin.

        >>> index = Index.of("https://me:secret@example.org/team/simple/")
        >>> index.origin, index.paths
        ('https://example.org:443', ('/team/simple/',))
        """
        parts = urlsplit(url)
        pages = [parts, *(link for link in map(urlsplit, links) if origin_of(link) == origin_of(parts))]
        login = ""
        if parts.username is not None:
            words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            login = f"Basic {base64.b64encode(words.encode()).decode()}"
        return cls(origin_of(parts), login, tuple(f"{page.path.rstrip('/')}/" for page in pages))


def origin_of(parts: SplitResult) -> str:
    """``SCHEME://HOST:PORT`` of an HTTP URL, else ""."""
    if parts.scheme not in _PORTS or not parts.hostname:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{parts.port or _PORTS[parts.scheme]}"


def own_index() -> Index | None:
    """Configured replacement of PyPI, if any."""
    settings = _settings()
    url = settings.get("UV_DEFAULT_INDEX", "")
    return Index.of(url, _links(settings)) if origin_of(urlsplit(url)) else None


def settings_inside(index: Index | None, proxy: str) -> dict[str, str]:
    """Variables of uv for a build that reaches `index` through `proxy` (``http://HOST:PORT``)."""
    settings = _settings()
    urls = [_inside(url, index, proxy) for url in _links(settings)]
    if "UV_DEFAULT_INDEX" in settings:
        settings["UV_DEFAULT_INDEX"] = _inside(settings["UV_DEFAULT_INDEX"], index, proxy)
    return settings | ({"UV_FIND_LINKS": ",".join(urls)} if urls else {})


def pip_settings(inside: Mapping[str, str]) -> dict[str, str]:
    """`settings_inside` as variables of pip."""
    settings = {other: value for name, value in inside.items() for other in _SETTINGS[name] if other[0] == "P"}
    return settings | ({"PIP_FIND_LINKS": links.replace(",", " ")} if (links := settings.get("PIP_FIND_LINKS")) else {})


def index_hosts() -> tuple[str, ...]:
    """Hosts that builds reach directly."""
    return _PYPI


def local_folders() -> list[str]:
    """Local folders of wheels."""
    return [each for each in _links(_settings()) if each.startswith("/") and Path(each).is_dir()]


def _settings() -> dict[str, str]:
    values = {
        name: next((os.environ[each] for each in (name, *alternatives) if os.environ.get(each)), "")
        for name, alternatives in _SETTINGS.items()
    }
    return {name: value for name, value in values.items() if value}


def _links(settings: dict[str, str]) -> list[str]:
    return settings.get("UV_FIND_LINKS", "").replace(",", " ").split()


def _inside(url: str, index: Index | None, proxy: str) -> str:
    # without login, and through the proxy if within `index`
    parts = urlsplit(url)
    if not origin_of(parts):
        return url
    if index and origin_of(parts) == index.origin:
        return parts._replace(scheme="http", netloc=urlsplit(proxy).netloc).geturl()
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
