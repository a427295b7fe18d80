"""Issue texts: what a user who met the bug would write.

They may quote the broken line, as a traceback does, and the failing call with what it gave and should give; never
the repaired line. Names of kinds and operators are not mentioned.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

LONGEST = 40
"""Characters of a value in an issue; longer ones are cut."""

OPENINGS = (
    "{name}() in {file} is broken: {call} gives {got} instead of {want}.",
    "Bug in {file}: {call} should be {want} but is {got}.",
    "{file}: I expected {want} from {call} and got {got}. Please repair {name}().",
)
QUOTES = (
    "\nThe wrong value comes from this line:\n    {line}",
    "\nSuspicious line:\n    {line}",
    "\nIt happens here:\n    {line}",
)


@dataclass(frozen=True, slots=True)
class Symptom:
    """How a bug shows: the call, what it gives (or the exception's name), and what it should give."""

    call: str
    got: str
    want: str


def issue(file: str, name: str, symptom: Symptom, line: str | None, rng: Random) -> str:
    """The text of an issue. `line` is the broken line to quote, or None for an issue without a quote.

    >>> issue("a.py", "f", Symptom("f(1)", "2", "1"), None, Random(3))
    'f() in a.py is broken: f(1) gives 2 instead of 1.'
    """
    values = {"call": symptom.call, "got": _cut(symptom.got), "want": _cut(symptom.want)}
    text = _fill(rng.choice(OPENINGS), file=file, name=name, **values)
    quote = rng.choice(QUOTES)
    return text if line is None else text + _fill(quote, line=line.strip())


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST else value[: LONGEST - 3] + "..."


def _fill(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
