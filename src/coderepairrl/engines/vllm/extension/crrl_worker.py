"""What vLLM's workers learn for us: ``--worker-extension-cls crrl_worker.Extension``, this folder on PYTHONPATH.

It runs in vLLM's Python, which need not have this project: of it, it loads the file `sync/wire.py` alone.
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

WIRE = Path(__file__).parents[3] / "sync" / "wire.py"


def _load(file: Path) -> Any:
    """The module in `file`, which imports nothing of ours."""
    spec = importlib.util.spec_from_file_location("crrl_wire", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


wire = _load(WIRE)


class Extension:
    """Mixed into vLLM's worker, whose attributes it uses."""

    reload_weights: Any
    model_runner: Any
    vllm_config: Any
    rank: int
    _arrived: dict[str, torch.Tensor]

    def reload_policy(self, path: str) -> dict[str, str]:
        """Take on the weights in the folder `path`, and be sure of it; whoever calls has paused the server.

        Returns nothing, or the ``error`` (`_refusal`).
        """
        try:
            if current_platform.is_cpu():
                _check(_stored(Path(path)))  # once they are packed, nobody can look at them
            self._reload(weights_path=path)
        except Exception as error:
            return self._refusal(error)
        return {}

    def receive_policy(self, offer: str, receivers: int, seconds: float, checksum: str) -> dict[str, str]:
        """Take the weights that the learner offers in the folder `offer` into host memory, and change nothing.

        Returns their ``checksum``, or the ``error`` (`_refusal`). `receivers` are all workers of the server.
        """
        config = self.vllm_config.parallel_config
        place = config.data_parallel_index * config.world_size + self.rank
        self._arrived = {}
        try:
            self._arrived, found = wire.receive(Path(offer), 1 + place, receivers, seconds)
            if config.data_parallel_index and found != checksum:
                raise ValueError(f"what arrived has checksum {found}, not {checksum}")
        except Exception as error:
            return self._refusal(error)
        return {"checksum": found}

    def load_received(self) -> dict[str, str]:
        """Take on what arrived last, as `reload_policy` does; it arrived once and is loaded once."""
        try:
            arrived, self._arrived = self._arrived, {}
            if not arrived:
                raise ValueError("nothing has arrived")
            self._reload(weights_iterator=iter(arrived.items()))
        except Exception as error:
            return self._refusal(error)
        return {}

    def _refusal(self, error: Exception) -> dict[str, str]:
        """What the caller is told: an exception would cost it the connection, and so the reason.

        But of several replicas (``--data-parallel-size``) vLLM 0.32 hands on the first one's answers alone: if another
        failed, only an exception shows it, after which nobody goes on with this server.
        """
        if self.vllm_config.parallel_config.data_parallel_index:
            raise error
        return {"error": f"{type(error).__name__}: {error}"}

    def _reload(self, **source: Any) -> None:
        """A head that is tied to the embedding is in no file, and on a CPU vLLM 0.32 serves a packed copy of the old
        one for ever. Raises ValueError for weights that are not finite.
        """
        self.reload_weights(**source)
        model = self.model_runner.get_model()
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
        if not current_platform.is_cpu():
            _check(model.named_parameters())


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def _check(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite")
