"""The learner on one GPU against a plain transformers + peft loop, in one run.

    python benchmarks/gpu/learner.py [--sizes 0.6B 14B] [--lengths 4096 16384] [--parts step group loss sync] [--json]
    python benchmarks/gpu/learner.py --toy        (a miniature, on a CPU too: shows that the script runs)

Needs torch, transformers, peft and this package. Random weights of Qwen3's shapes, LoRA of rank 32 on all linear
layers, bf16, gradient checkpointing, AdamW; rows of mixed lengths up to the given one, whose second halves are
trained. Running out of memory is reported as a result; any other failure also makes the exit code 1. One contestant is
in memory at a time. Each result is on stderr as soon as it is known; stdout has all of them at the end.

Peak memory is printed beside the plan's estimate (`coderepairrl.plan.sizing`, ``crrl train --dry-run``) and the
driver's figure of used device memory, so that a run on a GPU checks the plan and its reserve.

- step, ``packed``: our GSPO step, rows end to end, logits of trained tokens in chunks. ``plain, padded``: transformers'
  own loss on rows padded to the longest, as many at once as the same token budget holds. ``plain, one by one``: the
  same, a row at a time.
- group: our step on eight attempts at one task, each a prompt of three quarters of the length and its own last quarter.
  ``shared``: all have the same prompt. ``apart``: each has another first token, so that nothing is shared.
- loss, on the longest row and a model of one layer: ``chunked`` is ours, ``whole`` holds all logits at once, ``plain``
  is transformers' own, ``fused`` liger-kernel's, where it is installed.
- sync: the learner's files for an engine, ``adapter`` or merged ``model``, checksum included, beside peft's
  save_pretrained of the adapter (``peft``) and of the model with the adapters merged and taken out again
  (``peft, merged``).

Model FLOPs leave out recomputation: frozen weights count forward and the gradient of activations, causal attention
half the square. MFU is relative to the device's dense bf16 peak (``--peak`` in TFLOP/s if not known here).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it at its first matrix product

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as hf_logging

from coderepairrl.config.schema import Lora
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.pack import pack_rank_share, pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.plan.sizing.architecture import PUBLISHED, Architecture
from coderepairrl.plan.sizing.learner import compute_learner_memory
from coderepairrl.types import Sample

Contestant = Callable[[], object]
Result = dict[str, Any]
SIZES = {name.removeprefix("Qwen3-"): raw for name, raw in PUBLISHED.items() if raw["model_type"] == "qwen3"}
TOY = {
    **{"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 40_960},
    "tie_word_embeddings": True,
}
PARTS = ("step", "group", "loss", "sync")
GROUP = 8
PEAKS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
"""Dense bf16 TFLOP/s, by what a device's name contains (NVIDIA's data sheets)."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Setting(NamedTuple):
    shape: Architecture
    config: Qwen3Config
    learn: LearnSettings
    dtype: torch.dtype
    rounds: int


def make_setting(size: str, micro_tokens: int, rounds: int) -> Setting:
    raw = SIZES.get(size, TOY)
    shape = Architecture.from_config(raw)
    assert shape is not None
    config = Qwen3Config(**raw)
    if raw is TOY:
        learn = LearnSettings(lora=Lora(rank=4, alpha=8), gradient_checkpointing=True, micro_tokens=256)
        return Setting(shape, config, learn, torch.float32, 1)
    learn = LearnSettings(lora=Lora(), precision="bf16", gradient_checkpointing=True, micro_tokens=micro_tokens)
    return Setting(shape, config, learn, torch.bfloat16, rounds)


def planned(setting: Setting, samples: list[Sample]) -> float:
    """GiB of our step by the plan, for its largest micro-batch."""
    parts, _ = pack_rank_share(samples, setting.learn.micro_tokens)
    tokens = max(len(part.ids_T) for part in parts)
    trained = max(len(part.at_N) for part in parts)
    largest = setting.learn.with_changes(micro_tokens=tokens)
    gpu = DEVICE.type == "cuda"
    return compute_learner_memory(setting.shape, largest, longest=1, trained=trained, gpu=gpu).peak / 2**30


