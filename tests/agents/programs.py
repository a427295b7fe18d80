"""One episode of a real program: real gateway, sandbox and rollout, and an engine with scripted replies.

A scripted engine proves no learning, only that the unmodified program works, and that the recorded tokens are exactly
the engine's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import rewards, sandbox, tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.learn.stitch import stitch_episode
from coderepairrl.protocols import Agent, SandboxBackend
from coderepairrl.rollout.episodes import AttemptSettings, PlannedAttempt, Rollout
from coderepairrl.rollout.local import LocalExecutor
from coderepairrl.runs import Log
from coderepairrl.types import Chunk, Ending, Episode, Limits, Sampling, Task, Turn, sequence
from miniatures import save_policy
from needs import skip_without_prerequisites

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


RECOMMENDED = Limits(calls=30, tokens=32_768, seconds=300.0, turn_tokens=4096)
"""The limits of docs/guides/agents.md; some programs work differently without limits."""


@dataclass(frozen=True)
class Reply:
    """Reply of the policy to one request: text, and tool calls ``(name, arguments)``."""

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def call(tool: str, /, **arguments: Any) -> Reply:
    return Reply("", ((tool, arguments),))


def edit(path: str, old: str, new: str) -> Reply:
    """An edit as aider reads it."""
    return Reply(f"{path}\n```python\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```\n")


def python(line: str) -> Reply:
    """A reply as smolagents reads it."""
    return Reply(f"Running it.\n<code>\n{line}\n</code>")


PROGRAM = """\
import json, subprocess, sys, urllib.request
base, key, model, prompt = sys.argv[1:5]
PLANTED
tool = {"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}}}
messages = [{"role": "user", "content": prompt}]
while True:
    body = json.dumps({"model": model, "messages": messages, "tools": [tool]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(base + "/chat/completions", body, headers)
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        cmd = json.loads(call["function"]["arguments"])["cmd"]
        print("running " + cmd, flush=True)  # a TypeError for {"cmd": ["ls"]}
        done = subprocess.run(cmd, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if not message.get("tool_calls"):
        sys.exit("said: " + message["content"] if message["content"] == "I give up." else 0)
"""


def stand_in(planted: str = "") -> dict[str, Any]:
    """Options of `command` for a one-page program with the lines `planted` in it."""
    argv = ["python3", "{home}/agent.py", "{base_url}", "{api_key}", "{model}", "{prompt}"]
    return {"argv": argv, "files": {"agent.py": PROGRAM.replace("PLANTED", planted)}}


FIX = "sed -i 's/a - b/a + b/' calc/add.py"
CODEX_PATCH = """\
apply_patch <<'EOF'
*** Begin Patch
*** Update File: calc/add.py
@@ def add(a, b):
-    return a - b
+    return a + b
*** End Patch
EOF
"""
ADD = "/workspace/calc/add.py"
CD = "cd /workspace && "
DONE = Reply("Repaired.")


def repair(
    tool: str, name: str, *edits: Reply, last: Reply = DONE, cd: str = "", described: bool = False, **more: Any
) -> list[Reply]:
    """A look, `edits`, a check and the `last` reply; the argument `name` of `tool` is a command, or a list of some."""

    def run(command: str, why: str) -> Reply:
        about = {"description": why} if described else {}
        return call(tool, **{name: [command] if name == "commands" else command}, **about, **more)

    look, check = run(f"{cd}cat calc/add.py", "look"), run(f"{cd}python3 check_add.py && echo passes", "check")
    return [look, *(edits or [run(FIX, "edit")]), check, last]


SCRIPTS: Mapping[str, Sequence[Reply]] = {
    "mini-swe-agent": repair(
        "bash", "command", last=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    ),
    "aider": [
        Reply("I need to see check_add.py first. Please add it to the chat."),
        edit("calc/add.py", "    return a * b", "    return a + b"),
        edit("calc/add.py", "    return a - b", "    return a + b"),
    ],
    "nano-agent": repair("shell", "cmd", call("apply_patch", file="calc/add.py", search="a - b", replace="a + b")),
    "codex": repair("exec_command", "cmd", call("exec_command", cmd=CODEX_PATCH), cd=CD),
    "claude-code": repair(
        "Bash",
        "command",
        call("Read", file_path=ADD),
        call("Edit", file_path=ADD, old_string="a - b", new_string="a + b"),
        cd=CD,
        described=True,
    ),
    "copilot": repair(
        "bash",
        "command",
        call("view", path=ADD),
        call("edit", path=ADD, old_str="a - b", new_str="a + b"),
        cd=CD,
        described=True,
    ),
    "qwen-code": repair(
        "run_shell_command",
        "command",
        call("read_file", file_path=ADD),
        call("edit", file_path=ADD, old_string="a - b", new_string="a + b"),
        is_background=False,
    ),
    "opencode": repair(
        "bash",
        "command",
        call("read", filePath=ADD),
        call("edit", filePath=ADD, oldString="a - b", newString="a + b"),
        described=True,
    ),
    "pi": repair("bash", "command", call("edit", path="calc/add.py", edits=[{"oldText": "a - b", "newText": "a + b"}])),
    "continue": repair(
        "Bash",
        "command",
        call("Read", filepath=ADD),
        call("Edit", file_path=ADD, old_string="a - b", new_string="a + b"),
    ),
    "cline": repair("run_commands", "commands", call("editor", path=ADD, old_text="a - b", new_text="a + b")),
    "gptme": repair("shell", "command", call("shell", command=FIX), last=call("complete"), cd=CD),
    "smolagents": [
        python('print(shell("cat calc/add.py"))'),
        python(f"print(shell({FIX!r}))"),
        python('print(shell("python3 check_add.py && echo passes"))'),
        python('final_answer("Repaired.")'),
    ],
    **{name: repair("shell", "command") for name in ("pydantic-ai", "openai-agents", "langgraph", "llm")},
}
"""A repair by each program's own tools."""


@dataclass(frozen=True)
class Outcome:
    episode: Episode
    engine: ScriptedEngine
    codec: tokens.Codec
    side: tuple[int, ...] = ()
    """Numbers of requests beside the repair, such as for a title."""

    @property
    def prompts(self) -> list[str]:
        """Prompts of the engine, as text."""
        return [self.codec.decode(request.ids) for request in self.engine.requests]

    def describe(self) -> str:
        """Everything, for a failing assertion."""
        episode = self.episode
        return f"{episode.reason} {episode.fault}{episode.crash}\n{episode.printed}\n{self.prompts[-1:]}"


def build_policy(folder: Path) -> Path:
    """A random 2-layer Qwen3 for 64k tokens, with the tokens of `learn_vocabulary`."""
    return save_policy(folder, learn_vocabulary(), context=1 << 16)


def learn_vocabulary() -> Any:
    """A tokenizer of 8k tokens learnt from Python's standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    trainer = trainers.BpeTrainer(vocab_size=8192 - 16, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sources], trainer)
    return tokenizer


class Forced(ScriptedEngine):
    """A scripted engine with the logprobs that its model gives to the scripted tokens, so that they can be trained."""

    def __init__(self, script: Any, model: Path, *, context: int) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(script, context=context, chunk=1 << 16)
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.row: list[int] = []
        self.cache: Any = None
        """Keys and values of all tokens of `row` except the last."""

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        async for chunk in super().generate(ids, sampling, seed):  # one chunk has it all
            logprobs = await asyncio.to_thread(self.score, ids, chunk.ids)
            yield Chunk(chunk.ids, logprobs, chunk.version)

    def score(self, prompt: Sequence[int], said: Sequence[int]) -> tuple[float, ...]:
        import torch
        from transformers import DynamicCache

        row = [*prompt, *said]
        if not self.row or row[: len(self.row)] != self.row:
            self.row, self.cache = row[:1], DynamicCache(config=self.model.config)
        with torch.no_grad():
            new = torch.tensor([row[len(self.row) - 1 : -1]])
            logits = self.model(new, logits_to_keep=len(said), past_key_values=self.cache, use_cache=True).logits[0]
            self.row = row
            return tuple(logits.log_softmax(-1).gather(1, torch.tensor([said]).T)[:, 0].tolist())


def sandbox_or_skip(agent: Agent) -> Any:
    """The machine's best sandbox; skip, or in CI fail, without one."""
    with skip_without_prerequisites():
        return sandbox.make_backend(sandbox.choose_backend().name, getattr(agent, "binds", ()))


@asynccontextmanager
async def rollout_in(
    folder: Path, source: PolicySource, agent: Agent, backend: SandboxBackend, limits: Limits | None
) -> AsyncIterator[tuple[Rollout, Task]]:
    """A rollout with its log in `folder`, and the repair of the repository there as a task."""
    with closing(Log(folder / "log.jsonl")) as log:
        gateway = Gateway(source, sampling=Sampling(max_tokens=4096), on_turn=log.turn)
        async with gateway.listening(socket=folder / "gateway.sock"):
            terms = AttemptSettings(
                agent, backend, limits or RECOMMENDED, {"train": rewards.make_rewards({"patch_lines": 1.0})}
            )
            rollout = Rollout(executor=LocalExecutor(gateway, {"": terms}), log=log, concurrency=1)
            yield rollout, Task("toy/add", ISSUE, "python", f"dir:{folder / 'repo'}", ORACLE)


async def play(
    agent: Agent,
    script: Sequence[Reply],
    *,
    folder: Path,
    model: Path,
    limits: Limits | None = None,
    context: int = 1 << 20,
    forced: bool = False,
    files: Mapping[str, str | bytes] = FILES,
    delay: float = 0.0,
    backend: SandboxBackend | None = None,
) -> Outcome:
    """Let `agent` work on the repository of `files` while the policy gives the replies of `script`; the last repeats.

    `delay`: seconds before each 64 tokens.
    `forced`: logprobs are those of the weights in `model`; otherwise they are made up.
    """
    codec = tokens.load_codec(model)
    answered = 0
    side: list[int] = []

    def reply(ids: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
        nonlocal answered
        # a request beside the repair does not advance the script
        if script[0].calls and "<tools>" not in codec.decode(ids):
            side.append(answered + len(side))
            return encode_reply(codec, Reply("Repair of add"))
        answered += 1
        return encode_reply(codec, script[min(answered, len(script)) - 1])

    engine = (
        Forced(reply, model, context=context)
        if forced
        else ScriptedEngine(reply, context=context, chunk=64, delay=delay)
    )
    for name, text in files.items():
        (folder / "repo" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "repo" / name).write_bytes(text.encode() if isinstance(text, str) else text)
    backend = backend or sandbox_or_skip(agent)
    with closing(backend):
        async with rollout_in(folder, PolicySource(codec, engine), agent, backend, limits) as (rollout, task):
            episode = await rollout.run(PlannedAttempt(task, "train", 1, "toy/add-1", 0, 7, Sampling()))
    return Outcome(episode, engine, codec, tuple(side))


def encode_reply(codec: tokens.Codec, reply: Reply) -> list[int]:
    """Encode `reply` as the ids that the policy would sample."""
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(reply.calls)
    ]
    ids = codec.spell({"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})})
    assert ids is not None
    return ids


def check_repair(outcome: Outcome, *, turns: int = 3, ending: Ending = Ending.DONE) -> tuple[Turn, ...]:
    """Assert that the diff is only the repair, and that each token is the engine's and counted once."""
    episode = outcome.episode
    assert episode.ending is ending, outcome.describe()
    assert episode.patch.startswith(b"diff --git a/calc/add.py b/calc/add.py\n"), outcome.describe()
    assert episode.patch.count(b"diff --git") == 1, episode.patch.decode()
    assert episode.reward == 1.0, episode.patch.decode()
    assert len(episode.turns) >= turns, outcome.describe()
    seen = [request.ids for request in outcome.engine.requests]
    for turn in episode.turns:
        whole = sequence(episode.turns, turn.index)
        assert whole[: len(whole) - len(turn.output)] in seen
    _, account = stitch_episode(episode, 1.0, max_tokens=1 << 20)
    assert account.is_balanced
    assert (account.masked, set(account.dropped) - {"side"}) == ({}, set())
    assert ISSUE in outcome.prompts[0] or any(ISSUE in prompt for prompt in outcome.prompts), outcome.prompts[0]
    return episode.turns
