"""Which tokenizer and chat template a model has, as one short text: ids of one model mean nothing to another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from coderepairrl.errors import ConfigError
from coderepairrl.tokens import template


def digest(folder: Path) -> str:
    """SHA-256 (hexadecimal) of what decides the ids of a conversation: the tokenizer, and the template with the special
    tokens that it names.

    The same for a tokenizer saved anew: the order of keys, the way merges are written, truncation and padding do not
    count. Raises `ConfigError` for files that cannot be read.
    """
    path = folder / "tokenizer.json"
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        model = dict(spec["model"])
        model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix=f"save or download {folder} again") from error
    tokenizer = {key: value for key, value in spec.items() if key not in ("truncation", "padding", "version")}
    written = template.find(folder)
    named = {name: text for name, text in written.tokens.items() if name in written.source} if written else {}
    parts = [tokenizer | {"model": model}, written and written.source, named]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
