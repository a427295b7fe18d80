"""Messages after the first turn may contain anything: what is not text becomes a placeholder, and is recorded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coderepairrl import tokens
from coderepairrl.gateway import Session
from coderepairrl.gateway.body import ContentReader
from coderepairrl.types import Limits, Sampling
from gateways import open_session

from .conftest import Fake, Said, World, check_exact_ids
from .speech import SPEAKERS, post

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
"""What real programs sent after they had opened an image, a PDF or a tool: the last items of their requests, and what
they had said and called before."""
PNG = "iVBORw0KGgo="
IMAGES: dict[str, list[Any]] = {
    "chat": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "high"}}],
    "responses": [{"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}],
    "messages": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}],
}
SHOWN = "[image, not shown]"
EVERY = pytest.mark.parametrize("name", SPEAKERS)
CALLED = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "ls"}'}}


async def send(session: Session, name: str, body: Any) -> tuple[int, Any]:
    status, reply = await post(session, name, body)
    return status, json.loads(reply)


def after_a_call(name: str, result: Any) -> dict[str, Any]:
    """A second request: the policy called a tool, which answered `result`."""
    ask: list[Any] = [{"role": "user", "content": "Fix it."}]
    said = {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]}
    return SPEAKERS[name].body([*ask, said, {"role": "tool", "tool_call_id": "c", "content": result}])


@EVERY
async def test_an_image_that_a_tool_shows_is_named(world: World, said: Said, name: str) -> None:
    """The turn that sees it records it, the next one does not, and the conversation is one path."""
    world.says(said("I look.", ("shell", {"cmd": "ls"})), said("An image.", ("shell", {"cmd": "ls"})), said("Done."))
    session, speaker = world.open(), SPEAKERS[name]
    messages: list[Any] = [{"role": "user", "content": "Fix it."}]
    for result in (IMAGES[name], "text", None):
        status, reply = await send(session, name, speaker.body(messages))
        assert status == 200, reply
        if result:
            messages.append(speaker.whole(reply))
            key = messages[-1]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": key, "content": result})
    assert [turn.base for turn in session.turns] == [None, 0, 1]
    assert session.turns[1].messages[0]["content"] == SHOWN
    assert SHOWN in world.gateway.source.codec.decode(world.engine.seen[1][0])
    assert [turn.overridden for turn in session.turns] == [(), ('not_shown=["image"]',), ()]
    check_exact_ids(session.turns, world.engine)


async def test_a_turn_that_goes_on_by_id_says_what_was_not_shown(world: World) -> None:
    session = world.open()
    _, first = await send(session, "responses", {"model": "policy", "input": "Fix it.", "instructions": "Repair."})
    image = [{"role": "user", "content": IMAGES["responses"]}]
    for _ in range(2):
        more = {"input": image, "previous_response_id": first["id"], "instructions": "Repair."}
        _, first = await send(session, "responses", {"model": "policy", **more})
    assert [len(turn.overridden) for turn in session.turns] == [0, 1, 1]


@pytest.mark.parametrize("program", RECORDED)
async def test_what_real_programs_send_is_answered(world: World, said: Said, program: str) -> None:
    recorded = RECORDED[program]
    world.engine.context = 1 << 16
    world.says(said("", *((call["name"], call["arguments"]) for call in recorded["called"])), said("Seen."))
    session = world.open(tokens=1 << 16)
    for body in recorded["bodies"]:
        status, reply = await send(session, recorded["dialect"], {**body, "stream": False})
        assert status == 200, reply
    assert [turn.base for turn in session.turns] == [None, 0], "one path"
    (said_to_it, *_) = session.turns[1].messages
    assert said_to_it["content"] == recorded["shown"]
    assert [text for text in session.turns[1].overridden if text.startswith("not_shown")] == recorded["not_shown"]
    check_exact_ids(session.turns, world.engine)


PARTS = [
    ({"type": "text", "text": "a"}, "a"),
    ("a", "a"),
    (None, ""),
    (7, "7"),
    ({"type": "refusal", "refusal": "no"}, "no"),
    ({"type": "text", "text": None}, ""),
    ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "[image, not shown]"),
    ({"type": "document", "title": "T", "source": {"type": "base64", "data": ""}}, "[document, not shown]"),
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "words"}]}}, "words"),
    ({"type": "search_result", "title": "T", "source": "s", "content": [{"type": "text", "text": "x"}]}, "T\ns\nx"),
    ({"type": "hologram", "depth": 3}, "[hologram, not shown]"),
    ({"type": ["odd"]}, "[part, not shown]"),
    ({}, "[part, not shown]"),
    ({"type": "x]\n[y"}, "[part, not shown]"),
    ({"type": "x" * 1000}, "[part, not shown]"),
]


@pytest.mark.parametrize(("part", "text"), PARTS)
def test_a_part_is_text_or_a_short_placeholder(part: Any, text: str) -> None:
    reader = ContentReader()
    assert reader.read_text([part]) == text
    assert bool(reader.hidden) == text.startswith("[")


async def test_halves_of_characters_and_what_is_no_utf8_are_read(world: World) -> None:
    """A client that cuts text between the halves of an emoji sends one of them."""
    found = set()
    for name, speaker in SPEAKERS.items():
        for half in (b"\\ud83d cut", b"\xff"):
            body = json.dumps(speaker.body([{"role": "user", "content": "HALF"}])).encode().replace(b"HALF", half)
            session = world.open()
            assert (await send(session, name, body))[0] == 200
            found.add(session.turns[0].messages[0]["content"])
    assert found == {"\ufffd cut", "\ufffd"}


async def test_deep_arguments_come_back(world: World, said: Said) -> None:
    """Arguments nested deeper than the gateway reads reach clients as text in an object."""
    for depth in (100, 300):
        deep = {"a": json.loads("[" * depth + "]" * depth)}
        world.engine.script = lambda *_, deep=deep: said("", ("shell", deep))
        session = world.gateway.open("e", limits=Limits(tokens=4000), seed=0, sampling=Sampling(max_tokens=3000))
        ask = SPEAKERS["messages"].body([{"role": "user", "content": "Fix it."}], max_tokens=3000)
        _, reply = await send(session, "messages", ask)
        body = after_a_call("messages", "seen")
        assert [block["type"] for block in reply["content"]] == ["tool_use"]
        body["messages"][1]["content"] = reply["content"]
        assert (await send(session, "messages", body))[0] == 200
        assert session.fault is None


@EVERY
async def test_a_reply_after_words_of_the_assistants_is_a_message_of_its_own(
    world: World, said: Said, name: str
) -> None:
    """In every dialect; the turn records it."""
    world.engine.script = lambda *_: said("Well.")
    session = world.open()
    messages = [{"role": "user", "content": "Fix it."}, {"role": "assistant", "content": "The answer is ("}]
    body = {key: value for key, value in SPEAKERS[name].body(messages).items() if key != "tools"}
    status, reply = await send(session, name, body)
    assert status == 200
    assert SPEAKERS[name].whole(reply)["content"] == "Well."
    (turn,) = session.turns
    assert [message["role"] for message in turn.messages] == ["user", "assistant", "assistant"]
    assert turn.overridden == ("prefill=true",)
    assert list(turn.given.ids) == world.gateway.source.codec.render(messages), "the same prompt in every dialect"
    check_exact_ids(session.turns, world.engine)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PART_KINDS = (
    *("text", "image", "image_url", "input_image", "document", "file", "input_file", "input_audio", "refusal", "x"),
    *("tool_reference", "search_result", "thinking", "tool_use", "server_tool_use", "web_search_tool_result"),
)
ITEM_KINDS = (
    *("web_search_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output", "mcp_call"),
    *("apply_patch_call", "apply_patch_call_output", "computer_call", "computer_call_output", "mcp_list_tools", "x"),
    *("compaction", "function_call", "custom_tool_call", "function_call_output", "reasoning", "additional_tools"),
)
FIELDS = (
    *("text", "source", "image_url", "file", "input_audio", "data", "url", "title", "content", "filename", "tool_name"),
    *("name", "id", "refusal", "input", "call_id", "action", "operation", "output", "arguments"),
)


def things(kinds: tuple[str, ...]) -> st.SearchStrategy[Any]:
    more = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=4)
    return st.builds(lambda kind, fields: {"type": kind, **fields}, st.sampled_from(kinds), more)


PART = things(PART_KINDS) | ANY
ITEM = things(ITEM_KINDS)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(result=st.lists(PART | ANY, max_size=3) | ANY, said=st.lists(PART | ANY, max_size=2), items=st.lists(ITEM))
def test_no_content_after_the_first_turn_is_refused(codec: tokens.Codec, result: Any, said: Any, items: Any) -> None:
    """A tool may bring anything: every dialect answers, and no episode is void for it."""
    write = Said(codec)

    async def play() -> None:
        limits = Limits(calls=100, tokens=4000, seconds=60.0)
        async with open_session(codec, Fake(lambda *_: write("ok")), limits, max_tokens=9) as session:
            for name in SPEAKERS:
                body = after_a_call(name, result)
                if name == "messages":
                    body["messages"][1]["content"] += [part for part in said if isinstance(part, dict)]
                    body["messages"][-1]["content"] += said
                elif name == "responses":
                    body["input"] += [*items, {"role": "user", "content": said}]
                else:
                    body["messages"].append({"role": "user", "content": said})
                status, reply = await post(session, name, body)
                assert status == 200, (reply, body)
        assert session.fault is None

    asyncio.run(play())
