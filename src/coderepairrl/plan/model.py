"""Models by name: a local folder or a remote endpoint, and its settings."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from coderepairrl import config as configs
from coderepairrl import engines, models, tokens
from coderepairrl.config import Config
from coderepairrl.config.sections.base import Section
from coderepairrl.errors import ConfigError, EngineFault, UsageError
from coderepairrl.plan import devices
from coderepairrl.plan.policies import load_policy
from coderepairrl.plan.problems import Made, Problems
from coderepairrl.protocols import EngineSpec
from coderepairrl.registry import nearest
from coderepairrl.sync import weights
from coderepairrl.tokens import Codec
from coderepairrl.tokens.verify import verify
from coderepairrl.types import Capabilities, EngineNeeds

RELAY = "relay"
"""Engine of models served by others."""


class RelayOptions(Section):
    """``engine.options`` where the engine is ``relay``."""

    model_name: str = ""
    """Name of the model at the URL, unless there is only one."""
    key_env: str = ""
    """Environment variable that holds the key. Empty: OPENAI_API_KEY, if set."""
    context: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens, if the endpoint does not say."""
    attempts: int = Field(default=5, ge=1)
    """Most times a request is sent while the endpoint is busy or cannot be reached."""
    backoff: float = Field(default=0.5, ge=0)
    """Seconds before the second attempt; doubled before each further one."""
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The endpoint's name for it."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Added to every request."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A folder in Hugging Face layout, its codec, and its engine."""

    folder: Path
    codec: Codec
    forks: tuple[str, ...]
    """Descriptions of where token ids cannot be extended exactly."""
    engine: EngineSpec
    needs: EngineNeeds = EngineNeeds()
    """What the run needs of the engine."""
    adapter: Path | None = None
    """A folder with adapters on the model in `folder`."""

    @property
    def name(self) -> str:
        """Name to display."""
        return str(self.adapter or self.folder)

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the engine."""
        return self.engine.capabilities


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """An endpoint served by others, by its base URL."""

    url: str
    options: RelayOptions
    key: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """Name to display."""
        return self.url

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the endpoint: replies in text."""
        return Capabilities(context=self.options.context)


class Use(NamedTuple):
    """A command that takes any model, and the settings it uses."""

    command: str
    used: tuple[str, ...]
    """Settings with a meaning for it; overrides of others are refused."""
    defaults: tuple[str, ...]
    """Overrides for a model that comes without settings."""


def named(
    model: str, overrides: Sequence[str], use: Use, problems: Problems, *, settings_of: Path | None = None
) -> tuple[Made[Config], Made[LocalModel | RemoteModel]]:
    """Resolve `model` (a URL, a TOML file, or a name for `models.named`) and its settings.

    Settings are those of the checkpoint's run, data only (`load_policy`), of the TOML file, or of the shipped config
    that trains the model; else `use.defaults`. `settings_of`, a TOML file or run, replaces them.
    """
    overrides = _useful(overrides, use, problems)

    def loaded(run: Path | None, given: Sequence[str]) -> Config:
        if settings_of is not None and not settings_of.is_dir():
            return configs.load(settings_of, given)
        if (handed_over := settings_of or run) is not None:
            return load_policy(handed_over, given, use.used)
        plain = configs.validate(configs.parse_options([*use.defaults, *given]), use.command, overrides)
        return _trainer_of(model, given) or plain

    if _is_url(model):
        relay_overrides = []
        for override in overrides:
            key, _ = configs.parse_override(override)
            if key.startswith("model"):
                problems.add(ConfigError(f"{key} is for models that are served here, not for {model}"))
            else:
                relay_overrides.append(override)
        config = problems.attempt(lambda: loaded(None, [f"engine={RELAY}", *relay_overrides]))
        return config, _remote(model, config, problems)
    if Path(model).suffix == ".toml":
        config = problems.attempt(lambda: configs.load(Path(model).expanduser(), overrides))
        if config and _is_url(config.value.model.path):
            return config, _remote(config.value.model.path, config, problems)
        named_model = problems.attempt(lambda: _with_weights(config.value.model.path))
    else:
        named_model = problems.attempt(lambda: _with_weights(model))
        run = named_model.value.run if named_model else None
        config = problems.attempt(lambda: loaded(run, overrides))
    return config, _local(config.value, named_model, problems) if config else Made([])


def folder(config: Config) -> Path:
    """Folder of the initial model. Raises `UsageError` if it, or the weights it needs, cannot be read."""
    model_folder = models.folder(config.model.path, weights=config.model.init == "weights")
    if config.model.init == "weights":
        try:
            weights.tensors(model_folder)  # headers alone
        except EngineFault as error:
            raise UsageError(str(error), fix="fetch that file again, or set model.init=random") from error
    return model_folder


