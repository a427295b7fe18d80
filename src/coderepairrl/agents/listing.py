"""Output of ``crrl agents list``."""

from __future__ import annotations

from typing import NamedTuple

from coderepairrl.agents import recipe
from coderepairrl.agents.install import installed

BUILT_IN = {
    "nano": "a shell, a search-and-replace patch, hard limits",
    "nano4": "Nano with bash, view_file, str_replace and write_file",
    "direct": "no scaffold: one reply with the edits, given the files",
    "agentless": "no scaffold: localise by questions, sample repairs, vote",
    "command": "any program, by a recipe of your own",
}


class Listing(NamedTuple):
    """An agent's properties and installation state."""

    name: str
    placement: str
    dialect: str
    program: str
    state: str
    about: str


def listing() -> list[Listing]:
    """List shipped agents, built-in ones first."""
    built_in = [
        Listing(name, "sandbox" if name == "command" else "host", "chat", "", "built in", description)
        for name, description in BUILT_IN.items()
    ]
    return built_in + [_listed(name, recipe.load(name)) for name in recipe.names()]


def table(entries: list[Listing]) -> str:
    """Format `entries` as aligned text."""
    columns = list(zip(*(entry[:5] for entry in entries), strict=True))
    widths = [max(map(len, column)) for column in columns]
    return "\n".join("  ".join(f"{v:<{w}}" for v, w in zip(e, (*widths, 0), strict=True)) for e in entries)


def _listed(name: str, found: recipe.Recipe) -> Listing:
    state = "not installed" if installed(name, found) is None else "installed"
    return Listing(name, "sandbox", found.dialect, program(found), state, found.about)


def program(found: recipe.Recipe) -> str:
    """Name and version of what a recipe installs: its first requirement.

    >>> program(recipe.load("mini-swe-agent")).split("==")[0]
    'mini-swe-agent'
    """
    return next(iter((*found.install.pip, *found.install.npm)), "")
