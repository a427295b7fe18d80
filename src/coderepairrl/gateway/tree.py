"""The tree of turns of one session, found again by what a conversation says: of exact ids, or of text only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from coderepairrl.gateway.request import Defaults, Message, Names, next_key
from coderepairrl.tokens import GENERATION_PROMPT, Codec
from coderepairrl.types import Turn, path

HistoryPolicy = Literal["splice", "honor"]
"""Whether recorded tokens stand for text that a client repeats, or what the client sent is rendered."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes in the tree: after the whole sequence of `base`, `given` ids are added."""

    base: int | None
    prompt: list[int]
    """What the engine is given: the whole sequence of `base`, then `given`."""
    given: list[int]
    news: tuple[Message, ...]
    """The request's messages that `base` has not seen."""
    key: bytes
    """Name of the conversation that the request holds."""
    defaults: Defaults
    """Of its tools."""

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were recorded before."""
        return len(self.prompt) - len(self.given)

    def key_with(self, reply: Message) -> bytes:
        """Name of the conversation that `reply` makes of it."""
        return next_key(self.key, reply, self.defaults)


class Tree(ABC):
    """Turns in order of commitment. Memory is linear in them: one name of 16 bytes each beside what they hold."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._replies: dict[bytes, list[int]] = {}
        self._names = Names()

    @abstractmethod
    def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Where a conversation goes. Raises ValueError for messages that cannot be written."""

    @abstractmethod
    def known(self, placement: Placement) -> int:
        """Tokens of a prompt, as far as they can be counted before it is sent."""

    def add(self, turn: Turn, key: bytes | None) -> None:
        """Record `turn`; `key` names the conversation with its reply, None if no client ever got it."""
        self.turns.append(turn)
        if key is not None:
            self._replies.setdefault(key, []).append(turn.index)

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
    """Of text only: whoever replies is sent the whole conversation each time."""

    def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """After the recorded turn that most of `messages` repeat."""
        keys = self._names.of(messages, tools)
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

    def __init__(self, codec: Codec, history_policy: HistoryPolicy = "splice") -> None:
        super().__init__()
        self._splice = history_policy == "splice"
        self._codec = codec

    def place(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> Placement:
        """Find the recorded turn that most of `messages` repeat, and extend its ids by the others.

        Recorded ids are never written again. Where they cannot be extended (the client rewrote or added an
        assistant message), and always where history is honored, the conversation is rendered and attached to the
        deepest of those turns that the rendering repeats id by id, else it becomes a root. Raises ValueError for
        messages that cannot be written.
        """
        keys = self._names.of(messages, tools)
        base, seen = self._find(keys, messages)
        if self._splice and base is not None and seen < len(messages):
            prompt, output = self.sequence(base), self.turns[base].output.ids
            cut = len(prompt) - len(output)
            given = self._codec.extend(prompt[max(0, cut - GENERATION_PROMPT) : cut], output, messages[seen:])
            if given is not None:
                prompt += given
                return Placement(base, prompt, given, messages[seen:], keys[-1], self._names.defaults)
        prompt = self._codec.render(messages, tools)
        while base is not None:
            before = self.sequence(base)
            if len(before) < len(prompt) and prompt[: len(before)] == before:
                seen = sum(len(turn.messages) for turn in path(self.turns, base))
                given = prompt[len(before) :]
                return Placement(base, prompt, given, messages[seen:], keys[-1], self._names.defaults)
            base = self.turns[base].base
        return Placement(None, prompt, prompt, messages, keys[-1], self._names.defaults)

    def known(self, placement: Placement) -> int:
        """All of them."""
        return len(placement.prompt)

    def sequence(self, index: int) -> list[int]:
        """Every id in context after turn `index`."""
        ids: list[int] = []
        for turn in path(self.turns, index):
            ids += turn.given.ids
            ids += turn.output.ids
        return ids


def _call_ids(message: Message) -> list[str]:
    return [call["id"] for call in message.get("tool_calls", ())]
