"""The controller's end of the learner process. Free of torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from coderepairrl.children import Child, ChildDied
from coderepairrl.errors import CodeRepairError, LearnerFault, RunError, UsageError
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.types import Sample

_MODULE = "coderepairrl.learn.learner"
_SAMPLE_FIELDS = tuple(field.name for field in fields(Sample))


class Published(NamedTuple):
    """Weights as `Engine.load` takes them: a safetensors file, its policy version, its SHA-256 in hexadecimal."""

    path: Path
    version: int
    checksum: str


class Learner:
    """A running learner. Requests are served one after the other.

    Every method raises `LearnerFault` when the process died (with the end of its log) or refused the request,
    `RunError` when it could not read or write (a full disk), and `UsageError` when the model or checkpoint is bad.
    A cancelled request is still carried out.
    """

    def __init__(self, child: Child, publish_dir: Path) -> None:
        self._child = child
        self._publish_dir = publish_dir
        self._turn = asyncio.Lock()
        self.version = 0
        """Of the weights the learner holds: the number of batches they were trained on."""

    @classmethod
    async def start(cls, model: Path, settings: LearnSettings, *, log_dir: Path, publish_dir: Path) -> Self:
        """A learner with the weights in `model` (Hugging Face layout) as version 0.

        It logs to ``log_dir/learner.log`` and publishes to `publish_dir`, for example below /dev/shm.
        """
        learner = cls(await Child.spawn(_MODULE, log=log_dir / "learner.log"), publish_dir)
        try:
            await learner._call("start", model=str(model.resolve()), settings=asdict(settings))
        except BaseException:
            await learner.close()
            raise
        return learner

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.process.pid

    async def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one batch; the version goes up by one. Returns the metrics of `learn.metrics.Metrics`."""
        rows = [{name: getattr(sample, name) for name in _SAMPLE_FIELDS} for sample in samples]
        metrics: dict[str, float] = await self._call("step", samples=rows)
        return metrics

    async def publish(self) -> Published:
        """Write the current weights for the engine. Deleting older files is left to the caller."""
        path, version, checksum = await self._call("publish", folder=str(self._publish_dir.resolve()))
        return Published(Path(path), version, checksum)

    async def logprobs(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Logprob of each token but the first of each row, under the current weights."""
        result: list[list[float]] = await self._call("logprobs", rows=list(map(list, rows)), temperature=temperature)
        return result

    async def save(self, path: Path) -> None:
        """Write an exact checkpoint: weights in Hugging Face layout, optimiser state, counters."""
        await self._call("save", path=str(path.resolve()))

    async def restore(self, path: Path) -> int:
        """Continue from a checkpoint bit for bit; returns its version."""
        await self._call("restore", path=str(path.resolve()))
        return self.version

    async def close(self) -> None:
        """End the process."""
        await self._child.close()

    async def _call(self, op: str, **arguments: Any) -> Any:
        # shielded: a cancelled caller must not leave half a frame, or a reply, for the next one
        exchange = asyncio.ensure_future(self._exchange({"op": op, **arguments}))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it now
            raise

    async def _exchange(self, frame: dict[str, Any]) -> Any:
        async with self._turn:
            try:
                await self._child.send(frame)
                reply = await self._child.receive()
            except ChildDied as error:
                raise LearnerFault(f"the learner died during {frame['op']}: {error}") from error
        if "error" in reply:
            raise _raised(frame["op"], reply)
        self.version = reply["version"]
        return reply["ok"]


async def init_random(source: Path, target: Path, seed: int, *, log_dir: Path) -> None:
    """Write a model with random weights to `target`, from config.json and tokenizer in `source`, in a child process.

    Raises `UsageError` when `source` describes no model, and `LearnerFault`, `RunError` as `Learner` does.
    """
    learner = Learner(await Child.spawn(_MODULE, log=log_dir / "learner.log"), target)
    try:
        await learner._call("init_random", source=str(source.resolve()), target=str(target.resolve()), seed=seed)
    finally:
        await learner.close()


def _raised(op: str, reply: dict[str, Any]) -> CodeRepairError:
    message, fix = reply["error"], reply["fix"]
    match reply["kind"]:
        case "usage":
            return UsageError(message, fix=fix)
        case "storage":
            fix = fix or "make room where it writes (the run folder, /dev/shm), then continue with --resume"
            return RunError(f"the learner could not {op}: {message}", fix=fix)
        case _:
            fix = fix or "logs/learner.log says more; a gradient that is not finite asks for a lower train.lr"
            return LearnerFault(f"the learner refused {op}: {message}", fix=fix)
