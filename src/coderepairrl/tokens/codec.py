"""Codec of one model: conversations to token ids, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from coderepairrl.tokens.formats import NO_CALLS, QUESTION, TOOL
from coderepairrl.tokens.inert import NEVER, InertTokenizer, TooLong
from coderepairrl.tokens.reading import CallFormat, Message, Tool, is_in_thoughts
from coderepairrl.tokens.rendering import TemplateRenderer
from coderepairrl.tokens.reply import FunctionCall, Markers, Reply, ReplyStream
from coderepairrl.tokens.shapes import Shape, find_unwritten_shapes, has_calls, reshape

GENERATION_PROMPT_IDS = 64
"""Number of a prompt's last ids that include the generation prompt, which opens a reply."""
RENDERING_MARGIN = 1024
"""Tokens by which rendering may exceed the limit: renderers add text, then cut it off."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a character, as JSON escapes it
NO_TOOLS_ADVICE = "it is for agents that offer none, such as direct and agentless"


class CodecSource(NamedTuple):
    """Arguments of `load_codec`, to load the same codec in another process."""

    model: str
    thinking: bool


class Codec:
    """Exact renderer of prompts and parser of replies.

    `renderer` is one of the package `renderers`, or a `TemplateRenderer`. Ids are below `vocab_size`; `context` is the
    longest sequence.
    """

    def __init__(
        self,
        tokenizer: InertTokenizer,
        renderer: Any,
        *,
        name: str,
        family: str,
        format: CallFormat,
        vocab_size: int,
        context: int,
        thinking: bool,
    ) -> None:
        self.name = name
        self.loaded_from: CodecSource | None = None
        self.family = family
        """Name of a renderer of the package `renderers`, or ``template``."""
        self.format = format
        self.vocab_size = vocab_size
        self.context = context
        self.thinking = thinking
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self.tokenizer = tokenizer
        self.renderer = renderer
        tags = tokenizer.thoughts if format.tells_thoughts else (NEVER, NEVER)
        begin, end = (tokenizer.added.get(tag, NEVER) for tag in (format.begin, format.end))
        self._markers = Markers(
            frozenset(self.stop_ids), *tags, begin, end, format.held, format.unopened, format.at_end
        )
        self._begins_in_thoughts = lru_cache(maxsize=64)(
            lambda beginning: is_in_thoughts(beginning, tags, self.stop_ids)
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Ids of a conversation, with the next reply's generation prompt (unless `prompt` is false).

        Shapes that the template cannot write are rewritten first (`changes`). Raises ValueError for messages that
        cannot be rendered, and `TooLong` for more than `most` ids, before tokenizing if the bytes alone are too many.
        """
        return _check_length(most, self._render(messages, tools, prompt=prompt, most=most))

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, prompt: bool, most: int | None
    ) -> list[int]:
        # applies `most` only to the bytes of the texts: the caller counts the ids
        if not messages:
            raise ValueError("a conversation has at least one message")
        if not self.has_tools and (tools or has_calls(messages)):
            raise ValueError(f"the chat template of {self.name} writes no tools: {NO_TOOLS_ADVICE}")
        shaped = reshape(messages, self.unwritten).messages if self.unwritten else messages
        with self._limit_length(most, messages):
            return self._render_shaped(shaped, tools, prompt=prompt)

    def _render_shaped(self, messages: Sequence[Message], tools: Sequence[Tool], *, prompt: bool) -> list[int]:
        ids: list[int] = self.renderer.render_ids(
            self._guard_all(messages), tools=self._guard_all(tools) or None, add_generation_prompt=prompt
        )
        return ids

    @property
    def has_tools(self) -> bool:
        """Whether the template writes tools."""
        return self.format is not NO_CALLS

    @cached_property
    def unwritten(self) -> frozenset[Shape]:
        """Conversation shapes that the template cannot write."""
        shapes = find_unwritten_shapes(
            lambda messages: self.decode(self._render_shaped(messages, [TOOL], prompt=True)), has_tools=self.has_tools
        )
        return shapes if self._ends_before_system() else shapes | {Shape.LATE}

    def _ends_before_system(self) -> bool:
        # in some formats the header of the next role ends a reply, instead of a stop token of its own
        answered = [QUESTION, {"role": "assistant", "content": "answer"}]
        prompt = self._render_shaped([QUESTION], [TOOL], prompt=True)
        complete = self._render_shaped(answered, [TOOL], prompt=False)
        try:
            extended = self._render_shaped([*answered, {"role": "system", "content": "system"}], [TOOL], prompt=False)
        except ValueError:
            return False
        return any(token in self.stop_ids for token in extended[len(prompt) : len(complete) + 1])

    def changes(self, messages: Sequence[Message]) -> list[tuple[int, Shape]]:
        """Messages to rewrite, by index and shape."""
        return reshape(messages, self.unwritten).changes if self.unwritten else []

    def extend(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new_messages: Sequence[Message],
        *,
        calls: int | None = None,
        most: int | None = None,
    ) -> list[int] | None:
        """Ids of `new_messages` to append to ``prompt + output``, which stay unchanged.

        The last `GENERATION_PROMPT_IDS` ids of `prompt` suffice. `calls`: number of tool calls in `output`
        (default: the results in `new_messages`). None if exact extension is impossible. Raises as `render`.
        """
        tail = self._find_generation_prompt(prompt)
        before = [*tail, *output]
        if self.unwritten:
            results = sum(message["role"] == "tool" for message in new_messages)
            new_messages = reshape(new_messages, self.unwritten, calls=results if calls is None else calls).messages
        with self._limit_length(most, new_messages):
            bridged = self.renderer.bridge_to_next_turn(tail, list(output), self._guard_all(new_messages))
            if bridged is None or bridged.token_ids[: len(before)] != before:
                return None
            return _check_length(most, bridged.token_ids[len(before) :])

    def spell(self, reply: Message, *, calls: int = 0, most: int | None = None) -> list[int] | None:
        """Ids of an assistant message as the model would sample it, stop token included.

        `calls`: number of earlier calls. None if the family renders replies differently in history. Raises as `render`.
        """
        question: Message = {"role": "user", "content": "?"}
        before = [
            question,
            *(self.renderer.make_earlier_calls(calls) if isinstance(self.renderer, TemplateRenderer) else ()),
        ]
        prompt, complete = self.render(before), self._render([*before, reply], prompt=False, most=most)
        ends = [at for at in range(len(prompt), len(complete)) if complete[at] in self.stop_ids]
        if complete[: len(prompt)] != prompt:
            return None
        if not ends:  # the stop token may be the first token of the next message
            called = [call["id"] for call in reply.get("tool_calls") or ()]
            result: Message = {"role": "tool", "tool_call_id": called[0], "content": ""} if called else question
            plain = {key: value for key, value in reply.items() if key != "reasoning_content"}
            answered, extended = (
                self._render([*before, plain, *tail], prompt=False, most=most) for tail in ([], [result])
            )
            if extended[: len(answered)] != answered or extended[len(answered)] not in self.stop_ids:
                return None
            complete, ends = [*complete, extended[len(answered)]], [len(complete)]
        return _check_length(most, complete[len(prompt) : ends[-1] + 1])

    def parse(self, output: Sequence[int], prompt: Sequence[int] = (), tools: Sequence[Tool] = ()) -> Reply:
        """Parse the message in `output`, sampled after `prompt`. Accepts any ids."""
        try:
            parsed = self.format.reply(self.tokenizer, output, prompt, self._markers.stop, tools)
        except (RecursionError, ValueError):  # JSON that Python refuses: nested too deep, numbers too long
            text = self.decode([token for token in output if token not in self._markers.stop]).strip()
            return Reply(text, malformed=(text,))
        calls: list[FunctionCall] = []
        malformed: list[str] = []
        parts: list[str] = [parsed.content.strip()]
        for call in parsed.calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            if call.arguments is not None and _is_unicode(call.name + arguments):
                calls.append(FunctionCall(call.name, arguments))  # without the policy's call id, which may repeat
            elif call.span is None:
                malformed.append(call.text)
            else:
                malformed.append(self.decode(output[slice(*call.span)]))
                parts.append(malformed[-1])
        content = "\n".join(filter(None, parts))
        return Reply(content, parsed.reasoning.strip(), tuple(calls), tuple(malformed))

    def stream(self, prompt: Sequence[int], tools: Sequence[Tool] = (), *, stop: tuple[str, ...] = ()) -> ReplyStream:
        """Incremental parser for the output after `prompt`."""
        beginning = self._find_generation_prompt(prompt)
        thinking = self._begins_in_thoughts(tuple(beginning))
        return ReplyStream(
            lambda ids: self.parse(ids, beginning if thinking else (), tools),
            self.tokenizer.to_bytes,
            self._markers,
            thinking=thinking,
            stop=stop,
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as message content."""
        return self.tokenizer.encode(self.tokenizer.guard(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included."""
        return self.tokenizer.decode(ids)

    def _limit_length(self, most: int | None, messages: Sequence[Message]) -> AbstractContextManager[None]:
        if most is None:
            return nullcontext()
        if len(messages) > most:
            raise TooLong(len(messages))
        return self.tokenizer.limit_length(most + RENDERING_MARGIN)

    def _find_generation_prompt(self, prompt: Sequence[int]) -> list[int]:
        tail = list(prompt[-GENERATION_PROMPT_IDS:])
        start = len(tail) - 1
        while start > 0 and tail[start - 1] not in self._markers.stop:
            start -= 1
        return tail[start:]

    def _guard_all(self, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self._guard(value) for value in values]

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.tokenizer.guard(value)
        if isinstance(value, Mapping):
            return {
                self._guard(key): self._guard_arguments(item)
                if key == "arguments" and isinstance(item, str)
                else self._guard(item)
                for key, item in value.items()
            }
        return [self._guard(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _guard_arguments(self, text: str) -> str:
        """Guard a call's arguments, JSON escapes included, since renderers parse them."""
        # clients send an empty string or null for a call without arguments
        if text.strip() in ("", "null"):
            return "{}"
        guarded = self.tokenizer.guard(text)
        if "\\" not in text:
            return guarded
        try:
            value = json.loads(text)
            unescaped = json.dumps(value, ensure_ascii=False) if _SURROGATE.search(text) else ""
            if not _is_unicode(unescaped):
                # clients that truncate text send half a character: it becomes U+FFFD, as elsewhere in a request
                text = unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                guarded, value = self.tokenizer.guard(text), json.loads(text)
        except (ValueError, RecursionError):
            return guarded
        if self._has_special_token(json.loads(guarded)):
            return json.dumps(self._guard(value), ensure_ascii=False)
        return guarded

    def _has_special_token(self, value: object) -> bool:
        # whether any text in `value` contains a special token
        if isinstance(value, str):
            return self.tokenizer.has_special_token(value)
        if isinstance(value, Mapping):
            return any(self._has_special_token(each) for pair in value.items() for each in pair)
        return isinstance(value, list) and any(map(self._has_special_token, value))


def _check_length(most: int | None, ids: list[int]) -> list[int]:
    if most is not None and len(ids) > most:
        raise TooLong(len(ids))
    return ids


def _is_unicode(text: str) -> bool:
    # JSON can escape a lone surrogate, which no client can read
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


class Row(NamedTuple):
    """Ids of a sequence, and whether a policy samples each."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]


def make_conversation_rows(codec: Codec, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Row]:
    """Sequences that a gateway would have recorded for a policy that sampled the replies.

    Trained: a reply's text, calls, thoughts and end token. Rewritten history starts another row. Raises ValueError for
    a conversation that cannot be trained on.
    """
    messages = [_separate_thoughts(message, codec) for message in messages]
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not replies:
        raise ValueError("the conversation has no reply to learn from")
    if replies[0] == 0:
        raise ValueError("the conversation begins with a reply")
    finished: list[Row] = []
    ids = codec.render(messages[: replies[0]], tools)
    trained = [False] * len(ids)
    for at, next_reply in zip(replies, [*replies[1:], None], strict=True):
        output = codec.spell(messages[at], calls=sum(len(each.get("tool_calls") or ()) for each in messages[:at]))
        if output is None:
            raise ValueError("the model's template writes a past reply differently from a sampled one")
        injected = _count_empty_thought_ids(codec, output)
        prompt, ids = ids, [*ids, *output]
        trained += [False] * injected + [True] * (len(output) - injected)
        if next_reply is None:
            break
        calls = len(messages[at].get("tool_calls") or ())
        added = codec.extend(prompt, output, messages[at + 1 : next_reply], calls=calls)
        if added is None:
            finished.append(Row(tuple(ids), tuple(trained)))
            ids, trained = codec.render(messages[:next_reply], tools), []
            trained = [False] * len(ids)
        else:
            ids += added
            trained += [False] * len(added)
    return [*finished, Row(tuple(ids), tuple(trained))]


def _separate_thoughts(message: Message, codec: Codec) -> Message:
    # separates thoughts from the text if their tags are tokens: tags encoded as text have ids that no policy samples
    normalised, text = dict(message), message.get("content") or ""
    if message["role"] == "assistant" and {"<think>", "</think>"} <= codec.tokenizer.added.keys():
        thought, close, rest = str(text).lstrip().partition("</think>")
        if close and thought.startswith("<think>"):
            normalised["reasoning_content"] = normalised.get("reasoning_content") or thought.removeprefix(
                "<think>"
            ).strip("\n")
            text = rest.lstrip("\n")
    if not codec.thinking:
        normalised = {key: value for key, value in normalised.items() if key not in ("reasoning_content", "reasoning")}
    return {**normalised, "content": text}


def _count_empty_thought_ids(codec: Codec, output: Sequence[int]) -> int:
    begin, end = (codec.tokenizer.added.get(name) for name in ("<think>", "</think>"))
    if begin is None or end is None or output[0] != begin or end not in output:
        return 0
    after = output.index(end) + 1
    if codec.decode(output[1 : after - 1]).strip():
        return 0
    while after < len(output) and not codec.decode(output[after : after + 1]).strip("\n"):
        after += 1
    return after
