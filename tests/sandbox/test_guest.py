"""The guest's parts are one file inside, which needs nothing of this project."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from coderepairrl.sandbox import guest


def test_every_part_is_in_the_file_after_what_it_imports_and_its_names_are_there_once() -> None:
    folder = Path(guest.__file__).parent
    assert sorted((*guest.PARTS, "__init__")) == sorted(path.stem for path in folder.glob("*.py"))
    names: list[str] = []
    for part in guest.PARTS:
        for node in ast.parse((folder / f"{part}.py").read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coderepairrl."):
                assert {alias.asname or alias.name for alias in node.names} <= {*names, "signal", "socket"}, part
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.append(node.name)
            elif isinstance(node, ast.Assign):
                names += [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    assert sorted(names) == sorted(set(names))


def test_it_loads_nothing_of_ours_and_nothing_slow(tmp_path: Path) -> None:
    (tmp_path / "guest.py").write_text(guest.source())
    code = "import sys; sys.path.insert(0, sys.argv[1]); import guest; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-ISc", code, tmp_path], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "guest" in loaded
    assert not {"coderepairrl", "re", "enum", "json", "signal", "socket", "typing"} & loaded
