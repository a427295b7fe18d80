"""Head, style and filters of all pages, and untrusted text made safe to view.

Model output is escaped or embedded as data; the content security policy allows only our scripts and the page's server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from coderepairrl.printable import format_count, visible
from coderepairrl.processes.meter import ResourceUsage, format_usage
from coderepairrl.report.conversation import is_long
from coderepairrl.report.plots.panels import STYLE
from coderepairrl.report.rows import classify_patch_lines, file_name
from coderepairrl.report.verdict import format_p_equation
from coderepairrl.stats.intervals import TOO_FEW, Interval

ASSETS = ("style.css", "list.js", "episode.js")
NONE, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
_MAX_PATCH_BYTES = 256 << 10  # shown: a policy can write any number
_LONGEST_CHARACTER = 4  # bytes in UTF-8, and a token is at least one byte
# ``index OLD..NEW MODE`` of git; ids are cut to 8 digits
_INDEX = re.compile(r"^index ([0-9a-f]{8})[0-9a-f]*\.\.([0-9a-f]{8})[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class PageContext:
    """Site that a page belongs to."""

    run: str = ""
    folder: str = ""
    """Folder of the run's pages; empty: a standalone page."""
    live: bool = False
    """Rendered by a server, from a run that may continue."""
    notice: str = ""
    """What is missing, such as the tokenizer."""


def render_page(template: str, context: PageContext, *, depth: int = 0, script: str = "", **values: Any) -> str:
    """Render a page, `depth` folders below the first one; a standalone page includes style and script."""
    standalone = not context.folder
    code = read_asset(script) if script and standalone else ""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    shared = {
        "context": context,
        "standalone": standalone,
        "root": "../" * depth,
        "script": script,
        "style": Markup(read_asset("style.css")) if standalone else "",
        "code": Markup(code),
        "scripts": f"'sha256-{digest}'" if code else "'self'" if script else "'none'",
    }
    return _load_page_templates().get_template(template).render(**shared, **values)


def read_asset(name: str) -> str:
    """Read one of `ASSETS`; the style begins with that of the figures."""
    text = resources.files(__package__).joinpath("assets", name).read_text("utf-8")
    return STYLE + text if name == "style.css" else text


def embed_json(data: Any) -> Markup:
    """Encode as JSON that cannot close its HTML element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def _load_page_templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("coderepairrl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": lambda value: visible(str(value)),
        "plain": _format_plain,
        "number": format_decimal,
        "signed": lambda value: NONE if value is None else _format_signed(value, 2),
        "level": _format_level,
        "change": _format_change,
        "seconds": _format_duration,
        "commas": "{:,}".format,
        "counted": lambda noun, count: format_count(count, noun),
        "used": lambda used: format_usage(ResourceUsage(**used)),
        "p": format_p_equation,
        "file_name": file_name,
        "long": is_long,
    }
    return environment


def format_decimal(value: float | None, digits: int = 3) -> str:
    """Number with `digits` decimals (one from 10 on), or a dash.

    >>> format_decimal(-0.25, 2), format_decimal(1234.5), format_decimal(None)
    ('−0.25', '1,234.5', '–')
    """
    if value is None:
        return NONE
    return (f"{value:.{digits}f}" if abs(value) < 10 else f"{value:,.1f}").replace("-", MINUS)


def _format_signed(value: float, digits: int = 3) -> str:
    return ("+" if value >= 0 else "") + format_decimal(value, digits)


def _format_plain(value: Any) -> str:
    if value is None:
        return NONE
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _format_change(change: Interval) -> Markup:
    return Markup("<b>{}</b> {}").format(_format_signed(change.value), _format_interval_ends(change, _format_signed))


def _format_level(value: Interval | Mapping[str, Any] | None) -> Markup:
    if value is None:
        return Markup("<span class=none>{}</span>").format(NONE)
    interval = Interval(**value) if isinstance(value, Mapping) else value
    return Markup("{} {}").format(format_decimal(interval.value), _format_interval_ends(interval, format_decimal))


def _format_interval_ends(interval: Interval, format_end: Callable[[float], str]) -> Markup:
    if interval.low is None or interval.high is None:
        return Markup("<small>{}</small>").format(TOO_FEW)
    return Markup("<small>[{}, {}]</small>").format(format_end(interval.low), format_end(interval.high))


def _format_duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def decode_pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Decode each token; a character of several tokens is at the first, the others are empty.

    >>> decode_pieces((1, 2), lambda ids: bytes({1: 0xC3, 2: 0xA9}[i] for i in ids).decode(errors="replace"))
    ['é', '']
    """
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        text, width = decode(ids[at : at + 1]), 1
        for wider in range(2, min(_LONGEST_CHARACTER, len(ids) - at) + 1):
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # what decoders return for part of a character
                break
            together = decode(ids[at : at + wider])
            if not together.endswith("\N{REPLACEMENT CHARACTER}"):
                text, width = together, wider
        texts += [text, *[""] * (width - 1)]
    return texts


class DiffLine(NamedTuple):
    """Line of a patch, with its kind (`classify_patch_lines`)."""

    kind: str
    text: str


def parse_diff_lines(patch: bytes) -> list[DiffLine]:
    r"""Lines of a unified diff, with short object ids; a long diff is cut, with a remark.

    >>> [line.kind for line in parse_diff_lines(b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n--- a\n+b\n")]
    ['file', 'file', 'file', 'hunk', 'del', 'add']
    >>> parse_diff_lines(b"index 0123456789abcdef..fedcba9876543210 100644\n")[0].text
    'index 01234567..fedcba98 100644'
    """
    if not patch:
        return []
    excerpt = patch[:_MAX_PATCH_BYTES]
    lines = [
        DiffLine(kind, visible(_INDEX.sub(r"index \1..\2", text) if kind == "file" else text))
        for kind, text in classify_patch_lines(excerpt.decode("utf-8", "replace").removesuffix("\n"))
    ]
    if left_out := len(patch) - len(excerpt):
        lines.append(DiffLine("file", f"({left_out:,} bytes more are not shown)"))
    return lines
