"""Messages to token ids and back: the only package that loads tokenizers and `renderers` (DESIGN 3).

It loads neither torch nor transformers.
"""

from __future__ import annotations

from coderepairrl.tokens.codec import Codec, load
from coderepairrl.tokens.reply import Delta, FunctionCall, Reply, ReplyStream

__all__ = ["Codec", "Delta", "FunctionCall", "Reply", "ReplyStream", "load"]
