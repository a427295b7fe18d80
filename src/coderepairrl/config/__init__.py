"""Configuration: validated TOML files with ``a.b=c`` overrides and one level of ``extends``; origins of settings."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib import resources
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from coderepairrl.config.schema import KIND_NAME, RUN_NAME, Config, Run
from coderepairrl.config.secrets import FIX, find_secrets
from coderepairrl.errors import ConfigError, combine_errors
from coderepairrl.registry import suggest_run

__all__ = ["Config"]  # for mypy: re-exported
_SOURCES = ("tasks.source", "tasks.sources", "eval.source")
REQUIRED = "required"
"""Placeholder for a missing default."""


def shipped_configs() -> dict[str, Path]:
    """Shipped configs by name."""
    folder = Path(str(resources.files("coderepairrl"))) / "config" / "shipped"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the config file (or shipped config) `source` with ``a.b=c`` overrides.

    Raises `ConfigError` with file, key and nearest known key; `CombinedError` for several mistakes.
    """
    path, data = _find_config(source), _merge_layers(source)
    if find_run_folder(source) is not None and (
        unknown := [".".join(key) for key, _ in _find_unknown_keys(data, Config)]
    ):
        raise ConfigError(
            f"{path} has settings that this version lacks: {', '.join(unknown)}",
            fix="continue the run with the version that made it (run.json); crrl report, view and compare can read it",
        )
    _apply_overrides(data, overrides)
    return validate_config(data, str(source if path in shipped_configs().values() else path), overrides)


