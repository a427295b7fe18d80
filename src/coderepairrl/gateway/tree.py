"""A session's turns as a tree, which finds the turn that a conversation continues, by ids or text."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from coderepairrl.gateway.request import Defaults, Message, PrefixKeys, hash_message
from coderepairrl.gateway.workers import LIGHT_KEYS, RequestProcessor
from coderepairrl.tokens import GENERATION_PROMPT_IDS
from coderepairrl.tokens.trie import Node, Trie
from coderepairrl.types import Fork, Turn, conversation, sequence_list


@dataclass(frozen=True, slots=True)
class Placement:
    """A request's place: `given` ids follow the sequence of `base`, or the prefix that `fork` names."""

    base: int | None
    prompt: list[int]
    """The engine's input: recorded ids, then `given`."""
    given: list[int]
    new_messages: tuple[Message, ...]
    """The request's messages that are not recorded yet."""
    key: bytes
    """Key of the request's conversation (`PrefixKeys`)."""
    defaults: Defaults
    """Default arguments of its tools."""
    fork: Fork | None = None
    relayed: tuple[Message, ...] = ()
    """Messages for a remote, with the fields that it expects back."""

    @property
    def cached(self) -> int:
        """Prompt tokens that earlier turns recorded."""
        return len(self.prompt) - len(self.given)


class RecognisedMessages(NamedTuple):
    """A conversation with its replies as sampled."""

    messages: tuple[Message, ...]
    places: Sequence[int]
    """Index in `messages` of each client message; several may form one reply."""
    is_rewritten: bool = False
    """Whether the client changed the last reply."""


