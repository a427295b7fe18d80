"""``python -m workshop.tiny.warmstart``: how the shipped tiny policy was made, from random weights.

Supervised fine-tuning on scripted, imperfect demonstrations (`demonstrations`), generated as it goes, on one CPU
thread: Muon (Jordan et al., 2024) on the matrices, AdamW on embeddings and norms, in stages, each with a constant
learning rate that falls linearly to a tenth over its last fifth. First the policy learns to copy what it reads, from
exercises under ever new names; then it may learn the functions by heart, too; then to go on after replacing a line by
itself. Held-out pairs and unseen functions are never trained on. Every `--every` steps it measures exact repairs in
simulated episodes and saves a checkpoint; started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from coderepairrl.tasks.mutants.corpus_tasks import Exercise, Mutant, exercise, mutants
from coderepairrl.tokens import Codec, load
from workshop.tiny import tokenizer
from workshop.tiny.demonstrations import Habits, demonstrate, row
from workshop.tiny.disguise import disguise

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": tokenizer.CONTEXT,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
QUOTED_SHARE = 0.7
RATES = (0.02, 3e-3)
"""Learning rates of Muon and AdamW."""


class Stage(NamedTuple):
    """What changes in the course of the training."""

    steps: int
    disguised: float
    """Share of exercises told under other names."""
    rate: float
    """Factor on the learning rates."""
    unchanged: float = 0.0
    """`Habits.unchanged`."""


STAGES: Sequence[Stage] = (Stage(2500, 0.7, 1.0), Stage(2500, 0.25, 0.6), Stage(600, 0.25, 0.4, unchanged=0.35))
SHARPNESS = 1.5
"""Initial weight of the query and key norms: attention that can single out a token forms sooner."""
LIMITS = {"calls": 5, "turn_tokens": 96, "tokens": 1024}


def held_out(split: str, count: int, *, quoted: bool, seed: int = 0) -> list[Exercise]:
    """The first `count` exercises of a split, in an order given by `seed`."""
    rng = Random(f"{split}/{seed}")
    pool = [mutant for mutant in mutants() if mutant.split == split]
    rng.shuffle(pool)
    made = (exercise(mutant, Random(f"{mutant.key}/{seed}"), quoted) for mutant in pool)
    return [e for e in made if e is not None][:count]


class WarmStart:
    """The training run: model, optimisers, data stream, and how far it got."""

    def __init__(self, out: Path, *, stages: Sequence[Stage] = STAGES, batch: int = 8, seed: int = 0):
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        self.out, self.stages, self.batch, self.seed = out, stages, batch, seed
        tokenizer.save(out)
        vocabulary = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
        ids = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
        config = Qwen3Config(
            vocab_size=1 + max(ids.values()),
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
            bos_token_id=None,
            dtype="float32",
            architectures=["Qwen3ForCausalLM"],
            **ARCHITECTURE,
        )
        config.save_pretrained(out)
        self.codec: Codec = load(out)
        torch.manual_seed(seed)
        self.model: Any = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call]  # fp32
        for layer in self.model.model.layers:
            torch.nn.init.constant_(layer.self_attn.q_norm.weight, SHARPNESS)
            torch.nn.init.constant_(layer.self_attn.k_norm.weight, SHARPNESS)
        self.begin_stage()
        self.step = 0
        self.cpu_seconds = 0.0
        self.history: list[dict[str, float]] = []
        self.pool: list[Mutant] = [mutant for mutant in mutants() if mutant.split == "train"]

    def begin_stage(self) -> None:
        """Fresh optimisers: what an earlier stage remembers of its gradients is not carried over."""
        import torch

        from workshop.tiny.muon import Muon

        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimisers = [
            Muon(matrices, lr=RATES[0]),
            torch.optim.AdamW(others, lr=RATES[1], betas=(0.9, 0.99), weight_decay=0.0),
        ]

    def stage(self) -> tuple[int, Stage]:
        """The stage at hand and its first step."""
        first = 0
        for stage in self.stages:
            if first <= self.step < first + stage.steps:
                return first, stage
            first += stage.steps
        raise IndexError(f"step {self.step} of {first}")

    def rate(self) -> float:
        """Factor on the learning rates: warm-up, constant, linear decay to a tenth over the last fifth of a stage."""
        first, stage = self.stage()
        done, left = self.step - first, (first + stage.steps - self.step) / (0.2 * stage.steps)
        return stage.rate * min(1.0, (done + 1) / 30, 0.1 + 0.9 * left)

    def rows(self) -> list[tuple[list[int], list[bool]]]:
        """The demonstrations of one step, the same whenever that step is run."""
        rng, (_, stage) = Random(f"{self.seed}/{self.step}"), self.stage()
        rows: list[tuple[list[int], list[bool]]] = []
        while len(rows) < self.batch:
            made = exercise(rng.choice(self.pool), rng, rng.random() < QUOTED_SHARE)
            if made is not None:
                if rng.random() < stage.disguised:
                    made = disguise(made, rng)
                rows.append(row(self.codec, demonstrate(made, Habits(unchanged=stage.unchanged), rng)))
        return rows

    def train_step(self) -> float:
        """One update; returns the mean loss (nats) of the tokens that the expert says."""
        import torch
        from torch.nn.functional import cross_entropy

        if self.step and self.step == self.stage()[0]:
            self.begin_stage()
        rows = self.rows()
        total = sum(sum(said) for _, said in rows)
        loss_sum = 0.0
        rows.sort(key=lambda pair: len(pair[0]))
        half = len(rows) // 2
        for part in (rows[:half], rows[half:]):  # two lengths of padding instead of one
            ids_BT, said_BT = _padded(part)
            hidden_BTC = self.model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
            logits_NV = self.model.lm_head(hidden_BTC[said_BT[:, 1:]])
            loss = cross_entropy(logits_NV, ids_BT[:, 1:][said_BT[:, 1:]], reduction="sum") / total
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, rate in zip(self.optimisers, RATES, strict=True):
            optimiser.param_groups[0]["lr"] = rate * self.rate()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return loss_sum

    def measure(self, exercises: Sequence[Exercise], temperature: float) -> dict[str, float]:
        """Exact repairs and empty patches of simulated episodes."""
        return measure(self.codec, self.out, self.model.state_dict(), exercises, temperature)

    def save(self) -> None:
        """Weights for the world, and everything needed to go on."""
        import torch

        save_weights(self.model.state_dict(), self.out / "model.safetensors")
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "cpu_seconds": self.cpu_seconds,
            "history": self.history,
        }
        scratch = self.out / "training.tmp"
        torch.save(state, scratch)
        scratch.replace(self.out / "training.pt")
        (self.out / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in self.history))

    def resume(self, path: Path) -> None:
        """Go on from a saved state."""
        import torch

        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.cpu_seconds, self.history = state["step"], state["cpu_seconds"], state["history"]


def measure(
    codec: Codec, folder: Path, tensors: dict[str, Tensor], exercises: Sequence[Exercise], temperature: float
) -> dict[str, float]:
    """Rates of exact repairs, empty patches and limits over simulated episodes, and median tokens."""
    import torch

    from coderepairrl.engines.tiny.config import ModelConfig
    from coderepairrl.engines.tiny.model import TinyModel, Weights
    from workshop.tiny.simulate import Simulation

    config = ModelConfig.read(folder)
    weights = Weights.build(config, {name: tensor.detach() for name, tensor in tensors.items()})
    simulation = Simulation(codec, TinyModel(config, slots=32, context=LIMITS["tokens"]), **LIMITS)
    attempts = simulation.run(weights, exercises, temperature, torch.Generator().manual_seed(0))
    count = len(attempts)
    lengths = sorted(len(attempt.ids) for attempt in attempts)
    return {
        "exact": round(sum(a.exact for a in attempts) / count, 4),
        "empty": round(sum(a.empty for a in attempts) / count, 4),
        "limit": round(sum(a.ended != "submitted" for a in attempts) / count, 4),
        "tokens": lengths[count // 2],
    }


def measure_all(folder: Path) -> None:
    """Print what the policy in `folder` does in simulated episodes, sampled and greedy."""
    from safetensors.torch import load_file

    codec, tensors = load(folder), load_file(folder / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    for split, quoted in (("test", True), ("test", False), ("unseen", True), ("unseen", False)):
        exercises = held_out(split, 400, quoted=quoted)
        for temperature in (1.0, 0.0):
            row = {"split": split, "quoted": quoted, "temperature": temperature, "tasks": len(exercises)}
            print(json.dumps(row | measure(codec, folder, tensors, exercises, temperature)), flush=True)


def save_weights(tensors: dict[str, Tensor], path: Path) -> None:
    """Write fp16 safetensors, half the size; every fp16 value is an fp32 value. A tied head is stored once."""
    from safetensors.torch import save_file

    kept = {name: t.detach().half().contiguous().clone() for name, t in tensors.items() if name != "lm_head.weight"}
    save_file(kept, path, metadata={"format": "pt"})


def _padded(rows: Sequence[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows])
    said_BT = torch.tensor([[*said, *[False] * (longest - len(said))] for _, said in rows])
    return ids_BT, said_BT


def main() -> None:
    """Train, or go on training."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="model folder; training goes on if it holds one")
    parser.add_argument("--steps", type=int, default=sum(stage.steps for stage in STAGES))
    parser.add_argument("--every", type=int, default=250)
    parser.add_argument(
        "--measure", action="store_true", help="only measure the policy in --out, on all held-out tasks"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.measure:
        measure_all(options.out)
        return
    run = WarmStart(options.out)
    state = options.out / "training.pt"
    if state.exists():
        run.resume(state)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, step {run.step}", flush=True)
    tests = {
        f"{split}_{'quoted' if quoted else 'unquoted'}": held_out(split, count, quoted=quoted)
        for split, quoted, count in (("test", True, 128), ("test", False, 64), ("unseen", True, 64))
    }
    started, mean = time.process_time(), 0.0
    base = run.cpu_seconds
    while run.step < options.steps:
        loss = run.train_step()
        mean = loss if mean == 0.0 else 0.98 * mean + 0.02 * loss
        run.cpu_seconds = base + time.process_time() - started
        if run.step % 25 == 0:
            print(f"step {run.step} loss {mean:.4f} cpu {run.cpu_seconds:.0f} s", flush=True)
        if run.step % options.every == 0 or run.step == options.steps:
            entry: dict[str, float] = {"step": run.step, "loss": round(mean, 4), "cpu_s": round(run.cpu_seconds)}
            for name, exercises in tests.items():
                entry |= {f"{name}_{key}": value for key, value in run.measure(exercises, 1.0).items()}
            greedy = run.measure(tests["test_quoted"], 0.0)
            run.history.append(entry | {f"greedy_{key}": value for key, value in greedy.items()})
            print(json.dumps(run.history[-1]), flush=True)
            run.save()


if __name__ == "__main__":
    main()
