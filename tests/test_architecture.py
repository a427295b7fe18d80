"""The folder tree shows the architecture: imports point down, siblings do not know each other (DESIGN 3)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import coderepairrl

ROOT = Path(coderepairrl.__file__).parent

FLOORS = [
    {"types", "errors", "printable", "clock"},
    {
        "protocols",
        "config",
        "runs",
        "stats",
        "plots",
        "tokens",
        "child",
        "children",
        "hostgit",
        "scratch",
        "caches",
        "registry",
        "models",
        "grading",
    },
    {"tasks", "sandbox", "agents", "engines", "rewards"},
    {"gateway"},
    {"rollout", "learn"},
    {"evaluate", "plan"},
    {"train", "view", "report", "check", "data", "fix", "hello", "serve"},
    {"cli"},
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}
SIBLINGS_ALLOWED = {
    # The one thing that everybody who prints needs.
    ("errors", "printable"),
    # F6 commands are built from the loop and from each other's pages.
    ("hello", "train"), ("report", "view"), ("fix", "train"), ("fix", "serve"), ("serve", "train"), ("check", "train"),
}  # fmt: skip


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


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def owner(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    name = owner(path)
    assert name in FLOOR, f"{name} has no floor: add it to FLOORS and to the design"
    for other in imports(path):
        if other == name or (name, other) in SIBLINGS_ALLOWED:
            continue
        above = FLOOR[other] >= FLOOR[name]
        within_f1 = FLOOR[name] == FLOOR[other] == 1 and other in (
            "protocols",
            "children",
            "hostgit",
            "registry",
            "scratch",
        )
        assert not above or within_f1, f"{path.relative_to(ROOT)} (F{FLOOR[name]}) imports {other} (F{FLOOR[other]})"


def test_no_exception_is_left_over() -> None:
    assert {(owner(path), other) for path in modules() for other in imports(path)} >= SIBLINGS_ALLOWED


def test_no_utils() -> None:
    assert not [path for path in modules() if path.stem in ("utils", "util", "helpers", "common", "misc")]


def test_the_controller_never_loads_torch() -> None:
    code = (
        "import sys, coderepairrl.train, coderepairrl.view, coderepairrl.check, coderepairrl.cli;"
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