def relayed(model_name: str, key_env: str | None) -> list[str]:
    """Overrides equivalent to two command-line options."""
    options = {"model_name": model_name, "key_env": key_env}
    return [f"engine.options.{option}={json.dumps(value)}" for option, value in options.items() if value]


def engine_of(config: Config) -> EngineSpec:
    """Engine of `config`. Raises `ConfigError`."""
    return engines.make(config.engine.name, **config.engine.options)


def adapter_needs(engine: EngineSpec, ranks: Sequence[int]) -> EngineNeeds:
    """Room for adapters of `ranks` if `engine` takes any. Raises `ConfigError` for a rank beyond its own."""
    rank, most = max(ranks, default=0), engine.capabilities.adapter_rank
    if not (rank and most):
        return EngineNeeds()
    if rank > most:
        raise ConfigError(
            f"adapters of rank {rank}, and engine {engine.name!r} takes them up to rank {most}",
            fix=f"lower train.lora.rank to {most}, leave engine.options.lora_rank out if it is set, or set it to 0 to"
            " send merged weights",
        )
    return EngineNeeds(adapter_rank=rank, adapters=len(ranks))


def choose_engine(config: Config, problems: Problems) -> tuple[Made[EngineSpec], Made[EngineNeeds]]:
    """Engine of `config`, with room for the adapters that are trained."""
    lora = config.train.lora
    engine = problems.attempt(lambda: engine_of(config))
    return engine, problems.attempt(lambda: adapter_needs(engine.value, [] if lora is None else [lora.rank]))


def writer(config: Config, folder: Made[Path], problems: Problems) -> tuple[Made[Codec], Made[tuple[str, ...]]]:
    """Codec of the model in `folder`, and where it cannot extend prompts exactly."""
    model = config.model
    codec = problems.attempt(lambda: tokens.load(folder.value, renderer=model.renderer, thinking=model.thinking))
    return codec, problems.attempt(lambda: verify(codec.value).forks)


def _useful(overrides: Sequence[str], use: Use, problems: Problems) -> list[str]:

    def check(override: str) -> str:
        key, _ = configs.parse_override(override)
        if not any(key == each or key.startswith(f"{each}.") for each in use.used):
            raise ConfigError(f"{use.command} has no use for {key}", fix=nearest(key, use.used))
        return override

    checked = [problems.attempt(lambda override=override: check(override)) for override in overrides]  # type: ignore[misc]
    return [each.value for each in checked if each]


def _local(config: Config, found: Made[models.Named], problems: Problems) -> Made[LocalModel | RemoteModel]:
    folder = problems.attempt(lambda: found.value.folder)
    adapter = found.value.adapter if found else None
    codec, forks = writer(config, folder, problems)
    engine = problems.attempt(lambda: engine_of(config))
    ranks = problems.attempt(lambda: [] if adapter is None else [weights.adapter_rank(adapter)])
    room = problems.attempt(lambda: adapter_needs(engine.value, ranks.value))
    problems.attempt(lambda: engine.value.check_model(folder.value))
    problems.attempt(lambda: engine.value.require())
    needs = problems.attempt(lambda: replace(room.value, gpus=devices.serving(config, engine.value.capabilities)))
    return problems.attempt(
        lambda: LocalModel(folder.value, codec.value, forks.value, engine.value, needs.value, adapter)
    )


def _is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _remote(url: str, config: Made[Config], problems: Problems) -> Made[LocalModel | RemoteModel]:
    def address() -> str:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query:
            # it is shown and recorded
            raise UsageError(f"the URL at {parts.hostname} has a secret in it", fix="keys come from --key-env")
        return url.rstrip("/")

    def options() -> RelayOptions:
        if config.value.engine.name != RELAY:
            raise ConfigError(
                f"engine {config.value.engine.name!r} cannot serve {base_url.value}", fix=f'engine = "{RELAY}"'
            )
        return _options(config.value)

    base_url = problems.attempt(address)
    chosen = problems.attempt(options)
    key = problems.attempt(lambda: _key(chosen.value.key_env))
    return problems.attempt(lambda: RemoteModel(base_url.value, chosen.value, key.value))


def _options(config: Config) -> RelayOptions:
    fields = RelayOptions.model_fields
    for option in config.engine.options:
        if option not in fields:
            raise ConfigError(f"engine {RELAY!r} has no option {option!r}", fix=nearest(option, fields))
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
    named_model = models.named(models.fetch(model) if models.is_hub_name(model) else model)
    if not any(named_model.folder.glob("*.safetensors")):
        raise UsageError(
            f"{named_model.folder} holds no weights", fix="a model has a *.safetensors; a run folder has a run.json"
        )
    return named_model


def _trainer_of(model: str, overrides: Sequence[str]) -> Config | None:
    """Shipped config that trains this shipped model, and so knows how agents must speak to it."""
    trainers = (path for path in configs.shipped().values() if configs.load(path).model.path == model)
    return next((configs.load(path, overrides) for path in trainers), None)
