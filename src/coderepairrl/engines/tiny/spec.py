"""Options of the tiny engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from coderepairrl.engines.options import check_positive, check_whole
from coderepairrl.engines.tiny.client import TinyEngine
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.processes.children import Child, ChildDied
from coderepairrl.processes.extras import require_train
from coderepairrl.protocols import EngineSpec
from coderepairrl.sync import weights

SERVER = "coderepairrl.engines.tiny.server"


@dataclass(frozen=True, kw_only=True)
class Tiny(EngineSpec):
    """A dense Llama-like model on a CPU, in fp32. Raises `ConfigError` for invalid options."""

    context: int | None = None
    """Longest sequence in tokens; the model's own limit if None."""
    slots: int = 64
    """Sequences in the cache at most, running ones and those kept for their next turn."""
    kv_gib: float = 2.0
    """Memory for keys and values; fewer slots are used when `slots` would exceed it."""

    threads: int = 1
    """Two threads that compete for a core are four times slower than one: more than one on an idle machine only."""

    name = "tiny"
    engine: ClassVar[type[TinyEngine]] = TinyEngine
    """The class that `start` returns."""

    def __post_init__(self) -> None:
        check_whole(vars(self), "context", 2)
        check_whole(vars(self), "slots", 1)
        check_whole(vars(self), "threads", 1)
        check_positive(vars(self), "kv_gib")

    def check_model(self, model: Path) -> None:
        """Raise `ConfigError` for an unsupported model, or without room for a sequence."""
        self._room(ModelConfig.read(model))

    def require(self) -> None:
        """Raise `PrerequisiteError` without torch."""
        require_train()

    async def start(self, model: Path, *, log_dir: Path) -> TinyEngine:
        """See `EngineSpec.start`; the child writes ``engine.log``. Raises `ConfigError` without weights."""
        self.require()
        config = ModelConfig.read(model)
        try:
            weights.files(model)
        except EngineFault as fault:
            raise ConfigError(
                str(fault), fix=fault.fix or "create random weights first (model.init=random), or download the model"
            ) from None
        context, slots = self._room(config)
        sizes = {"slots": slots, "context": context, "threads": self.threads}
        arguments = [str(model.resolve()), *(word for name, size in sizes.items() for word in (f"--{name}", str(size)))]
        child = await Child.spawn(SERVER, arguments, log=log_dir / "engine.log")
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

    def _room(self, config: ModelConfig) -> tuple[int, int]:
        """Longest sequence, and how many of that length fit."""
        context = config.context if self.context is None else self.context
        if context > config.context:
            raise ConfigError(
                f"engine.options.context={context}: the model's positions reach to {config.context} tokens"
            )
        fitting = min(self.slots, int(self.kv_gib * 2**30) // (config.kv_bytes * context))
        if fitting < 1:
            need = config.kv_bytes * context / 2**30
            raise ConfigError(
                f"engine.options.kv_gib={self.kv_gib}: one sequence of {context} tokens needs {need:.2f} GiB of keys "
                "and values",
                fix="lower engine.options.context, or raise engine.options.kv_gib",
            )
        return context, fitting
