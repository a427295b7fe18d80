"""The exam of programs: a program of a page in the real sandbox passes it, and one with faults does not."""

from __future__ import annotations

from contextlib import closing

import pytest
from programs import sandbox_or_skip, stand_in

from coderepairrl.agents.command import Command
from coderepairrl.checks import agent as exam
from coderepairrl.registry import Finding


async def examine(planted: str = "") -> dict[str, Finding]:
    """What the exam finds of a program with the lines `planted`, by question."""
    agent = Command(**stand_in(planted))
    with closing(sandbox_or_skip(agent)) as backend:
        return {finding.name: finding for finding in await exam.examine_agent_program(agent, backend)}


def list_failed(findings: dict[str, Finding]) -> list[str]:
    return [name for name, finding in findings.items() if not finding.ok]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exam, "_SHORT_SECONDS", 1.0)


async def test_a_good_program_passes() -> None:
    assert list_failed(await examine()) == []


async def test_a_program_that_leaves_its_things_there_and_forgets_the_issue_fails() -> None:
    findings = await examine('open("notes.txt", "w").write("mine"); prompt = "Hello."')
    assert list_failed(findings) == ["states the issue", "leaves nothing else there"]
    assert "notes.txt" in findings["leaves nothing else there"].detail


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
    findings = await examine(TITLES)
    assert list_failed(findings) == []
    assert findings["its calls are recorded"].detail == "6 calls, 3 of which beside the conversation"


async def test_a_program_that_edits_nothing_is_shown_with_what_it_printed() -> None:
    finding = (await examine('print("no such model\\x1b[2J"); sys.exit()'))["edits arrive in the diff"]
    assert not finding.ok and "no such model" in finding.detail and "\x1b" not in finding.detail
