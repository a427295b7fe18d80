"""A figure as a page of PDF, for LaTeX: vectors and text, in the light colours, on no background."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from xml.etree import ElementTree

from coderepairrl.report.plots.panels import STYLE

_CSS = re.compile(r"\.plot (\.?\w+) \{([^}]*)\}")
_VARIABLE = re.compile(r"var\((--[\w-]+)\)")
_COMMAND = re.compile(r"([MLHVh])([^MLHVh]*)")
_ARC = 0.5523
"""Where the control points of a quarter of a circle are, in radii."""
_SYMBOLS = {"\N{GREEK SMALL LETTER ALPHA}": ("a", 631), "\N{GREEK CAPITAL LETTER DELTA}": ("D", 612)}
"""Of the font Symbol: letter and width."""
_WIDTHS = (
    "278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278 278 "
    "584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611 722 667 944 "
    "667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556 556 556 556 333 500 "
    "278 556 500 722 500 500 500 334 260 334 584"
)
"""Of Helvetica, from the space to the tilde, in thousandths of its size."""
_FONTS = ("Helvetica", "Helvetica-Bold", "Symbol")
"""Every reader has them."""

Style = Mapping[str, str]


def pdf(svg: str) -> bytes:
    """The page of a figure that `figure` made to stand alone."""
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    opacities: dict[str, str] = {}
    drawn = "\n".join(_draw(root, {}, opacities))
    content = zlib.compress(f"1 0 0 -1 0 {height:g} cm\n{drawn}".encode("latin-1"))
    fonts = "".join(f"/F{number} {5 + number} 0 R " for number in range(len(_FONTS)))
    states = "".join(f"/{name} << /CA {value} /ca {value} >> " for value, name in opacities.items())
    resources = f"<< /Font << {fonts}>> /ExtGState << {states}>> >>"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width:g} {height:g}] /Resources {resources} "
        "/Contents 4 0 R >>".encode(),
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(content), content),
        *(f"<< /Type /Font /Subtype /Type1 /BaseFont /{font}{_encoding(font)} >>".encode() for font in _FONTS),
    ]
    return _file(objects)


def _encoding(font: str) -> str:
    return "" if font == "Symbol" else " /Encoding /WinAnsiEncoding"


def _file(objects: list[bytes]) -> bytes:
    written, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    head = b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return written + head + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, len(written))


def _draw(element: ElementTree.Element, inherited: Style, opacities: dict[str, str]) -> Iterator[str]:
    """The operators that draw `element` and what is in it."""
    style = _style(element, inherited)
    tag, at = element.tag.rpartition("}")[2], element.attrib
    match tag:
        case "svg" | "g":
            moved = re.findall(r"-?[\d.]+", at.get("transform", ""))
            yield "q" + (f" 1 0 0 1 {moved[0]} {moved[1]} cm" if moved else "")
            for child in element:
                yield from _draw(child, {k: v for k, v in style.items() if k.startswith("--")}, opacities)
            yield "Q"
        case "text":
            yield _text(element.text or "", float(at["x"]), float(at["y"]), style)
        case "path":
            yield _painted(_path(at["d"]), {**style, "fill": "none"}, opacities)
        case "circle":
            yield _painted(_circle(*(float(at[key]) for key in ("cx", "cy", "r"))), style, opacities)
        case "rect" if "rx" not in at:  # which is the background
            yield _painted(" ".join(at[key] for key in ("x", "y", "width", "height")) + " re", style, opacities)


def _style(element: ElementTree.Element, inherited: Style) -> Style:
    rules, variables = _rules()
    found = {**variables, **inherited, **rules.get(element.tag.rpartition("}")[2], {})}
    for name in element.attrib.get("class", "").split():
        found |= rules.get(f".{name}", {})
    found |= _declarations(element.attrib.get("style", ""))

    def resolved(value: str) -> str:
        return _VARIABLE.sub(lambda variable: resolved(found[variable[1]]), value)

    return {key: resolved(value) for key, value in found.items()}


@cache
def _rules() -> tuple[Mapping[str, Style], Style]:
    """By selector what `STYLE` says, and its variables in light colours."""
    light = STYLE[STYLE.index("{") + 1 : STYLE.index("}")]
    return {selector: _declarations(body) for selector, body in _CSS.findall(STYLE)}, _declarations(light)


def _declarations(text: str) -> dict[str, str]:
    pairs = (part.split(":", 1) for part in text.split(";") if ":" in part)
    return {key.strip(): value.strip() for key, value in pairs}


def _painted(shape: str, style: Style, opacities: dict[str, str]) -> str:
    fill, stroke = style.get("fill", "none"), style.get("stroke", "none")
    if "none" == fill == stroke:
        return ""
    opacity = f"{float(style.get('stroke-opacity', '1')):g}"
    state = opacities.setdefault(opacity, f"G{len(opacities)}")
    dashes = style.get("stroke-dasharray", "none")
    parts = [f"/{state} gs", f"[{'' if dashes == 'none' else dashes}] 0 d", f"{style.get('stroke-width', '1')} w"]
    parts.append(f"{int(style.get('stroke-linecap') == 'round')} J {int(style.get('stroke-linejoin') == 'round')} j")
    parts += [f"{_colour(fill)} rg"] if fill != "none" else []
    parts += [f"{_colour(stroke)} RG"] if stroke != "none" else []
    return " ".join([*parts, shape, "S" if fill == "none" else "f" if stroke == "none" else "B"])


def _colour(text: str) -> str:
    """``#rrggbb`` as three numbers."""
    return " ".join(f"{int(text[place : place + 2], 16) / 255:.3f}" for place in (1, 3, 5))


