"""Package index settings for builds outside and inside sandboxes, and whether it or the project failed one."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import SplitResult, unquote, urlsplit

from coderepairrl.errors import CodeRepairError, PrerequisiteError, TaskError
from coderepairrl.printable import printable

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
    def parse(cls, url: str, links: Sequence[str] = ()) -> Self:
        """Index at `url`, including `links` of the same origin.

        >>> index = Index.parse("https://me:secret@example.org/team/simple/")
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
    settings = _index_settings()
    url = settings.get("UV_DEFAULT_INDEX", "")
    return Index.parse(url, _links(settings)) if origin_of(urlsplit(url)) else None


def settings_inside(index: Index | None, proxy: str) -> dict[str, str]:
    """Variables of uv for a build that reaches `index` through `proxy` (``http://HOST:PORT``)."""
    settings = _index_settings()
    urls = [_inside_url(url, index, proxy) for url in _links(settings)]
    if "UV_DEFAULT_INDEX" in settings:
        settings["UV_DEFAULT_INDEX"] = _inside_url(settings["UV_DEFAULT_INDEX"], index, proxy)
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
    return [each for each in _links(_index_settings()) if each.startswith("/") and Path(each).is_dir()]


def _index_settings() -> dict[str, str]:
    values = {
        name: next((os.environ[each] for each in (name, *alternatives) if os.environ.get(each)), "")
        for name, alternatives in _SETTINGS.items()
    }
    return {name: value for name, value in values.items() if value}


def _links(settings: dict[str, str]) -> list[str]:
    return settings.get("UV_FIND_LINKS", "").replace(",", " ").split()


def _inside_url(url: str, index: Index | None, proxy: str) -> str:
    # without login, and through the proxy if within `index`
    parts = urlsplit(url)
    if not origin_of(parts):
        return url
    if index and origin_of(parts) == index.origin:
        return parts._replace(scheme="http", netloc=urlsplit(proxy).netloc).geturl()
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


_SHOWN = 600
_AGAIN = "run it again: what was built is kept"
_OTHER = "UV_DEFAULT_INDEX names another index"
_OF_THE_INDEX = (
    (r"429 Too Many Requests", "the package index throttles us", f"wait, then {_AGAIN}"),
    (
        r"lack of valid authentication credentials|40[13] (Unauthorized|Forbidden)|407 Proxy",
        "the package index asks for another login",
        "set UV_DEFAULT_INDEX=https://USER:PASSWORD@HOST/...: builds are not shown it",
    ),
    (
        r"invalid peer certificate|certificate (has expired|is not yet valid|verify failed)",
        "the package index is not trusted",
        "compare this machine's clock with another one (date); SSL_CERT_FILE names certificates of one's own",
    ),
    (
        r"dns error|502 Bad Gateway|Connection refused|Network is unreachable",
        "the package index cannot be reached from here",
        f"prepare on a machine with a network; {_OTHER}",
    ),
    (
        r"Request failed after|error decoding response|error reading a body|HTTP status server error|timed out",
        "the package index broke off",
        f"{_AGAIN}; {_OTHER}",
    ),
    (r"Failed to extract archive|Hash mismatch", "the package index gave a damaged file", f"{_AGAIN}; {_OTHER}"),
)
"""Signs in uv's output, meanings, and fixes. A project that prints them deceives itself alone."""
_OWN = "The build backend returned an error"
"""Text of uv when the project's own code failed."""
_GONE = re.compile(r"404 Not Found|not found in the package registry|there (is|are) no versions? of|were not found")


def explain_failed_build(name: str, printed: str, refused: Sequence[str]) -> CodeRepairError:
    """Error for workspace `name`, from uv's output and `refused` hosts."""
    last = printable(printed[-_SHOWN:])
    is_project_error = _OWN in printed
    for sign, words, fix in _OF_THE_INDEX:
        if not is_project_error and re.search(sign, printed):
            return PrerequisiteError(f"{words}: {last}", fix=fix)
    if not is_project_error and "tunnel" in printed and not refused:
        return PrerequisiteError(f"the package index cannot be reached from here: {last}", fix=_OTHER)
    hosts = printable(", ".join(dict.fromkeys(refused))[:_SHOWN])
    hosts = f" (it wanted {hosts}, which a build may not reach)" if hosts else ""
    fix = "correct its specification, or use its image"
    if "No module named 'pkg_resources'" in printed:
        fix += "; setuptools<81 has pkg_resources: among the requirements of a project, it holds for its build, too"
    if _GONE.search(printed):
        fix += "; UV_FIND_LINKS=FOLDER adds wheels that the index does not have"
    return TaskError(f"no environment can be built for {name}{hosts}: {last}", fix=fix)
