"""An audit as one HTML page: no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment
from markupsafe import Markup

from coderepairrl import __version__
from coderepairrl.certify.audit.rates import METHOD, accepts, rates
from coderepairrl.certify.audit.trials import Audited, Settings
from coderepairrl.printable import visible
from coderepairrl.report import plots
from coderepairrl.report.view.text import diff_lines, templates
from coderepairrl.stats import TOO_FEW, Interval


def render(settings: Settings, found: Sequence[Audited]) -> str:
    """The page."""
    return (
        _environment()
        .get_template("audit.html.j2")
        .render(
            settings=settings,
            version=__version__,
            found=found,
            rates=rates(found),
            method=METHOD,
            accepted=[
                (each.task, one.wrong, diff_lines(one.wrong.patch))
                for each in found
                for one in each.wrong
                if one.accepted
            ],
            faulty=[each for each in found if each.faults],
            style=Markup(plots.STYLE + _shared()),
        )
    )


@cache
def _shared() -> str:
    """The style sheet of reports."""
    return templates("coderepairrl.report").get_template("style.css").render()


@cache
def _environment() -> Environment:
    return templates(
        "coderepairrl.certify.audit",
        visible=lambda value: visible(str(value)),
        interval=_interval,
        bar=_bar,
        answer=_answer,
        wrong=_wrong,
    )


def _interval(found: Interval | None) -> str:
    if found is None:
        return "\N{EN DASH}"
    ends = TOO_FEW if found.low is None or found.high is None else f"{100 * found.low:.1f}, {100 * found.high:.1f}"
    return f"{100 * found.value:.1f} % [{ends}]"


def _bar(found: Interval | None) -> Markup:
    """The interval from 0 to 1, its value as a mark."""
    if found is None or found.low is None or found.high is None:
        return Markup("")
    part = '<i class="span"><b style="left:{:.1f}%;width:{:.1f}%"></b><u style="left:{:.1f}%"></u></i>'
    return Markup(part.format(100 * found.low, 100 * (found.high - found.low), 100 * found.value))


def _answer(value: bool | None, right: bool) -> Markup:
    if value is None:
        return Markup('<span class="none">not measured</span>')
    return Markup('<span class="{}">{}</span>').format("yes" if value is right else "no", "yes" if value else "no")


def _wrong(found: Audited) -> Markup:
    judged = [each for each in found.wrong if each.accepted is not None]
    if not judged:
        return Markup('<span class="none" title="{}">none</span>').format(visible(found.no_wrong))
    kind = "no" if accepts(found) else "yes"
    return Markup('<span class="{}">{} of {}</span>').format(kind, sum(bool(e.accepted) for e in judged), len(judged))
