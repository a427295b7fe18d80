"""The vLLM engine: a server of vLLM 0.32, our own child or joined by URL (docs/guides/engines.md)."""

from coderepairrl.engines.vllm.client import VllmEngine

__all__ = ["VllmEngine"]
