"""Prompts by a model's own chat template, for families that `renderers` does not know.

It implements the renderer interface that `Codec` uses. Calls are parsed in the format in which the template writes them
(`tokens.formats`). What follows a reply is what the template adds after one; `tokens.verify` checks that this is exact,
and refuses a model whose template cannot be extended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.errors import ConfigError
from coderepairrl.tokens import formats
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.template import Template

Message = Mapping[str, Any]

_QUESTION: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": "answer"}
_NAME = "look_up"
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
_CALL: Message = {
    "id": "call00001",  # nine alphanumerics, as Mistral requires
    "type": "function",
    "function": {"name": _NAME, "arguments": '{"a": "1"}'},
}


@dataclass(frozen=True, slots=True)
class BridgedIds:
    """Ids of an extended conversation, as `renderers` returns them."""

    token_ids: list[int]


class TemplateRenderer:
    """Renders by `template`. Replies end with the token that ends them there, or with one of `eos`.

    Raises `ConfigError` for a template that fails, does not repeat replies verbatim, ends them without a special token,
    does not show tools or calls, or writes calls in an unknown format.
    """

    def __init__(self, tokenizer: InertTokenizer, template: Template, *, eos: Sequence[int], thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._reader = formats.Reader(tokenizer)
        self._template = template
        self._thinking = thinking
        name = tokenizer.name_or_path
        _, content, after = self._text((_QUESTION, _ANSWER), prompt=False).rpartition(str(_ANSWER["content"]))
        if not content:
            raise ConfigError(f"the chat template of {name} does not repeat what a reply says")
        special = set(tokenizer.added.values())
        end = next((token for token in tokenizer.encode(after) if token in special), None)
        if end is None:
            raise ConfigError(f"the chat template of {name} ends replies with no special token")
        self._end = end
        self._stop = tuple(dict.fromkeys((end, *eos)))
        self.format = self._format()

    def _format(self) -> formats.Format:
        """The format in which the template writes calls."""
        name, tools = self._tokenizer.name_or_path, [_TOOL]
        reply_with_call = {**_ANSWER, "content": "", "tool_calls": [_CALL]}
        asked, prompt, whole = (
            self._tokenizer.encode(self._text(messages, tools, prompt=begins))
            for messages, begins in (([_QUESTION], False), ([_QUESTION], True), ([_QUESTION, reply_with_call], False))
        )
        pairs = enumerate(zip(prompt, whole, strict=False))
        start = next((at for at, (one, other) in pairs if one != other), len(prompt))
        if start < len(asked):
            raise ConfigError(f"by the chat template of {name} a question is no prefix of the answered question")
        reply = whole[start:]
        reply = reply[: reply.index(self._end)] if self._end in reply else reply
        written = self._tokenizer.decode(reply)
        for what, text in (("tools", self._tokenizer.decode(prompt)), ("calls", written)):
            if _NAME not in text:
                raise ConfigError(
                    f"by the chat template of {name} the policy is not shown its {what}",
                    fix="use an instruct model with tools, or put a chat_template.jinja that writes them beside it",
                )
        try:
            return formats.find(self._tokenizer, reply, _NAME, {"a": "1"}, tools)
        except LookupError:
            known = ", ".join(each.name for each in formats.FORMATS)
            raise ConfigError(
                f"the chat template of {name} writes a tool call as {written!r}, which is not read",
                fix=f"formats that are read, if their markers are tokens: {known}",
            ) from None

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a reply, the template's own first."""
        return list(self._stop)

    def render_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Ids of a conversation. Raises ValueError for one that the template refuses."""
        try:
            text = self._text(messages, tools or (), prompt=add_generation_prompt)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self._tokenizer.encode(text)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> BridgedIds | None:
        """The ids so far, up to the end of the reply, followed by what the template adds for `new_messages`.

        None with a reply among them, and where the rendering of earlier messages depends on later ones.
        """
        from renderers.base import trim_to_turn_close

        if any(message["role"] == "assistant" for message in new_messages):
            return None
        called = any(message["role"] == "tool" for message in new_messages)
        known = (_QUESTION, {**_ANSWER, "tool_calls": [_CALL]} if called else _ANSWER)
        before = self.render_ids(known)
        after = self.render_ids((*known, *new_messages), add_generation_prompt=True)
        if self._end not in before:
            return None
        cut = len(before) - before[::-1].index(self._end)
        if after[:cut] != before[:cut]:
            return None
        so_far = trim_to_turn_close(
            list(previous_prompt_ids), list(previous_completion_ids), set(self._stop), synthesize_close=self._end
        )
        return BridgedIds([*so_far, *after[cut:]])

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Message] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """The reply as a `renderers.base.ParsedResponse`."""
        from renderers.reasoning import prompt_ends_in_reasoning

        ids, stop = list(token_ids), set(self._stop)
        ids = ids[: next((at for at, token in enumerate(ids) if token in stop), len(ids))]
        thinking = bool(prompt_ends_in_reasoning(self._reader, list(prompt_ids or ()), stop_ids=stop))
        return self.format.read(self._reader, ids, list(tools or ()), thinking)

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool) -> str:
        return self._template.apply(
            [_with_objects(message) for message in messages], tools, thinking=self._thinking, prompt=prompt
        )


def _with_objects(message: Message) -> Message:
    """`message` with arguments parsed, since templates serialize them; invalid JSON stays text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = arguments
        calls.append({**call, "function": {**call["function"], "arguments": value}})
    return {**message, "tool_calls": calls}
