"""Messages to token ids and back: the only package that loads tokenizers and `renderers` (DESIGN 3).

It loads neither torch nor transformers.
"""

from __future__ import annotations

from coderepairrl.tokens.codec import GENERATION_PROMPT, Codec, load
from coderepairrl.tokens.reply import Delta, FunctionCall, Reply, ReplyStream

__all__ = ["GENERATION_PROMPT", "Codec", "Delta", "FunctionCall", "Reply", "ReplyStream", "load"]
