"""The folder tree shows the architecture: imports point down, siblings do not know each other."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

import coderepairrl
from tiers import TIERS

ROOT = Path(coderepairrl.__file__).parent

FLOORS = [
    {"types", "errors", "printable", "version"},
    {"protocols", "registry", "models", "config", "runs", "stats", "processes"},
    {"tokens", "sync"},
    {"gateway", "agents", "engines", "grading", "sandbox"},
    {"environments"},
    {"rewards", "tasks"},
    {"rollout", "learn"},
    {"plan", "report"},
    {"stages", "checks"},
    {"cli", "library"},
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
SERVE_THEIR_FLOOR = {"printable", "protocols", "registry", "processes"}
"""Folders that others on the same floor may import: terminal text, protocols, parts by name, processes and git."""


DATA = [ROOT / "tasks" / "handmade", ROOT / "tasks" / "mutants" / "corpus"]
"""Tasks: repositories and functions to break, which nobody imports."""


def list_modules() -> list[Path]:
    found = (path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")
    return sorted(path for path in found if not any(path.is_relative_to(folder) for folder in DATA))


def find_imports(path: Path, names: Collection[str]) -> set[str]:
    """Find which of `names` a module imports: at its top, in functions, or under ``TYPE_CHECKING``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            module = str(node.module)
            found |= {full if (full := f"{module}.{alias.name}") in names else module for alias in node.names}
    return found & set(names)


@functools.cache
def find_edges() -> dict[str, set[str]]:
    """The modules that each module imports, by dotted names."""
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in list_modules()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    return {name: find_imports(path, names) - {name} for name, path in names.items()}


def get_room(name: str) -> str:
    return name.split(".")[1]


def test_imports_point_down() -> None:
    assert not {get_room(name) for name in find_edges()} - FLOOR.keys(), "without a floor: add it to FLOORS"
    pairs = [
        (name, other)
        for name, others in find_edges().items()
        for other in sorted(others)
        if get_room(name) != get_room(other)
    ]
    offences = [
        f"{name} imports {other}"
        for name, other in pairs
        if FLOOR[get_room(other)] > FLOOR[get_room(name)] - (get_room(other) not in SERVE_THEIR_FLOOR)
    ]
    assert not offences, "\n".join(offences)


def test_no_import_cycle_even_within_a_folder() -> None:
    order = graphlib.TopologicalSorter(find_edges())
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


FIVE = "from coderepairrl import attempt, compare, evaluate, grade, score"
HELP = "import contextlib; from coderepairrl.cli import main\nwith contextlib.suppress(SystemExit): main()"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            "import coderepairrl.stages.command; from coderepairrl import checks, cli, report",
            ("vllm", "trl"),
        ),
        (HELP, ("aiohttp", "renderers", "numpy")),
        (FIVE, ("aiohttp", "scipy", "numpy")),
        ("import coderepairrl", ("coderepairrl.library",)),
    ],
    ids=["the controller", "the help", "the library", "its name"],
)
def test_nothing_heavy_is_loaded(code: str, heavy: Collection[str]) -> None:
    names = {"torch", "transformers", "matplotlib", *heavy}
    code = f"import sys; sys.argv = ['crrl', '--help']\n{code}\nprint('LOADED', sorted({names} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("LOADED []\n")


def test_the_wire_stands_alone() -> None:
    """It also runs in vLLM's Python, which has torch and no package of ours."""
    tree = ast.parse((ROOT / "sync" / "wire.py").read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}


def test_every_tier_is_of_tests_that_exist() -> None:
    tests = Path(__file__).parent
    gone = []
    for name in TIERS:
        path, _, function = name.partition("[")[0].partition("::")
        if not (tests / path).exists() or (function and f"def {function}(" not in (tests / path).read_text()):
            gone.append(name)
    assert not gone, "remove these from TIERS in tests/tiers.py, or name what took their place"
