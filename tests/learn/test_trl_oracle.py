"""Loss and gradient equal those of TRL's GRPOTrainer on the same rows, to 1e-5.

`compute_loss` is TRL's own, called on constructed inputs. One row per episode: there the two normalise alike. TRL
pads prompts left and completions right and masks tool tokens; ours are the same rows without the padding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from coderepairrl.learn.settings import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Sample

MAX_COMPLETION = 40
PROMPTS, COMPLETIONS = (3, 9, 6, 4), (12, 30, 7, 21)


@pytest.fixture(scope="module")
def rows():
    """Rows of mixed lengths with holes in their masks, and old logprobs far enough off to be clipped both ways."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for number, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        n = prompt + completion
        ids = torch.randint(0, 256, (n,), generator=generator).tolist()
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
    }


def trl_loss_and_gradient(folder, samples, ref_logps, tmp_path, **options):
    """TRL's own `compute_loss` on constructed inputs, then backward."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=MAX_COMPLETION,
        use_bias_correction_kl=False,  # the plain k3 of REQUIREMENTS T9
        disable_tqdm=True,
        **options,
    )
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["x"]}),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    trainer.model.float().train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trl_inputs(samples)
    if ref_logps is not None:
        inputs["ref_per_token_logps"] = ref_logps
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in trainer.model.named_parameters()}


def our_loss_and_gradient(folder, samples, settings, monkeypatch, reference, episodes=None):
    """One step of the real trainer, its gradient taken where the optimiser would use it."""
    trainer = Trainer(folder, settings)
    if trainer.reference is not None:
        trainer.reference = reference
    seen = {}

    def keep(parameters, *_, **__):
        seen.update({name: p.grad.clone() for name, p in trainer.policy.model.named_parameters()})
        return torch.tensor(0.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", keep)
    return trainer.step(samples, episodes), seen


TOKEN = {"importance_sampling_level": "token"}
CASES = {
    "grpo": (LearnSettings("grpo"), {"loss_type": "grpo", "epsilon": 0.2, **TOKEN}),
    "grpo asymmetric, KL": (
        LearnSettings("grpo", eps_low=0.1, eps_high=0.3, beta=0.04),
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.04, **TOKEN},
    ),
    "grpo, temperature": (
        LearnSettings("grpo", temperature=0.7),
        {"loss_type": "grpo", "epsilon": 0.2, "temperature": 0.7, **TOKEN},
    ),
    "dr_grpo": (
        LearnSettings("dr_grpo", max_completion_tokens=MAX_COMPLETION),
        {"loss_type": "dr_grpo", "epsilon": 0.2, **TOKEN},
    ),
    "dr_grpo asymmetric, KL": (
        LearnSettings("dr_grpo", max_completion_tokens=MAX_COMPLETION, eps_low=0.2, eps_high=0.28, beta=0.02),
        {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.02, **TOKEN},
    ),
    "gspo": (
        LearnSettings("gspo", eps_low=0.05, eps_high=0.05),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    ),
    "gspo of the thesis": (
        LearnSettings("gspo"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 2e-5, "epsilon_high": 4e-4},
    ),
    "gspo asymmetric, KL": (
        LearnSettings("gspo", eps_low=0.03, eps_high=0.06, beta=0.02),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.03,
            "epsilon_high": 0.06,
            "beta": 0.02,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_loss_and_gradient_equal_trls(case, rows, miniature, tmp_path, monkeypatch):
    settings, options = CASES[case]
    reference = ref_logps = None
    if settings.beta:
        reference, ref_logps = perturbed_reference(miniature, rows, settings.temperature)
    theirs, their_gradient = trl_loss_and_gradient(miniature, rows, ref_logps, tmp_path, **options)
    ours, our_gradient = our_loss_and_gradient(miniature, rows, settings, monkeypatch, reference)
    assert 0 < ours["clip_low"] + ours["clip_high"] < 1  # the clip acts, but not everywhere
    compare(ours["loss"], our_gradient, theirs, their_gradient)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_flat_groups_count_as_trls_rows_of_advantage_zero_do(case, rows, miniature, tmp_path, monkeypatch):
    """TRL trains them at advantage 0. Without a KL term we leave their rows out, and count their episodes."""
    settings, options = CASES[case]
    rows = [row if number in (0, 3) else replace(row, advantage=0.0) for number, row in enumerate(rows)]
    reference = ref_logps = None
    if settings.beta:
        reference, ref_logps = perturbed_reference(miniature, rows, settings.temperature)
    theirs, their_gradient = trl_loss_and_gradient(miniature, rows, ref_logps, tmp_path, **options)
    given = rows if settings.beta else [row for row in rows if row.advantage]
    ours, our_gradient = our_loss_and_gradient(miniature, given, settings, monkeypatch, reference, episodes=len(rows))
    compare(ours["loss"], our_gradient, theirs, their_gradient)


def compare(ours, our_gradient, theirs, their_gradient):
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert abs(theirs) > 1e-4
    assert our_gradient.keys() == their_gradient.keys()
    largest = max(gradient.abs().max().item() for gradient in their_gradient.values())
    assert largest > 1e-3  # there is a gradient to compare
    for name, gradient in their_gradient.items():
        assert (our_gradient[name] - gradient).abs().max().item() < 1e-5, name


def perturbed_reference(folder, samples, temperature):
    """A reference that differs from the policy, and its logprobs in TRL's layout."""
    from coderepairrl.learn.policy import Policy

    reference = Policy.load(folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in reference.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    width = max(COMPLETIONS)
    logps = torch.zeros(len(samples), width)
    with torch.no_grad():
        for i, (sample, prompt) in enumerate(zip(samples, PROMPTS, strict=True)):
            ids = torch.tensor([sample.ids])
            logits = reference.model(input_ids=ids).logits[0, :-1] / temperature
            all_logps = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            logps[i, : len(sample.ids) - prompt] = all_logps[prompt - 1 :]
    return reference, logps
