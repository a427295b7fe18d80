"""ASCII text to ids word by word, with the words of earlier texts remembered.

A byte-level BPE splits text by a regular expression and merges within each piece only, so the ids of a piece are
always the same. Which pieces there are is found by Python's `re`, on ASCII text only, where the two dialects of
regular expressions agree; a pattern on which they do not is left to the tokenizer. A quarter of the tokenizer's time.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of a ``ByteLevel`` pre-tokenizer that has ``use_regex``."""
ASCII = {"L": "a-zA-Z", "Lu": "A-Z", "Ll": "a-z", "N": "0-9", "Nd": "0-9"}
"""The members of a Unicode category among the first 128 characters."""
NORMAL = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave ASCII as it is."""

_WORDS = 1 << 15
_LONGEST = 32


class Words(dict[str, tuple[int, ...]]):
    """The ids of words of at most 32 characters, at most 32,768 of them; `model` knows those of all others."""

    def __init__(self, pattern: re.Pattern[str], model: Any, alphabet: Mapping[str, int]) -> None:
        self._split = pattern.findall
        self._model = model
        self._spelled = str.maketrans({chr(byte): char for char, byte in alphabet.items()})

    def encode(self, text: str) -> list[int] | None:
        """Ids of `text`, which holds no added token; None if it is not ASCII."""
        if not text.isascii():
            return None
        words = self._split(text)
        if "".join(words) != text:  # what the pattern skips is a piece, too
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
    """`Words` for the `tokenizer` of a ``tokenizer.json``; None for one that does not split as `re` can.

    `alphabet` is the stand-in of each byte, to the byte.
    """
    pattern = _pattern(spec)
    if pattern is None or any(kind not in NORMAL for kind in types(spec.get("normalizer"), "normalizers")):
        return None
    probe = "".join(random.Random(0).choices("aZs'tlvred09 _.-(\t\n\r  \x00\x0b\x1c\x7f", k=8192))
    pieces = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(probe)]
    if [match.span() for match in pattern.finditer(probe)] != pieces:
        return None
    return Words(pattern, tokenizer.model, alphabet)


def _pattern(spec: Mapping[str, Any]) -> re.Pattern[str] | None:
    """What splits text, where it is one pattern, as `re` has it."""
    whole = spec.get("pre_tokenizer") or {}
    *splits, last = whole.get("pretokenizers") or [whole]
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
            warnings.simplefilter("error")  # of what the dialects understand differently
            pattern = re.compile(_ascii(source), re.ASCII)
    except (re.error, KeyError, Warning):
        return None
    return None if pattern.groups else pattern


def _ascii(source: str) -> str:
    """A regular expression with its Unicode categories spelled out. Raises KeyError for one that is not in `ASCII`."""
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
    """The types of a step of a tokenizer, or of the steps `inner` that it is a sequence of."""
    return [str(part.get("type")) for part in (step or {}).get(inner, [step] if step else [])]
