"""`crrl tasks verify --deep`: planted faults are found, killed audits resume, unmeasured tasks are in no share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.checks import audit
from coderepairrl.checks.audit import trials
from coderepairrl.errors import SandboxFault, UsageError
from coderepairrl.protocols import Sandbox, SandboxBackend
from coderepairrl.tasks import ScriptedSource, select
from coderepairrl.tasks.patches import format_diff
from coderepairrl.types import Checks, Command, Task
from commands import CRRL
from rewards.folder import Local

BUG = "def middle(low, high, x):\n    return x\n"
REPAIR = "def middle(low, high, x):\n    return max(low, min(x, high))\n"
STRONG = "from m import middle\nassert [middle(2, 4, x) for x in range(7)] == [2, 2, 2, 3, 4, 4, 4]\n"
WEAK = "from m import middle\nassert middle(2, 4, 9) != 9\n"
FLAKY = """import pathlib
from m import middle
counter = pathlib.Path({!r})
counter.write_text(counter.read_text() + "x")
assert middle(2, 4, 9) == 4 and len(counter.read_text()) % 2
"""
SETTINGS = trials.Settings("planted", "unsafe-local", repeat=2, mutants=3)


def task(folder: Path, name: str, check: str, **fields: Any) -> Task:
    workspace = folder / name
    workspace.mkdir()
    (workspace / "m.py").write_text(BUG)
    (workspace / "check.py").write_text(check)
    about = {
        "workspace": f"dir:{workspace}",
        "reference": format_diff("m.py", BUG, REPAIR),
        "repository": f"own/{name[0]}",
    }
    checks = Checks((Command((sys.executable, "-B", "check.py"), 20.0),), {"check.py": check})
    return Task(**{"id": name, "prompt": "Repair it.", "language": "python", "checks": checks, **about, **fields})


@pytest.fixture
def planted(tmp_path: Path) -> list[Task]:
    counter = tmp_path / "counter"
    counter.write_text("")
    counter.chmod(0o666)
    tmp_path.chmod(0o755)
    wrong = format_diff("m.py", BUG, BUG.replace("return x", "return low"))
    return [
        task(tmp_path, "strong", STRONG),
        task(tmp_path, "weak", WEAK),
        task(tmp_path, "broken", STRONG, reference=wrong),
        task(tmp_path, "solved", "from m import middle\n"),
        task(tmp_path, "flaky", FLAKY.format(str(counter))),
        task(tmp_path, "lacking", STRONG, checks=Checks((Command(("no-such-program",)),))),
        task(tmp_path, "nowhere", STRONG, workspace=f"dir:{tmp_path / 'gone'}"),
        task(tmp_path, "unchecked", STRONG, checks=Checks()),
        task(tmp_path, "question", STRONG, reference=b"", checks=Checks(), answer="CWE-79"),
    ]


async def test_planted_faults_are_found_and_nothing_else(planted: list[Task], tmp_path: Path) -> None:
    lines: list[str] = []
    source = ScriptedSource(planted)
    found = await trials.audit_tasks(source, planted, Local(), SETTINGS, tmp_path / "t.jsonl", jobs=1, say=lines.append)
    by = {each.task.id: each for each in found}
    assert {name: (each.passes, each.fails) for name, each in by.items()} == {
        "strong": (True, True), "weak": (True, True), "broken": (False, True), "solved": (True, False),
        "flaky": (False, True), "lacking": (None, True), "nowhere": (None, None), "unchecked": (None, None),
        "question": (None, None),
    }  # fmt: skip
    assert {name for name, each in by.items() if each.flaky} == {"flaky"}
    assert by["flaky"].flaky == ("the checks",)
    assert {name for name, each in by.items() if each.faults} == {"lacking", "nowhere", "unchecked", "question"}
    assert "no-such-program" in by["lacking"].faults["reference"] and "gone" in by["nowhere"].faults["untouched"]
    assert "no checks" in by["unchecked"].faults["reference"] and "no reference" in by["question"].faults["reference"]
    assert by["unchecked"].history is not None and by["question"].history is None
    accepted = {name: [one.wrong.what for one in each.wrong if one.accepted] for name, each in by.items()}
    assert accepted["weak"] and not accepted["strong"] and len(by["strong"].wrong) == 3
    assert all(not each.wrong and each.no_wrong for name, each in by.items() if name not in ("weak", "strong"))

    by_name = {each.name: each for each in audit.compute_rates(found)}
    for name, (hits, measured) in {
        "the reference passes": (3, 5), "untouched fails": (5, 6), "flaky": (1, 5),
        "history holds the repair": (0, 7), "accepts a mutant": (1, 2),
    }.items():  # fmt: skip
        rate = by_name[name]
        assert (rate.hits, rate.measured, rate.measured + rate.unmeasured) == (hits, measured, 9), name
        assert rate.independent is not None and rate.independent.low is not None and rate.independent.high is not None
        assert rate.independent.low <= hits / measured <= rate.independent.high and rate.independent.high > 0.3
    assert by_name["mutants accepted"].measured == 6 and by_name["mutants accepted"].independent is None

    assert select.write_quarantine(trials.list_verified_tasks(found), tmp_path / "q.jsonl") == 3
    apart = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    assert [each["id"] for each in apart] == ["broken", "solved", "flaky"] and all(each["reason"] for each in apart)
    assert sum(line.startswith("[") for line in lines) == 9
    plain = audit.dumps(audit.audit_as_json(SETTINGS, found))
    assert "return max(" in plain and "no-such-program" in plain and "NaN" not in plain
    assert "not tried: nowhere" in audit.format_rates_table(found)


class Failing(SandboxBackend):
    """Opens `left` sandboxes, and no more."""

    name = "unsafe-local"

    def __init__(self, left: int) -> None:
        self.left, self._inner = left, Local()

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        self.left -= 1
        if self.left < 0:
            raise SandboxFault("no room")
        return self._inner.open(task)


async def test_faults_are_no_results_and_are_tried_again(planted: list[Task], tmp_path: Path) -> None:
    tasks, file = planted[:2], tmp_path / "t.jsonl"
    whole = await trials.audit_tasks(ScriptedSource(tasks), tasks, Local(), SETTINGS, tmp_path / "whole.jsonl")

    async def again(backend: SandboxBackend, settings: trials.Settings = SETTINGS, resume: bool = True) -> list[Any]:
        return await trials.audit_tasks(ScriptedSource(tasks), tasks, backend, settings, file, resume=resume, jobs=1)

    none = await again(Failing(0), resume=False)
    assert all(each.passes is None and each.fails is None and each.faults for each in none)
    assert {each.measured for each in audit.compute_rates(none)} == {0}
    assert all(each.independent is each.clustered is None for each in audit.compute_rates(none))
    assert not trials.list_verified_tasks(none)
    assert "NaN" not in audit.dumps(audit.audit_as_json(SETTINGS, none))
    assert len(file.read_text().splitlines()) == 1
    some = await again(Failing(8))
    assert any(one.accepted is None for each in some for one in each.wrong)
    with file.open("a") as lines:
        lines.write('{"task": "strong", "wh')  # as a kill leaves it
    assert await again(Local()) == whole
    assert await again(Failing(0)) == whole, "all is known"
    with pytest.raises(UsageError, match="already exists"):
        await again(Local(), resume=False)
    with pytest.raises(UsageError, match="another audit"):
        await again(Local(), SETTINGS._replace(seed=1))
    (tmp_path / "strong" / "m.py").write_text("")
    tasks[0] = task(tmp_path / "..", f"{tmp_path.name}/other", STRONG, id="strong", reference=b"")
    with pytest.raises(UsageError, match="task strong has changed"):
        await again(Local())


def test_a_limit_draws_by_seed_and_more_include_fewer(planted: list[Task]) -> None:
    source = ScriptedSource(planted)
    few, more = ({each.id for each in trials.draw_tasks(source, limit, 3)} for limit in (3, 6))
    assert few < more and len(more) == 6
    everything = trials.draw_tasks(source, 0, 3)
    assert everything == trials.draw_tasks(source, 99, 0)
    assert [each.id for each in everything] == [each.id for each in planted]
    assert len({tuple(each.id for each in trials.draw_tasks(source, 3, seed)) for seed in range(9)}) > 1
    with pytest.raises(UsageError, match="scripted has no tasks"):
        trials.draw_tasks(ScriptedSource(), 0, 0)
    with pytest.raises(UsageError, match="ids are unique"):
        trials.draw_tasks(ScriptedSource([planted[0]] * 2), 0, 0)


def rows(file: Path) -> Iterator[str]:
    return iter(file.read_text().splitlines() if file.exists() else ())


def test_a_killed_audit_goes_on_to_the_same_result(tmp_path: Path, isolating: None) -> None:
    words = "tasks verify handmade split=train --deep --limit 2 --mutants 1 --jobs 2 -o"
    command = [*CRRL, *words.split()]
    environment = {**os.environ, "CRRL_CACHE": str(tmp_path / "cache")}

    def crrl(*more: str) -> None:
        done = subprocess.run([*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    crrl("whole")
    killed = subprocess.Popen([*command, "part"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len([*rows(tmp_path / "part/trials.jsonl")]) < 4 and killed.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    crrl("part", "--resume")
    assert (tmp_path / "part" / "audit.json").read_bytes() == (tmp_path / "whole" / "audit.json").read_bytes()
    tried = [
        sorted((row["task"], row["what"], row["run"]) for row in map(json.loads, [*rows(tmp_path / name)][1:]))
        for name in ("part/trials.jsonl", "whole/trials.jsonl")
    ]
    assert tried[0] == tried[1] and len(set(tried[0])) == len(tried[0]) == 2 * (3 + 1)
