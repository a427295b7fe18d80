"""Search/replace blocks: whatever the change, they make it; whatever the reply, they are read."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coderepairrl.agents.patching import (
    Ambiguous,
    Block,
    Inexpressible,
    NoMatch,
    apply_blocks,
    compute_blocks,
    parse_blocks,
    write_blocks,
)
from coderepairrl.rewards import parse_patch
from coderepairrl.tasks.patches import apply_to_text
from rewards.folder import read_data_rows

_LINES = st.sampled_from(
    ("", "x", "    x", "=======", "<<<<<<< SEARCH", ">>>>>>> REPLACE", "======", "é\x0c\x85y", "```")
)
_TEXT = st.builds(
    lambda lines, end: "\n".join(lines) + end * bool(lines), st.lists(_LINES, max_size=9), st.sampled_from(("", "\n"))
)


@settings(deadline=None)
@given(_TEXT, _TEXT, st.integers(0, 3), st.booleans())
@example("", "x", 0, False)
@example("x\n", "x", 0, False)
@example("x", "x\n", 0, False)
@example("x\n", "", 0, False)
@example("x\nx\nx\n", "x\nx\nx\nx\n", 0, True)
def test_any_change_makes_the_round_trip(before: str, after: str, context_lines: int, crlf: bool) -> None:
    """Blank lines, insertions, indentation, files without a last line end, lines that look like markers, CRLF."""
    old, new = (text.replace("\n", "\r\n" if crlf else "\n").encode() for text in (before, after))
    if b"\n" not in old:  # what line ends a file has that has none, no block says
        new = after.encode()
    blocks = compute_blocks("a.py", old, new, context_lines)
    assert parse_blocks(write_blocks(blocks)) == blocks
    assert apply_blocks(old, blocks) == new
    assert all(block.search for block in blocks[1:])


def test_context_around_a_change() -> None:
    before = b"".join(b"line %d\n" % n for n in range(20))
    after = before.replace(b"line 10\n", b"line 10\ninserted\n")
    assert compute_blocks("a", before, after, 0) == [
        Block("a", ("line 10", "line 11"), ("line 10", "inserted", "line 11"))
    ]
    [block] = compute_blocks("a", before, after, 3)
    assert block.search == tuple(f"line {n}" for n in range(8, 14))


def test_changes_that_no_blocks_make() -> None:
    with pytest.raises(Inexpressible, match="cannot make this change"):
        compute_blocks("a.txt", b"x\r\n", b"x\n")


def _reconstructed(patch: bytes) -> tuple[str, bytes]:
    """Path and file before a patch: the lines of its hunks, among others that occur nowhere else."""
    [file] = parse_patch(patch)
    before: list[bytes] = []
    for hunk, start in zip(file.hunks, re.findall(rb"^@@ -(\d+)", patch, re.M), strict=True):
        before += [b"# line %d" % n for n in range(len(before) + 1, int(start))]
        before += hunk.side(b"-")
    return file.path, b"".join(line + b"\n" for line in [*before, b"# the end"])


@pytest.mark.parametrize("context_lines", [0, 3])
def test_references_of_swe_bench_lite_make_the_round_trip(context_lines: int) -> None:
    """One in three."""
    patches = [row["patch"].encode() for row in read_data_rows("swebench/swebench_lite.jsonl.gz")]
    assert len(patches) == 300
    count = 0
    for patch in patches[::3]:
        path, before = _reconstructed(patch)
        after = apply_to_text(before, patch) or b""
        blocks = compute_blocks(path, before, after, context_lines)
        said = parse_blocks(write_blocks(blocks))
        assert said == blocks and {block.path for block in said} <= {path}
        assert before != after == apply_blocks(before, said), path
        count += len(blocks)
    assert count > 100


MALFORMED = {
    "too short": "a.py\n<<< SEARCH\nx\n=====\ny\n>>> REPLACE\n",
    "too long": "a.py\n<<<<<<<<<< SEARCH\nx\n==========\ny\n>>>>>>>>>> REPLACE\n",
    "closed": "a.py\n<<<<<<< SEARCH>>>>>>>\nx\n=======\ny\n>>>>>>> REPLACE<<<<<<<\n",
    "blanks": "a.py\n  <<<<<<< SEARCH  \nx\n=======\t\ny\n >>>>>>> REPLACE\n",
    "no blank": "a.py\n<<<<<<<SEARCH\nx\n=======\ny\n>>>>>>>REPLACE\n",
    "text behind": "a.py\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE that is all\n",
    "fenced": "**a.py**:\n```python\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n```\n",
    "carriage returns": "a.py\r\n<<<<<<< SEARCH\r\nx\r\n=======\r\ny\r\n>>>>>>> REPLACE\r\n",
    "an unfinished one first": "b.py\n<<<<<<< SEARCH\nz\n=======\n"
    "a.py\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n",
    "a heading": "### a.py\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n",
}


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED)
def test_malformed_markers_are_read(reply: str) -> None:
    assert parse_blocks(reply) == [Block("a.py", ("x",), ("y",))]


@pytest.mark.parametrize(
    "reply",
    ["", "SEARCH\nx\n=======\ny\nREPLACE", "<<<<<<< SEARCH\nx\n=======\ny\n", "<<<<<<< SEARCH\nx\n>>>>>>> REPLACE"],
)
def test_an_incomplete_block_is_no_block(reply: str) -> None:
    assert parse_blocks(reply) == []


def test_lines_between_markers_of_one_length_may_look_like_others() -> None:
    title = ("Title", "=====", "")
    assert parse_blocks(write_blocks([Block("a.rst", title, title)])) == [Block("a.rst", title, title)]
    assert write_blocks([Block("", ("=======",), ())]).startswith("<<<<<<<< SEARCH\n=======\n========\n")


def test_whole_lines_that_occur_once() -> None:
    assert apply_blocks(b"ax\nx\n", [Block("", ("x",), ("y",))]) == b"ax\ny\n"
    with pytest.raises(Ambiguous):
        apply_blocks(b"x\nx", [Block("", ("x",), ("y",))])
    with pytest.raises(NoMatch):
        apply_blocks(b"  x\n", [Block("", ("x",), ("y",))])


@given(st.lists(st.sampled_from(("a.py", "<<<<<<< SEARCH", "<< SEARCH", "=======", "=====", ">>>>>>> REPLACE", "x"))))
def test_reading_never_fails(lines: list[str]) -> None:
    text = "\n".join(lines)
    found = parse_blocks(text)
    assert len(found) <= min(text.count("SEARCH"), text.count("REPLACE"))
    wanted = re.compile(r"<<<<<<< SEARCH\nx\n=======\nx\n>>>>>>> REPLACE")
    assert len(found) >= len(wanted.findall(text))


@pytest.mark.parametrize("piece", ["a.py\n<<<<<<< SEARCH\n", "=======\n", "a.py\n<<<<<<< SEARCH\n=======\n", ">>\n"])
def test_no_reply_keeps_the_controller_busy(piece: str) -> None:
    began = time.process_time()
    assert parse_blocks("a.py\n<<<<<<< SEARCH\n" + piece * 20_000) == []
    assert time.process_time() - began < 5.0
