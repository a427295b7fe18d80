"""Rewards that a random policy learns in a few steps, and agents with set behaviour."""

from __future__ import annotations

import asyncio
import os
from zlib import crc32

from coderepairrl.agents.chat import Chat
from coderepairrl.errors import AgentFault
from coderepairrl.grading import apply_patch
from coderepairrl.protocols import Agent, Reward, Sandbox, SandboxBackend
from coderepairrl.rewards import LARGEST
from coderepairrl.types import AgentReport, Endpoint, Episode, Score, Task


class LowBytes(Reward):
    """Fraction of the sampled tokens with an id below 128."""

    name = "low_bytes"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        ids = [token for turn in episode.turns for token in turn.output.ids]
        return Score(self.name, sum(token < 128 for token in ids) / max(len(ids), 1))


class LoudLowBytes(LowBytes):
    """`LowBytes` on the largest scale that a reward may have."""

    name = "loud_low_bytes"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        return Score(self.name, LARGEST * (await super().__call__(task, episode, sandbox)).value)


class Repairer(Agent):
    """An agent that writes one of several expressions, chosen by the reply, after a delay.

    The environment variable ORDER decides which attempts end first.
    """

    name = "repairer"
    placement = "host"
    writes = ("a + b", "sum([a, b])", "b + a", "a * b")

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        assert not task.verified
        async with Chat(endpoint, {}) as chat:
            reply = await chat.complete([{"role": "user", "content": task.prompt}], (), 12, 30.0)
        said = repr(reply.message).encode()
        await asyncio.sleep(crc32(os.environ["ORDER"].encode() + said) % 100 / 250)
        expression = self.writes[crc32(said) % len(self.writes)]
        await sandbox.write("calc.py", f"def add(a, b):\n    return {expression}\n".encode())
        return AgentReport("submitted")


class Broken(Agent):
    """An agent that always fails."""

    name = "broken"
    placement = "host"

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        raise AgentFault("nothing works today")


class Gold(Agent):
    """Repairs tasks whose id has an ``r`` in its last part, makes a useless edit in those with an ``s``, else none."""

    name = "gold"
    placement = "host"

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        last = task.id.rpartition("/")[2]
        if "r" in last:
            assert not await apply_patch(sandbox, task.reference)
        elif "s" in last:
            await sandbox.write("notes.txt", b"I was here.\n")
        return AgentReport("submitted")


def by_lot(task: Task, episode: Episode) -> float:
    """Reward 1 for one attempt in four at random, so that all rewards of some groups are equal."""
    return float(crc32(f"{episode.group}/{episode.attempt}".encode()) % 4 == 0)
