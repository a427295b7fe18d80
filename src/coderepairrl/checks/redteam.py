"""Attacks on a sandbox, each with a control.

``python -m coderepairrl.checks.redteam NAME ...`` prints a row for each attack (`docs/measurements/redteam.md`).

An attack succeeds if it reads a secret word, leaves a file on the host, or forges an answer. Its control runs in a
plain process of the same user: a probe that fails there proves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coderepairrl.checks.attacks import Inside, Outside, Stage, Target, clone_workspace, prepare_host
from coderepairrl.checks.attacks.probes import (
    DIFF,
    ESCAPES,
    FIX,
    KEEPER,
    KERNEL,
    LIMITS,
    NETWORK,
    REFERENCE,
    SECRETS,
    THREADS,
)
from coderepairrl.errors import CodeRepairError, ConfigError, SandboxFault
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.types import Task

Act = Callable[[Stage, Target, str], Awaitable[bool]]
"""Run a script on a stage; whether it succeeded against the target."""


@dataclass(frozen=True)
class Attack:
    """Attack; `needs` is ``root`` if its control needs root."""

    family: str
    name: str
    act: Act
    script: str
    needs: str = ""


async def _run_gain_attack(stage: Stage, target: Target, script: str) -> bool:
    """Print the word, or leave a file on the host."""
    return target.gained((await stage.run(script)).output)


async def _run_keeper_attack(stage: Stage, target: Target, script: str) -> bool:
    """Harm the keeper, the commands' parent."""
    return await stage.exchange(script) != b"fine\n"


async def _run_diff_attack(stage: Stage, target: Target, script: str) -> bool:
    """Spoil the diff, or run code while it is taken."""
    if not (fixed := await stage.run(FIX)).ok:
        raise SandboxFault(f"no attack can be tried here: {fixed.output!r}")
    await stage.run(script)  # it may fail here: its control shows that the script works
    patch = await stage.patch()
    ran = await stage.run("ls RAN || ls ../RAN")
    return ran.ok or not all(part in patch for part in (b"+    return a + b", b"+added"))


async def _write_through_link(stage: Stage, target: Target, script: str) -> bool:
    await stage.run(script)
    with contextlib.suppress(OSError):
        await stage.write("way/plant", b"x")
    return target.gained(b"")


async def _flood_output(stage: Stage, target: Target, script: str) -> bool:
    return len((await stage.run(script, max_bytes=1 << 20)).output) > 1 << 20


async def _run_daemon_attack(stage: Stage, target: Target, script: str, timeouts: Sequence[float] = (30.0,)) -> bool:
    """Leave a daemon that holds a lock, after a command that ends or meets one of `timeouts`."""
    for seconds in timeouts:
        await stage.run(script, timeout=seconds)
        if (await stage.run("test -s started")).ok:  # else the machine was too slow for it
            break
    else:
        raise SandboxFault("no attack can be tried here: the daemon never ran")
    await stage.patch()
    return (await stage.run("flock -n lock true")).exit_code == 1


def _daemon_script(last: str) -> str:
    start = f"(setsid bash -c 'trap \"\" HUP TERM INT; exec 9> lock; flock 9; echo $$ > started; {last}' "
    return start + "> /dev/null 2>&1 &); until test -s started; do read -t 0.01 < /dev/zero; done"


def list_attacks() -> tuple[Attack, ...]:
    """Return all attacks, by family."""
    scripts: dict[str, tuple[Mapping[str, str], Act]] = {
        "escapes": (ESCAPES, _run_gain_attack),
        "secrets": (SECRETS, _run_gain_attack),
        "network": (NETWORK, _run_gain_attack),
        "kernel": (KERNEL, _run_gain_attack),
        "reference": (REFERENCE, _run_gain_attack),
        "limits": (LIMITS, _run_gain_attack),
        "keeper": (KEEPER, _run_keeper_attack),
        "diff": (DIFF, _run_diff_attack),
    }
    listed = [
        Attack(family, name.removesuffix(" (root)"), act, script, "root" if name.endswith(" (root)") else "")
        for family, (table, act) in scripts.items()
        for name, script in table.items()
    ]
    daemon, stopped = (_daemon_script(last) for last in ("exec sleep 300", "kill -STOP $$"))
    after_timeout = functools.partial(_run_daemon_attack, timeouts=(1.0, 5.0, 25.0))
    return (
        *listed,
        Attack("escapes", "a file tool through a link", _write_through_link, 'ln -s "$OUTSIDE" way'),
        Attack("limits", "a flood of output", _flood_output, "yes | head -c 5000000"),
        Attack("keeper", "a daemon after its command", _run_daemon_attack, daemon),
        Attack("keeper", "a daemon after a timeout", after_timeout, f"{daemon}; sleep 300"),
        Attack("keeper", "a daemon that is stopped", _run_daemon_attack, stopped),
        Attack("keeper", "a daemon that nobody is parent of", _run_daemon_attack, f"({daemon}) & wait"),
        Attack("keeper", "a process whose first thread has ended", _run_daemon_attack, THREADS),
    )


_FRESH_FAMILIES = ("diff", "reference", "keeper", "limits")
"""Families whose attacks change the workspace or sandbox: each gets a fresh one."""


