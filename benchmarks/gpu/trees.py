"""Prefix trees on a GPU in bf16: logprobs and gradients of a group as one tree, compared with its rows one by one.

    python benchmarks/gpu/trees.py [--size 0.6B] [--length 2048]
    python benchmarks/gpu/trees.py --toy        (a miniature, on a CPU too)

Both round differently in bf16, so each is compared with the rows in float32. Prints the largest and the mean difference
of logprobs, and the largest of gradients as a fraction of their tensor's largest. Exits with 1 if an error of the tree
is more than `SLACK` times that of the rows in bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as hf_logging

from coderepairrl.learn.pack import pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.types import Sample
from learner import DEVICE, SIZES, build_model, free, group, make_setting  # benchmarks/gpu, where this script is

SLACK = 2.0
Computed = tuple[Tensor, dict[str, Tensor]]


def compute(model: Path, size: str, batches: list[list[Sample]], precision: str) -> Computed:
    """Logprobs (N) of the trained tokens of all batches, and the gradients of their mean, in float32 on the CPU."""
    learn = make_setting(size, 1 << 20, 1).learn.with_changes(precision=precision, gradient_checkpointing=False)
    policy = Policy.load(model, learn, DEVICE)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:  # it begins as zeros, and then lora_A gets no gradient
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator(DEVICE).manual_seed(0))
    trained = sum(sum(sample.trained) for batch in batches for sample in batch)
    logprobs = []
    for batch in batches:
        logp_N = policy.logprobs(pack_samples(batch), 1.0)
        (logp_N.sum() / trained).backward()  # type: ignore[no-untyped-call]
        logprobs.append(logp_N.detach().float().cpu())
    gradients = {name: p.grad.float().cpu() for name, p in policy.parameters.items() if p.grad is not None}
    del policy
    free()
    return torch.cat(logprobs), gradients


def compare(ours: Computed, theirs: Computed) -> dict[str, float]:
    """Differences of logprobs, and of gradients as a fraction of the largest of their tensor."""
    logprob_N = (ours[0] - theirs[0]).abs()
    gradient = max(((ours[1][name] - at).abs().max() / at.abs().max()).item() for name, at in theirs[1].items())
    return {"logprob_max": logprob_N.max().item(), "logprob_mean": logprob_N.mean().item(), "gradient_max": gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.6B")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if DEVICE.type == "cpu" and not options.toy:
        parser.error("there is no GPU: only --toy makes sense here")
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    size, length = ("toy", 96) if options.toy else (options.size, options.length)
    setting = make_setting(size, 4096, 1)
    samples = group(length, setting.config.vocab_size, shared=True)
    rows = [[sample] for sample in samples]
    with tempfile.TemporaryDirectory() as name:
        model = build_model(setting.config, torch.bfloat16, Path(name) / "model")
        exact = compute(model, size, rows, "fp32")
        errors = {
            way: compare(compute(model, size, batches, "bf16"), exact)
            for way, batches in (("tree", [samples]), ("rows", rows))
        }
    held = all(errors["tree"][key] <= SLACK * value for key, value in errors["rows"].items())
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(json.dumps({"device": device, "size": size, "length": length, **errors, "held": held}))
    sys.exit(not held)


if __name__ == "__main__":
    main()
