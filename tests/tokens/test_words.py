"""Text tokenized word by word has the ids that the tokenizer gives it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from family import learn_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coderepairrl.tokens.inert import GPT2, InertTokenizer

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {"gpt2": None, "gpt2 spelled out": GPT2, "qwen": QWEN, "llama 3": QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")}
EVERY = pytest.mark.parametrize("name", PATTERNS)


def spec(pattern: str | None) -> dict[str, Any]:
    """Of a tokenizer learned from this file."""
    tokenizer = learn_tokenizer(pattern, *[Path(__file__).read_text()] * 2)
    tokenizer.add_tokens(["<think>"])
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


@cache
def made(name: str) -> tuple[InertTokenizer, Any]:
    from tokenizers import Tokenizer

    found = spec(PATTERNS[name])
    return InertTokenizer(found, name=name, eos_token_id=None), Tokenizer.from_str(json.dumps(found))


@EVERY
@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.text(st.characters(max_codepoint=127), max_size=9),
            st.text(max_size=5),
            st.sampled_from(("It's", " 'LL ", "\n\n  \n", "\r\n\t", "123", " ?!\n\n", "a" * 40, "\x1c", "f(x):\n    ")),
        ),
        max_size=12,
    ).map("".join)
)
@example(text=Path(__file__).read_text())
def test_words_are_tokenized_as_in_their_text(name: str, text: str) -> None:
    ours, reference = made(name)
    wanted = reference.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == wanted
    assert ours.encode(f"{text}{'.' * 50}") == reference.encode(f"{text}{'.' * 50}", add_special_tokens=False).ids


@EVERY
def test_the_words_of_usual_tokenizers_are_found(name: str) -> None:
    """And remembered, up to a number and a length."""
    words = made(name)[0]._words
    assert words is not None
    words.clear()
    for number in range(40_000):
        words.encode(f" w{number:x}q")
    words.encode("a" * 1000)
    assert 0 < len(words) <= 1 << 15
    assert max(map(len, words)) <= 32
    assert words.encode("naïve") is None


@pytest.mark.parametrize(
    "pattern",
    [
        r"\h+|\H+",  # hexadecimal digits there, unknown here
        r"[a-z&&[^d]]+|.|\n",  # an intersection there
        r"(a)|[^a]+",  # groups
        r"\p{Greek}+|\P{Greek}+",
        r"\w+",  # what lies between is a piece, too
    ],
)
def test_a_pattern_that_means_something_else_is_left_to_the_tokenizer(pattern: str) -> None:
    from tokenizers import Tokenizer

    found = spec(pattern)
    ours = InertTokenizer(found, name="strange", eos_token_id=None)
    assert ours._words is None
    text = "The defaced facade\n" * 9
    assert ours.encode(text) == Tokenizer.from_str(json.dumps(found)).encode(text).ids


def test_a_tokenizer_that_was_saved_with_a_limit_has_none() -> None:
    found = spec(QWEN)
    found["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    found["padding"] = None
    ours = InertTokenizer(found, name="cut", eos_token_id=None)
    assert ours.decode(ours.encode("naïve words " * 20)) == "naïve words " * 20
