"""CodeRepairRL trains language models to repair code by doing it.

Importing the package loads no torch, transformers, vllm or matplotlib; a test keeps it so.
"""

__version__ = "0.1.0"
