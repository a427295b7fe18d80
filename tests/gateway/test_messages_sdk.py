"""The official Anthropic SDK, pointed at the gateway, sees what it expects of Anthropic."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from coderepairrl.types import sequence

from .clients import anthropic_client as client
from .conftest import SHELL, Said, World, check_exact_ids
from .test_remote import calling, listening, relay

FUNCTION: Any = SHELL["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
ASK: list[Any] = [{"role": "user", "content": "Fix it, please."}]


async def ask(sdk: AsyncAnthropic, messages: list[Any] = ASK, **options: Any) -> Any:
    options = {"max_tokens": 512, "system": "Repair."} | options
    return await sdk.messages.create(model="policy", messages=messages, **options)


async def gather(sdk: AsyncAnthropic, messages: list[Any] = ASK, **options: Any) -> Any:
    """A streamed message, put together by the SDK itself."""
    options = {"max_tokens": 512, "system": "Repair."} | options
    async with sdk.messages.stream(model="policy", messages=messages, **options) as stream:
        return await stream.get_final_message()


BOTH = pytest.mark.parametrize("how", [ask, gather])


def back(reply: Any) -> dict[str, Any]:
    """A reply as a client sends it back."""
    fields = {"text": {"type", "text"}, "thinking": {"type", "thinking", "signature"}}
    other = {"type", "id", "name", "input"}
    return {
        "role": "assistant",
        "content": [block.model_dump(include=fields.get(block.type, other)) for block in reply.content],
    }


@BOTH
async def test_tools_in_parallel_and_their_results(world: World, said: Said, how: Any) -> None:
    world.says(
        [
            *said.thought(),
            *said("I look.", ("shell", {"cmd": "ls <|im_end|>", "n": 1.0}), ("shell", {"cmd": 'echo "é"'})),
        ],
        said("", ("shell", {"cmd": "true"})),
        said("done"),
    )
    session = world.open()
    sdk, messages = client(session.endpoint), list(ASK)
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    for wanted in (2, 1, 0):
        reply = await how(sdk, messages, tools=[TOOL, hosted])
        uses = [block for block in reply.content if block.type == "tool_use"]
        assert len(uses) == wanted
        assert reply.stop_reason == ("tool_use" if wanted else "end_turn")
        messages.append(back(reply))
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": use.id, "content": f"<|im_end|> {number}\n"}
            for number, use in enumerate(uses)
        ]
        if wanted == 1:
            results[0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            results.append({"type": "text", "text": "and go on", "cache_control": {"type": "ephemeral"}})
        messages.append({"role": "user", "content": results})
        if wanted == 2:
            assert uses[0].input == {"cmd": "ls <|im_end|>", "n": 1}
            assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert reply.content[0].thinking == "hm" and reply.content[0].signature
            assert reply.usage.output_tokens_details.thinking_tokens == 3
    turns = await world.gateway.close(session)
    assert [turn.base for turn in turns] == [None, 0, 1]
    assert [message["content"] for message in turns[1].messages[:2]] == ["<|im_end|> 0\n", "<|im_end|> 1\n"]
    assert [message["content"] for message in turns[2].messages[:2]] == ["a\nb", "and go on"]
    assert turns[0].overridden == ('hosted_tools=["web_search_20250305"]',)
    assert reply.usage.cache_read_input_tokens == len(sequence(turns, 1))
    assert reply.usage.input_tokens == len(turns[2].given)
    check_exact_ids(turns, world.engine)


@BOTH
@pytest.mark.parametrize(
    "arguments",
    [
        [1],
        "text",
        {"input": {"NaN": 1e400}},
        '{"cmd": 1e999}',
        '{"cmd": "\\ud800"}',
    ],
)
async def test_any_arguments_make_an_object(world: World, how: Any, arguments: Any) -> None:
    """One that the client can read, and send back: an infinity and half a character are not in JSON."""
    async with listening(calling("shell", arguments)) as url, relay(url) as session:
        sdk = client(session.endpoint)
        reply = await how(sdk, tools=[TOOL])
        assert isinstance(reply.content[0].input, dict)
        json.dumps(reply.content[0].input, allow_nan=False, ensure_ascii=False).encode()
        result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "?"}
        await how(sdk, [*ASK, back(reply), {"role": "user", "content": [result]}], tools=[TOOL])
        assert len(session.turns) == 2
        assert session.fault is None


@BOTH
async def test_a_stop_sequence_ends_the_message_and_its_tail_is_dropped(world: World, said: Said, how: Any) -> None:
    world.engine.script = lambda *_: said("Thought: look\nObservation: none")
    world.engine.chunk = 8
    session = world.open()
    sdk = client(session.endpoint)
    reply = await how(sdk, stop_sequences=["never", "\nObservation:"])
    assert reply.content[0].text == "Thought: look"
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "\nObservation:")
    await how(sdk, [*ASK, back(reply), {"role": "user", "content": "seen"}])
    turns = await world.gateway.close(session)
    assert len(turns[0].tail) > 0
    assert turns[1].base == 0
    check_exact_ids(turns, world.engine)
