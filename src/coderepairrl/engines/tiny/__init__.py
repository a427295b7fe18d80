"""The tiny engine: exact inference of dense Llama-like models on a CPU. Its options, and the client of its process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from coderepairrl.engines.limits import check_integer_option, check_positive_option, check_request
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.processes.children import Child, ChildDied, Frame
from coderepairrl.processes.installs import require_train
from coderepairrl.protocols import Engine, EngineSpec
from coderepairrl.sync import weights
from coderepairrl.types import Capabilities, Chunk, EngineNeeds, Sampling

SERVER = "coderepairrl.engines.tiny.server"


class TinyEngine(Engine):
    """Continuous batching on a CPU, in a child process.

    A request's tokens are a function of weights, ids, sampling and seed, bit for bit, whatever else runs
    (on one machine; see `coderepairrl.engines.tiny.model`). Serves `FAMILIES` in fp32. Requests in flight during a
    `load` continue with the new weights and a recomputed KV cache; each token has the version that sampled it.
    """

    def __init__(self, child: Child, config: ModelConfig, context: int) -> None:
        self.context = context
        self._vocabulary = config.vocab_size
        self._child = child
        self._streams: dict[int, asyncio.Queue[Chunk | EngineFault | None]] = {}
        """Unread output of open requests; a fault or None is its end."""
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._numbers = itertools.count()
        self._failure: str | None = None
        self._reader = asyncio.create_task(self._read_frames())

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Raises ValueError for invalid requests, `EngineFault` for a failed engine."""
        check_request(ids, sampling, context=self.context, vocabulary=self._vocabulary)
        key = next(self._numbers)
        stream = self._streams[key] = asyncio.Queue()
        request = {"key": key, "ids": list(ids), "sampling": asdict(sampling), "seed": seed}
        try:
            await self._send({"do": "generate", **request})
            while (chunk := await stream.get()) is not None:
                if isinstance(chunk, EngineFault):
                    raise chunk
                yield chunk
        finally:
            if self._streams.pop(key, None) is not None:  # it has not ended
                with contextlib.suppress(EngineFault):  # a dead engine has nothing to abort
                    await self._send({"do": "abort", "key": key})

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. Takes only merged weights."""
        answer = await self._request_answer("load", path=str(path.resolve()), version=version, checksum=checksum)
        return int(answer["version"])

    async def health(self) -> Mapping[str, float]:
        """``version``; requests ``running`` and ``waiting``; tokens since the start: ``prompt_tokens``, of which
        ``prefix_hit_tokens`` came from the cache, and ``generated_tokens``; free cache tokens ``kv_tokens_free``.
        """
        counters: dict[str, float] = (await self._request_answer("health"))["health"]
        return counters

    async def close(self) -> None:
        """End the child. Open requests raise `EngineFault`."""
        self._fail("the engine was closed")
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._child.close(grace=0.0)  # nothing is to be saved, and a clean exit of torch takes a second

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.process.pid

    async def _send(self, frame: Frame) -> None:
        if self._failure is not None:
            raise EngineFault(self._failure)
        try:
            await self._child.send(frame)
        except ChildDied as death:
            self._fail(f"the engine died: {death}")
            raise EngineFault(f"the engine died: {death}") from None

    async def _request_answer(self, do: str, **fields: Any) -> Frame:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"do": do, "number": number, **fields})
            answer = await self._answers[number]
        finally:
            del self._answers[number]
        if "error" in answer:
            raise EngineFault(answer["error"])
        return answer

    async def _read_frames(self) -> None:
        try:
            while True:
                frame = await self._child.receive()
                for key, ids, logprobs, ended in frame.get("tokens", ()):
                    if stream := self._streams.get(key):  # otherwise it was just aborted
                        stream.put_nowait(Chunk(tuple(ids), tuple(logprobs), frame["version"]))
                        if ended:
                            self._streams.pop(key).put_nowait(None)
                if stream := self._streams.pop(frame.get("failed", -1), None):
                    stream.put_nowait(EngineFault(frame["error"]))
                if (future := self._answers.get(frame.get("answer", -1))) and not future.done():
                    future.set_result(frame)
        except ChildDied as death:
            self._fail(f"the engine died: {death}")

    def _fail(self, message: str) -> None:
        if self._failure is None:
            self._failure = message
        while self._streams:
            self._streams.popitem()[1].put_nowait(EngineFault(self._failure))
        for future in self._answers.values():
            if not future.done():
                future.set_result({"error": self._failure})


@dataclass(frozen=True, kw_only=True)
class Tiny(EngineSpec):
    """A dense Llama-like model on a CPU, in fp32. Raises `ConfigError` for invalid options."""

    context: int | None = None
    """Longest sequence in tokens; the model's own limit if None."""
    slots: int = 64
    """Most sequences in the cache, running ones and those that are kept for their next turn."""
    kv_gib: float = 2.0
    """Memory of the KV cache; limits the number of slots."""
    threads: int = 1
    """CPU threads. Use several only on an idle machine: two competing for a core are four times slower than one."""

    name = "tiny"
    engine: ClassVar[type[TinyEngine]] = TinyEngine
    """The class that `start` returns."""

    def __post_init__(self) -> None:
        for option, least in (("context", 2), ("slots", 1), ("threads", 1)):
            check_integer_option(vars(self), option, least)
        check_positive_option(vars(self), "kv_gib")

    @property
    def capabilities(self) -> Capabilities:
        """Merged weights from files, on the CPU."""
        return Capabilities(context=self.context)

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` for an unsupported model, or if the cache cannot hold a sequence."""
        self._fit_cache(ModelConfig.read(model))

    def require(self, needs: EngineNeeds = EngineNeeds(), *, connect: bool = False) -> dict[str, str]:
        """Raise `PrerequisiteError` without torch."""
        require_train()
        return {}

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> TinyEngine:
        """See `EngineSpec.start`; the child writes ``engine.log``. Raises `ConfigError` without weights."""
        require_train()
        config = ModelConfig.read(model)
        try:
            weights.list_weight_files(model)
        except EngineFault as fault:
            raise ConfigError(
                str(fault), fix=fault.fix or "create random weights first (model.init=random), or download the model"
            ) from None
        context, slots = self._fit_cache(config)
        arguments = [model.resolve(), slots, context, self.threads]
        child = await Child.spawn(SERVER, list(map(str, arguments)), log=log_dir / "engine.log")
        try:
            greeting = await child.receive()
        except ChildDied as death:
            raise EngineFault(f"the engine did not start: {death}") from None
        except BaseException:
            await child.close(grace=0.0)
            raise
        if "error" in greeting:
            await child.close()
            raise EngineFault(f"the engine did not start: {greeting['error']}", fix=f"check the files in {model}")
        return self.engine(child, config, context)

    def _fit_cache(self, config: ModelConfig) -> tuple[int, int]:
        """Length of the longest sequence, and the number of such sequences that fit."""
        context = config.context if self.context is None else self.context
        if context > config.context:
            raise ConfigError(
                f"engine.options.context={context}: the model's longest sequence has {config.context} tokens"
            )
        slots = min(self.slots, int(self.kv_gib * 2**30) // (config.kv_bytes * context))
        if slots < 1:
            need = config.kv_bytes * context / 2**30
            raise ConfigError(
                f"engine.options.kv_gib={self.kv_gib}: one sequence of {context} tokens needs {need:.2f} GiB of keys "
                "and values",
                fix="lower engine.options.context, or raise engine.options.kv_gib",
            )
        return context, slots
