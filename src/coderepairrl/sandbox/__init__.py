"""Workspaces in isolation (DESIGN 6): `make` a backend by name, `open` a task on it, take the `diff`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coderepairrl.errors import PrerequisiteError
from coderepairrl.protocols import SandboxBackend
from coderepairrl.registry import check_options, check_types, resolve
from coderepairrl.sandbox.patch import apply_patch

if TYPE_CHECKING:
    from coderepairrl.sandbox.backend import GuestBackend

__all__ = ["SHIPPED", "Availability", "apply_patch", "available", "default_name", "make", "require"]

SHIPPED = {
    "bwrap": "coderepairrl.sandbox.bwrap:Bubblewrap",
    "docker": "coderepairrl.sandbox.container:Docker",
    "podman": "coderepairrl.sandbox.container:Podman",
    "sandlock": "coderepairrl.sandbox.sandlock:Sandlock",
    "unsafe-local": "coderepairrl.sandbox.local:UnsafeLocal",
    "scripted": "coderepairrl.sandbox.fake:ScriptedBackend",
}

WEAKER = (
    "weaker than bwrap: no namespaces, so file names elsewhere can be guessed, tables of the host read in /proc, "
    "nothing inside can listen, /tmp and /dev/shm are refused, threads and disk are not counted"
)
"""What a user of `sandlock` must know; its module says more."""


def make(name: str, show: Sequence[str] = (), /, **options: Any) -> SandboxBackend:
    """The backend `name`, one of `SHIPPED` or ``module:Class`` of your own; `options` go to its constructor.

    `show` are folders of the host that its commands must see, read-only, beside its option `binds`; a backend
    without that option hides nothing. Nothing is started or checked yet, and no other backend ever takes its
    place. Raises `ConfigError` for an unknown name or option, naming the nearest.
    """
    backend = resolve("sandbox", name, SHIPPED)
    check_options("sandbox", name, backend, options)
    check_types("sandbox", name, backend, options)
    if show and "binds" in inspect.signature(backend).parameters:
        options["binds"] = [*options.get("binds", ()), *show]
    made: SandboxBackend = backend(**options)
    return made


def require(backend: SandboxBackend) -> None:
    """Raise `PrerequisiteError` at once, with the command that helps, if `backend` knows that it cannot work here.

    May take a second. A backend of your own says so in a method `check`, which is optional.
    """
    check = getattr(backend, "check", None)
    if check is not None:
        check()


class Availability(NamedTuple):
    """What one backend says of this machine; `fix` is the command that would help."""

    name: str
    ok: bool
    detail: str
    fix: str


def available() -> list[Availability]:
    """Try every backend here, strongest first, for ``crrl check``. Takes up to two seconds."""
    detail = "no isolation: commands run as you; only when named"
    return [*_isolating(), *_containers(), Availability("unsafe-local", True, detail, "")]


def default_name() -> str:
    """The strongest isolating backend that works here: `bwrap`, else `sandlock`; `unsafe-local` must be named.

    Raises `PrerequisiteError` whose `fix` is the command that makes `bwrap` work.
    """
    tried = []
    for entry in _isolating():
        if entry.ok:
            return entry.name
        tried.append(entry)
    reasons = "; ".join(f"{entry.name}: {entry.detail}" for entry in tried)
    raise PrerequisiteError(f"no sandbox works on this machine ({reasons})", fix=tried[0].fix)


def _containers() -> Iterator[Availability]:
    """With their default image; another is an option, so neither is ever chosen for you."""
    from coderepairrl.sandbox.container import IMAGE, Docker, Podman

    for backend in (Docker(image=IMAGE), Podman(image=IMAGE)):
        yield _availability(backend, "; only when named")


def _isolating() -> Iterator[Availability]:
    from coderepairrl.sandbox.bwrap import Bubblewrap
    from coderepairrl.sandbox.sandlock import Sandlock

    for backend, but in ((Bubblewrap(), ""), (Sandlock(), f"; {WEAKER}")):
        yield _availability(backend, but)


def _availability(backend: GuestBackend, but: str) -> Availability:
    try:
        backend.check()
        return Availability(backend.name, True, f"works here; {backend.how_limits_are_kept()}{but}", "")
    except PrerequisiteError as error:
        return Availability(backend.name, False, str(error), error.fix)
    finally:
        backend.close()
