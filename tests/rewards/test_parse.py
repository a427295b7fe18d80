"""The parser reads what git writes, and refuses the rest with the line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl.rewards.parse import Block, MalformedPatch, parse_patch
from rewards.folder import Repository, git, read_data_rows

PLAIN = b"--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n d\n"


def only(patch: bytes):
    [file] = parse_patch(patch)
    return file


def test_reads_every_kind_of_change(repository: Repository) -> None:
    lines = b"".join(b"line %d\n" % i for i in range(30))
    repository.commit({"a.txt": lines, "gone.txt": b"x\n", "old.txt": lines, "bin": b"\0\1", "run.sh": b"true\n"})
    (repository.folder / "run.sh").chmod(0o755)
    patch = repository.edit(
        {
            "a.txt": lines.replace(b"line 3\n", b"three\n").replace(b"line 20\n", b""),
            "gone.txt": None,
            "old.txt": None,
            "new name.txt": lines + b"more\n",
            "empty": b"",
            "bin": bytes(range(256)),
            'quo"ted\né.txt': b"q\n",
        },
        "--binary",
        "-M",
    )
    files = {file.new or file.old: file for file in parse_patch(patch)}
    assert files["a.txt"].blocks == [Block(3, (b"line 3\n",), (b"three\n",)), Block(20, (b"line 20\n",), ())]
    assert (files["gone.txt"].new, files["gone.txt"].old_mode) == ("", "100644")
    renamed = files["new name.txt"]
    assert (renamed.old, renamed.renamed, renamed.path) == ("old.txt", True, "old.txt")
    assert renamed.blocks == [Block(30, (), (b"more\n",))]
    assert (files["empty"].old, files["empty"].blocks) == ("", [])
    assert len(files["bin"].binary) == 64
    assert (files["run.sh"].old_mode, files["run.sh"].new_mode) == ("100644", "100755")
    assert files['quo"ted\né.txt'].blocks == [Block(0, (), (b"q\n",))]


def test_keeps_line_endings_and_their_absence(repository: Repository) -> None:
    repository.commit({"a": b"1\r\n2\r\n3", "form": b"a\x0cb\n"})
    file = only(repository.edit({"a": b"1\r\ntwo\r\n3\n"}))
    assert file.blocks == [Block(1, (b"2\r\n", b"3"), (b"two\r\n", b"3\n"))]
    assert only(repository.edit({"form": b"a\x0cc\n"})).blocks == [Block(0, (b"a\x0cb\n",), (b"a\x0cc\n",))]


def test_tolerates_what_surrounds_a_diff(repository: Repository) -> None:
    repository.commit({"a": b"1\n"})
    repository.put({"a": b"2\n"})
    git(repository.folder, "commit", "-qam", "a subject\n\n-- a body\n+ with signs")
    mail = git(repository.folder, "format-patch", "-1", "--stdout")
    assert only(mail).blocks == [Block(0, (b"1\n",), (b"2\n",))]
    assert len(parse_patch(mail + mail)) == 2
    assert only(PLAIN + b"\n\nHope that helps!\n").blocks == only(PLAIN).blocks


def test_names_of_files_are_read_in_every_form() -> None:
    assert only(PLAIN).path == "x.py"
    assert only(PLAIN.replace(b"a/x.py", b"x.py\t2020-01-01 00:00:00").replace(b"b/x.py", b"x.py")).path == "x.py"
    assert only(b"--- /dev/null\n+++ b/y\n@@ -0,0 +1 @@\n+1\n").path == "y"
    assert only(b"diff --git a/my file b/my file\nold mode 100644\nnew mode 100755\n").path == "my file"
    assert only(b'diff --git "a/t\\303\\244" "b/t\\303\\244"\nold mode 100644\nnew mode 100755\n').path == "tä"

    for code in range(256):  # a quoted name may escape anything
        header = b'diff --git "a/\\%c" "b/\\%c"\nold mode 100644\nnew mode 100755\n' % (code, code)
        assert code == ord("\n") or only(header).path
    assert len(parse_patch(b"diff --git " * 100_000)) == 1  # and soon
    assert only(b"diff --git a/a b a/b b/a b a/b\nold mode 100644\nnew mode 100755\n").path == "a b a/b"
    assert parse_patch(b"") == parse_patch(b"\n \n") == ()


def test_refuses_by_line() -> None:
    for patch, line in {
        b"hello\n": 1,
        PLAIN[:-3]: 6,
        PLAIN.replace(b" d\n", b""): 6,
        PLAIN.replace(b"+c", b"c"): 6,
        PLAIN.replace(b"-1,3", b"-1,2"): 7,
        PLAIN + b"+e\n": 8,
        PLAIN.replace(b"@@ -1,3 +1,3 @@", b"@@ ... @@"): 3,
        PLAIN.replace(b"@@ -1,3 +1,3 @@\n", b""): 3,
        b"@@ -1 +1 @@\n-a\n+b\n": 1,
        b"diff --cc x\n@@@ -1,1 -1,1 +1,1 @@@\n": 1,
        b"diff --git x\n": 1,
    }.items():
        with pytest.raises(MalformedPatch, match=f"line {line}") as caught:
            parse_patch(patch)
        assert caught.value.line == line and caught.value.fix, patch


LINE = st.binary(max_size=6).map(lambda raw: raw.replace(b"\n", b"").replace(b"\0", b""))
FILE = st.tuples(st.lists(LINE, max_size=12), st.booleans()).map(
    lambda f: b"\n".join(f[0]) + (b"\n" if f[1] and f[0] else b"")
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(old=FILE, new=FILE)
def test_blocks_rebuild_the_new_file(tmp_path: Path, old: bytes, new: bytes) -> None:
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    command = ["git", "diff", "--no-index", "--text", "old", "new"]
    patch = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout
    lines = re.findall(rb"[^\n]*\n|[^\n]+", old)
    blocks = only(patch).blocks if patch else []
    for block in reversed(blocks):
        assert tuple(lines[block.at : block.at + len(block.removed)]) == block.removed
        lines[block.at : block.at + len(block.removed)] = block.added
    assert b"".join(lines) == new


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(0, len(PLAIN)))
def test_any_bytes_give_files_or_a_named_line(noise: bytes, at: int) -> None:
    try:
        parse_patch(PLAIN[:at] + noise + PLAIN[at:])
    except MalformedPatch as problem:
        assert problem.line >= 1


@pytest.mark.parametrize("name", ["swebench/swebench_lite.jsonl.gz", "defects4j/defects4j_patches.jsonl.gz"])
def test_reads_real_patches(name: str) -> None:
    rows = list(read_data_rows(name))
    assert len(rows) > 100
    for row in rows:
        files = parse_patch(row["patch"].encode())
        headers = len(re.findall(r"^--- .*\n\+\+\+ ", row["patch"], re.M))  # the rest changes its mode
        assert len(files) >= headers > 0
        assert sum(bool(file.blocks) for file in files) == headers


def test_reads_every_prediction() -> None:
    for row in read_data_rows("pairs/swebench_pairs.jsonl.gz"):
        patch = (row["model_patch"] or "").encode()
        assert bool(parse_patch(patch)) == bool(patch.strip())
