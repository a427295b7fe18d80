"""Chat template of a model, applied as transformers does."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from coderepairrl.errors import ConfigError

TODAY = date(2026, 1, 1)  # fixed, for templates that require a date
SECONDS, MEMORY = 10.0, 1 << 30
"""Limits of CPU time and memory: a template comes with a model, and may loop forever."""
_OPTIONAL_CLOCK = re.compile(r"strftime_now\s+is\s+defined")  # such templates have a default date


@dataclass(frozen=True, slots=True)
class Template:
    """Template source, and its special tokens' texts."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        prompt: bool = True,
    ) -> str:
        """Render `messages`, with the generation prompt if `prompt`, without the current date: prompts are stable.

        Raises `ConfigError` when the template fails, or exceeds `SECONDS` or `MEMORY`.
        """
        from jinja2 import TemplateError

        try:
            with _limit_resources():
                return str(
                    _compile(self.source).render(
                        **self.tokens,
                        messages=list(messages),
                        tools=list(tools) or None,
                        add_generation_prompt=prompt,
                        enable_thinking=thinking,
                        thinking=thinking,  # the same switch in DeepSeek's and Granite's
                    )
                )
        except MemoryError:
            raise ConfigError(f"the model's chat template takes more than {MEMORY >> 20} MiB") from None
        except (TemplateError, TypeError, AttributeError, RecursionError) as error:  # values may be nested too deep
            reason = (
                str(error) if isinstance(error, TemplateError) else "a value is nested too deep, or has a wrong type"
            )
            raise ConfigError(f"the model's chat template fails: {reason}") from error


@contextmanager
def _limit_resources() -> Iterator[None]:
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        from jinja2 import TemplateError

        raise TemplateError(f"it takes more than {SECONDS:g} s")

    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123 - faster, and opened for each prompt
        data = int(statm.read().split()[5]) * resource.getpagesize()  # bytes of data and stack
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min(each for each in (data + MEMORY, soft, hard) if each != resource.RLIM_INFINITY)
    old_handler = signal.signal(signal.SIGVTALRM, stop)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)  # which `stop` may interrupt
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            signal.signal(signal.SIGVTALRM, old_handler)


def read_json_object(path: Path, *keys: str) -> dict[str, Any]:
    """Read a JSON object with `keys`. Raises `ConfigError`."""
    fix = f"save or download {path.parent} again"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix=fix) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", fix=fix)
    if missing := [key for key in keys if key not in value]:
        raise ConfigError(f"{path} has no {' and no '.join(missing)}", fix=fix)
    return value


def find_template(folder: Path) -> Template | None:
    """Template in a model's `folder`, if any. Raises `ConfigError` for unreadable files."""
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    jinja = folder / "chat_template.jinja"
    source = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    named = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {key: token.get("content") if isinstance(token, dict) else token for key, token in named.items()}
    return Template(source, {key: text for key, text in texts.items() if isinstance(text, str)})


@lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if _OPTIONAL_CLOCK.search(source) is None:
        environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(source)


def digest_tokenizer(folder: Path) -> str:
    """SHA-256 (hexadecimal) of tokenizer, template and its special tokens. Raises `ConfigError`."""
    path = folder / "tokenizer.json"
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        model = dict(spec["model"])
        model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix=f"save or download {folder} again") from error
    tokenizer = {key: value for key, value in spec.items() if key not in ("truncation", "padding", "version")}
    template = find_template(folder)
    named = {name: text for name, text in template.tokens.items() if name in template.source} if template else {}
    parts = [tokenizer | {"model": model}, template and template.source, named]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
