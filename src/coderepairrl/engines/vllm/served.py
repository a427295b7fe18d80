"""The weights that a vLLM server serves, and replacing them."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coderepairrl.engines.vllm.link import Link
from coderepairrl.engines.vllm.server import Gone, Refused
from coderepairrl.engines.vllm.suspension import Suspension
from coderepairrl.engines.vllm.traffic import Stream, Traffic
from coderepairrl.errors import EngineFault
from coderepairrl.sync import weights

Agree = Callable[[], Awaitable[bool]]
"""Waits until other servers have new weights, too; False where one has not, and they are to be given up."""
_POLL_SECONDS = 0.1
"""Seconds between two looks at what others have at the server."""
_REFUSED_ELSEWHERE = "another server of this engine refused them"


async def always_agree() -> bool:
    """The verdict where there is no other server."""
    return True


def prefix_of(policy: str, tenant: str) -> str:
    """What the names of a run's adapters on the model `policy` begin with, at a server that others use.

    >>> prefix_of("policy", "7c5e")
    'policy-7c5e-v'
    """
    return f"{policy}-{tenant}-v"


class ServedWeights:
    """Full weights, which are replaced in place, and adapters on them, which are served side by side."""

    def __init__(
        self,
        link: Link,
        traffic: Traffic,
        policy: str,
        model: Path,
        checksum: str,
        most_adapters: int,
        tenant: str | None = None,
    ) -> None:
        """`policy` is the server's name for the folder `model`, which it serves as version 0. Where others use it, too,
        its weights stay as they are, and `tenant` is in the names of the adapters that are ours."""
        self.version = 0
        self._link = link
        self._traffic = traffic
        self._policy = policy
        self._layout = weights.tensors(model)
        self._full = (model, checksum)
        """Path and checksum of the full weights at the server."""
        self._full_version = 0
        """Version of the full weights."""
        self._most_adapters = most_adapters
        self._shared = tenant is not None
        self._adapter_prefix = f"{policy}-v" if tenant is None else prefix_of(policy, tenant)
        self._adapters: list[str] = []
        """Names at the server, oldest first; new requests use the last one."""
        self._checksum = ""
        """Of the newest adapter."""
        self.suspension = Suspension(link, traffic)
        self._loading = asyncio.Lock()

    @property
    def model(self) -> str:
        """The server's name for the newest weights."""
        return self._adapters[-1] if self._adapters else self._policy

    @property
    def checksum(self) -> str:
        """Of the newest weights: the adapter's, or those of the full ones where there is none."""
        return self._checksum if self._adapters else self._full[1]

    @property
    def adapters(self) -> int:
        """Number of adapters at the server."""
        return len(self._adapters)

    async def begin(self, left: Sequence[str] | None) -> None:
        """Make the server serve version 0. A server of our own (`left` is None) only has to label it so.

        From one that was joined, adapters `left` by an earlier run are unloaded, and the model is loaded again; from
        one that others use those alone that are left of this run.
        """
        if self._shared:
            for name in left or ():
                if name.startswith(self._adapter_prefix):
                    await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})
        if self._shared or left is None:
            await self._link.post("/update_weight_version", body={"new_version": "0"})
            return
        for name in left:
            await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})
        async with self._loading:
            await self._replace(self._full[0], 0, self._full[1], always_agree)

    async def load(self, path: Path, version: int, checksum: str, agree: Agree) -> int:
        """See `VllmEngine.load`."""
        async with self._loading:
            self._link.require_alive()
            async with self.suspension.awake_at_end():
                if weights.is_offer(path):
                    await self._receive(path, checksum)
                else:
                    await asyncio.to_thread(weights.verify, path, checksum)
                if weights.is_adapter(path):
                    if self.suspension.asleep:  # first, for it may have to wait for requests to end
                        await self.suspension.wake()
                    await self._serve_adapter(path, version, checksum, agree)
                else:
                    await self._replace(path, version, checksum, agree)
            return version

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        async with self._loading:
            self._link.require_alive()
            if not self.suspension.asleep:
                await self.suspension.sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        async with self._loading:
            self._link.require_alive()
            async with self.suspension.awake_at_end():
                pass

    async def receivers(self) -> int:
        """Workers of the server, all of which take the weights of an offer."""
        self._link.require_alive()
        return int(json.loads(await self._link.call("GET", "/get_world_size"))["world_size"])

    def versions(self, stream: Stream, spans: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, int, int]]:
        """Ranges ``(version, start, end)`` of a finished request's tokens. Raises `Gone` for an unexpected version."""
        if stream.model != self._policy:  # an adapter: the server reports the version of the full weights
            return [(stream.version, 0, count)]
        try:
            ranges = [(int(span["version"]), int(span["start"]), int(span["end"])) for span in spans]
        except ValueError:  # "default", until we label them
            raise Gone(
                f"the server has {list(spans)} for a request of version {stream.version}: it was started anew",
            ) from None
        if not stream.straddles and {version for version, _, _ in ranges} - {stream.version}:
            raise Gone(f"the server has {ranges} for a request of version {stream.version}: who else loads weights?")
        return ranges

    def stale(self, stream: Stream, refusal: Refused) -> Gone | None:
        """The fault where a request was refused because what it samples from is gone: the server was started anew, and
        has to be joined again."""
        if refusal.status != 404:
            return None
        kind = "model" if stream.model == self._policy else "adapter"
        return Gone(
            f"the server has no {kind} {stream.model} any more, which was there: {refusal}",
            fix="has it been started anew, or does another run unload adapters? Each that uses it needs"
            " engine.options.shared=true; the server is joined again, and given the weights",
        )

    async def leave(self) -> None:
        """Unload our adapters from a server that others use."""
        if self._shared and self._link.alive:
            for name in self._adapters:
                with suppress(EngineFault):  # it has just died, and nothing is left to unload
                    await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})

    async def _receive(self, offer: Path, checksum: str) -> None:
        """Let the workers receive the offered weights into memory. If it fails, they serve as before."""
        self._require_exclusive()
        if self._adapters:
            raise EngineFault("adapters are served: the weights below them cannot change")
        self._check_layout(offer)
        arguments = [str((offer / weights.OFFER).resolve()), await self.receivers(), self._link.patience, checksum]
        body = {"method": "receive_policy", "args": arguments}
        with self._traffic.held():  # a server that receives does not sample
            try:  # workers give up after at most twice that
                answer = await self._link.call("POST", "/collective_rpc", body=body, seconds=3 * self._link.patience)
            except asyncio.CancelledError:
                self._link.die("a load was called off while the workers received")
                raise
        workers = json.loads(answer)["results"]
        if errors := [worker["error"] for worker in workers if "error" in worker]:
            raise EngineFault(
                f"the weights did not arrive, and version {self._full_version} is served as before: {errors[0]}"
            )
        if wrong := [worker["checksum"] for worker in workers if worker["checksum"] != checksum]:
            raise EngineFault(
                f"what arrived has checksum {wrong[0]}, not {checksum}: version {self._full_version} stays"
            )

    async def _replace(self, path: Path, version: int, checksum: str, agree: Agree) -> None:
        """Replace the full weights while requests are held. After a refusal the old weights are restored first."""
        self._require_exclusive()
        if self._adapters:
            raise EngineFault("adapters are served: the weights below them cannot change")
        await asyncio.to_thread(self._check_layout, path)
        with self._traffic.held():
            for stream in self._traffic.streams:
                stream.straddles = True
            try:
                await self.suspension.pause()
                refused = await self._swap_or_roll_back(path, version, checksum, agree)
                await self.suspension.resume()
            except BaseException as error:  # also if cancelled: held requests must not continue
                self._link.die(f"a load did not come to an end, so nobody knows what is served: {error!r}")
                await self._link.server.close(grace=0.0)
                raise
        if refused is not None:
            raise EngineFault(f"the server refused {path}, and serves version {self._full_version} again: {refused}")

    async def _swap_or_roll_back(self, path: Path, version: int, checksum: str, agree: Agree) -> Refused | None:
        """Swap; a refusal is returned after the old weights are restored. Raises `EngineFault` if they cannot be."""
        try:
            await self._swap(path, version)
            if not await agree():
                raise Refused(_REFUSED_ELSEWHERE)
        except Refused as refusal:
            if weights.is_offer(self._full[0]):
                raise EngineFault(
                    f"{refusal}; no file of version {self._full_version} is there to go back to"
                ) from None
            await self._swap(self._full[0], self._full_version)
            await asyncio.to_thread(weights.verify, *self._full)  # only now: what was read must be unchanged
            return refusal
        self._full, self._full_version, self.version = (path, checksum), version, version
        return None

    async def _swap(self, path: Path, version: int) -> None:
        with _as_folder(path) as folder:
            body = {"method": "reload_policy", "args": [str(folder)]}
            if weights.is_offer(path):
                body = {"method": "load_received"}
            workers = json.loads(await self._link.call("POST", "/collective_rpc", body=body))["results"]
        if errors := [worker["error"] for worker in workers if "error" in worker]:
            raise Refused(errors[0])
        # the keys of requests in flight, too: they are recomputed with the new weights
        query = {"reset_running_requests": "true"}
        if not json.loads(await self._link.call("POST", "/reset_prefix_cache", query=query))["success"]:
            raise Refused("the prefix cache could not be cleared")
        await self._link.call("POST", "/update_weight_version", body={"new_version": str(version)})

    def _check_layout(self, path: Path) -> None:
        """Raise `EngineFault` for other names or shapes: vLLM would keep the old values and only log it."""
        offered = weights.tensors(path)
        extra = {"lm_head.weight"}  # a tied head may be stored a second time
        if wrong := sorted((self._layout.keys() ^ offered.keys()) - extra):
            raise EngineFault(f"{path} is another model: {'lacks' if wrong[0] in self._layout else 'adds'} {wrong[0]}")
        for name, tensor in offered.items():
            if name in self._layout and tensor.shape != self._layout[name].shape:
                raise EngineFault(f"{path}: {name} is {tensor.shape}, not {self._layout[name].shape}")

    async def _serve_adapter(self, path: Path, version: int, checksum: str, agree: Agree) -> None:
        """Load an adapter beside those in use; nothing to do if it is the newest one (from a restarted learner)."""
        if not self._most_adapters:
            raise EngineFault("the server was started without adapters", fix="set engine.options.lora_rank")
        await asyncio.to_thread(weights.tensors, path)
        stem = f"{self._adapter_prefix}{version}"
        # where others use the server, its cache outlives a run, which may begin anew with other weights in this version
        name = f"{stem}-{checksum[:8].lower()}" if self._shared else stem
        if name in self._adapters[-1:] and checksum == self._checksum:
            return
        if any(f"{there}-".startswith(f"{stem}-") for there in self._adapters):
            raise EngineFault(f"{stem} is served already: a version names one adapter")
        try:
            await self._load_adapter(name, path)
            if not await agree():
                raise EngineFault(f"{path} is not served: {_REFUSED_ELSEWHERE}")
        except BaseException:  # also if cancelled: nobody would unload it
            with suppress(EngineFault):  # it may not be there yet
                await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})
            raise
        self._adapters.append(name)
        self.version, self._checksum = version, checksum

    async def _load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter as soon as there is room for it. Raises `EngineFault` when the server refuses it.

        vLLM refuses none for lack of room: it drops what was used least recently, and reads that again when a request
        wants it, from files that may be gone by then. So nobody loads without having seen room, and whose adapter came
        after the last place was taken by another run that had seen the same takes it back. The server lists adapters in
        the order in which they came, the same to all: one of two always stays.
        """
        deadline, stale = asyncio.get_running_loop().time() + self._link.patience, False
        while True:
            await self._free_adapter_slot(deadline)
            body = {"lora_name": name, "lora_path": str(path.resolve())}
            try:
                await self._link.post("/v1/load_lora_adapter", body=body)
            except Refused as refusal:
                # a process of this run that was killed while it loaded: the server went on, after `begin` had looked
                if self._shared and not stale and name in (await self._link.models())[1]:  # else another's
                    stale = True
                    with suppress(Refused):  # it is gone by now
                        await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})
                    continue
                rank = weights.adapter_rank(path)
                raise EngineFault(
                    f"the server refused the adapter {path} of rank {rank}: {refusal}",
                    fix="engine.options.lora_rank is the largest that it takes",
                ) from None
            if not self._shared or name in (await self._link.models())[1][: self._most_adapters]:
                return
            await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})

    def _require_exclusive(self) -> None:
        if self._shared:
            raise EngineFault(
                "engine.options.shared: full weights would replace those that other runs sample from",
                fix="train.lora=true, or a server for each run",
            )

    async def _count_adapters(self) -> int:
        """Adapters there, those of others included."""
        if not self._shared:
            return len(self._adapters)
        _, adapters = await self._link.models()
        return len(adapters)

    async def _free_adapter_slot(self, deadline: float) -> None:
        """Unload adapters that no request uses; wait for requests to end while there are too many, where others use the
        server also for theirs, until `deadline` on the loop's clock."""
        while True:
            self._traffic.fewer.clear()
            used = {stream.model for stream in self._traffic.streams}
            for name in [name for name in self._adapters[:-1] if name not in used]:
                await self._link.post("/v1/unload_lora_adapter", body={"lora_name": name})
                self._adapters.remove(name)
            if (there := await self._count_adapters()) < self._most_adapters:
                return
            try:
                async with asyncio.timeout_at(deadline):
                    if self._shared:
                        await asyncio.sleep(_POLL_SECONDS)
                    else:
                        await self._traffic.fewer.wait()
            except TimeoutError:
                of_others = f", {there - len(self._adapters)} of them of other runs," if self._shared else ""
                raise EngineFault(
                    f"{there} adapters{of_others} are in use after {self._link.patience:.0f} s",
                    fix="start the server with --max-loras, two for each run"
                    if self._shared
                    else "raise engine.options.max_loras",
                ) from None


@contextmanager
def _as_folder(path: Path) -> Iterator[Path]:
    """A folder for vLLM, which reads no single files: with a link to the file, beside it, where the server sees it."""
    if path.is_dir():
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as folder:
        Path(folder, "model.safetensors").symlink_to(path.resolve())
        yield Path(folder).resolve()