class Tree(ABC):
    """Committed turns, indexed by two 16-byte keys each."""

    def __init__(self, processor: RequestProcessor) -> None:
        self.turns: list[Turn] = []
        self._processor = processor
        self._by_conversation: dict[bytes, list[int]] = {}
        self._by_reply: dict[tuple[bytes, tuple[str, ...] | None], list[int]] = {}
        """Turns by their reply's key and tool call ids; also under None for any ids."""
        self._by_call: dict[str, list[int]] = {}
        """Turns by call id; several if a remote repeats an id."""
        self._prefix_keys = PrefixKeys()

    @abstractmethod
    async def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Place a conversation; never call concurrently.

        Raises ValueError for messages that cannot be rendered, and `TooLong`.
        """

    def recognise_replies(self, messages: tuple[Message, ...]) -> RecognisedMessages:
        """Return `messages` unchanged, since a remote renders them."""
        return RecognisedMessages(messages, range(len(messages)))

    @abstractmethod
    def prompt_tokens(self, placement: Placement) -> int:
        """Prompt tokens, as far as known."""

    def add(self, turn: Turn, placement: Placement | None) -> None:
        """Record `turn`; if `placement` is None, no client can continue it."""
        self.turns.append(turn)
        if placement is not None:
            reply, defaults = turn.messages[-1], placement.defaults
            self._by_conversation.setdefault(hash_message(placement.key, reply, defaults), []).append(turn.index)
            reply_key = hash_message(b"", reply, defaults)
            for ids in (tuple(_call_ids(reply)), None):
                self._by_reply.setdefault((reply_key, ids), []).append(turn.index)
            for id in _call_ids(reply):
                self._by_call.setdefault(id, []).append(turn.index)

    def is_extended(self, index: int) -> bool:
        """Whether a later turn continues turn `index`."""
        return any(turn.base == index for turn in self.turns[index + 1 :])

    def _find_longest_match(self, keys: Sequence[bytes], messages: Sequence[Message]) -> tuple[int | None, int]:
        # find the turn after which most of `messages` are recorded; return its index, and their number
        for seen in range(len(messages), 0, -1):
            if candidates := self._by_conversation.get(keys[seen]):
                # the same reply was sampled twice: ids of tool calls show which one the client continues
                ids = _call_ids(messages[seen - 1])
                same = [index for index in candidates if _call_ids(self.turns[index].messages[-1]) == ids]
                return (same or candidates)[-1], seen
        return None, 0

    async def _find_recorded_reply(self, reply: Message, last: int) -> int | None:
        # find the turn of an equal reply; of several, the first after turn `last`, else the latest
        reply_key = await self._processor.hash_reply(reply, self._prefix_keys.defaults)
        indices = self._by_reply.get((reply_key, tuple(_call_ids(reply)))) or self._by_reply.get((reply_key, None))
        return indices[min(bisect_right(indices, last), len(indices) - 1)] if indices else None


class TextTree(Tree):
    """Tree without ids, for remotes."""

    async def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Place after the turn with the longest matching conversation."""
        keys = await self._processor.keys(self._prefix_keys, messages, tools)
        base, seen = self._find_longest_match(keys, messages)
        relayed = await self._add_returned_fields(messages)
        return Placement(base, [], [], messages[seen:], keys[-1], self._prefix_keys.defaults, relayed=relayed)

    def prompt_tokens(self, placement: Placement) -> int:
        """Reported tokens of the continued turn."""
        if placement.base is None:
            return 0
        usage = self.turns[placement.base].remote["usage"]
        return int(usage.get("prompt_tokens", 0) + usage.get("completion_tokens", 0))

    async def _add_returned_fields(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not any("returned" in turn.remote for turn in self.turns):
            return messages
        relayed, last = list(messages), -1
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or (index := await self._find_recorded_reply(message, last)) is None:
                continue
            await asyncio.sleep(0)  # there may be thousands: let other sessions run
            last = max(last, index)
            fields = dict(self.turns[index].remote.get("returned", {}))
            if calls := fields.pop("tool_calls", ()):
                pairs = zip(message.get("tool_calls", ()), calls, strict=False)
                fields["tool_calls"] = [{**call, **more} for call, more in pairs]
            relayed[at] = {**message, **fields}
        return tuple(relayed)


class TurnTree(Tree):
    """Tree with exact ids."""

    def __init__(self, processor: RequestProcessor) -> None:
        super().__init__(processor)
        self._trie = Trie()
        self._ends: list[Node] = []  # where each turn's sequence ends, by turn index
        self._compared: dict[int, tuple[Message, bool]] = {}
        """Latest client version of a turn's reply, and whether it differs from the sampled one."""

    def recognise_replies(self, messages: tuple[Message, ...]) -> RecognisedMessages:
        """Restore replies as sampled, recognised by call ids.

        Clients change arguments, omit words, and split replies. Replies with other words or missing calls stay as sent.
        """
        indices = [self._find_by_calls(message) for message in messages]
        parts: dict[int, list[Message]] = {}  # client messages by index of the turn whose reply they form
        for index, message in zip(indices, messages, strict=True):
            if index is not None:
                parts.setdefault(index, []).append(message)
        replies = {index: self.turns[index].messages[-1] for index in parts}
        rewritten = {
            index
            for index, reply in replies.items()
            if _is_complete_reply(parts[index], reply) and self._is_changed(index, parts[index][0], reply)
        }
        if not rewritten:
            return super().recognise_replies(messages)
        recognised: list[Message] = []
        places: list[int] = []
        restored: dict[int, int] = {}  # index in `recognised` of a turn's reply
        for index, message in zip(indices, messages, strict=True):
            if index in restored:
                places.append(restored[index])
                continue
            if index in rewritten:
                reply = replies[index]
                if recognised and _is_start_of_reply(reply, recognised[-1], message):
                    recognised.pop()
                restored[index] = len(recognised)
                message = {**message, "content": reply["content"], "tool_calls": reply["tool_calls"]}
            places.append(len(recognised))
            recognised.append(message)
        last = max(at for at, message in enumerate(recognised) if message["role"] == "assistant")
        return RecognisedMessages(tuple(recognised), places, last in restored.values())

    def _find_by_calls(self, message: Message) -> int | None:
        ids = _call_ids(message)
        indices = self._by_call.get(ids[0], ()) if ids else ()
        return indices[0] if len(indices) == 1 else None

    def _is_changed(self, index: int, message: Message, reply: Message) -> bool:
        before, differs = self._compared.get(index, (reply, False))
        if message != before:
            # long arguments are not hashed, which would block the event loop
            is_long = sum(len(call["function"]["arguments"]) for call in message["tool_calls"]) > LIGHT_KEYS
            defaults = self._prefix_keys.defaults
            differs = is_long or hash_message(b"", message, defaults) != hash_message(b"", reply, defaults)
            self._compared[index] = message, differs
        return differs

    async def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Extend the ids of the turn with the longest matching conversation by the remaining messages.

        Recorded ids are never re-tokenized, unless the model's family does not allow splicing. A prompt that extends no
        turn is attached where its longest common prefix with a recorded sequence ends.
        """
        keys = await self._processor.keys(self._prefix_keys, messages, tools)
        base, seen = self._find_longest_match(keys, messages)
        before = [] if base is None else sequence_list(self.turns, base)
        prompt = None
        with suppress(ValueError):  # a part may be invalid on its own; the whole is rendered below
            prompt = await self._splice_prompt(messages, tools, base, seen, before)
        continues_base = base is not None and all(message["role"] != "assistant" for message in messages[seen:])
        start, fork = len(before), None
        if prompt is None:
            prompt = await self._processor.render(messages, tools)
            continues_base = continues_base and start < len(prompt) and prompt[:start] == before
        if not continues_base:
            base, fork, start, seen = await self._attach(prompt, tools, keys)
        return Placement(base, prompt, prompt[start:], messages[seen:], keys[-1], self._prefix_keys.defaults, fork)

    def prompt_tokens(self, placement: Placement) -> int:
        """Exact number of prompt tokens."""
        return len(placement.prompt)

    async def _splice_prompt(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        base: int | None,
        seen: int,
        before: list[int],
    ) -> list[int] | None:
        """Extend `before` (the context after turn `base`) by the messages after the first `seen`.

        Returns None if nothing was recorded or the family cannot splice.
        """
        replies = [at for at in range(seen, len(messages)) if messages[at]["role"] == "assistant"]
        last = -1 if base is None else base
        if base is not None:
            output: Sequence[int] | None = self.turns[base].output.ids
            prompt = before[: len(before) - len(self.turns[base].output)]
        elif replies and replies[0] and await self._has_recorded([messages[at] for at in replies]):
            first, *replies = replies
            prompt = await self._processor.render(messages[:first], tools)
            last, output = await self._reply_ids(messages, first, last)
            seen = first + 1
        else:
            return None
        for end in (*replies, len(messages)):
            if output is None or seen == end:
                return None
            calls = len(_call_ids(messages[seen - 1]))
            extension = await self._processor.extend(prompt[-GENERATION_PROMPT_IDS:], output, messages[seen:end], calls)
            if extension is None:
                return None
            prompt += output
            prompt += extension
            self._processor.check(prompt)
            if end < len(messages):
                last, output = await self._reply_ids(messages, end, last)
            seen = end + 1
        return prompt

    async def _has_recorded(self, replies: Sequence[Message]) -> bool:
        for at, reply in enumerate(replies):
            if await self._find_recorded_reply(reply, -1) is not None:
                return True
            if at % 64 == 63:
                await asyncio.sleep(0)  # there may be thousands: let other sessions run
        return False

    async def _reply_ids(self, messages: Sequence[Message], at: int, last: int) -> tuple[int, Sequence[int] | None]:
        # return the latest turn used (`last` or later), and the ids of reply `at`: recorded, else tokenized
        await asyncio.sleep(0)  # there may be thousands of replies: let other sessions run
        index = await self._find_recorded_reply(messages[at], last)
        if index is None:
            calls = sum(len(each.get("tool_calls") or ()) for each in messages[:at])
            return last, await self._processor.spell(messages[at], calls)
        return max(last, index), self.turns[index].output.ids

    async def _attach(
        self, prompt: list[int], tools: tuple[Mapping[str, Any], ...], keys: Sequence[bytes]
    ) -> tuple[int | None, Fork | None, int, int]:
        """Find the longest recorded prefix: the turn ending with it, else a fork; its numbers of ids and messages."""
        for turn in self.turns[len(self._ends) :]:
            after = None if turn.base is None else self._ends[turn.base]
            ids = sequence_list(self.turns, turn.index) if after is None else (*turn.given.ids, *turn.output.ids)
            self._ends.append(self._trie.add(ids, turn.index, after))
        # `owner` is a turn with that prefix, `end` the turn that ends with it, if any
        length, owner, end = self._trie.longest(prompt)
        if owner is None:
            return None, None, 0, 0
        turn_index = owner if end is None else end
        recorded = conversation(self.turns, turn_index)
        same = self._by_conversation.get(keys[len(recorded)], []) if len(recorded) < len(keys) else []
        if end in same and length < len(prompt):
            return end, None, length, len(recorded)
        # messages with equal keys count as equal
        pairs = zip((await self._processor.keys(PrefixKeys(), recorded, tools))[1:], keys[1:], strict=False)
        equal_messages = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return None, Fork(turn_index, length, equal_messages), length, equal_messages


def _is_complete_reply(parts: Sequence[Message], reply: Message) -> bool:
    ids = [id for part in parts for id in _call_ids(part)]
    return ids == _call_ids(reply) and all(part["content"].strip() in reply["content"] for part in parts)


def _is_start_of_reply(reply: Message, words: Message, calls: Message) -> bool:
    # whether the client sends `reply` as two messages: its words, then its calls
    if words["role"] != "assistant" or words.get("tool_calls") or not words["content"].strip():
        return False
    return bool(f"{words['content']} {calls['content']}".split() == reply["content"].split())


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]
