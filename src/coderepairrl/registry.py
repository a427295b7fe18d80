"""Find implementations by name: shipped ones in a table, others by import path ``module:Class``.

Also defines `Finding`, a result of an exam.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from coderepairrl.errors import ConfigError, combine_errors

_IMPORT_FIX = "install it, or run crrl in the folder that contains it"
_UNION_MEMBER = re.compile(r"(str|int|float|bool|(list|tuple|dict|set)\[.*)$")
"""Names of types that pydantic adds to the location of an error in a union."""


class Finding(NamedTuple):
    """Result of a ``crrl check`` question, or of a run's prerequisite.

    >>> Finding("ids are unique", False, "bug/1").ok
    False
    """

    name: str
    ok: bool
    detail: str = ""
    fix: str = ""
    required: bool = True
    """False if a failure has no consequences."""


def suggest_nearest(word: str, choices: Iterable[str]) -> str:
    """``did you mean 'X'?`` with the choice nearest to `word`, else all choices.

    >>> suggest_nearest("bwarp", ["bwrap", "docker"])
    "did you mean 'bwrap'?"
    """
    names = sorted(choices)
    near = difflib.get_close_matches(word, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}."


def suggest_run(folder: Path) -> str:
    """Suggest the runs in `folder`, or, if it does not exist, one of similar name beside it; else ""."""
    if folder.exists():
        inside = sorted(str(each.parent) for each in folder.glob("*/run.json"))
        return f"name one of the runs in it: {', '.join(inside)}" if inside else ""
    runs = [each.parent.name for each in folder.parent.glob("*/run.json")]
    return suggest_nearest(folder.name, runs) if runs else ""


def resolve_class(kind: str, name: str, shipped: Mapping[str, str]) -> Any:
    """Find the class `name`: a key of `shipped` (values are import paths) or ``module:Class``.

    Messages name `kind`. Also finds modules in the current folder. Raises `ConfigError` with the nearest name or the
    failed import; errors in a user's module pass through.
    """
    module_name, colon, attribute = shipped.get(name, name).partition(":")
    if not colon or not module_name:
        raise ConfigError(
            f"unknown {kind} {name!r}",
            fix=f"{suggest_nearest(name, shipped)} A class of your own is named module:Class.",
        )
    try:
        module = importlib.import_module(module_name) if name in shipped else _import_user_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but not a module that it imports
        raise ConfigError(f"{kind} {name!r}: there is no module {error.name}", fix=_IMPORT_FIX) from error
    implementation = getattr(module, attribute, None)
    if implementation is None:
        names = [key for key, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value)]
        raise ConfigError(f"{kind} {name!r}: {module_name} has no {attribute!r}", fix=suggest_nearest(attribute, names))
    return implementation


def _import_user_module(name: str) -> ModuleType:
    """Import a user's module: installed, or from the current folder, which installed scripts do not search.

    That folder is searched last, for this module only: it may be an untrusted repository (``crrl fix``).
    """
    top, folder = name.partition(".")[0], Path.cwd()
    is_local = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
    if is_local and str(folder) not in sys.path and importlib.util.find_spec(top) is None:
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    return importlib.import_module(name)


def check_options(
    kind: str, name: str, call: Callable[..., Any], options: Mapping[str, Any], also: Iterable[str] = ()
) -> None:
    """Raise `ConfigError` (`CombinedError` for several) for options that `call` does not take, with the nearest option.

    `also` are further names to suggest.
    """
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    keywords = [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    unknown = [
        ConfigError(f"{kind} {name!r} has no option {option!r}", fix=suggest_nearest(option, [*keywords, *also]))
        for option in options
        if option not in keywords
    ]
    if unknown:
        raise combine_errors(unknown)


def check_types(kind: str, name: str, call: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a value that does not match `call`'s annotation.

    Unresolvable annotations of a user's class are skipped, such as imports for type checkers.
    """
    if not options:
        return
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    try:
        parameters = inspect.signature(call, eval_str=True).parameters
        types = {option: parameters[option].annotation for option in options if option in parameters}
        adapters = {
            option: TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False))
            for option, annotation in types.items()
            if annotation is not inspect.Parameter.empty
        }
    except (NameError, PydanticUserError):
        return
    for option, adapter in adapters.items():
        try:
            try:
                as_json = json.dumps(options[option])
            except TypeError:  # a date, or a value that only code can pass
                adapter.validate_python(options[option])
            else:  # in JSON a list may stand for a tuple, and text for a path
                adapter.validate_json(as_json, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (option, *(each for each in first["loc"] if not _UNION_MEMBER.match(str(each))))))
            list_fix = f"""a list: {where} = ["...", "..."] in a file, {where}='["...", "..."]' in a shell"""
            fixes = {
                "string_type": f"""quote it: {where} = "..." in a file, {where}='"..."' on the command line""",
                "tuple_type": list_fix,
                "list_type": list_fix,
            }
            raise ConfigError(
                f"{kind} {name!r}: option {where}: {first['msg']}, not {first['input']!r}",
                fix=fixes.get(first["type"], ""),
            ) from None


def make_part(kind: str, name: str, shipped: Mapping[str, str], protocol: type, options: Mapping[str, Any]) -> Any:
    """Make an instance of the class `name` (`resolve_class`) with `options`; check that it implements `protocol`.

    Raises `ConfigError` for unknown names or options (with the nearest), missing or mistyped options, and classes that
    lack members of `protocol`.
    """
    return make_instance(kind, name, resolve_class(kind, name, shipped), protocol, options)


def make_instance(kind: str, name: str, value: Any, protocol: type, options: Mapping[str, Any]) -> Any:
    """Make an instance of the class `value`; otherwise like `make_part`."""
    _check_members(kind, name, protocol, getattr(value, "__abstractmethods__", ()))
    check_options(kind, name, value, options)
    try:
        inspect.signature(value).bind(**options)
    except TypeError as error:
        section = "tasks" if kind == "task source" else kind
        alternative = ", or as OPTION=VALUE after the source's name" if section == "tasks" else ""
        raise ConfigError(f"{kind} {name!r}: {error}", fix=f"set it in {section}.options{alternative}") from None
    check_types(kind, name, value, options)
    built = value(**options)
    missing = [member for member in protocol_members(protocol) if not hasattr(built, member)]
    _check_members(kind, name, protocol, missing)
    return built


def protocol_members(protocol: type) -> frozenset[str]:
    """Names of all members of `protocol`.

    >>> from coderepairrl.protocols import TaskSource
    >>> sorted(protocol_members(TaskSource))
    ['__iter__', 'evaluation_set', 'name', 'oracle', 'prepare']
    """
    methods = {
        name for name, value in vars(protocol).items() if inspect.isfunction(value) or isinstance(value, property)
    }
    members = methods | inspect.get_annotations(protocol).keys()
    return frozenset(name for name in members if name in ("__call__", "__iter__") or not name.startswith("_"))


def _check_members(kind: str, name: str, protocol: type, missing: Iterable[str]) -> None:
    """Raise `ConfigError` if members of `protocol` are `missing`."""
    if not (missing := sorted(missing)):
        return
    base = f"coderepairrl.protocols.{protocol.__name__}"
    abstract: frozenset[str] = getattr(protocol, "__abstractmethods__", frozenset())
    to_define = [member for member in missing if member in abstract or not hasattr(protocol, member)]
    fix = f"derive it from {base}, which has them"
    if to_define:
        fix = f"define {', '.join(to_define)}; the rest comes from {base}"
    raise ConfigError(
        f"{kind} {name!r} does not implement {protocol.__name__}: it lacks {', '.join(to_define or missing)}", fix=fix
    )
