"""The real programs, as their authors release them, each repairing a bug in the sandbox through the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import Outcome, Reply, Script, call, check_repair, play

from coderepairrl import agents
from coderepairrl.agents.install import install_named
from coderepairrl.types import Ending, Limits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FIX = "sed -i 's/a - b/a + b/' calc/add.py"


async def repair(name: str, script: Script, folder: Path, miniature: Path, **more: Any) -> Outcome:
    install_named(name)
    return await play(agents.make(name), script, folder=folder, model=miniature, **more)


def straight(outcome: Outcome) -> bool:
    """Whether each turn extends the one before, token for token."""
    bases = [turn.base for turn in outcome.episode.turns]
    return bases == [None, *range(len(bases) - 1)]


MINI = [
    call("bash", command="cat calc/add.py"),
    call("bash", command=FIX),
    call("bash", command="python3 check_add.py"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]


async def test_mini_swe_agent(tmp_path: Path, miniature: Path) -> None:
    outcome = await repair("mini-swe-agent", MINI, tmp_path, miniature)
    assert len(check_repair(outcome)) == 4
    assert straight(outcome)
    assert "return a - b" in outcome.prompts[1]


async def test_mini_swe_agent_ends_at_a_limit(tmp_path: Path, miniature: Path) -> None:
    limits = Limits(calls=1, tokens=1 << 20, seconds=240.0)
    outcome = await repair("mini-swe-agent", MINI[:2], tmp_path, miniature, limits=limits)
    check_repair(outcome, ending=Ending.LIMIT)
    assert outcome.episode.reason == "calls"


def edit(path: str, old: str, new: str) -> Reply:
    """An edit as aider reads it."""
    return Reply(f"{path}\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n")


async def test_aider(tmp_path: Path, miniature: Path) -> None:
    """It has no tools: it adds the file that the model names, tells it why an edit failed, and applies the next."""
    script = [
        Reply("I need to see check_add.py first. Please add it to the chat."),
        edit("calc/add.py", "    return a * b", "    return a + b"),
        edit("calc/add.py", "    return a - b", "    return a + b"),
    ]
    outcome = await repair("aider", script, tmp_path, miniature)
    assert len(check_repair(outcome)) == 3
    assert "summaries of some files" in outcome.prompts[0], "the map of the repository"
    assert "assert add(2, 3) == 5" in outcome.prompts[1]
    assert "failed to match" in outcome.prompts[2]


async def test_the_original_nano(tmp_path: Path, miniature: Path) -> None:
    patch = {"file": "calc/add.py", "search": "a - b", "replace": "a + b"}
    script = [call("shell", cmd="cat calc/add.py"), call("apply_patch", **patch), Reply("Repaired.")]
    outcome = await repair("nano-agent", script, tmp_path, miniature)
    assert len(check_repair(outcome)) == 3
    assert straight(outcome)
    assert "return a - b" in outcome.prompts[1]


PATCH = """\
apply_patch <<'EOF'
*** Begin Patch
*** Update File: calc/add.py
@@ def add(a, b):
-    return a - b
+    return a + b
*** End Patch
EOF
"""


async def test_codex(tmp_path: Path, miniature: Path) -> None:
    script = [
        call("exec_command", cmd="cat calc/add.py"),
        call("exec_command", cmd=PATCH),
        call("exec_command", cmd="python3 check_add.py && echo passes"),
        Reply("Repaired."),
    ]
    outcome = await repair("codex", script, tmp_path, miniature)
    turns = check_repair(outcome)
    assert len(turns) == 4
    assert {turn.dialect for turn in turns} == {"responses"}
    assert straight(outcome)
    assert "return a - b" in outcome.prompts[1]
    assert "passes" in outcome.prompts[3]


async def test_codex_ends_at_a_limit(tmp_path: Path, miniature: Path) -> None:
    limits = Limits(calls=1, tokens=1 << 20, seconds=240.0)
    outcome = await repair("codex", [call("exec_command", cmd=FIX)], tmp_path, miniature, limits=limits)
    check_repair(outcome, ending=Ending.LIMIT)
    assert outcome.episode.reason == "calls"


@pytest.mark.parametrize("spelled_out", [True, False])
async def test_claude_code(tmp_path: Path, miniature: Path, spelled_out: bool) -> None:
    """It sends an Edit back with its default filled in: a policy that leaves it out said something else, a fork."""
    default = {"replace_all": False} if spelled_out else {}
    script = [
        call("Bash", command="grep -n return calc/add.py", description="look"),
        call("Read", file_path="/workspace/calc/add.py"),
        call("Edit", file_path="/workspace/calc/add.py", old_string="a - b", new_string="a + b", **default),
        call("Bash", command="python3 check_add.py && echo passes", description="check"),
        Reply("Repaired."),
    ]
    outcome = await repair("claude-code", script, tmp_path, miniature)
    turns = check_repair(outcome)
    assert len(turns) == 5
    assert {turn.dialect for turn in turns} == {"messages"}
    assert [turn.base for turn in turns] == [None, 0, 1, 2 if spelled_out else 1, 3]
    assert "2:    return a - b" in outcome.prompts[1]
    assert "passes" in outcome.prompts[4]


async def test_claude_code_ends_at_a_limit(tmp_path: Path, miniature: Path) -> None:
    limits = Limits(calls=1, tokens=1 << 20, seconds=240.0)
    outcome = await repair("claude-code", [call("Bash", command=FIX)], tmp_path, miniature, limits=limits)
    check_repair(outcome, ending=Ending.LIMIT)
    assert outcome.episode.reason == "calls"
