"""The exam of programs: a program of a page in the real sandbox passes it, and one with faults does not."""

from __future__ import annotations

import pytest
from programs import sandbox_or_skip, stand_in

from coderepairrl.agents.command import Command
from coderepairrl.checks import agent as exam


async def failing(planted: str = "") -> list[str]:
    """What a program with the lines `planted` fails."""
    agent = Command(**stand_in(planted))
    backend = sandbox_or_skip(agent)
    try:
        return [
            f"{check.name}: {check.detail}"
            for check in await exam.examine_agent_program(agent, backend)
            if not check.ok
        ]
    finally:
        backend.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "_SHORT_SECONDS", 1.0)


async def test_a_good_program_passes() -> None:
    assert await failing() == []


async def test_a_program_that_leaves_its_things_there_and_forgets_the_issue_fails() -> None:
    found = await failing('open("notes.txt", "w").write("mine"); prompt = "Hello."')
    assert [line.partition(":")[0] for line in found] == ["states the issue", "leaves nothing else there"]
    assert "notes.txt" in found[1]


TITLES = """
import json, urllib.request
def side(system):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Name this: " + sys.argv[4]}]
    headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
    body = json.dumps({"model": sys.argv[3], "messages": messages}).encode()
    urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers)).read()
for _ in range(3):
    side("You write titles.")
"""


async def test_side_calls_take_no_step_of_the_script() -> None:
    """Such as those with which a program asks for a title before it begins."""
    agent = Command(**stand_in(TITLES))
    backend = sandbox_or_skip(agent)
    try:
        checks = {check.name: check for check in await exam.examine_agent_program(agent, backend)}
    finally:
        backend.close()
    assert [name for name, check in checks.items() if not check.ok] == []
    assert checks["its calls are recorded"].detail == "6 calls, 3 of which beside the conversation"


async def test_a_program_that_edits_nothing_is_shown_with_what_it_printed() -> None:
    found = await failing('print("no such model\\x1b[2J"); sys.exit()')
    [line] = (line for line in found if line.startswith("edits arrive"))
    assert "no such model" in line and "\x1b" not in line
