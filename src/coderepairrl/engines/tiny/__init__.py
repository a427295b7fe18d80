"""The tiny engine: a dense model like Llama, served exactly on a CPU."""

from coderepairrl.engines.tiny.client import TinyEngine
from coderepairrl.engines.tiny.spec import Tiny

__all__ = ["Tiny", "TinyEngine"]
