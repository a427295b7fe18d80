"""The chat template that a model brings, as transformers would apply it: the yardstick of a renderer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from coderepairrl.errors import ConfigError


def find(folder: Path) -> str | None:
    """Source of the template in a model's `folder`, if it has one."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


def apply(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    prompt: bool = True,
) -> str:
    """What template `source` makes of `messages`, with the beginning of a reply if `prompt`.

    Raises `ConfigError` when it cannot.
    """
    from jinja2 import TemplateError

    try:
        return str(
            _compiled(source).render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=prompt,
                enable_thinking=thinking,
            )
        )
    except TemplateError as error:
        raise ConfigError(f"the model's chat template fails: {error}") from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)
