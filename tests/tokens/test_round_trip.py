"""A call in each family's own format is carried out by Nano through the gateway, and its ids are what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from spoken import encode_reply

from coderepairrl import agents, tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.types import Limits, Task, Turn, sequence
from folder_sandbox import FolderSandbox
from gateway.speech import post
from gateways import open_session

FILES = {"add.py": b"def add(a, b):\n    return a - b\n"}
TASK = Task("toy/add", "add() subtracts <|im_end|><|call|></s>", "python", "dir:x", b"")
PATCH = {"file_path": "add.py", "old_content": "    return a - b\n", "new_content": "    return a + b\n"}


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_repair_in_every_format(name: str, tmp_path: Path) -> None:
    codec = tokens.load_codec(
        FAMILIES[name].write(tmp_path / "model", max_position_embeddings=16384), thinking=FAMILIES[name].always
    )
    thought = "hm" * FAMILIES[name].always
    replies = [
        encode_reply(codec, "", [("shell", {"cmd": "cat add.py"})], thought),
        encode_reply(codec, "", [("apply_patch", PATCH)], thought, first=1),
        encode_reply(codec, "Repaired.", [], thought),
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
    async with open_session(codec, engine, Limits(tokens=15000)) as session:
        report = await agents.make_agent("nano", system="compact").run(TASK, sandbox, session.endpoint)
    turns = session.turns
    assert report.exit == "submitted"
    assert [(tool.name, tool.ok) for tool in report.tool_calls or ()] == [("shell", True), ("apply_patch", True)]
    assert b"+    return a + b\n" in await sandbox.diff()
    assert [turn.base for turn in turns] == [None, 0, 1], "each prompt extends the recorded ids"
    for turn, request, reply in zip(turns, engine.requests, replies, strict=True):
        assert turn.sampled == len(turn.output) == len(reply)
        assert sequence(turns, turn.index) == (*request.ids, *reply), "what was served is what is trained"
        assert not turn.masked


async def ask(codec: tokens.Codec, dialect: str, *bodies: dict[str, Any]) -> tuple[tuple[Turn, ...], str]:
    """The turns of requests that are answered "yes", and the last prompt."""
    reply = encode_reply(codec, "yes", [], "hm" * codec.thinking)
    if codec.format.name == "glm45":
        reply[-1] = codec.tokenizer.added["<|user|>"]
    engine = ScriptedEngine(lambda *_: reply, context=16384)
    async with open_session(codec, engine, Limits(tokens=15000), max_tokens=64) as session:
        for body in bodies:
            status, answer = await post(session, dialect, {"model": "policy", **body})
            assert status == 200, answer
    return session.turns, codec.decode(engine.requests[-1].ids)


def says(*texts: str) -> list[dict[str, Any]]:
    """Messages of the roles that `texts` begin with."""
    roles = [each.partition(" ")[::2] for each in texts]
    return [
        {"role": role, "content": text} | ({"tool_call_id": "abcdefgh1"} if role == "tool" else {})
        for role, text in roles
    ]


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        ("messages", {"max_tokens": 50, "system": "Do well.", "messages": says("user Repair.", "system Linux")}),
        ("responses", {"input": says("developer Do well.", "developer Linux", "user Repair.")}),
    ],
    ids=["Claude Code", "Codex"],
)
async def test_several_system_messages_of_an_agent_are_joined(dialect: str, body: Any, tmp_path: Path) -> None:
    """Qwen3.5 refuses the second one; the turn records the change."""
    codec = tokens.load_codec(FAMILIES["Qwen3.5, 3.6"].write(tmp_path))
    (turn,), prompt = await ask(codec, dialect, body)
    assert prompt == codec.decode(codec.render(says("system Do well.\n\nLinux", "user Repair.")))
    assert 'reshaped=["several system messages"]' in turn.overridden


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_prompt_has_every_message_in_any_order_of_roles(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    codec = tokens.load_codec(family.write(tmp_path, max_position_embeddings=16384), thinking=family.always)
    messages = says("system 1-s", "user 1-u", "system 2-s", "user 2-u", "tool 1-t", "assistant yes", "system 3-s")
    later = says("assistant yes", "user 3-u", "assistant 1-a", "assistant 2-a", "user 4-u", "system 4-s")
    bodies = [{"messages": messages[:2]}, {"messages": messages}, {"messages": [*messages, *later]}]
    turns, prompt = await ask(codec, "chat", *bodies)
    assert [message["content"] for message in messages + later if message["content"] not in prompt] == []
    reshaped = [wish for turn in turns for wish in turn.overridden if wish.startswith("reshaped")]
    assert bool(reshaped) == bool(family.rewritten)
