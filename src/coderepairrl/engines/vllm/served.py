"""The weights that a vLLM server serves, and replacing them."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.engines.vllm.server import Query, RequestRejected, ServerLost, VllmServer
from coderepairrl.errors import EngineFault
from coderepairrl.protocols import Engine
from coderepairrl.sync import weights


@dataclass(eq=False, slots=True)
class Stream:
    """An open request that samples from `model`, the server's name for the weights of `version`."""

    model: str
    version: int
    salt: str
    """Separates entries of the server's prefix cache: an adapter's name may be used again for other weights."""
    straddles: bool = False
    """Whether weights changed while it ran: the server reports the version of each token at its end."""


class Traffic:
    """At most `slots` open streams; none begins from `hold` until `release`."""

    def __init__(self, slots: int) -> None:
        self.streams: set[Stream] = set()
        self.queued = 0
        """Number of requests that wait here."""
        self.last_event = time.monotonic()
        """When the server last sent anything, or had no reason to."""
        self.stream_ended = asyncio.Event()
        """Set whenever a stream ends."""
        self._room = asyncio.Semaphore(slots)
        self._holds = 0
        self._ended = False
        self._admit = asyncio.Event()
        self._admit.set()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and for a load in progress."""
        self.queued += 1
        try:
            await self._room.acquire()
        finally:
            self.queued -= 1
        try:
            while self.is_holding:
                await self._admit.wait()
            yield
        finally:
            self._room.release()

    @contextmanager
    def open(self, stream: Stream) -> Iterator[None]:
        """Keep `stream` in `streams` until exit."""
        if not self.streams:
            self.last_event = time.monotonic()
        self.streams.add(stream)
        try:
            yield
        finally:
            self.streams.discard(stream)
            self.stream_ended.set()

    @property
    def is_holding(self) -> bool:
        """Whether no request may begin."""
        return not self._admit.is_set()

    @contextmanager
    def hold_requests(self) -> Iterator[None]:
        """Let no request begin until exit."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Let no request begin until a `release` for each `hold`."""
        self._holds += 1
        if not self._ended:
            self._admit.clear()

    def release(self) -> None:
        """See `hold`."""
        self._holds -= 1
        if not self._holds:
            self._admit.set()

    def end(self) -> None:
        """Stop holding, so that waiting requests fail: the server is dead."""
        self._ended = True
        self._admit.set()

    def measure_silence(self) -> float:
        """Seconds without events while the server had requests."""
        if not self.streams or self.is_holding:
            self.last_event = time.monotonic()
        return time.monotonic() - self.last_event


class Adapter(NamedTuple):
    """An adapter at the server."""

    name: str
    version: int
    checksum: str


