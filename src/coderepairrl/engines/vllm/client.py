"""The `Engine` protocol over a vLLM server, with weights that change while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.engines.limits import check_request
from coderepairrl.engines.vllm.served import ServedWeights, Stream, Traffic
from coderepairrl.engines.vllm.server import RequestRejected, ServerLost, VllmServer
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.protocols import Engine
from coderepairrl.types import Chunk, Sampling

NOT_A_NUMBER = -9999.0
"""vLLM's value for a logprob that is not finite."""
_COUNTERS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:kv_cache_usage_perc": "kv_used",
}


class VllmEngine(ServedWeights):
    """A vLLM server, started and supervised or joined by URL.

    Logprobs follow `Sampling`, except with top-p, top-k or min-p (evaluation only): then they are those of the
    truncated distribution. Full weights are replaced in place while requests are held; KV caches of requests in
    flight are recomputed, and such a request yields nothing until its end, when the server reports where the version
    changed. Adapters have versioned names: a request in flight keeps its adapter.
    """

    def __init__(
        self,
        server: VllmServer,
        model: Path,
        checksum: str,
        *,
        policy: str,
        context: int,
        vocabulary: int,
        slots: int,
        max_loras: int,
    ) -> None:
        """Connect to a server that serves the folder `model` as `policy`."""
        super().__init__(server, Traffic(slots), policy, model, checksum, max_loras)
        self.context = context
        server.on_death = self._traffic.end
        self._vocabulary = vocabulary
        self._watch = asyncio.create_task(self._watch_silence())

    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Raises ValueError for invalid requests, `EngineFault` for a failed engine."""
        return self.sample(ids, sampling, seed, None)

    def at(self, version: int) -> Engine:
        """See `Engine.at`."""
        return _PinnedEngine(self, version)

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, seed: int, version: int | None
    ) -> AsyncGenerator[Chunk, None]:
        """Generate with the weights of `version`, the newest if None."""
        check_request(ids, sampling, context=self.context, vocabulary=self._vocabulary)
        async with self._traffic.slot():
            self.server.require_alive()
            stream = self.make_stream(version)
            request = {
                "model": stream.model,
                "token_ids": list(ids),
                "sampling_params": _make_sampling_params(sampling, seed, self.context - len(ids)),
                "cache_salt": stream.salt,
                "stream": True,
            }
            try:
                with self._traffic.open(stream):
                    async with contextlib.aclosing(self._iter_chunks(stream, request)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except RequestRejected as refusal:
                if (lost := self.explain_restart(stream, refusal)) is None:
                    raise
                self.server.mark_dead(str(lost))
                raise lost from refusal
            except ServerLost as fault:
                self.server.mark_dead(str(fault))
                self.server.require_alive()  # raises with the first reason

    async def health(self) -> Mapping[str, float]:
        """``version``; requests ``running`` and ``waiting``, queued here included; tokens since the start:
        ``prompt_tokens``, of which ``prefix_hit_tokens`` came from the cache, and ``generated_tokens``; the used share
        of the cache ``kv_used``; ``adapters``; ``sleep_seconds`` and ``wake_seconds`` of the last sleep.
        """
        await self.server.call("GET", "/health")
        counters = dict.fromkeys(_COUNTERS.values(), 0.0)
        for line in (await self.server.call("GET", "/metrics")).splitlines():
            if (name := _COUNTERS.get(line.partition("{")[0])) is not None:
                counters[name] += float(line.rpartition(" ")[2])
        counters["waiting"] += self._traffic.queued
        return counters | {"version": self.version, "adapters": len(self.adapters)} | self._slept_seconds

    async def close(self) -> None:
        """End a server started here. Open requests raise `EngineFault`."""
        self.server.mark_dead("the engine was closed")
        self._watch.cancel()
        await asyncio.wait([self._watch])
        await self.server.close()

    @property
    def pid(self) -> int | None:
        """Process id of a server started here."""
        return self.server.pid

    async def _iter_chunks(self, stream: Stream, request: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Yield chunks once their versions are certain."""
        ids: list[int] = []
        logprobs: list[float] = []
        sent = 0
        async with contextlib.aclosing(self.server.events("/inference/v1/generate", request)) as events:
            async for event in events:
                self._traffic.last_event = time.monotonic()
                for choice in event["choices"]:
                    ids += choice["token_ids"]
                    logprobs += [_read_logprob(entry, stream) for entry in choice["logprobs"]["content"]]
                    finish = choice["finish_reason"]
                    if finish is not None:
                        if finish not in ("stop", "length"):
                            raise EngineFault(f"the server ended a request: {finish}")
                        versions = self.read_version_ranges(stream, choice["weight_versions"] or [], len(ids))
                    elif stream.straddles:
                        continue  # its versions are reported at its end
                    else:
                        versions = [(stream.version, sent, len(ids))]
                    for version, start, end in versions:
                        if (start := max(start, sent)) < end:
                            yield Chunk(tuple(ids[start:end]), tuple(logprobs[start:end]), version)
                    sent = len(ids)

    async def _watch_silence(self) -> None:
        """End a silent server, so that its requests fail and another can be started."""
        while True:
            await asyncio.sleep(1.0)
            if self._traffic.measure_silence() > self.server.patience:
                requests, seconds = len(self._traffic.streams), self.server.patience
                await self.server.end(f"the engine has {requests} requests and sent nothing for {seconds:.0f} s")
                return


class _PinnedEngine(Engine):
    def __init__(self, engine: VllmEngine, version: int) -> None:
        self.context = engine.context
        self._engine = engine
        self._version = version

    def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        return self._engine.sample(ids, sampling, seed, self._version)

    async def load(self, path: Path, version: int, checksum: str) -> int:
        raise EngineFault(f"an engine fixed to version {self._version} loads no weights")

    async def health(self) -> Mapping[str, float]:
        return await self._engine.health()

    async def close(self) -> None:
        """See `Engine.at`."""


def _make_sampling_params(sampling: Sampling, seed: int, room: int) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": min(sampling.max_tokens, room),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "seed": seed & ((1 << 63) - 1),  # a signed 64-bit integer
        "logprobs": 0,  # only of the sampled token
        "detokenize": False,
    }


def _read_logprob(entry: Mapping[str, Any], stream: Stream) -> float:
    logprob = float(entry["logprob"])
    if logprob <= NOT_A_NUMBER:
        raise EngineFault(f"the logits of version {stream.version} are not finite")
    return logprob


def read_vocabulary_size(model: Path) -> int:
    """Vocabulary size of a model folder. Raises `ConfigError` if not stated."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model} is not a model folder: config.json: {error!r}",
            fix="point `model` at a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json",
        ) from None
