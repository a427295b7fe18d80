"""Start-up checks of a codec: recorded ids can be extended, and extending equals rendering."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from coderepairrl.errors import ConfigError
from coderepairrl.tokens.codec import Codec
from coderepairrl.tokens.shapes import EXAMPLES, Shape, has_calls, is_written

Messages = tuple[Mapping[str, Any], ...]


def _sample_call(number: int, cmd: str) -> dict[str, Any]:
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": "shell", "arguments": f'{{"cmd": "{cmd}"}}'},
    }


def _sample_reply(content: str, *commands: str) -> dict[str, Any]:
    calls = {"tool_calls": [_sample_call(number, command) for number, command in enumerate(commands, 1)]}
    return {"role": "assistant", "content": content, **(calls if commands else {})}


def _sample_result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": content}


TOOLS: Messages = (
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
    },
)
OPENING: Messages = (
    {"role": "system", "content": "You repair code."},
    {"role": "user", "content": "The build is red.\n\n  Why?"},
)
_REPLIES: dict[str, Messages] = {
    "a reply in words": (_sample_reply("A test fails."),),
    "a reply with a tool call": (_sample_reply("", "ls"),),
    "a reply with words and a tool call": (_sample_reply("I look.", "ls"),),
    "a reply with several tool calls": (_sample_reply("", "ls", "git log"),),
}
_TOOL = _sample_result(1, "setup.py\ntests\n")
_ADDED: dict[str, Messages] = {
    "a tool result": (_TOOL,),
    "several tool results": (_TOOL, _sample_result(2, "")),
    "a user message": ({"role": "user", "content": "\nGo on."},),
    "a tool result and a user message": (_TOOL, {"role": "user", "content": "Two calls left."}),
    "a system message": ({"role": "system", "content": "Be short."},),
    "a tool result and a system message": (_TOOL, {"role": "system", "content": "Be short."}),
}
HISTORIES: tuple[tuple[Messages, str], ...] = (
    ((_sample_reply("A test fails."), {"role": "user", "content": "Go on."}), "A test fails."),
    ((_sample_reply("", "git status"), _sample_result(1, "setup.py\ntests")), "git status"),
    (
        (
            _sample_reply("I look.", "ls", "git status"),
            _sample_result(1, "setup.py\ntests"),
            _sample_result(2, "clean"),
        ),
        "git status",
    ),
)
"""Messages after `OPENING`, and the last text that a policy wrote."""
_TEXTS = ("plain words", "  tabs\tand\r\nlines\n\n", "naïve 修复 🛠️", "".join(map(chr, range(32, 127))))
_NEEDED = (
    "a reply in words",
    "a reply with a tool call",
    "a reply in words, then a user message",
    "a reply with a tool call, then a tool result",
)
"""Conversations of every agent, which must be extendable."""


class Findings(NamedTuple):
    """Restricted conversations: to be rendered again (`forks`), refused by the template, or rewritten
    (`Codec.unwritten`).
    """

    forks: tuple[str, ...]
    refused: tuple[str, ...]
    rewritten: tuple[str, ...]


def verify_codec(codec: Codec) -> Findings:
    """Find conversations that `codec` cannot extend or render. Raises `ConfigError` for inexactness."""
    try:
        return _verify_codec(codec)
    except ValueError as error:
        raise ConfigError(f"{codec.name}: {error}") from error


def _verify_codec(codec: Codec) -> Findings:
    _check_texts(codec)
    _check_special_tokens(codec)
    _check_prompt(codec)
    forks: list[str] = []
    refused: list[str] = []
    tools = _list_tools(codec)
    for kind, plain in _REPLIES.items():
        reply: Messages = ({**plain[0], "reasoning_content": "Hm."},) if codec.thinking else plain
        calls = len(plain[0].get("tool_calls", ()))
        for addition, added in _ADDED.items():
            name = f"{kind}, then {addition}"
            if not codec.has_tools and has_calls((*plain, *added)):
                continue
            try:
                prompt, output = _render_as_sampled(codec, reply, kind, added)
                if (unread := _find_unread_calls(codec, reply, output, prompt)) is not None:
                    raise ConfigError(f"{codec.name}: the calls of {kind} are not read: {unread!r}")
                conversation = (*OPENING, *reply, *added)
                rendered = codec.render(conversation, tools)
                extension = codec.extend(prompt, output, added, calls=calls)
            except ValueError as error:
                refused.append(kind if _rejects_reply(codec, plain) else name)
                if refused[-1] in _NEEDED:
                    raise ConfigError(f"{codec.name}: {refused[-1]} cannot be written: {error}") from error
                continue
            question_roles = ("user", "system") if Shape.LATE in codec.unwritten else ("user",)
            has_question = any(message["role"] in question_roles for message in added)
            if extension is None:
                # A conversation that agents do not need may fork, and is reported: its prompt is rendered again as the
                # template writes it, and earlier samples are trained in a separate row. That costs computing, not
                # exactness, if the template omits no message.
                if name in _NEEDED and not (codec.thinking and has_question):
                    raise ConfigError(f"{codec.name}: the recorded ids of {name} cannot be extended")
                if lost := _find_lost_text(codec, plain, rendered):
                    raise ConfigError(f"{codec.name}: after {name} the prompt is rendered again, without {lost!r}")
                forks.append(name)
                continue
            if not _ends_with_generation_prompt(codec, conversation, rendered, extension):
                raise ConfigError(f"{codec.name}: {addition} after {kind} is not followed by the beginning of a reply")
            # with thinking, rendering drops thoughts before a question, and extending keeps them
            if not (codec.thinking and has_question) and [*prompt, *output, *extension] != rendered:
                raise ConfigError(
                    f"{codec.name}: extending {name} differs from rendering it: {codec.decode(rendered)[-120:]!r}"
                )
            if name in _NEEDED and not codec.thinking:
                _check_next_reply(codec, rendered, conversation, name)
            if name in _NEEDED and "call" in kind:
                _check_second_call(codec, rendered, conversation, name)
            if not _can_extend_cut_reply(codec, prompt, output[:-2], added, extension, calls):
                raise ConfigError(f"{codec.name}: the recorded ids of {name} cannot be extended when cut short")
    for shape, examples in EXAMPLES.items():
        written = (each for each in examples if codec.has_tools or not has_calls(each))
        if not all(is_written(lambda messages: codec.decode(codec.render(messages, tools)), each) for each in written):
            refused.append(shape)
    return Findings(tuple(forks), tuple(dict.fromkeys(refused)), tuple(sorted(codec.unwritten)))


def _list_tools(codec: Codec) -> Messages:
    return TOOLS if codec.has_tools else ()


def _rejects_reply(codec: Codec, reply: Messages) -> bool:
    try:
        codec.render((*OPENING, *reply), _list_tools(codec), prompt=False)
    except ValueError:
        return True
    return False


def _can_extend_cut_reply(
    codec: Codec, prompt: list[int], cut_output: list[int], added: Messages, whole_extension: list[int], calls: int
) -> bool:
    read_calls = len(codec.parse(cut_output, prompt, _list_tools(codec)).calls)
    extension = codec.extend(prompt, cut_output, added, calls=read_calls)
    # a call that was not read has no results: what follows it may be another shape
    is_other_shape = read_calls != calls and bool({Shape.AFTER_CALL, Shape.ORPHAN} & codec.unwritten)
    if extension is not None:
        is_closed = extension[0] in codec.stop_ids  # by the stop token that was cut off
        if is_closed and (is_other_shape or extension[-len(whole_extension) :] == whole_extension):
            return True
    # clients send no results of calls that were not read: templates that write results with a call's name or id would
    # lack it; results of calls that were read, and questions, must always extend
    has_unread_results = sum(message["role"] == "tool" for message in added) > read_calls or is_other_shape
    return has_unread_results and (extension is None or codec.format.ids is not None)


def _ends_with_generation_prompt(
    codec: Codec, conversation: Messages, rendered: list[int], extension: list[int]
) -> bool:
    unprompted = codec.render(conversation, _list_tools(codec), prompt=False)
    beginning = rendered[len(unprompted) :] if rendered[: len(unprompted)] == unprompted else []
    return extension[len(extension) - len(beginning) :] == beginning


def _check_next_reply(codec: Codec, prompt: list[int], conversation: Messages, name: str) -> None:
    """Check that the prompt after `conversation` is a prefix of the conversation with a reply."""
    reply = _REPLIES["a reply in words"]
    _, output = _render_as_sampled(codec, reply, "a reply in words", _ADDED["a user message"])
    expected = [*prompt, *output[:-1]]
    if codec.render((*conversation, *reply), _list_tools(codec), prompt=False)[: len(expected)] != expected:
        raise ConfigError(f"{codec.name}: the prompt after {name} and a reply are not a prefix of the conversation")


def _check_second_call(codec: Codec, prompt: list[int], conversation: Messages, name: str) -> None:
    """Check that a second call is extended as rendered: templates may number calls."""
    thoughts = {"reasoning_content": "Hm."} if codec.thinking else {}
    reply: Messages = ({"role": "assistant", "content": "", "tool_calls": [_sample_call(2, "git log")], **thoughts},)
    added: Messages = (_sample_result(2, "tests"),)
    rendered = codec.render((*conversation, *reply, *added), _list_tools(codec))
    answered = codec.render((*conversation, *reply), _list_tools(codec), prompt=False)
    ends = [at for at in range(len(prompt), len(answered)) if answered[at] in codec.stop_ids]
    if answered[: len(prompt)] != prompt:
        raise ConfigError(f"{codec.name}: the prompt after {name} is not a prefix of the conversation after it")
    output = rendered[len(prompt) : (ends[-1] if ends else len(answered)) + 1]
    extension = codec.extend(prompt, output, added)
    if extension is None or [*prompt, *output, *extension] != rendered:
        raise ConfigError(f"{codec.name}: extending a second call after {name} differs from rendering it")


def _find_unread_calls(codec: Codec, reply: Messages, output: list[int], prompt: list[int]) -> str | None:
    expected = [call["function"] for call in reply[0].get("tool_calls", ())]
    calls = codec.parse(output, prompt, _list_tools(codec)).calls
    read = [(call.name, json.loads(call.arguments)) for call in calls]
    is_same = read == [(call["name"], json.loads(call["arguments"])) for call in expected]
    return None if is_same else codec.decode(output)


def _find_lost_text(codec: Codec, reply: Messages, rendered: list[int]) -> str:
    text = codec.decode(rendered)
    functions = [call["function"] for call in reply[0].get("tool_calls", ())]
    arguments = [value for function in functions for value in json.loads(function["arguments"]).values()]
    parts = (reply[0]["content"], *(function["name"] for function in functions), *arguments)
    return next((part for part in parts if part not in text), "")


def _render_as_sampled(codec: Codec, reply: Messages, name: str, added: Messages) -> tuple[list[int], list[int]]:
    """Prompt and output ids, as if sampled."""
    # the output includes the first token of `added` where that ends a reply, as in GLM
    prompt = codec.render(OPENING, _list_tools(codec))
    complete = codec.render((*OPENING, *reply), _list_tools(codec), prompt=False)
    if complete[: len(prompt)] != prompt:
        if not codec.thinking:
            raise ConfigError(
                f"{codec.name}: the prompt before {name} is not a prefix of the conversation after it",
                fix="its template closes thoughts only in prompts: try model.thinking=true",
            )
        header = codec.render((*OPENING, {"role": "assistant", "content": ""}), _list_tools(codec), prompt=False)
        raise ConfigError(
            f"{codec.name}: {name} does not follow its prompt: {codec.decode(header)[-80:]!r}",
            fix="its template drops the thoughts of a reply that calls a tool: set model.thinking=false",
        )
    last = max((i for i, token in enumerate(complete) if token in codec.stop_ids), default=-1)
    if last < len(prompt):
        plain = tuple({key: text for key, text in each.items() if key != "reasoning_content"} for each in reply)
        answered = codec.render((*OPENING, *plain), _list_tools(codec), prompt=False)
        extended = codec.render((*OPENING, *plain, *added), _list_tools(codec))
        if extended[: len(answered)] != answered or extended[len(answered)] not in codec.stop_ids:
            raise ConfigError(f"{codec.name}: {name} is not ended by a stop token")
        last, complete = len(complete), [*complete, extended[len(answered)]]
    return prompt, complete[len(prompt) : last + 1]


def _check_texts(codec: Codec) -> None:
    for text in _TEXTS:
        if (decoded := codec.decode(codec.encode(text))) != text:
            raise ConfigError(f"{codec.name}: the tokenizer turns {text!r} into {decoded!r}")


def _check_prompt(codec: Codec) -> None:
    prompt, unprompted = (
        codec.render(OPENING, _list_tools(codec)),
        codec.render(OPENING, _list_tools(codec), prompt=False),
    )
    if prompt[: len(unprompted)] != unprompted:
        raise ConfigError(f"{codec.name}: a prompt does not begin with its conversation")
    if not codec.has_tools:
        return
    called = codec.render((*OPENING, *_REPLIES["a reply with a tool call"]), prompt=False)
    if "shell" not in codec.decode(prompt) or "shell" not in codec.decode(called):
        raise ConfigError(f"{codec.name}: the policy is not shown its tools, or its calls")


def _check_special_tokens(codec: Codec) -> None:
    for text, special in codec.tokenizer.added.items():
        ids = codec.encode(f"a {text} b")
        if special in ids or codec.decode(ids) != f"a {text} b":
            raise ConfigError(f"{codec.name}: the special token {text} cannot be written as ordinary text")
    for stop in codec.stop_ids:
        if not 0 <= stop < codec.vocab_size:
            raise ConfigError(f"{codec.name}: stop token {stop} is outside the vocabulary of {codec.vocab_size}")
