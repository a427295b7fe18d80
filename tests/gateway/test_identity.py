"""Ids along a path are ids that the engine had in context, for any behaviour of clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl import engines, tokens
from coderepairrl.gateway import request_seed
from coderepairrl.learn.stitch import stitch_episode
from coderepairrl.types import Ending, Episode, Finish, Limits, Sampling, Turn, sequence
from gateways import open_session

from .conftest import Fake, Said, check_exact_ids
from .speech import SPEAKERS, read_reply

LIMITS = Limits(calls=100, tokens=4000, seconds=60.0)
ACTIONS = (
    *("go on", "tool results", "fork", "rewrite", "prune", "forget", "retry", "resample"),
    *("truncate", "leave", "parallel", "stop"),
)


def babble(said: Said) -> Any:
    """Replies of all kinds, by the seed of the request: words, calls, broken calls, thoughts, noise, no end."""
    added = said.codec.tokenizer.added
    structure = [*added.values()]

    def script(ids: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
        dice = random.Random(seed)
        kind = dice.randrange(6)
        if kind == 0:
            return said(f" words {dice.random()}\n")
        if kind == 1:
            return said("I look", *[("shell", {"cmd": f"ls {n} é"}) for n in range(dice.randint(1, 3))])
        if kind == 2:
            return [*said("so", end=False), added["<tool_call>"], *said('{"name": "sh')]
        if kind == 3:
            return [*said.thought(), *said("A STOP B")]
        noise = [dice.choice([*range(256), *structure * 8]) for _ in range(dice.randint(0, 40))]
        noise = [token for token in noise if token not in sampling.stop_ids]
        return [*noise, said.end] if kind == 4 else [*noise, *[65] * sampling.max_tokens]

    return script


class Client:
    """A client that does as it likes with the conversations it has had, in any of `dialects` at each call."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, dice: random.Random, dialects: Sequence[str] = tuple(SPEAKERS)
    ) -> None:
        self.http, self.url, self.dice, self.dialects = http, url, dice, dialects
        self.known: list[list[dict[str, Any]]] = [[{"role": "user", "content": f"<|im_end|>{dice.random()}"}]]
        self.last: tuple[str, bytes] | None = None

    async def send(self, dialect: str, body: bytes, retry: int = 0) -> dict[str, Any] | None:
        headers = {"x-stainless-retry-count": str(retry)}
        speaker = SPEAKERS[dialect]
        async with self.http.post(f"{self.url}{speaker.path}", data=body, headers=headers) as response:
            reply = await response.read()
            assert response.status in (200, 400), reply  # 400: the conversation outgrew its limit
            if response.status == 400:
                assert speaker.code(json.loads(reply)) == "context_length_exceeded"
                return None
            return read_reply(dialect, reply)

    async def ask(self, messages: list[dict[str, Any]], **fields: Any) -> None:
        fields |= {"stream": True} if self.dice.random() < 0.5 else {}
        dialect = self.dice.choice(self.dialects)
        self.last = dialect, json.dumps(SPEAKERS[dialect].body(messages, **fields)).encode()
        if reply := await self.send(*self.last):
            self.known.append([*messages, reply])

    async def act(self, action: str) -> None:
        conversation = self.known[-1] if action != "fork" else self.dice.choice(self.known)
        new_messages = [{"role": "user", "content": f"more {self.dice.random()}"}]
        if action == "tool results" and (calls := conversation[-1].get("tool_calls")):
            new_messages = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"{n}\n"} for n, call in enumerate(calls)
            ]
        messages = [*conversation, *new_messages]
        if action == "rewrite":
            at = self.dice.randrange(len(messages))
            messages[at] = messages[at] | {"content": f"rewritten {self.dice.random()}"}
        if action == "prune":  # what tools said, and users, is shortened, as far as it goes without them
            messages = [
                message
                if message["role"] == "assistant" or self.dice.random() < 0.5
                else message | {"content": "[...]"}
                for message in messages
            ]
        if action == "forget" and len(conversation) > 2 and conversation[-1]["role"] == "assistant":
            messages = [*conversation[:-1], *new_messages]  # as if the last reply had never been
        if action == "retry" and self.last:
            await self.send(*self.last, retry=1)
        elif action == "resample" and self.last:
            await self.send(*self.last)
        elif action == "truncate":
            await self.ask(messages, max_tokens=self.dice.randint(1, 8))
        elif action == "stop":
            await self.ask(messages, stop=["STOP", "ls 1"])
        elif action == "leave":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.004):
                    await self.ask(messages)
        elif action == "parallel":
            await asyncio.gather(*(self.ask(messages) for _ in range(3)))
        else:
            await self.ask(messages)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=10),
)
def test_random_conversations_keep_the_ids_that_the_engine_saw(
    codec: tokens.Codec, seed: int, actions: list[str]
) -> None:
    said = Said(codec)
    engine = Fake(babble(said), chunk=1 + seed % 5, delay=0.0005)

    async def play() -> tuple[Turn, ...]:
        committed: list[Turn] = []
        terms: Any = {"max_tokens": 60, "seed": seed, "on_turn": lambda _, turn: committed.append(turn)}
        async with open_session(codec, engine, LIMITS, **terms) as session, aiohttp.ClientSession() as http:
            client = Client(http, session.endpoint.base_url, random.Random(seed))
            for action in actions:
                await client.act(action)
        assert session.fault is None
        assert tuple(committed) == session.turns
        return session.turns

    turns = asyncio.run(play())
    assert [turn.index for turn in turns] == list(range(len(turns)))
    check_exact_ids(turns, engine)
    for turn in turns:
        assert turn.masked == ("aborted" if turn.finish is Finish.ABORT else "")
    trains_what_was_served(turns, engine)
    # memory: a turn holds what it added
    assert sum(len(turn.messages) for turn in turns) <= 4 * len(turns) + sum(
        len(turn.messages) for turn in turns if turn.base is None
    )


