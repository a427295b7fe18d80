"""A gateway over real HTTP in front of a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import tokens
from coderepairrl.errors import EngineFault
from coderepairrl.gateway import Gateway, PolicySource, Session
from coderepairrl.protocols import Engine
from coderepairrl.types import Chunk, Limits, Sampling, Turn, sequence

from . import clients

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run <|im_end|> a command.",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    },
}
Script = Callable[[Sequence[int], Sampling, int], Sequence[int]]


@dataclass
class Fake(Engine):
    """Engine that emits the ids of `script`, and remembers every prompt and its reply."""

    script: Script
    context: int = 4096
    chunk: int = 3
    delay: float = 0.0
    fault_after: int | None = None
    version: int = 0
    seen: list[tuple[tuple[int, ...], list[int], int]] = field(default_factory=list)
    closed: int = 0
    gate: asyncio.Event | None = None

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        emitted: list[int] = []
        self.seen.append((tuple(ids), emitted, seed))
        reply = list(self.script(ids, sampling, seed))[: sampling.max_tokens]
        try:
            for start in range(0, len(reply), self.chunk):
                await asyncio.sleep(self.delay)
                if self.gate is not None and start > 0:
                    await self.gate.wait()
                if self.fault_after is not None and start >= self.fault_after:
                    raise EngineFault("the fake engine died")
                piece = tuple(reply[start : start + self.chunk])
                emitted += piece
                yield Chunk(piece, tuple(-0.01 * (token % 7) for token in piece), self.version)
        finally:
            self.closed += 1

    async def load(self, path: Path, version: int, checksum: str) -> int:
        raise NotImplementedError

    async def health(self) -> Mapping[str, float]:
        return {"version": self.version}

    async def close(self) -> None: ...


def check_exact_ids(turns: Sequence[Turn], engine: Fake) -> None:
    """Assert that every path of the tree equals the engine's context, and no sampled token is missing."""
    seen = [(list(prompt), emitted) for prompt, emitted, _ in engine.seen]
    for turn in turns:
        whole = list(sequence(turns, turn.index))
        sampled = [*turn.output.ids, *turn.tail.ids]
        prompt = whole[: len(whole) - len(turn.output)]
        assert (prompt, sampled) in seen
        seen.remove((prompt, sampled))
        assert list(turn.output.logprobs + turn.tail.logprobs) == [-0.01 * (token % 7) for token in sampled]
        assert [(r.start, r.end) for r in turn.versions] == ([(0, len(sampled))] if sampled else [])
    assert [emitted for _, emitted in seen if emitted] == []


async def wait_until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def codec(miniature: Path) -> tokens.Codec:
    return tokens.load_codec(miniature)


class Said:
    """Encodes replies as ids."""

    def __init__(self, codec: tokens.Codec) -> None:
        self.codec = codec
        self.end = codec.tokenizer.added["<|im_end|>"]

    def __call__(self, text: str = "", *calls: tuple[str, Any], end: bool = True) -> list[int]:
        added = self.codec.tokenizer.added
        ids = self.codec.encode(text)
        for name, arguments in calls:
            body = json.dumps({"name": name, "arguments": arguments})
            ids += self.codec.encode("\n" if ids else "")
            ids += [added["<tool_call>"], *self.codec.encode(f"\n{body}\n"), added["</tool_call>"]]
        return [*ids, self.end] if end else ids

    def thought(self, text: str = "hm") -> list[int]:
        """Encode a thought before a reply."""
        added = self.codec.tokenizer.added
        return [added["<think>"], *self.codec.encode(text), added["</think>"], *self.codec.encode("\n\n")]


@pytest.fixture
def said(codec: tokens.Codec) -> Said:
    return Said(codec)


@dataclass
class World:
    """A running gateway, its engine, and the committed turns in order."""

    gateway: Gateway
    engine: Fake
    committed: list[tuple[str, Turn]]

    def says(self, *replies: Sequence[int]) -> None:
        """Script the engine's `replies`; the last one repeats."""
        self.engine.script = lambda *_: replies[min(len(self.engine.seen), len(replies)) - 1]

    def holds(self, reply: Sequence[int]) -> None:
        """Script a reply that begins at once, and goes on when ``engine.gate`` is set."""
        self.engine.gate = asyncio.Event()
        self.says(reply)

    def open(self, episode: str = "episode", seed: int = 7, **limits: Any) -> Session:
        return self.gateway.open(episode, limits=Limits(**({"tokens": 4000, "seconds": 30.0} | limits)), seed=seed)


@pytest.fixture
async def world(codec: tokens.Codec, said: Said) -> AsyncIterator[World]:
    committed: list[tuple[str, Turn]] = []
    engine = Fake(lambda ids, sampling, seed: said("ok"))
    gateway = Gateway(
        PolicySource(codec, engine),
        sampling=Sampling(max_tokens=512),
        on_turn=lambda episode, turn: committed.append((episode, turn)),
    )
    await gateway.start()
    yield World(gateway, engine, committed)
    await clients.close_all()
    await gateway.stop()
