"""Warm-up before an attempt's clock runs: the first request may take a minute."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from coderepairrl.errors import EngineFault
from coderepairrl.gateway import PolicySource, ReplySource
from coderepairrl.protocols import Engine
from coderepairrl.types import FirstRequest, Limits, Sampling

TOKENS = 8
REPLY = 256
"""Tokens of a short reply: an engine slower than an episode for it is too slow."""
SECONDS = 600.0


async def warm_up(source: ReplySource, request: FirstRequest, limits: Limits, concurrency: int) -> str:
    """Sample a few tokens after a real prompt, alone and then in a batch of `concurrency`.

    Returns a warning if replies are too slow for `limits`, or "". Raises `EngineFault` after `SECONDS`; a dying engine
    is left to the attempts. Skips remote models, whose tokens cost money.
    """
    if not isinstance(source, PolicySource):
        return ""
    reply = min(REPLY, limits.turn_tokens)
    try:
        async with asyncio.timeout(SECONDS) as clock:
            with contextlib.suppress(EngineFault, ValueError):  # ValueError: a prompt that no engine has room for
                ids = source.codec.render(request.messages, request.tools)
                alone = await _time_replies(source.engine, ids, 1, reply)
                if alone * concurrency <= limits.seconds:  # fast enough even one after the other
                    return ""
                together = await _time_replies(source.engine, ids, concurrency, reply)
                if together > limits.seconds:
                    return (
                        f"the engine is too slow: {reply} tokens take {together:.1f} s where {concurrency} attempts run"
                        f" at once, and an episode may take {limits.seconds:g} s; raise rollout.seconds or lower"
                        " rollout.concurrency"
                    )
    except TimeoutError as error:
        if not clock.expired():  # the engine's own, which the attempts will meet
            return ""
        raise EngineFault(
            f"the engine has not sampled {TOKENS} tokens in {SECONDS:g} seconds",
            fix="read logs/engine.log in the run folder, then continue with --resume",
        ) from error
    return ""


async def _time_replies(engine: Engine, ids: Sequence[int], count: int, reply: int) -> float:
    async def make_request(seed: int) -> float:
        began, first = time.monotonic(), 0.0
        async with contextlib.aclosing(engine.generate(ids, Sampling(max_tokens=TOKENS), seed)) as chunks:
            async for _ in chunks:
                first = first or time.monotonic()
        last = time.monotonic()
        return (first or last) - began + (last - (first or last)) * reply / TOKENS

    durations = await asyncio.gather(*(make_request(seed) for seed in range(count)), return_exceptions=True)
    for each in durations:
        if isinstance(each, BaseException):
            raise each
    return max(each for each in durations if isinstance(each, float))