def load_run(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the config of a run folder for reading, without settings that this version lacks. Raises `ConfigError`."""
    data = _merge_layers(source)
    for (*sections, last), _ in list(_find_unknown_keys(data, Config)):
        del reduce(getitem, sections, data)[last]
    _apply_overrides(data, overrides)
    return validate_config(data, str(source), overrides)


def _merge_layers(source: str | Path) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for layer in read_layers(source):
        _drop_old_options(data, layer.data)
        data = _merge_sections(data, layer.data)
    return data


class Layer(NamedTuple):
    """Settings of one file; `name` is ``preset hello`` or ``file mine.toml``."""

    name: str
    data: dict[str, Any]


def read_layers(source: str | Path) -> list[Layer]:
    """Read the files of `source`, the extended one first. Raises `ConfigError`."""
    path = _find_config(source)
    data = _read_toml(path)
    if (folder := find_run_folder(source)) is not None:  # a run may have been moved
        data.setdefault("run", {})["dir"] = str(folder.parent)
    base = data.pop("extends", None)
    if base is not None and folder is not None:
        raise ConfigError(f"{path} extends {base}, but a run's config is complete", fix="name a run that crrl wrote")
    return [*([] if base is None else _read_base(path, base)), Layer(_layer_name(path), data)]


def _layer_name(path: Path) -> str:
    return f"preset {path.stem}" if path in shipped_configs().values() else f"file {path}"


def validate_config(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Config:
    """Validate `data`; errors name `where` or an override as the origin of a value.

    Raises `ConfigError`, or `CombinedError` for several mistakes.
    """
    unknown = {".".join(key): nearest for key, nearest in _find_unknown_keys(data, Config)}
    problems = [
        ConfigError(f"{_find_origin(key, where, overrides)}: {key} is a secret in clear", fix=FIX)
        for key in dict.fromkeys(find_secrets(data))
    ]
    problems += [
        ConfigError(
            f"{_find_origin(key, where, overrides)}: unknown key {key!r}",
            fix=f"did you mean {nearest!r}?" if nearest else "see docs/reference/config.md for the known keys",
        )
        for key, nearest in unknown.items()
    ]
    try:
        config = Config.model_validate(data)  # sections forbid unknown keys
    except ValidationError as error:
        mistakes: dict[str, list[str]] = {}
        examples: list[str] = []
        for each in error.errors():
            key, problem = ".".join(map(str, each["loc"])), _describe_problem(each["type"], each["msg"], each["input"])
            if unknown and each["type"] == "extra_forbidden":
                continue  # reported above
            if key in unknown.values() and each["type"] == "missing":
                continue  # misspelt, not missing
            if expected := _EXPECTED.get(each["type"]):
                examples.append(f"{key}={_example_value(each['loc'], expected[1])}")
            for line in problem.split("\n"):  # a check of several settings has a line for each mistake
                # the line may begin with the rest of the key
                origin = _find_origin(f"{key}.{line.partition(':')[0]}" if key else line, where, overrides)
                if key and origin == where:
                    origin = _find_origin(key, where, overrides)
                mistakes.setdefault(origin, []).append(f"{key}: {line}" if key else line)
        if lines := [f"{origin}: {'; '.join(messages)}" for origin, messages in mistakes.items()]:
            missing = {each["loc"] for each in error.errors() if each["type"] == "missing"}
            unnamed = missing & {("run",), ("run", "name")}
            fix = "name the run: run.name=... on the command line, or [run] and name = in the file; " if unnamed else ""
            fix += f"write for example {', '.join(examples)}; " if examples else ""
            problems.append(ConfigError("; ".join(lines), fix=f"{fix}see docs/reference/config.md"))
        raise combine_errors(problems) from None
    if problems:
        raise combine_errors(problems)
    return config


_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), ("a whole number", "8")),
    **dict.fromkeys(("float_type", "float_parsing"), ("a number", "0.5")),
    **dict.fromkeys(("bool_type", "bool_parsing"), ("true or false", "true")),
}
"""Expected value and example by pydantic's error type."""
_NAMES = {
    RUN_NAME: "a letter or digit, then letters, digits, '.', '_' or '-'",
    KIND_NAME: "a lower-case letter, then lower-case letters, digits, '_' or '-'",
}
"""Allowed names by pattern."""


def _describe_problem(kind: str, message: str, value: Any) -> str:
    if kind == "string_pattern_mismatch":
        allowed = next(words for pattern, words in _NAMES.items() if pattern in message)
        return f"must be {allowed}, not {value!r}"
    if kind in _EXPECTED:
        return f"must be {_EXPECTED[kind][0]}, not {value!r}"
    return message.removeprefix("Value error, ")


def _example_value(location: tuple[int | str, ...], otherwise: str) -> str:
    model: type[BaseModel] | None = Config
    for part in location[:-1]:
        model = _find_section_model(model, str(part)) if model is not None and part in model.model_fields else None
    field = model.model_fields.get(str(location[-1])) if model is not None else None
    default = field.default if field is not None else None
    return json.dumps(default) if isinstance(default, (bool, int, float)) else otherwise


def _find_origin(key: str, where: str, overrides: Sequence[str]) -> str:
    """Find the last override that set `key`, else return `where`."""
    for text in reversed(overrides):
        name = text.partition("=")[0].strip()
        # `key` may be a message that contains `name`, alone or as the start of a dotted key
        if name.startswith(f"{key}.") or re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", key):
            return f"override {_hide_secret(text)!r}"
    return where


def _hide_secret(text: str) -> str:
    key, value = parse_override(text)
    return f"{key}=..." if any(find_secrets({key: value})) else text


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Apply ``a.b=c`` overrides. Raises `ConfigError`."""
    data = config.model_dump(exclude_none=True)
    _apply_overrides(data, overrides)
    return validate_config(data, "config", overrides)


def to_toml(config: Config) -> str:
    """Format the configuration as TOML, with defaults."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def to_inline(value: Any) -> str:
    """Format `value` like the right side of an override.

    >>> to_inline({"name": "nano", "options": {"tools": ["a", "b"]}})
    '{"name" = "nano", "options" = {"tools" = ["a", "b"]}}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_inline(key)} = {to_inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_inline, value))}]"
    return json.dumps(value, ensure_ascii=False)  # TOML rejects escaped surrogate pairs


def find_run_folder(source: str | Path) -> Path | None:
    """Run folder if `source` is one or its config.toml, else None."""
    folder = Path(source)
    if folder.name == "config.toml" and (folder.parent / "run.json").is_file():
        folder = folder.parent
    if not folder.is_dir():
        return None
    return folder if folder.name not in ("", "..") else folder.resolve()


def _find_config(source: str | Path) -> Path:
    path = Path(source)
    if (path / "config.toml").is_file():  # of a run folder
        return path / "config.toml"
    if path.is_file():
        return path
    configs = shipped_configs()
    if str(source) in configs:
        return configs[str(source)]
    near = difflib.get_close_matches(str(source).replace("_", "-"), configs, 2, 0.5)
    guess = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if not near and len(path.parts) > 1 and not path.suffix and (run := suggest_run(path)):
        guess = f"of the runs there, {run} Or "
    raise ConfigError(
        f"no config file {source}", fix=f"{guess}name a TOML file, or a shipped config: {', '.join(configs) or 'none'}"
    )


def _read_base(path: Path, name: Any) -> list[Layer]:
    """Read the layers that the file at `path` extends: one, or two if it extends a shipped config."""
    if not isinstance(name, str):
        raise ConfigError(f"{path}: extends = {name!r} is not a file", fix='write extends = "other.toml"')
    file = path.parent / Path(name).expanduser()
    file = _find_config(file if file.exists() else name)
    if find_run_folder(file) is not None:
        raise ConfigError(
            f"{path} extends {name}, the settings of a run, which may run programs",
            fix="extend a file of your own, or a shipped config",
        )
    data = _read_toml(file)
    base = data.pop("extends", None)
    if base is not None and file not in shipped_configs().values():
        raise ConfigError(
            f"{path}: extends {name}, which extends another file itself",
            fix="only one level is allowed: extend a file that extends nothing, or a shipped config",
        )
    return [*([] if base is None else _read_base(file, base)), Layer(_layer_name(file), data)]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))  # Windows editors write a byte order mark
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}", fix="the file must be readable TOML") from None


def parse_override(text: str, fix: str = "write for example train.lr=3e-6") -> tuple[str, Any]:
    """Parse ``KEY=VALUE``: TOML if possible, else text. Raises `ConfigError`, with `fix` if the key is missing.

    >>> parse_override("train.lr=3e-6"), parse_override("engine=vllm")
    (('train.lr', 3e-06), ('engine', 'vllm'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} is not KEY=VALUE", fix=fix)
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        for opening, closing in ("{}", "[]"):
            if value.startswith(opening) and value.count(opening) > value.count(closing):
                raise ConfigError(
                    f"{text!r} has no closing {closing!r}", fix=f"quote it for the shell: '{text}{closing}'"
                ) from None
        return key.strip(), value  # a bare word is a string: engine=vllm


def parse_options(arguments: Sequence[str], key: str = "KEY") -> dict[str, Any]:
    """Parse ``KEY=VALUE`` options of a command line. Raises `ConfigError`, which suggests `key` for one without a key.

    >>> parse_options(["path=tasks.jsonl", "n=8"])
    {'path': 'tasks.jsonl', 'n': 8}
    """
    data: dict[str, Any] = {}
    for argument in arguments:
        _set_nested(data, *parse_override(argument, f"write {key}={argument}"))
    return data


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides; a new task source removes the options of the old one."""
    parsed = [parse_override(text) for text in overrides]
    named = [(*key.split("."), value) for key, value in parsed if key in _SOURCES]
    _drop_old_options(data, {section: {name: value} for section, name, value in named})
    for key, value in parsed:
        _set_nested(data, key, value)


def _set_nested(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = data.setdefault(section, {})
        if isinstance(inner, (str, bool)):
            inner = data[section] = _expand_short_section(section, inner)
        if not isinstance(inner, dict):
            raise ConfigError(f"override {key}: {section} is a value, not a section", fix=f"leave out {key}")
        data = inner
    if isinstance(data.get(last), dict) and isinstance(value, str) and "name" in data[last]:
        value = {"name": value}  # the options of the old implementation do not apply
    data[last] = value


def _expand_short_section(section: str, value: str | bool) -> dict[str, Any]:
    """Write out a section that was only a name, or a switch."""
    if isinstance(value, bool):
        return {}
    return {value: 1.0} if section == "reward" else {"name": value}


def _drop_old_options(base: dict[str, Any], over: dict[str, Any]) -> None:
    """Remove the options of task sources in `base` if `over` names other sources."""
    old = {section: _section_source(base, section) for section in ("tasks", "eval")}
    new = {section: _section_source(over, section) or old[section] for section in old}
    if old["tasks"] and new["tasks"] != old["tasks"]:
        for key in ("source", "sources", "options"):
            base["tasks"].pop(key, None)
    # evaluations that name no source take that of the training tasks
    old_evaluated, new_evaluated = old["eval"] or old["tasks"], new["eval"] or new["tasks"]
    if old_evaluated and new_evaluated != old_evaluated and isinstance(section := base.get("eval"), dict):
        for each in (section, *section.get("also", {}).values()):
            each.pop("options", None)


def _section_source(data: dict[str, Any], section: str) -> str:
    value = data.get(section)
    if not isinstance(value, dict):
        return ""
    return "sources" if value.get("sources") else str(value.get("source", ""))


def _merge_sections(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, str) and isinstance(value, dict):
            old = _expand_short_section(key, old)
        if isinstance(value, dict) and isinstance(old, dict) and key not in ("reward", "options"):
            merged[key] = _merge_sections(old, value)
        else:
            merged[key] = value
    return merged


def _find_unknown_keys(
    data: dict[str, Any], model: type[BaseModel], *path: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Find unknown keys with their sections, and the nearest known name, or ""."""
    for key, value in data.items():
        if key not in model.model_fields:
            near = difflib.get_close_matches(key, model.model_fields, 1, 0.5) or _find_in_sections(key)
            nearest = ".".join((*path, near[0])) if near and near[0] in model.model_fields else "".join(near)
            yield (*path, key), nearest
        elif isinstance(value, dict) and (inner := _find_section_model(model, key)) is not None:
            if not _is_table_of_sections(model, key):
                yield from _find_unknown_keys(value, inner, *path, key)
                continue
            for name, each in value.items():
                if isinstance(each, dict):
                    yield from _find_unknown_keys(each, inner, *path, key, name)


def _is_table_of_sections(model: type[BaseModel], key: str) -> bool:
    return get_origin(model.model_fields[key].annotation) is dict


def _find_section_model(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    kind = model.model_fields[key].annotation
    candidates = [kind, *get_args(kind)]
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _find_in_sections(key: str) -> list[str]:
    """Find the key nearest to `key` in any section: ``lr`` at the top level means ``train.lr``."""
    names = {
        field: f"{section}.{field}"
        for section in Config.model_fields
        if (model := _find_section_model(Config, section)) is not None and not _is_table_of_sections(Config, section)
        for field in model.model_fields
    }
    near = difflib.get_close_matches(key, names, 1, 0.75)
    return [names[near[0]]] if near else []


class Setting(NamedTuple):
    """Setting by dotted key; a `default` of None is unset.

    `source` is ``default``, ``preset NAME``, ``file PATH`` or ``override KEY=VALUE``.
    """

    key: str
    value: Any
    default: Any
    source: str


def list_settings(source: str | Path | None = None, overrides: Sequence[str] = ()) -> list[Setting]:
    """List settings of `source` with `overrides`, or the defaults, in reference order. Raises `ConfigError`."""
    defaults = _flatten_keys(Config(run=Run(name=REQUIRED)).model_dump(mode="json"))
    if source is None:
        return [Setting(key, None if value == REQUIRED else value, value, "default") for key, value in defaults.items()]
    values = _flatten_keys(load_config(source, overrides).model_dump(mode="json"))
    named_layers = [(layer.name, layer.data) for layer in read_layers(source)]
    named_layers += [(f"override {text}", parse_options([text])) for text in overrides]
    origins: dict[str, str] = {}
    for name, data in named_layers:
        for key in _flatten_keys(data):  # ``engine = "tiny"`` replaces the whole table
            origins = {other: origin for other, origin in origins.items() if not other.startswith(f"{key}.")}
            origins[key] = name
    return [Setting(key, value, defaults.get(key), _find_setting_origin(key, origins)) for key, value in values.items()]


def format_settings(settings: Sequence[Setting]) -> str:
    """Format as a table."""
    rows = [("setting", "value", "default", "set by")]
    rows += [
        (key, _format_setting_value(value), _format_setting_value(default), source)
        for key, value, default, source in settings
    ]
    widths = [min(44, max(map(len, column))) for column in zip(*rows, strict=True)][:3]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _format_setting_value(value: Any) -> str:
    if value is None:
        return "unset"
    return json.dumps(value) if value != REQUIRED else REQUIRED


def _find_setting_origin(key: str, origins: Mapping[str, str]) -> str:
    """Origin of `key` or its table: ``engine = "tiny"`` sets ``engine.name``."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return "default"


def _flatten_keys(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            leaves |= _flatten_keys(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves
