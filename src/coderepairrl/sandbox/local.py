"""`unsafe-local`: commands run as you, on this machine, in a temporary copy. No isolation whatsoever.

For machines without any sandbox (macOS, Colab) and trusted models; never chosen automatically.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from coderepairrl.errors import ConfigError
from coderepairrl.sandbox import guest
from coderepairrl.sandbox.backend import GuestBackend
from coderepairrl.sandbox.cgroups import Cgroup
from coderepairrl.sandbox.guesthost import GuestProcess, StartedGuest
from coderepairrl.sandbox.session import ResourceLimits
from coderepairrl.sandbox.workspace import PreparedWorkspace

_KEPT_VARIABLES = ("PATH", "HOME", "USER", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX")


class UnsafeLocal(GuestBackend):
    """Runs commands as you in a copy of the workspace, with few environment variables."""

    name = "unsafe-local"
    isolated = False  # no pid namespace: your other processes are visible, and would count

    def __init__(self, *, env: Mapping[str, str] | None = None, **limits: int) -> None:
        for name in ("processes", "tmp_bytes", "disk_bytes", "files"):
            if name in limits:
                raise ConfigError(f"unsafe-local cannot bound {name}", fix=f"leave out {name}, or use bwrap")
        variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        super().__init__(ResourceLimits.parse(limits), variables | dict(env or {}))

    @property
    def user(self) -> int | None:
        """None: commands run as you."""
        return None

    def launch(
        self, box: Path, prepared: PreparedWorkspace, group: Cgroup | None, environment: Path | None
    ) -> GuestProcess:
        """Start the guest as a plain child process."""
        program = box / "guest.py"
        program.write_text(guest.join_guest_source(), "utf-8")
        return StartedGuest(
            lambda descriptor: ([sys.executable, "-I", "-S", "-B", "-X", "utf8", str(program), str(descriptor)], ()),
            log=box / "guest.log",
            env={"PATH": os.environ.get("PATH", os.defpath)},
            group=group,
        )
