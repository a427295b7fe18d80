"""One episode of a real program: real gateway, sandbox and rollout, and an engine that says what it is told to.

A scripted engine never proves learning: what is shown is that the program works as it is, and that what is recorded
is what the engine saw and said.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import rewards, sandbox, tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import PrerequisiteError
from coderepairrl.gateway import Gateway
from coderepairrl.learn import batch
from coderepairrl.protocols import Agent
from coderepairrl.rollout import Rollout, Ticket
from coderepairrl.runs import Log
from coderepairrl.types import Ending, Episode, Limits, Sampling, Task, Turn, sequence

ISSUE = "add() in calc/add.py subtracts: add(2, 3) is -1. {braces} and $HOME stay as they are."
FILES = {
    "calc/__init__.py": "",
    "calc/add.py": "def add(a, b):\n    return a - b\n",
    "check_add.py": "from calc.add import add\n\nassert add(2, 3) == 5\n",
}
ORACLE = b"""\
diff --git a/calc/add.py b/calc/add.py
--- a/calc/add.py
+++ b/calc/add.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


@dataclass(frozen=True)
class Reply:
    """What the policy says to one request: text, and tool calls ``(name, arguments)``."""

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def call(tool: str, /, **arguments: Any) -> Reply:
    return Reply("", ((tool, arguments),))


Script = Sequence[Reply] | Callable[[str], Reply]
"""Replies in order, the last of which repeats, or a function from the whole prompt as text."""


@dataclass(frozen=True)
class Outcome:
    episode: Episode
    engine: ScriptedEngine
    codec: tokens.Codec
    log: list[str]

    @property
    def prompts(self) -> list[str]:
        """What the engine was asked, as text."""
        return [self.codec.decode(asked.ids) for asked in self.engine.requests]

    def told(self) -> str:
        """Everything, for a failing assertion."""
        return f"{self.episode.reason} {self.episode.fault}\n{''.join(self.log)}\n{self.prompts[-1:]}"


class Loud:
    """An agent whose log is kept: an episode does not have it."""

    def __init__(self, agent: Agent, log: list[str]) -> None:
        self.name, self.placement, self.agent, self.log = agent.name, agent.placement, agent, log

    async def run(self, *args: Any) -> Any:
        report = await self.agent.run(*args)
        self.log.append(report.log)
        return report


def sandbox_or_skip(agent: Agent) -> Any:
    """The machine's best sandbox, or why there is none (an error in CI)."""
    try:
        return sandbox.make(sandbox.default_name(), show=getattr(agent, "binds", ()))
    except PrerequisiteError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{error} (fix: {error.fix})")


async def play(
    agent: Agent,
    script: Script,
    *,
    folder: Path,
    model: Path,
    limits: Limits | None = None,
    context: int = 1 << 20,
    files: Mapping[str, str] = FILES,
) -> Outcome:
    """Let `agent` work on the repository of `files` while the policy follows `script`."""
    codec = tokens.load(model)
    asked = 0

    def reply(ids: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
        nonlocal asked
        asked += 1
        said = script(codec.decode(ids)) if callable(script) else script[min(asked, len(script)) - 1]
        return write(codec, said)

    engine = ScriptedEngine(reply, context=context, chunk=64)
    for name, text in files.items():
        (folder / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "repo" / name).write_text(text)
    log = Log(folder / "log.jsonl")
    gateway = Gateway(
        codec, engine, sampling=Sampling(max_tokens=4096), on_turn=lambda key, turn: log.append("turn", turn=turn)
    )
    await gateway.start(socket=folder / "gateway.sock")
    said: list[str] = []
    backend = sandbox_or_skip(agent)
    try:
        rollout = Rollout(
            gateway=gateway,
            agent=Loud(agent, said),
            sandbox=backend,
            rewards={"train": rewards.make({"patch_lines": 1.0})},
            log=log,
            limits=limits or Limits(calls=30, tokens=context, seconds=240.0, turn_tokens=4096),
            concurrency=1,
        )
        task = Task("toy/add", ISSUE, "python", f"dir:{folder / 'repo'}", ORACLE)
        episode = await rollout.run(Ticket(task, "train", 1, "toy/add-1", 0, 7, Sampling()))
    finally:
        await gateway.stop()
        log.close()
        backend.close()
    return Outcome(episode, engine, codec, said)


def write(codec: tokens.Codec, reply: Reply) -> list[int]:
    """`reply` as the ids with which a Qwen3 policy would say it."""
    added = codec.tokenizer.added
    ids = codec.encode(reply.text)
    for name, arguments in reply.calls:
        body = json.dumps({"name": name, "arguments": arguments})
        ids += codec.encode("\n" if ids else "")
        ids += [added["<tool_call>"], *codec.encode(f"\n{body}\n"), added["</tool_call>"]]
    return [*ids, added["<|im_end|>"]]


def check_repair(outcome: Outcome, *, turns: int = 3, ending: Ending = Ending.DONE) -> tuple[Turn, ...]:
    """The repair is in the diff, and nothing else; every token is the engine's, and each is accounted for once."""
    episode = outcome.episode
    assert episode.ending is ending, outcome.told()
    assert episode.patch.startswith(b"diff --git a/calc/add.py b/calc/add.py\n"), outcome.told()
    assert episode.patch.count(b"diff --git") == 1, episode.patch.decode()
    assert episode.reward == 1.0, episode.patch.decode()
    assert len(episode.turns) >= turns, outcome.told()
    seen = [asked.ids for asked in outcome.engine.requests]
    for turn in episode.turns:
        whole = sequence(episode.turns, turn.index)
        assert whole[: len(whole) - len(turn.output)] in seen
    made = batch([episode], "mean", max_tokens=1 << 20)
    assert made.account.balanced
    assert ISSUE in outcome.prompts[0] or any(ISSUE in prompt for prompt in outcome.prompts), outcome.prompts[0]
    return episode.turns
