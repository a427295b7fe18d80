"""Models by name: a local folder or a remote endpoint, and its settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, ValidationError

from coderepairrl import config as configs
from coderepairrl import engines, models, tokens
from coderepairrl.config import Config
from coderepairrl.config.schema import Section
from coderepairrl.errors import ConfigError, EngineFault, UsageError
from coderepairrl.plan import devices
from coderepairrl.plan.parts import Check, PlanParts, collect_errors, part
from coderepairrl.plan.policies import load_policy
from coderepairrl.protocols import EngineSpec
from coderepairrl.registry import suggest_nearest
from coderepairrl.sync import weights
from coderepairrl.tokens import Codec
from coderepairrl.tokens.verify import verify_codec
from coderepairrl.types import Capabilities, EngineNeeds, Limits

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


class ModelCommand(NamedTuple):
    """A command that takes any model, and the settings it uses."""

    command: str
    used: tuple[str, ...]
    """Settings with a meaning for it; overrides of others are refused."""
    defaults: tuple[str, ...]
    """Overrides for a model that comes without settings."""


class ServingPlan(PlanParts):
    """A model that replies to external agents (``crrl serve``)."""

    raw_config: part[Config]
    """Configuration as it was read."""
    model: part[LocalModel | RemoteModel]

    @part
    def config(self) -> Config:
        """Configuration with ``auto`` and defaults resolved."""
        return self.raw_config

    @property
    def limits(self) -> Limits:
        """Limits of an episode."""
        rollout = self.config.rollout
        return Limits(rollout.calls, rollout.tokens, rollout.seconds, rollout.turn_tokens)


class LocalPlan(ServingPlan):
    """A model in a folder, its codec and its engine."""

    folder: part[Path]
    adapter: part[Path | None]
    """Folder of adapters on the model."""
    ranks: part[list[int]]
    """Ranks of the adapters that the engine loads."""

    @part
    def codec(self) -> Codec:
        """Codec for the model's tokenizer and template."""
        return tokens.load_codec(self.folder, thinking=self.raw_config.model.thinking)

    @part
    def model(self) -> LocalModel:
        """The model, with where token ids cannot be extended exactly."""
        return LocalModel(
            self.folder, self.codec, verify_codec(self.codec).forks, self.engine, self.needs, self.adapter
        )

    @part
    def engine(self) -> EngineSpec:
        """The engine."""
        return make_planned_engine(self.raw_config)

    @part
    def room(self) -> EngineNeeds:
        """Room for adapters if the engine takes any."""
        return derive_adapter_needs(self.engine, self.ranks)

    @part
    def needs(self) -> EngineNeeds:
        """Abilities that the engine must have."""
        return self.room


class NamedPlan(ServingPlan):
    """A model that the user of a command names."""

    def __init__(self, name: str, overrides: Sequence[str], use: ModelCommand, settings_of: Path | None) -> None:
        super().__init__()
        self.name, self.all_overrides, self.use, self.settings_of = name, overrides, use, settings_of
        self.overrides = [each for each in overrides if not collect_errors([partial(self.check_override, each)])]

    @property
    def path(self) -> str:
        """Path or URL of the model."""
        return self.raw_config.model.path if is_toml(self.name) else self.name

    def check_override(self, override: str) -> None:
        """Raise `ConfigError` for a setting without a meaning for the command."""
        key, _ = configs.parse_override(override)
        if not any(key == each or key.startswith(f"{each}.") for each in self.use.used):
            raise ConfigError(f"{self.use.command} does not use {key}", fix=suggest_nearest(key, self.use.used))
        if key.startswith("model") and is_url(self.name):
            raise ConfigError(f"{key} is for models that are served here, not for a URL", fix=f"leave {key} out")

    def load_config(self, run: Path | None = None, *more: str) -> Config:
        """Settings of a TOML file, else of `settings_of`, else of `run`, else the command's defaults with `more`."""
        if is_toml(self.name):
            return configs.load_config(Path(self.name).expanduser(), self.overrides)
        overrides = [*more, *self.overrides]
        if self.settings_of is not None and not self.settings_of.is_dir():
            return configs.load_config(self.settings_of, overrides)
        if (handed_over := self.settings_of or run) is not None:
            return load_policy(handed_over, overrides, self.use.used)
        plain = configs.parse_options([*self.use.defaults, *overrides])
        config = configs.validate_config(plain, self.use.command, self.overrides)
        # the shipped config that trains this shipped model knows how agents must speak to it
        trainers = (
            path for path in configs.shipped_configs().values() if configs.load_config(path).model.path == self.name
        )
        return next((configs.load_config(path, overrides) for path in trainers), config)

    def _checks(self) -> list[Check]:
        return [partial(self.check_override, each) for each in self.all_overrides]


