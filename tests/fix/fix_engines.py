"""Engines that say given texts, for `engine=fix_engines:Says` in a command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from coderepairrl import tokens
from coderepairrl.engines import ScriptedEngine


class Says(ScriptedEngine):
    """Says `texts` in turn, in which `<tool_call>` and its like are the tokens that they are; then it dies."""

    @classmethod
    async def start(cls, model: Path, *, log_dir: Path, texts: Sequence[str], delay: float = 0.0) -> Self:
        codec = tokens.load(model)
        return cls([list(_ids(codec, text)) for text in texts], delay=delay)


def _ids(codec: tokens.Codec, text: str) -> Iterator[int]:
    added: dict[str, Any] = codec.tokenizer.added
    for piece in text.replace("<tool_call>", "\0<tool_call>\0").replace("</tool_call>", "\0</tool_call>\0").split("\0"):
        yield from [added[piece]] if piece in added else codec.encode(piece)
    yield added["<|im_end|>"]
