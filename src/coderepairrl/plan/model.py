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
from coderepairrl.plan.policies import is_key_below, load_policy
from coderepairrl.protocols import EngineSpec
from coderepairrl.registry import check_options, suggest_nearest
from coderepairrl.sync import weights
from coderepairrl.tokens import Codec
from coderepairrl.tokens.verify import verify_codec
from coderepairrl.types import Capabilities, EngineNeeds, Limits

RELAY = "relay"
"""Name of the engine for models behind a URL."""


class RelayOptions(Section):
    """``engine.options`` of the engine ``relay``."""

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
    """Name of the request field that limits a reply."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields to add to every request."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A folder in Hugging Face layout, its codec, and its engine."""

    folder: Path
    codec: Codec
    forks: tuple[str, ...]
    """Kinds of conversations that are rendered again, because their recorded ids cannot be extended."""
    engine: EngineSpec
    needs: EngineNeeds = EngineNeeds()
    """What the run needs of the engine."""
    adapter: Path | None = None
    """Folder of adapters for the model in `folder`."""

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
    """A model that runs elsewhere, behind a URL."""

    url: str
    options: RelayOptions
    key: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """Name to display."""
        return self.url

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of the endpoint: it replies in text, without token ids."""
        return Capabilities(context=self.options.context)


class ModelCommand(NamedTuple):
    """A command that works with any model, and the settings that it reads."""

    command: str
    used: tuple[str, ...]
    """Settings or sections that it reads; overrides of others are refused."""
    defaults: tuple[str, ...]
    """Overrides that apply to a model without its own settings."""


class ServingPlan(PlanParts):
    """A plan with a model that replies to agents."""

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
    """A plan with a model in a folder, its codec and its engine."""

    folder: part[Path]
    adapter: part[Path | None]
    """Folder of adapters for the model."""
    ranks: part[list[int]]
    """Ranks of the adapters that the engine loads."""

    @part
    def codec(self) -> Codec:
        """Codec for the model's tokenizer and template."""
        return tokens.load_codec(self.folder, thinking=self.raw_config.model.thinking)

    @part
    def model(self) -> LocalModel:
        """The model, verified with its codec."""
        return LocalModel(
            self.folder, self.codec, verify_codec(self.codec).forks, self.engine, self.needs, self.adapter
        )

    @part
    def engine(self) -> EngineSpec:
        """The engine that the configuration names."""
        return engines.make_engine(self.raw_config.engine.name, **self.raw_config.engine.options)

    @part
    def adapter_needs(self) -> EngineNeeds:
        """Requirements of adapters, if the engine loads any."""
        return derive_adapter_needs(self.engine, self.ranks)

    @part
    def needs(self) -> EngineNeeds:
        """All that the run needs of the engine."""
        return self.adapter_needs


class NamedPlan(ServingPlan):
    """A plan with the model `name` for the command `use`; `settings_of` is a TOML file or run with its settings."""

    def __init__(self, name: str, overrides: Sequence[str], use: ModelCommand, settings_of: Path | None) -> None:
        super().__init__()
        self.name, self.all_overrides, self.use, self.settings_of = name, overrides, use, settings_of
        # invalid overrides are left out here, so that `errors` also reports other mistakes
        self.overrides = [each for each in overrides if not collect_errors([partial(self.check_override, each)])]

    @property
    def path(self) -> str:
        """Path or URL of the model."""
        return self.raw_config.model.path if is_toml(self.name) else self.name

    def check_override(self, override: str) -> None:
        """Raise `ConfigError` for a setting that the command does not read."""
        key, _ = configs.parse_override(override)
        if not is_key_below(key, self.use.used):
            raise ConfigError(f"{self.use.command} does not use {key}", fix=suggest_nearest(key, self.use.used))
        if key.startswith("model") and is_url(self.name):
            raise ConfigError(f"{key} applies to models that run here, not to a URL", fix=f"leave {key} out")

    def load_config(self, run: Path | None = None, *more: str) -> Config:
        """Load settings from the first of: TOML file `name`, `settings_of`, `run`, shipped config, command's defaults.

        The overrides `more` apply to all but `name`; settings of a run may start no program (`load_policy`).
        """
        if is_toml(self.name):
            return configs.load_config(Path(self.name).expanduser(), self.overrides)
        overrides = [*more, *self.overrides]
        if self.settings_of is not None and not self.settings_of.is_dir():
            return configs.load_config(self.settings_of, overrides)
        if (source_run := self.settings_of or run) is not None:
            return load_policy(source_run, overrides, self.use.used)
        options = configs.parse_options([*self.use.defaults, *overrides])
        config = configs.validate_config(options, self.use.command, self.overrides)
        # a shipped model works with the agent it was trained with, so use the shipped config that trains it
        training_configs = (
            path for path in configs.shipped_configs().values() if configs.load_config(path).model.path == self.name
        )
        return next((configs.load_config(path, overrides) for path in training_configs), config)

    def _checks(self) -> list[Check]:
        return [partial(self.check_override, each) for each in self.all_overrides]


