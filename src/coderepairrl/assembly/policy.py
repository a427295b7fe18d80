"""What a model's name means, and who replies under it: one way for every command that takes any model."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from coderepairrl import config as configs
from coderepairrl import engines, models, tokens
from coderepairrl.config import Config
from coderepairrl.config.schema import Section
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.gateway import Policy, Remote, Source
from coderepairrl.learn import merge
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import Engine
from coderepairrl.registry import nearest
from coderepairrl.rollout import SupervisedEngine
from coderepairrl.sync import weights

RELAY = "relay"
"""The engine of models that somebody else serves."""


class RelayOptions(Section):
    """``engine.options`` where the engine is ``relay``."""

    model_name: str = ""
    """The model's name at the URL; not needed where there is only one."""
    key_env: str = ""
    """The environment variable that holds the key. Empty: OPENAI_API_KEY, if that is set."""
    context: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens, if the endpoint does not say."""
    attempts: int = Field(default=5, ge=1)
    """How often a request is sent at most while the endpoint is busy or cannot be reached."""
    backoff: float = Field(default=0.5, ge=0)
    """Seconds before the second attempt; doubled before each further one."""
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the endpoint calls it."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Added to every request."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A model: a folder in Hugging Face layout, or an endpoint's base URL; and the settings it is used with."""

    config: Config
    folder: Path | None = None
    url: str = ""
    adapter: Path | None = None
    """A folder with adapters on the model in `folder`."""

    @property
    def name(self) -> str:
        """For people."""
        return self.url or str(self.adapter or self.folder)


def choose(
    model: str, overrides: Sequence[str] = (), *, command: str, used: Sequence[str], defaults: Sequence[str]
) -> Choice:
    """The model that `model` names: a URL, a TOML file, or what `models.named` knows, runs and adapters included.

    A checkpoint of a run has the run's settings, a TOML file its ``model.path`` and its settings; a shipped model has
    those of the shipped config that trains it, any other `defaults`. Of `overrides`, `command` takes the keys `used`.
    Raises `UsageError` when there is no such model, `ConfigError` for settings that are wrong or unused.
    """
    for override in overrides:
        key, _ = configs.parse_override(override)
        if not any(key == each or key.startswith(f"{each}.") for each in used):
            raise ConfigError(f"{command} has no use for {key}", fix=nearest(key, used))
    if _is_url(model):
        if unused := [key for key, _ in map(configs.parse_override, overrides) if key.startswith("model")]:
            raise ConfigError(f"{unused[0]} is for models that are served here, not for {model}")
        options = [*defaults, f"engine={RELAY}", *overrides]
        return _remote(model, configs.validate(configs.parse_options(options), command, options))
    path = Path(model).expanduser()
    if path.suffix == ".toml":
        config = configs.load(path, overrides)
        if _is_url(config.model.path):
            return _remote(config.model.path, config)
        found = _with_weights(config.model.path)
    else:
        found = _with_weights(model)
        if found.run is not None:
            config = configs.load(found.run, overrides)
        else:
            plain = configs.validate(configs.parse_options([*defaults, *overrides]), command, overrides)
            config = _trainer_of(model, overrides) or plain
    return Choice(config, folder=found.folder, adapter=found.adapter)


def relayed(model_name: str, key_env: str | None) -> list[str]:
    """The overrides that two options of the command line stand for."""
    given = {"model_name": model_name, "key_env": key_env}
    return [f"engine.options.{option}={json.dumps(value)}" for option, value in given.items() if value]


@asynccontextmanager
async def replying(choice: Choice, log_dir: Path) -> AsyncIterator[Source]:
    """Who replies for the chosen model, running: an engine, restarted when it dies, or the remote.

    Adapters are loaded by an engine that takes them, which serves version 1 then, and else merged into a temporary
    copy of the model.

    Raises `ConfigError`, `UsageError` (no key, no such model), `EngineFault` and `RemoteFault`.
    """
    config = choice.config
    if choice.folder is None:
        options = _options(config)
        key = _key(options.key_env)
        about = options.model_dump(exclude={"model_name", "key_env"})
        async with Remote(choice.url, model=options.model_name, key=key, **about) as remote:
            yield remote
        return
    codec = tokens.load(choice.folder, renderer=config.model.renderer, thinking=config.model.thinking)
    async with AsyncExitStack() as parts:
        folder, adapter = choice.folder, choice.adapter
        spec = engines.make(config.engine.name, **config.engine.options)
        if adapter is not None:
            spec = spec.with_adapters(weights.adapter_rank(adapter))
        if adapter is not None and not spec.adapters:
            home = parts.enter_context(scratch("merged"))
            await merge(folder, adapter, home, config.train.precision, log_dir=log_dir)
            folder, adapter = home, None

        async def start() -> Engine:
            return await spec.start(folder, log_dir=log_dir)

        engine = SupervisedEngine(await start(), start, restarts=config.run.retries)
        parts.push_async_callback(engine.close)
        if adapter is not None:
            await engine.load(adapter, 1, await asyncio.to_thread(weights.checksum, adapter))
        yield Policy(codec, engine, config.rollout.history_policy)


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _remote(url: str, config: Config) -> Choice:
    if config.engine.name != RELAY:
        raise ConfigError(f"engine {config.engine.name!r} cannot serve {url}", fix=f'engine = "{RELAY}"')
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query:
        # it is shown and recorded
        raise UsageError(f"the URL at {parts.hostname} has a secret in it", fix="keys come from --key-env")
    _options(config)
    return Choice(config, url=url.rstrip("/"))


def _options(config: Config) -> RelayOptions:
    known = RelayOptions.model_fields
    for option in config.engine.options:
        if option not in known:
            raise ConfigError(f"engine {RELAY!r} has no option {option!r}", fix=nearest(option, known))
    try:
        return RelayOptions(**config.engine.options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"engine.options.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _key(variable: str) -> str:
    key = os.environ.get(variable or "OPENAI_API_KEY", "")
    if variable and not key:
        raise UsageError(f"the environment variable {variable} is not set", fix=f"export {variable}=...")
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the key in {variable or 'OPENAI_API_KEY'} cannot be sent", fix="is there a line break in it?"
        )
    return key


def _with_weights(model: str) -> models.Named:
    found = models.named(model)
    if not any(found.folder.glob("*.safetensors")):
        raise UsageError(
            f"{found.folder} holds no weights", fix="a model has a *.safetensors; a run folder has a run.json"
        )
    return found


def _trainer_of(model: str, overrides: Sequence[str]) -> Config | None:
    """The shipped config that trains this shipped model: it knows how an agent must speak to it."""
    trainers = (path for path in configs.shipped().values() if configs.load(path).model.path == model)
    return next((configs.load(path, overrides) for path in trainers), None)
