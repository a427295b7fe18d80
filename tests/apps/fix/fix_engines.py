"""Engines that say given texts, for `engine=fix_engines:Says` in a command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.protocols import EngineSpec


@dataclass(frozen=True, kw_only=True)
class Says(EngineSpec):
    """Says `texts` in turn, in which `<tool_call>` and its like are the tokens that they are; then it dies."""

    texts: Sequence[str]
    delay: float = 0.0

    name = "scripted"

    async def start(self, model: Path, *, log_dir: Path) -> ScriptedEngine:
        codec = tokens.load(model)
        return ScriptedEngine([list(_ids(codec, text)) for text in self.texts], delay=self.delay)


def _ids(codec: tokens.Codec, text: str) -> Iterator[int]:
    added: dict[str, Any] = codec.tokenizer.added
    for piece in text.replace("<tool_call>", "\0<tool_call>\0").replace("</tool_call>", "\0</tool_call>\0").split("\0"):
        yield from [added[piece]] if piece in added else codec.encode(piece)
    yield added["<|im_end|>"]
