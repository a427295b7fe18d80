"""The tiny engine: exact inference of dense Llama-like models on a CPU."""

from coderepairrl.engines.tiny.engine import Tiny, TinyEngine

__all__ = ["Tiny", "TinyEngine"]
