"""Common parts of tool call parsers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from coderepairrl.tokens.inert import NEVER, InertTokenizer

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""OpenAI chat tool: ``{"type": "function", "function": {...}}``."""


class Invocation(NamedTuple):
    """Parsed call. `id` is empty in formats without ids."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


Calls = list[Invocation]


@dataclass(slots=True)
class ParsedCall:
    """A call in a reply; without `arguments` if it is malformed.

    `span` are the positions of its ids in the reply. If None, `text` is a part of the reply's content.
    """

    span: tuple[int, int] | None
    name: str = ""
    arguments: dict[str, Any] | None = None
    id: str = ""
    text: str = ""


@dataclass(slots=True)
class ParsedReply:
    """A reply, split into its parts."""

    content: str
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CallIds:
    """Call ids that a policy samples, such as ``functions.shell:3``.

    Clients get different ids, from the gateway, since a policy may count from 0 again and repeat ids.
    """

    pattern: re.Pattern[str]
    make: Callable[[str, int], str]
    """Makes an id of function name and call number in the conversation."""

    def restore(self, messages: Sequence[Message]) -> list[Message]:
        """Replace ids that the policy did not sample, in calls and results."""
        rewritten: list[Message] = []
        new_ids: dict[str, str] = {}
        count = 0
        for message in messages:
            if calls := message.get("tool_calls"):
                for at, call in enumerate(calls, count):
                    old_id = call["id"]
                    new_ids[old_id] = (
                        old_id if self.pattern.fullmatch(old_id) else self.make(call["function"]["name"], at)
                    )
                count += len(calls)
                message = {**message, "tool_calls": [{**call, "id": new_ids[call["id"]]} for call in calls]}
            elif "tool_call_id" in message:
                old_id = message["tool_call_id"]
                message = {**message, "tool_call_id": new_ids.get(old_id, old_id)}
            rewritten.append(message)
        return rewritten


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of calls, between the tokens `begin` and `end` (empty if it has none).

    `needs` are special tokens that distinguish calls from text.
    """

    name: str
    begin: str
    end: str
    needs: tuple[str, ...]
    parse: Callable[[str, Sequence[Tool]], Calls | None] = lambda text, tools: None
    """Parses the text of a block between `begin` and `end`, given the tools; None if invalid."""
    read: Callable[[InertTokenizer, list[int], Sequence[Tool], bool], ParsedReply] | None = None
    """Parses a whole reply, its ids before the stop token, given the tools and whether it begins in thoughts; replaces
    `parse`."""
    held: str = ""
    """A reply that starts with this may be a call, so it is streamed only at its end."""
    unopened: str = ""
    """Start of a call whose opening tag is missing: what follows is streamed at the end."""
    at_end: bool = False
    """Whether replies are streamed only at their end, since they have channels, or words before a marker."""
    needs_stop_token: bool = False
    """Whether `read` gets the stop token, which marks a call."""
    one_call: bool = False
    """Whether templates render only one call per reply, and drop others silently."""
    tells_thoughts: bool = True
    """Whether `read` separates thoughts."""
    always_reasons: bool = False
    """Whether replies always begin with thoughts."""
    ids: CallIds | None = None
    """Ids from the policy, which templates copy into calls and results."""

    def reply(
        self,
        tokenizer: InertTokenizer,
        ids: Sequence[int],
        prompt: Sequence[int],
        stop: Collection[int],
        tools: Sequence[Tool],
    ) -> ParsedReply:
        """Parse the reply in `ids`, sampled after `prompt`."""
        end = next((at for at, token in enumerate(ids) if token in stop), len(ids))
        reply_ids = list(ids[: end + self.needs_stop_token])
        thinking, tags = is_in_thoughts(prompt, tokenizer.thoughts, stop), (self.begin, self.end)
        if self.read is not None:
            reply = self.read(tokenizer, reply_ids, tools, thinking)
        else:
            reply = parse_blocks(
                tokenizer, reply_ids, thinking, tags, lambda inner: self.parse(tokenizer.decode(inner), tools)
            )
        if self.begin:
            self._add_stray_tags(tokenizer, reply_ids, reply)
        return reply

    def _add_stray_tags(self, tokenizer: InertTokenizer, ids: list[int], reply: ParsedReply) -> None:
        """Add malformed calls for tags before the first call, and closing tags after one."""
        spans = [call.span for call in reply.calls]
        tags = [tag for tag in (*self.needs, self.end) if tag != self.begin and tag in reply.content]
        if tags and None not in spans:
            first = spans[0][0] if spans and spans[0] else len(ids)
            stray = {tokenizer.find_id(tag) for tag in tags}
            start = find_token(ids, tokenizer.thoughts[1], 0) + 1 if tokenizer.thoughts[1] in ids[:first] else 0
            if stray & set(ids[start:first]):
                text = tokenizer.decode(ids[start:first]).strip()  # already in the content
                reply.calls.insert(0, ParsedCall(None, text=text))
        close = tokenizer.find_id(self.end)
        for (_, at), (stop, _) in pairwise([*filter(None, spans), (len(ids), 0)]):
            if (end := find_token(ids, close, at)) < stop:
                reply.calls.append(ParsedCall((at, end + 1)))


