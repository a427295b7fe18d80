"""Methods for vLLM's workers (``--worker-extension-cls crrl_worker.Extension``, with this folder on PYTHONPATH).

vLLM's Python may lack this project: only `sync/wire.py` is loaded, by its path.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # type: ignore[import-not-found]
from vllm.platforms import current_platform  # type: ignore[import-not-found]

_spec = importlib.util.spec_from_file_location("crrl_wire", Path(__file__).parents[3] / "sync" / "wire.py")
assert _spec is not None and _spec.loader is not None
wire: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wire)


def _fix_missing_adapters() -> None:
    """Fix vLLM's CPU kernel for adapters, which applies an adapter to tokens without one."""
    from vllm.lora.ops.torch_ops import lora_ops  # type: ignore[import-not-found]
    from vllm.lora.punica_wrapper import punica_cpu  # type: ignore[import-not-found]

    shrink = lora_ops.bgmv_shrink

    def fixed_shrink(inputs: Any, lora: Any, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, lora, output, indices, scaling)
        # -1 stands for no adapter, but selects the last one in vLLM 0.32
        output[indices < 0] = 0.0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = fixed_shrink


if current_platform.is_cpu():
    _fix_missing_adapters()


class Extension:
    """Mixin for vLLM's worker, whose attributes it uses."""

    reload_weights: Any
    model_runner: Any
    vllm_config: Any
    rank: int
    _arrived: dict[str, torch.Tensor]

    def reload_policy(self, path: str) -> dict[str, str]:
        """Load and check the weights in the folder `path`, while the server is paused.

        Returns an empty dict, or the ``error`` (`_report_error`).
        """
        try:
            if current_platform.is_cpu():
                _check_finite(_iter_stored(Path(path)))  # before loading, which packs the weights
            self._reload(weights_path=path)
        except Exception as error:
            return self._report_error(error)
        return {}

    def receive_policy(self, offer: str, receivers: int, seconds: float, checksum: str) -> dict[str, str]:
        """Receive the weights of the offer in the file `offer` into host memory.

        `receivers` counts all workers. Returns the ``checksum``, or the ``error`` (`_report_error`).
        """
        config = self.vllm_config.parallel_config
        worker_index = config.data_parallel_index * config.world_size + self.rank
        self._arrived = {}
        try:
            self._arrived, actual = wire.receive(Path(offer), 1 + worker_index, receivers, seconds)
            if config.data_parallel_index and actual != checksum:
                raise ValueError(f"the weights have checksum {actual}, not {checksum}")
        except Exception as error:
            return self._report_error(error)
        return {"checksum": actual}

    def load_received(self) -> dict[str, str]:
        """Load the received weights, once; otherwise like `reload_policy`."""
        try:
            arrived, self._arrived = self._arrived, {}
            if not arrived:
                raise ValueError("nothing has arrived")
            self._reload(weights_iterator=iter(arrived.items()))
        except Exception as error:
            return self._report_error(error)
        return {}

    def _report_error(self, error: Exception) -> dict[str, str]:
        """Return `error` as a result: an exception would break the caller's connection and lose the reason."""
        # with several replicas (--data-parallel-size) vLLM 0.32 returns the results of the first one only: the others
        # must raise to be noticed, which makes this server unusable
        if self.vllm_config.parallel_config.data_parallel_index:
            raise error
        return {"error": f"{type(error).__name__}: {error}"}

    def _reload(self, **source: Any) -> None:
        """Reload the weights. Raises ValueError if they are not finite."""
        self.reload_weights(**source)
        # a tied head is in no file, and vLLM 0.32 on a CPU would keep serving a packed copy of the old one
        model = self.model_runner.get_model()
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
        if not current_platform.is_cpu():
            _check_finite(model.named_parameters())


def _iter_stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)


def _check_finite(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite")
