"""The tiny engine: a small Qwen3 served exactly, on one CPU thread (DESIGN 6.4)."""

from coderepairrl.engines.tiny.client import TinyEngine

__all__ = ["TinyEngine"]
