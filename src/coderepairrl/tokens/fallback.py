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
from coderepairrl.tokens.formats import CALL, NAME, QUESTION, TOOL, written
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reading import Format, Reader
from coderepairrl.tokens.template import Template

Message = Mapping[str, Any]

_ANSWER: Message = {"role": "assistant", "content": "answer"}


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
        self._reader = Reader(tokenizer)
        self._template = template
        self._thinking = thinking
        self._texts = False
        name = tokenizer.name_or_path
        _, content, after = self._text((QUESTION, _ANSWER), prompt=False).rpartition(str(_ANSWER["content"]))
        if not content:
            raise ConfigError(f"the chat template of {name} does not repeat what a reply says")
        special = set(tokenizer.added.values())
        end = next((token for token in tokenizer.encode(after) if token in special), None)
        if end is None:
            raise ConfigError(f"the chat template of {name} ends replies with no special token")
        self._end = end
        self._stop = tuple(dict.fromkeys((end, *eos)))
        self.format = self._format()

    def _format(self) -> Format:
        """The format in which the template writes calls, whose arguments it takes as objects, or else as text."""
        errors = []
        for self._texts in (False, True):
            try:
                return self._written()
            except ConfigError as error:
                errors.append(error)
        raise errors[0]

    def _written(self) -> Format:
        asked, prompt, answered = (
            self._tokenizer.encode(self._text(messages, [TOOL], prompt=begins))
            for messages, begins in (
                ([QUESTION], False),
                ([QUESTION], True),
                ([QUESTION, {**_ANSWER, "content": "", "tool_calls": [CALL]}], False),
            )
        )
        return written(self._tokenizer, asked, prompt, answered, self._stop)

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
        if self.format.one_call and any(len(message.get("tool_calls") or ()) > 1 for message in messages):
            raise ValueError("a reply has one tool call at most, and its template would drop the others")
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
        # thoughts, which templates may drop once a question follows them
        reply: Message = {**_ANSWER, "reasoning_content": "thought"} if self._thinking else _ANSWER
        results = [message for message in new_messages if message["role"] == "tool"]
        # templates may name the functions whose results they write, and move the words beside a call
        said = self.parse_response(previous_completion_ids, prompt_ids=previous_prompt_ids)
        names = [call.name for call in said.tool_calls if call.name]
        if len(results) > len(names) and self._names_results():
            return None
        if results and not names:
            names = [NAME]
        if names:
            answers = [*results[: len(names)], *[{}] * (len(names) - len(results))]
            calls = [_named(name, answer) for name, answer in zip(names, answers, strict=True)]
            reply = {**reply, "content": reply["content"] if said.content else "", "tool_calls": calls}
        before = self.render_ids((QUESTION, reply))
        after = self.render_ids((QUESTION, reply, *new_messages), add_generation_prompt=True)
        end = next((at for at in range(len(before) - 1, -1, -1) if before[at] in self._stop), None)
        if end is None or after[: end + 1] != before[: end + 1]:
            return None
        so_far = trim_to_turn_close(
            list(previous_prompt_ids), list(previous_completion_ids), set(self._stop), synthesize_close=before[end]
        )
        return BridgedIds([*so_far, *after[end + 1 :]])

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Message] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """The reply as a `renderers.base.ParsedResponse`."""
        return self.format.reply(self._reader, token_ids, prompt_ids or (), set(self._stop), tools or ())

    def _names_results(self) -> bool:
        """Whether the template writes the name of the function with its result."""
        result = {"role": "tool", "tool_call_id": CALL["id"], "content": "result"}
        reply = {**_ANSWER, "content": "", "tool_calls": [_named("anything_at_all", result)]}
        return self._text((QUESTION, reply, result), prompt=True).count("anything_at_all") > 1

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool) -> str:
        return self._template.apply(
            messages if self._texts else [with_objects(message) for message in messages],
            tools,
            thinking=self._thinking,
            prompt=prompt,
        )


def _named(name: str, result: Message) -> Message:
    """A call of `name` that `result` answers."""
    return {**CALL, "id": result.get("tool_call_id", CALL["id"]), "function": {**CALL["function"], "name": name}}


def with_objects(message: Message) -> Message:
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
