"""Refuse secrets in configurations, which are printed, stored and shared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

FIX = (
    "a configuration is kept in the run folder and shown: put the secret into an environment variable, and name it "
    "(engine.options.key_env of a remote model), or read it in a class of your own; for agents write {api_key}"
)

# words of snake_case, camelCase and CAPITALS
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_ALWAYS = frozenset(
    {"password", "passwd", "passphrase", "secret", "secrets", "authorization", "credential"}
    | {"passwords", "credentials", "pwd"}
)
"""Names of secrets."""
_UNLESS_NUMBERS = frozenset({"key", "apikey", "token", "pass", "pat", "pw"})
"""Names under which all but numbers are secrets."""
_ENDINGS = ("password", "passwd", "secret")
"""Endings of words without separators, such as PGPASSWORD."""
_PLACE_WORDS = frozenset({"env", "var", "variable", "file", "path"})
"""Words of keys that name a secret's place: ``key_env``, ``env_key``."""
_HARMLESS_WORDS = frozenset({"eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "special", "sort"})
"""Words of a tokenizer's tokens and of sort keys: ``eos_token``, ``sort_key``."""
_FILLED_IN = re.compile(r"(\s*(Bearer\s+)?(\{[A-Za-z_]+\}|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?)\s*)?")
"""Empty text, a recipe's placeholder, or a shell variable."""
# user and password in any URL, or a user alone (maybe a token) in an http or https URL
_LOGIN = re.compile(r"://[^/?#\s@:]*:[^/?#\s@]+@|\bhttps?://[^/?#\s@]+@", re.IGNORECASE)
_KNOWN = re.compile(
    r"\bsk-(?=[\w-]*[0-9])[\w-]{20,}|\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\bAIza[\w-]{35}|\bxox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|[?&](api_?key|access_token|token)=[^&{$\s]|\bglpat-[\w-]{20,}|\b[Bb]earer\s+[\w.~+/-]{12,}"
)
"""Keys of well-known services, or their beginnings."""
# `_KNOWN` to the secret's end, to replace it whole
_WHOLE_SECRET = re.compile(
    rf"-----BEGIN [A-Z ]*PRIVATE KEY.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)|({_KNOWN.pattern})[^&\s\"']*", re.DOTALL
)


def find_secrets(value: Any, key: str = "") -> Iterator[str]:
    """Find dotted keys below `key` that hold a secret in clear, judged by name or form.

    >>> list(find_secrets({"options": {"env": {"OPENAI_API_KEY": "s3cret", "HOST_KEY": "{api_key}"}, "key_env": "X"}}))
    ['options.env.OPENAI_API_KEY']
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from find_secrets(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        if any(map(_is_secret_argument, value, [None, *value])) or is_secret(key, " ".join(map(str, value))):
            yield key
        else:
            for number, inner in enumerate(value):
                yield from find_secrets(inner, f"{key}.{number}" if isinstance(inner, Mapping) else key)
    elif is_secret(key, value):
        yield key


def remove_secrets(text: str) -> str:
    """Remove logins in URLs and keys of well-known services.

    >>> remove_secrets("curl -H 'Authorization: Bearer abcdefghijklmnop' https://me:pw@host/?token=s3cret&x=1")
    "curl -H 'Authorization: ***' https://***@host/***&x=1"
    """
    return _WHOLE_SECRET.sub("***", _LOGIN.sub(lambda login: f"{login[0].partition('://')[0]}://***@", text))


def is_secret(key: str, value: Any) -> bool:
    """Whether `value` is a secret under `key`.

    >>> is_secret("agent.options.env.MY_TOKEN", "abc"), is_secret("max_tokens", 512), is_secret("key", "{api_key}")
    (True, False, False)
    """
    if isinstance(value, str):
        named = _is_secret_name(key, _ALWAYS | _UNLESS_NUMBERS) and not _FILLED_IN.fullmatch(value)
        return named or bool(_LOGIN.search(value) or _KNOWN.search(value))
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_secret_name(key, _ALWAYS)


def _is_secret_argument(word: Any, before: Any) -> bool:
    """Whether a command's `word` is a secret: ``--api-key=X``, ``API_KEY=X``, or ``X`` after ``--api-key``."""
    if not isinstance(word, str):
        return False
    name, equals, value = word.partition("=")
    if equals and re.fullmatch(r"[\w.-]+", name):
        return is_secret(name, value)
    is_value = isinstance(before, str) and before.startswith("-") and "=" not in before
    return is_value and not word.startswith("-") and is_secret(before, word)


def _is_secret_name(key: str, secret_words: frozenset[str]) -> bool:
    words = [word.lower() for word in _WORD.findall(key.rpartition(".")[2])]
    while words and words[-1].isdigit():  # API_KEY_2
        words.pop()
    is_secret_word = bool(words) and (words[-1] in secret_words or words[-1].endswith(_ENDINGS))
    return is_secret_word and not {*words[:-1]} & (_PLACE_WORDS | _HARMLESS_WORDS)
