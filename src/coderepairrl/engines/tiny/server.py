"""The tiny engine's process: one thread that answers frames and runs forward passes.

Frames in: ``{"do": "generate" | "abort" | "load" | "health", ...}``. Frames out: ``{"version", "tokens"}``, with
``[key, ids, logprobs, ended]`` per request, when it ends and every `SEND_SECONDS` before; ``{"failed", "error"}``
for a failed request; ``{"answer", ...}`` for a numbered command.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from coderepairrl.engines.tiny.config import EMBEDDING, HEAD, ModelConfig
from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.engines.tiny.sampler import draw_uniforms, sample_tokens
from coderepairrl.engines.tiny.scheduler import Scheduler, SequenceRequest
from coderepairrl.errors import CodeRepairError, EngineFault
from coderepairrl.processes.children import Frame, Parent
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

SEND_SECONDS = 0.05
"""Interval at which a request's tokens are sent before it ends: short enough to watch, long enough to cost little."""


def check_weights(config: ModelConfig, path: Path, checksum: str | None = None) -> None:
    """Raise `EngineFault` unless the weights match `config` and are finite."""
    if checksum is not None:
        weights.verify_checksum(path, checksum)
    config.check_tensors(path, weights.read_headers(path))
    with _open_weights(path) as read:
        for name in config.shapes():
            if not torch.isfinite(read(name)).all():
                raise EngineFault(f"{path}: {name} has values that are not finite")
        if config.tied and HEAD in weights.read_headers(path) and not torch.equal(read(HEAD), read(EMBEDDING)):
            raise EngineFault(f"{path}: {HEAD} differs from {EMBEDDING}, and the model ties them")


def read_weights(config: ModelConfig, path: Path) -> Weights:
    """Read checked weights. Files are mapped: only their fp32 copy takes memory."""
    with _open_weights(path) as read:
        return Weights.build(config, read)


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[Callable[[str], torch.Tensor]]:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weights.list_weight_files(path)]
        readers = {name: file.get_tensor for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
        yield lambda name: readers[name](name)


class TinyServer:
    """Requests, weights and main loop."""

    def __init__(self, folder: Path, *, slots: int, context: int) -> None:
        self.config = ModelConfig.read(folder)
        self.version = 0
        check_weights(self.config, folder)
        self.weights = read_weights(self.config, folder)
        self.model = TinyModel(self.config, slots=slots, context=context)
        self.scheduler = Scheduler(slots=slots, context=context, copy=self.model.copy)
        self._unsent: dict[int, tuple[list[int], list[float]]] = {}
        """Ids and logprobs by request, all sampled with `version`."""
        self._last_sent = time.monotonic()

    def serve(self, parent: Parent) -> None:
        """Run until the parent closes the connection."""
        while True:
            idle = not self.scheduler.is_busy
            while (frame := parent.receive(block=idle)) is not None:
                for reply in self.handle(frame):
                    parent.send(reply)
                idle = not self.scheduler.is_busy
            for reply in self.step():
                parent.send(reply)

    def handle(self, frame: Frame) -> list[Frame]:
        """Handle a frame; returns its replies: unsent tokens before a load, and a command's answer."""
        do = frame["do"]
        if do == "generate":
            self.scheduler.add(self._make_request(frame))
            return []
        if do == "abort":
            self.scheduler.abort(frame["key"])
            self._unsent.pop(frame["key"], None)
            return []
        unsent = self._take_unsent([*self._unsent]) if do == "load" else []
        answer: Frame = {"answer": frame["number"]}
        try:
            if do == "load":
                self._load(Path(frame["path"]), frame["version"], frame["checksum"])
                answer["version"] = self.version
            else:
                answer["health"] = self.health()
        except EngineFault as fault:
            answer["error"] = str(fault)
        return [*unsent, answer]

    def _load(self, path: Path, version: int, checksum: str) -> None:
        check_weights(self.config, path, checksum)
        del self.weights  # first, so that memory never holds two copies
        self.weights = read_weights(self.config, path)
        self.version = version
        # drop the cached keys and values of running requests, too: each logprob must depend on one version alone, as
        # the learner will compute it
        for slot, count in self.scheduler.invalidate_cache():
            self.model.wipe(slot, count)

    def health(self) -> dict[str, float]:
        """Counters (`TinyEngine.health`)."""
        scheduler = self.scheduler
        return {
            "version": self.version,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            **scheduler.counters,
            "kv_tokens_free": scheduler.free_tokens,
        }

    def step(self) -> list[Frame]:
        """Run one forward pass; returns frames of tokens and failed requests."""
        step = self.scheduler.plan()
        if not step.pieces:
            return []
        logits_BV = self.model.forward(self.weights, step.ids, step.pieces, step.output_rows)
        self.scheduler.mark_computed(step)
        if not step.samplers:
            return []
        failed: list[Frame] = []
        ended: list[int] = []
        for request, token, logprob in zip(step.samplers, *self._sample(step.samplers, logits_BV), strict=True):
            if not math.isfinite(logprob):
                self.scheduler.abort(request.key)
                error = f"the logits of version {self.version} are not finite"
                failed.append({"failed": request.key, "error": error})
                continue
            ids, logprobs = self._unsent.setdefault(request.key, ([], []))
            ids.append(token)
            logprobs.append(float(f"{logprob:.9g}"))  # the fewest digits with which every float32 round-trips
            if self.scheduler.append_token(request, token):
                ended.append(request.key)
        if failed or time.monotonic() - self._last_sent >= SEND_SECONDS:
            self._last_sent = time.monotonic()
            return [*self._take_unsent([*self._unsent], ended), *failed]
        return self._take_unsent(ended, ended)

    def _take_unsent(self, keys: Sequence[int], ended: Sequence[int] = ()) -> list[Frame]:
        tokens = [[key, *self._unsent.pop(key), key in ended] for key in keys]
        return [{"version": self.version, "tokens": tokens}] if tokens else []

    @staticmethod
    @torch.inference_mode()
    def _sample(requests: Sequence[SequenceRequest], logits_BV: torch.Tensor) -> tuple[list[int], list[float]]:
        samplings = [request.sampling for request in requests]
        draws = [request.draws[request.sampled] if request.draws else 0.0 for request in requests]
        return sample_tokens(logits_BV, samplings, draws)

    def _make_request(self, frame: Frame) -> SequenceRequest:
        settings = frame["sampling"]
        sampling = Sampling(**settings)
        ids: list[int] = frame["ids"]
        room = min(sampling.max_tokens, self.scheduler.context - len(ids))
        return SequenceRequest(
            key=frame["key"],
            tokens=ids,
            sampling=sampling,
            draws=draw_uniforms(frame["seed"], room) if sampling.temperature else [],
            room=room,
            stop=frozenset(settings["stop_ids"]),
        )


def main() -> None:
    """Serve the model in a folder: ``FOLDER SLOTS CONTEXT THREADS``."""
    folder, *sizes = sys.argv[1:]
    slots, context, threads = map(int, sizes)
    torch.set_num_threads(threads)
    parent = Parent.connect()
    try:
        server = TinyServer(Path(folder), slots=slots, context=context)
    except (CodeRepairError, RuntimeError, MemoryError) as error:
        parent.send({"error": str(error)})
        sys.exit(1)
    parent.send({"ready": True})
    try:
        server.serve(parent)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the controller is gone: nothing to save


if __name__ == "__main__":
    main()
