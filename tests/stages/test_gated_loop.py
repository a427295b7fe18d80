"""The real loop, rollout, gateway and log with a fault in one part: its gate warns, stops the loop, and lets it go on.

Agent and engine are scripted, and the learner is a stand-in that reports what it is told to: what a gate sees is what
the loop records, whoever reports it. (A real learner without a finite gradient is in tests/e2e/test_skipped.py.)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from coderepairrl import protocols, tokens
from coderepairrl.agents.scripted import Say, ScriptedAgent
from coderepairrl.config import Config, to_toml
from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import ExitCode, HealthGateError
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.learn import Batch
from coderepairrl.protocols import Chunk, Sandbox, SandboxBackend
from coderepairrl.rollout import Curriculum, LocalExecutor, Rollout, Share, Terms
from coderepairrl.runs import RunFolder
from coderepairrl.sandbox.fake import ScriptedBackend
from coderepairrl.stages import gates
from coderepairrl.stages.history import History, read_history
from coderepairrl.stages.parts import Parts
from coderepairrl.stages.policy import LivePolicy
from coderepairrl.stages.progress import Progress
from coderepairrl.stages.train import train
from coderepairrl.types import AgentReport, Endpoint, Episode, Limits, Sampling, Score, Task

PATIENCE, BEGIN, STEPS = 4, 8, 16


@dataclass
class Fault:
    """What is wrong from step `begin` on."""

    gate: str
    begin: int = BEGIN
    now: bool = field(default=False, init=False)

    def of(self, *gates: str) -> bool:
        return self.now and self.gate in gates


class Engine(ScriptedEngine):
    """Sure of everything, or of nothing, or slow, where the fault says so."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(lambda ids, sampling, seed: [65] * (1 + seed % 5) + list(sampling.stop_ids[:1]))
        self.fault = fault

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        self._delay = 1.0 if self.fault.of("throughput") else 0.0
        async for chunk in super().generate(ids, sampling, seed):
            scale = 1e-3 if self.fault.of("entropy") else 10.0 if self.fault.of("perplexity") else 1.0
            yield chunk._replace(logprobs=tuple(p * scale for p in chunk.logprobs))


@dataclass
class Agent(protocols.Agent):
    """Says something, or nothing."""

    fault: Fault
    name: str = "speaker"
    placement: str = "host"

    async def run(self, task: Task, box: Sandbox, endpoint: Endpoint) -> AgentReport:
        if not self.fault.of("nothing_sampled"):
            await ScriptedAgent([Say("hello")]).run(task, box, endpoint)
        return AgentReport("submitted")


@dataclass
class Reward(protocols.Reward):
    """Half of the attempts earn something."""

    fault: Fault
    name: str = "halves"

    async def __call__(self, task: Task, episode: Episode, sandbox: SandboxBackend) -> Score:
        value = 0.25 if self.fault.of("no_gradient") else 0.0 if self.fault.of("zero_reward") else episode.attempt / 2
        return Score(self.name, value)


@dataclass
class Policy:
    """Counts batches, and reports what the fault says."""

    fault: Fault
    version: int = 0

    async def restore(self, history: History) -> None:
        self.version = sum(bool(record["account"]["trained"]) for record in history.steps)
        self.fault.now = history.step + 1 >= self.fault.begin

    async def improve(self, made: Batch, history: History) -> tuple[dict[str, Any], str]:
        self.fault.now = history.step + 2 >= self.fault.begin  # from the next step on
        if not made.samples:
            return {}, str(self.version)
        self.version += 1
        here = history.step + 1 >= self.fault.begin
        metrics: dict[str, Any] = {"grad_norm": 0.1, "kl": 0.001, "mismatch_mean": 1e-7}
        if here and self.fault.gate == "skipped":
            metrics = {"skipped": 1, "skipped_reason": "its norm is nan"}
        elif here and self.fault.gate == "kl":
            metrics["kl"] = 20.0
        elif here and self.fault.gate == "drift":
            metrics["mismatch_mean"] = 0.7
        return metrics, str(self.version)

    async def save(self, step: int) -> Path:
        return Path("nowhere")


