"""Replies as each family samples them, written by hand: what readers must read."""

from __future__ import annotations

import json
from typing import Any

from coderepairrl import tokens


def encode_reply(
    codec: tokens.Codec, words: str, calls: list[tuple[str, dict[str, Any]]], thought: str = "", *, first: int = 0
) -> list[int]:
    """Ids of a reply in the family's own way, written here by hand, after `thought` that its prompt opened.

    `first` is the number of its first call, in formats that number them.
    """
    if codec.format.name == "openai":
        return encode_harmony(codec, words, calls[0] if calls else None)
    added = codec.tokenizer.added
    ids = [*codec.encode(f"{thought}\n"), added["</think>"]] if thought else []
    ids += codec.encode(words)
    for at, (title, arguments) in enumerate(calls):
        text = json.dumps(arguments)
        if codec.format.name == "hermes":
            ids += enclose(codec, "<tool_call>", f'\n{{"name": "{title}", "arguments": {text}}}\n', "</tool_call>")
        elif codec.format.name == "qwen3_coder":
            values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
            ids += enclose(codec, "<tool_call>", f"\n<function={title}>\n{values}</function>\n", "</tool_call>")
        elif codec.format.name == "llama3_json":
            ids += codec.encode(f'{{"name": "{title}", "parameters": {text}}}')
        elif codec.format.name == "mistral" and "[ARGS]" not in added:
            entry = f'{{"name": "{title}", "arguments": {text}, "id": "abcdefgh{at}"}}'
            ids += [added["[TOOL_CALLS]"], *codec.encode("[")] if not at else codec.encode(", ")
            ids += codec.encode(entry + "]" * (at + 1 == len(calls)))
        elif codec.format.name == "mistral" and "[CALL_ID]" in added:
            ids += [added["[TOOL_CALLS]"], *codec.encode(title), added["[CALL_ID]"], *codec.encode(f"abcdefgh{at}")]
            ids += [added["[ARGS]"], *codec.encode(text)]
        elif codec.format.name == "mistral":
            ids += [added["[TOOL_CALLS]"], *codec.encode(title), added["[ARGS]"], *codec.encode(text)]
        elif codec.format.name == "glm45":
            ids += [added["<tool_call>"], *codec.encode(f"{title}\n")]
            for key, value in arguments.items():
                ids += enclose(codec, "<arg_key>", key, "</arg_key>")
                ids += [*codec.encode("\n"), *enclose(codec, "<arg_value>", value, "</arg_value>"), *codec.encode("\n")]
            ids += [added["</tool_call>"]]
        elif codec.format.name == "deepseek_v31":
            ids += [added["<｜tool▁calls▁begin｜>"]] if title == calls[0][0] else []
            call = [*codec.encode(title), added["<｜tool▁sep｜>"], *codec.encode(text)]
            ids += [added["<｜tool▁call▁begin｜>"], *call, added["<｜tool▁call▁end｜>"]]
            ids += [added["<｜tool▁calls▁end｜>"]] if title == calls[-1][0] else []
        elif codec.format.name == "minimax_m2":
            values = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
            call = f'\n<invoke name="{title}">\n{values}</invoke>\n'
            ids += enclose(codec, "<minimax:tool_call>", call, "</minimax:tool_call>")
        elif codec.format.name == "seed_oss":
            values = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
            ids += enclose(
                codec, "<seed:tool_call>", f"\n<function={title}>\n{values}</function>\n", "</seed:tool_call>"
            )
        elif codec.format.name == "gemma4":
            ids += [added["<|tool_call>"], *codec.encode(f"call:{title}{{")]
            for place, (key, value) in enumerate(arguments.items()):
                ids += [*codec.encode("," * bool(place) + f"{key}:"), *enclose(codec, '<|"|>', value, '<|"|>')]
            ids += [*codec.encode("}"), added["<tool_call|>"]]
        elif codec.format.name == "kimi_k2":
            ids += [added["<|tool_calls_section_begin|>"]] * (not at)
            name = codec.encode(f"functions.{title}:{first + at}")
            ids += [added["<|tool_call_begin|>"], *name, added["<|tool_call_argument_begin|>"], *codec.encode(text)]
            ids += [added["<|tool_call_end|>"], *[added["<|tool_calls_section_end|>"]] * (at + 1 == len(calls))]
        else:
            raise AssertionError(codec.format.name)
    return [*ids, codec.stop_ids[0]]


def encode_harmony(codec: tokens.Codec, words: str, call: tuple[str, dict[str, Any]] | None) -> list[int]:
    """Ids of a reply in harmony: thoughts, then words or a call, as gpt-oss samples them."""
    added, ids = codec.tokenizer.added, []
    parts = [("<|channel|>", "analysis", "hm")]
    if call is None:
        parts += [("<|channel|>", "final", words)]
    elif words:
        parts += [("<|channel|>", "commentary", words)]
    for at, (token, channel, text) in enumerate(parts):
        head = [added["<|end|>"], added["<|start|>"], *codec.encode("assistant")] if at else []
        ids += [*head, added[token], *codec.encode(channel), added["<|message|>"], *codec.encode(text)]
    if call is None:
        return [*ids, added["<|return|>"]]
    ids += [added["<|end|>"], added["<|start|>"], *codec.encode("assistant"), added["<|channel|>"]]
    ids += [*codec.encode(f"commentary to=functions.{call[0]} "), added["<|constrain|>"], *codec.encode("json")]
    return [*ids, added["<|message|>"], *codec.encode(json.dumps(call[1])), added["<|call|>"]]


def enclose(codec: tokens.Codec, begin: str, text: str, end: str) -> list[int]:
    return [codec.tokenizer.added[begin], *codec.encode(text), codec.tokenizer.added[end]]


def encode_tags(codec: tokens.Codec, text: str) -> list[int]:
    """Ids of `text` in which special tokens are themselves."""
    return codec.tokenizer.encode(text)
