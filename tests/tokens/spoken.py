"""Replies in the format of each family, written without the code that must read them."""

from __future__ import annotations

import json
from typing import Any

from coderepairrl import tokens


def encode_reply(
    codec: tokens.Codec, words: str, calls: list[tuple[str, dict[str, Any]]], thought: str = "", *, first: int = 0
) -> list[int]:
    """Encode a reply in the family's own way, after `thought` that its prompt opened.

    `first` is the number of its first call, in formats that number them.
    """
    if codec.format.name == "openai":
        return encode_harmony(codec, words, calls[0] if calls else None)
    guard = codec.tokenizer.guard
    written = []
    for number, (name, arguments) in enumerate(calls, first):
        values = {key: guard(value) for key, value in arguments.items()}
        written.append(write_call(codec, name, values, guard(json.dumps(arguments)), number))
    begin, between, end = find_frame_of_calls(codec)
    text = guard(words) + (begin + between.join(written) + end if calls else "")
    return [*codec.tokenizer.encode(f"{thought}\n</think>{text}" if thought else text), codec.stop_ids[0]]


def find_frame_of_calls(codec: tokens.Codec) -> tuple[str, str, str]:
    """Text before, between and after the calls of a reply."""
    if codec.format.name == "mistral" and "[ARGS]" not in codec.tokenizer.added:
        return "[TOOL_CALLS][", ", ", "]"
    frames = {
        "deepseek_v31": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
        "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    }
    return frames.get(codec.format.name, ("", "", ""))


def write_call(codec: tokens.Codec, name: str, values: dict[str, str], text: str, number: int) -> str:
    """Write call `number`, in which only special tokens of the format are special tokens.

    `values` are its arguments, `text` is all of them as JSON.
    """
    match codec.format.name:
        case "hermes":
            return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        case "qwen3_coder":
            tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
            return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"
        case "seed_oss":
            tags = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
            return f"<seed:tool_call>\n<function={name}>\n{tags}</function>\n</seed:tool_call>"
        case "minimax_m2":
            tags = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in values.items())
            return f'<minimax:tool_call>\n<invoke name="{name}">\n{tags}</invoke>\n</minimax:tool_call>'
        case "glm45":
            pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
            return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
        case "llama3_json":
            return f'{{"name": "{name}", "parameters": {text}}}'
        case "mistral" if "[ARGS]" not in codec.tokenizer.added:
            return f'{{"name": "{name}", "arguments": {text}, "id": "abcdefgh{number}"}}'
        case "mistral":
            call_id = f"[CALL_ID]abcdefgh{number}" if "[CALL_ID]" in codec.tokenizer.added else ""
            return f"[TOOL_CALLS]{name}{call_id}[ARGS]{text}"
        case "deepseek_v31":
            return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        case "gemma4":
            pairs = (f'{key}:<|"|>{value}<|"|>' for key, value in values.items())
            return f"<|tool_call>call:{name}{{{','.join(pairs)}}}<tool_call|>"
        case "kimi_k2":
            call_id = f"functions.{name}:{number}"
            return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    raise AssertionError(codec.format.name)


def encode_harmony(codec: tokens.Codec, words: str, call: tuple[str, dict[str, Any]] | None) -> list[int]:
    """Encode a reply in harmony: thoughts, then words or a call, as gpt-oss samples them."""
    guard, parts = codec.tokenizer.guard, ["<|channel|>analysis<|message|>hm"]
    if call is None:
        parts.append(f"<|channel|>final<|message|>{guard(words)}<|return|>")
    elif words:
        parts.append(f"<|channel|>commentary<|message|>{guard(words)}")
    if call is not None:
        head = f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json"
        parts.append(f"{head}<|message|>{guard(json.dumps(call[1]))}<|call|>")
    return codec.tokenizer.encode("<|end|><|start|>assistant".join(parts))
