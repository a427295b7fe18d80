"""The guest's parts are one file inside, which needs nothing of this project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coderepairrl.sandbox import guest


def test_the_guest_imports_neither_our_package_nor_slow_modules(tmp_path: Path) -> None:
    (tmp_path / "guest.py").write_text(guest.join_guest_source())
    code = "import sys; sys.path.insert(0, sys.argv[1]); import guest; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-ISc", code, tmp_path], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "guest" in loaded
    assert not {"coderepairrl", "re", "enum", "json", "signal", "socket", "typing"} & loaded
