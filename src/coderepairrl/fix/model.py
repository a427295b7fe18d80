"""What ``--model`` names, and how it is served."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from coderepairrl import config as configs
from coderepairrl import engines, models, tokens
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError, Fault, GatewayFault, UsageError
from coderepairrl.gateway import Gateway
from coderepairrl.registry import nearest
from coderepairrl.runs import open_run
from coderepairrl.train.parts import limits
from coderepairrl.train.policy import checkpoints
from coderepairrl.types import Endpoint, Sampling

DEFAULTS = ("run.name=fix", "rollout.seconds=600", "rollout.tokens=32768")
"""For a model that no run tells us about: what one user waits for, not what a thousand episodes may cost."""
USED = (
    *("agent", "sandbox", "engine", "model.renderer", "model.thinking"),
    *("rollout.calls", "rollout.tokens", "rollout.seconds", "rollout.turn_tokens"),
    "rollout.history_policy",
)
"""Settings of a run that mean something here."""
_NAMES_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A model: a folder in Hugging Face layout, or an endpoint's base URL; and the settings it is used with."""

    config: Config
    folder: Path | None = None
    url: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return self.url or str(self.folder)


def choose(model: str, overrides: Sequence[str] = ()) -> Choice:
    """The model that `model` names: a run folder, a model folder, ``builtin:NAME``, or an OpenAI-compatible URL.

    A run brings its newest checkpoint and its own settings; a shipped model those of the shipped config that trains
    it. Raises `UsageError` when there is no such model, `ConfigError` for settings that are wrong or unused here.
    """
    for override in overrides:
        key, _ = configs.parse_override(override)
        if not any(key == used or key.startswith(f"{used}.") for used in USED):
            raise ConfigError(f"crrl fix has no use for {key}", fix=nearest(key, USED))
    if model.startswith(("http://", "https://")):
        if unused := [key for key, _ in map(configs.parse_override, overrides) if key.startswith(("engine", "model"))]:
            raise ConfigError(f"{unused[0]} is for models that are served here, not for {model}")
        return Choice(_default(overrides), url=model.rstrip("/"))
    path = Path(model).expanduser()
    if (path / "run.json").is_file():
        return Choice(configs.load(path, overrides), folder=_newest(path))
    folder = models.folder(model)
    if not any(folder.glob("*.safetensors")):
        raise UsageError(f"{folder} holds no weights", fix="a model has a *.safetensors; a run folder has a run.json")
    return Choice(_trainer_of(model, overrides) or _default(overrides), folder=folder)


@asynccontextmanager
async def served(
    choice: Choice, temperature: float, *, key_env: str | None = None, model_name: str = ""
) -> AsyncIterator[Endpoint]:
    """The model's endpoint while it is served: our own gateway in front of an engine, or the given URL.

    The endpoint of a URL carries the key in the environment variable `key_env` (OPENAI_API_KEY), which must exist
    if it is named. Raises `EngineFault` as soon as the block ends when it was the engine that failed the agent.
    """
    config = choice.config
    if choice.folder is None:
        key = _key(key_env)
        name = model_name or await _only_model(choice.url, key)
        yield Endpoint(choice.url, key, name, limits(config))
        return
    codec = tokens.load(choice.folder, renderer=config.model.renderer, thinking=config.model.thinking)
    sampling = Sampling(temperature=temperature, max_tokens=config.rollout.turn_tokens)
    with tempfile.TemporaryDirectory(prefix="crrl-fix-") as logs:
        engine = await engines.make(config.engine.name, choice.folder, log_dir=Path(logs), **config.engine.options)
        gateway = Gateway(
            codec,
            engine,
            sampling=sampling,
            on_turn=lambda episode, turn: None,
            history_policy=config.rollout.history_policy,
        )
        try:
            await gateway.start()
            session = gateway.open("fix", limits=limits(config), seed=0)
            try:
                yield session.endpoint
            except Fault as fault:  # the engine's death reaches the agent as an HTTP error: blame what broke first
                raise session.fault or fault from None
            if session.fault is not None:
                raise session.fault
        finally:
            await gateway.stop()
            await engine.close()


def _default(overrides: Sequence[str]) -> Config:
    return configs.validate(configs.parse_options([*DEFAULTS, *overrides]), "crrl fix")


def _trainer_of(model: str, overrides: Sequence[str]) -> Config | None:
    """The shipped config that trains this shipped model: it knows how an agent must speak to it."""
    trainers = (path for path in configs.shipped().values() if configs.load(path).model.path == model)
    return next((configs.load(path, overrides) for path in trainers), None)


def _newest(run: Path) -> Path:
    saved = checkpoints(open_run(run))
    if not saved:
        raise UsageError(f"{run} has no checkpoint yet", fix="let it train on (run.checkpoint_every says how far)")
    return saved[max(saved)]


def _key(variable: str | None) -> str:
    key = os.environ.get(variable or "OPENAI_API_KEY", "")
    if variable and not key:
        raise UsageError(f"the environment variable {variable} is not set", fix=f"export {variable}=...")
    return key or "none"  # a server of one's own asks for none


async def _only_model(url: str, key: str) -> str:
    """The model's name where the endpoint serves just one. Raises `UsageError` with the names of several."""
    timeout = aiohttp.ClientTimeout(total=_NAMES_SECONDS)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/models", headers=headers) as it,
        ):
            names = sorted(str(card["id"]) for card in (await it.json(content_type=None))["data"]) if it.ok else []
    except (aiohttp.ClientError, TimeoutError) as error:
        raise GatewayFault(f"{url} cannot be reached: {error!r}", fix="check --model; it ends in /v1") from error
    except (ValueError, KeyError, TypeError):
        names = []
    if len(names) == 1:
        return names[0]
    some = ", ".join(names[:12]) or "it does not say which"
    raise UsageError(f"{url} serves {len(names) or 'unknown'} models", fix=f"choose one with --model-name: {some}")
