"""Train language models to repair code by doing it.

Importing the package loads no torch, transformers, vllm or matplotlib (a test checks this).
"""

__version__ = "0.1.0"
