"""A figure as a page of PDF, for LaTeX: vectors and text, in the light colours, on no background."""

from __future__ import annotations

import io
import re
from xml.etree import ElementTree

from coderepairrl.processes.extras import require_extra
from coderepairrl.report.plots.panels import STYLE

_VARIABLE = re.compile(r"var\((--[\w-]+)\)")
_LIGHT = dict(re.findall(r"(--[\w-]+): (#\w+);", STYLE.partition("@media")[0]))


def pdf(svg: str) -> bytes:
    """The page of a figure that `figure` made to stand alone; the same bytes each time.

    Raises `PrerequisiteError` without the package svglib, which knows no variables of CSS and takes a px of a font for
    4/3 of a px of the drawing.
    """
    require_extra("pdf", "a figure as PDF")
    from reportlab.graphics import renderPDF
    from svglib.svglib import svg2rlg

    root = ElementTree.fromstring(svg)
    style, background = root[:2]
    style.text = _light(STYLE.replace("px;", ";"))
    root.remove(background)
    for element in root.iter():
        element.attrib.update({name: _light(value) for name, value in element.attrib.items()})
    drawing = svg2rlg(io.BytesIO(ElementTree.tostring(root)))
    page: bytes = renderPDF.drawToString(drawing, invariant=1)
    return page


def _light(css: str) -> str:
    return _VARIABLE.sub(lambda found: _LIGHT.get(found[1], found[0]), css)
