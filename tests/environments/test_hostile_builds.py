"""A project whose build is hostile writes nothing outside of its environment, and spoils no other one."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from pathlib import Path

import pytest

from coderepairrl.environments import Specification, build, prepare_environments
from coderepairrl.environments.build import _unpack
from coderepairrl.environments.verify import digest_tree, share
from coderepairrl.errors import TaskError
from coderepairrl.types import Task
from projects import SHOP, cache, system_python

from .made import Made, archive, entry, folder, hard, link
from .test_build import project

__all__ = ["cache"]

_PYTHON = Path("/usr/bin/python3")


def hostile(act: str) -> dict[str, str]:
    """A project whose build runs `act` where it can change the environment."""
    return SHOP | {"backend.py": f"{SHOP['backend.py']}\n{act}\n"}


async def test_what_a_build_prints_names_no_file_outside(cache: Path, tmp_path: Path, isolating: None) -> None:
    """The project lets the environment's Python print another account of what was built, as its last line."""
    said = '{"imports": "", "modules": [], "built": {"../../../escaped": "eA=="}, "packages": {}, "left_out": []}'
    line = f"import atexit; atexit.register(print, {said!r})\n"
    act = f"""
[packages] = pathlib.Path("/tmp/env/lib").glob("python3*/site-packages")
(packages / "zz.pth").write_text({line!r})
"""
    with pytest.raises(TaskError, match="escaped"):
        await build(Specification(workspace=project(tmp_path / "shop", hostile(act)), python=system_python()))
    assert not list(cache.rglob("escaped")) and not (cache.parent / "escaped").exists()


async def test_a_record_of_the_project_s_own_is_refused(cache: Path, tmp_path: Path, isolating: None) -> None:
    """The record of an environment would otherwise be written to wherever its link leads, as our user."""
    victim = cache / "victim"
    victim.write_text("mine")
    act = f'pathlib.Path("/tmp/env/environment.json").symlink_to({str(victim)!r})'
    with pytest.raises(TaskError, match=r"environment\.json"):
        await build(Specification(workspace=project(tmp_path / "shop", hostile(act)), python=system_python()))
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "entries",
    [
        [link("environment.json", "/etc/passwd")],
        [entry("environment.json", b"{}")],
        [link("built", "/etc"), entry("built/x", b"x")],
        [folder("built"), entry("built/x", b"x")],
        [entry("../x", b"x")],
        [entry("/x", b"x")],
        [link("a", "/etc"), entry("a/x", b"x")],
        [link("a", "b"), folder("b"), entry("a/x", b"x")],
        [link("a", "../..")],
        [link("pyvenv.cfg", "/dev/zero")],
        [link("a", "/usr/../etc")],
        [hard("a", "../../x")],
        [hard("a", "/etc/passwd")],
        [entry("a", type=tarfile.FIFOTYPE)],
        [entry("a", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    ],
    ids=lambda entries: ",".join(about.name for about, _ in entries),
)
def test_an_archive_that_leads_elsewhere_is_refused(tmp_path: Path, entries: list[Made]) -> None:
    target = tmp_path / "one/two/target"
    target.mkdir(parents=True)
    with pytest.raises(TaskError, match="environment"):
        _unpack(io.BytesIO(archive(entries)), target, _PYTHON)
    assert not [path for path in tmp_path.rglob("x") if not path.is_relative_to(target)]


def test_a_broken_archive_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"no archive" * 200, archive([entry("a", b"x" * 5000)])[:3000]):
        with pytest.raises(TaskError, match="environment"):
            _unpack(io.BytesIO(data), tmp_path, _PYTHON)


def test_an_environment_keeps_the_links_that_it_has(tmp_path: Path) -> None:
    made = [link("bin/python", str(_PYTHON)), link("bin/python3", "python"), folder("lib"), link("lib64", "lib")]
    _unpack(io.BytesIO(archive([*made, entry("lib/a.py", b"a"), hard("lib/b.py", "lib/a.py")])), tmp_path, _PYTHON)
    assert (tmp_path / "lib64/b.py").read_bytes() == b"a" and (tmp_path / "bin/python3").resolve().exists()


def test_files_are_shared_with_modes_that_everybody_may_read(tmp_path: Path) -> None:
    """A file that one environment keeps to itself is not taken from another one that has the same."""
    for name, mode in (("mine", 0o600), ("other", 0o644)):
        place = tmp_path / name
        place.mkdir()
        _unpack(io.BytesIO(archive([entry("six.py", b"#" * 1000, mode=mode)])), place, _PYTHON)
        share(place)
    assert (tmp_path / "other/six.py").stat().st_mode & 0o777 == 0o644


def test_a_damaged_file_of_the_pool_is_not_shared(tmp_path: Path) -> None:
    """The digest is taken after sharing: it would vouch for the damage, in every environment that is built later."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "six.py").write_bytes(b"#" * 1000)
        built = digest_tree(tmp_path / name)
        share(tmp_path / name)
        assert digest_tree(tmp_path / name) == built
        with (tmp_path / name / "six.py").open("r+b") as file:
            file.write(b"!")


async def test_two_at_once_of_the_same_wait_for_each_other(cache: Path, tmp_path: Path, isolating: None) -> None:
    """In one process too, where waiting for a lock must not stop the one who holds it; and the umask stays."""
    asked = Specification(workspace=project(tmp_path / "shop"), python=system_python())
    plain = f'python:{{"python": "{asked.python}", "workspace": "{asked.workspace}"}}'
    tasks = [
        Task(f"{n}", "p", "python", asked.workspace, b"", environment=e) for n, e in enumerate([str(asked), plain])
    ]
    before = os.umask(0o077)
    try:
        async with asyncio.timeout(120):
            first, second = await prepare_environments(tasks, jobs=2)
        assert first == second
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)


def test_links_to_one_file_are_shared_as_they_are(tmp_path: Path) -> None:
    """What is known after sharing gives the digest that reading every file gives."""
    place = tmp_path / "mine"
    place.mkdir()
    (place / "a.py").write_bytes(b"#" * 1000)
    for name in ("b.py", "c.py"):
        (place / name).hardlink_to(place / "a.py")
    assert digest_tree(place, share(place)) == digest_tree(place)
    assert sorted(path.name for path in place.iterdir()) == ["a.py", "b.py", "c.py"]
