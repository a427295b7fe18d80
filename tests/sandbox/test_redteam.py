"""No attack of the red-team suite succeeds in a sandbox, and each of them does where nothing stops it."""

from __future__ import annotations

import pytest

from coderepairrl import sandbox
from coderepairrl.errors import ConfigError
from coderepairrl.sandbox import redteam
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.local import UnsafeLocal

FAMILIES = tuple(dict.fromkeys(attack.family for attack in redteam.attacks()))
QUICK = ("escapes", "secrets", "network")
"""Whose controls are run by default; those of the others take a while."""


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_attack_succeeds_on_the_default_backend(bwrap: Bubblewrap, family: str) -> None:
    backend = sandbox.make("bwrap", **redteam.TIGHT)
    outcomes = await redteam.run(backend, [family], controls=family in QUICK)
    assert len(outcomes) > 5
    assert [outcome for outcome in outcomes if outcome.succeeded or outcome.control is False] == []
    backend.close()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in QUICK])
async def test_every_attack_succeeds_where_nothing_stops_it(bwrap: Bubblewrap, family: str) -> None:
    outcomes = await redteam.run(bwrap, [family]) if family != "limits" else await _tight(family)
    assert [outcome for outcome in outcomes if outcome.succeeded or outcome.control is False] == []


async def _tight(family: str) -> list[redteam.Outcome]:
    backend = sandbox.make("bwrap", **redteam.TIGHT)
    outcomes = await redteam.run(backend, [family])
    backend.close()  # type: ignore[attr-defined]
    return outcomes


async def test_whoever_isolates_nothing_is_not_attacked(local: UnsafeLocal) -> None:
    """It would hit every process of whoever asks."""
    with pytest.raises(ConfigError, match="isolates nothing"):
        await redteam.run(local)
    assert not any([check.ok async for check in redteam.examine(local)])


def test_the_table_shows_what_succeeded_and_which_probe_is_broken() -> None:
    rows = [redteam.Outcome("a", "one", False, True), redteam.Outcome("a", "two", True, False)]
    assert redteam.table({"bwrap": rows}).splitlines()[2:] == [
        "| a | one | succeeds | fails |",
        "|  | two | **fails: the probe is broken** | **succeeds** |",
    ]
