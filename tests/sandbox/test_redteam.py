"""No attack of the red-team suite succeeds in a sandbox, and each of them does where nothing stops it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable

import pytest

from coderepairrl.checks import redteam
from coderepairrl.checks.attacks import probes
from coderepairrl.errors import ConfigError
from coderepairrl.sandbox import backend as backends
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.cgroups import CgroupParents
from coderepairrl.sandbox.local import UnsafeLocal
from coderepairrl.sandbox.sandlock import Sandlock

from .conftest import FAMILIES, Make, find_successful_attacks

QUICK = ("escapes", "secrets", "network")
"""Families whose controls are quick."""


@pytest.mark.parametrize("family", FAMILIES)
async def test_no_attack_succeeds_on_the_default_backend(bwrap: Bubblewrap, family: str, make: Make) -> None:
    outcomes = await redteam.run_attacks(make("bwrap", **redteam.TIGHT), [family], controls=family in QUICK)
    assert len(outcomes) > 5
    assert [outcome for outcome in outcomes if outcome.succeeded or outcome.control is False] == []


def test_the_control_of_the_keepers_priority_touches_nobody_elses() -> None:
    """Other processes of the user would stay at the lowest priority."""
    user = 60_999 if os.geteuid() == 0 else None  # nobody
    ours, theirs = socket.socketpair()
    command = ["nice", "-n", "5", "/usr/bin/python3", "-c", probes.INSIDE, "keeper", str(theirs.fileno())]
    keeper = [*command, probes.KEEPER["its priority"]]
    with ours, theirs, subprocess.Popen(["sleep", "60"], user=user, cwd="/") as bystander:
        before = os.getpriority(os.PRIO_PROCESS, bystander.pid)
        env = {"PATH": os.environ["PATH"], "A": "seen", "B": "it"}
        subprocess.run(keeper, user=user, cwd="/", env=env, pass_fds=[theirs.fileno()], check=True, capture_output=True)
        after = os.getpriority(os.PRIO_PROCESS, bystander.pid)
        bystander.kill()
        theirs.close()
        assert ours.recv(16) == b"", "a control that changed nothing"
    assert after == before


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in QUICK])
async def test_every_attack_succeeds_where_nothing_stops_it(bwrap: Bubblewrap, family: str, make: Make) -> None:
    outcomes = await redteam.run_attacks(make("bwrap", **redteam.TIGHT) if family == "limits" else bwrap, [family])
    assert [outcome for outcome in outcomes if outcome.succeeded or outcome.control is False] == []


async def find_successful_limits(names: Iterable[str], backend: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the named attacks on limits that succeed."""
    wanted = tuple(attack for attack in redteam.list_attacks() if attack.name in names)
    assert len(wanted) == len(tuple(names))
    with monkeypatch.context() as only:
        only.setattr(redteam, "list_attacks", lambda: wanted)
        return await find_successful_attacks(backend, "limits")


UNBOUNDED = (
    "the workspace",
    "files that are deleted but open",
    "a great many files",
    "a great many folders",
    "folders in folders",
    "a great many links",
    "a great many names of one file",
)
TOGETHER = ("processes that have left", "memory of many processes", "memory that is shared", "threads")


async def test_without_control_groups_sandlock_bounds_processes_together(
    sandlock: Sandlock, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "find_cgroups", lambda: CgroupParents({}))
    tight = make("sandlock", **redteam.tight_limits("sandlock"))
    assert await find_successful_limits(TOGETHER, tight, monkeypatch) == []


async def test_without_control_groups_bwrap_bounds_everything(
    bwrap: Bubblewrap, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "find_cgroups", lambda: CgroupParents({}))
    assert await find_successful_attacks(make("bwrap", **redteam.TIGHT), "limits") == []
    monkeypatch.setattr(backends, "_SOCKET_BYTES", 1 << 60)
    sockets = ["memory in sockets"]
    assert await find_successful_limits(sockets, make("bwrap", **redteam.TIGHT), monkeypatch) == sockets, "control"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
async def test_no_attack_succeeds_on_sandlock(sandlock: Sandlock, family: str, make: Make) -> None:
    """Except attacks that fill the disk, which it cannot limit."""
    assert set(await find_successful_attacks(make("sandlock", **redteam.tight_limits("sandlock")), family)) <= set(
        UNBOUNDED
    )


async def test_a_backend_without_isolation_is_not_attacked(local: UnsafeLocal) -> None:
    """Attacks would hit all processes of the user."""
    with pytest.raises(ConfigError, match="isolates nothing"):
        await redteam.run_attacks(local)
    assert not any([check.ok async for check in redteam.examine_defences(local)])
