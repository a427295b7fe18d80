"""Nano against our own gateway: what it appends extends the recorded tokens, and what goes wrong has its ending."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from coderepairrl import agents, tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.rewards.thesis import ExplorationDepth
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.types import AgentReport, Ending, Episode, Limits, Task, Turn
from folder_sandbox import FolderSandbox
from gateways import open_session

FILES = {"add.py": b"def add(a, b):\r\n    return a - b\r\n"}
TASK = Task("toy/add", "add() subtracts", "python", "dir:x", b"")


async def episode(
    folder: Path, miniature: Path, replies: Sequence[str], limits: Limits
) -> tuple[AgentReport, tuple[Turn, ...], ScriptedEngine]:
    codec = tokens.load_codec(miniature)
    added = codec.tokenizer.added

    def ids(text: str) -> list[int]:
        """`text` with the markers of tool calls as the tokens that they are."""
        parts = [
            [added[piece]] if piece in added else codec.encode(piece) for piece in re.split("(</?tool_call>)", text)
        ]
        return [*itertools.chain(*parts), added["<|im_end|>"]]

    said = map(ids, itertools.chain(replies, itertools.repeat(replies[-1])))
    engine = ScriptedEngine(lambda ids, sampling, seed: next(said))
    (folder / "repo").mkdir()
    sandbox = FolderSandbox(folder / "repo", FILES)
    async with open_session(codec, engine, limits) as session:
        nano = agents.make_agent("nano", system="compact", tools="compact")
        report = await nano.run(TASK, sandbox, session.endpoint)
    return report, session.turns, engine


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PATCH = call("apply_patch", file_path="add.py", old_content="a - b\n", new_content="a + b\n")


@pytest.mark.parametrize(
    ("replies", "limits", "ending", "model_calls"),
    [
        (['<tool_call>\n{"name": "shell", "argu\n</tool_call>'], Limits(calls=2, tokens=4000), "calls", 2),
        ([call("shell", cmd="seq 500")], Limits(tokens=2000), "tokens", 1),
        ([call("shell", cmd="sleep 9")], Limits(tokens=4000, seconds=0.6), "time", 1),
    ],
)
async def test_every_limit_ends_it_politely(
    tmp_path: Path, miniature: Path, replies: list[str], limits: Limits, ending: str, model_calls: int
) -> None:
    report, turns, engine = await episode(tmp_path, miniature, replies, limits)
    assert (report.exit, len(engine.requests), len(turns)) == (ending, model_calls, model_calls)
    assert [turn.base for turn in turns] == [None, *range(model_calls - 1)]
    assert not any(turn.masked for turn in turns)


async def test_habits_find_what_a_call_printed_though_another_had_no_result(tmp_path: Path, miniature: Path) -> None:
    """A call that cannot be read is in the report, and answered by a message that is no tool's."""
    look, read = call("shell", cmd="grep -rn return ."), call("shell", cmd="sed -n 1,5p ./add.py")
    replies = ["<tool_call>\nnonsense\n</tool_call>", look, read, PATCH, "Done."]
    report, turns, _ = await episode(tmp_path, miniature, replies, Limits(tokens=4000))
    assert report.tool_calls is not None and [call.ok for call in report.tool_calls] == [False, True, True, True]
    attempt = Episode("e", TASK.id, "train", 1, "g", 0, Ending.DONE, turns=turns, tool_calls=report.tool_calls)
    assert (await ExplorationDepth()(TASK, attempt, ScriptedBackend())).value == pytest.approx(0.25)