def rows(count: int, longest: int, vocabulary: int) -> list[Sample]:
    """Rows of log-normal lengths, as episodes have them; the first is the longest."""
    draw = random.Random(0)
    samples = []
    for number in range(count):
        n = longest if number == 0 else max(8, min(longest, round(longest / 3 * draw.lognormvariate(0, 0.7))))
        trained = tuple(i >= n // 2 for i in range(n))
        ids = tuple(draw.randrange(vocabulary) for _ in range(n))
        logprobs = tuple(-11.0 if on else 0.0 for on in trained)
        versions = tuple(0 if on else -1 for on in trained)
        samples.append(Sample(f"e{number}", ids, trained, logprobs, versions, draw.choice([-1.0, 1.0])))
    return samples


def group(length: int, vocabulary: int, *, shared: bool) -> list[Sample]:
    """Rows of attempts at one task, each with its own last quarter, which is trained."""
    draw = random.Random(0)
    prompt = [draw.randrange(GROUP, vocabulary) for _ in range(3 * length // 4)]
    samples = []
    for number in range(GROUP):
        completion = [draw.randrange(GROUP, vocabulary) for _ in range(length - len(prompt))]
        ids = (prompt[0] if shared else number, *prompt[1:], *completion)
        trained = tuple(at >= len(prompt) for at in range(length))
        logprobs, versions = tuple(-11.0 * on for on in trained), tuple(0 if on else -1 for on in trained)
        samples.append(Sample(f"g{number}", ids, trained, logprobs, versions, (-1.0) ** number))
    return samples


def flops(config: Qwen3Config, samples: list[Sample]) -> float:
    """Model FLOPs of a step that trains adapters, without those of the adapters."""
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attention = config.hidden_size * width * (2 * heads + 2 * groups)
    weights = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    total = 0.0
    for sample in samples:
        n = len(sample.ids)
        total += 4.0 * n * weights
        total += 6.0 * n * n * heads * width * config.num_hidden_layers
        total += 4.0 * sum(sample.trained) * config.hidden_size * config.vocab_size
    return total


def measure(build: Callable[[], Contestant], rounds: int) -> Result:
    """Median seconds of a run after a warm-up, and peak memory."""
    free()  # the memory of the contestant before
    torch.use_deterministic_algorithms(False)  # only our learner turns it on
    try:
        run = build()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(rounds):
            _wait()
            began = time.perf_counter()
            run()
            _wait()
            seconds.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        return {"failed": f"out of memory: {str(error).split('.')[0]}"}
    except Exception as error:  # the other contestants are still measured
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", "broken": True}
    result: Result = {"seconds": statistics.median(seconds), "peak_gib": None, "device_gib": None}
    if DEVICE.type == "cuda":
        free_bytes, total = torch.cuda.mem_get_info()
        result |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "device_gib": (total - free_bytes) / 2**30}
    return result


def measure_each(
    contestants: Mapping[str, Callable[[], Contestant]],
    rounds: int,
    derive: Callable[[str, Result], Result] = lambda name, result: {},
) -> dict[str, Result]:
    """`measure` each contestant, add what `derive` computes, and print it at once: a run may be cut short."""
    results = {}
    for name, build in contestants.items():
        result = measure(build, rounds)
        results[name] = result | derive(name, result)
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return results


def free() -> None:
    """Free unreferenced memory."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def plain_step(folder: Path, samples: list[Sample], setting: Setting, *, at_once: int) -> Contestant:
    """Forward, transformers' loss, backward, clipping and AdamW over padded micro-batches."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=setting.dtype, attn_implementation="sdpa").to(DEVICE)
    network.gradient_checkpointing_enable({"use_reentrant": False})
    lora = setting.learn.lora
    assert lora is not None
    model = get_peft_model(
        network, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=0.0)
    ).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=setting.learn.lr, fused=True)
    batches = []
    for at in range(0, len(samples), at_once):
        some = samples[at : at + at_once]
        ids = pad_sequence([torch.tensor(s.ids) for s in some], batch_first=True)
        mask = pad_sequence([torch.ones(len(s.ids), dtype=torch.long) for s in some], batch_first=True)
        on = pad_sequence([torch.tensor(s.trained) for s in some], batch_first=True)
        batches.append((ids.to(DEVICE), mask.to(DEVICE), ids.masked_fill(~on, -100).to(DEVICE)))

    def run() -> None:
        for ids, mask, labels in batches:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=setting.dtype == torch.bfloat16):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(trained, setting.learn.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return run


def our_step(folder: Path, samples: list[Sample], settings: LearnSettings) -> Contestant:
    trainer = Trainer(folder, settings)
    return lambda: trainer.step(samples)


def steps(folder: Path, samples: list[Sample], setting: Setting, peak: float | None) -> dict[str, Result]:
    longest, tokens = max(len(s.ids) for s in samples), sum(len(s.ids) for s in samples)
    together = max(1, setting.learn.micro_tokens // longest)
    contestants: dict[str, Callable[[], Contestant]] = {
        "packed": lambda: our_step(folder, samples, setting.learn),
        "plain, padded": lambda: plain_step(folder, samples, setting, at_once=together),
        "plain, one by one": lambda: plain_step(folder, samples, setting, at_once=1),
    }
    work = flops(setting.config, samples)

    def derive(name: str, result: Result) -> Result:
        more: Result = {"planned_gib": planned(setting, samples)} if name == "packed" else {}
        if "seconds" in result:
            more["tokens_per_s"] = tokens / result["seconds"]
            more["mfu"] = work / result["seconds"] / (peak * 1e12) if peak else None
        return more

    return measure_each(contestants, setting.rounds, derive)


def groups(folder: Path, length: int, setting: Setting) -> dict[str, Result]:
    def of(learn: LearnSettings, *, shared: bool) -> Contestant:
        return our_step(folder, group(length, setting.config.vocab_size, shared=shared), learn)

    contestants: dict[str, Callable[[], Contestant]] = {
        "apart": lambda: of(setting.learn, shared=False),
        "shared": lambda: of(setting.learn, shared=True),
    }
    return measure_each(
        contestants,
        setting.rounds,
        lambda _, result: {"tokens_per_s": GROUP * length / result["seconds"]} if "seconds" in result else {},
    )


def losses(folder: Path, longest: Sample, setting: Setting) -> dict[str, Result]:
    """Measure losses on all tokens of the longest row, with a model of one layer."""
    every = replace(
        longest,
        trained=(False, *[True] * (len(longest.ids) - 1)),
        logprobs=(0.0, *[-11.0] * (len(longest.ids) - 1)),
        versions=(-1, *[0] * (len(longest.ids) - 1)),
    )
    batch = pack_samples([every]).to(DEVICE)
    size = len(batch.at_N) * setting.config.vocab_size

    def ours(logits: int) -> Contestant:
        policy = _policy(folder, setting)

        def run() -> None:
            (-policy.logprobs(batch, 1.0, logits).mean()).backward()  # type: ignore[no-untyped-call]

        return run

    def fused() -> Contestant:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        policy = _policy(folder, setting)
        loss, head = LigerFusedLinearCrossEntropyLoss(), policy.model.get_output_embeddings()

        def run() -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=setting.dtype == torch.bfloat16):
                hidden_TD = policy._packed.hidden(batch)
                loss(head.weight, hidden_TD[batch.at_N].to(head.weight.dtype), batch.target_N).backward()

        return run

    def plain() -> Contestant:
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=setting.dtype, attn_implementation="sdpa").to(
            DEVICE
        )
        lora = setting.learn.lora
        assert lora is not None
        model = get_peft_model(network, LoraConfig(r=lora.rank, target_modules=list(lora.targets)))
        ids = batch.ids_T[None]

        def run() -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=setting.dtype == torch.bfloat16):
                model(input_ids=ids, labels=ids).loss.backward()

        return run

    contestants: dict[str, Callable[[], Contestant]] = {
        "chunked": lambda: ours(size // 8 if setting.dtype == torch.float32 else 1 << 26),
        "whole": lambda: ours(size),
        "plain": plain,
        "fused": fused,
    }
    if DEVICE.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        del contestants["fused"]
    return measure_each(contestants, setting.rounds)


def _policy(folder: Path, setting: Setting) -> Policy:
    return Trainer(folder, setting.learn.with_changes(gradient_checkpointing=False)).policy


def sync(folder: Path, setting: Setting, work: Path) -> dict[str, Result]:
    lora = setting.learn.lora
    assert lora is not None

    def publish(form: Any) -> Contestant:
        trainer = Trainer(folder, setting.learn)
        return lambda: trainer.publish(work / form, form)

    def peft(merged: bool) -> Contestant:
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=setting.dtype).to(DEVICE)
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
        model = get_peft_model(network, config)

        def merge_and_save() -> None:
            model.merge_adapter()
            model.get_base_model().save_pretrained(work / "peft, merged")
            model.unmerge_adapter()

        return merge_and_save if merged else lambda: model.save_pretrained(work / "peft")

    contestants: dict[str, Callable[[], Contestant]] = {
        "adapter": lambda: publish("adapter"),
        "model": lambda: publish("model"),
        "peft": lambda: peft(False),
        "peft, merged": lambda: peft(True),
    }
    results = measure_each(contestants, setting.rounds)
    for name, result in results.items():
        if "failed" not in result:
            result["bytes"] = sum(file.stat().st_size for file in (work / name).rglob("*.safetensors"))
    return results


