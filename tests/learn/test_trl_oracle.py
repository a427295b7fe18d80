"""Loss and gradient equal those of TRL's GRPOTrainer on the same rows, to 1e-5.

`compute_loss` is TRL's own, called on constructed inputs. One row per episode: there the two normalise alike. TRL
pads prompts left and completions right and masks tool tokens; ours are the same rows without the padding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gradient import check_gradient, gradient_of_step
from scoring import perturb, score_row
from torch.nn.utils.rnn import pad_sequence

from coderepairrl.learn import losses
from coderepairrl.learn.pack import count_trained_tokens
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Sample

MAX_COMPLETION = 40
PROMPTS, COMPLETIONS = (3, 9, 6, 4), (12, 30, 7, 21)


@pytest.fixture(scope="module")
def rows():
    """Rows of mixed lengths with holes in their masks, and old logprobs far enough off to be clipped both ways."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(0, 256, (max(PROMPTS),), generator=generator).tolist()  # which begin alike
    samples = []
    for number, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        n = prompt + completion
        ids = prompts[:prompt] + torch.randint(0, 256, (completion,), generator=generator).tolist()
        tool = (torch.rand(n, generator=generator) < 0.3).tolist()
        trained = (*(i >= prompt and not tool[i] for i in range(n - 1)), True)
        old = (-5.6 + 0.4 * torch.randn(n, generator=generator)).tolist()
        logprobs = tuple(value if on else 0.0 for value, on in zip(old, trained, strict=True))
        versions = tuple(0 if on else -1 for on in trained)
        advantage = (1.1, -0.7, 0.4, -1.3)[number]
        samples.append(Sample(f"e{number}", tuple(ids), trained, logprobs, versions, advantage))
    return samples


def trl_inputs(samples):
    def column(values, dtype=torch.float32, *, left=False):
        parts = [torch.tensor(value, dtype=dtype) for value in values]
        return pad_sequence(parts, batch_first=True, padding_side="left" if left else "right")

    pairs = list(zip(samples, PROMPTS, strict=True))
    return {
        "prompt_ids": column([s.ids[:p] for s, p in pairs], torch.long, left=True),
        "prompt_mask": column([[1] * p for p in PROMPTS], torch.long, left=True),
        "completion_ids": column([s.ids[p:] for s, p in pairs], torch.long),
        "completion_mask": column([[1] * n for n in COMPLETIONS], torch.long),
        "tool_mask": column([s.trained[p:] for s, p in pairs], torch.long),
        "old_per_token_logps": column([s.logprobs[p:] for s, p in pairs]),
        "advantages": torch.tensor([s.advantage for s in samples]),
        "num_items_in_batch": torch.tensor(count_trained_tokens(samples)),
    }


def trl_config(tmp_path, config=None, **options):
    """Options that all comparisons share."""
    from trl import GRPOConfig

    return (config or GRPOConfig)(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        num_generations=4,
        max_completion_length=MAX_COMPLETION,
        disable_tqdm=True,
        **options,
    )


def trl_loss_and_gradient(folder, samples, ref_logps, tmp_path, correction=None, **options):
    """Loss and gradient by TRL's own `compute_loss`; with a `correction`, it computes old logprobs itself."""
    args = trl_config(
        tmp_path,
        per_device_train_batch_size=4,
        use_bias_correction_kl=False,  # the plain k3
        **options,
    )
    trainer = trl_trainer(folder, args)
    inputs = trl_inputs(samples)
    if ref_logps is not None:
        inputs["ref_per_token_logps"] = ref_logps
    if correction is not None:
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        inputs["importance_sampling_ratio"] = correction
        del inputs["old_per_token_logps"]
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}


