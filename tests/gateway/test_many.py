"""Many episodes at once, and long ones: every token in its place, and memory in proportion to the turns."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc

import aiohttp

from coderepairrl import tokens
from coderepairrl.gateway import Gateway, PolicySource, request_seed
from coderepairrl.types import Limits, Sampling, Turn, sequence

from .conftest import Fake, Said, World
from .speech import SPEAKERS
from .test_identity import Client, babble

EPISODES = 128
CALLS = 5
DIALECTS = tuple(SPEAKERS)


async def test_128_episodes_at_once_keep_their_tokens_apart(codec: tokens.Codec) -> None:
    """In all dialects, with forks, truncations and streams, their calls interleaved chunk by chunk."""
    engine = Fake(babble(Said(codec)))
    committed: list[tuple[str, Turn]] = []
    gateway = Gateway(
        PolicySource(codec, engine), sampling=Sampling(max_tokens=40), on_turn=lambda *turn: committed.append(turn)
    )
    await gateway.start()
    limits = Limits(calls=100, tokens=4000, seconds=600.0)
    sessions = [gateway.open(f"e{n}", limits=limits, seed=n) for n in range(EPISODES)]
    everyone = asyncio.Barrier(EPISODES)

    async def converse(http: aiohttp.ClientSession, number: int) -> None:
        dice = random.Random(number)
        client = Client(http, sessions[number].endpoint.base_url, dice, [DIALECTS[number % 3]])
        for _ in range(CALLS):
            await everyone.wait()
            await client.act(dice.choice(["go on", "tool results", "fork", "rewrite", "truncate"]))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(converse(http, number) for number in range(EPISODES)))
    seen = {seed: (prompt, tuple(emitted)) for prompt, emitted, seed in engine.seen}
    for number, session in enumerate(sessions):
        turns = await gateway.close(session)
        assert session.fault is None
        assert len(turns) == CALLS
        assert [turn for episode, turn in committed if episode == f"e{number}"] == list(turns)
        for turn in turns:
            prompt, emitted = seen.pop(request_seed(number, turn.index))
            assert sequence(turns, turn.index) == prompt + turn.output.ids
            assert (*turn.output.ids, *turn.tail.ids) == emitted
    assert seen == {}
    await gateway.stop()


async def test_memory_grows_with_the_turns_and_not_with_their_square(world: World) -> None:
    world.engine.context = 1 << 20
    session = world.open(calls=1000, tokens=1 << 20, seconds=600.0)
    world.engine.script = lambda *_: [
        *world.gateway.source.codec.encode("I look."),
        world.gateway.source.codec.stop_ids[0],
    ]

    async with aiohttp.ClientSession() as http:
        client = Client(http, session.endpoint.base_url, random.Random(0), ["chat"])
        client.known[-1][0]["content"] += "x" * 500

        async def grow(turns: int) -> int:
            """Bytes that `turns` more turns keep allocated, in the gateway and its client."""
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(turns):
                await client.ask([*client.known.pop(), {"role": "user", "content": f"{client.dice.random()}" * 30}])
                world.engine.seen.clear()
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        await grow(5)  # what is made once
        tracemalloc.start()
        try:
            first, second = await grow(30), await grow(30)
        finally:
            tracemalloc.stop()
    assert [turn.base for turn in session.turns] == [None, *range(64)]
    assert second < 2 * first, "three times as much, were it the square"
