"""The tiny engine: exact inference of dense Llama-like models on a CPU."""

from coderepairrl.engines.tiny.client import TinyEngine
from coderepairrl.engines.tiny.spec import Tiny

__all__ = ["Tiny", "TinyEngine"]
