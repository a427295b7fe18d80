"""The official OpenAI SDK, pointed at the gateway's Responses, sees what it expects of OpenAI."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from .clients import openai_client as client
from .conftest import SHELL, Said, World, check_exact_ids

TOOL: Any = {"type": "function", "strict": False, **SHELL["function"]}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": {"type": "text"}}


async def ask(sdk: AsyncOpenAI, items: Any = "Fix it.", **options: Any) -> Any:
    return await sdk.responses.create(model="policy", input=items, **({"instructions": "Repair."} | options))


async def gather(sdk: AsyncOpenAI, items: Any = "Fix it.", **options: Any) -> Any:
    """A streamed response, put together by the SDK itself, which checks the order of the events."""
    options = {"instructions": "Repair."} | options
    async with sdk.responses.stream(model="policy", input=items, **options) as stream:
        last = [event async for event in stream][-1]
        if last.type != "response.completed":
            return last.response
        return await stream.get_final_response()


BOTH = pytest.mark.parametrize("how", [ask, gather])


@BOTH
async def test_tools_in_parallel_and_their_results(world: World, said: Said, how: Any) -> None:
    world.says(
        [*said.thought(), *said("I look.", ("shell", {"cmd": "ls <|im_end|>"}), ("shell", {"cmd": 'echo "é"'}))],
        said("", ("apply_patch", {"input": "*** Begin\n"})),
        said("done"),
    )
    session = world.open()
    sdk, items = client(session.endpoint), [{"role": "user", "content": [{"type": "input_text", "text": "Fix it."}]}]
    for wanted in (["function_call"] * 2, ["custom_tool_call"], []):
        reply = await how(sdk, items, tools=[TOOL, PATCH, {"type": "web_search"}])
        calls = [item for item in reply.output if item.type.endswith("_call")]
        assert [call.type for call in calls] == wanted
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
        items += [
            {"type": f"{call.type}_output", "call_id": call.call_id, "output": f"<|im_end|> {number}\n"}
            for number, call in enumerate(calls)
        ]
        if len(wanted) == 2:
            assert (reply.output[0].type, reply.output[0].content[0].text) == ("reasoning", "hm")
            assert reply.usage.output_tokens_details.reasoning_tokens == 3
        if wanted == ["custom_tool_call"]:
            assert calls[0].input == "*** Begin\n"
    turns = await world.gateway.close(session)
    assert [turn.base for turn in turns] == [None, 0, 1]
    assert [[message["role"] for message in turn.messages] for turn in turns] == [
        ["system", "user", "assistant"],
        ["tool", "tool", "assistant"],
        ["tool", "assistant"],
    ]
    assert turns[0].overridden == ('hosted_tools=["web_search"]',)
    assert [message["content"] for message in turns[1].messages[:2]] == ["<|im_end|> 0\n", "<|im_end|> 1\n"]
    check_exact_ids(turns, world.engine)


@BOTH
async def test_a_broken_call_after_a_good_one_goes_on(world: World, said: Said, how: Any) -> None:
    broken = said.codec.tokenizer.added["<tool_call>"]
    good = said("See", ("shell", {"cmd": "ls"}), end=False)
    world.engine.script = lambda *_: [*good, broken, *said('{"name": "she')]
    session = world.open()
    reply = await how(client(session.endpoint), tools=[TOOL])
    back = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
    assert [item["type"] for item in back] == ["message", "function_call", "message"]
    assert reply.crrl["malformed"] == ['<tool_call>{"name": "she']
    result = {"type": "function_call_output", "call_id": reply.output[1].call_id, "output": "a"}
    await how(client(session.endpoint), [{"role": "user", "content": "Fix it."}, *back, result], tools=[TOOL])
    assert [turn.base for turn in session.turns] == [None, 0]
    check_exact_ids(session.turns, world.engine)


async def test_a_namespaced_tool_is_called_by_its_own_name(world: World, said: Said) -> None:
    world.engine.script = lambda *_: said("", ("files__read", {"path": "a"}))
    session = world.open()
    inner = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
    tools = [{"type": "namespace", "name": "files", "description": "Files.", "tools": [inner]}]
    reply = await ask(client(session.endpoint), tools=tools)
    call = reply.output[0]
    assert (call.namespace, call.name) == ("files", "read")
    back = [call.model_dump(exclude_none=True), {"type": "function_call_output", "call_id": call.call_id, "output": ""}]
    await ask(client(session.endpoint), [{"role": "user", "content": "Fix it."}, *back], tools=tools)
    assert [turn.base for turn in session.turns] == [None, 0]


async def test_a_request_may_name_the_response_that_it_follows(world: World, said: Said) -> None:
    """Its input and output are inherited, its instructions are not (as the vendor has it)."""
    world.says(said("", ("shell", {"cmd": "ls"})), said("one"), said("two"), said("three"))
    session = world.open()
    sdk = client(session.endpoint)
    first = await ask(sdk, tools=[TOOL])
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "a"}
    second = await ask(sdk, [result], tools=[TOOL], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    counted = await sdk.responses.input_tokens.count(
        model="policy", input="Go on.", instructions="Repair.", tools=[TOOL], previous_response_id=second.id
    )
    third = await gather(sdk, "Go on.", tools=[TOOL], previous_response_id=second.id)
    assert third.usage.input_tokens == counted.input_tokens
    await ask(sdk, "Go on.", tools=[TOOL], previous_response_id=second.id, instructions="Explain.")
    turns = await world.gateway.close(session)
    assert [turn.base for turn in turns] == [None, 0, 1, None]
    words = [message["content"] for message in turns[3].messages]
    assert words == ["Explain.", "Fix it.", "", "a", "one", "Go on.", "three"]
    check_exact_ids(turns, world.engine)
    with pytest.raises(openai.NotFoundError) as missing:
        await ask(client(world.open().endpoint), previous_response_id=first.id)  # another episode's
    assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_what_needs_another_memory_is_refused(world: World) -> None:
    session = world.open()
    sdk = client(session.endpoint)
    refused: list[dict[str, Any]] = [
        {"conversation": "conv_1"},
        {"background": True},
        {"items": [{"role": "judge", "content": "a"}]},
    ]
    for options in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(sdk, **options)
        assert caught.value.param
    assert world.engine.seen == []