def trl_trainer(folder, args, trainer=None, **more):
    """TRL's trainer, ready to compute a loss."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    trl = (trainer or GRPOTrainer)(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **more,
    )
    trl.model.float().train()
    trl.current_gradient_accumulation_steps = 1
    return trl


def check_against_trl(folder, rows, case, tmp_path, monkeypatch, *, trained=None, ratios=None, **counts):
    """Compare a step on `rows`, or those `trained`, with TRL's, with `ratios` to the engine; return its metrics."""
    settings, options = case
    trainer, ref_logps = Trainer(folder, settings), None
    if settings.beta:
        trainer.reference, ref_logps = perturbed_reference(folder, rows, settings.temperature)
    theirs, their_gradient = trl_loss_and_gradient(folder, rows, ref_logps, tmp_path, ratios, **options)
    ours, our_gradient = gradient_of_step(trainer, trained or rows, monkeypatch, **counts)
    compare(ours["loss"], our_gradient, theirs, their_gradient)
    return ours


SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}


def case(algorithm, theirs, **ours):
    """Our settings of `algorithm`, and TRL's options: `theirs`, and those that both call the same."""
    length = MAX_COMPLETION if algorithm == "dr_grpo" else None
    shared = {name: ours[name] for name in ("beta", "temperature", "delta") if name in ours}
    options = {"loss_type": algorithm, "importance_sampling_level": "token"} | theirs | shared
    return LearnSettings(algorithm=algorithm, max_completion_tokens=length, **ours), options


