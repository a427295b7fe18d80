"""Training: advantages, stitching, and the controller's end of the learner process. Imports no torch."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from coderepairrl.config.schema import Precision, Quantise, Route
from coderepairrl.errors import CodeRepairError, LearnerFault, PrerequisiteError, RunError, UsageError
from coderepairrl.learn.algorithms import RECIPES, compute_group_advantages
from coderepairrl.learn.remote import RemoteLearner, digest_common_files, format_torchrun
from coderepairrl.learn.settings import Form, LearnSettings, require_packages
from coderepairrl.learn.stitch import (
    Batch,
    RewardShaping,
    TokenAccount,
    build_batch,
    compute_advantages,
    stitch_episode,
)
from coderepairrl.processes.children import Child, ChildDied, Frame
from coderepairrl.processes.installs import require_train
from coderepairrl.sync.weights import PublishedWeights
from coderepairrl.types import Sample

__all__ = [
    "RECIPES",
    "Batch",
    "Form",
    "LearnSettings",
    "Learner",
    "RewardShaping",
    "TokenAccount",
    "build_batch",
    "check_weights",
    "compute_advantages",
    "compute_group_advantages",
    "extract_language_model",
    "format_torchrun",
    "init_random",
    "merge_adapter",
    "require_packages",
    "round_model",
    "stitch_episode",
]
_MODULE = "coderepairrl.learn.learner"
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
"""glibc would return the memory of each large tensor to the system and ask for it again."""
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_DEATH_REPORT_SECONDS = 5.0
PATIENCE = 3600.0
"""Seconds to wait for a reply: longer than any step."""
_LOG_HINT = "logs/learner.log may say why; continue with --resume"
_OOM_HINT = "lower train.micro_tokens, set train.gradient_checkpointing=true, or share the model among more processes"
_SAMPLE_FIELDS = tuple(field.name for field in fields(Sample))


class Learner:
    """Learner of one or several processes, serving one request at a time.

    Methods raise `LearnerFault` when a process died or refused, `RunError` for failed reads and writes, `UsageError`
    for a bad model or checkpoint, `PrerequisiteError` for a missing package or device. A request completes even
    if cancelled. All processes are killed when one dies or exceeds `patience` seconds.
    """

    def __init__(
        self, children: Sequence[Child | RemoteLearner], publish_dir: Path, patience: float = PATIENCE
    ) -> None:
        self._children = children
        self._publish_dir = publish_dir
        self._patience = patience
        self._request_lock = asyncio.Lock()
        self.version = 0
        """Number of trained batches."""
        self.notices: list[str] = []
        """Notices on how the model is computed."""

    @classmethod
    async def start(
        cls,
        model: Path,
        settings: LearnSettings,
        *,
        log_dir: Path,
        publish_dir: Path,
        env: Mapping[str, str] | None = None,
        gpu: bool = False,
        patience: float = PATIENCE,
        listen: str = "",
    ) -> Self:
        """Start with the weights in `model` (Hugging Face layout) as version 0.

        `gpu` requires a GPU. With `listen` (HOST:PORT), waits up to `patience` seconds for torchrun's processes and
        ignores `env`.
        """
        learner = cls([], publish_dir, patience)
        start = {"model": model, "settings": settings.model_dump(), "gpu": gpu}
        try:
            if listen:
                learner._children = [await RemoteLearner.accept(listen, settings.processes, patience)]
                models = [model, *([Path(settings.teacher)] if settings.teacher else [])]
                async with digest_common_files(models, [log_dir, publish_dir]) as files:
                    learner.notices = await learner._call("start", **start, files=files)
            else:
                learner._children = await _spawn_processes(settings.processes, log_dir, publish_dir, env or {})
                learner.notices = await learner._call("start", **start)
        except BaseException:
            await learner.close()
            raise
        return learner

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids."""
        return tuple(child.pid for child in self._children)

    async def step(
        self, samples: Sequence[Sample], episodes: int | None = None, tokens: int | None = None
    ) -> dict[str, Any]:
        """See `Trainer.step`."""
        return dict(await self._call("step", samples=_encode_samples(samples), episodes=episodes, tokens=tokens))

    async def measure(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """See `Trainer.measure`."""
        return dict(await self._call("measure", samples=_encode_samples(samples)))

    async def publish(self, form: Form = "model") -> PublishedWeights:
        """Write the weights; the caller deletes older folders."""
        path, version, checksum = await self._call("publish", folder=self._publish_dir, form=form)
        return PublishedWeights(Path(path), version, checksum)

    async def offer(self, route: Route) -> PublishedWeights:
        """See `Trainer.offer`."""
        path, version, checksum = await self._call("offer", folder=self._publish_dir, route=route)
        return PublishedWeights(Path(path), version, checksum)

    async def send(self, offer: Path, version: int, receivers: int, seconds: float) -> str:
        """See `Trainer.send`."""
        return str(await self._call("send", offer=offer, version=version, receivers=receivers, seconds=seconds))

    async def logprobs(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """See `Trainer.logprobs`."""
        return list(await self._call("logprobs", rows=list(map(list, rows)), temperature=temperature))

    async def offload(self) -> int:
        """See `Trainer.offload`."""
        return int(await self._call("offload"))

    async def reload(self) -> int:
        """See `Trainer.reload`."""
        return int(await self._call("reload"))

    async def save(self, path: Path) -> None:
        """Write an exact checkpoint."""
        await self._call("save", folder=path)

    async def restore(self, path: Path) -> int:
        """Continue from a checkpoint; returns its version."""
        await self._call("restore", folder=path)
        return self.version

    async def close(self, *, restarts: bool = False) -> None:
        """End the processes; with `restarts`, torchrun restarts its processes."""
        for child in self._children:
            if isinstance(child, RemoteLearner) and not restarts:
                await child.dismiss()
        await asyncio.gather(*(child.close() for child in self._children))

    async def _call(self, op: str, **arguments: Any) -> Any:
        # shielded: a cancelled caller must not leave half a frame or an unread reply behind
        frame = {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in arguments.items()}
        exchange = asyncio.ensure_future(self._exchange({"op": op, **frame}))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio warns
            raise

    async def _exchange(self, frame: dict[str, Any]) -> Any:
        async with self._request_lock:
            try:
                async with asyncio.timeout(self._patience):
                    await asyncio.gather(*(child.send(frame) for child in self._children))
                    replies = await self._receive_replies()
            except TimeoutError:
                stopped = [child.name for child in self._children if child.stopped]
                for child in self._children:
                    child.kill()
                hint = f": process {', '.join(stopped)} was stopped" if stopped else ""
                raise LearnerFault(
                    f"the learner did not answer {frame['op']} within {self._patience:g} s, and was killed{hint}",
                    fix="raise train.patience if it was still at work: logs/learner.log may say",
                ) from None
            except ChildDied as error:
                fix = _OOM_HINT if "OutOfMemory" in str(error) else error.fix or _LOG_HINT
                raise LearnerFault(f"the learner died during {frame['op']}: {error}", fix=fix) from error
        failed = next((reply for reply in replies if "error" in reply), None)
        if failed is not None:
            raise _decode_error(frame["op"], failed)
        self.version = replies[0]["version"]
        return replies[0]["ok"]

    async def _receive_replies(self) -> list[Frame]:
        # when a process dies, the others have some seconds to report their own death, then are killed
        waiting = [asyncio.ensure_future(child.receive()) for child in self._children]
        try:
            done, unfinished = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:  # by the timeout
            for reply in waiting:
                reply.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            raise
        if not any(reply.exception() for reply in done):
            return [reply.result() for reply in waiting]
        if unfinished:
            _, unfinished = await asyncio.wait(unfinished, timeout=_DEATH_REPORT_SECONDS)
        for child, reply in zip(self._children, waiting, strict=True):
            if reply in unfinished:
                child.kill()
                reply.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        deaths = [result for result in results if isinstance(result, ChildDied)]
        raise deaths[0] if len(deaths) == 1 else ChildDied("\n".join(map(str, deaths)))


async def check_weights(folder: Path, *, log_dir: Path) -> None:
    """Run `loading.check_weights` in a child process. Raises `UsageError`."""
    await _run_in_child("check_weights", log_dir, folder=folder)


async def init_random(source: Path, target: Path, seed: int, *, log_dir: Path) -> None:
    """Run `learner.init_random` in a child process."""
    await _run_in_child("init_random", log_dir, source=source, target=target, seed=seed)


async def merge_adapter(base: Path, adapter: Path, target: Path, precision: Precision, *, log_dir: Path) -> None:
    """Run `learner.merge_adapter` in a child process."""
    await _run_in_child("merge", log_dir, base=base, adapter=adapter, target=target, precision=precision)


async def round_model(source: Path, target: Path, form: Quantise, precision: Precision, *, log_dir: Path) -> None:
    """Run `learner.round_model` in a child process."""
    await _run_in_child("round", log_dir, source=source, target=target, form=form, precision=precision)


async def extract_language_model(source: Path, target: Path, *, log_dir: Path) -> None:
    """Run `learner.extract_language_model` in a child process."""
    await _run_in_child("extract_language_model", log_dir, source=source, target=target)


async def _run_in_child(op: str, log_dir: Path, **arguments: Any) -> None:
    learner = Learner(await _spawn_processes(1, log_dir, log_dir, {}), log_dir)
    try:
        await learner._call(op, **arguments)
    finally:
        await learner.close()


async def _spawn_processes(processes: int, log_dir: Path, shared: Path, extra: Mapping[str, str]) -> list[Child]:
    require_train()
    extra = _KEEP_MEMORY | dict(extra)
    if processes == 1:
        return [await Child.spawn(_MODULE, log=log_dir / "learner.log", env=extra)]
    shared.mkdir(parents=True, exist_ok=True)
    rendezvous_file = shared / f".ranks-{secrets.token_hex(8)}"
    children: list[Child] = []
    try:
        for rank in range(processes):
            log = log_dir / (f"learner-{rank}.log" if rank else "learner.log")
            env = {**extra, "RANK": str(rank), "LOCAL_RANK": str(rank), "CRRL_RANKS_FILE": str(rendezvous_file)}
            env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GLOO_SOCKET_IFNAME": _LOOPBACK}
            children.append(await Child.spawn(_MODULE, log=log, env=env))
    except BaseException:
        await asyncio.gather(*(child.close() for child in children))
        raise
    return children


def _encode_samples(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [{name: getattr(sample, name) for name in _SAMPLE_FIELDS} for sample in samples]


def _decode_error(op: str, reply: dict[str, Any]) -> CodeRepairError:
    message, fix = reply["error"], reply["fix"]
    match reply["kind"]:
        case "usage":
            return UsageError(message, fix=fix)
        case "prerequisite":
            return PrerequisiteError(message, fix=fix)
        case "storage":
            fix = fix or "make room where it writes (the run folder, /dev/shm), then continue with --resume"
            return RunError(f"the learner could not {op}: {message}", fix=fix)
        case _:
            fix = fix or "logs/learner.log says more"
            return LearnerFault(f"the learner refused {op}: {message}", fix=fix)
