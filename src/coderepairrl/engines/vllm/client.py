"""The `Engine` protocol over a vLLM server: token ids in, token ids out, and weights that change while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coderepairrl.engines.vllm.link import Link
from coderepairrl.engines.vllm.served import Agree, ServedWeights, always_agree
from coderepairrl.engines.vllm.server import Gone, Refused
from coderepairrl.engines.vllm.traffic import Stream, Traffic
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.protocols import Chunk, Engine
from coderepairrl.types import Sampling

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


class VllmEngine(Engine):
    """A vLLM server, started and supervised or joined by URL.

    Logprobs are those of `Sampling`'s definition unless top-p, top-k or min-p truncate the distribution: vLLM then
    returns those of the truncated one, which only evaluation uses. Full weights replace the model's in place while
    requests are held; the keys of requests in flight are recomputed, and each token has the version that sampled it.
    Such a request yields nothing between the swap and its end, when the server reports at which token the version
    changed. Adapters are served side by side under versioned names: a request in flight keeps its adapter.
    """

    def __init__(
        self,
        link: Link,
        model: Path,
        checksum: str,
        *,
        policy: str,
        context: int,
        slots: int,
        max_loras: int,
        tenant: str | None = None,
    ) -> None:
        """Where others use the server, `tenant` tells the names of this engine's adapters from theirs."""
        self.context = context
        self._link = link
        self._traffic = Traffic(slots)
        link.on_death = self._traffic.end
        self._served = ServedWeights(link, self._traffic, policy, model, checksum, max_loras, tenant)
        self._vocabulary = vocabulary(model)
        self._watch = asyncio.create_task(self._watch_over())

    async def begin(self, adapters: Sequence[str] | None) -> None:
        """As `ServedWeights.begin`; call it before anything else."""
        await self._served.begin(adapters)

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Raises ValueError for invalid requests, `EngineFault` when the engine fails."""
        self._check(ids, sampling)
        async with self._traffic.slot():
            self._link.require_alive()
            stream = Stream(self._served.model, self._served.version, self._served.checksum)
            request = {
                "model": stream.model,
                "token_ids": list(ids),
                "sampling_params": _parameters(sampling, seed, self.context - len(ids)),
                "cache_salt": stream.salt,
                "stream": True,
            }
            try:
                with self._traffic.open(stream):
                    async with contextlib.aclosing(self._tokens(stream, request)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except Refused as refusal:
                if (stale := self._served.stale(stream, refusal)) is None:
                    raise
                self._link.die(str(stale))
                raise stale from refusal
            except Gone as fault:
                self._link.die(str(fault))
                self._link.require_alive()  # with the first reason

    async def load(self, path: Path, version: int, checksum: str, agree: Agree = always_agree) -> int:
        """See `Engine.load`. `path` and `checksum` are as in `coderepairrl.sync.weights`.

        For an offer, the sender must be started at about the same time (`receivers`). With the weights in place, and
        before anything is sampled with them, `agree` is asked; where it says no, the old ones are put back, and
        `EngineFault` is raised.
        """
        return await self._served.load(path, version, checksum, agree)

    async def sleep(self) -> None:
        """See `Engine.sleep`; a server that fails in it, or in waking up, is ended, so that another can be started."""
        await self._served.sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._served.wake()

    async def receivers(self) -> int:
        """Workers of the server, all of which take the weights of an offer."""
        return await self._served.receivers()

    @property
    def patience(self) -> float:
        """Seconds without an answer after which the server counts as hung."""
        return self._link.patience

    async def health(self) -> Mapping[str, float]:
        """Counters.

        ``version``; requests ``running`` and ``waiting``, those that wait here included; tokens
        since the start: ``prompt_tokens``, of which ``prefix_hit_tokens`` came from the cache, and
        ``generated_tokens``; ``kv_used``, the share of the cache that is in use; ``adapters`` at the server;
        ``sleep_seconds`` and ``wake_seconds`` of its last sleep.
        """
        self._link.require_alive()
        await self._link.call("GET", "/health")
        counters = dict.fromkeys(_COUNTERS.values(), 0.0)
        for line in (await self._link.call("GET", "/metrics")).splitlines():
            if (name := _COUNTERS.get(line.partition("{")[0])) is not None:
                counters[name] += float(line.rpartition(" ")[2])
        counters["waiting"] += self._traffic.queued
        own = {"version": self._served.version, "adapters": self._served.adapters}
        return counters | own | self._served.suspension.seconds

    async def close(self) -> None:
        """End a server of our own; leave one that was joined, without our adapters where others use it. Requests still
        open raise `EngineFault`."""
        try:
            await self._served.leave()
        finally:
            self._link.die("the engine was closed")
            self._watch.cancel()
            await asyncio.wait([self._watch])
            await self._link.server.close()

    @property
    def alive(self) -> bool:
        """Whether the server is not known to be dead."""
        return self._link.alive

    @property
    def pid(self) -> int | None:
        """Process id of a server of our own."""
        return self._link.server.pid

    def _check(self, ids: Sequence[int], sampling: Sampling) -> None:
        if not 1 <= len(ids) < self.context:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context}")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise ValueError(
                f"ids reach from {min(ids)} to {max(ids)}, the vocabulary from 0 to {self._vocabulary - 1}"
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens={sampling.max_tokens}: at least one token is sampled")

    async def _tokens(self, stream: Stream, request: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one request, as soon as their versions are certain."""
        ids: list[int] = []
        logprobs: list[float] = []
        given = 0
        async with contextlib.aclosing(self._link.server.events("/inference/v1/generate", request)) as events:
            async for event in events:
                self._traffic.last_event = time.monotonic()
                for choice in event["choices"]:
                    ids += choice["token_ids"]
                    logprobs += [_logprob(entry, stream) for entry in choice["logprobs"]["content"]]
                    finish = choice["finish_reason"]
                    if finish is not None:
                        if finish not in ("stop", "length"):
                            raise EngineFault(f"the server ended a request: {finish}")
                        versions = self._served.versions(stream, choice["weight_versions"] or [], len(ids))
                    elif stream.straddles:
                        continue
                    else:
                        versions = [(stream.version, given, len(ids))]
                    for version, start, end in versions:
                        if (start := max(start, given)) < end:
                            yield Chunk(tuple(ids[start:end]), tuple(logprobs[start:end]), version)
                    given = len(ids)

    async def _watch_over(self) -> None:
        """End a server that has requests but sends nothing, so that they fail and another server can be started."""
        while True:
            await asyncio.sleep(1.0)
            if self._traffic.silence() > self._link.patience:
                requests, seconds = len(self._traffic.streams), self._link.patience
                self._link.die(f"the engine has {requests} requests and said nothing for {seconds:.0f} s")
                await self._link.server.close(grace=0.0)
                return


def _parameters(sampling: Sampling, seed: int, room: int) -> dict[str, Any]:
    """`Sampling` as vLLM's parameters: it stops on our ids only, with logprobs of the sampled token only."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": min(sampling.max_tokens, room),
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "seed": seed & ((1 << 63) - 1),
        "logprobs": 0,
        "detokenize": False,
    }


def _logprob(entry: Mapping[str, Any], stream: Stream) -> float:
    """That of one token. Raises `EngineFault` where it is not finite."""
    logprob = float(entry["logprob"])
    if logprob <= NOT_A_NUMBER:
        raise EngineFault(f"the logits of version {stream.version} are not finite")
    return logprob


def vocabulary(model: Path) -> int:
    """Vocabulary size of the model in the folder `model`. Raises `ConfigError` if its config has none."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model} is not a model folder: config.json: {error!r}",
            fix="point `model` at a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json",
        ) from None