@contextlib.asynccontextmanager
async def parts_of(folder: RunFolder, fault: Fault, model: Path) -> AsyncIterator[Parts]:
    """A run in `folder`, ready to go on."""
    run = {"name": folder.path.name, "dir": str(folder.path.parent), "steps": STEPS, "health": {"patience": PATIENCE}}
    rollouts = {"tasks_per_step": 2, "group_size": 2}
    evaluation = {"before": False, "after": False}
    config = Config.model_validate({"run": run, "rollout": rollouts, "eval": evaluation})
    if not folder.path.exists():
        folder.create(to_toml(config), {"config": config.model_dump(mode="json")})
    log = folder.writer()
    engine = Engine(fault)
    gateway = Gateway(
        PolicySource(tokens.load(model), engine),
        sampling=Sampling(),
        on_turn=log.turn,
    )
    await gateway.start()
    rollout = Rollout(
        executor=LocalExecutor(
            gateway,
            {
                "": Terms(
                    cast(Any, Agent(fault)),
                    ScriptedBackend({"a.py": b"x = 0\n"}),
                    Limits(calls=4, tokens=2000, seconds=30.0, turn_tokens=16),
                    {"train": [(Reward(fault), 1.0)]},
                )
            },
        ),
        log=log,
        concurrency=4,
    )
    tasks = tuple(Task(f"toy/{i}", "add() subtracts.", "python", "dir:unused", b"") for i in range(4))
    try:
        progress = Progress(STEPS)
        yield Parts(
            config=config,
            folder=folder,
            log=log,
            eval_tasks={},
            rollout=rollout,
            progress=progress,
            curriculum=Curriculum(sources=(Share(tasks),), per_step=2, seed=0),
            policy=cast(LivePolicy, Policy(fault)),
            engine=cast(Any, engine),
        )
    finally:
        await gateway.stop()
        log.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    yield RunFolder(tmp_path / "gated")


@pytest.mark.parametrize("name", [gate.name for gate in gates.GATES])
async def test_a_fault_stops_the_loop_within_its_patience_and_it_goes_on_when_mended(
    name: str,
    folder: RunFolder,
    miniature: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "SKIPS", PATIENCE)
    monkeypatch.setattr(gates, "THROUGHPUT", 0.3 if name == "throughput" else 0.01)
    async with parts_of(folder, Fault(name), miniature) as parts:
        with pytest.raises(HealthGateError) as stopped:
            await train(parts, read_history(folder))
    assert stopped.value.exit_code is ExitCode.HEALTH_GATE and stopped.value.fix
    history = read_history(folder)
    assert history.step == BEGIN + PATIENCE - 1
    recorded = {record["step"]: record["alarms"] for record in history.steps if record["alarms"]}
    found = [(step, alarm["gate"], alarm["stops"]) for step, alarms in recorded.items() for alarm in alarms]
    assert found == [(BEGIN + PATIENCE // 2 - 1, name, False), (BEGIN + PATIENCE - 1, name, True)]
    said = capsys.readouterr().err
    # the log ends as if it was killed at that moment, and the same settings judge it
    async with parts_of(folder, Fault(name, begin=STEPS + 1), miniature) as parts:
        with pytest.raises(HealthGateError, match=re.escape(str(stopped.value))):
            await train(parts, read_history(folder))
        parts.log.append("stop", step=BEGIN + PATIENCE - 1, reason=str(stopped.value))
    assert read_history(folder).steps == history.steps
    assert said.count("ALARM: ") == 2 and str(stopped.value) in said.replace("\n", " ").replace("  ", " ")
    assert [(a.last, a.gate, a.stops) for a in gates.replay(folder.path)] == found, "the log says the same"

    async with parts_of(folder, Fault("none"), miniature) as parts:
        await train(parts, read_history(folder))
    history = read_history(folder)
    assert [record["step"] for record in history.steps] == list(range(1, STEPS + 1))
    assert not [record for record in history.steps[BEGIN + PATIENCE - 1 :] if record["alarms"]]
    skipped = [record["step"] for record in history.steps if record["skipped"]]
    assert skipped == (list(range(BEGIN, BEGIN + PATIENCE)) if name == "skipped" else [])
    assert all(not isinstance(value, str) for record in history.steps for value in record["metrics"].values())
