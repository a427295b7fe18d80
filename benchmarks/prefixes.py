"""Shared prefixes in the learner: CPU seconds and memory of a group's prefix tree against its rows, in one run.

    python benchmarks/prefixes.py [--rounds 3] [--cases 1000+250 ...] [--micro-tokens 8192]

Forward and backward of the logprobs of a group's trained tokens. A case PROMPT+OWN is eight attempts with a common
prompt of PROMPT tokens and OWN tokens of their own; ``mixed`` is rows that share nothing. A randomly initialised Qwen3
of 1.0 M parameters, one torch thread, fp32, at most `--micro-tokens` tokens a pass.

- ``rows``: packed end to end, attention row by row through torch's SDPA, without shared prefixes.
- ``tree``: ours; a tree larger than a pass, such as 12000+2000, in chunks of half a pass.

Each run is a process of its own, forked from one that has computed nothing. Seconds are CPU seconds of the second of
two equal runs: medians over rounds in which the contestants take turns. Ratios are medians of those within a round,
with their range. Memory is how much the process grew at its peak.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from coderepairrl.learn.pack import MicroBatch, count_distinct_tokens, cut_rows, pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import CHUNKED_TREE_FACTOR
from coderepairrl.types import Sample
from learner import VOCABULARY, build_model, build_rows, ratio

CASES = ("128+128", "1000+250", "4000+500", "12000+2000")
GROUP = 8


def group(prompt: int, own: int) -> list[Sample]:
    draw = random.Random(0)
    shared = tuple(draw.randrange(2, VOCABULARY) for _ in range(prompt))
    rows = []
    for number in range(GROUP):
        ids = (*shared, *(draw.randrange(2, VOCABULARY) for _ in range(own)))
        trained = (*(False,) * prompt, *(True,) * own)
        logprobs, versions = tuple(-6.2 * on for on in trained), tuple(0 if on else -1 for on in trained)
        rows.append(Sample(f"e{number}", ids, trained, logprobs, versions, 1.0))
    return rows


def by_row(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, spans: Any = None, **_: Any
) -> tuple[Tensor, None]:
    lengths = [span.stop - span.start for span in spans] if spans else [query.shape[2]]  # without spans: one row
    rows = zip(*(torch.split(tensor, lengths, 2) for tensor in (query, key, value)), strict=True)
    parts = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in rows]
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def end_to_end(samples: list[Sample], micro_tokens: int) -> Iterator[MicroBatch]:
    """Micro-batches of as many consecutive rows as fit, without shared prefixes."""
    part: list[Sample] = []
    for sample in [*samples, None]:
        if part and (sample is None or sum(len(row.ids) for row in (*part, sample)) > micro_tokens):
            yield join_batches([pack_samples([row]) for row in part])
            part = []
        part += [sample] if sample else []


def join_batches(parts: list[MicroBatch]) -> MicroBatch:
    from dataclasses import replace

    starts = [sum(len(part.ids_T) for part in parts[:n]) for n in range(len(parts))]
    return replace(
        parts[0],
        ids_T=torch.cat([part.ids_T for part in parts]),
        positions_T=torch.cat([part.positions_T for part in parts]),
        spans=tuple(
            part.spans[0]._replace(start=start, stop=start + len(part.ids_T))
            for start, part in zip(starts, parts, strict=True)
        ),
        at_N=torch.cat([part.at_N + start for start, part in zip(starts, parts, strict=True)]),
        target_N=torch.cat([part.target_N for part in parts]),
    )


def rows_contestant(policy: Policy, samples: list[Sample], micro_tokens: int) -> float:
    AttentionInterface.register("coderepairrl_tree", by_row)
    return sum(run_pass(policy, batch) for batch in end_to_end(samples, micro_tokens))


def tree_contestant(policy: Policy, samples: list[Sample], micro_tokens: int) -> float:
    parts = cut_rows([sample.ids for sample in samples], micro_tokens, tree_tokens=CHUNKED_TREE_FACTOR * micro_tokens)
    return sum(run_pass(policy, pack_samples([samples[at] for at in part], micro_tokens)) for part in parts)


def run_pass(policy: Policy, batch: MicroBatch) -> float:
    total = policy.logprobs(batch, 1.0).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return total.item()


def measured(run: Callable[[], float], parameters: list[torch.nn.Parameter]) -> tuple[float, float, float, float]:
    """Run in a forked process: CPU seconds, MB, the sum of logprobs and the norm of the gradient."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        seconds, growth, total, norm = map(float, text.split())
        return seconds, growth, total, norm
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = None
        start = time.process_time()
        total = run()
        seconds = time.process_time() - start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    norm = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).norm().item()
    os.write(writing, f"{seconds} {growth} {total} {norm}".encode())
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-tokens", type=int, default=8192, help="of a pass")
    parser.add_argument("--cases", nargs="*", default=[*CASES, "mixed"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    contestants = {"rows": rows_contestant, "tree": tree_contestant}
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy.load(build_model(Path(folder)))
        parameters = list(policy.parameters.values())
        print("| group of 8 | distinct / row tokens |", *(f"{name}, s / MB |" for name in contestants), "rows / tree |")
        for case in options.cases:
            mixed = case == "mixed"
            samples = [sample for _, sample in build_rows(24)] if mixed else group(*map(int, case.split("+")))
            seconds: dict[str, list[float]] = {name: [] for name in contestants}
            growth: dict[str, list[float]] = {name: [] for name in contestants}
            checks = []
            for _ in range(options.rounds):
                for name, run in contestants.items():
                    one, most, *rest = measured(
                        partial(run, policy, samples, options.micro_tokens),
                        parameters,
                    )
                    seconds[name].append(one)
                    growth[name].append(most)
                    checks.append(rest)
            assert all(abs(a - b) < 1e-4 * abs(b) for rest in checks for a, b in zip(rest, checks[0], strict=True)), (
                checks
            )
            ids = [sample.ids for sample in samples]
            share = count_distinct_tokens(ids) / sum(map(len, ids))
            cells = (f"{statistics.median(seconds[n]):.2f} / {max(growth[n]):.0f} |" for n in contestants)
            print(f"| {case} | {share:.2f} |", *cells, f"{ratio(seconds['rows'], seconds['tree'])} |", flush=True)
    print(f"{options.rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
