"""The official OpenAI SDK, pointed at the gateway, sees what it expects of OpenAI."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI

from .clients import openai_client as client
from .conftest import SHELL, Said, World, check_exact_ids

ASK: list[Any] = [{"role": "system", "content": "Repair."}, {"role": "user", "content": "Fix it, please."}]


async def ask(sdk: AsyncOpenAI, messages: list[Any] = ASK, **options: Any) -> Any:
    return await sdk.chat.completions.create(model="policy", messages=messages, **options)


async def gather(sdk: AsyncOpenAI, messages: list[Any] = ASK, **options: Any) -> Any:
    """A streamed completion, put together by the SDK itself."""
    async with sdk.chat.completions.stream(
        model="policy", messages=messages, stream_options={"include_usage": True}, **options
    ) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_completion()


@pytest.mark.parametrize("streaming", [False, True])
async def test_parallel_tool_calls_and_their_results(world: World, said: Said, streaming: bool) -> None:
    world.says(
        [*said.thought(), *said("I look.", ("shell", {"cmd": "ls"}), ("shell", {"cmd": 'echo "é"'}))],
        said("", ("shell", {"cmd": "true"})),
        said("done"),
    )
    session = world.open()
    sdk, messages = client(session.endpoint), list(ASK)
    for wanted in (2, 1, 0):
        reply = await (gather if streaming else ask)(sdk, messages, tools=[SHELL])
        message = reply.choices[0].message
        assert len(message.tool_calls or ()) == wanted
        if wanted == 2:
            assert message.content == "I look."
            assert message.reasoning_content == "hm"  # the SDK knows no field for it, and hands it on
            assert reply.usage.completion_tokens_details.reasoning_tokens == 3
        assert reply.choices[0].finish_reason == ("tool_calls" if wanted else "stop")
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for number, call in enumerate(message.tool_calls or ()):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"<|im_end|> {number}\n"})
    turns = await world.gateway.close(session)
    assert [turn.base for turn in turns] == [None, 0, 1]
    assert [len(turn.messages) for turn in turns] == [3, 3, 2]
    assert turns[0].messages[-1]["tool_calls"][1]["function"]["arguments"] == '{"cmd": "echo \\"é\\""}'
    check_exact_ids(turns, world.engine)
