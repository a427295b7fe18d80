"""The learner's step against a bare forward and backward, and against TRL, on the same rows in one run.

    python benchmarks/learner.py [--rounds 15]

A randomly initialised Qwen3 of 1.0 M parameters and 24 rows (prompt, then a completion of which two thirds are
trained), one torch thread, fp32. First all contestants with rows of mixed lengths, then some with rows of their mean
length: the same number of tokens, and no padding. The contestants take turns; CPU seconds are printed, which on one
thread are close to wall-clock seconds of an idle machine: medians, and ratios within a round with their range.

- ``step``: our GSPO step: packing, forward, loss, backward, clipping, AdamW, metrics.
- ``step, checkpointing`` and ``step, LoRA``: the same with gradient checkpointing, and on adapters of rank 32 alone.
- ``bare``: transformers' forward with logits for all tokens, cross-entropy and backward over the same packed
  tokens with the same attention: no optimiser, no clipping, nothing logged.
- ``bare, trained logits``: the same, with logits only where a trained token is predicted, as our step has it.
- ``padded``: forward and backward of the rows padded to the longest, with transformers' own SDPA attention.
- ``TRL``: GRPOTrainer's compute_loss on the same rows, backward, clipping and AdamW: the same model, precision, tokens,
  masks, recorded logprobs and advantages, GSPO without a KL term, no generation. Unlike ours, TRL pads rows and
  computes logits and their entropy (a metric) for all completion tokens, trained or not.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from coderepairrl.config.schema import Lora  # noqa: E402
from coderepairrl.learn import LearnSettings  # noqa: E402
from coderepairrl.learn.learner import init_random  # noqa: E402
from coderepairrl.learn.pack import pack_samples  # noqa: E402
from coderepairrl.learn.policy import Policy  # noqa: E402
from coderepairrl.learn.trainer import Trainer  # noqa: E402
from coderepairrl.types import Sample  # noqa: E402

hf_logging.disable_progress_bar()
Contestant = Callable[[], object]
VOCABULARY = 512


def build_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models

    words = {f"<{i}>": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<1>", pad_token="<0>").save_pretrained(folder)
    Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    ).save_pretrained(folder)
    init_random(folder, folder / "model", seed=0)
    return folder / "model"


def build_rows(count: int, length: tuple[int, int] | None = None, seed: int = 0) -> list[tuple[int, Sample]]:
    """Pairs of prompt length and row: log-normal lengths, as episodes have them, or all of `length` (prompt,
    completion)."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        prompt, completion = length or (40 + draw.randrange(40), min(1000, round(draw.lognormvariate(5, 0.8))))
        n = prompt + completion
        trained = (*tuple(i >= prompt and i // 20 % 3 > 0 for i in range(n - 1)), True)
        ids = tuple(draw.randrange(2, VOCABULARY) for _ in range(n))
        logprobs = tuple(-6.2 if on else 0.0 for on in trained)
        versions = tuple(0 if on else -1 for on in trained)
        rows.append((prompt, Sample(f"e{number}", ids, trained, logprobs, versions, draw.choice([-1.0, 1.0]))))
    return rows


def bare_contestant(model: Path, samples: list[Sample], *, everywhere: bool) -> Contestant:
    policy = Policy.load(model)
    batch = pack_samples(samples)

    def run() -> None:
        out = policy.model(
            input_ids=batch.ids_T[None],
            position_ids=batch.positions_T[None],
            spans=batch.spans,
            logits_to_keep=0 if everywhere else batch.at_N,
        )
        target = batch.ids_T.roll(-1) if everywhere else batch.target_N
        cross_entropy(out.logits[0], target).backward()
        policy.model.zero_grad()

    return run


def padded_contestant(model: Path, samples: list[Sample]) -> Contestant:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    ids = pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True)
    mask = pad_sequence([torch.ones(len(sample.ids)) for sample in samples], batch_first=True)

    def run() -> None:
        logits = network(input_ids=ids, attention_mask=mask).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        network.zero_grad()

    return run


def trl_contestant(model: Path, rows: list[tuple[int, Sample]], folder: Path) -> Contestant:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=len(rows),
        num_generations=len(rows),
        loss_type="grpo",
        importance_sampling_level="sequence",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["x"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )
    network = trainer.model.float().train()
    trainer.current_gradient_accumulation_steps = 1
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def column(values: list[Any], *, left: bool = False) -> torch.Tensor:
        side = "left" if left else "right"
        return pad_sequence([torch.tensor(value) for value in values], batch_first=True, padding_side=side)

    inputs = {
        "prompt_ids": column([s.ids[:p] for p, s in rows], left=True),
        "prompt_mask": column([[1] * p for p, _ in rows], left=True),
        "completion_ids": column([s.ids[p:] for p, s in rows]),
        "completion_mask": column([[1] * (len(s.ids) - p) for p, s in rows]),
        "tool_mask": column([[int(on) for on in s.trained[p:]] for p, s in rows]),
        "old_per_token_logps": column([s.logprobs[p:] for p, s in rows]),
        "advantages": torch.tensor([s.advantage for _, s in rows]),
    }

    def run() -> None:
        trainer.compute_loss(network, inputs).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mixed = build_rows(options.rows)
    lengths = [(prompt, len(sample.ids) - prompt) for prompt, sample in mixed]
    prompt, completion = (round(statistics.fmean(part)) for part in zip(*lengths, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder))
        for rows in (mixed, build_rows(options.rows, (prompt, completion))):
            samples = [sample for _, sample in rows]
            total, longest = sum(len(s.ids) for s in samples), max(len(s.ids) for s in samples)
            trained = sum(sum(s.trained) for s in samples)
            title = "mixed lengths" if rows is mixed else "one length"
            print(f"\n{title}: {len(rows)} rows, {total} tokens, {trained} trained")
            print(f"padding factor: packed 1.00, padded {len(rows) * longest / total:.2f}")
            contestants = contestants_for(model, rows, Path(folder), every=rows is mixed)
            report(take_turns(contestants, options.rounds), total)
    print(f"\n{options.rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def contestants_for(model: Path, rows: list[tuple[int, Sample]], folder: Path, *, every: bool) -> dict[str, Contestant]:
    """The contestants: all if `every`, else those for rows of one length."""
    samples = [sample for _, sample in rows]
    trainer = Trainer(model, LearnSettings(algorithm="gspo", eps_low=0.2, eps_high=0.2, micro_tokens=1 << 20))
    contestants: dict[str, Contestant] = {"step": lambda: trainer.step(samples)}
    if every:
        settings = trainer.settings
        small = Trainer(model, settings.with_changes(micro_tokens=1024))
        again = Trainer(model, settings.with_changes(gradient_checkpointing=True))
        lora = Trainer(model, settings.with_changes(lora=Lora()))
        contestants |= {
            "step, micro_tokens=1024": lambda: small.step(samples),
            "step, checkpointing": lambda: again.step(samples),
            "step, LoRA": lambda: lora.step(samples),
            "bare, trained logits": bare_contestant(model, samples, everywhere=False),
        }
    return contestants | {
        "bare": bare_contestant(model, samples, everywhere=True),
        "padded": padded_contestant(model, samples),
        "TRL": trl_contestant(model, rows, folder),
    }


def take_turns(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contestant, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 2):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            if round_ >= 2:  # the first two warm up
                seconds[name].append(time.process_time() - start)
    return seconds


def report(seconds: dict[str, list[float]], total: int) -> None:
    """Print a line for each contestant, and ratios of step and TRL."""
    for name, times in seconds.items():
        median, of_bare = statistics.median(times), ratio(times, seconds["bare"])
        print(f"{name:24} {median * 1e3:8.1f} ms   {of_bare} x bare   {total / median:6.0f} tokens/s")
    if alike := seconds.get("bare, trained logits"):
        print(f"step / bare, trained logits: {ratio(seconds['step'], alike)} (target: at most 1.10)")
    print(f"TRL / step: {ratio(seconds['TRL'], seconds['step'])}")


def ratio(ours: list[float], theirs: list[float]) -> str:
    of = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{statistics.median(of):.2f} ({of[0]:.2f} to {of[-1]:.2f})"


if __name__ == "__main__":
    main()
