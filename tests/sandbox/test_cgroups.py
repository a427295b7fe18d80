"""Control groups: found where they can be made, enforced, and removed afterwards."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from coderepairrl.sandbox import cgroups
from coderepairrl.sandbox.backend import StateFolder, _remove_abandoned_states
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.types import Task
from sweeping import wait_for_sweep

from .conftest import Make, guest_pid


@pytest.fixture
def groups() -> cgroups.CgroupParents:
    found = cgroups.find_cgroups()
    if found.missing:
        pytest.skip(f"no control groups for {', '.join(found.missing)}")
    return found


def hierarchy(root: Path, *, controllers: str) -> Path:
    """Version 2 as systemd lays it out for a user: a delegated manager, and us in a scope below."""
    scope = root / "user.slice" / "user@7.service" / "app.slice" / "run.scope"
    scope.mkdir(parents=True)
    for folder in (root, *(scope.parents[at] for at in (2, 1, 0)), scope):
        if folder != root:
            (folder / "cgroup.type").write_text("domain\n")
        (folder / "cgroup.procs").write_text("")
        (folder / "cgroup.subtree_control").write_text(controllers if folder != scope else "")
    (root.parent / "cgroup").write_text("0::/user.slice/user@7.service/app.slice/run.scope\n")
    (root.parent / "mountinfo").write_text(f"30 23 0:26 / {root} rw,nosuid - cgroup2 cgroup2 rw\n")
    return scope


def test_version_2_gives_siblings_of_our_own_group(tmp_path: Path) -> None:
    scope = hierarchy(tmp_path / "fs", controllers="cpu memory pids\n")
    found = cgroups.find_cgroups(tmp_path / "cgroup", tmp_path / "mountinfo")
    assert found.parents == dict.fromkeys(cgroups.CONTROLLERS, scope.parent) and not found.missing
    group = found.make_group("one", processes=7, memory=1 << 20, cpus=2)
    assert group.folders == (scope.parent / "one",)
    values = {path.name: path.read_text().strip() for path in group.folders[0].iterdir()}
    assert values == {"pids.max": "7", "memory.max": "1048576", "memory.swap.max": "0", "cpu.max": "200000 100000"}


def test_controllers_that_are_not_delegated_are_missing(tmp_path: Path) -> None:
    hierarchy(tmp_path / "fs", controllers="pids memory\n")
    found = cgroups.find_cgroups(tmp_path / "cgroup", tmp_path / "mountinfo")
    assert found.missing == ("cpu",)


def test_a_machine_without_control_groups_has_none(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "mountinfo").write_text("30 23 0:26 / / rw - ext4 /dev/vda rw\n")
    assert cgroups.find_cgroups(tmp_path / "cgroup", tmp_path / "mountinfo").missing == cgroups.CONTROLLERS
    assert cgroups.find_cgroups(tmp_path / "missing").missing == cgroups.CONTROLLERS


def test_groups_of_a_killed_process_are_swept(
    groups: cgroups.CgroupParents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where nobody else sweeps
    state = StateFolder()
    wait_for_sweep()
    assert state.groups == groups
    group = groups.make_group(f"{state.path.name}-box-1", processes=4, memory=64 << 20, cpus=1)
    state._lock.close()  # as the kernel does when the process is killed
    _remove_abandoned_states(state.path.parent)
    assert not state.path.exists() and not any(folder.exists() for folder in group.folders)


async def test_a_sandbox_is_in_a_group_with_its_limits(
    groups: cgroups.CgroupParents, bwrap: Bubblewrap, task: Task, make: Make
) -> None:
    backend = make("bwrap", processes=50, cpus=1)
    async with backend.open(task) as box:
        inside = Path(f"/proc/{guest_pid(box.guest)}/cgroup").read_text()
        assert inside.count(f"{backend.state.name}-box-1") == len(set(groups.parents.values()))
    assert "control groups" in backend.describe_limits()
    left = [path for parent in groups.parents.values() for path in parent.glob(f"{backend.state.name}-*")]
    assert left == []
