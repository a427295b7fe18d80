"""What vLLM's workers learn for us: ``--worker-extension-cls crrl_worker.Extension``, this folder on PYTHONPATH.

It runs in vLLM's Python, which need not have this project: it imports nothing of it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # type: ignore[import-not-found]


class Extension:
    """Mixed into vLLM's worker, whose attributes it uses."""

    reload_weights: Any
    model_runner: Any

    def reload_policy(self, path: str) -> None:
        """Take on the weights in the folder `path`, and be sure of it; whoever calls has paused the server.

        A head that is tied to the embedding is in no file, and on a CPU vLLM 0.32 serves a packed copy of the old one
        for ever. Raises ValueError for weights that are not finite.
        """
        self.reload_weights(weights_path=path)
        model = self.model_runner.get_model()
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
        wrong = [name for name, value in model.named_parameters() if not torch.isfinite(value).all()]
        if wrong:
            raise ValueError(f"{wrong[0]} has values that are not finite")
