"""Does a server with a quantised base compute the learner's logprobs? Both on the same codes, format by format.

    python benchmarks/gpu/quantised.py --model Qwen/Qwen3-0.6B [--formats nf4 awq fp8] [--python ~/vllm/bin/python]
    python benchmarks/gpu/quantised.py            (the shipped policy of 1.4 M parameters, on a CPU too)

`plain`, `nf4` and `int8` are served as numbers (`model.quantise`); `awq`, `fp8`, `int4` and `w8a8` (compressed-tensors)
as codes. Codes are made here by rounding to nearest: good enough to compare two programs, not to use. Prints a line for
each: the largest and the mean absolute difference between the logprobs of sampled tokens, in nats, and what the
rounding itself changes (learner with codes against learner without). Exit code 1 if a server refused one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as hf_logging

from coderepairrl import models
from coderepairrl.config.sections.train import Lora
from coderepairrl.engines.tiny import Tiny
from coderepairrl.engines.vllm import Vllm
from coderepairrl.errors import CodeRepairError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.conversions import rounded
from coderepairrl.learn.policy import copy_layout
from coderepairrl.learn.trainer import Trainer
from coderepairrl.protocols import EngineSpec
from coderepairrl.sync import weights
from coderepairrl.types import Sampling

NUMBERS, CODES = ("plain", "nf4", "int8"), ("awq", "int4", "w8a8", "fp8")
GROUP, BLOCK = 32, 128
"""Weights that share a scale, in a row and in a square."""


def written(source: Path, target: Path, form: str, dtype: torch.dtype) -> Path:
    """The model in `source` with its layers' matrices as codes in `form`, in `target`."""
    target.mkdir()
    copy_layout(source, target)
    plain = {name: tensor for file in weights.files(source) for name, tensor in load_file(file).items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if name.endswith("_proj.weight"):
            owner = name.removesuffix("weight")
            tensors |= {owner + part: value.contiguous() for part, value in encoded(tensor, form, dtype).items()}
        else:
            tensors[name] = tensor.to(dtype)
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {"quantization_config": about(form), "dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    return target


def encoded(weight: Tensor, form: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """A matrix ``(out, in)`` by the names that a format has for its parts."""
    exact = weight.float()
    rows, columns = weight.shape
    if form in ("awq", "int4"):
        groups = exact.view(rows, -1, GROUP)
        scales = (groups.abs().amax(-1) / 7).to(dtype)
        numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7).view(rows, columns).int() + 8
        if form == "int4":
            shape = torch.tensor(weight.shape)
            return {"weight_packed": _packed(numbers), "weight_scale": scales, "weight_shape": shape}
        order = [0, 2, 4, 6, 1, 3, 5, 7]

        def awq(matrix: Tensor) -> Tensor:
            return _packed(matrix.view(len(matrix), -1, 8)[:, :, order].reshape(len(matrix), -1))

        zeros = torch.full((columns // GROUP, rows), 8, dtype=torch.int32)
        return {"qweight": awq(numbers.t().contiguous()), "qzeros": awq(zeros), "scales": scales.t()}
    if form == "w8a8":
        scale = exact.abs().amax(1, keepdim=True) / 127
        return {"weight": (exact / scale).round().to(torch.int8), "weight_scale": scale}
    across, down = -(-columns // BLOCK), -(-rows // BLOCK)
    scale = torch.stack(
        [
            exact[BLOCK * r : BLOCK * (r + 1), BLOCK * c : BLOCK * (c + 1)].abs().amax() / 448
            for r in range(down)
            for c in range(across)
        ]
    ).view(down, across)
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return {"weight": (exact / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def _packed(numbers: Tensor) -> Tensor:
    """Eight numbers of 4 bits in each of 32, the first in the lowest."""
    parts = numbers.view(len(numbers), -1, 8).long() << torch.arange(0, 32, 4)
    total = parts.sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int()


def about(form: str) -> dict[str, Any]:
    """The ``quantization_config`` of a format."""
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    if form == "fp8":
        method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        return method | {"weight_block_size": [BLOCK, BLOCK]}
    weight = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    inputs, kind = None, "pack-quantized"
    if form == "w8a8":
        weight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        kind = "int-quantized"
    group = {"targets": ["Linear"], "weights": weight, "input_activations": inputs}
    groups = {"config_groups": {"group_0": group}, "format": kind, "ignore": ["lm_head"]}
    return groups | {"quant_method": "compressed-tensors", "quantization_status": "compressed"}


async def sampled(engine: EngineSpec, model: Path, vocabulary: int, work: Path) -> tuple[list[list[int]], list[Any]]:
    """Rows of prompts and replies, and the logprobs of replies by the engine."""
    server = await engine.start(model, log_dir=work)

    async def one(number: int) -> tuple[list[int], list[float]]:
        prompt = [(7 * i * i + 3 * i + number) % vocabulary for i in range(32)]
        ids, logprobs = [], []
        async for part in server.generate(prompt, Sampling(max_tokens=64, temperature=1.0), seed=number):
            ids += part.ids
            logprobs += part.logprobs
        return prompt + ids, logprobs

    try:
        rows, found = zip(*await asyncio.gather(*(one(number) for number in range(16))), strict=True)
    finally:
        await server.close()
    return list(rows), list(found)


def compared(form: str, source: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One format: how far engine and learner are apart, and learner with codes and without."""
    dtype = torch.float32 if options.engine == "tiny" else torch.bfloat16
    precision = "fp32" if options.engine == "tiny" else "bf16"
    served, quantise = work / form, form if form in ("nf4", "int8") else "none"
    if form in CODES:
        written(source, served, form, dtype)
    elif quantise != "none":
        rounded(source, served, quantise, precision)  # type: ignore[arg-type]
    else:
        served = source
    engine: EngineSpec = Tiny()
    if options.engine == "vllm":
        args = () if options.share is None else ("--gpu-memory-utilization", str(options.share))
        engine = Vllm(slots=16, context=512, dtype="bfloat16", python=options.python, args=args)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    logs = work / f"{form}-logs"
    logs.mkdir()
    rows, theirs = asyncio.run(sampled(engine, served, vocabulary, logs))

    def scored(model: Path, form: str) -> Tensor:
        learn = LearnSettings(lora=Lora(), precision=precision, quantise=form)  # type: ignore[arg-type]
        found = Trainer(model, learn).logprobs(rows, 1.0)
        return torch.tensor([p for row, by in zip(found, theirs, strict=True) for p in row[-len(by) :]])

    ours = scored(served, quantise)
    apart = (ours - torch.tensor([p for by in theirs for p in by])).abs()
    rounding = (ours - scored(source, "none")).abs()
    return {
        "format": form,
        "tokens": len(ours),
        "max": apart.max().item(),
        "mean": apart.mean().item(),
        "rounding_mean": rounding.mean().item(),
        "bytes": weights.size(served),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--formats", nargs="+", choices=[*NUMBERS, *CODES], default=[*NUMBERS, *CODES])
    parser.add_argument("--engine", choices=["vllm", "tiny"], default="vllm", help="tiny serves no codes")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM")
    parser.add_argument("--share", type=float, help="of a GPU's memory that the server takes")
    parser.add_argument("--scratch", type=Path, help="where models are written")
    options = parser.parse_args()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source, failed = models.folder(options.model, weights=True), False
    for form in options.formats:
        with tempfile.TemporaryDirectory(dir=options.scratch) as work:
            try:
                print(json.dumps(compared(form, source, Path(work), options)), flush=True)
            except CodeRepairError as error:
                print(json.dumps({"format": form, "failed": str(error)[-1500:]}), flush=True)
                failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
