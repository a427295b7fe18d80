"""Byte-level tokenizer in which the text of special tokens can be made inert.

`InertTokenizer.guard` breaks every added token's text, such as ``<|im_end|>`` in an issue, with a sentinel, which
`encode` removes *after* it has found the special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from coderepairrl.errors import ConfigError

SENTINEL = "\udc00"
"""Lone surrogate: absent from valid text, so it cannot be injected."""

NEVER = -1
"""Stands for the id of a token that the vocabulary lacks."""
THOUGHTS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>", "<channel|>"),
)
"""Tags around thoughts; a tokenizer has at most one of these pairs."""

SHORT = 48
"""Longest text whose encoding is cached, in characters: templates repeat short ones."""


def _make_byte_alphabet() -> dict[str, int]:
    """Bytes by the character that stands for each (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


class TooLong(Exception):
    """Text of at least `tokens` tokens, beyond the limit."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


class InertTokenizer:
    """Tokenizer of a ``tokenizer.json``, as `renderers` uses it; decoding is exact on bytes.

    Raises `ConfigError` unless byte-level.
    """

    unk_token_id: int | None = None

    def __init__(self, spec: Mapping[str, Any], *, name: str, eos_token_id: int | None) -> None:
        from tokenizers import Tokenizer

        if list_step_types(spec.get("decoder"), "decoders") != ["ByteLevel"]:
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
        pairs = ((begin, end) for begin, end in THOUGHTS if begin in self.added and end in self.added)
        self.thoughts = next(((self.added[begin], self.added[end]) for begin, end in pairs), (NEVER, NEVER))
        """Ids of the tags around thoughts, or `NEVER`."""
        spec = {**spec, "truncation": None, "padding": None}  # left over from training
        try:
            self._full = Tokenizer.from_str(json.dumps(spec))
        except Exception as error:  # the package raises plain `Exception`
            raise ConfigError(
                f"the tokenizer of {name} cannot be read: {error}",
                fix="save or download it again; or it needs a newer package: pip install -U tokenizers",
            ) from error
        if moved := [text for text, text_id in self.added.items() if self._full.token_to_id(text) != text_id]:
            raise ConfigError(f"the added tokens of {name} differ in their ids from its file: {moved[:5]}")
        vocabulary = self._full.get_vocab(with_added_tokens=True)
        self.largest_id = max(vocabulary.values(), default=-1)
        # in bytes; an ordinary token has one character per byte
        self.longest_token = max([1, *(len(text.encode()) for text in self.added), *map(len, vocabulary)])
        self._shrink_factor = _find_shrink_factor(spec, vocabulary)
        self._limit: int | None = None
        self._counted = 0
        self._ordinary = Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
        longest_first = sorted(self.added, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._alphabet = _make_byte_alphabet()
        self._encode_cached = lru_cache(maxsize=1024)(self._encode)
        self._bytes: dict[int, bytes] = {text_id: text.encode() for text, text_id in self.added.items()}

    def __len__(self) -> int:
        return int(self._full.get_vocab_size(with_added_tokens=True))

    def guard(self, text: str) -> str:
        """Break added tokens by a sentinel. Raises ValueError for invalid Unicode."""
        text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
        return self._markers.sub(lambda match: f"{match[0][0]}{SENTINEL}{match[0][1:]}", text)

    def has_special_token(self, text: str) -> bool:
        """Whether `text` contains a special token."""
        return self._markers.search(text) is not None

    def count_at_least(self, text: str) -> int:
        """Lower bound on the tokens of `text`."""
        if not text.isascii():
            text = text.replace(SENTINEL, "")
        if not self._shrink_factor:
            return 0
        if text.isascii():
            return -(-len(text) // self.longest_token)
        return -(-len(text.encode(errors="surrogatepass")) // (self.longest_token * self._shrink_factor))

    @contextmanager
    def limit_length(self, most: int | None) -> Iterator[None]:
        """Make `encode` raise `TooLong` once texts surely exceed `most` ids. Single thread, not reentrant."""
        self._limit, self._counted = most, 0
        try:
            yield
        finally:
            self._limit = None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`, guarded tokens as ordinary text. Raises `TooLong` within `limit_length`."""
        # `renderers` passes `add_special_tokens`, always false
        if add_special_tokens:
            raise ValueError("renderers add special tokens, tokenizers do not")
        if len(text) <= SHORT:
            return list(self._encode_cached(text))
        if self._limit is not None:
            self._counted += self.count_at_least(text)
            if self._counted > self._limit:
                raise TooLong(self._counted)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if SENTINEL not in text and not self._markers.search(text):
            return self._encode_ordinary(text)
        ids: list[int] = []
        at = 0
        for match in self._markers.finditer(text):
            ids += self._encode_ordinary(text[at : match.start()])
            ids.append(self.added[match[0]])
            at = match.end()
        return ids + self._encode_ordinary(text[at:])

    def _encode_ordinary(self, text: str) -> list[int]:
        text = text.replace(SENTINEL, "")
        return list(self._ordinary.encode(text, add_special_tokens=False).ids)

    def to_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty beyond the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            token: str = self._full.id_to_token(token_id) or ""
            data = self._bytes[token_id] = bytes(self._alphabet[char] for char in token)
        return data

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`, with U+FFFD for invalid UTF-8."""
        if skip_special_tokens:
            raise ValueError("special tokens are part of the text here")
        return b"".join(map(self.to_bytes, token_ids)).decode("utf-8", errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Id of `token`, or None."""
        token_id: int | None = self._full.token_to_id(token)
        return token_id

    def find_id(self, token: str) -> int:
        """Id of `token`, or `NEVER`."""
        token_id = self.convert_tokens_to_ids(token)
        return NEVER if token_id is None else token_id


def _find_shrink_factor(spec: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int:
    """Largest factor by which normalization shrinks text; 0 if unknown."""
    # composing (NFC) can turn a character of 9 bytes into one of 3
    if "Removed" in json.dumps(spec.get("pre_tokenizer")) or not set(_make_byte_alphabet()) <= set(vocabulary):
        return 0
    kinds = list_step_types(spec.get("normalizer"), "normalizers")
    if any(kind not in UNICODE_FORMS for kind in kinds):
        return 0
    return 3 if kinds else 1


UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that keep ASCII."""


def list_step_types(step: Mapping[str, Any] | None, inner: str) -> list[str]:
    """Types of a tokenizer's step, or of its `inner` ones."""
    return [str(part.get("type")) for part in (step or {}).get(inner, [step] if step else [])]
