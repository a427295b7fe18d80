"""Search/replace blocks: whatever the change, they make it; whatever the reply, they are read."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coderepairrl.agents.blocks import Block, Inexpressible, answer, applied, between, read, write
from coderepairrl.agents.patching import Ambiguous, NoMatch

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
    blocks = between("a.py", old, new, context_lines)
    assert read(write(blocks)) == blocks
    assert applied(old, blocks) == new
    assert all(block.search for block in blocks[1:])


def test_changes_that_no_blocks_make() -> None:
    with pytest.raises(Inexpressible, match="cannot make this change"):
        between("a.txt", b"x\r\n", b"x\n")


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
    assert read(reply) == [Block("a.py", ("x",), ("y",))]


def test_lines_between_markers_of_one_length_may_look_like_others() -> None:
    title = ("Title", "=====", "")
    assert read(write([Block("a.rst", title, title)])) == [Block("a.rst", title, title)]
    assert write([Block("", ("=======",), ())]).startswith("<<<<<<<< SEARCH\n=======\n========\n")


def test_answers() -> None:
    plain = "a.py\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\n"
    other = plain.replace("y", "z")
    assert read(answer(plain)) == read(answer(f"<think>\n{other}</think>\n<answer>\n{plain}</answer>"))
    assert read(answer(plain)) == read(answer(f"{other}\n<answer>\n{plain}</answer>\n{other}"))
    assert read(answer(f"<think>\n{plain}")) == []


def test_whole_lines_that_occur_once() -> None:
    assert applied(b"ax\nx\n", [Block("", ("x",), ("y",))]) == b"ax\ny\n"
    with pytest.raises(Ambiguous):
        applied(b"x\nx", [Block("", ("x",), ("y",))])
    with pytest.raises(NoMatch):
        applied(b"  x\n", [Block("", ("x",), ("y",))])


@given(st.lists(st.sampled_from(("a.py", "<<<<<<< SEARCH", "<< SEARCH", "=======", "=====", ">>>>>>> REPLACE", "x"))))
def test_reading_never_fails(lines: list[str]) -> None:
    text = "\n".join(lines)
    found = read(text)
    assert len(found) <= min(text.count("SEARCH"), text.count("REPLACE"))
    wanted = re.compile(r"<<<<<<< SEARCH\nx\n=======\nx\n>>>>>>> REPLACE")
    assert len(found) >= len(wanted.findall(text))


@pytest.mark.parametrize("piece", ["a.py\n<<<<<<< SEARCH\n", "=======\n", "a.py\n<<<<<<< SEARCH\n=======\n", ">>\n"])
def test_no_reply_keeps_the_controller_busy(piece: str) -> None:
    began = time.process_time()
    assert read("a.py\n<<<<<<< SEARCH\n" + piece * 20_000) == []
    assert time.process_time() - began < 5.0
