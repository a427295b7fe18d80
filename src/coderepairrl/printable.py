"""Untrusted text made safe for terminals, logs and pages."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence

_UNUSUAL = re.compile(r"[^\n\t -~]")  # all but printable ASCII, newlines and tabs
# control, format, surrogate, private and unassigned characters; line and paragraph separators
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_JOINERS = frozenset("\u200d\ufe0f")
"""Parts of emoji, which hide and reorder nothing."""
_USERINFO = re.compile(r"(?<=://)[^/?#\s@]+@")  # ``user:password@`` after the scheme of a URL


def visible(text: str) -> str:
    r"""Escape characters that control a terminal, or hide, reorder or break text.

    Terminal escapes (C0, C1), direction overrides, zero-width marks, line separators and lone surrogates show their
    symbols or code points; newlines and tabs stay.

    >>> visible("a\x1b[2Jb\u202ec\x9d52;\n")
    'a␛[2Jb⟨U+202E⟩c⟨U+009D⟩52;\n'
    """
    return _UNUSUAL.sub(_escape_match, text)


def printable(text: str) -> str:
    r"""`visible` text on one line, which cannot forge or overwrite lines of a log.

    >>> printable("ok\nstep 9: reward 1.0\r\t")
    'ok␊step 9: reward 1.0␍␉'
    """
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def logged(text: str) -> str:
    r"""`visible` text as one log entry, further lines indented, without logins in URLs.

    >>> logged("it broke:\nstep 9: reward 1.0")
    'it broke:\n    step 9: reward 1.0'
    """
    return visible(remove_login(text)).replace("\n", "\n    ")


def fence_code(text: str, info: str = "") -> str:
    """Fence `text` as a Markdown block, with a longer fence than any in it, and without its last line end.

    >>> print(fence_code("a ``` b\\n", "c"))
    ````c
    a ``` b
    ````
    """
    fence = "`" * (1 + max(map(len, re.findall("`{3,}", text)), default=2))
    return f"{fence}{info}\n{text.removesuffix(chr(10))}\n{fence}"


class LogFormatter(logging.Formatter):
    """Format `logging` records, tracebacks included, by `logged`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record by `logged`."""
        return logged(super().format(record))


def remove_login(text: str) -> str:
    """Remove user names and passwords from URLs.

    >>> remove_login("cannot fetch https://me:secret@example.org/x")
    'cannot fetch https://example.org/x'
    """
    return _USERINFO.sub("", text)


def format_mean(value: float, digits: int = 3) -> str:
    """Mean to `digits` significant digits; ``~0`` for rounding residue of a zero sum.

    >>> format_mean(-9.3e-10), format_mean(0.41239), format_mean(812.3)
    ('~0', '0.412', '812')
    """
    return "~0" if 0 < abs(value) < 5e-7 else f"{value:.{digits}g}"


def format_count(count: int, noun: str) -> str:
    """`count` and `noun`, with a plural in s.

    >>> format_count(1, "task"), format_count(1234, "task")
    ('1 task', '1,234 tasks')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def join_first(items: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` items, and the number of the others.

    >>> join_first(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    rest = len(items) - most
    return separator.join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def _escape_match(match: re.Match[str]) -> str:
    char = match[0]
    if char in _JOINERS or unicodedata.category(char) not in _HIDDEN_CATEGORIES:
        return char
    # U+2400 and following are pictures of the control characters
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"⟨U+{ord(char):04X}⟩"
