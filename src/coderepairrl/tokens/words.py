"""Fast encoding of ASCII text, word by word, with a cache.

A byte-level BPE merges only within the pieces of a regular expression, so a piece's ids never change.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ASCII = {"L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
NORMAL = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that keep ASCII."""

_WORDS = 1 << 15
_LONGEST = 32


class Words(dict[str, tuple[int, ...]]):
    """Cache of at most 32,768 words of at most 32 characters, filled by the BPE `model`."""

    def __init__(self, pattern: re.Pattern[str], model: Any, alphabet: Mapping[str, int]) -> None:
        self._split = pattern.findall
        self._model = model
        self._spelled = str.maketrans({chr(byte): char for char, byte in alphabet.items()})

    def encode(self, text: str) -> list[int] | None:
        """Ids of `text` without added tokens; None unless ASCII."""
        if not text.isascii():
            return None
        words = self._split(text)
        if "".join(words) != text:  # the tokenizer keeps what the pattern skips as a piece
            return None
        return list(chain.from_iterable(map(self.__getitem__, words)))

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(word.translate(self._spelled)))
        if len(word) <= _LONGEST:
            if len(self) >= _WORDS:
                self.clear()
            self[word] = ids
        return ids


def words(spec: Mapping[str, Any], tokenizer: Any, alphabet: Mapping[str, int]) -> Words | None:
    """`Words` for the `tokenizer` of a ``tokenizer.json``; None if `re` splits text differently."""
    pattern = _pattern(spec)
    if pattern is None or any(kind not in NORMAL for kind in types(spec.get("normalizer"), "normalizers")):
        return None
    probe = "".join(random.Random(0).choices("aZs'tlvred09 _.-(\t\n\r  \x00\x0b\x1c\x7f", k=8192))
    pieces = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(probe)]
    if [match.span() for match in pattern.finditer(probe)] != pieces:
        return None
    return Words(pattern, tokenizer.model, alphabet)


def _pattern(spec: Mapping[str, Any]) -> re.Pattern[str] | None:
    pre_tokenizer = spec.get("pre_tokenizer") or {}
    *splits, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(splits) + bool(last.get("use_regex")) != 1:
        return None
    source = GPT2
    for split in splits:
        if (split["type"], split.get("behavior")) != ("Split", "Isolated") or "Regex" not in split["pattern"]:
            return None
        source = split["pattern"]["Regex"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for syntax whose meaning differs or will change
            pattern = re.compile(_ascii(source), re.ASCII)
    except (re.error, KeyError, Warning):
        return None
    return None if pattern.groups else pattern


def _ascii(source: str) -> str:
    """Spell out Unicode categories. Raises KeyError for one missing from `ASCII`."""
    depth = 0
    parts = []
    for part in re.findall(r"\\p\{\w+\}|\\.|[^\\]", source, re.DOTALL):
        depth += (part == "[") - (part == "]")
        if part.startswith(r"\p{"):
            members = ASCII[part[3:-1]]
            part = members if depth else f"[{members}]"
        parts.append(part)
    return "".join(parts)


def types(step: Mapping[str, Any] | None, inner: str) -> list[str]:
    """Types of a tokenizer's step, or of its inner ones."""
    return [str(part.get("type")) for part in (step or {}).get(inner, [step] if step else [])]
