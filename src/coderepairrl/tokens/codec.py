"""`Codec`: one model family's way to write conversations as ids and to read replies from ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from coderepairrl.errors import ConfigError
from coderepairrl.tokens.formats import Format
from coderepairrl.tokens.inert import InertTokenizer, TooLong
from coderepairrl.tokens.reply import FunctionCall, Markers, Reply, ReplyStream

if TYPE_CHECKING:
    from coderepairrl.tokens.verify import Findings

Message = Mapping[str, Any]
"""A message of the OpenAI chat format whose content is a string."""
Tool = Mapping[str, Any]
"""A tool of the OpenAI chat format: ``{"type": "function", "function": {...}}``."""

GENERATION_PROMPT = 64
"""The last ids of a prompt among which all of its generation prompt is: how a reply begins depends on no others."""
ASIDE = 1024
"""Tokens more than may be in a prompt: a renderer writes words of its own to see what comes after them."""


class Origin(NamedTuple):
    """What `load` was asked for: with it another process loads the same codec."""

    model: str
    renderer: str
    thinking: bool


class Codec:
    """Writes prompts and reads replies, exactly.

    `renderer` is an object of the package `renderers` over `tokenizer`, or a `TemplateRenderer`. Ids are ints below
    `vocab_size`; `context` is the longest sequence that the model was made for.
    """

    def __init__(
        self,
        tokenizer: InertTokenizer,
        renderer: Any,
        markers: Markers,
        *,
        name: str,
        family: str,
        format: Format,
        vocab_size: int,
        context: int,
        thinking: bool,
    ) -> None:
        self.name = name
        self.origin: Origin | None = None
        """None if it was not loaded."""
        self.family = family
        """The renderer, of `loading.RENDERERS`."""
        self.format = format
        """How tool calls are written."""
        self.vocab_size = vocab_size
        self.context = context
        self.thinking = thinking
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self.tokenizer = tokenizer
        self.renderer = renderer
        self._markers = markers
        self._thinks = lru_cache(maxsize=64)(self._in_thoughts)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Ids of a whole conversation, ending where the next reply begins (unless `prompt` is false).

        Raises ValueError for messages that cannot be written (none, or text that is not Unicode), and `TooLong` for
        more than `most` ids: before anything is tokenized where bytes alone say so.
        """
        return _at_most(most, self._render(messages, tools, prompt=prompt, most=most))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool, most: int | None
    ) -> list[int]:
        """`render`, but there may be more than `most` ids where their number is not seen from bytes."""
        if not messages:
            raise ValueError("a conversation has at least one message")
        with self._bounded(most, messages):
            ids: list[int] = self.renderer.render_ids(
                self._guard_all(messages), tools=self._guard_all(tools) or None, add_generation_prompt=prompt
            )
            return ids

    def extend(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new_messages: Sequence[Message],
        *,
        most: int | None = None,
    ) -> list[int] | None:
        """Ids that `new_messages` add after ``prompt + output``, which stay as they are.

        Of `prompt`, the last `GENERATION_PROMPT` ids will do. Raises as `render` does.

        None when this family cannot extend exactly: an assistant message among the new ones, or (thinking on) a
        new question, after which the template drops earlier thoughts.
        """
        tail = self._beginning(prompt)
        before = [*tail, *output]
        with self._bounded(most, new_messages):
            bridged = self.renderer.bridge_to_next_turn(tail, list(output), self._guard_all(new_messages))
            if bridged is None or bridged.token_ids[: len(before)] != before:
                return None
            return _at_most(most, bridged.token_ids[len(before) :])

    def spell(self, reply: Message, *, most: int | None = None) -> list[int] | None:
        """Ids of an assistant message that nobody sampled, as if it had been: from the beginning of a reply to its end.

        None where this family writes it otherwise than it would have been said (with thoughts, say). Raises as
        `render` does.
        """
        question: Message = {"role": "user", "content": "?"}
        prompt, whole = self.render([question]), self._render([question, reply], prompt=False, most=most)
        ends = [at for at in range(len(prompt), len(whole)) if whole[at] in self.stop_ids]
        if not ends or whole[: len(prompt)] != prompt:
            return None
        return _at_most(most, whole[len(prompt) : ends[-1] + 1])

    def parse(self, output: Sequence[int], prompt: Sequence[int] = (), tools: Sequence[Tool] = ()) -> Reply:
        """The message that `output`, sampled after `prompt`, says. Any ids make some reply."""
        try:
            parsed = self.renderer.parse_response(
                list(output), tools=list(tools) or None, prompt_ids=list(prompt) or None
            )
        except (RecursionError, ValueError):  # JSON that Python will not read: nested too deep, numbers too long
            text = self.decode([token for token in output if token not in self._markers.stop]).strip()
            return Reply(text, malformed=(text,))
        calls: list[FunctionCall] = []
        malformed: list[str] = []
        for call in parsed.tool_calls:
            text = call.arguments if isinstance(call.arguments, str) else _json(call.arguments)
            if call.status == "ok" and isinstance(call.name, str) and _is_unicode(call.name + text):
                calls.append(FunctionCall(call.name, text, call.id or ""))
            else:
                start, end = call.token_span
                malformed.append(self.decode(output[start:end]))
        content = "\n".join(part for part in (parsed.content.strip(), *malformed) if part)
        reasoning = (parsed.reasoning_content or "").strip()
        return Reply(content, reasoning, tuple(calls), tuple(malformed))

    def stream(self, prompt: Sequence[int], tools: Sequence[Tool] = (), *, stop: tuple[str, ...] = ()) -> ReplyStream:
        """A reader for the output that is about to be sampled after `prompt`."""
        beginning = self._beginning(prompt)
        thinking = self._thinks(tuple(beginning))
        opened = beginning if thinking else ()
        return ReplyStream(
            lambda ids: self.parse(ids, opened, tools),
            self.tokenizer.to_bytes,
            self._markers,
            thinking=thinking,
            stop=stop,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as message content: never a special token."""
        return self.tokenizer.encode(self.tokenizer.guard(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self.tokenizer.decode(ids)

    def verify(self) -> tuple[str, ...]:
        """Check at start-up that this tokenizer extends exactly: what does not; see `tokens.verify`."""
        return self.examine().forks

    def examine(self) -> Findings:
        """What `verify` finds, and the conversations that the family does not know."""
        from coderepairrl.tokens.verify import verify

        try:
            return verify(self)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _bounded(self, most: int | None, messages: Sequence[Message]) -> AbstractContextManager[None]:
        """`InertTokenizer.bounded`. Every message has a token. Raises `TooLong`."""
        if most is None:
            return nullcontext()
        if len(messages) > most:
            raise TooLong(len(messages))
        return self.tokenizer.bounded(most + ASIDE)

    def _beginning(self, prompt: Sequence[int]) -> list[int]:
        """The end of `prompt` after its last message, with which the reply begins."""
        tail = list(prompt[-GENERATION_PROMPT:])
        start = len(tail) - 1
        while start > 0 and tail[start - 1] not in self._markers.stop:
            start -= 1
        return tail[start:]

    def _in_thoughts(self, beginning: tuple[int, ...]) -> bool:
        from renderers.reasoning import prompt_ends_in_reasoning

        return bool(prompt_ends_in_reasoning(self.tokenizer, list(beginning), stop_ids=self._markers.stop))

    def _guard_all(self, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self._guard(value) for value in values]

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.tokenizer.guard(value)
        if isinstance(value, Mapping):
            return {self._guard(key): self._guard(item) for key, item in value.items()}
        return [self._guard(item) for item in value] if isinstance(value, (list, tuple)) else value


def _at_most(most: int | None, written: list[int]) -> list[int]:
    """`written`. Raises `TooLong` where that is more than `most` ids."""
    if most is not None and len(written) > most:
        raise TooLong(len(written))
    return written


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_unicode(text: str) -> bool:
    """Whether `text` has no half of a character, which JSON may escape and no client can read."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
