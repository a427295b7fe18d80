"""Text that a model, a guest or a repository wrote, on its way to a terminal, a log or a page."""

from __future__ import annotations

import logging
import re
import unicodedata

_UNUSUAL = re.compile(r"[^\n\t -~]")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_JOINERS = frozenset("\u200d\ufe0f")
"""Without them emoji fall apart; they hide and reorder nothing."""
_USERINFO = re.compile(r"(?<=://)[^/?#\s@]+@")


def visible(text: str) -> str:
    r"""`text` with every character that would command, hide, reorder or break something written out.

    Terminal escapes (C0 and C1), direction overrides, zero-width marks, line and paragraph separators and lone
    surrogates show their code points; newlines and tabs stay.

    >>> visible("a\x1b[2Jb\u202ec\x9d52;\n")
    'a␛[2Jb⟨U+202E⟩c⟨U+009D⟩52;\n'
    """
    return _UNUSUAL.sub(_shown, text)


def printable(text: str) -> str:
    r"""`visible` text on one line: nobody forges a second line of a log, nor overwrites the first.

    >>> printable("ok\nstep 9: reward 1.0\r\t")
    'ok␊step 9: reward 1.0␍␉'
    """
    return visible(text).replace("\n", "␊").replace("\t", "␉")


def logged(text: str) -> str:
    r"""`visible` text as one entry of a log, whose further lines are indented: none looks like an entry of its own.

    Logins in URLs are left out.

    >>> logged("it broke:\nstep 9: reward 1.0")
    'it broke:\n    step 9: reward 1.0'
    """
    return visible(without_login(text)).replace("\n", "\n    ")


class LogFormatter(logging.Formatter):
    """Formats records of `logging`, tracebacks included, as `logged` does."""

    def format(self, record: logging.LogRecord) -> str:
        """As `logged`."""
        return logged(super().format(record))


def without_login(text: str) -> str:
    """`text`, in which URLs have no user name or password.

    >>> without_login("cannot fetch https://me:secret@example.org/x")
    'cannot fetch https://example.org/x'
    """
    return _USERINFO.sub("", text)


def rounded(value: float, digits: int = 3) -> str:
    """A mean in so many significant digits, in which what rounding leaves of a sum that is 0 is not read as a result.

    >>> rounded(-9.3e-10), rounded(0.41239), rounded(812.3)
    ('~0', '0.412', '812')
    """
    return "~0" if 0 < abs(value) < 5e-7 else f"{value:.{digits}g}"


def counted(count: int, noun: str) -> str:
    """`count` of what `noun` names one of, whose plural ends in s.

    >>> counted(1, "task"), counted(1234, "task")
    ('1 task', '1,234 tasks')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _shown(found: re.Match[str]) -> str:
    char = found[0]
    if char in _JOINERS or unicodedata.category(char) not in _HIDDEN:
        return char
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"⟨U+{ord(char):04X}⟩"
