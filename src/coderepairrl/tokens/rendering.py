"""Renderers of prompts: those of the package `renderers`, or a model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.errors import ConfigError
from coderepairrl.tokens.formats import CALL, FORMATS, NAME, NO_CALLS, QUESTION, TOOL, find_call_format
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reading import CallFormat, CallIds, Message
from coderepairrl.tokens.template import Template

_ANSWER: Message = {"role": "assistant", "content": "answer"}
CLASSES = {
    "qwen3": "Qwen3",
    "qwen3.5": "Qwen35",
    "qwen3.6": "Qwen36",
    "glm-4.5": "GLM45",
    "glm-5": "GLM5",
}
"""Class prefixes in the package `renderers`, by renderer."""


@dataclass(frozen=True, slots=True)
class BridgedIds:
    """Extended ids, as `renderers` returns them."""

    token_ids: list[int]


class TemplateRenderer:
    """Applies `template`. Replies end with the template's end token, or one of `eos`.

    Raises `ConfigError` for a template that fails, changes replies, or writes calls in an unknown format.
    """

    def __init__(self, tokenizer: InertTokenizer, template: Template, *, eos: Sequence[int], thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._thinking = thinking
        self._has_text_arguments = False
        self._call_ids: CallIds | None = None
        name = tokenizer.name_or_path
        _, content, after = self._apply_template((QUESTION, _ANSWER), prompt=False).rpartition(str(_ANSWER["content"]))
        if not content:
            raise ConfigError(f"the chat template of {name} drops the content of replies")
        special = set(tokenizer.added.values())
        ends = [token for token in tokenizer.encode(after) if token in special]
        # prefer the config's end token: a special token that closes the text may precede it
        end = next((token for token in ends if token in eos), ends[0] if ends else None)
        if end is None:
            raise ConfigError(f"the chat template of {name} ends replies with no special token")
        self._end = end
        self._stop = tuple(dict.fromkeys((end, *eos)))
        self.format = self._find_format()

    def _find_format(self) -> CallFormat:
        """Find the template's format of calls: arguments as objects or as text, or ids that name functions."""
        added = self._tokenizer.added
        ids = [each.ids for each in FORMATS if each.ids and all(token in added for token in each.needs)]
        errors = []
        # `_apply_template` reads both attributes
        for self._call_ids, self._has_text_arguments in ((None, False), (None, True), *((each, False) for each in ids)):
            try:
                return self._find_written_format()
            except ConfigError as error:
                errors.append(error)
        self._call_ids, self._has_text_arguments = None, False
        dropped = NAME not in self._apply_template((QUESTION, {**_ANSWER, "tool_calls": [CALL]}), prompt=False)
        if dropped and NAME not in self._apply_template([QUESTION], [TOOL], prompt=True):
            return NO_CALLS
        raise errors[0]

    def _find_written_format(self) -> CallFormat:
        question, prompt, answered = (
            self._tokenizer.encode(self._apply_template(messages, [TOOL], prompt=begins))
            for messages, begins in (
                ([QUESTION], False),
                ([QUESTION], True),
                ([QUESTION, {**_ANSWER, "content": "", "tool_calls": [CALL]}], False),
            )
        )
        call_format = find_call_format(self._tokenizer, question, prompt, answered, self._stop)
        self._call_ids = call_format.ids
        return call_format

    def get_stop_token_ids(self) -> list[int]:
        """Stop tokens, the template's own first."""
        return list(self._stop)

    def render_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Ids of a conversation. Raises ValueError if the template refuses it."""
        if self.format.one_call and any(len(message.get("tool_calls") or ()) > 1 for message in messages):
            raise ValueError("a reply has several tool calls, and the chat template writes only one")
        try:
            text = self._apply_template(messages, tools or (), prompt=add_generation_prompt)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self._tokenizer.encode(text)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> BridgedIds | None:
        """Extend the ids by what the template adds for `new_messages`; None if impossible."""
        from renderers.base import trim_to_turn_close

        if any(message["role"] == "assistant" for message in new_messages):
            return None
        # with thoughts: a template that drops them before a question fails the comparison below
        reply: Message = {**_ANSWER, "reasoning_content": "thought"} if self._thinking else _ANSWER
        results = [message for message in new_messages if message["role"] == "tool"]
        # templates may write a function's name with its result, and move or drop text beside calls
        parsed = self.format.reply(self._tokenizer, previous_completion_ids, previous_prompt_ids, set(self._stop), ())
        sampled_calls = [call for call in parsed.calls if call.name]
        names = [call.name for call in sampled_calls]
        if not self._call_ids:
            if len(results) > len(names) and self._names_results():
                return None
            if results and not names:
                names = [NAME]
        if names:
            # unanswered calls get distinct ids, by which templates may look up a call's number
            open_calls = [{"tool_call_id": f"call9{at:04d}"} for at in range(len(names) - len(results))]
            answers: list[Message] = [*results[: len(names)], *open_calls]
            calls = [_make_call(name, answer) for name, answer in zip(names, answers, strict=True)]
            sampled_ids = [call.id for call in sampled_calls]
            if self._call_ids and all(sampled_ids):
                calls = [{**call, "id": each} for call, each in zip(calls, sampled_ids, strict=True)]
                new_messages = _set_call_ids(new_messages, sampled_ids)
            reply = {**reply, "content": reply["content"] if parsed.content else "", "tool_calls": calls}
        before = self.render_ids((QUESTION, reply))
        after = self.render_ids((QUESTION, reply, *new_messages), add_generation_prompt=True)
        end = next((at for at in range(len(before) - 1, -1, -1) if before[at] in self._stop), None)
        if end is None or after[: end + 1] != before[: end + 1]:
            return None
        so_far = trim_to_turn_close(
            list(previous_prompt_ids), list(previous_completion_ids), set(self._stop), synthesize_close=before[end]
        )
        return BridgedIds([*so_far, *after[end + 1 :]])

    def make_earlier_calls(self, count: int) -> tuple[Message, ...]:
        """Make `count` calls and their results, if ids number calls."""
        if not count or not self._call_ids:
            return ()
        results = [{"role": "tool", "tool_call_id": f"before{at}", "content": ""} for at in range(count)]
        calls = [_make_call(NAME, result) for result in results]
        return ({**_ANSWER, "content": "", "tool_calls": calls}, *results)

    def _names_results(self) -> bool:
        # probes whether the template writes the function's name with its result
        result = {"role": "tool", "tool_call_id": CALL["id"], "content": "result"}
        reply = {**_ANSWER, "content": "", "tool_calls": [_make_call("anything_at_all", result)]}
        return self._apply_template((QUESTION, reply, result), prompt=True).count("anything_at_all") > 1

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool) -> str:
        shaped = messages if self._call_ids is None else self._call_ids.restore(messages)
        shaped = shaped if self._has_text_arguments else [parse_call_arguments(message) for message in shaped]
        return self._template.apply(shaped, tools, thinking=self._thinking, prompt=prompt)


def _set_call_ids(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    remaining = iter(ids)
    return [
        {**message, "tool_call_id": next(remaining, message.get("tool_call_id", ""))}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def _make_call(name: str, result: Message) -> Message:
    return {**CALL, "id": result.get("tool_call_id", CALL["id"]), "function": {**CALL["function"], "name": name}}


def parse_call_arguments(message: Message) -> Message:
    """Parse arguments, since templates serialize them; invalid JSON stays text."""
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


def make_package_renderer(
    tokenizer: InertTokenizer, name: str, *, thinking: bool, keep_thoughts: bool
) -> tuple[Any, CallFormat]:
    """Renderer `name` of the package, and its format of calls.

    `thinking` enables reasoning; `keep_thoughts` keeps earlier thoughts in prompts. Raises `ConfigError` for another
    family's tokenizer, and an unknown format of calls.
    """
    # `tokens.formats` parses calls, as the package's parsers strip the whitespace of values
    import renderers

    make = getattr(renderers, f"{CLASSES[name]}Renderer")
    config = getattr(renderers, f"{CLASSES[name]}RendererConfig")
    try:
        renderer = make(
            tokenizer, config(thinking_retention="all" if keep_thoughts else None, enable_thinking=thinking)
        )
    except AssertionError as error:
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path} is not that of renderer {name}: {error}",
            fix="use the family's own tokenizer, or give the model a chat template (chat_template.jinja)",
        ) from error
    stop = renderer.get_stop_token_ids()
    question, prompt = (
        renderer.render_ids([QUESTION], tools=[TOOL], add_generation_prompt=begins) for begins in (False, True)
    )
    called = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    return renderer, find_call_format(tokenizer, question, prompt, renderer.render_ids(called, tools=[TOOL]), stop)
