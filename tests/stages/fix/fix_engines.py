"""An engine with scripted texts, for `engine=fix_engines:Says`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.protocols import EngineSpec
from coderepairrl.types import Chunk, EngineNeeds, Sampling


@dataclass(frozen=True, kw_only=True)
class Says(EngineSpec):
    """Replies with `texts` in turn, encoding `<tool_call>` tags as special tokens, then dies.

    A warm-up takes no text. Text `endless`, from 0, pauses after its first chunk until the client leaves.
    """

    texts: Sequence[str]
    delay: float = 0.0
    endless: int | None = None

    name = "scripted"

    async def start(self, model: Path, *, log_dir: Path, needs: EngineNeeds = EngineNeeds()) -> ScriptedEngine:
        codec = tokens.load_codec(model)
        return _Engine([list(_ids(codec, text)) for text in self.texts], self.delay, self.endless)


class _Engine(ScriptedEngine):
    def __init__(self, replies: Sequence[Sequence[int]], delay: float, endless: int | None) -> None:
        super().__init__(replies, delay=delay)
        self._endless = endless

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        if sampling.max_tokens == 1:  # it is warmed up
            yield Chunk((0,), (0.0,), self.version)
            return
        endless = len(self.requests) == self._endless
        async for chunk in super().generate(ids, sampling, seed):
            yield chunk
            if endless:
                await asyncio.Event().wait()


def _ids(codec: tokens.Codec, text: str) -> Iterator[int]:
    added: dict[str, Any] = codec.tokenizer.added
    for piece in text.replace("<tool_call>", "\0<tool_call>\0").replace("</tool_call>", "\0</tool_call>\0").split("\0"):
        yield from [added[piece]] if piece in added else codec.encode(piece)
    yield added["<|im_end|>"]
