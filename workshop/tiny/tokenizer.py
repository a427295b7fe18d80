"""The tiny policy's tokenizer: single tokens for what never changes, lexemes for code, bytes for everything else.

Repairs by search and replace need copying, which a small vocabulary lets a policy learn in minutes on a CPU. So the
constant prompt, the tool schemas, the JSON around a call and the phrases of issues are one token each, operators and
words that several training functions share are one token each, and every other text, names of files and functions
included, is encoded in bytes: no text is unknown, and ``decode(encode(x)) == x``.

It is byte-level BPE without merges: a regular expression cuts out the known pieces, leftmost and longest first, and
`ignore_merges` looks each up as a whole; other text is split into bytes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from coderepairrl.tasks.mutants.corpus_tasks import OPENINGS, QUOTES, UNSEEN_MODULES, load_corpus_functions
from coderepairrl.tasks.mutants.mutations import REPLACED_NAMES
from workshop.tiny import prompt

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT = 2048
SHARED = 3
"""Least number of training functions that must use a word to make it a token."""

_INDENTS = ("\n\n\ndef ", "\n\n", *("\n" + "    " * depth for depth in (1, 2, 3, 4)))
_CODE = (
    *(f" {sign} " for sign in ("+", "-", "*", "/", "//", "%", "**", "<", "<=", ">", ">=", "==", "!=", "=")),
    *(f" {sign}= " for sign in ("+", "-", "*", "//")),
    *(" and ", " or ", " in ", " not in ", ", ", "return ", "if ", "elif ", "while ", "for ", "def ", "not "),
    *("):", "):\n    ", "()", "[]", "''", "' '", "])", "))", ".append(", "[i]", "[j]", ".py", "test_"),
)
_SCAFFOLD = (
    *("system\n", "user\n", "assistant\n", "\n\n# Tools\n\n"),
    *('\n{"name": "shell", "arguments": {"cmd": "', '"}}\n', '\n{"name": "apply_patch", "arguments": {"file_path": "'),
    *('", "old_content": "', '", "new_content": "', "cat ", "ls", "grep -n ", ": No such file or directory"),
    *("exit ", prompt.DONE, prompt.TEXTS.absent, prompt.TEXTS.no_file, prompt.TEXTS.identical),
    prompt.TEXTS.patched,
)
_ERRORS = ("IndexError", "TypeError", "ValueError", "AttributeError", "ZeroDivisionError", "UnboundLocalError", "None")
# Text of Qwen's template around tools; the markers inside are tokens of their own.
_TOOLS_HEADER = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within ",
    " XML tags:\n",
    '\n{"name": <function-name>, "arguments": <args-json-object>}\n',
)


def pieces() -> list[str]:
    """Every multi-character token in matching order, longest first."""
    schemas = ["\n" + json.dumps(tool, ensure_ascii=False) for tool in prompt.TOOLS]
    phrases = [part for text in (*OPENINGS, *QUOTES) for part in re.split(r"\{\w+\}", text) if len(part) > 1]
    fixed = {*_INDENTS, *_CODE, *_SCAFFOLD, *_ERRORS, *_TOOLS_FOOTER, _TOOLS_HEADER, *schemas, *phrases, prompt.SYSTEM}
    return sorted(fixed | set(_words()), key=lambda piece: (-len(piece), piece))


def _words() -> list[str]:
    """Words of the training functions' code and of the mutations, without those of unseen functions."""
    shared: Counter[str] = Counter()
    for function in load_corpus_functions():
        if function.module not in UNSEEN_MODULES:
            shared.update({word for word in re.findall(r"[A-Za-z]+", function.source) if len(word) > 1})
    return sorted({word for word, count in shared.items() if count >= SHARED} | set(REPLACED_NAMES) | {"str", "int"})


def save(folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat template into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_spec(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _spec() -> dict[str, Any]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    known_pieces = pieces()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["".join(part for part, _ in byte_level.pre_tokenize_str(piece)) for piece in known_pieces]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *spelled])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    pattern = "|".join(_pattern(piece) for piece in known_pieces)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    return spec


def _pattern(piece: str) -> str:
    """A regular expression for `piece`; a word matches between underscores, but not inside a longer word."""
    escaped = re.escape(piece)
    return f"(?<![A-Za-z]){escaped}(?![A-Za-z])" if piece.isalpha() else escaped
