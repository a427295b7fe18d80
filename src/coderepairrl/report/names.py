"""Readable names of measures, and which direction is better."""

from __future__ import annotations

from coderepairrl.stats import COUNTS

_NAMES = {
    "reward": "reward",
    "reward_std": "reward, standard deviation within groups",
    "tests": "tests passing",
    "empty_patches": "empty patches",
    "tool_success": "tool calls that succeed",
    "limit": "ended by a limit",
    "crash": "agent program crashed",
    "calls": "tool calls",
    "turns": "turns",
    "sampled_tokens": "sampled tokens",
}
_PER_PATCH = "_per_patch"
LESS_IS_BETTER = frozenset({"empty_patches", "limit", "crash"})

SECONDARY = COUNTS | {"tool_success", "limit", "crash"}
"""Measures about how, not what: left out where room is short."""


def spoken(measure: str) -> str:
    """Readable name.

    >>> spoken("tests_per_patch"), spoken("patch_lines")
    ('tests passing, per non-empty patch', 'patch_lines')
    """
    if measure.endswith(_PER_PATCH):
        return f"{spoken(measure.removesuffix(_PER_PATCH))}, per non-empty patch"
    return _NAMES.get(measure, measure)
