"""A small Python project that is built as real ones are: a src layout, an extra, a file that only the build makes.

Also a cache for its environments.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coderepairrl.processes.caches import environments_cache

BACKEND = '''"""Builds the wheel of this project, with a file that is not in its tree."""
import base64, hashlib, pathlib, zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "shop-1.0-py3-none-any.whl"
    files = {f"shop/{path.name}": path.read_bytes() for path in pathlib.Path("src/shop").glob("*.py")}
    files["shop/_version.py"] = b'version = "1.0"\\n'
    about = "Metadata-Version: 2.1\\nName: shop\\nVersion: 1.0\\nProvides-Extra: tests\\n"
    files["shop-1.0.dist-info/METADATA"] = f"{about}Requires-Dist: crrl-test-helper; extra == 'tests'\\n".encode()
    files["shop-1.0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\\n"
        for path, data in files.items()
    )
    files["shop-1.0.dist-info/RECORD"] = f"{record}shop-1.0.dist-info/RECORD,,\\n".encode()
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
    return name
'''
NEARLY = "def nearly(a, b):\n    return abs(a - b) < 1e-9\n"
SHOP = {
    "pyproject.toml": """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "shop"
dynamic = ["version", "optional-dependencies"]
[tool.pytest.ini_options]
addopts = "--cov=shop --no-such-option"
""",
    "backend.py": BACKEND,
    "src/shop/__init__.py": "from shop._version import version\n",
    "src/shop/cart.py": "def total(prices, discount):\n    return sum(prices) * (100 - discount) // 100\n\n\n"
    "def cheap(price, limit):\n    return price < limit\n",
    "tests/test_cart.py": """\
from importlib.metadata import version

import shop
from crrl_test_helper import nearly
from shop.cart import cheap, total


def test_total():
    assert nearly(total([100, 200], 10), 270)


def test_cheap():
    assert cheap(1, 2) and not cheap(2, 2)


def test_version():
    assert version("shop") == shop.version == "1.0"
""",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def build_wheel(
    folder: Path, name: str = "crrl_test_helper", version: str = "1.0", code: str = NEARLY, requires: str = ""
) -> Path:
    """Write a wheel of the package `name` with one module of `code` to `folder`; by default the one that the tests of
    `SHOP` need."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-{version}.data/scripts/crrl_tool.py": "#!python\n'A tool.'\n"
        "from __future__ import division\nprint(1 / 2)\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for path, text in files.items()
    }
    record = "".join(f"{path},sha256={digests[path]},{len(text)}\n" for path, text in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n"
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return made


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new cache in a place that can be bound into sandboxes, and wheels that no index has."""
    monkeypatch.delenv("CRRL_CACHE", raising=False)
    usual = environments_cache().parent.parent  # not below /tmp, of which a sandbox has one of its own
    usual.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="crrl-test-", dir=usual) as folder:
        Path(folder).chmod(0o755)
        build_wheel(Path(folder, "wheels"))
        monkeypatch.setenv("UV_FIND_LINKS", f"{folder}/wheels")
        monkeypatch.setenv("CRRL_CACHE", folder)
        yield Path(folder)


def system_python() -> str:
    """Find the version of a Python in /usr/bin, which sandboxes see without a copy."""
    for minor in range(16, 8, -1):
        if Path(f"/usr/bin/python3.{minor}").exists():
            return f"3.{minor}"
    pytest.skip("the distribution has no Python")
