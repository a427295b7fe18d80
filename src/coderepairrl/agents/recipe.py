"""Recipes: TOML files that say how to install and start a program as an agent."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from coderepairrl.agents.options import parse
from coderepairrl.agents.texts import placeholders
from coderepairrl.errors import ConfigError
from coderepairrl.registry import nearest
from coderepairrl.types import SideCalls

SHIPPED = Path(__file__).with_name("recipes")

PLACEHOLDERS = (
    "base_url", "root_url", "api_key", "model", "prompt", "prompt_file", "home", "workdir", "install",
    "calls", "tokens", "turn_tokens", "seconds",
)  # fmt: skip
"""What is filled in where a recipe says ``{name}``; docs/guides/agents.md has what each means."""


@dataclass(frozen=True, slots=True)
class Install:
    """Packages for ``crrl agents install``, with exact versions."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    pip: tuple[str, ...] = ()
    """Requirements from PyPI, into a virtual environment ``{install}/venv``."""
    npm: tuple[str, ...] = ()
    """Packages from npm, into ``{install}/npm``."""

    def __bool__(self) -> bool:
        return bool(self.pip or self.npm)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of the agent `command`. Raises `ConfigError` for invalid values."""

    argv: tuple[str, ...]
    """The program and its arguments, run in the root of the repository."""
    about: str = ""
    """One line for people."""
    dialect: Literal["chat", "responses", "messages"] = "chat"
    """The API that the program speaks."""
    install: Install = Install()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables, beside those of the sandbox and ``HOME``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to write before it starts, by their path in ``{home}``."""
    stdin: str = ""
    """What is on its standard input."""
    exit_codes: tuple[int, ...] = (0,)
    """With these it has done its work; any other is a fault of the program."""
    discard: tuple[str, ...] = ()
    """Paths in the repository that the program leaves there for itself: deleted before the diff."""
    output_bytes: int = 1 << 20
    """So much of what it prints is kept in the log."""
    side_calls: SideCalls = "mask"
    """What becomes of its calls beside the main conversation, where ``rollout.side_calls`` does not say."""
    not_in: Mapping[str, str] = field(default_factory=dict)
    """Sandboxes in which the program does not work, each with the reason: there it is refused before a run starts."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("agent.options.argv is empty", fix='for example argv = ["my-agent", "{prompt_file}"]')
        for text in (*self.argv, *self.env.values(), self.stdin):
            for name in placeholders(text):
                if name.islower() and name not in PLACEHOLDERS:  # ${HOME} is a shell's
                    raise ConfigError(f"there is nothing to fill in for {{{name}}}", fix=nearest(name, PLACEHOLDERS))
        for path in (*self.files, *self.discard):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ConfigError(f"{path!r} must be a relative path without '..'")


def names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def read(name: str) -> dict[str, Any]:
    """Read the fields of a shipped recipe or a file. Raises `ConfigError`."""
    path = SHIPPED / f"{name}.toml" if name in names() else Path(name)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the recipe {name} cannot be read: {error}", fix="name a file, or a recipe of `crrl agents list`"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the recipe {name} is no TOML: {error}") from error


def load(name: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe with `options` over its fields; tables are merged by key."""
    fields = read(name)
    for key, value in (options or {}).items():
        before = fields.get(key)
        fields[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
    return parse(Recipe, label(name), fields)


def is_recipe(name: str) -> bool:
    """Whether `name` is a shipped recipe or a TOML file."""
    return name.endswith(".toml") or name in names()


def label(name: str) -> str:
    """Name of the agent that recipe `name` defines.

    >>> label("recipes/qwen-code.toml"), label("aider")
    ('qwen-code', 'aider')
    """
    return Path(name).stem if name.endswith(".toml") else name
