"""Nano against our own gateway."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from coderepairrl import agents, tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.rewards.thesis import ExplorationDepth
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import Ending, Episode, Limits, Task
from folder_sandbox import FolderSandbox
from gateways import open_session

FILES = {"add.py": b"def add(a, b):\r\n    return a - b\r\n"}
TASK = Task("toy/add", "add() subtracts", "python", "dir:x", b"")


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = call("apply_patch", file_path="add.py", old_content="a - b\n", new_content="a + b\n")


async def test_nano_only_appends_and_each_result_is_that_of_its_call(tmp_path: Path, miniature: Path) -> None:
    """A call that cannot be read is in the report, and answered by a message that is no tool's."""
    look, read = call("shell", cmd="grep -rn return ."), call("shell", cmd="sed -n 1,5p ./add.py")
    replies = iter(["<tool_call>\nnonsense\n</tool_call>", look, read, PATCH, "Done."])
    codec = tokens.load_codec(miniature)
    added = codec.tokenizer.added

    def spell(text: str) -> list[int]:
        """`text` as ids, with the markers of tool calls as the tokens that they are."""
        parts = (
            [added[piece]] if piece in added else codec.encode(piece) for piece in re.split("(</?tool_call>)", text)
        )
        return [*itertools.chain(*parts), added["<|im_end|>"]]

    engine = ScriptedEngine(lambda ids, sampling, seed: spell(next(replies)))
    (tmp_path / "repo").mkdir()
    sandbox = FolderSandbox(tmp_path / "repo", FILES)
    async with open_session(codec, engine, Limits(tokens=4000)) as session:
        nano = agents.make_agent("nano", system="compact", tools="compact")
        report = await nano.run(TASK, sandbox, session.endpoint)
    turns = session.turns
    assert [turn.base for turn in turns] == [None, 0, 1, 2, 3] and not any(turn.masked for turn in turns)
    assert report.tool_calls is not None and [call.ok for call in report.tool_calls] == [False, True, True, True]
    attempt = Episode("e", TASK.id, "train", 1, "g", 0, Ending.DONE, turns=turns, tool_calls=report.tool_calls)
    assert (await ExplorationDepth()(TASK, attempt, ScriptedBackend())).value == pytest.approx(0.25)
