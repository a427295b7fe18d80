"""Recipes: TOML files that say how to install and start a program as an agent.

``crrl agents install NAME`` gives each program a separate environment. Its folder is named by a digest of its
requirements, and complete once it has ``installed.json``. Sandboxes see it read-only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from coderepairrl.agents.texts import build_options, find_placeholders
from coderepairrl.errors import ConfigError, PrerequisiteError, RunError
from coderepairrl.processes.caches import agents_cache
from coderepairrl.processes.children import run_child
from coderepairrl.processes.installs import check_reachable, lock_installation, make_venv, run_pip, system_python
from coderepairrl.registry import suggest_nearest
from coderepairrl.runs.storage import replace_file
from coderepairrl.types import SideCalls

SHIPPED = Path(__file__).with_name("recipes")

PLACEHOLDERS = (
    "base_url", "root_url", "api_key", "model", "prompt", "prompt_file", "home", "workdir", "install",
    "calls", "tokens", "turn_tokens", "seconds",
)  # fmt: skip
"""Names allowed as ``{name}`` in a recipe (docs/guides/agents.md)."""


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
    """Program and arguments, run in the root of the repository."""
    about: str = ""
    """Description in one line."""
    dialect: Literal["chat", "responses", "messages"] = "chat"
    """API that the program speaks."""
    install: Install = Install()
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to the sandbox's and ``HOME``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files to write before it starts, by their path in ``{home}``."""
    stdin: str = ""
    """Standard input."""
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes of success; any other is a fault of the program."""
    discard: tuple[str, ...] = ()
    """The program's own files in the repository, deleted before the diff."""
    output_bytes: int = 1 << 20
    """Most bytes of its output in the log."""
    side_calls: SideCalls = "mask"
    """Training of side conversations, unless ``rollout.side_calls`` is set."""
    not_in: Mapping[str, str] = field(default_factory=dict)
    """Sandboxes in which the program does not work, with reasons; runs refuse to start in them."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise ConfigError("agent.options.argv is empty", fix='for example argv = ["my-agent", "{prompt_file}"]')
        for text in (*self.argv, *self.env.values(), self.stdin):
            for name in find_placeholders(text):
                if name.islower() and name not in PLACEHOLDERS:  # ${HOME} is a shell's
                    raise ConfigError(f"unknown placeholder {{{name}}}", fix=suggest_nearest(name, PLACEHOLDERS))
        for path in (*self.files, *self.discard):
            if Path(path).is_absolute() or ".." in Path(path).parts:
                raise ConfigError(f"{path!r} must be a relative path without '..'")


def list_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_recipe(name: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """Load a shipped recipe or a file, with `options` over its fields (tables by key). Raises `ConfigError`."""
    path = SHIPPED / f"{name}.toml" if name in list_recipes() else Path(name)
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the recipe {name} cannot be read: {error}", fix="name a file, or a recipe of `crrl agents list`"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the recipe {name} is not TOML: {error}") from error
    for key, value in (options or {}).items():
        before = fields.get(key)
        fields[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
    return build_options(Recipe, agent_label(name), fields)


def is_recipe(name: str) -> bool:
    """Whether `name` is a shipped recipe or a TOML file."""
    return name.endswith(".toml") or name in list_recipes()


def agent_label(name: str) -> str:
    """Name of the agent that recipe `name` defines.

    >>> agent_label("recipes/qwen-code.toml"), agent_label("aider")
    ('qwen-code', 'aider')
    """
    return Path(name).stem if name.endswith(".toml") else name


_DONE = "installed.json"
_STDERR = 2  # for the output of installers: standard output is the command's own
_NPM = ("--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=10", "--fetch-retry-mintimeout=1000")


def install_folder(name: str, recipe: Recipe) -> Path:
    """Installation folder, whether it exists or not."""
    requirements = json.dumps([asdict(recipe.install), str(system_python()) if recipe.install.pip else ""])
    return agents_cache() / f"{name}-{hashlib.sha256(requirements.encode()).hexdigest()[:12]}"


def installed_versions(name: str, recipe: Recipe) -> dict[str, Any] | None:
    """Versions by package, for ``pip`` and ``npm``; None if not installed."""
    try:
        versions: dict[str, Any] = json.loads((install_folder(name, recipe) / _DONE).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # or a record cut by a full disk
        return None
    return versions


def install_agent(source: str) -> tuple[Path, dict[str, Any]]:
    """Install the agent of a recipe, shipped or a file, if needed; return its folder and `installed_versions`.

    Raises `ConfigError` if there is nothing to install, `PrerequisiteError` when a tool is missing or sandboxes cannot
    see the folder, `RunError` when an installer fails.
    """
    if not is_recipe(source):
        raise ConfigError(f"{source!r} is not an installable agent", fix=suggest_nearest(source, list_recipes()))
    name, recipe = agent_label(source), load_recipe(source)
    if not recipe.install:
        raise ConfigError(f"agent {name!r} has nothing to install", fix="use it as it is")
    target = install_folder(name, recipe)
    with lock_installation(target):
        versions = installed_versions(name, recipe)
        if versions is None:
            shutil.rmtree(target, ignore_errors=True)  # remains of an interrupted installation
            target.mkdir(mode=0o755, parents=True)
            check_reachable(target)
            versions = {}
            if recipe.install.pip:
                versions["pip"] = _install_pip_packages(target / "venv", recipe.install.pip)
            if recipe.install.npm:
                versions["npm"] = _install_npm_packages(target / "npm", recipe.install.npm)
            with replace_file(target / _DONE) as record:
                record.write_text(json.dumps(versions, indent=1) + "\n")
    return target, versions


def _install_pip_packages(venv: Path, requirements: Sequence[str]) -> dict[str, str]:
    inside = make_venv(venv, stdout=_STDERR)
    # --compile overrides pip's configuration: a sandbox cannot write there, and would compile at every start
    command = ("install", "--retries=10", "--compile", *requirements)
    if all(run_pip(inside, *command, stdout=_STDERR).returncode != 0 for _ in range(2)):  # a download may break off
        raise RunError(f"pip could not install {' '.join(requirements)}")
    listing = subprocess.run(
        [str(inside), "-I", "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return {entry["name"]: entry["version"] for entry in json.loads(listing.stdout)}


def _install_npm_packages(prefix: Path, packages: Sequence[str]) -> dict[str, str]:
    npm = shutil.which("npm")
    if npm is None:
        raise PrerequisiteError("npm is not installed", fix="sudo apt-get install npm, or see nodejs.org")
    prefix.mkdir()
    command = [npm, "install", "--prefix", str(prefix), *_NPM, *packages]
    if all(run_child(command, stdout=_STDERR).returncode != 0 for _ in range(2)):  # a download may break off
        raise RunError(f"npm could not install {' '.join(packages)}")
    lock = json.loads((prefix / "package-lock.json").read_text())
    versions = {
        path.rpartition("node_modules/")[2]: entry["version"] for path, entry in lock["packages"].items() if path
    }
    return dict(sorted(versions.items()))


BUILT_IN = {
    "nano": "a shell, a search-and-replace patch, hard limits",
    "nano4": "Nano with bash, view_file, str_replace and write_file",
    "direct": "no scaffold: one reply with the edits, given the files",
    "agentless": "no scaffold: localise by questions, sample repairs, vote",
    "command": "any program, by a recipe of your own",
}


class AgentListing(NamedTuple):
    """An agent's properties and installation state."""

    name: str
    placement: str
    dialect: str
    program: str
    state: str
    about: str


def list_agents() -> list[AgentListing]:
    """List shipped agents, built-in ones first."""
    built_in = [
        AgentListing(name, "sandbox" if name == "command" else "host", "chat", "", "built in", description)
        for name, description in BUILT_IN.items()
    ]
    return built_in + [_describe_recipe(name, load_recipe(name)) for name in list_recipes()]


def format_agents(entries: list[AgentListing]) -> str:
    """Format `entries` as aligned text."""
    columns = list(zip(*(entry[:5] for entry in entries), strict=True))
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(entry, (*widths, 0), strict=True)) for entry in entries
    )


def _describe_recipe(name: str, recipe: Recipe) -> AgentListing:
    state = "not installed" if installed_versions(name, recipe) is None else "installed"
    return AgentListing(name, "sandbox", recipe.dialect, installed_program(recipe), state, recipe.about)


def installed_program(recipe: Recipe) -> str:
    """First requirement of a recipe: the program's name and version.

    >>> installed_program(load_recipe("mini-swe-agent")).split("==")[0]
    'mini-swe-agent'
    """
    return next(iter((*recipe.install.pip, *recipe.install.npm)), "")
