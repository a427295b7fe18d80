"""Calls outside the agent's main conversation: titles, summaries, sub-agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coderepairrl.gateway.request import hash_message
from coderepairrl.tokens.trie import count_common_prefix
from coderepairrl.types import SideCalls, Turn, conversation

Kind = tuple[tuple[str, ...], str]
"""Kind of a conversation: names of its tools, and its system prompt."""


def find_side_turns(turns: Sequence[Turn], side_calls: SideCalls, prompt: str = "") -> tuple[int, ...]:
    """Find the turns outside the main conversation that are not trained; return sorted indices. Takes linear time.

    The main conversation is chosen by, in this order: it has tools, states the task's `prompt`, has the most turns,
    comes first. A turn belongs to it if at least half of the system prompt is the same, and the tools are the same or
    the turn continues one of its replies. `side_calls` chooses which of the others are not trained: all (``mask``),
    those without tools (``tools``), none (``train``).
    """
    if side_calls == "train" or not turns:
        return ()
    systems = _read_system_prompts(turns)
    kinds = [(tuple(sorted(turn.tools)), system) for turn, system in zip(turns, systems, strict=True)]
    members: dict[Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        members.setdefault(kind, []).append(index)

    def rank(kind: Kind) -> tuple[bool, bool, int]:
        return bool(kind[0]), _has_prompt(turns, members[kind][0], prompt), len(members[kind])

    main = max(members, key=rank)  # the first of equals
    is_similar = {kind: kind == main or _are_similar(kind[1], main[1]) for kind in members}
    main_turns = {index for index, kind in enumerate(kinds) if is_similar[kind] and kind[0] == main[0]}
    keys: dict[int, bytes] = {}

    def find_key(reply: Mapping[str, Any]) -> bytes:
        if id(reply) not in keys:  # conversations share their messages
            keys[id(reply)] = hash_message(b"", reply, {})
        return keys[id(reply)]

    replies = {find_key(turns[index].messages[-1]) for index in main_turns}

    def continues_main(index: int) -> bool:
        history = conversation(turns, index)[:-1]
        return any(message["role"] == "assistant" and find_key(message) in replies for message in history)

    return tuple(
        index
        for index, kind in enumerate(kinds)
        if index not in main_turns
        and not (kind[0] and side_calls == "tools")
        and not (kind[0] and is_similar[kind] and continues_main(index))
    )


def _read_system_prompts(turns: Sequence[Turn]) -> list[str]:
    prompts: list[tuple[str, ...]] = []  # each turn's system messages
    for turn in turns:
        if turn.base is not None:
            prompts.append(prompts[turn.base])
            continue
        shared = turn.fork.messages if turn.fork else 0
        system = list(prompts[turn.fork.turn][:shared]) if turn.fork else []
        for message in turn.messages if len(system) == shared else ():  # otherwise it forks after the system prompt
            if message["role"] != "system":
                break
            system.append(str(message["content"]))
        prompts.append(tuple(system))
    return ["\n".join(texts) for texts in prompts]


def _has_prompt(turns: Sequence[Turn], index: int, prompt: str) -> bool:
    # whether a user message before reply `index` contains the task's prompt
    statement = prompt.strip()
    user_messages = [message for message in conversation(turns, index)[:-1] if message["role"] == "user"]
    return bool(statement) and any(statement in str(message["content"]) for message in user_messages)


def _are_similar(first: str, other: str) -> bool:
    """Whether system prompts differ at one place, in less than half of the longer one.

    >>> _are_similar("Repair. It is 10:03.", "Repair. It is 10:07."), _are_similar("Repair.", "Summarize.")
    (True, False)
    """
    start = count_common_prefix(first, other)
    end = count_common_prefix(first[start:][::-1], other[start:][::-1])
    return 2 * (start + end) > max(len(first), len(other))
