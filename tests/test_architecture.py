"""The folder tree shows the architecture: imports point down, siblings do not know each other."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coderepairrl

ROOT = Path(coderepairrl.__file__).parent

FLOORS = [
    {"types", "errors", "printable"},
    {"protocols", "registry", "models", "config", "runs", "stats", "processes"},
    {"tokens", "sync"},
    {"gateway", "agents", "engines", "grading", "sandbox"},
    {"environments"},
    {"rewards", "tasks"},
    {"rollout", "learn"},
    {"assembly", "report"},
    {"stages", "certify"},
    {"apps"},
    {"cli"},
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
SERVE_THEIR_FLOOR = {"printable", "protocols", "registry", "processes"}
"""What the others of the same floor may import: text for a terminal, the seams, parts by name, processes and git."""


def imports(path: Path) -> Iterator[str]:
    """Parts of the package that a module imports, by their first name."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "coderepairrl" and len(parts) > 1 and parts[1] != "__version__":
                yield parts[1]


DATA = [ROOT / "tasks" / "handmade", ROOT / "tasks" / "mutants" / "corpus"]
"""Tasks: repositories and functions to break, which nobody imports."""


def modules() -> list[Path]:
    found = (path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return sorted(path for path in found if not any(path.is_relative_to(folder) for folder in DATA))


def test_tasks_are_data() -> None:
    assert not [folder for folder in DATA if (folder / "__init__.py").exists()]


def owner(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    name = owner(path)
    assert name in FLOOR, f"{name} has no floor: add it to FLOORS"
    for other in imports(path):
        if other == name:
            continue
        allowed = FLOOR[other] < FLOOR[name] or (FLOOR[other] == FLOOR[name] and other in SERVE_THEIR_FLOOR)
        assert allowed, f"{path.relative_to(ROOT)} (floor {FLOOR[name]}) imports {other} (floor {FLOOR[other]})"


def edges() -> dict[str, set[str]]:
    """Which modules each module imports as it is imported itself, by dotted names."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in modules()
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = set()
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("coderepairrl"):
                continue
            module = (node.module or "").partition(".")[2]
            for alias in node.names:
                full = f"{module}.{alias.name}".strip(".")
                found[name].add(full if full in names else module)
        found[name].discard(name)
    return found


def test_no_cycle() -> None:
    """Not within a folder either."""
    order = graphlib.TopologicalSorter(edges())
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_no_utils() -> None:
    assert not [path for path in modules() if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_the_controller_never_loads_torch() -> None:
    code = (
        "import sys, coderepairrl.stages, coderepairrl.report.view, coderepairrl.certify, coderepairrl.cli;"
        "print(sorted({'torch', 'transformers', 'vllm', 'matplotlib', 'trl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, runpy; sys.argv = ['crrl', '--help']\n"
        "from coderepairrl.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('LOADED', sorted({'torch', 'transformers', 'aiohttp', 'renderers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED []\n")


def test_the_wire_stands_alone() -> None:
    """It also runs in vLLM's Python, which has torch and no package of ours."""
    tree = ast.parse((ROOT / "sync" / "wire.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}


def test_files_of_tests_outside_packages_have_names_of_their_own() -> None:
    """Else pytest refuses to collect the whole suite, though each folder passes alone."""
    tests = Path(__file__).parent.rglob("test_*.py")
    names = [path.name for path in tests if not (path.parent / "__init__.py").exists()]
    assert sorted(names) == sorted(set(names))