def _path(data: str) -> str:
    parts, x, y = [], 0.0, 0.0
    for command, numbers in _COMMAND.findall(data):
        given = [float(number) for number in numbers.split()]
        match command:
            case "H":
                x = given[0]
            case "h":
                x += given[0]
            case "V":
                y = given[0]
            case _:
                x, y = given
        parts.append(f"{x:g} {y:g} {'m' if command == 'M' else 'l'}")
    return " ".join(parts)


def _circle(x: float, y: float, r: float) -> str:
    c = _ARC * r
    points = [
        *((x + r, y + c, x + c, y + r, x, y + r), (x - c, y + r, x - r, y + c, x - r, y)),
        *((x - r, y - c, x - c, y - r, x, y - r), (x + c, y - r, x + r, y - c, x + r, y)),
    ]
    return f"{x + r:g} {y:g} m " + " ".join(f"{' '.join(f'{each:g}' for each in arc)} c" for arc in points)


def _text(text: str, x: float, y: float, style: Style) -> str:
    size = float(style.get("font-size", "11px").removesuffix("px"))
    text = text.replace("\N{MINUS SIGN}", "\N{EN DASH}")
    x -= {"end": 1.0, "middle": 0.5}.get(style.get("text-anchor", ""), 0.0) * size * sum(map(_width, text)) / 1000
    font = int("font-weight" in style)
    parts = [f"BT {_colour(style['fill'])} rg 1 0 0 -1 {x:.2f} {y:g} Tm"]
    for symbols, letters in groupby(text, _SYMBOLS.__contains__):
        shown = "".join(_SYMBOLS[letter][0] if symbols else letter for letter in letters)
        octets = shown.encode("cp1252", "replace").hex()
        parts.append(f"/F{2 if symbols else font} {size:g} Tf <{octets}> Tj")
    return " ".join([*parts, "ET"])


def _width(letter: str) -> int:
    if letter in _SYMBOLS:
        return _SYMBOLS[letter][1]
    return int(_WIDTHS.split()[ord(letter) - 32]) if " " <= letter <= "~" else 556
