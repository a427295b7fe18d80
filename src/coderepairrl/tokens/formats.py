"""Formats of tool calls, named as vLLM's parsers (``--tool-call-parser``)."""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise

from coderepairrl.errors import ConfigError
from coderepairrl.tokens import tagged
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reading import (
    CallFormat,
    CallIds,
    Calls,
    Invocation,
    ParsedCall,
    ParsedReply,
    Tool,
    find_token,
    parse_blocks,
    parse_json_or_none,
    read_thoughts,
    split_at_tokens,
)

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


def _parse_harmony(tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Messages with channels, as gpt-oss writes them.

    Channel ``analysis`` is reasoning, the recipient ``functions.NAME`` makes a call, all else is content.
    """
    start, channel, message, end, call, final, _ = map(tokenizer.find_id, HARMONY)
    if message not in ids:
        return ParsedReply(tokenizer.decode([token for token in ids if token not in (call, final)]).strip())
    content, thoughts, calls, at = "", "", list[ParsedCall](), 0
    ends = [at for at, token in enumerate(ids) if token in (start, channel, end, call, final)]
    while at < len(ids):  # a message: head with channel and recipient, `message`, text, and an end or the next `start`
        body = find_token(ids, message, at)
        next_end = bisect(ends, body)
        stop = ends[next_end] if next_end < len(ends) else len(ids)
        closed = ids[stop : stop + 1] in ([end], [call])
        head, text, span = ids[at:body], tokenizer.decode(ids[body + 1 : stop]), (at, stop + closed)
        recipient = _RECIPIENT.search(tokenizer.decode(head))
        channel_name = tokenizer.decode(head[find_token(head, channel, 0) + 1 :]).split()[:1]
        if recipient or call in ids[at : stop + 1]:
            name, arguments = recipient[1] if recipient else "", parse_json_or_none(text)
            if not (closed and name.startswith("functions.") and isinstance(arguments, dict)):
                arguments = None
            calls.append(ParsedCall(span, name.removeprefix("functions."), arguments))
        elif channel_name == ["analysis"]:
            thoughts += text
        else:
            content += text
        at = len(ids) if ids[stop : stop + 1] == [final] else max(stop + closed, at + 1)
    return ParsedReply(content.strip(), thoughts.strip(), calls)


_RECIPIENT = re.compile(r"to=([^\s<]+)")


def _parse_hermes(text: str, tools: Sequence[Tool]) -> Calls | None:
    """JSON object with ``name`` and ``arguments`` (or ``parameters``)."""
    fields = parse_json_or_none(text)
    if not isinstance(fields, dict) or not isinstance(name := fields.get("name"), str) or not name:
        return None
    values = [fields[key] for key in ("arguments", "parameters") if key in fields] or [{}]
    arguments = parse_json_or_none(values[0]) if isinstance(values[0], str) else values[0]
    return [Invocation(name, arguments)] if isinstance(arguments, dict) and len(values) == 1 else None


def _parse_qwen3_coder(tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """Tags for the function and each parameter (`parse_function_tags`)."""
    # these models sometimes omit the opening tag: calls of offered tools are read without it, as vLLM's parser does
    names = {tool["function"]["name"] for tool in tools}
    close = tokenizer.find_id("</tool_call>")
    reply = parse_blocks(tokenizer, ids, thinking, tagged.QWEN, lambda inner: None)
    spans = [call.span for call in reply.calls if call.span is not None]
    calls: list[ParsedCall] = []

    def parse_calls(text: str, span: tuple[int, int]) -> list[ParsedCall]:
        return [ParsedCall(span, *call) for call in tagged.parse_function_tags(text, tools) or ()]

    def parse_unopened(text: str, span: tuple[int, int]) -> list[ParsedCall]:
        calls = parse_calls(text, span)
        return calls if all(call.name in names for call in calls) else []

    first = next((match for match in tagged.FUNCTION.finditer(reply.content) if match[1] in names), None)
    if first:
        text = reply.content[first.start() :]
        calls = parse_unopened(text, (0, spans[0][0] if spans else len(ids)))
        if calls:
            reply.content = reply.content[: first.start()].strip()
        else:
            calls = [ParsedCall(None, text=text)]
    for span, (stop, _) in pairwise([*spans, (len(ids), 0)]):
        is_closed = ids[span[1] - 1] == close
        block = tokenizer.decode(ids[span[0] + 1 : span[1] - 1])
        calls += (parse_calls(block, span) if is_closed else []) or [ParsedCall(span)]
        at = span[1]
        while names and (end := find_token(ids, close, at)) < stop:
            calls += parse_unopened(tokenizer.decode(ids[at:end]), (at, end + 1))
            at = end + 1
    reply.calls = calls
    return reply


def _parse_llama3_json(tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool) -> ParsedReply:
    """JSON object with ``name`` and ``parameters`` as reply, perhaps after ``<|python_tag|>``."""
    # without the tag, an object that names none of `tools` is content: a JSON file may have these keys
    tag = tokenizer.find_id("<|python_tag|>")
    at = ids.index(tag) if tag in ids else len(ids)
    text, raw = tokenizer.decode(ids[:at]).strip(), tokenizer.decode(ids[at + 1 :]).strip()
    source, content = (raw, text) if at < len(ids) else (text, "")
    call = parse_json_or_none(source)
    fields = call if isinstance(call, dict) else {}
    name, arguments = fields.get("name"), fields.get("parameters", fields.get("arguments"))
    is_offered = at < len(ids) or name in [tool["function"]["name"] for tool in tools]
    if tools and is_offered and isinstance(name, str) and isinstance(arguments, dict):
        return ParsedReply(content, calls=[ParsedCall((at, len(ids)), name, arguments)])
    return ParsedReply(text, calls=[ParsedCall((at, len(ids)))] if at < len(ids) else [])


_MISTRAL, _MISTRAL_ARGUMENTS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MISTRAL_IDS = CallIds(re.compile(r"[A-Za-z0-9]{9}"), lambda name, number: f"call{number:05d}")
"""Call ids that templates accept."""


def _parse_mistral_each(
    tokenizer: InertTokenizer, ids: list[int], tools: Sequence[Tool], thinking: bool
) -> ParsedReply:
    """``[TOOL_CALLS]``, a name, ``[CALL_ID]`` and an id (version 11 only), ``[ARGS]`` and an object, per call."""
    begin, between = map(tokenizer.find_id, (_MISTRAL, _MISTRAL_ARGUMENTS))
    reasoning, start = read_thoughts(tokenizer, ids, thinking, begin)
    if start is None:
        return ParsedReply("", reasoning)
    content, *parts = split_at_tokens(ids[start:], begin)
    calls, at = list[ParsedCall](), start + len(content)
    for part in parts:
        span, at = (at, at + 1 + len(part)), at + 1 + len(part)
        calls.append(ParsedCall(span, *(_parse_mistral_call(tokenizer, split_at_tokens(part, between)) or ())))
    return ParsedReply(tokenizer.decode(content).strip(), reasoning, calls)


def _parse_mistral_call(tokenizer: InertTokenizer, halves: list[list[int]]) -> Invocation | None:
    head, *id_parts = split_at_tokens(halves[0], tokenizer.find_id(_MISTRAL_ID))
    name, ids = tokenizer.decode(head).strip(), [tokenizer.decode(each).strip() for each in id_parts]
    arguments = parse_json_or_none(tokenizer.decode(halves[1])) if len(halves) == 2 else None
    if not name or not isinstance(arguments, dict) or len(ids) > 1 or not all(map(_MISTRAL_IDS.pattern.fullmatch, ids)):
        return None
    return Invocation(name, arguments, *ids)


def _parse_mistral(text: str, tools: Sequence[Tool]) -> Calls | None:
    """Parse a list of objects with ids (versions 3 to 7)."""
    entries = parse_json_or_none(text)
    calls: Calls = []
    for entry in entries if isinstance(entries, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        name, arguments, call_id = (fields.get(key) for key in ("name", "arguments", "id"))
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return None
        if not (isinstance(call_id, str) and _MISTRAL_IDS.pattern.fullmatch(call_id)):
            return None
        calls.append(Invocation(name, arguments, call_id))
    return calls or None


_QWEN = tagged.QWEN
_DEEPSEEK = (*tagged.DEEPSEEK, *tagged.DEEPSEEK_CALL)
FORMATS = (  # in the order in which `find_call_format` tries them
    CallFormat("hermes", *_QWEN, needs=_QWEN, parse=_parse_hermes),
    CallFormat("qwen3_coder", *_QWEN, needs=_QWEN, read=_parse_qwen3_coder, unopened="<function="),
    CallFormat("llama3_json", "<|python_tag|>", "", needs=(), read=_parse_llama3_json, held="{", tells_thoughts=False),
    CallFormat(
        "mistral",
        _MISTRAL,
        "",
        needs=(_MISTRAL, _MISTRAL_ARGUMENTS),
        read=_parse_mistral_each,
        ids=_MISTRAL_IDS,
    ),
    CallFormat("mistral", _MISTRAL, "", needs=(_MISTRAL,), parse=_parse_mistral, ids=_MISTRAL_IDS),
    CallFormat("glm45", *_QWEN, needs=(*_QWEN, *tagged.GLM_ARGUMENTS), read=tagged.parse_glm),
    CallFormat("deepseek_v3", *tagged.DEEPSEEK, needs=_DEEPSEEK, read=tagged.deepseek_v3),
    CallFormat("deepseek_v31", *tagged.DEEPSEEK, needs=_DEEPSEEK, read=tagged.deepseek_v31),
    CallFormat(
        "openai",
        "",
        "",
        needs=HARMONY,
        read=_parse_harmony,
        at_end=True,
        needs_stop_token=True,
        one_call=True,
        always_reasons=True,
    ),
    CallFormat("gemma4", *tagged.GEMMA4, needs=(*tagged.GEMMA4, '<|"|>'), read=tagged.parse_gemma4, at_end=True),
    CallFormat("minimax_m2", *tagged.MINIMAX, needs=tagged.MINIMAX, parse=tagged.parse_minimax),
    CallFormat("seed_oss", *tagged.SEED, needs=tagged.SEED, parse=tagged.parse_function_tags),
    CallFormat(
        "kimi_k2", *tagged.KIMI, needs=(*tagged.KIMI, *tagged.KIMI_CALL), read=tagged.kimi_k2, ids=tagged.KIMI_IDS
    ),
)

NO_CALLS = CallFormat("none", "", "", needs=())
"""Format of templates that write neither tools nor calls."""


def find_call_format(
    tokenizer: InertTokenizer,
    question: Sequence[int],
    prompt: Sequence[int],
    answered: Sequence[int],
    stop: Sequence[int],
) -> CallFormat:
    """Find the format in which a model's prompts write `CALL` of `TOOL`.

    `question`, `prompt` and `answered` are ids of `QUESTION`: alone, with the beginning of a reply, and with `CALL`.
    Raises `ConfigError` for an unusable template.
    """
    name = tokenizer.name_or_path
    pairs = enumerate(zip(prompt, answered, strict=False))
    start = next((at for at, (one, other) in pairs if one != other), len(prompt))
    if start < len(question):
        raise ConfigError(f"in the chat template of {name} a question is not a prefix of the answered question")
    reply = list(answered[start:])
    end = next((at for at, token in enumerate(reply) if token in stop), len(reply))
    text = tokenizer.decode(reply[:end])
    for item, text_shown in (("tools", tokenizer.decode(prompt)), ("calls", text)):
        if NAME not in text_shown:
            raise ConfigError(
                f"the chat template of {name} does not show the policy its {item}",
                fix="use an instruct model with tools, or put a chat_template.jinja that writes them beside it",
            )
    for each in FORMATS:
        if all(token in tokenizer.added for token in each.needs):
            calls = each.reply(tokenizer, reply, prompt[:start], set(stop), [TOOL]).calls
            if [(call.name, call.arguments) for call in calls] == [(NAME, ARGUMENTS)]:
                return each
    supported = ", ".join(dict.fromkeys(each.name for each in FORMATS))
    raise ConfigError(
        f"the chat template of {name} writes a tool call as {text!r}, an unknown format",
        fix=f"supported formats, if their markers are tokens: {supported}",
    )


QUESTION: Tool = {"role": "user", "content": "question"}
NAME, ARGUMENTS = "look_up", {"a": "1"}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
CALL: Tool = {
    "id": "call00001",  # nine alphanumerics, as Mistral requires
    "type": "function",
    "function": {"name": NAME, "arguments": json.dumps(ARGUMENTS)},
}
