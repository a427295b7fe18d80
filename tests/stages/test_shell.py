"""`crrl tasks shell` as its users call it: scripts, commands and a terminal, as agents and as graders see a task."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from pathlib import Path

import pytest

from commands import CRRL

SHELL = [*CRRL, "tasks", "shell", "jsonl", "mine/add", "path=tasks.jsonl"]

LISTENS = (  # on the port of the terminal, which is an argument of the program that opened it
    'import os, socket; words = open(f"/proc/{os.getppid()}/stat").read().split();'
    ' words = open(f"/proc/{words[3]}/cmdline").read().split(chr(0));'
    " port = next(int(a) for a, b, c in zip(words[3:], words[4:], words[5:]) if (a + b + c).isdecimal());"
    ' link = socket.create_connection(("127.0.0.1", port)); link.settimeout(20);'
    ' print("got-" + (link.recv(9).decode() or "nothing"))'
)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a file of two tasks: one that can be opened, and one whose commit was never fetched."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "add.py").write_text("def add(a, b):\n    return a - b\n")
    checks = {"commands": [{"argv": ["python", "check.py"]}], "restore": {"check.py": "import add\n"}}
    task = {"prompt": "It subtracts.", "language": "python", "reference": "", "checks": checks}
    tasks = [
        {"id": "mine/add", "workspace": f"dir:{tmp_path / 'project'}", **task},
        {"id": "mine/gone", "workspace": f"git:https://example.org/a@{'0' * 40}", **task},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in tasks))
    return tmp_path


def called(home: Path, *words: str, stdin: bytes = b"", code: int = 0) -> tuple[str, str]:
    done = subprocess.run([*SHELL, *words], cwd=home, input=stdin, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout.decode(), done.stderr.decode()


def test_commands_and_scripts_see_what_an_agent_sees_and_change_nothing(home: Path, isolating: None) -> None:
    out, said = called(home, "--", "sh", "-c", "ls; echo x > add.py; exit 5", code=5)
    assert out == "add.py\n" and "changes are discarded" in said
    assert called(home, "--checks", stdin=b"ls; git status --short; python3 -c 'import check'; cat add.py\n")[0] == (
        "add.py\ncheck.py\n?? check.py\ndef add(a, b):\n    return a - b\n"
    )
    words = [word.replace("add", "gone") for word in SHELL]
    refused = subprocess.run(words, cwd=home, capture_output=True, text=True)
    assert refused.returncode == 2 and "mine/gone is not prepared: it lacks commit" in refused.stderr
    assert "fix: crrl tasks prepare jsonl path=tasks.jsonl" in refused.stderr


def test_on_a_terminal_it_is_interactive(home: Path, isolating: None) -> None:
    child, terminal = pty.fork()
    if not child:
        os.chdir(home)
        os.execv(SHELL[0], SHELL)
    shown, deadline = b"", time.monotonic() + 60

    def read_until(word: bytes) -> None:
        nonlocal shown
        while word not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(terminal, 1 << 16)
        shown = b""

    read_until(b"$ ")
    os.write(terminal, b"tty && echo at-$((40 + 2))\n")
    read_until(b"at-42")
    os.write(terminal, f"python3 -c '{LISTENS}'\n".encode())
    read_until(b"got-nothing")
    os.write(terminal, b"sleep 100; echo cut\n")
    read_until(b"sleep 100")
    time.sleep(0.3)
    os.write(terminal, b"\x03")  # the sleep's, and not ours
    os.write(terminal, b"exit 7\n")
    read_until(b"exit\r\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
