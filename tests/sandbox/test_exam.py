"""The exam holds for bubblewrap, as root and as an ordinary user, and it can be failed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

import coderepairrl
from coderepairrl.checks import sandbox as exam
from coderepairrl.sandbox import sandlock
from coderepairrl.sandbox.fake import ScriptedBackend

from .conftest import LIMITS, Make, pass_exam, run_as_somebody


@pytest.mark.parametrize("name", ["bwrap", "sandlock"])
async def test_every_question_is_passed(name: str, request: pytest.FixtureRequest, make: Make) -> None:
    request.getfixturevalue(name)
    limits = {limit: value for limit, value in LIMITS.items() if name == "bwrap" or limit != "disk_bytes"}
    await pass_exam(make(name, **limits))


async def test_the_exam_finds_that_there_is_no_isolation(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: without isolation its questions fail, or are not tried, lest they hit the whole machine."""
    local = make("unsafe-local")
    monkeypatch.setattr(exam, "QUESTIONS", exam.BEHAVIOUR)
    assert [check for check in await exam.examine_sandbox(local) if not check.ok] == []
    monkeypatch.setattr(exam, "QUESTIONS", (exam.check_privileges,))
    assert not any(check.ok for check in await exam.examine_sandbox(local))
    monkeypatch.setattr(exam, "QUESTIONS", exam.DANGEROUS)
    assert {check.detail.split(":")[0] for check in await exam.examine_sandbox(local)} == {"not tried"}


async def test_the_exam_survives_a_backend_that_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "QUESTIONS", (exam.check_commands, exam.check_file_access, exam.check_diffs))
    assert not any(check.ok for check in await exam.examine_sandbox(ScriptedBackend(script={"bash": b"?"})))


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("name", ["bwrap", "sandlock"])
def test_it_passes_as_an_ordinary_user(name: str, request: pytest.FixtureRequest) -> None:
    """Exam and attacks, run by a user who can read the package and an interpreter."""
    request.getfixturevalue(name)
    program = (
        "import asyncio, json, os\n"
        "from coderepairrl.checks import redteam, sandbox as exam; from coderepairrl.sandbox import make_backend\n"
        "assert os.getuid() != 0\n"
        "exam.QUESTIONS = (*exam.BEHAVIOUR, exam.check_timeouts, exam.check_process_limit, exam.check_privileges)\n"
        f"checks = asyncio.run(exam.examine_sandbox(make_backend('{name}')))\n"
        "families = ['escapes', 'secrets', 'network', 'kernel', 'keeper']\n"
        f"attacks = asyncio.run(redteam.run_attacks(make_backend('{name}'), families, controls=False))\n"
        "print(json.dumps([checks, attacks]))"
    )
    with tempfile.TemporaryDirectory(prefix="crrl-home-") as folder:  # the way to pytest's own is closed
        home = Path(folder)
        package = Path(coderepairrl.__file__).parent
        shutil.copytree(package, home / "coderepairrl", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(Path(sandlock._find_package(), "sandlock"), home / "sandlock")
        done = run_as_somebody(home, program)
    assert done.returncode == 0, done.stderr
    checks, attacks = json.loads(done.stdout)
    assert len(checks) == 8 and len(attacks) > 100
    assert [check for check in checks if not check[1]] == []
    assert [name for _, name, succeeded, _ in attacks if succeeded] == []