TIGHT: Mapping[str, Any] = {
    "processes": 64,
    "memory": 128 << 20,
    "file_bytes": 8 << 20,
    "tmp_bytes": 16 << 20,
    "disk_bytes": 32 << 20,
    "files": 2000,
    "cpu_seconds": 2,
    "open_files": 256,
}
"""Limits small enough to be exceeded on a host."""
_REFUSED_LIMITS: Mapping[str, tuple[str, ...]] = {"sandlock": ("tmp_bytes", "disk_bytes", "files")}


def tight_limits(name: str) -> dict[str, Any]:
    """`TIGHT`, without limits that backend `name` refuses."""
    return {limit: value for limit, value in TIGHT.items() if limit not in _REFUSED_LIMITS.get(name, ())}


class AttackResult(NamedTuple):
    """Result of an attack; `control` is None if impossible here."""

    family: str
    name: str
    succeeded: bool
    control: bool | None


async def run_attacks(
    backend: SandboxBackend, families: Sequence[str] = (), *, controls: bool = True
) -> list[AttackResult]:
    """Run attacks of `families` (default: all) on `backend`.

    Family ``limits`` strains this host, too: use small limits (`TIGHT`). Raises `ConfigError` for a backend without
    isolation.
    """
    info = backend.info()
    if not info.isolates:
        raise ConfigError(f"{backend.name} isolates nothing: every attack succeeds", fix="attack another sandbox")
    selected = [attack for attack in list_attacks() if not families or attack.family in families]
    outcomes = []
    limit_names = tight_limits(backend.name)
    limits = {name: info.limits.get(name, value) if name in limit_names else value for name, value in TIGHT.items()}
    with contextlib.ExitStack() as stack:
        target, repository = prepare_host(stack, limits, info.user)
        task = Task("attack/1", "", "python", f"dir:{repository}", b"")
        shared: Sandbox | None = None
        async with contextlib.AsyncExitStack() as opened:
            for attack in selected:
                if attack.family in _FRESH_FAMILIES:
                    async with backend.open(task) as box:
                        succeeded = await attack.act(Inside(box, target), target, attack.script)
                else:
                    if shared is None:
                        shared = await opened.enter_async_context(backend.open(task))
                    succeeded = await attack.act(Inside(shared, target), target, attack.script)
                outcomes.append(
                    AttackResult(
                        attack.family, attack.name, succeeded, await _run_control(attack, target) if controls else None
                    )
                )
    return outcomes


async def _run_control(attack: Attack, target: Target) -> bool | None:
    user = target.user
    if attack.needs == "root":
        if os.geteuid() != 0:
            return None
        user = None
    if attack.family == "keeper" and os.geteuid() != 0 and "everything" in attack.name:
        return None  # it would end our own session
    async with clone_workspace(target, user) as work:
        if await attack.act(Outside(work, target, user), target, attack.script):
            return True
    return None if attack.name in _NOT_EVERYWHERE else False


# Targets that some machines lack, or refuse to everybody.
_NOT_EVERYWHERE = frozenset((
    "the internet", "vsock", "io_uring_setup", "userfaultfd", "perf_event_open", "init_module", "delete_module",
    "kexec_load", "kexec_file_load", "userfaultfd by its device", "what runs when a control group is empty",
    "priority of all of a user's processes", "sysrq",
    "the kernel's memory", "a disk", "a control group", "a new device", "answers in this package",
    "a search for answers",
))  # fmt: skip


async def examine_defences(backend: SandboxBackend) -> AsyncIterator[Finding]:
    """Yield one `Finding` per family except limits, which the exam covers."""
    for family in dict.fromkeys(attack.family for attack in list_attacks() if attack.family != "limits"):
        title = f"No attack of the family {family!r} succeeds"
        try:
            outcomes = await run_attacks(backend, [family])
        except (CodeRepairError, OSError) as error:
            yield Finding(title, False, str(error))
            continue
        bad = [f"{outcome.name} succeeds" for outcome in outcomes if outcome.succeeded]
        bad += [
            f"{outcome.name} fails even where nothing stops it, and proves nothing"
            for outcome in outcomes
            if outcome.control is False
        ]
        confirmed = sum(outcome.control is True for outcome in outcomes)
        detail = (
            ", ".join(bad) or f"{len(outcomes)}, of which {confirmed} were seen to succeed where nothing stops them"
        )
        yield Finding(title, not bad, detail)


def format_attacks_table(results: Mapping[str, Sequence[AttackResult]]) -> str:
    """Markdown table: attacks by backends."""
    lines = [f"| | attack | where nothing stops it | {' | '.join(results)} |", f"|---|---|---|{'---|' * len(results)}"]
    words = {True: "succeeds", False: "**fails: the probe is broken**", None: "not on this machine"}
    family = ""
    for row in zip(*results.values(), strict=True):
        first = row[0]
        cells = ["**succeeds**" if outcome.succeeded else "fails" for outcome in row]
        family_cell = first.family if first.family != family else ""
        family = first.family
        lines.append(f"| {family_cell} | {first.name} | {words[first.control]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(names: Sequence[str]) -> int:
    """Attack the named backends, print the table; return 1 for successful attacks or failed controls."""
    from coderepairrl.sandbox import make_backend

    results: dict[str, list[AttackResult]] = {}
    for name in names:  # one control serves all
        results[name] = asyncio.run(run_attacks(make_backend(name, **tight_limits(name)), controls=not results))
    sys.stdout.write(format_attacks_table(results))
    bad = [entry for rows in results.values() for entry in rows if entry.succeeded or entry.control is False]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bwrap"]))
