"""Prompts by a model's own chat template, for families that `renderers` does not write.

It offers what `Codec` asks of a renderer. Replies are read as Hermes has them: JSON between ``<tool_call>`` and
``</tool_call>``, which must be tokens. What follows a reply is what the template adds after one; whether that is exact
is not for this module to know: `tokens.verify` refuses a model whose template cannot be extended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.errors import ConfigError
from coderepairrl.tokens import template
from coderepairrl.tokens.inert import InertTokenizer

Message = Mapping[str, Any]
NEVER = -1
"""The id of a token that the vocabulary does not have."""

_QUESTION: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": "answer"}


@dataclass(frozen=True, slots=True)
class Extension:
    """Ids of a conversation that goes on."""

    token_ids: list[int]


class TemplateRenderer:
    """Writes by the template `source`.

    Raises `ConfigError` for one that fails, changes what replies say, or ends them with no special token.
    """

    def __init__(self, tokenizer: InertTokenizer, source: str, *, thinking: bool) -> None:
        self._tokenizer = _Reader(tokenizer)
        self._source = source
        self._thinking = thinking
        self._call_open = self._tokenizer.convert_tokens_to_ids("<tool_call>")
        self._call_close = self._tokenizer.convert_tokens_to_ids("</tool_call>")
        _, said, after = self._text((_QUESTION, _ANSWER), prompt=False).rpartition(str(_ANSWER["content"]))
        if not said:
            raise ConfigError(f"the chat template of {tokenizer.name_or_path} does not repeat what a reply says")
        special = set(tokenizer.added.values())
        end = next((token for token in tokenizer.encode(after) if token in special), None)
        if end is None:
            raise ConfigError(f"the chat template of {tokenizer.name_or_path} ends replies with no special token")
        self._end = end
        self._stop = tuple(dict.fromkeys(stop for stop in (end, tokenizer.eos_token_id) if stop is not None))

    def get_stop_token_ids(self) -> list[int]:
        """The end of a message first."""
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
        *,
        tools: Sequence[Message] | None = None,
    ) -> Extension | None:
        """The ids so far, up to the end of the reply, and what the template adds after a reply for `new_messages`.

        None where there is a reply among them, and where what comes before a message depends on what follows it.
        """
        from renderers.base import trim_to_turn_close

        if any(message["role"] == "assistant" for message in new_messages):
            return None
        calls = [_call(number) for number, message in enumerate(new_messages) if message["role"] == "tool"]
        known = (_QUESTION, {**_ANSWER, "tool_calls": calls} if calls else _ANSWER)
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
        return Extension([*so_far, *after[cut:]])

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Message] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """A reply as `renderers` describes one."""
        from renderers.parsing import parse_qwen3
        from renderers.reasoning import prompt_ends_in_reasoning

        stop = set(self._stop)
        return parse_qwen3(
            self._tokenizer,
            list(token_ids),
            stop_ids=stop,
            tool_call_id=self._call_open,
            tool_call_end_id=self._call_close,
            reasoning_end_id=self._tokenizer.convert_tokens_to_ids("</think>"),
            prefilled_thinking=prompt_ends_in_reasoning(self._tokenizer, list(prompt_ids or ()), stop_ids=stop),
        )

    def _text(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, prompt: bool) -> str:
        return template.apply(
            self._source,
            [_with_objects(message) for message in messages],
            tools,
            thinking=self._thinking,
            prompt=prompt,
        )


class _Reader:
    """A tokenizer for functions that take the text of a token for the token where there is none."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: InertTokenizer) -> None:
        self.encode = tokenizer.encode
        self.decode = tokenizer.decode
        self._find = tokenizer.convert_tokens_to_ids

    def convert_tokens_to_ids(self, token: str) -> int:
        """The id of `token`, or one that no sequence has."""
        found = self._find(token)
        return NEVER if found is None else found


def _call(number: int) -> Message:
    return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _with_objects(message: Message) -> Message:
    """Arguments as objects, which templates write as JSON themselves; what is no object stays text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        try:
            said = json.loads(arguments)
        except (ValueError, RecursionError):
            said = arguments
        calls.append({**call, "function": {**call["function"], "arguments": said}})
    return {**message, "tool_calls": calls}