class FolderPlan(NamedPlan, LocalPlan):
    """A plan with a named model that runs here."""

    @part
    def resolved(self) -> models.ResolvedModel:
        """Folders of the model, of its adapters and of its run."""
        model = models.resolve_model(models.fetch_model(self.path) if models.is_hub_name(self.path) else self.path)
        if not any(model.folder.glob("*.safetensors")):
            raise UsageError(
                f"{model.folder} has no weights", fix="name a folder with *.safetensors, or a run (with run.json)"
            )
        return model

    @part
    def raw_config(self) -> Config:
        """Settings: for a checkpoint, those of its run."""
        return self.load_config(self.resolved.run if not is_toml(self.name) and self.can_make("resolved") else None)

    @part
    def folder(self) -> Path:
        """Folder of the weights."""
        return self.resolved.folder

    @part
    def adapter(self) -> Path | None:
        """Folder of the adapters."""
        return self.resolved.adapter if self.can_make("resolved") else None

    @part
    def ranks(self) -> list[int]:
        """Rank of the adapters."""
        return [] if self.adapter is None else [weights.read_adapter_rank(self.adapter)]

    @part
    def needs(self) -> EngineNeeds:
        """Requirements of adapters, and GPUs."""
        return replace(self.adapter_needs, gpus=devices.find_engine_gpus(self.raw_config, self.engine.capabilities))

    def _checks(self) -> list[Check]:
        return [
            *super()._checks(),
            lambda: self.engine.check_model(self.folder),
            lambda: self.engine.require(),
        ]


class UrlPlan(NamedPlan):
    """A plan with a model behind a URL."""

    @part
    def raw_config(self) -> Config:
        """Settings, with the engine ``relay``."""
        return self.load_config(None, f"engine={RELAY}")

    @part
    def url(self) -> str:
        """Base URL."""
        parts = urlsplit(self.path)
        if parts.username or parts.password or parts.query:
            raise UsageError(  # the URL is printed and recorded
                f"the URL at {parts.hostname} has a login or query, maybe a secret",
                fix="leave it out; --key-env names the key's variable",
            )
        return self.path.rstrip("/")

    @part
    def options(self) -> RelayOptions:
        """Options of the endpoint."""
        engine = self.raw_config.engine
        if engine.name != RELAY:
            raise ConfigError(f"engine {engine.name!r} cannot serve {self.url}", fix=f"engine={RELAY}")
        check_options("engine", RELAY, RelayOptions, engine.options)
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
    """Plan with the model `name`: a URL, a TOML file, or a name for `resolve_model`.

    Its settings come from `settings_of` (a TOML file or run), else from the TOML file, the checkpoint's run or the
    shipped config that trains the model, else from `use.defaults`.
    """
    url = UrlPlan(name, overrides, use, settings_of)
    is_remote = is_url(name) or (is_toml(name) and url.can_make("raw_config") and is_url(url.raw_config.model.path))
    return url if is_remote else FolderPlan(name, overrides, use, settings_of)


def find_initial_model(config: Config) -> Path:
    """Folder of the initial model. Raises `UsageError` if it, or the weights it needs, cannot be read."""
    folder = models.find_model_folder(config.model.path, weights=config.model.init == "weights")
    if config.model.init == "weights":
        try:
            weights.read_headers(folder)  # enough to notice a truncated file
        except EngineFault as error:
            raise UsageError(str(error), fix="fetch that file again, or set model.init=random") from error
    return folder


def format_relay_overrides(model_name: str, key_env: str | None) -> list[str]:
    """Overrides that the options ``--model-name`` and ``--key-env`` stand for."""
    options = {"model_name": model_name, "key_env": key_env}
    return [f"engine.options.{option}={configs.to_inline(value)}" for option, value in options.items() if value]


def derive_adapter_needs(engine: EngineSpec, ranks: Sequence[int]) -> EngineNeeds:
    """Requirements of adapters of `ranks`, if `engine` loads any. Raises `ConfigError` for too large a rank."""
    rank, most = max(ranks, default=0), engine.capabilities.adapter_rank
    if not (rank and most):
        return EngineNeeds()
    if rank > most:
        raise ConfigError(
            f"adapters have rank {rank}, and engine {engine.name!r} takes at most rank {most}",
            fix=f"lower train.lora.rank to {most}, leave engine.options.lora_rank out if it is set, or set it to 0 to"
            " send merged weights",
        )
    return EngineNeeds(adapter_rank=rank, adapters=len(ranks))


def is_url(name: str) -> bool:
    """Whether `name` is the URL of a model that runs elsewhere."""
    return name.startswith(("http://", "https://"))


def is_toml(name: str) -> bool:
    """Whether `name` is a TOML file of settings, which name the model."""
    return Path(name).suffix == ".toml"
