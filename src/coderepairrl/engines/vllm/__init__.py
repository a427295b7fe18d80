"""The vLLM engine: a vLLM 0.32 server, started here or joined by URL (docs/guides/engines.md)."""

from coderepairrl.engines.vllm.client import VllmEngine
from coderepairrl.engines.vllm.spec import Vllm

__all__ = ["Vllm", "VllmEngine"]
