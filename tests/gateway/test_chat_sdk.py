"""The official OpenAI SDK, pointed at the gateway, sees what it expects of OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from coderepairrl.types import Endpoint, Finish, sequence

from .clients import openai_client as client
from .conftest import SHELL, Said, World, identical

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
async def test_words(world: World, said: Said, streaming: bool) -> None:
    world.engine.script = lambda *_: said(" Hello, wörld 🛠️ \n")
    session = world.open()
    reply = await (gather if streaming else ask)(client(session.endpoint))
    (choice,) = reply.choices
    assert choice.message.content == "Hello, wörld 🛠️"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    (turn,) = await world.gateway.close(session)
    assert reply.usage.prompt_tokens == len(turn.given)
    assert reply.usage.completion_tokens == len(turn.output) == len(said(" Hello, wörld 🛠️ \n"))
    assert reply.usage.total_tokens == len(sequence((turn,), 0))
    assert reply.crrl["context_tokens"] == len(sequence((turn,), 0)) if not streaming else True
    identical((turn,), world.engine)


@pytest.mark.parametrize("streaming", [False, True])
async def test_parallel_tool_calls_and_their_results(world: World, said: Said, streaming: bool) -> None:
    replies = [
        said("I look.", ("shell", {"cmd": "ls"}), ("shell", {"cmd": 'echo "é"'})),
        said("", ("shell", {"cmd": "true"})),
        said("done"),
    ]
    world.engine.script = lambda *_: replies[len(world.engine.seen) - 1]
    session = world.open()
    sdk, messages = client(session.endpoint), list(ASK)
    for wanted in (2, 1, 0):
        reply = await (gather if streaming else ask)(sdk, messages, tools=[SHELL])
        message = reply.choices[0].message
        assert len(message.tool_calls or ()) == wanted
        assert reply.choices[0].finish_reason == ("tool_calls" if wanted else "stop")
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for number, call in enumerate(message.tool_calls or ()):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"<|im_end|> {number}\n"})
    turns = await world.gateway.close(session)
    assert [turn.base for turn in turns] == [None, 0, 1]
    assert [len(turn.messages) for turn in turns] == [3, 3, 2]
    assert turns[0].messages[-1]["tool_calls"][1]["function"]["arguments"] == '{"cmd": "echo \\"é\\""}'
    identical(turns, world.engine)


async def test_thoughts(world: World, said: Said) -> None:
    """The SDK itself knows no field for them, and hands on what it does not know."""
    added = said.codec.tokenizer.added
    thoughts = [added["<think>"], *said("hm", end=False), added["</think>"]]
    world.engine.script = lambda *_: [*thoughts, *said("\n\nyes")]
    session = world.open()
    sdk = client(session.endpoint)
    reply = await ask(sdk)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm")
    assert reply.usage.completion_tokens_details.reasoning_tokens == len(thoughts) - 1
    deltas = [chunk.choices[0].delta async for chunk in await ask(sdk, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    said_back = message.model_dump(exclude_none=True)
    assert "reasoning_content" in said_back
    await ask(sdk, [*ASK, said_back, {"role": "user", "content": "go on"}])
    assert [turn.base for turn in session.turns] == [None, None, 1]  # of two that say the same, the later one
    identical(session.turns, world.engine)


async def test_tokens_stream_as_they_are_sampled(world: World, said: Said) -> None:
    world.engine.script = lambda *_: said("one two three")
    world.engine.gate = asyncio.Event()
    stream = await ask(client(world.open().endpoint), stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text:
            break
    assert text == "one"  # the engine waits, and the client has read its first chunk
    world.engine.gate.set()
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
    assert text == "one two three"


async def test_the_turn_is_committed_before_the_client_has_its_reply(world: World) -> None:
    committed = False

    async def slowly(episode: str, turn: object) -> None:
        nonlocal committed
        await asyncio.sleep(0.05)
        committed = True

    session = world.open()
    session._on_turn = slowly
    await ask(client(session.endpoint))
    assert committed


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stop_string_ends_the_message_and_its_tail_is_dropped(
    world: World, said: Said, streaming: bool
) -> None:
    world.engine.script = lambda *_: said("Thought: look\nObservation: none")
    world.engine.chunk = 8
    session = world.open()
    sdk = client(session.endpoint)
    reply = await (gather if streaming else ask)(sdk, stop=["\nObservation:"])
    assert reply.choices[0].message.content == "Thought: look"
    assert reply.choices[0].finish_reason == "stop"
    await ask(sdk, [*ASK, {"role": "assistant", "content": "Thought: look"}, {"role": "user", "content": "seen"}])
    turns = await world.gateway.close(session)
    decode = world.gateway.source.codec.decode
    assert decode(turns[0].output.ids).endswith("\nObservation:")
    assert len(turns[0].tail) > 0
    assert "Observation: none" not in decode(sequence(turns, 0))
    assert turns[1].base == 0
    identical(turns, world.engine)


@pytest.mark.parametrize("streaming", [False, True])
async def test_the_clients_max_tokens_count_and_its_temperature_does_not(
    world: World, said: Said, streaming: bool
) -> None:
    world.engine.script = lambda *_: said("a long story")
    session = world.open()
    options: dict[str, Any] = {"temperature": 0.1, "top_p": 1.0, "seed": 3, "tools": [SHELL], "tool_choice": "auto"}
    reply = await ask(client(session.endpoint), max_tokens=5, stream=streaming, **options)
    if streaming:  # the SDK's helper raises on length
        choices = [chunk.choices[0] async for chunk in reply]
        assert "".join(choice.delta.content or "" for choice in choices) == "a lon"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    else:
        assert reply.choices[0].finish_reason == "length"
        assert reply.choices[0].message.content == "a lon"
    (turn,) = await world.gateway.close(session)
    assert turn.finish is Finish.LENGTH
    assert turn.sampling.temperature == 1.0
    assert turn.overridden == ("seed=3", "temperature=0.1")
    assert session.limit == ""


async def test_a_wrong_key_and_the_list_of_models(world: World) -> None:
    session = world.open()
    sdk = client(session.endpoint)
    assert [model.id async for model in sdk.models.list()] == ["policy"]
    assert (await sdk.models.retrieve("policy")).id == "policy"
    for url, key in ((world.gateway.url + "/v1", "guess"), (world.gateway.url + "/s/guess/v1", session.key)):
        with pytest.raises(openai.AuthenticationError):
            await ask(client(Endpoint(url, key, "policy")))
    # the key works as API key, too
    assert await ask(client(Endpoint(world.gateway.url + "/v1", session.key, "policy")))
    assert len(session.turns) == 1


async def test_an_engine_that_dies_mid_stream_is_an_error_event_and_a_fault(world: World, said: Said) -> None:
    world.engine.script = lambda *_: said("a long story")
    world.engine.fault_after = 6
    session, other = world.open(), world.open("other")
    text = ""
    with pytest.raises(openai.APIError, match="the fake engine died"):
        async for chunk in await ask(client(session.endpoint), stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "a long"
    (turn,) = await world.gateway.close(session)
    assert (turn.masked, len(turn.output)) == ("fault", 6)
    assert session.fault is not None
    world.engine.fault_after = None
    assert await ask(client(other.endpoint))
    assert other.fault is None
