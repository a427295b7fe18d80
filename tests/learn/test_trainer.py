"""The optimiser step: accumulation, determinism, checkpoints, learning."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.losses import estimate_kl
from coderepairrl.learn.trainer import Trainer
from coderepairrl.runs.storage import write_checksums

LENGTHS = [30, 12, 45, 8, 21, 33]


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.policy.parameters.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def trainer(miniature):
    return Trainer(miniature, LearnSettings(algorithm="grpo", lr=1e-2))


@pytest.fixture
def saved(trainer, make_rows, tmp_path):
    """A trainer after its first step, whose checkpoint is ``tmp_path / "c"``."""
    trainer.step(make_rows(LENGTHS))
    trainer.save(tmp_path / "c")
    return trainer


KINDS = {
    "all weights": LearnSettings(algorithm="grpo", lr=1e-2, beta=0.1, warmup_updates=4, updates_per_batch=2),
    "adapters": LearnSettings(algorithm="grpo", lr=1e-2, beta=0.1, updates_per_batch=2, lora=Lora(rank=4, alpha=8)),
    "values": LearnSettings(algorithm="ppo", lr=1e-2, value_head=True, micro_tokens=90),
    "values beside adapters": LearnSettings(algorithm="ppo", lr=1e-2, value_head=True, lora=Lora(rank=4, alpha=8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_continues_bit_for_bit(kind, miniature, make_rows, tmp_path):
    settings = KINDS[kind]
    straight = Trainer(miniature, settings)
    straight.save(tmp_path / "2")  # an older checkpoint, which is replaced
    for seed in range(2):
        straight.step(make_rows(LENGTHS, seed))
    straight.save(tmp_path / "2")
    expected = [straight.step(make_rows(LENGTHS, seed)) for seed in range(2, 4)]
    assert all(metrics["kl"] > 0 for metrics in expected if settings.beta)

    resumed = Trainer(miniature, settings)
    resumed.step(make_rows(LENGTHS, 9))  # restoring must replace this state
    resumed.restore(tmp_path / "2")
    assert (resumed.version, resumed.updates) == (2, 2 * settings.updates)
    assert [resumed.step(make_rows(LENGTHS, seed)) for seed in range(2, 4)] == expected
    assert equal(weights(straight), weights(resumed))
    heads = [dict(trainer.policy.values) for trainer in (straight, resumed)]
    assert equal(*heads) and all(head.any() for head in heads[0].values())
    assert {entry.name for entry in tmp_path.iterdir()} == {"2"}  # no temporary folder is left
    if settings.lora:
        with pytest.raises(UsageError, match="a different model"):
            Trainer(miniature, settings.with_changes(lora=Lora(rank=2))).restore(tmp_path / "2")


def test_restoring_the_start_forgets_the_optimisers_moments(trainer, make_rows, tmp_path):
    trainer.save(tmp_path / "c")
    trainer.step(make_rows(LENGTHS))
    after = weights(trainer)
    trainer.restore(tmp_path / "c")
    assert trainer.version == 0
    trainer.step(make_rows(LENGTHS))
    assert equal(weights(trainer), after)


def test_a_checkpoint_is_a_hugging_face_model(saved, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights(saved).items())
    assert AutoTokenizer.from_pretrained(tmp_path / "c").eos_token == "<|im_end|>"
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}  # else vLLM loads the optimiser's state, too


def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_noticed(saved, tmp_path):
    before, files, chance = weights(saved), sorted((tmp_path / "c").iterdir()), random.Random(0)
    assert {"SHA256SUMS", "learner.json", "model.safetensors", "optimizer.safetensors"} <= {f.name for f in files}
    for file in files:
        whole = file.read_bytes()
        for at in (0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(20))):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(UsageError, match="not a whole checkpoint") as refused:
                saved.restore(tmp_path / "c")
            assert file.name in str(refused.value) or file.name == "SHA256SUMS"
        file.write_bytes(whole)
    assert equal(weights(saved), before)
    saved.restore(tmp_path / "c")


def test_restoring_another_model_or_schema_is_refused_and_changes_nothing(trainer, make_rows, tmp_path):
    trainer.save(tmp_path / "c")
    trainer.step(make_rows(LENGTHS))
    before = weights(trainer)
    safetensors.torch.save_file({"other": torch.zeros(2)}, tmp_path / "c" / "model.safetensors")
    write_checksums(tmp_path / "c")
    with pytest.raises(UsageError, match="a different model"):
        trainer.restore(tmp_path / "c")
    (tmp_path / "c" / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match="SHA256SUMS is missing"):
        trainer.restore(tmp_path / "c")
    (tmp_path / "c" / "learner.json").write_text('{"schema": 1, "version": 0, "updates": 0}')
    with pytest.raises(UsageError, match="schema 1; this version reads 2"):
        trainer.restore(tmp_path / "c")
    assert equal(weights(trainer), before) and trainer.version == 1


def test_a_failed_save_leaves_the_old_checkpoint(trainer, make_rows, tmp_path, monkeypatch):
    trainer.save(tmp_path / "c")
    old = (tmp_path / "c" / "model.safetensors").read_bytes()
    trainer.step(make_rows(LENGTHS))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        trainer.save(tmp_path / "c")
    with pytest.raises(OSError, match="No space"):
        trainer.publish(tmp_path / "published")
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "published"] == ["c"]
    assert not list((tmp_path / "published").iterdir())


def test_a_crash_between_two_renames_loses_no_checkpoint(saved, miniature, tmp_path):
    (tmp_path / "c").rename(tmp_path / ".c.old")  # the old one moved away, the new one not yet in its place
    fresh = Trainer(miniature, LearnSettings(algorithm="grpo"))
    fresh.restore(tmp_path / "c")
    assert equal(weights(fresh), weights(saved))
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_weight_decay_spares_norms_and_warmup_rises(miniature, make_rows):
    rows = [replace(row, advantage=0.0) for row in make_rows(LENGTHS)]
    trainer = Trainer(miniature, LearnSettings(algorithm="grpo", lr=0.1, weight_decay=0.5, warmup_updates=3))
    before = weights(trainer)
    rates = [trainer.step(rows)["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    factor = math.prod(1 - rate * 0.5 for rate in rates)
    for name, tensor in weights(trainer).items():  # no gradient, so decay is all that moved them
        expected = before[name] * (factor if tensor.ndim >= 2 else 1.0)
        assert torch.allclose(tensor, expected, atol=1e-7), name


def test_metrics_of_a_step(miniature, make_rows, on_policy):
    trainer = Trainer(miniature, LearnSettings(algorithm="grpo", lr=1e-3, micro_tokens=60))
    rows = on_policy(trainer, make_rows(LENGTHS))
    off = rows[0].trained.index(True)
    shifted = tuple(p + 0.25 * (i == off) for i, p in enumerate(rows[0].logprobs))
    metrics = trainer.step([replace(rows[0], logprobs=shifted), *rows[1:]])
    tokens = sum(sum(row.trained) for row in rows)
    assert metrics["mismatch_max"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["mismatch_mean"] == pytest.approx(0.25 / tokens, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert (metrics["tokens"], metrics["row_tokens"], metrics["rows"]) == (tokens, sum(LENGTHS), len(LENGTHS))
    assert metrics["entropy"] == pytest.approx(math.log(265), abs=0.3)  # nearly uniform
    stale = trainer.step(rows)
    assert stale["staleness_max"] == 1 and "mismatch_max" not in stale
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in stale.values())


def test_the_diagnostics_are_those_of_the_ratios(miniature, make_rows, on_policy):
    trainer = Trainer(miniature, LearnSettings(algorithm="grpo", micro_tokens=64))
    rows = on_policy(trainer, make_rows([40, 30, 50]))
    metrics = trainer.measure(rows)
    assert metrics["ess"] == pytest.approx(1.0) and metrics["behaviour_kl"] == pytest.approx(0.0, abs=1e-6)
    moved = [replace(row, logprobs=tuple(p - 0.1 * (i % 7) for i, p in enumerate(row.logprobs))) for row in rows]
    apart = [0.1 * (i % 7) for row in rows for i, on in enumerate(row.trained) if on]
    ratios = [math.exp(difference) for difference in apart]
    metrics = trainer.measure(
        [replace(row, versions=tuple(v - (at > 0) for v in row.versions)) for at, row in enumerate(moved)]
    )
    assert metrics["ess"] == pytest.approx(sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios), rel=1e-4)
    assert metrics["behaviour_ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert metrics["behaviour_ratio_min"] == pytest.approx(1.0, rel=1e-4)
    expected = sum(r - d - 1 for r, d in zip(ratios, apart, strict=True)) / len(ratios)
    assert metrics["behaviour_kl"] == pytest.approx(expected, rel=1e-3)
    older = sum(sum(row.trained) for row in rows[1:])
    assert metrics["staleness_mean"] == pytest.approx(older / len(ratios)) and metrics["staleness_max"] == 1


def test_old_logprobs_are_those_from_before_the_batch_in_every_minibatch(miniature, make_rows):
    """Ratios of the last part include all updates before it; its old logprobs include none."""
    rows = make_rows(LENGTHS)
    settings = LearnSettings(algorithm="grpo", lr=1e-2, old_logprobs="recomputed", minibatches=3, micro_tokens=40)
    trainer, whole = Trainer(miniature, settings), Trainer(miniature, settings.with_changes(minibatches=1))
    metrics, once = trainer.step(rows), whole.step(rows)
    assert (trainer.updates, trainer.version, whole.updates) == (3, 1, 1)
    assert metrics["ratio_max"] > 1.01 and once["ratio_max"] == 1.0
    assert metrics["entropy"] == pytest.approx(once["entropy"], abs=1e-6)  # of all parts, before the first update
    assert metrics["denominator"] == len(rows) and metrics["micro_batches"] >= 3


def test_minibatches_are_updates_on_disjoint_parts(miniature, make_rows):
    """With recorded old logprobs, a batch in parts is the same as its parts one after the other."""
    rows = make_rows(LENGTHS)
    rows[1] = replace(rows[1], episode_id="e0", advantage=rows[0].advantage, weight=0.3)  # a fork goes as one
    settings = LearnSettings(algorithm="grpo", lr=1e-2, minibatches=2)
    trainer, control = Trainer(miniature, settings), Trainer(miniature, settings.with_changes(minibatches=1))
    trainer.step(rows, 7)
    control.step([rows[0], rows[1], rows[3], rows[5]], 4)
    control.step([rows[2], rows[4]], 3)
    assert equal(weights(trainer), weights(control))
    few = Trainer(miniature, settings.with_changes(minibatches=4))
    few.step(rows[2:4], 8)
    assert few.updates == 2  # two parts have no row


def test_a_batch_without_a_finite_gradient_is_skipped(miniature, make_rows, tmp_path):
    """It changes neither weights nor optimiser, but counts as a batch, so that a replay of the log repeats it."""
    rows = make_rows(LENGTHS)
    trainer, control = (Trainer(miniature, LearnSettings(algorithm="grpo", lr=1e-2)) for _ in range(2))
    for each in (trainer, control):
        each.step(rows)
    before = weights(trainer)
    bad = [replace(rows[0], advantage=math.inf), *rows[1:]]
    metrics = trainer.step(bad)
    assert metrics["skipped"] == 1 and "non-finite" in metrics["skipped_reason"]
    assert not {"loss", "grad_norm", "lr"} & set(metrics) and metrics["rows"] == len(rows)
    json.dumps(metrics, allow_nan=False)
    assert equal(weights(trainer), before)
    assert (trainer.version, trainer.updates) == (2, 1)
    trainer.save(tmp_path / "c")
    assert trainer.step(bad) == metrics | {"staleness_max": 2, "staleness_mean": 2.0}  # the same again
    trainer.restore(tmp_path / "c")
    assert "skipped" not in trainer.step(rows)
    control.step(rows)
    assert equal(weights(trainer), weights(control))


@pytest.mark.parametrize("settings", [{}, {"algorithm": "gspo"}, {"beta": 0.1}])
def test_a_token_of_tiny_probability_does_not_skip_the_batch(settings, miniature, make_rows):
    """With logprobs 60 nats apart, a ratio is 1e26, and the square of its gradient infinite."""
    rows = make_rows(LENGTHS)
    far = tuple(-70.0 if on else 0.0 for on in rows[0].trained)
    rows[0] = replace(rows[0], logprobs=far, advantage=-1.0)
    trainer = Trainer(miniature, LearnSettings(**{"algorithm": "grpo", "lr": 1e-2} | settings))
    before = weights(trainer)
    metrics = trainer.step(rows)
    assert "skipped" not in metrics and not equal(weights(trainer), before)
    assert metrics["log_ratio_limited"] == (1 if settings.get("algorithm") == "gspo" else sum(rows[0].trained))
    assert metrics["ratio_max"] == pytest.approx(math.exp(20))


def test_an_estimate_of_kl_far_apart_has_a_finite_gradient():
    logp = torch.tensor([-60.0, -1.0]).requires_grad_()
    estimate_kl(logp, torch.tensor([0.0, -1.5])).sum().backward()
    assert logp.grad[0] == 0 and logp.grad[1] == pytest.approx(1 - math.exp(-0.5))


def test_a_non_finite_gradient_keeps_earlier_updates_of_its_batch(miniature, make_rows, monkeypatch):
    rows = make_rows(LENGTHS)
    settings = LearnSettings(algorithm="grpo", lr=1e-2, updates_per_batch=3)
    trainer, control = Trainer(miniature, settings), Trainer(miniature, settings.with_changes(updates_per_batch=1))
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def second_is_nan(*arguments, **options):
        calls.append(clip(*arguments, **options))
        return calls[-1] * (math.nan if len(calls) == 2 else 1.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", second_is_nan)
    metrics = trainer.step(rows)
    assert metrics["skipped"] == 2 and metrics["grad_norm"] == calls[0].item()
    assert (trainer.version, trainer.updates) == (1, 1)
    calls.clear()
    assert control.step(rows)["loss"] == metrics["loss"]
    assert equal(weights(trainer), weights(control))