def is_in_thoughts(prompt: Sequence[int], tags: tuple[int, int], stop: Collection[int]) -> bool:
    """Whether `prompt` ends in thoughts opened by its last message."""
    ends = {*tags, *stop} - {NEVER}
    last = next((token for token in reversed(prompt) if token in ends), NEVER)
    return last != NEVER and last == tags[0]


def parse_blocks(
    tokenizer: InertTokenizer,
    ids: list[int],
    thinking: bool,
    tags: tuple[str, str],
    read: Callable[[list[int]], Calls | None],
) -> ParsedReply:
    """Parse a reply of thoughts, words, and blocks of calls (`parse_after_thoughts`)."""
    reasoning, at = read_thoughts(tokenizer, ids, thinking, tokenizer.find_id(tags[0]))
    if at is None:
        return ParsedReply("", reasoning)
    return parse_after_thoughts(tokenizer, ids, at, reasoning, tags, read)


def read_thoughts(tokenizer: InertTokenizer, ids: list[int], thinking: bool, begin: int) -> tuple[str, int | None]:
    """Read leading thoughts, up to their closing tag or `begin`; return them and their end, None if unfinished."""
    opened, closed = tokenizer.thoughts
    first = next((at for at, token in enumerate(ids) if tokenizer.decode([token]).strip()), len(ids))
    is_opened = first < len(ids) and ids[first] == opened
    if not thinking and not is_opened:
        return "", 0
    start = first + 1 if is_opened else 0
    stop = find_token(ids, closed, start)
    at = stop + 1
    if stop == len(ids):
        stop = at = find_token(ids, begin, start)
    reasoning = tokenizer.decode([token for token in ids[start:stop] if token != opened]).strip()
    return reasoning, None if stop == len(ids) else at


def parse_after_thoughts(
    tokenizer: InertTokenizer,
    ids: list[int],
    at: int,
    reasoning: str,
    tags: tuple[str, str],
    read: Callable[[list[int]], Calls | None],
    *,
    words_after: bool = False,
) -> ParsedReply:
    """Parse a reply after its thoughts, from `at` on: words, then blocks of calls between the tokens `tags`.

    `read` parses a block, and returns None if it is invalid. Without a second tag a block ends with the reply. With
    `words_after`, words may follow the last block.
    """
    begin, end = map(tokenizer.find_id, tags)
    block = find_token(ids, begin, at)
    content = tokenizer.decode(ids[at:block]).strip()
    calls: list[ParsedCall] = []
    end_of_calls = 0
    while block < len(ids):
        stop = find_token(ids, end, block + 1)
        inner, span = ids[block + 1 : stop], (block, min(stop + 1, len(ids)))
        parsed = read(inner) if stop < len(ids) or not tags[1] else None
        calls += [ParsedCall(span, *call) for call in parsed] if parsed else [ParsedCall(span)]
        end_of_calls = span[1]
        block = find_token(ids, begin, end_of_calls)
    if words_after and calls:
        words = tokenizer.decode(ids[end_of_calls:]).strip()
        content = "\n".join(part for part in (content, words) if part)
    return ParsedReply(content, reasoning, calls)


def find_token(ids: list[int], token: int, start: int) -> int:
    """Index of `token` from `start` on, else the number of ids."""
    try:
        return ids.index(token, start)
    except ValueError:
        return len(ids)


def split_at_tokens(ids: list[int], separator: int) -> list[list[int]]:
    """Split `ids` at each token `separator`."""
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def parse_json_or_none(text: str) -> object:
    """Parse strict JSON; None if invalid."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def parse_json(text: str) -> object:
    """Parse strict JSON. Raises ValueError for anything else."""
    # a repeated key, which would lose a value, is invalid, too, and so are numbers that JSON lacks (``NaN``, ``1e999``)
    try:
        return json.loads(
            text, object_pairs_hook=_refuse_duplicates, parse_constant=_parse_finite, parse_float=_parse_finite
        )
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key occurs twice")
    return fields


def _parse_finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a number in JSON")
    return value
