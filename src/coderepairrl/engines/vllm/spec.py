"""The options of the vLLM engine, and how a server is started or joined."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from coderepairrl.engines.vllm.client import VllmEngine, vocabulary
from coderepairrl.engines.vllm.fleet import Fleet
from coderepairrl.engines.vllm.hosted import POLICY, Hosted, join, tenant_of
from coderepairrl.engines.vllm.link import Link
from coderepairrl.engines.vllm.options import MAX_LORAS, SLOTS, addresses, arguments, check, enough, parse
from coderepairrl.engines.vllm.places import UNIX, version_at
from coderepairrl.engines.vllm.server import (
    SLEEP,
    VllmServer,
    check_routes,
    check_version,
    default_python,
    installed,
)
from coderepairrl.engines.vllm.settings import ServerSettings
from coderepairrl.errors import ConfigError, EngineFault, PrerequisiteError
from coderepairrl.protocols import EngineSpec
from coderepairrl.sync import weights

_OF_A_RUN = ("slots", "lora_rank", "start_seconds", "patience")
"""Options of a run that mean something at a server that it joins."""


class _Model(NamedTuple):
    """The model of a server, as it reports it."""

    name: str
    context: int
    root: str
    """Its folder, as the server knows it."""


@dataclass(frozen=True, kw_only=True)
class Vllm(EngineSpec):
    """A vLLM server, started here or joined. Raises `ConfigError` for invalid options."""

    url: str | Sequence[str] = ""
    """Join the server there, which runs with the same settings (docs/guides/engines.md) and sees the same files; of
    several, each has a part of the requests; one that is lost is joined again when it is back, and until then the
    others have its part."""
    shared: bool = False
    """Other runs use the server at `url` at the same time: only adapters are sent, under names of this run."""
    affinity: bool = True
    """Of several servers, the one that was sent the longest part of a prompt has it, if it is not much busier than the
    others; else the least busy one."""
    python: str = ""
    """Interpreter that has vLLM; that of ``make vllm-cpu`` or this one if empty."""
    args: Sequence[str] = ()
    """More arguments for the server, for example ``["--tensor-parallel-size", "2"]``."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More environment variables for it, for example ``{NCCL_DEBUG = "INFO"}``."""
    context: int | None = None
    """Longest sequence in tokens; the model's own limit if None."""
    slots: int = SLOTS
    """Requests at the server at once; further ones wait here."""
    dtype: str = "auto"
    """Type of its computations; ``auto`` is that of the weights in the model's folder."""
    head: str = ""
    """Type of the logits: ``fp32`` as in the learner, or that of the ``model``. Empty is ``fp32`` for a server that is
    started here, and unspecified for one that is joined."""
    lora_rank: int | None = None
    """Largest rank of an adapter that can be loaded, 0 for no adapters. None is the rank that the run needs."""
    max_loras: int = MAX_LORAS
    """Adapters at the server at once, the new one included."""
    sleeps: bool = False
    """Start it so that it can be put to sleep, as ``engine.share_devices=turns`` does."""
    start_seconds: float = 600.0
    """Time limit for its start."""
    patience: float = 300.0
    """Seconds without an answer, with requests open, after which it counts as hung."""

    name = "vllm"

    def __post_init__(self) -> None:
        check(vars(self))

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the servers that are joined; none where one is started."""
        return addresses(self.url)

    @property
    def servers(self) -> int:
        """How many share the requests."""
        return max(1, len(self.urls))

    @property
    def receives(self) -> bool:
        """Whether it takes full weights without a file: one server does, several do not."""
        return len(self.urls) < 2

    @property
    def adapters(self) -> bool:
        """Whether it takes adapters."""
        return bool(self.lora_rank)

    @property
    def takes_gpus(self) -> bool:
        """True for a server that is started here."""
        return not self.url

    @property
    def exclusive(self) -> bool:
        """True but for a server that is shared."""
        return not self.shared

    def with_adapters(self, rank: int) -> Vllm:
        """See `EngineSpec.with_adapters`. With ``lora_rank = 0`` merged weights are sent instead."""
        if self.lora_rank is None:
            enough(rank)
            return replace(self, lora_rank=rank)
        if 0 < self.lora_rank < rank:
            raise ConfigError(
                f"adapters of rank {rank}, and engine.options.lora_rank={self.lora_rank}",
                fix="leave engine.options.lora_rank out, or set it to 0 to send merged weights",
            )
        return self

    def with_sleep(self) -> Vllm:
        """See `EngineSpec.with_sleep`."""
        if self.url:
            raise ConfigError(
                "engine.share_devices=turns, and engine.options.url joins a server that others may use",
                fix="leave engine.options.url out, so that it is started here, or engine.share_devices=false",
            )
        return replace(self, sleeps=True)

    def on_gpus(self, visible: str) -> Vllm:
        """See `EngineSpec.on_gpus`."""
        return replace(self, env={**self.env, "CUDA_VISIBLE_DEVICES": visible})

    def require(self) -> None:
        """Raise `PrerequisiteError` if a server is to be started and vLLM is missing or of an unsupported version."""
        if not self.url:
            installed(self.python or default_python(), self.env)

    def versions(self) -> dict[str, str]:
        """Version of vLLM: of the package, or as the servers at `url` report it."""
        if self.urls:
            return {"vllm": ", ".join(dict.fromkeys(map(version_at, self.urls)))}
        package, version = installed(self.python or default_python(), self.env)
        return {"vllm": version if package == "vllm" else f"{version} ({package})"}

    def joining(self, address: Path) -> Mapping[str, Any]:
        """See `EngineSpec.joining`."""
        if self.url:
            raise ConfigError(
                "engine.options.url joins a server, and one is to be started for several runs",
                fix="leave engine.options.url and engine.options.shared out",
            )
        if self.lora_rank == 0:
            raise ConfigError(
                "engine.options.lora_rank=0 sends full weights, which the other runs at a server would get",
                fix="leave engine.options.lora_rank out, or take a server for each run",
            )
        unset = {each.name: each.default for each in fields(self)}
        own = {key: value for key in _OF_A_RUN if (value := getattr(self, key)) != unset[key]}
        return {"url": f"{UNIX}{address}", "shared": True, **own}

    async def share(
        self,
        model: Path,
        *,
        runs: int,
        train: bool,
        address: Path,
        log_dir: Path,
        restarts: int,
        say: Callable[[str], None],
    ) -> Hosted:
        """See `EngineSpec.share`. A run that trains has `max_loras` adapters at once, any other one."""
        self.joining(address)
        _check_folder(model)
        adapters = max(2, runs * (self.max_loras if train else 1))
        more = list[str]()
        if not any(given.means("--max-cpu-loras") for given in parse(self.args)):
            # each run may have one too many there for a moment, and vLLM would drop another that is in use
            more = ["--max-cpu-loras", str(adapters + runs)]

        async def start() -> VllmServer:
            return await self._serve(model, log_dir, adapters, more)

        return await Hosted.at(address, start, restarts=restarts, patience=self.patience, say=say)

    async def start(self, model: Path, *, log_dir: Path) -> VllmEngine | Fleet:
        """As `EngineSpec.start`; a server of our own writes ``engine.log``.

        Raises `PrerequisiteError` if vLLM is missing or of an unsupported version, or a server lacks a route, and
        `ConfigError` for several servers with different settings, and for one that does not take the run's adapters.
        """
        _check_folder(model)
        checksum = await asyncio.to_thread(weights.checksum, model)
        if len(self.urls) > 1:
            return await self._join_all(model, checksum)
        if self.urls:
            server = await join(self.urls[0], self.start_seconds)
        else:
            server = await self._serve(model, log_dir, self.max_loras)
        return await self._engine(server, model, checksum, tenant_of(log_dir) if self.shared else None)

    async def _engine(self, server: VllmServer, model: Path, checksum: str, tenant: str | None = None) -> VllmEngine:
        """An engine of `server`, which is closed if that fails; where others use it, `tenant` is in the names of its
        adapters."""
        try:
            link, joined = Link(server, self.patience), bool(self.urls)
            served, adapters = await _model_of(link, joined=joined)
            most = self.max_loras if self.adapters else 0
            if most and tenant is None and len(self.urls) == 1:
                with suppress(PrerequisiteError):  # it does not say: it refuses adapters when they come
                    found = await ServerSettings.of(server, self.patience)
                    found.check(found, rank=self.lora_rank or 0)
            if tenant is not None:
                await _check_same(server, served, model, checksum)
                if most:
                    found = await ServerSettings.of(server, self.patience)
                    found.check_lora_slots(self.lora_rank or 0)
                    most = found.adapters
            engine = VllmEngine(
                link,
                model,
                checksum,
                policy=served.name,
                context=served.context,
                slots=self.slots,
                max_loras=most,
                tenant=tenant,
            )
            try:
                await engine.begin(adapters if joined else None)
            except BaseException:
                await engine.close()
                raise
            return engine
        except BaseException:
            await server.close()
            raise

    async def _join_all(self, model: Path, checksum: str) -> Fleet:
        """All servers, the settings of which are the same: those of the first, with room for the adapters."""
        settings: list[ServerSettings] = []

        async def join(url: str) -> VllmEngine:
            server = VllmServer.at(url)
            try:
                await check_version(server, self.patience)
                await check_routes(server, self.patience)
                found = await ServerSettings.of(server, self.patience)
                found.check((settings or [found])[0], rank=self.lora_rank or 0)
            except BaseException:
                await server.close()
                raise
            settings.append(found)
            return await self._engine(server, model, checksum)

        engines: dict[str, VllmEngine] = {}
        try:
            for url in self.urls:
                engines[url] = await join(url)
            return Fleet(engines, join, affinity=self.affinity)
        except BaseException:
            await asyncio.gather(*(engine.close() for engine in engines.values()), return_exceptions=True)
            raise

    async def _serve(self, model: Path, log_dir: Path, adapters: int, more: Sequence[str] = ()) -> VllmServer:
        lora = (self.lora_rank or 0, adapters)
        own = arguments(
            model, POLICY, context=self.context, slots=self.slots, dtype=self.dtype, head=self.head, lora=lora
        )
        own += [SLEEP] * self.sleeps
        log, python, given = log_dir / "engine.log", self.python or default_python(), [*own, *more, *self.args]
        if self.adapters and _mixture(model):
            package, _ = await asyncio.to_thread(installed, python, self.env)
            if package == "vllm-cpu":  # it starts, and dies of the first request
                raise ConfigError(
                    f"{model} is a mixture of experts, and vLLM's kernels for adapters on one are for GPUs alone",
                    fix="engine.options.lora_rank=0, which sends merged weights, or vLLM on a GPU",
                )
        return await VllmServer.start(python, given, log=log, env=self.env, seconds=self.start_seconds)


async def _model_of(link: Link, *, joined: bool) -> tuple[_Model, list[str]]:
    """The server's model, and the names of its adapters. Raises `PrerequisiteError` for an unsupported server."""
    if joined:
        await check_version(link.server, link.patience)
        await check_routes(link.server, link.patience)
    served, adapters = await link.models()
    try:
        return _Model(served["id"], served["max_model_len"], served.get("root", "")), adapters
    except KeyError as error:
        raise EngineFault(f"{link.server.where}/v1/models says nothing of {error}") from None


async def _check_same(server: VllmServer, served: _Model, model: Path, checksum: str) -> None:
    """Raise `ConfigError` where others sample from other weights than those of the folder `model`."""
    root = Path(served.root)
    same = root.resolve() == model.resolve()
    if not same and root.is_dir():
        same = await asyncio.to_thread(weights.checksum, root) == checksum
    if not same:
        raise ConfigError(
            f"{server.where} serves {served.root}, and the adapters of this run are on {model}",
            fix="start it with the folder that all runs begin with, and name that in model.path (model.init=random"
            " draws other weights for each seed)",
        )


def _mixture(model: Path) -> bool:
    """Whether the model in a folder has experts, by its config.json."""
    config = json.loads((model / "config.json").read_text("utf-8"))
    return any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _check_folder(model: Path) -> None:
    vocabulary(model)
    try:
        weights.tensors(model)
    except EngineFault as fault:
        raise ConfigError(str(fault), fix="create random weights first, or download the model") from None