class FolderPlan(NamedPlan, LocalPlan):
    """A named model that is served here."""

    @part
    def resolved(self) -> models.ResolvedModel:
        """Folder, adapters and run."""
        model = models.resolve_model(models.fetch_model(self.path) if models.is_hub_name(self.path) else self.path)
        if not any(model.folder.glob("*.safetensors")):
            raise UsageError(
                f"{model.folder} has no weights", fix="name a folder with *.safetensors, or a run (with run.json)"
            )
        return model

    @part
    def raw_config(self) -> Config:
        """Settings; those of a checkpoint's run are data only."""
        return self.load_config(self.resolved.run if not is_toml(self.name) and self.can_make("resolved") else None)

    @part
    def folder(self) -> Path:
        """Folder of the weights."""
        return self.resolved.folder

    @part
    def adapter(self) -> Path | None:
        """Folder of adapters on them."""
        return self.resolved.adapter if self.can_make("resolved") else None

    @part
    def ranks(self) -> list[int]:
        """Rank of the adapters."""
        return [] if self.adapter is None else [weights.read_adapter_rank(self.adapter)]

    @part
    def needs(self) -> EngineNeeds:
        """Room for adapters, and GPUs."""
        return replace(self.room, gpus=devices.find_engine_gpus(self.raw_config, self.engine.capabilities))

    def _checks(self) -> list[Check]:
        return [
            *super()._checks(),
            lambda: self.engine.check_model(self.folder),
            lambda: self.engine.require(),
        ]


class UrlPlan(NamedPlan):
    """A named model that others serve."""

    @part
    def raw_config(self) -> Config:
        """Settings."""
        return self.load_config(None, f"engine={RELAY}")

    @part
    def url(self) -> str:
        """Base URL."""
        parts = urlsplit(self.path)
        if parts.username or parts.password or parts.query:
            # the URL is shown and recorded
            raise UsageError(f"the URL at {parts.hostname} has a secret in it", fix="keys come from --key-env")
        return self.path.rstrip("/")

    @part
    def options(self) -> RelayOptions:
        """Options of the endpoint."""
        engine, fields = self.raw_config.engine, RelayOptions.model_fields
        if engine.name != RELAY:
            raise ConfigError(f"engine {engine.name!r} cannot serve {self.url}", fix=f"engine={RELAY}")
        if unknown := [option for option in engine.options if option not in fields]:
            raise ConfigError(f"engine {RELAY!r} has no option {unknown[0]!r}", fix=suggest_nearest(unknown[0], fields))
        try:
            return RelayOptions(**engine.options)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"engine.options.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    @part
    def model(self) -> RemoteModel:
        """The endpoint."""
        variable = self.options.key_env
        key = os.environ.get(variable or "OPENAI_API_KEY", "")
        if variable and not key:
            raise UsageError(f"the environment variable {variable} is not set", fix=f"export {variable}=...")
        if not (key.isascii() and key.isprintable()):
            raise UsageError(
                f"the key in {variable or 'OPENAI_API_KEY'} cannot be sent", fix="set it without line breaks"
            )
        return RemoteModel(self.url, self.options, key)


def plan_model(
    name: str, overrides: Sequence[str], use: ModelCommand, settings_of: Path | None = None
) -> FolderPlan | UrlPlan:
    """Plan to serve the model `name` (a URL, a TOML file, or a name for `resolve_model`), and its settings.

    Settings are those of the checkpoint's run, data only (`load_policy`), of the TOML file, or of the shipped config
    that trains the model; else `use.defaults`. `settings_of`, a TOML file or run, replaces them.
    """
    url = UrlPlan(name, overrides, use, settings_of)
    served = is_url(name) or (is_toml(name) and url.can_make("raw_config") and is_url(url.raw_config.model.path))
    return url if served else FolderPlan(name, overrides, use, settings_of)


def find_initial_model(config: Config) -> Path:
    """Folder of the initial model. Raises `UsageError` if it, or the weights it needs, cannot be read."""
    folder = models.find_model_folder(config.model.path, weights=config.model.init == "weights")
    if config.model.init == "weights":
        try:
            weights.read_headers(folder)  # headers alone
        except EngineFault as error:
            raise UsageError(str(error), fix="fetch that file again, or set model.init=random") from error
    return folder


def format_relay_overrides(model_name: str, key_env: str | None) -> list[str]:
    """Overrides equivalent to two command-line options."""
    options = {"model_name": model_name, "key_env": key_env}
    return [f"engine.options.{option}={configs.to_inline(value)}" for option, value in options.items() if value]


def make_planned_engine(config: Config) -> EngineSpec:
    """Engine of `config`. Raises `ConfigError`."""
    return engines.make_engine(config.engine.name, **config.engine.options)


def derive_adapter_needs(engine: EngineSpec, ranks: Sequence[int]) -> EngineNeeds:
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


def is_url(name: str) -> bool:
    """Whether others serve the model `name`."""
    return name.startswith(("http://", "https://"))


def is_toml(name: str) -> bool:
    """Whether `name` is a file of settings, one of which names the model."""
    return Path(name).suffix == ".toml"
