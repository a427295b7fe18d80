"""Tokens, comments and indentation of single diff lines, by language.

Approximate, since lines lack context: inside a multi-line string a line is read as code.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

Tokens = tuple[bytes, ...]

_TOKEN = re.compile(rb"[A-Za-z0-9_\x80-\xff]+|[^\sA-Za-z0-9_\x80-\xff]")
_TOKEN_OR_SPACE = re.compile(rb"[A-Za-z0-9_\x80-\xff]+|\r?\n|[^\S\r\n]+|\r|[^\sA-Za-z0-9_\x80-\xff]")
# a line that probably continues or ends a block comment: `* text`, `*`, `*/`
_INSIDE_BLOCK = re.compile(rb"\s*(\*\s|\*$|\*/\s*$)")
_CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\v\f\r") + b"\x7f"
# Unicode categories: format, control, separators
_INVISIBLE_CATEGORIES = ("Cf", "Cc", "Zs", "Zl", "Zp")
# marks and letters without a glyph
_INVISIBLE_OTHERS = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"


@dataclass(frozen=True, slots=True)
class Syntax:
    """Comments and strings of a language, and whether its indentation matters."""

    comments: tuple[bytes, ...] = ()
    """Openers of comments that end with the line."""
    quotes: bytes = b"\"'`"
    blocks: tuple[bytes, bytes] | None = None
    """Opener and closer of comments of several lines."""
    indentation: bool = False


_HASH = Syntax((b"#",))
_INDENTED = Syntax((b"#",), b"\"'", indentation=True)
_C = Syntax((b"//",), b"\"'`", (b"/*", b"*/"))
_RUST = Syntax((b"//",), b'"', (b"/*", b"*/"))  # no ': 'a is a lifetime
_PHP = Syntax((b"//", b"#"), b"\"'", (b"/*", b"*/"))
_CSS = Syntax((), b"\"'", (b"/*", b"*/"))
_SQL = Syntax((b"--",), b"\"'", (b"/*", b"*/"))
_LISP = Syntax((b";",), b'"')
_INI = Syntax((b";", b"#"), b"")
_MARKUP = Syntax((), b"", (b"<!--", b"-->"))
_TEX = Syntax((b"%",), b"")
_PLAIN = Syntax()

# file extensions, file names and languages, grouped by syntax
_LANGUAGES: tuple[tuple[Syntax, str], ...] = (
    (_INDENTED, "python py pyi pyx yaml yml nim coffee haml"),
    (
        _HASH,
        "shell bash sh zsh ruby rb perl pl pm r toml tcl awk make mk cmake dockerfile makefile elixir ex exs julia "
        "jl powershell ps1 tf gemfile rakefile conf properties gitignore nix",
    ),
    (
        _C,
        "c h cc cpp cxx hpp hh c++ java js javascript jsx mjs cjs ts typescript tsx go golang kotlin kt kts scala "
        "swift dart csharp c# cs groovy gradle proto solidity sol scss less zig m mm",
    ),
    (_RUST, "rust rs"),
    (_PHP, "php"),
    (_CSS, "css"),
    (_SQL, "sql lua haskell hs elm ada adb"),
    (_LISP, "lisp clojure clj cljs scheme scm el asm"),
    (_INI, "ini cfg"),
    (_MARKUP, "html xml md markdown vue svg htm"),
    (_TEX, "tex erlang erl"),
)
_SYNTAX_BY_NAME = {name: syntax for syntax, names in _LANGUAGES for name in names.split()}


def find_syntax(path: str, language: str = "") -> Syntax:
    """Syntax of `path` by extension or name; by the task's `language` if it has no extension.

    >>> find_syntax("src/main.rs").comments, find_syntax("bin/run", "python").indentation
    ((b'//',), True)
    """
    name = PurePosixPath(path).name.lower()
    extension = name.rpartition(".")[2]
    return _SYNTAX_BY_NAME.get(extension) or (_PLAIN if "." in name else _SYNTAX_BY_NAME.get(language.lower(), _PLAIN))


def strip_comment(line: bytes, syntax: Syntax) -> bytes:
    r"""`line` without its first comment, with its line ending.

    >>> strip_comment(b'x = "#1"  # one\n', find_syntax("a.py")), strip_comment(b" * more\n", find_syntax("a.c"))
    (b'x = "#1"\n', b'\n')
    """
    openers = syntax.comments + (syntax.blocks or ())[:1]
    may_be_inside = syntax.blocks == (b"/*", b"*/") and b"*" in line
    if not may_be_inside and not any(opener in line for opener in openers):
        return line
    body = line.rstrip(b"\r\n")
    ending = line[len(body) :]
    if may_be_inside and _INSIDE_BLOCK.match(body):
        return ending  # inside a block comment
    for match in _compile_scanner(syntax).finditer(body):
        if match.lastgroup == "comment":
            code = body[: match.start()].rstrip()
            rest = body[match.end() :].strip()
            return code + (b" " + rest if rest else b"") + ending
    return line


def split_comments(line: bytes, syntax: Syntax, *, inside: bool = False) -> tuple[bytes, bytes, bool]:
    r"""Code of `line`, its comments, and whether a comment continues after it; `inside`: `line` starts in one.

    >>> split_comments(b"a /* b */ c  // d\n", find_syntax("a.c")), split_comments(b"a /* b\n", find_syntax("a.c"))
    ((b'a c\n', b'/* b */ // d', False), (b'a\n', b'/* b', True))
    """
    start, end = syntax.blocks or (b"", b"")
    openers = (*syntax.comments, start) if start else syntax.comments
    opened = any(opener in line for opener in openers)
    if not (inside or opened or (end == b"*/" and b"*" in line)):
        return line, b"", False
    body = line.rstrip(b"\r\n")
    ending = line[len(body) :]
    comments = []
    if inside and end:
        comment, closer, body = body.partition(end)
        comments.append(comment + closer)
        inside = not closer
    elif end == b"*/" and end[:1] in body and _INSIDE_BLOCK.match(body):
        return ending, body, False
    code: list[bytes] = []
    at = 0
    if any(opener in body for opener in openers):
        for match in _compile_scanner(syntax).finditer(body):
            if match.lastgroup == "comment":
                text = match[0]
                code.append(body[at : match.start()].rstrip())
                comments.append(text)
                at = match.end()
                inside = bool(start) and text.startswith(start) and not text[len(start) :].endswith(end)
    code.append(body[at:].rstrip() if at else body[at:])
    return b"".join(code) + ending, b" ".join(comments), inside


def split_invisible(line: bytes) -> tuple[bytes, Tokens]:
    r"""Split invisible characters (controls, zero-width and unusual spaces) from `line`.

    >>> split_invisible("re\u200bturn\u00a0x".encode())
    (b'returnx', (b'\xe2\x80\x8b', b'\xc2\xa0'))
    """
    if line.isascii():
        rest = line.translate(None, _CONTROLS)
        return rest, tuple(bytes((byte,)) for byte in line if byte in _CONTROLS) if len(rest) < len(line) else ()
    visible: list[str] = []
    invisible: list[str] = []
    for character in line.decode("utf-8", "surrogateescape"):
        (invisible if _is_invisible(character) else visible).append(character)
    rest = "".join(visible).encode("utf-8", "surrogateescape")
    return rest, tuple(character.encode("utf-8", "surrogateescape") for character in invisible)


@cache
def _is_invisible(character: str) -> bool:
    if character in " \t\n\v\f\r":
        return False
    return (
        unicodedata.category(character) in _INVISIBLE_CATEGORIES
        or character in _INVISIBLE_OTHERS
        or "\ufe00" <= character <= "\ufe0f"  # variation selectors
    )


@cache
def _compile_scanner(syntax: Syntax) -> re.Pattern[bytes]:
    """Pattern of comments, and of strings, which may contain their openers; a line may cut off either."""
    strings = [rb"%c(?:\\.|[^\\%c])*(?:%c|$)" % (quote, quote, quote) for quote in syntax.quotes]
    comments = [re.escape(opener) + rb".*" for opener in syntax.comments]
    if syntax.blocks:
        start, end = map(re.escape, syntax.blocks)
        comments.append(start + rb".*?(?:" + end + rb"|$)")
    return re.compile(b"|".join([*strings, b"(?P<comment>" + b"|".join(comments) + b")"]), re.DOTALL)


def split_tokens(line: bytes, *, whitespace: bool) -> Tokens:
    r"""Words and single punctuation bytes; with `whitespace` also spaces and line endings.

    >>> split_tokens(b"  if a<=b:\n", whitespace=False)
    (b'if', b'a', b'<', b'=', b'b', b':')
    """
    return tuple((_TOKEN_OR_SPACE if whitespace else _TOKEN).findall(line))


def read_indentation(line: bytes) -> bytes:
    """Leading spaces of `line`, tabs expanded."""
    return line[: len(line) - len(line.lstrip(b" \t"))].expandtabs(8)