class ServedWeights(Engine):
    """Weights of a vLLM engine: full ones are replaced in place, adapters served in parallel.

    The server is paused while weights change, and asleep while others use its GPU; requests stay and continue
    afterwards. At vLLM's sleep level 1 weights and adapters move to host memory, and the KV cache is recomputed. Level
    2 would save the copy, but lose values that vLLM derives from weights, in no file.
    """

    def __init__(
        self, server: VllmServer, traffic: Traffic, policy: str, model: Path, checksum: str, most_adapters: int
    ) -> None:
        """Track a server that serves `model` as version 0 under the name `policy`."""
        self.server = server
        self.adapters: list[Adapter] = []
        """Oldest first; new requests use the last one."""
        self.full = weights.PublishedWeights(model, 0, checksum)
        """Full weights."""
        self._slept_seconds = {"sleep_seconds": 0.0, "wake_seconds": 0.0}
        self._asleep = False
        self._traffic = traffic
        self._policy = policy
        self._layout = {name: tensor.shape for name, tensor in weights.read_headers(model).items()}
        self._most_adapters = most_adapters
        self._loading = asyncio.Lock()

    @property
    def version(self) -> int:
        """Version of the newest weights."""
        return self.adapters[-1].version if self.adapters else self.full.version

    def make_stream(self, version: int | None = None) -> Stream:
        """Create a request to the newest weights or `version`. Raises `EngineFault` if not served."""
        for each in (*reversed(self.adapters), Adapter(self._policy, self.full.version, self.full.checksum)):
            if version in (None, each.version):
                return Stream(each.name, each.version, f"{each.version}-{each.checksum[:16].lower()}")
        raise EngineFault(f"version {version} is not served any more")

    async def serve_initial(self, stale_adapters: Sequence[str] | None) -> None:
        """Make the server serve version 0.

        On a joined server, adapters of an earlier run are unloaded, and the model is reloaded; None: it was started
        here.
        """
        if stale_adapters is None:
            await self.server.call("POST", "/update_weight_version", body={"new_version": "0"})
            return
        for name in stale_adapters:
            await self._unload(name)
        async with self._loading:
            await self._replace(*self.full)

    async def load(self, path: Path, version: int, checksum: str) -> int:
        """See `Engine.load`."""
        async with self._loading:
            self.server.require_alive()
            async with self._ensure_awake():
                if self.adapters and not weights.is_adapter(path):
                    raise EngineFault("adapters are served: the weights below them cannot change")
                if weights.is_offer(path):
                    await self._receive(path, checksum)
                else:
                    await asyncio.to_thread(weights.verify_checksum, path, checksum)
                if weights.is_adapter(path):
                    if self._asleep:  # first: an adapter may wait for requests to end
                        await self._wake_completely()
                    await self._serve_adapter(path, version, checksum)
                else:
                    await self._replace(path, version, checksum)
            return version

    async def sleep(self) -> None:
        """See `Engine.sleep`; a server that fails to sleep or wake is ended, since it may still hold GPU memory."""
        async with self._loading:
            self.server.require_alive()
            if self._asleep:
                return
            self._traffic.hold()
            self._asleep = True
            self._slept_seconds = dict.fromkeys(self._slept_seconds, 0.0)
            began = time.monotonic()
            await self._call_or_end("/sleep", {"level": "1", "mode": "keep"})
            self._slept_seconds["sleep_seconds"] = time.monotonic() - began

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._loading:
            self.server.require_alive()
            async with self._ensure_awake():
                pass

    async def receivers(self) -> tuple[int, float]:
        """Number of workers, which all receive an offer's weights, and seconds of silence that count as a hang."""
        world = json.loads(await self.server.call("GET", "/get_world_size"))["world_size"]
        return int(world), self.server.patience

    def read_version_ranges(
        self, stream: Stream, spans: Sequence[Mapping[str, Any]], count: int
    ) -> list[tuple[int, int, int]]:
        """Ranges ``(version, start, end)`` of a request's tokens. Raises `ServerLost` for an unexpected version."""
        if stream.model != self._policy:  # an adapter: the server reports the version of the full weights
            return [(stream.version, 0, count)]
        try:
            ranges = [(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
        except ValueError:  # "default" until a version is set
            raise ServerLost(
                f"the server reports versions {list(spans)} for version {stream.version}: it was restarted",
            ) from None
        if not stream.straddles and {version for version, _, _ in ranges} - {stream.version}:
            raise ServerLost(
                f"the server reports versions {ranges} for version {stream.version}: another program loads weights"
            )
        return ranges

    def explain_restart(self, stream: Stream, refusal: RequestRejected) -> ServerLost | None:
        """Return the fault if the server was restarted and lost the request's weights."""
        if refusal.status != 404:
            return None
        kind = "model" if stream.model == self._policy else "adapter"
        return ServerLost(
            f"the server has no {kind} {stream.model} any more: {refusal}",
            fix="it was restarted, or another run uses it; this run joins it again, and loads its weights",
        )

    async def _receive(self, offer: Path, checksum: str) -> None:
        self._check_layout(offer)
        receivers, patience = await self.receivers()
        arguments = [str((offer / weights.OFFER).resolve()), receivers, patience, checksum]
        body = {"method": "receive_policy", "args": arguments}
        with self._traffic.hold_requests():  # a server that receives does not sample
            try:  # workers give up after at most 2 * patience
                answer = await self.server.call("POST", "/collective_rpc", body=body, seconds=3 * patience)
            except asyncio.CancelledError:
                self.server.mark_dead("a load was cancelled while the workers received weights")
                raise
        workers = json.loads(answer)["results"]
        if errors := [worker["error"] for worker in workers if "error" in worker]:
            raise EngineFault(
                f"the weights did not arrive, and version {self.version} is served as before: {errors[0]}"
            )
        if wrong := [worker["checksum"] for worker in workers if worker["checksum"] != checksum]:
            raise EngineFault(f"the weights have checksum {wrong[0]}, not {checksum}: version {self.version} stays")

    async def _replace(self, path: Path, version: int, checksum: str) -> None:
        """Replace the full weights while requests are held; restore the old ones after a refusal."""
        await asyncio.to_thread(self._check_layout, path)
        with self._traffic.hold_requests():
            for stream in self._traffic.streams:
                stream.straddles = True
            try:
                if self._asleep:
                    await self._wake_parts("weights")
                else:
                    await self.server.call("POST", "/pause", query={"mode": "keep"})
                refused = await self._swap_or_roll_back(path, version, checksum)
                if self._asleep:
                    await self._wake_completely()
                else:
                    await self.server.call("POST", "/resume")
            except BaseException as error:  # also if cancelled: held requests must not continue
                await self.server.end(f"a load did not finish, so the served weights are unknown: {error!r}")
                raise
        if refused is not None:
            raise EngineFault(f"the server refused {path}, and serves version {self.version} again: {refused}")

    async def _swap_or_roll_back(self, path: Path, version: int, checksum: str) -> RequestRejected | None:
        try:
            await self._swap(path, version)
        except RequestRejected as refusal:
            old = self.full
            if weights.is_offer(old.path):
                raise EngineFault(f"{refusal}; no file of version {old.version} exists to go back to") from None
            await self._swap(old.path, old.version)
            # after loading, to show that the files had not changed
            await asyncio.to_thread(weights.verify_checksum, old.path, old.checksum)
            return refusal
        self.full = weights.PublishedWeights(path, version, checksum)
        return None

    async def _swap(self, path: Path, version: int) -> None:
        with _link_in_folder(path) as folder:
            body = {"method": "reload_policy", "args": [str(folder)]}
            if weights.is_offer(path):
                body = {"method": "load_received"}
            workers = json.loads(await self.server.call("POST", "/collective_rpc", body=body))["results"]
        if errors := [worker["error"] for worker in workers if "error" in worker]:
            raise RequestRejected(errors[0])
        # also of requests in flight, whose KV cache is recomputed with the new weights
        query = {"reset_running_requests": "true"}
        if not json.loads(await self.server.call("POST", "/reset_prefix_cache", query=query))["success"]:
            raise RequestRejected("the prefix cache could not be cleared")
        await self.server.call("POST", "/update_weight_version", body={"new_version": str(version)})

    def _check_layout(self, path: Path) -> None:
        # vLLM would keep the old values for other names or shapes, and only log it; a tied head may be stored, too
        weights.check_layout(path, weights.read_headers(path), self._layout, optional="lm_head.weight")

    async def _serve_adapter(self, path: Path, version: int, checksum: str) -> None:
        if not self._most_adapters:
            raise EngineFault("the server was started without adapters", fix="set engine.options.lora_rank")
        await asyncio.to_thread(weights.read_headers, path)
        adapter = Adapter(f"{self._policy}-v{version}", version, checksum)
        if adapter in self.adapters[-1:]:  # from a restarted learner
            return
        if any(served.version == version for served in self.adapters):
            raise EngineFault(f"{adapter.name} is served already: a version names one adapter")
        await self._free_adapter_slot()
        try:
            body = {"lora_name": adapter.name, "lora_path": str(path.resolve())}
            await self.server.call("POST", "/v1/load_lora_adapter", body=body)
        except RequestRejected as refusal:
            raise EngineFault(
                f"the server refused the adapter {path} of rank {weights.read_adapter_rank(path)}: {refusal}",
                fix="engine.options.lora_rank is the largest that it takes",
            ) from None
        except BaseException:  # also if cancelled: it would stay loaded
            with suppress(EngineFault):  # it may not be there yet
                await self._unload(adapter.name)
            raise
        self.adapters.append(adapter)

    async def _free_adapter_slot(self) -> None:
        """Unload the oldest unused adapter, or wait for requests to end."""
        patience = self.server.patience
        deadline = asyncio.get_running_loop().time() + patience
        while len(self.adapters) >= self._most_adapters:
            self._traffic.stream_ended.clear()
            used = {stream.model for stream in self._traffic.streams}
            # vLLM itself would drop an adapter that is in use
            if idle := [adapter for adapter in self.adapters[:-1] if adapter.name not in used]:
                await self._unload(idle[0].name)
                self.adapters.remove(idle[0])
                continue
            try:
                async with asyncio.timeout_at(deadline):
                    await self._traffic.stream_ended.wait()
            except TimeoutError:
                raise EngineFault(
                    f"{len(self.adapters)} adapters are in use after {patience:.0f} s",
                    fix="raise engine.options.max_loras",
                ) from None

    async def _wake_completely(self) -> None:
        """Wake, and continue kept requests; new ones begin after `_ensure_awake`. Raises `ServerLost`."""
        answer = await self._wake_parts()
        if json.loads(answer)["status"] != "awake":
            await self.server.end(reason := f"the server did not wake up: {answer}")
            raise ServerLost(reason)
        self._asleep = False

    async def _wake_parts(self, *tags: str) -> str:
        began = time.monotonic()
        answer = await self._call_or_end("/wake_up", [("tags", tag) for tag in tags])
        self._slept_seconds["wake_seconds"] += time.monotonic() - began
        return answer

    async def _call_or_end(self, path: str, query: Query) -> str:
        try:
            return await self.server.call("POST", path, query=query)
        except BaseException as error:  # also if cancelled
            reason = f"the server failed to {path.strip('/').replace('_', ' ')}: {str(error) or repr(error)}"
            await self.server.end(reason)
            if isinstance(error, EngineFault):
                raise ServerLost(reason) from error
            raise

    @asynccontextmanager
    async def _ensure_awake(self) -> AsyncIterator[None]:
        """Ensure on exit that a sleeping server is awake or dead, and release new requests."""
        slept = self._asleep
        try:
            yield
        finally:
            try:
                if self._asleep and self.server.is_alive:
                    await self._wake_completely()
            finally:
                if slept:
                    self._traffic.release()

    async def _unload(self, name: str) -> None:
        await self.server.call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})


@contextmanager
def _link_in_folder(path: Path) -> Iterator[Path]:
    """Yield a folder that holds a link to the file `path`, since vLLM reads folders only; a folder as it is."""
    if path.is_dir():
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        Path(folder, "model.safetensors").symlink_to(path.resolve())
        yield Path(folder).resolve()
