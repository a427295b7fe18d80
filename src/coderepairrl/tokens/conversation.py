"""Conversations as rows to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coderepairrl.tokens.codec import Codec
from coderepairrl.tokens.reading import Message, Tool


class Row(NamedTuple):
    """Ids of a sequence, and whether a policy samples each."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]


def rows(codec: Codec, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Row]:
    """Sequences that a gateway would have recorded for a policy that sampled the replies.

    Trained: a reply's text, calls, thoughts and end token. Rewritten history starts another row. Raises ValueError for
    a conversation that cannot be trained on.
    """
    messages = [_plain(message, codec) for message in messages]
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
            raise ValueError("the model's template writes a reply of the conversation differently from what is sampled")
        injected = _empty_thoughts(codec, output)
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


def _plain(message: Message, codec: Codec) -> Message:
    # thoughts left in the text are separated where their tags are tokens: as text they would be ids that no policy
    # samples
    normalised, text = dict(message), message.get("content") or ""
    if message["role"] == "assistant" and {"<think>", "</think>"} <= codec.tokenizer.added.keys():
        thought, closed, rest = str(text).lstrip().partition("</think>")
        if closed and thought.startswith("<think>"):
            normalised["reasoning_content"] = normalised.get("reasoning_content") or thought.removeprefix(
                "<think>"
            ).strip("\n")
            text = rest.lstrip("\n")
    if not codec.thinking:
        normalised = {key: value for key, value in normalised.items() if key not in ("reasoning_content", "reasoning")}
    return {**normalised, "content": text}


def _empty_thoughts(codec: Codec, output: Sequence[int]) -> int:
    begin, end = (codec.tokenizer.added.get(name) for name in ("<think>", "</think>"))
    if begin is None or end is None or output[0] != begin or end not in output:
        return 0
    after = output.index(end) + 1
    if codec.decode(output[1 : after - 1]).strip():
        return 0
    while after < len(output) and not codec.decode(output[after : after + 1]).strip("\n"):
        after += 1
    return after