def build_model(config: Qwen3Config, dtype: torch.dtype, folder: Path) -> Path:
    """Random weights, drawn on the device: billions of them take long on a CPU."""
    free()
    torch.manual_seed(0)
    with DEVICE:
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def markdown(report: Result) -> str:
    lines = [f"{report['device']}, torch {report['torch']}", ""]
    columns = ["size", "length", "what", "contestant", "seconds", "tokens/s", "MFU"]
    columns += ["peak GiB", "planned", "taken", "MB"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for entry in report["results"]:
        if "failed" in entry:
            lines.append(f"| {entry['size']} | | | | {entry['failed']} |" + " |" * 6)
        for kind in PARTS:
            for name, found in entry.get(kind, {}).items():
                cells = [entry["size"], entry["length"], kind, name]
                if "failed" in found:
                    cells += [found["failed"], *[""] * 3, f"{found.get('planned_gib', 0):.3g}", "", ""]
                else:
                    size = found["bytes"] / 1e6 if "bytes" in found else None
                    keys = ("seconds", "tokens_per_s", "mfu", "peak_gib", "planned_gib", "device_gib")
                    numbers = [*(found.get(key) for key in keys), size]
                    cells += ["" if number is None else f"{number:.3g}" for number in numbers]
                lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16_384])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--micro-tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", type=float, help="the device's dense bf16 TFLOP/s")
    parser.add_argument(
        "--scratch", type=Path, help="where models are written: 30 GB for 14B, and twice as much again to sync"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
        if not options.toy:
            parser.error("there is no GPU: only --toy makes sense here")
    peak = options.peak or next((peak for name, peak in PEAKS.items() if name in device), None)
    results: list[Result] = []
    with contextlib.redirect_stdout(sys.stderr):  # packages print while they load
        for size in ["toy"] if options.toy else options.sizes:
            try:
                results += measure_size(size, options, peak)
            except torch.OutOfMemoryError as error:
                results.append({"size": size, "failed": f"out of memory: {str(error).split('.')[0]}"})
    report = {"device": device, "torch": torch.__version__, "peak_tflops": peak, "results": results}
    print(json.dumps(report) if options.json else f"{markdown(report)}\n\n{json.dumps(report)}")
    if any(found.get("broken") for entry in results for kind in PARTS for found in entry.get(kind, {}).values()):
        sys.exit(1)


def measure_size(size: str, options: argparse.Namespace, peak: float | None) -> list[Result]:
    """Measure one model size; an entry for each length."""
    setting = make_setting(size, options.micro_tokens, options.rounds)
    entries: list[Result] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as name:
        model = build_model(setting.config, setting.dtype, Path(name) / "model")
        config = Qwen3Config(**setting.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None})
        shallow = build_model(config, setting.dtype, Path(name) / "shallow")
        for length in [96] if options.toy else options.lengths:
            print(f"{size}, {length} tokens", file=sys.stderr, flush=True)
            samples = rows(options.rows, length, setting.config.vocab_size)
            tokens = sum(len(sample.ids) for sample in samples)
            entry: Result = {"size": size, "length": length, "tokens": tokens}
            entry["padding"] = len(samples) * length / tokens
            if "step" in options.parts:
                entry["step"] = steps(model, samples, setting, peak)
            if "group" in options.parts:
                entry["group"] = groups(model, length, setting)
            if "loss" in options.parts:
                entry["loss"] = losses(shallow, samples[0], setting)
            entries.append(entry)
        if "sync" in options.parts:
            entries[0]["sync"] = sync(model, setting, Path(name) / "sync")  # it does not depend on the length
    return entries


if __name__ == "__main__":
    main()
