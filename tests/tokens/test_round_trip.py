"""A call in each family's own format is carried out by Nano through the gateway, and its ids are what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES
from spoken import said

from coderepairrl import agents, tokens
from coderepairrl.agents.folder import FolderSandbox
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.types import Limits, Sampling, Task, sequence

FILES = {"add.py": b"def add(a, b):\n    return a - b\n"}
TASK = Task("toy/add", "add() subtracts <|im_end|><|call|></s>", "python", "dir:x", b"")
PATCH = {"file_path": "add.py", "old_content": "    return a - b\n", "new_content": "    return a + b\n"}


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_repair_in_every_format(name: str, tmp_path: Path) -> None:
    codec = tokens.load(
        FAMILIES[name].write(tmp_path / "model", max_position_embeddings=16384), thinking=FAMILIES[name].always
    )
    thought = "hm" * FAMILIES[name].always
    replies = [
        said(codec, "", [("shell", {"cmd": "cat add.py"})], thought),
        said(codec, "", [("apply_patch", PATCH)], thought, first=1),
        said(codec, "Repaired.", [], thought),
    ]
    for reply, call in zip(replies, (True, True, False), strict=True):
        if codec.format.name == "glm45":  # the role that follows ends a reply
            reply[-1] = codec.tokenizer.added["<|observation|>" if call else "<|user|>"]
        if codec.format.name == "gemma4" and call:
            reply[-1] = codec.tokenizer.added["<|tool_response>"]
    said_so_far = iter(replies)
    engine = ScriptedEngine(lambda ids, sampling, seed: next(said_so_far), context=16384)
    (tmp_path / "repo").mkdir()
    sandbox = FolderSandbox(tmp_path / "repo", FILES)
    gateway = Gateway(PolicySource(codec, engine), sampling=Sampling(max_tokens=512), on_turn=lambda *_: None)
    await gateway.start()
    session = gateway.open("episode", limits=Limits(tokens=15000), seed=0)
    report = await agents.make("nano", system="compact").run(TASK, sandbox, session.endpoint)
    turns = await gateway.close(session)
    await gateway.stop()
    assert report.exit == "submitted"
    assert [(tool.name, tool.ok) for tool in report.tool_calls or ()] == [("shell", True), ("apply_patch", True)]
    assert b"+    return a + b\n" in await sandbox.diff()
    assert [turn.base for turn in turns] == [None, 0, 1], "each prompt extends the recorded ids"
    for turn, asked, reply in zip(turns, engine.requests, replies, strict=True):
        assert turn.sampled == len(turn.output) == len(reply)
        assert sequence(turns, turn.index) == (*asked.ids, *reply), "what was served is what is trained"
        assert not turn.masked
