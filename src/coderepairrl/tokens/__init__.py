"""Conversion of messages to token ids and back, without torch or transformers."""

from __future__ import annotations

from coderepairrl.tokens.codec import ASIDE, GENERATION_PROMPT, Codec, LoadedFrom, Row, conversation_rows
from coderepairrl.tokens.inert import TooLong
from coderepairrl.tokens.loading import load_codec
from coderepairrl.tokens.reply import Delta, FunctionCall, Reply, ReplyStream
from coderepairrl.tokens.template import tokenizer_digest

__all__ = [
    "ASIDE",
    "GENERATION_PROMPT",
    "Codec",
    "Delta",
    "FunctionCall",
    "LoadedFrom",
    "Reply",
    "ReplyStream",
    "Row",
    "TooLong",
    "conversation_rows",
    "load_codec",
    "tokenizer_digest",
]
