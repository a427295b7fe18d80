"""Text of models, guests and repositories cannot control a terminal or forge log lines."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import coderepairrl
from coderepairrl.errors import SandboxFault
from coderepairrl.printable import logged, printable, remove_login, visible
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.trace import Trace
from coderepairrl.types import AgentReport, Ending, Episode

HOSTILE = (
    "a\x1b[2J\x1b]0;title\x07\x1b]52;c;aGk=\x07\x1b]8;;http://x\x1b\\b\x9b2J\x9d52;c;aGk=\x9c\x90q\x84"
    "\u202ec\u2066d\u200be\x08\x7f\rf\x0b\x0c\u2028g\u2029h\ud800 [red]i[/red] [link=http://x]j[/link] :smile:"
    "\nerror: forged\nstep    9/9  reward 1"
)
FORGED = re.compile(r"^(error: forged|step    9/9)", re.MULTILINE)


def is_harmless(text: str) -> bool:
    """Whether a terminal would show `text` and nothing else, in order."""
    return all(char in "\n\t\u200d\ufe0f" or unicodedata.category(char)[0] not in "C" for char in text) and not set(
        text
    ) & {"\u2028", "\u2029"}


def check_shown(text: str) -> None:
    assert is_harmless(text), ascii(text)
    assert not FORGED.search(text), text
    assert "[red]i[/red]" in text and "[link=http://x]j[/link]" in text and ":smile:" in text


def test_the_hostile_text_is_harmful_when_printed_as_it_is() -> None:
    assert not is_harmless(HOSTILE) and FORGED.search(HOSTILE)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print("[red]i[/red] :smile:")
    assert "[red]" not in console.file.getvalue()  # type: ignore[attr-defined]


@given(st.text(st.characters()))
def test_any_text(text: str) -> None:
    assert is_harmless(visible(text)) and is_harmless(logged(text))
    assert len(printable(text).splitlines()) <= 1 and "\t" not in printable(text)
    assert all(line.startswith("    ") for line in logged(text).split("\n")[1:])
    assert visible(visible(text)) == visible(text)


def test_logins_in_urls() -> None:
    assert remove_login("of https://me:p%40ss@host/x?a=b and ssh://git@host/x, mail a@b") == (
        "of https://host/x?a=b and ssh://host/x, mail a@b"
    )
    assert remove_login("https://host/path@1.0 (a://b)") == "https://host/path@1.0 (a://b)"


def test_no_error_and_no_log_has_a_login(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://me:word@127.0.0.1:1/x"
    fault = SandboxFault(f"cannot reach {url}", fix=f"curl {url}")
    assert "word" not in str(fault) + fault.fix + repr(fault) and "127.0.0.1:1/x" in str(fault)
    with Progress(1) as progress:
        progress.say(f"relayed to {url}")
    assert "word" not in capsys.readouterr().err


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(9) as progress:
        progress.say(HOSTILE)
        progress.alarm(HOSTILE)
        progress.report_failures()
        progress.episode(Episode(HOSTILE, "t", "train", 0, "g", 0, Ending.VOID, fault=HOSTILE))
        progress.episode(Episode(HOSTILE, "t", "train", 0, "g", 1, Ending.CRASH, HOSTILE, crash=HOSTILE))
    check_shown(capsys.readouterr().err)


def test_the_trace_of_fix(capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace()
    trace.say("model", HOSTILE)
    calls = [
        {"function": {"name": HOSTILE, "arguments": arguments}}
        for arguments in (HOSTILE, json.dumps({HOSTILE: HOSTILE}), json.dumps({"a": HOSTILE, HOSTILE: 1}), HOSTILE)
    ]
    for message in (
        {"role": "assistant", "content": HOSTILE, "tool_calls": calls},
        {"role": "tool", "content": HOSTILE},
    ):
        trace._show_message(message)
    trace.show_end(AgentReport("crash", log=HOSTILE), 1.0)
    trace.show_end(AgentReport(HOSTILE), 1.0)
    check_shown(capsys.readouterr().err)


COMMANDS = {
    "an error with a fix": "raise SandboxFault(text, fix=text)",
    "a file that may not be opened": "raise PermissionError(13, 'Permission denied', text)",
    "what nobody expected": "raise ValueError(text)",
    "a log of the library": "logging.getLogger('coderepairrl.x').warning('%s', text); raise SandboxFault('x')",
    "a log of asyncio": "import asyncio; asyncio.run(late(text)); raise SandboxFault('x')",
    "a result": "print_result(text)",
}


@pytest.mark.parametrize("what", COMMANDS)
def test_the_command_line(what: str) -> None:
    """Whatever ends a command, and whatever it prints."""
    script = f"""
import logging, sys
from coderepairrl import cli, config
from coderepairrl.cli import output
from coderepairrl.errors import SandboxFault
text = {HOSTILE!r}.replace("\\ud800", "\\ud800".encode("utf-8", "replace").decode())
async def late(text):
    import asyncio
    asyncio.get_running_loop().call_exception_handler({{"message": text, "exception": ValueError(text)}})
def print_result(text):
    output.show(output.format_nested({{text: text, "deeper": {{text: [text]}}}}))
@cli.app.command()
def attack() -> None:
    {COMMANDS[what]}
sys.argv = ["crrl", "attack"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    text = (done.stderr + done.stdout).decode()
    assert is_harmless(text) and not FORGED.search(text), ascii(text)
    assert "[red]i[/red]" in text


ELSEWHERE = (
    "checks/attacks/",
    "checks/sandbox/inside.py",
    "environments/layers.py",
    "environments/programs/",
    "grading/programs/",
    "sandbox/escapes.py",
    "tasks/sources/programs/",
)
"""Programs of their own, run in sandboxes and other processes: what they print is read by us."""


def test_no_command_prints_but_through_it() -> None:
    root = Path(coderepairrl.__file__).parent
    prints = set()
    for path in root.rglob("*.py"):
        name = str(path.relative_to(root))
        if "corpus" in path.parts or "handmade" in path.parts or name.startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                safe = node.args and ast.unparse(node.args[0]).split("(")[0] in ("logged", "visible", "json.dumps")
                if not safe:
                    prints.add(name)
    assert prints <= {"errors.py", "stages/hello.py", "config/reference.py", "tasks/mutants/judge.py"}, prints