def trains_what_was_served(turns: Sequence[Turn], engine: Fake) -> None:
    """Each row ends where a call of the engine's did, each sampled token trains once, and expansion is no guess."""
    episode = Episode("e", "t", "train", 0, "g", 0, Ending.DONE, turns=tuple(turns))
    rows, account = stitch_episode(episode, 1.0, max_tokens=1 << 20)
    served = {(*prompt, *emitted) for prompt, emitted, _ in engine.seen}
    cut = {sequence(turns, turn.index) for turn in turns if turn.tail}
    assert {row.ids for row in rows} <= served | cut
    untrained = sum(len(turn.output) for turn in turns if turn.masked) + sum(len(turn.tail) for turn in turns)
    assert account.is_balanced
    assert account.trained == account.sampled - untrained
    said = Counter(turn.output.ids for turn in turns if turn.output and not turn.masked)
    for row in rows:
        assert all(row.logprobs[at] == -0.01 * (row.ids[at] % 7) for at, on in enumerate(row.trained) if on)
        for trained, run in groupby(zip(row.ids, row.trained, strict=True), lambda pair: pair[1]):
            if trained:
                # a reply is closed by tokens that are given, or follows some
                said[tuple(token for token, _ in run)] -= 1
    assert not any(said.values())
    distinct = {row.ids[:length] for row in rows for length in range(1, len(row.ids) + 1)}
    assert account.expansion == (account.row_tokens / len(distinct) if rows else 1.0) >= 1.0


@pytest.mark.parametrize("dialects", [["chat"], ["responses"], ["messages"], list(SPEAKERS)])
async def test_appending_to_a_conversation_makes_one_path(codec: tokens.Codec, dialects: list[str]) -> None:
    """A client that only appends is never rendered twice, for any reply of the policy and any dialect."""
    said = Said(codec)
    engine = Fake(babble(said))
    async with (
        open_session(codec, engine, LIMITS, max_tokens=60, seed=3) as session,
        aiohttp.ClientSession() as http,
    ):
        client = Client(http, session.endpoint.base_url, random.Random(0), dialects)
        for _ in range(20):
            await client.act("tool results")
    turns = session.turns
    assert len(turns) == 20
    assert [turn.base for turn in turns] == [None, *range(19)]
    assert any(turn.finish is Finish.LENGTH for turn in turns)
    check_exact_ids(turns, engine)


async def test_the_tiny_engines_tokens_are_recorded_as_it_sampled_them(
    miniature: Path, codec: tokens.Codec, tmp_path: Path
) -> None:
    """A real model behind real HTTP: the same prompt and seed sampled again give the recorded ids and logprobs."""
    engine = await engines.make_engine("tiny").start(miniature, log_dir=tmp_path)
    try:
        async with (
            open_session(codec, engine, Limits(tokens=2000), max_tokens=40, seed=5) as session,
            aiohttp.ClientSession() as http,
        ):
            client = Client(http, session.endpoint.base_url, random.Random(1))
            for action in ("go on", "tool results", "parallel", "fork", "stop", "go on", "prune", "forget", "rewrite"):
                await client.act(action)
        turns = session.turns
        assert len(turns) == 11
        turn = turns[1]
        prompt = sequence(turns, 1)[: -len(turn.output)]
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in engine.generate(prompt, turn.sampling, request_seed(5, 1)):
            ids += chunk.ids
            logprobs += chunk.logprobs
        assert tuple(ids) == turn.output.ids
        assert logprobs == pytest.approx(turn.output.logprobs, abs=1e-5)
        learner_agrees(miniature, turns)
    finally:
        await engine.close()


def learner_agrees(model: Path, turns: tuple[Turn, ...]) -> None:
    """Assert that the learner computes the engine's logprobs, also on rows that fork inside turns."""
    from coderepairrl.learn import LearnSettings
    from coderepairrl.learn.trainer import Trainer

    assert sum(turn.fork is not None for turn in turns) >= 3
    rows, account = stitch_episode(
        Episode("e", "t", "train", 0, "g", 0, Ending.DONE, turns=turns), 1.0, max_tokens=4000
    )
    assert len(rows) > 4 and account.delivered > 0.9
    found = Trainer(model, LearnSettings()).logprobs([row.ids for row in rows], 1.0)
    for row, scored in zip(rows, found, strict=True):
        pairs = zip(row.trained[1:], row.logprobs[1:], scored, strict=True)
        assert max(abs(old - new) for on, old, new in pairs if on) < 1e-5
