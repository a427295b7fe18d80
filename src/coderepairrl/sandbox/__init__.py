"""Isolated workspaces: make a backend by name, open a task on it, take the diff."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coderepairrl import registry
from coderepairrl.errors import PrerequisiteError
from coderepairrl.protocols import SandboxBackend
from coderepairrl.registry import Finding, resolve_class
from coderepairrl.sandbox.interpreter import install_command
from coderepairrl.sandbox.wrapped import GuardedBackend, guard

if TYPE_CHECKING:
    from coderepairrl.sandbox.backend import GuestBackend

__all__ = [
    "SHIPPED",
    "BackendChoice",
    "check_agent",
    "check_backends",
    "choose_backend",
    "make_backend",
]

SHIPPED = {
    "bwrap": "coderepairrl.sandbox.bwrap:Bubblewrap",
    "docker": "coderepairrl.sandbox.container:Docker",
    "podman": "coderepairrl.sandbox.container:Podman",
    "sandlock": "coderepairrl.sandbox.sandlock:Sandlock",
    "unsafe-local": "coderepairrl.sandbox.local:UnsafeLocal",
    "scripted": "coderepairrl.sandbox.fake:ScriptedBackend",
}

_SANDLOCK_CAVEATS = (
    "weaker than bwrap: no namespaces, so file names elsewhere can be guessed, and the host's mounts and connections "
    "read in /proc; nothing inside can listen, /tmp and /dev/shm are refused, threads and disk are not counted"
)
"""See module `sandlock`."""
_SANDLOCK_BREAKS = "inside, nothing can listen or use /tmp (docs/guides/sandbox.md)"
"""Caveats that can make a program fail."""


def make_backend(name: str, show: Sequence[str] = (), /, **options: Any) -> SandboxBackend:
    """Create the backend `name`: one of `SHIPPED`, or your own ``module:Class``; `options` go to its constructor.

    `show` lists host folders that commands must see. Starts and checks nothing. Wraps a user's class in
    `GuardedBackend`. Raises `ConfigError` for an unknown name or option.
    """
    with contextlib.nullcontext() if name in SHIPPED else guard(name):
        backend: SandboxBackend = registry.make_part("sandbox", name, SHIPPED, SandboxBackend, options)
    if name not in SHIPPED:
        backend = GuardedBackend(backend, name)
    if show:
        backend.show(show)
    return backend


def check_backends() -> list[Finding]:
    """Report whether each backend works here, strongest first. Takes up to 2 s."""
    from coderepairrl.sandbox.container import IMAGE, Docker, Podman

    containers = [_check_backend(each(image=IMAGE), "; only when named") for each in (Docker, Podman)]
    detail = "no isolation: commands run as you; only used when named"
    return [*_check_isolating(), *containers, Finding("unsafe-local", True, detail, required=False)]


class BackendChoice(NamedTuple):
    """Name of a backend, and why it was chosen; `fix` is the command that enables a stronger one, if any."""

    name: str
    why: str
    fix: str = ""

    def __str__(self) -> str:
        """Format the line printed at the start of a run.

        >>> print(BackendChoice("sandlock", "bubblewrap is not installed", "sudo apt-get install bubblewrap"))
        sandbox sandlock: bubblewrap is not installed; for a stronger one: sudo apt-get install bubblewrap
        """
        return f"sandbox {self.name}: {self.why}" + (f"; for a stronger one: {self.fix}" if self.fix else "")


def choose_backend(name: str = "auto") -> BackendChoice:
    """Resolve `name`: ``auto`` is `bwrap` where it works, else `sandlock`, never anything weaker.

    Raises `PrerequisiteError` if neither works; its `fix` says how to get one.
    """
    if name != "auto":
        return BackendChoice(name, "set by sandbox.name")
    failures: list[Finding] = []
    for entry in _check_isolating():
        if not entry.ok:
            failures.append(entry)
        elif failures:
            return BackendChoice(entry.name, f"{failures[0].detail}; {_SANDLOCK_BREAKS}", failures[0].fix)
        else:
            return BackendChoice(entry.name, "the strongest that works here")
    reasons = "; ".join(f"{entry.name}: {entry.detail}" for entry in failures)
    # the command that installs bubblewrap is named once, and first
    other_fixes = [entry.fix for entry in failures[1:] if not entry.fix.startswith(install_command("bubblewrap"))]
    raise PrerequisiteError(
        f"no sandbox works on this machine ({reasons})", fix="; or: ".join([failures[0].fix, *other_fixes])
    )


def check_agent(choice: BackendChoice, agent: str, not_in: Mapping[str, str]) -> None:
    """Raise `PrerequisiteError` if `not_in`, reasons by backend, has the chosen one: `agent` does not work in it.

    Raises `ConfigError` for an unknown backend in `not_in`.
    """
    for name in not_in:
        resolve_class("sandbox", name, SHIPPED)
    if choice.name in not_in:
        reason = f", which was chosen because {choice.why}" if choice.fix else ""
        raise PrerequisiteError(
            f"agent {agent!r} does not work in the sandbox {choice.name}: {not_in[choice.name]}{reason}",
            fix=choice.fix or "another sandbox (crrl check), or another agent",
        )


def _check_isolating() -> Iterator[Finding]:
    from coderepairrl.sandbox.bwrap import Bubblewrap
    from coderepairrl.sandbox.sandlock import Sandlock

    yield _check_backend(Bubblewrap())
    yield _check_backend(Sandlock(), f"; {_SANDLOCK_CAVEATS}")


def _check_backend(backend: GuestBackend, caveat: str = "") -> Finding:
    try:
        backend.require()
        return Finding(backend.name, True, f"works here; {backend.describe_limits()}{caveat}", required=False)
    except PrerequisiteError as error:
        return Finding(backend.name, False, str(error), error.fix, required=False)
    finally:
        backend.close()
