"""What reinforcement learning can do for the tiny policy, in simulated episodes: a quick search for settings.

``python benchmarks/hello_gspo.py --model DIR --lr 2e-4 --steps 60``. One thread; tools simulated, rewards real
(`patch_lines`; tests judged in forked processes). It takes the gradient of GSPO at one update per batch, where all
ratios are 1. Numbers of this script are a guide for the shipped config and are published nowhere.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import torch

from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.rewards.lines import similarity
from coderepairrl.rewards.parse import parse
from coderepairrl.tasks.mutants.corpus_tasks import exercise, mutants
from coderepairrl.tasks.mutants.judge import judge
from coderepairrl.tasks.mutants.slices import functions
from coderepairrl.tasks.mutants.source import unified
from coderepairrl.tokens import load
from workshop.tiny.simulate import Attempt, Simulation
from workshop.tiny.warmstart import held_out, save_weights


def scores(attempts: Sequence[Attempt], alpha: float) -> list[dict[str, float]]:
    """``patch_lines``, tests and their mixture for each episode."""
    by_name = {(f.module, f.name): f for f in functions()}
    jobs = []
    for attempt in attempts:
        module = attempt.exercise.mutant.function.module
        names = [line[4:].split("(")[0] for line in attempt.exercise.fixed.splitlines() if line.startswith("def ")]
        checks = [(c.call, c.want) for name in names for c in by_name[module, name].checks]
        jobs.append((attempt.content, checks))
    found = []
    for attempt, verdict in zip(attempts, judge(jobs), strict=True):
        path, broken = attempt.exercise.path, attempt.exercise.files[attempt.exercise.path]
        lines = 0.0
        if not attempt.empty:
            oracle = parse(unified(path, broken, attempt.exercise.fixed))
            lines = similarity(oracle, parse(unified(path, broken, attempt.content)), "python")
        tests = float(verdict is None)
        found.append({"lines": lines, "tests": tests, "reward": alpha * lines + (1 - alpha) * tests})
    return found


def report(simulation: Simulation, weights: Weights, exercises: Sequence[Any], temperature: float) -> dict[str, float]:
    attempts = simulation.run(weights, exercises, temperature, torch.Generator().manual_seed(1))
    found = scores(attempts, 0.5)
    made = [not a.empty for a in attempts]
    return {
        "tests": fmean(s["tests"] for s in found),
        "lines": fmean(s["lines"] for s in found),
        "per_patch": sum(s["tests"] for s in found) / max(1, sum(made)),
        "empty": 1 - fmean(made),
        "limit": fmean(a.ended != "submitted" for a in attempts),
        "tokens": sum(len(a.ids) for a in attempts) / len(attempts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--quoted", type=float, default=0.7)
    parser.add_argument("--alpha", type=float, default=0.5, help="weight of patch_lines; the rest is tests")
    parser.add_argument("--clip", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    from transformers import Qwen3ForCausalLM

    policy: Any = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    codec = load(options.model)
    config = ModelConfig.read(options.model)
    simulation = Simulation(
        codec, TinyModel(config, slots=64, context=1024), calls=options.calls, turn_tokens=96, tokens=1024
    )
    optimiser = torch.optim.AdamW(policy.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    pool = [m for m in mutants() if m.split == "train"]
    tests = {
        (split, quoted): held_out(split, options.count, quoted=quoted)
        for split, quoted in (("test", True), ("test", False), ("unseen", True))
    }
    rng, generator = Random(options.seed), torch.Generator().manual_seed(options.seed)

    def weights() -> Weights:
        return Weights.build(config, {name: tensor.detach() for name, tensor in policy.state_dict().items()})

    def evaluate(step: int) -> None:
        for (split, quoted), exercises in tests.items():
            for temperature in (1.0, 0.0):
                found = report(simulation, weights(), exercises, temperature)
                row = {"step": step, "split": split, "quoted": quoted, "T": temperature}
                print(json.dumps(row | {k: round(v, 3) for k, v in found.items()}), flush=True)

    cpu = 0.0
    evaluate(0)
    for step in range(1, options.steps + 1):
        started = time.process_time()
        chosen = []
        while len(chosen) < options.tasks:
            made = exercise(rng.choice(pool), rng, rng.random() < options.quoted)
            if made is not None:
                chosen.append(made)
        attempts = simulation.run(weights(), [e for e in chosen for _ in range(options.group)], 1.0, generator)
        found = scores(attempts, options.alpha)
        generated = time.process_time() - started
        rows: list[tuple[Attempt, float]] = []
        for at in range(0, len(attempts), options.group):
            rewards = [s["reward"] for s in found[at : at + options.group]]
            mean, spread = fmean(rewards), pstdev(rewards)
            if spread > 1e-6:
                rows += [
                    (a, (r - mean) / (spread + 1e-4))
                    for a, r in zip(attempts[at : at + options.group], rewards, strict=True)
                ]
        rows.sort(key=lambda pair: len(pair[0].ids))
        for at in range(0, len(rows), 16):
            part = rows[at : at + 16]
            longest = max(len(a.ids) for a, _ in part)
            ids = torch.tensor([a.ids + [0] * (longest - len(a.ids)) for a, _ in part])
            said = torch.tensor([a.said + [False] * (longest - len(a.said)) for a, _ in part])[:, 1:]
            hidden = policy.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logprobs = torch.log_softmax(policy.lm_head(hidden[said]), -1).gather(1, ids[:, 1:][said].unsqueeze(1))
            share = torch.cat(
                [torch.full((int(n),), adv / int(n)) for (_, adv), n in zip(part, said.sum(1), strict=True)]
            )
            loss = -(logprobs.squeeze(1) * share).sum() / len(attempts)
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), options.clip))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        spent = time.process_time() - started
        cpu += spent
        line = {
            "step": step,
            "reward": fmean(s["reward"] for s in found),
            "tests": fmean(s["tests"] for s in found),
            "empty": fmean(a.empty for a in attempts),
            "limit": fmean(a.ended != "submitted" for a in attempts),
            "failed": sum(a.failed_calls for a in attempts) / max(1, sum(a.calls for a in attempts)),
            "tokens": fmean(len(a.ids) for a in attempts),
            "rows": len(rows),
            "norm": norm,
            "gen_s": generated,
            "s": spent,
            "cpu": cpu,
        }
        if step % 5 == 0:
            print(json.dumps({k: round(v, 3) for k, v in line.items()}), flush=True)
        if step % options.every == 0 or step == options.steps:
            evaluate(step)
    if options.out:
        save_weights(policy.state_dict(), options.out)


if __name__ == "__main__":
    main()