CASES = {
    "grpo": case("grpo", {"epsilon": 0.2}),
    "grpo asymmetric, KL": case("grpo", {"epsilon": 0.1, "epsilon_high": 0.3}, eps_low=0.1, eps_high=0.3, beta=0.04),
    "grpo, temperature": case("grpo", {"epsilon": 0.2}, temperature=0.7),
    "dr_grpo": case("dr_grpo", {"epsilon": 0.2}),
    "gspo": case("gspo", {**SEQUENCE, "epsilon": 0.05}, eps_low=0.05, eps_high=0.05),
    "gspo of the thesis": case("gspo", {**SEQUENCE, "epsilon": 2e-5, "epsilon_high": 4e-4}),
    "gspo asymmetric, KL": case(
        "gspo", {**SEQUENCE, "epsilon": 0.03, "epsilon_high": 0.06}, eps_low=0.03, eps_high=0.06, beta=0.02
    ),
    "dapo, KL": case("dapo", {"epsilon": 0.2, "epsilon_high": 0.28}, beta=0.04),
    "dapo": case("dapo", {"epsilon": 0.2, "epsilon_high": 0.28}),
    "bnpo": case("bnpo", {"epsilon": 0.2}),
    "ppo": case("ppo", {"epsilon": 0.2, "loss_type": "bnpo"}),
    "cispo": case("cispo", {"epsilon_high": 1.2}, eps_high=0.2, beta=0.04),
    "entropy": case("grpo", {"epsilon": 0.2, "entropy_coef": 0.3}, entropy=0.3),
    "two bounds above": case("grpo", {"epsilon": 0.2}, delta=1.3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradient_equal_trls(case, rows, miniature, tmp_path, monkeypatch):
    metrics = check_against_trl(miniature, rows, CASES[case], tmp_path, monkeypatch)
    assert 0 < metrics["clip_low"] + metrics["clip_high"] < 1  # the clip acts, but not everywhere


@pytest.mark.parametrize("case", ["grpo asymmetric, KL", "dr_grpo", "gspo", "dapo", "bnpo"])
@pytest.mark.filterwarnings("ignore")
def test_flat_groups_count_as_trls_rows_of_advantage_zero_do(case, rows, miniature, tmp_path, monkeypatch):
    """TRL trains them with advantage 0; without a KL term we leave their rows out, but count episodes and tokens."""
    counts = {"episodes": len(rows), "tokens": count_trained_tokens(rows)}
    rows = [row if number in (0, 3) else replace(row, advantage=0.0) for number, row in enumerate(rows)]
    trained = rows if CASES[case][0].beta else [row for row in rows if row.advantage]
    check_against_trl(miniature, rows, CASES[case], tmp_path, monkeypatch, trained=trained, **counts)


@pytest.mark.parametrize("case", ["grpo asymmetric, KL", "dr_grpo", "gspo"])
@pytest.mark.filterwarnings("ignore")
def test_the_correction_weights_as_trls_does(case, rows, miniature, tmp_path, monkeypatch):
    """TRL's loss with ratios of learner to engine, ``min(exp(old - recorded), cap)`` a token as its
    ``token_truncate``."""
    settings, options = CASES[case]
    settings = settings.with_changes(old_logprobs="recomputed", mismatch_correction="token")
    monkeypatch.setattr(losses, "CORRECTION_CAP", 1.1)
    ratios, cut = ratios_to_the_engine(miniature, rows, 1.1, settings.temperature)
    metrics = check_against_trl(miniature, rows, (settings, options), tmp_path, monkeypatch, ratios=ratios)
    assert metrics["mismatch_cut"] == pytest.approx(cut) and 0 < cut < 1
    assert metrics["mismatch_weight"] == pytest.approx(ratios.sum().item() / count_trained_tokens(rows), rel=1e-5)
    assert metrics["ratio_max"] == 1.0


def ratios_to_the_engine(folder, samples, cap, temperature):
    """Ratios of learner to engine in TRL's layout, and the share of tokens that the cap cuts."""
    scored = Trainer(folder, LearnSettings()).logprobs([row.ids for row in samples], temperature)
    ratios, cut = torch.zeros(len(samples), max(COMPLETIONS)), []
    for i, (row, prompt, logprobs) in enumerate(zip(samples, PROMPTS, scored, strict=True)):
        for at in (at for at, on in enumerate(row.trained) if on):
            ratio = math.exp(logprobs[at - 1] - row.logprobs[at])
            ratios[i, at - prompt] = min(ratio, cap)
            cut.append(ratio > cap)
    return ratios, sum(cut) / len(cut)


def compare(ours, our_gradient, theirs, their_gradient, tolerance=1e-5):
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert abs(theirs) > 1e-4
    check_gradient(our_gradient, their_gradient, tolerance)


def perturbed_reference(folder, samples, temperature):
    """A reference that differs from the policy, and its logprobs in TRL's layout."""
    reference = Policy.load(folder)
    perturb(reference.model)
    with torch.no_grad():
        scored = [score_row(reference.model, sample.ids, temperature) for sample in samples]
    completions = [logps[prompt - 1 :] for logps, prompt in zip(scored, PROMPTS, strict=True)]
    return reference, pad_sequence(completions, batch_first=True)


@pytest.mark.filterwarnings("ignore")
def test_rloo_is_trls(rows, miniature, tmp_path, monkeypatch):
    """Its `RLOOTrainer` has one ratio of a whole completion, and knows no tokens between that are not trained."""
    from trl import RLOOConfig, RLOOTrainer

    rows = [
        replace(row, trained=tuple(at >= prompt for at in range(len(row.ids))), versions=(0,) * len(row.ids))
        for row, prompt in zip(rows, PROMPTS, strict=True)
    ]
    scored = Trainer(miniature, LearnSettings()).logprobs([row.ids for row in rows], 1.0)
    rows = [  # so that the ratios of whole rows are about 1.4, 0.7, 0.9 and 1.4: two are clipped
        replace(row, logprobs=tuple(p + d if on else 0.0 for p, on in zip([0.0, *logprobs], row.trained, strict=True)))
        for row, logprobs, d in zip(rows, scored, (-0.03, 0.01, 0.02, -0.015), strict=True)
    ]
    settings = LearnSettings(algorithm="rloo", eps_low=0.2, eps_high=0.2)
    config = trl_config(tmp_path, RLOOConfig, per_device_train_batch_size=4, epsilon=0.2, beta=0.0)
    trainer = trl_trainer(miniature, config, RLOOTrainer)
    inputs = trl_inputs(rows)
    inputs["old_logps"] = inputs.pop("old_per_token_logps").sum(1)
    theirs = trainer.compute_loss(trainer.model, inputs)
    theirs.backward()
    ours, our_gradient = gradient_of_step(Trainer(miniature, settings), rows, monkeypatch)
    assert ours["clip_low"] + ours["clip_high"] == 0.5
    gradient = {name: p.grad for name, p in trainer.model.named_parameters()}
    # TRL subtracts the sums of a row's logprobs, of 170 nats, which rounds; gradients are up to 2.5
    compare(ours["loss"], our_gradient, theirs.item(), gradient, tolerance=2.5 * 2e-5)
