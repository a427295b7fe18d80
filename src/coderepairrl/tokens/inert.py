"""A byte-level tokenizer in which the text of a special token can be made inert.

Whoever writes ``<|im_end|>`` into an issue, a file or a tool result must not be able to end a message with it. `guard`
breaks the text of every added token with a sentinel; `InertTokenizer.encode`, which `renderers` calls on strings that
mix its own structure with guarded text, joins it again *after* the structure was found. Text without the look of a
special token takes the ordinary path, unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from coderepairrl.errors import ConfigError
from coderepairrl.tokens.words import NORMAL, types, words

SENTINEL = "\udc00"
"""A lone surrogate: no valid text holds one, so no text can smuggle in or lose a sentinel."""

SHORT = 48
"""Characters of a text that is probably structure: templates ask for the same few again and again."""


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary (GPT-2), to the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TooLong(Exception):
    """Text of at least `tokens` tokens, which is more than there may be."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class InertTokenizer:
    """What `renderers` needs of a tokenizer, over a ``tokenizer.json``; decoding is exact on bytes.

    Raises `ConfigError` for a tokenizer that is not byte-level, or whose added tokens swallow neighbours.
    """

    unk_token_id: int | None = None

    def __init__(self, spec: Mapping[str, Any], *, name: str, eos_token_id: int | None) -> None:
        from tokenizers import Tokenizer

        if not _is_byte_level(spec.get("decoder")):
            raise ConfigError(
                f"the tokenizer of {name} is not byte-level, so its ids cannot be decoded exactly one by one",
                fix="use a model with a byte-level BPE tokenizer (Qwen, Llama 3, GLM, DeepSeek, ...)",
            )
        added = spec.get("added_tokens") or []
        greedy = [t["content"] for t in added if t.get("lstrip") or t.get("rstrip") or t.get("single_word")]
        if greedy:
            raise ConfigError(f"the tokenizer of {name} has added tokens that swallow their neighbours: {greedy[:5]}")
        self.name_or_path = name
        self.eos_token_id = eos_token_id
        self.added: dict[str, int] = {token["content"]: token["id"] for token in added}
        spec = {**spec, "truncation": None, "padding": None}  # of training, say
        self._full = Tokenizer.from_str(json.dumps(spec))
        if moved := [text for text, text_id in self.added.items() if self._full.token_to_id(text) != text_id]:
            raise ConfigError(f"the added tokens of {name} have other ids than its file says: {moved[:5]}")
        vocabulary = self._full.get_vocab(with_added_tokens=True)
        self.largest = max(vocabulary.values(), default=-1)
        """The largest id."""
        self.longest = max((len(text.encode()) for text in self.added), default=1)
        """Bytes of the longest token."""
        self.longest = max(self.longest, *map(len, vocabulary))  # a stand-in is one character for each byte
        self._shrinks = _shrinks(spec, vocabulary)
        self._most: int | None = None
        self._counted = 0
        self._plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
        longest_first = sorted(self.added, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._alphabet = _byte_alphabet()
        self._words = words(spec, self._full, self._alphabet)
        self._scaffold = lru_cache(maxsize=1024)(self._encode)
        self._bytes: dict[int, bytes] = {text_id: text.encode() for text, text_id in self.added.items()}

    def __len__(self) -> int:
        return int(self._full.get_vocab_size(with_added_tokens=True))

    def guard(self, text: str) -> str:
        """`text` with the look of every added token broken. Raises ValueError for text that is not Unicode."""
        text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        return self._markers.sub(lambda match: f"{match[0][0]}{SENTINEL}{match[0][1:]}", text)

    def least(self, text: str) -> int:
        """Tokens that `text` has at the very least: its bytes, by those of the longest token."""
        if not text.isascii():
            text = text.replace(SENTINEL, "")
        if not self._shrinks:
            return 0
        if text.isascii():
            return -(-len(text) // self.longest)
        return -(-len(text.encode(errors="surrogatepass")) // (self.longest * self._shrinks))

    @contextmanager
    def bounded(self, most: int | None) -> Iterator[None]:
        """Within, `encode` raises `TooLong` instead of tokenizing texts that together must have more than `most` ids.

        Not nested, and by one thread at a time.
        """
        self._most, self._counted = most, 0
        try:
            yield
        finally:
            self._most = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`: added tokens are found, guarded ones are ordinary text. Raises `TooLong` where `bounded`.

        `add_special_tokens` is there because `renderers` passes it, always false: templates say what goes where.
        """
        if add_special_tokens:
            raise ValueError("renderers add special tokens, tokenizers do not")
        if len(text) <= SHORT:
            return list(self._scaffold(text))
        if self._most is not None:
            self._counted += self.least(text)
            if self._counted > self._most:
                raise TooLong(self._counted)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if SENTINEL not in text and not self._markers.search(text):
            return self._ordinary(text)
        ids: list[int] = []
        at = 0
        for match in self._markers.finditer(text):
            ids += self._ordinary(text[at : match.start()])
            ids.append(self.added[match[0]])
            at = match.end()
        return ids + self._ordinary(text[at:])

    def _ordinary(self, text: str) -> list[int]:
        """Ids of text without added tokens."""
        text = text.replace(SENTINEL, "")
        found = self._words.encode(text) if self._words is not None else None
        return list(self._plain.encode(text, add_special_tokens=False).ids) if found is None else found

    def to_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id beyond the vocabulary (padded embeddings)."""
        known = self._bytes.get(token_id)
        if known is None:
            token: str = self._full.id_to_token(token_id) or ""
            known = self._bytes[token_id] = bytes(self._alphabet[char] for char in token)
        return known

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`, special tokens included, U+FFFD for bytes that are not UTF-8."""
        if skip_special_tokens:
            raise ValueError("special tokens are part of the text here")
        return b"".join(map(self.to_bytes, token_ids)).decode("utf-8", errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of `token`, or None."""
        found: int | None = self._full.token_to_id(token)
        return found


def _shrinks(spec: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int:
    """How many bytes of text that is not ASCII become one, at most, before it is split into tokens; 0 if nobody knows.

    Composing (NFC), a character of 9 bytes has 3 after it. ASCII stays as it is.
    """
    if "Removed" in json.dumps(spec.get("pre_tokenizer")) or not set(_byte_alphabet()) <= set(vocabulary):
        return 0
    kinds = types(spec.get("normalizer"), "normalizers")
    if any(kind not in NORMAL for kind in kinds):
        return 0
    return 3 if kinds else 1


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if not decoder:
        return False
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]
