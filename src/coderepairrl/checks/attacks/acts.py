"""Attacks: functions of a `Stage` that return whether they succeeded."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from coderepairrl.checks.attacks.probes import (
    DIFF,
    DOORS,
    ESCAPES,
    FIX,
    LIFETIME,
    LIMITS,
    NETWORK,
    REFERENCE,
    SECRETS,
    THREADS,
)
from coderepairrl.checks.attacks.stages import Stage, Target
from coderepairrl.errors import SandboxFault

Act = Callable[[Stage, Target], Awaitable[bool]]


@dataclass(frozen=True)
class Attack:
    """Attack; `needs` is what its control takes: ``root``, or words for the table."""

    family: str
    name: str
    act: Act
    needs: str = ""


def gains(script: str) -> Act:
    """Attack that prints the word or leaves a file on the host."""

    async def act(stage: Stage, target: Target) -> bool:
        return target.gained((await stage.run(script)).output)

    return act


def _keeper(script: str) -> Act:
    """Harm the keeper."""

    async def act(stage: Stage, target: Target) -> bool:
        return await stage.exchange(script) != b"fine\n"

    return act


def _spoils_the_diff(script: str) -> Act:
    """Spoil the diff, or run code while it is taken."""

    async def act(stage: Stage, target: Target) -> bool:
        if not (done := await stage.run(FIX)).ok:
            raise SandboxFault(f"no attack can be tried here: {done.output!r}")
        await stage.run(script)  # refused, perhaps: its control shows whether it is a script at all
        patch = await stage.patch()
        ran = await stage.run("ls RAN || ls ../RAN")
        return ran.ok or not all(part in patch for part in (b"+    return a + b", b"+added"))

    return act


async def _writes_by_tool(stage: Stage, target: Target) -> bool:
    await stage.run('ln -s "$OUTSIDE" way')
    with contextlib.suppress(OSError):
        await stage.write("way/plant", b"x")
    return target.gained(b"")


async def _floods(stage: Stage, target: Target) -> bool:
    return len((await stage.run("yes | head -c 5000000", max_bytes=1 << 20)).output) > 1 << 20


def _outlives(script: str, *, timeout: bool = False) -> Act:
    """Leave a daemon that holds a lock."""

    async def act(stage: Stage, target: Target) -> bool:
        for seconds in (1.0, 5.0, 25.0) if timeout else (30.0,):
            await stage.run(script, timeout=seconds)
            if (await stage.run("test -s started")).ok:  # else the machine was too slow for it
                break
        else:
            raise SandboxFault("no attack can be tried here: the daemon never ran")
        await stage.patch()
        return (await stage.run("flock -n lock true")).exit_code == 1

    return act


def _daemon(last: str) -> str:
    start = f"(setsid bash -c 'trap \"\" HUP TERM INT; exec 9> lock; flock 9; echo $$ > started; {last}' "
    return start + "> /dev/null 2>&1 &); until test -s started; do read -t 0.01 < /dev/zero; done"


def attacks() -> tuple[Attack, ...]:
    """Return all attacks, by family."""
    scripts: dict[str, tuple[Mapping[str, str], Callable[[str], Act]]] = {
        "escapes": (ESCAPES, gains),
        "secrets": (SECRETS, gains),
        "network": (NETWORK, gains),
        "kernel": (DOORS, gains),
        "reference": (REFERENCE, gains),
        "limits": (LIMITS, gains),
        "keeper": (LIFETIME, _keeper),
        "diff": (DIFF, _spoils_the_diff),
    }
    listed = [
        Attack(family, name.removesuffix(" (root)"), act(script), "root" if name.endswith(" (root)") else "")
        for family, (table, act) in scripts.items()
        for name, script in table.items()
    ]
    daemon, stopped = (_daemon(last) for last in ("exec sleep 300", "kill -STOP $$"))
    return (
        *listed,
        Attack("escapes", "a file tool through a link", _writes_by_tool),
        Attack("limits", "a flood of output", _floods),
        Attack("keeper", "a daemon after its command", _outlives(daemon)),
        Attack("keeper", "a daemon after a timeout", _outlives(f"{daemon}; sleep 300", timeout=True)),
        Attack("keeper", "a daemon that is stopped", _outlives(stopped)),
        Attack("keeper", "a daemon that nobody is parent of", _outlives(f"({daemon}) & wait")),
        Attack("keeper", "threads whose first has ended", _outlives(THREADS)),
    )


FRESH = ("diff", "reference", "keeper", "limits")
"""Families that change workspace or sandbox, one for each attack."""
