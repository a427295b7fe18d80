from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

from coderepairrl import registry
from coderepairrl.errors import CodeRepairError, ConfigError


def test_a_shipped_name_and_an_import_path() -> None:
    assert registry.resolve_class("engine", "path", {"path": "pathlib:Path"}) is Path
    assert registry.resolve_class("engine", "pathlib:Path", {}) is Path


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("tinny", "unknown engine 'tinny'", "'tiny'"),
        ("xyz", "unknown engine 'xyz'", "module:Class"),
        ("no_such_module:X", "no module no_such_module", "install it"),
        ("pathlib:Pth", "no 'Pth'", "'Path'"),
    ],
)
def test_unknown_names_are_refused_with_a_fix(name: str, message: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        registry.resolve_class("engine", name, {"tiny": "pathlib:Path"})
    assert fix in caught.value.fix


def test_an_error_inside_a_users_module_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_needs.py").write_text("import something_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_not_installed"):
        registry.resolve_class("engine", "mine_needs:Engine", {})


def test_types_are_those_of_a_configuration() -> None:
    def start(path: Path | str, pair: tuple[float, ...] = (), env: Mapping[str, str] | None = None) -> None: ...

    for fits in ({"path": "a"}, {"path": Path("a")}, {"pair": [1, 2.5]}, {"env": {"A": "b"}}, {"more": 1}):
        registry.check_types("engine", "mine", start, fits)
    for wrong in ({"path": ["a"]}, {"path": date(2026, 1, 1)}, {"pair": "ab"}, {"pair": ["1"]}, {"env": {"A": 1}}):
        with pytest.raises(ConfigError, match=f"engine 'mine': option {next(iter(wrong))}"):
            registry.check_types("engine", "mine", start, wrong)


@runtime_checkable
class Lamp(Protocol):
    colour: str


class Red:
    colour = "red"

    def __init__(self, watts: int) -> None:
        self.watts = watts


def test_a_part_gets_its_options_and_implements_its_protocol() -> None:
    shipped = {"red": f"{__name__}:Red", "path": "pathlib:PurePath"}
    assert registry.make_part("lamp", "red", shipped, Lamp, {"watts": 9}).watts == 9
    with pytest.raises(ConfigError, match="'red': missing a required argument: 'watts'"):
        registry.make_part("lamp", "red", shipped, Lamp, {})
    with pytest.raises(CodeRepairError, match="no option 'wats'\n.* no option 'color'"):
        registry.make_part("lamp", "red", shipped, Lamp, {"wats": 9, "color": "red"})
    with pytest.raises(ConfigError, match=r"'red': option watts: .*integer, not '9'"):
        registry.make_part("lamp", "red", shipped, Lamp, {"watts": "9"})
    with pytest.raises(ConfigError, match="'path' does not implement Lamp"):
        registry.make_part("lamp", "path", shipped, Lamp, {})
