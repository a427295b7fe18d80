"""Nano's two tools on real files and commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nano_play import DONE, FILES, patch, play, shell

from coderepairrl.agents.nano4 import NANO4, FourTools
from coderepairrl.agents.patching import Ambiguous, NoMatch, Text, replace_once
from coderepairrl.agents.scripted import Answer
from coderepairrl.agents.tools import command_names
from folder_sandbox import FolderSandbox

TWICE = b"def f():\n    return 1\n\ndef g():\n    return 1\n"


@pytest.mark.parametrize(
    ("cmd", "ok", "text"),
    [
        ("echo out; echo err >&2", True, "out\nerr"),
        ("sed -n 2p add.py", True, "    return a - b"),  # indentation survives
        ("true", True, "command succeeded"),
        ("cd src 2>/dev/null || ls > listing; ./add.py; pwd | wc -l", True, None),  # rbash refused all of these
        ("echo why; exit 3", False, "command failed with exit code 3\nwhy"),
        ("grep -n nothing add.py", True, "no match (exit code 1)"),
        ("cat add.py | grep -c nothing", True, "no match (exit code 1)"),
        ("grep -n x missing.py", False, None),
        ("false | head", False, "command failed with exit code 1"),
        ("yes | head -2", True, "y\ny"),
        ("cat", True, "command succeeded"),  # nothing to read, and no waiting for it
        ("printf 'a\\xffb'", True, "a\ufffdb"),
    ],
)
async def test_shell(tmp_path: Path, cmd: str, ok: bool, text: str | None) -> None:
    run = await play(tmp_path, shell(cmd), DONE, nudge=False)
    assert run.ok == [ok], run.results
    assert text is None or run.results == [text]


async def test_shell_times_out_with_what_was_printed(tmp_path: Path) -> None:
    run = await play(tmp_path, shell("echo started; sleep 9 & sleep 9"), DONE, nudge=False, shell_seconds=0.3)
    assert run.results == ["command timed out after 0.3 s\nstarted"]
    assert run.ok == [False]
    assert (run.report.exit, len(run.requests)) == ("submitted", 2), "nobody is nudged"


@pytest.mark.parametrize("cmd", ["yes abcdefgh | head -c 5000", "printf 'é%.0s' {1..5000}", "yes | head -c 90000000"])
async def test_long_output_is_cut_at_2000_characters(tmp_path: Path, cmd: str) -> None:
    run = await play(tmp_path, shell(cmd), DONE, nudge=False, warnings=True)
    text, mark = run.results[0].rsplit("\n", 1)
    assert (len(text), mark) == (2000, "... output truncated")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (patch("add.py", "a * b", "a"), "does not occur"),
        (patch("add.py", "a", "b"), "occurs 3 times"),
        (patch("add.py", "a - b", "a - b"), "the same"),
        (patch("gone.py", "x", "y"), "does not exist"),
        (patch("add.py", "", "y"), "not empty"),
        (patch("../repo-evil/add.py", "a - b", "a + b"), "outside"),
        (patch("/etc/passwd", "root", "toor"), "outside"),
        (patch(".", "x", "y"), "Is a directory"),
        (patch("", "x", "y"), "empty"),
        (Answer(None, (("apply_patch", {"file_path": "add.py", "old_content": "a"}),)), "needs new_content"),
    ],
)
async def test_refused_patches_change_nothing(tmp_path: Path, call: Answer, expected: str) -> None:
    evil = tmp_path / "repo-evil"  # a sibling whose name begins like the repository's
    evil.mkdir()
    (evil / "add.py").write_bytes(FILES["add.py"])
    run = await play(tmp_path, call, DONE, nudge=False)
    assert run.ok == [False]
    assert expected in run.results[0]
    assert await run.sandbox.diff() == b""
    assert (evil / "add.py").read_bytes() == FILES["add.py"]


async def test_aliases_absolute_paths_and_new_files(tmp_path: Path) -> None:
    aliased = Answer(None, (("apply_patch", {"file": "add.py", "search": "a - b", "replace": "a + b"}),))
    absolute = patch(f"{tmp_path}/repo/notes.txt", "two", "three")
    run = await play(tmp_path, aliased, absolute, patch("new/deep.py", "", "x = 1\n"), DONE)
    assert run.ok == [True, True, True]
    diff = await run.sandbox.diff()
    assert [part in diff for part in (b"+    return a + b", b"+three", b"b/new/deep.py")] == [True] * 3


async def test_context_singles_out_an_occurrence(tmp_path: Path) -> None:
    files = {"f.py": TWICE}
    wrong = patch("f.py", "return 1", "return 2", context="nowhere")
    right = patch("f.py", "return 1", "return 2", context="def g():\n    return 1")
    run = await play(tmp_path, wrong, right, DONE, files=files)
    assert run.ok == [False, True]
    assert await run.sandbox.read("f.py") == b"def f():\n    return 1\n\ndef g():\n    return 2\n"
    assert replace_once(TWICE, "return 1", "return 2", "def g():\n") == await run.sandbox.read("f.py")


async def test_crlf_files_keep_their_endings(tmp_path: Path) -> None:
    """A one-line patch rewrote the whole file on the original."""
    before = b"one\r\ntwo\r\nthree\r\n"
    run = await play(tmp_path, patch("w.txt", "one\ntwo\n", "one\nTWO\nand a half\n"), DONE, files={"w.txt": before})
    assert await run.sandbox.read("w.txt") == b"one\r\nTWO\r\nand a half\r\nthree\r\n"
    changed = [line for line in (await run.sandbox.diff()).splitlines() if line[:1] in b"+-"]
    assert len(changed) == 5  # the two headers, one line gone, two lines new


@pytest.mark.parametrize(
    ("data", "old", "new", "expected"),
    [
        (b"caf\xe9 = 1\n", "= 1", "= 2", b"caf\xe9 = 2\n"),
        (b"caf\xe9 = 1\n", "café", "thé", b"th\xe9 = 1\n"),
        ("\ufeffx = 1\n".encode(), "x = 1", "x = 2", "\ufeffx = 2\n".encode()),
        (b"a\r\nb\nc\r\nd\n", "b\nc\n", "b\nC\n", b"a\r\nb\nC\r\nd\n"),
        (b"a\rb\r\r\nc\n", "c", "d", b"a\rb\r\r\nd\n"),
        (b"x", "x", "y\nz", b"y\nz"),
        (b"a\r\nb", "b", "b\nc", b"a\r\nb\r\nc"),
        (b"a\r\nb\r\n", "a\r\n", "c\r\n", b"c\r\nb\r\n"),
    ],
)
def test_only_what_was_asked_for_changes(data: bytes, old: str, new: str, expected: bytes) -> None:
    assert replace_once(data, old, new) == expected


def test_overlapping_occurrences_are_ambiguous() -> None:
    with pytest.raises(Ambiguous):
        replace_once(b"aaa", "aa", "b")
    with pytest.raises(NoMatch):
        replace_once(b"aaa", "b", "c")


def test_what_an_encoding_lacks_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        replace_once(b"caf\xe9", "caf", "\u4e16")


@given(st.binary(max_size=60))
def test_parsing_loses_no_byte(data: bytes) -> None:
    assert Text.parse(data).bytes() == data


_LINES = st.lists(st.tuples(st.sampled_from(["a", "b", "", "x = 1"]), st.sampled_from(["\n", "\r\n"])), max_size=8)


@given(_LINES, _LINES, st.text("ab\n", max_size=6))
def test_lines_around_a_patch_keep_every_byte(
    before: list[tuple[str, str]], after: list[tuple[str, str]], new: str
) -> None:
    head, tail = ("".join(line + end for line, end in lines).encode() for lines in (before, after))
    patched = replace_once(head + b"<here>" + tail, "<here>", new)
    assert patched.startswith(head)
    assert patched.endswith(tail)
    assert patched[len(head) : len(patched) - len(tail)].replace(b"\r\n", b"\n") == new.encode()


def test_no_patch_keeps_the_controller_busy() -> None:
    """It runs all episodes. A policy can write a file in which every place is one, and repeat it as context."""
    began = time.process_time()
    with pytest.raises(Ambiguous):
        replace_once(b"a = 1\n" * 100_000, "a = 1\n", "", "a = 1\n" * 3)
    with pytest.raises(Ambiguous):
        replace_once(b"a" * (4 << 20), "a" * 2_000, "")
    assert command_names("'" + "a" * 10_000_000) == ()
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    ("cmd", "names"),
    [
        ("cd src && LC_ALL=C /usr/bin/grep -rn 'cat | rm' . | head -5", ("cd", "grep", "head")),
        ("git status;sed -n 1,5p a.py", ("git", "sed")),
        ("ls\ncat x", ("ls", "cat")),
        ("python -c 'import os; os.system(\"rm x\")'", ("python",)),
        ("a 1 2 3 4 5 6 7 8 9 && rm x", ("a",)),
        ("", ()),
    ],
)
def test_command_names(cmd: str, names: tuple[str, ...]) -> None:
    assert command_names(cmd) == names


async def test_files_too_large_to_be_looked_at_line_by_line_are_a_result(tmp_path: Path) -> None:
    data = b"x\n" * (3 << 20)
    tools = FourTools(FolderSandbox(tmp_path, {"big.txt": data}), NANO4.full, 2_000)
    for name, arguments in (
        ("str_replace", {"path": "big.txt", "old_str": "x", "new_str": "y"}),
        ("view_file", {"path": "big.txt"}),
    ):
        result = await tools.run(name, arguments, 4.0)
        assert result is not None and not result.ok and "larger than 4 MiB" in result.text
