"""The tiny engine: a small Qwen3 served exactly, on one CPU thread."""

from coderepairrl.engines.tiny.client import TinyEngine
from coderepairrl.engines.tiny.spec import Tiny

__all__ = ["Tiny", "TinyEngine"]
