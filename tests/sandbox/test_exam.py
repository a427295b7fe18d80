"""The exam holds for bubblewrap, as root and as an ordinary user, and it can be failed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import coderepairrl
from coderepairrl.checks import sandbox as exam
from coderepairrl.sandbox import make_backend, sandlock
from coderepairrl.sandbox.bwrap import Bubblewrap
from coderepairrl.sandbox.fake import ScriptedBackend

from .conftest import python_for_all

LIMITS = {"memory": 256 << 20, "file_bytes": 16 << 20, "disk_bytes": 64 << 20}
SOMEBODY = 12345


async def test_bubblewrap_passes_every_question(bwrap: Bubblewrap) -> None:
    checks = await exam.examine_sandbox(make_backend("bwrap", **LIMITS))
    assert [check for check in checks if not check.ok] == []
    assert len(checks) == len(exam.QUESTIONS)


async def test_the_exam_finds_that_there_is_no_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control of the isolation questions as a whole: without isolation, each of them fails."""
    monkeypatch.setattr(exam, "QUESTIONS", (exam.commands, exam.diffs, exam.bridge, exam.no_daemons))
    assert all(check.ok for check in await exam.examine_sandbox(make_backend("unsafe-local")))
    monkeypatch.setattr(exam, "QUESTIONS", (exam.no_secrets, exam.no_network, exam.no_kernel_doors))
    assert not any(check.ok for check in await exam.examine_sandbox(make_backend("unsafe-local")))


async def test_what_would_hit_the_whole_machine_is_not_tried_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "QUESTIONS", exam.DANGEROUS)
    checks = await exam.examine_sandbox(make_backend("unsafe-local"))
    assert [check.detail.split(":")[0] for check in checks] == ["not tried"] * len(exam.DANGEROUS)


async def test_the_exam_survives_a_backend_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "QUESTIONS", (exam.commands, exam.files, exam.diffs))
    assert not any(check.ok for check in await exam.examine_sandbox(ScriptedBackend(script={"bash": b"?"})))


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("name", ["bwrap", "sandlock"])
def test_it_passes_as_an_ordinary_user(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Root drops to an ordinary user, for whom the package and an interpreter are readable, and takes the exam."""
    request.getfixturevalue(name)
    package = Path(coderepairrl.__file__).parent
    home = tmp_path / "home"
    shutil.copytree(package, home / "coderepairrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(sandlock._find_package(), "sandlock"), home / "sandlock")
    for parent in (home, *home.parents):
        if parent.stat().st_uid == 0 and str(parent).startswith("/tmp/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    for path in (home, *home.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY)
    program = (
        "import asyncio, json, os\n"
        "from coderepairrl.checks import sandbox as exam; from coderepairrl.sandbox import make_backend\n"
        "assert os.getuid() != 0\n"
        "exam.QUESTIONS = (*exam.BEHAVIOUR, exam.timeouts, exam.processes, *exam.ISOLATION, *exam.LIFETIME)\n"
        f"print(json.dumps(asyncio.run(exam.examine(make('{name}')))))"
    )
    ids = [f"--reuid={SOMEBODY}", f"--regid={SOMEBODY}", "--clear-groups"]
    done = subprocess.run(
        ["setpriv", *ids, *python_for_all(["setpriv", *ids]), "-c", program],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(home), "HOME": str(home)},
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)
    assert len(checks) >= 12
    assert [check for check in checks if not check[1]] == []
