"""The reader of gpt-oss' replies (harmony): messages with channels, of which those to a function are calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coderepairrl.tokens.reading import Reader, Tool, from_json

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


def harmony(reader: Reader, ids: list[int], tools: Sequence[Tool], thinking: bool) -> Any:
    """Channel ``analysis`` is reasoning, ``final`` (and ``commentary`` to nobody) content, a recipient makes a call.

    Prompts end within a message's head, ``<|start|>assistant``. Ids with no message are content as they stand.
    """
    from renderers.base import ParsedResponse
    from renderers.parsing import parse_gpt_oss

    start, channel, message, end, call, back, constrain = map(reader.convert_tokens_to_ids, TOKENS)
    head = [start, *reader.encode("assistant")]
    if message not in ids:
        return ParsedResponse(reader.decode([token for token in ids if token not in (call, back)]).strip())
    reply = parse_gpt_oss(
        reader,
        head + ids,
        return_id=back,
        call_id=call,
        start_id=start,
        end_id=end,
        channel_id=channel,
        message_id=message,
        constrain_id=constrain,
    )
    for each in reply.tool_calls:
        begin, stop = each.token_span
        each.token_span = (max(0, begin - len(head)), stop - len(head))
        # `raw` is read again because a key that is given twice is no error to `renderers`
        if each.status == "ok" and not isinstance(from_json(each.raw), dict):
            each.status = "malformed_structure"
    return reply
