"""The tree of turns of one session, found again by what a conversation says: of exact ids, or of text only."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from coderepairrl.gateway.request import Defaults, Message, Names, next_key
from coderepairrl.gateway.workers import Desk
from coderepairrl.tokens import GENERATION_PROMPT
from coderepairrl.tokens.trie import Node, Trie
from coderepairrl.types import Fork, HistoryPolicy, Turn, conversation, sequence_list


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes in the tree: `given` ids are added after the whole sequence of `base`, or after the
    beginning of a sequence that `fork` names."""

    base: int | None
    prompt: list[int]
    """What the engine is given: what was recorded before, then `given`."""
    given: list[int]
    news: tuple[Message, ...]
    """The request's messages that are not in what was recorded before."""
    key: bytes
    """Name of the conversation that the request holds."""
    defaults: Defaults
    """Of its tools."""
    fork: Fork | None = None

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were recorded before."""
        return len(self.prompt) - len(self.given)


class Tree(ABC):
    """Turns in order of commitment. Memory is linear in them: two names of 16 bytes each beside what they hold."""

    def __init__(self, desk: Desk) -> None:
        self.turns: list[Turn] = []
        self._desk = desk
        self._replies: dict[bytes, list[int]] = {}
        """Turns by the conversation that they end."""
        self._said: dict[tuple[bytes, tuple[str, ...] | None], list[int]] = {}
        """Turns by what their reply says, to whatever, and the ids of its calls; by None for whichever ids."""
        self._names = Names()

    @abstractmethod
    async def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Where a conversation goes. One at a time.

        Raises ValueError for messages that cannot be written, and `TooLong` for those that cannot fit.
        """

    @abstractmethod
    def known(self, placement: Placement) -> int:
        """Tokens of a prompt, as far as they can be counted before it is sent."""

    def add(self, turn: Turn, placement: Placement | None) -> None:
        """Record `turn`; `placement` is where its request went, None if no client ever got the reply."""
        self.turns.append(turn)
        if placement is not None:
            reply, defaults = turn.messages[-1], placement.defaults
            self._replies.setdefault(next_key(placement.key, reply, defaults), []).append(turn.index)
            name = next_key(b"", reply, defaults)
            for ids in (tuple(_call_ids(reply)), None):
                self._said.setdefault((name, ids), []).append(turn.index)

    def extended(self, index: int) -> bool:
        """Whether a later turn goes on from `index`."""
        return any(turn.base == index for turn in self.turns[index + 1 :])

    def _find(self, keys: Sequence[bytes], messages: Sequence[Message]) -> tuple[int | None, int]:
        """The turn whose conversation is the longest prefix, and the length of that prefix."""
        for seen in range(len(messages), 0, -1):
            if candidates := self._replies.get(keys[seen]):
                # the same words, said twice: the ids of their tool calls tell which one the client goes on from
                ids = _call_ids(messages[seen - 1])
                same = [index for index in candidates if _call_ids(self.turns[index].messages[-1]) == ids]
                return (same or candidates)[-1], seen
        return None, 0


class TextTree(Tree):
    """Of text only: a remote is sent the whole conversation each time."""

    async def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """After the recorded turn that most of `messages` repeat."""
        keys = await self._desk.name(self._names, messages, tools)
        base, seen = self._find(keys, messages)
        return Placement(base, [], [], messages[seen:], keys[-1], self._names.defaults)

    def known(self, placement: Placement) -> int:
        """What was reported of the turn that it goes on from."""
        if placement.base is None:
            return 0
        usage = self.turns[placement.base].remote["usage"]
        return int(usage["prompt_tokens"] + usage["completion_tokens"])


class TurnTree(Tree):
    """Of exact ids."""

    def __init__(self, desk: Desk, history_policy: HistoryPolicy = "splice") -> None:
        super().__init__(desk)
        self._splice = history_policy == "splice"
        self._trie = Trie()
        self._ends: list[Node] = []
        """Where the sequences of turns end in the trie, as far as they are in it."""

    async def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Find the recorded turn that most of `messages` repeat, and extend its ids by the others.

        Recorded ids are never written again. Where there are replies among the others (the client rewrote, pruned or
        added something before them), the ids that were recorded of each stand for it, if it was ever said. What the
        model's family cannot write like that, and all where history is honored, is rendered.

        A prompt that is no such extension is attached to what was recorded where the longest beginning ends that is the
        same id by id, inside a turn, too.
        """
        keys = await self._desk.name(self._names, messages, tools)
        base, seen = self._find(keys, messages)
        before = [] if base is None else self.sequence(base)
        prompt = None
        if self._splice:
            with suppress(ValueError):  # of parts that cannot stand alone; if all cannot be written, rendering says so
                prompt = await self._spliced(messages, tools, base, seen, before)
        goes_on = base is not None and all(message["role"] != "assistant" for message in messages[seen:])
        start, fork = len(before), None
        if prompt is None:
            prompt = await self._desk.render(messages, tools)
            goes_on = goes_on and start < len(prompt) and prompt[:start] == before
        if not goes_on:
            base, fork, start, seen = await self._attached(prompt, messages, tools, keys)
        return Placement(base, prompt, prompt[start:], messages[seen:], keys[-1], self._names.defaults, fork)

    def known(self, placement: Placement) -> int:
        """All of them."""
        return len(placement.prompt)

    def sequence(self, index: int) -> list[int]:
        """Every id in context after turn `index`."""
        return sequence_list(self.turns, index)

    async def _spliced(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        base: int | None,
        seen: int,
        before: list[int],
    ) -> list[int] | None:
        """`before`, what was in context after turn `base`, and what the messages add that it has not `seen`.

        None where nothing was recorded, and where the family cannot write what is between two replies.
        """
        replies = [at for at in range(seen, len(messages)) if messages[at]["role"] == "assistant"]
        last = -1 if base is None else base
        if base is not None:
            output: Sequence[int] | None = self.turns[base].output.ids
            prompt = before[: len(before) - len(self.turns[base].output)]
        elif replies and replies[0] and await self._any_recorded([messages[at] for at in replies]):
            first, *replies = replies
            prompt = await self._desk.render(messages[:first], tools)
            last, output = await self._ids(messages[first], last)
            seen = first + 1
        else:
            return None
        for end in (*replies, len(messages)):
            if output is None or seen == end:
                return None
            given = await self._desk.extend(prompt[-GENERATION_PROMPT:], output, messages[seen:end])
            if given is None:
                return None
            prompt += output
            prompt += given
            self._desk.check(prompt)
            if end < len(messages):
                last, output = await self._ids(messages[end], last)
            seen = end + 1
        return prompt

    async def _any_recorded(self, replies: Sequence[Message]) -> bool:
        """Whether one of `replies` was ever said."""
        for at, reply in enumerate(replies):
            if self._recorded(reply, -1) is not None:
                return True
            if at % 64 == 63:
                await asyncio.sleep(0)  # others wait
        return False

    async def _ids(self, reply: Message, last: int) -> tuple[int, Sequence[int] | None]:
        """The ids of `reply`, and the turn that said it, where that comes after turn `last`, else `last` again."""
        await asyncio.sleep(0)  # there may be thousands, and others wait
        index = self._recorded(reply, last)
        if index is None:
            return last, await self._desk.spell(reply)
        return max(last, index), self.turns[index].output.ids

    def _recorded(self, reply: Message, last: int) -> int | None:
        """The turn that said what `reply` says, if one did: the next one after turn `last`, if there are several."""
        name = next_key(b"", reply, self._names.defaults)
        indices = self._said.get((name, tuple(_call_ids(reply)))) or self._said.get((name, None))
        return indices[min(bisect_right(indices, last), len(indices) - 1)] if indices else None

    async def _attached(
        self,
        prompt: list[int],
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        keys: Sequence[bytes],
    ) -> tuple[int | None, Fork | None, int, int]:
        """Where the longest recorded beginning of `prompt` ends, after all of a turn or inside one; and its ids and
        messages, counted. `keys` name the beginnings of the conversation."""
        for turn in self.turns[len(self._ends) :]:
            after = None if turn.base is None else self._ends[turn.base]
            ids = self.sequence(turn.index) if after is None else (*turn.given.ids, *turn.output.ids)
            self._ends.append(self._trie.add(ids, turn.index, after))
        length, owner, end = self._trie.longest(prompt)
        if owner is None:
            return None, None, 0, 0
        recorded = conversation(self.turns, owner if end is None else end)
        same = self._replies.get(keys[len(recorded)], []) if len(recorded) < len(keys) else []
        if end in same and length < len(prompt):
            return end, None, length, len(recorded)
        pairs: Iterable[tuple[object, object]] = zip(recorded, messages, strict=False)
        if self._splice:  # what was recorded stands for whatever says the same
            pairs = zip((await self._desk.name(Names(), recorded, tools))[1:], keys[1:], strict=False)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return None, Fork(owner if end is None else end, length, alike), length, alike


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]
