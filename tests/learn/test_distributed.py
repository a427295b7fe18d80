"""Several learner processes: the same as one, over gloo, as real processes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from dataclasses import replace
from importlib.util import find_spec

import psutil
import pytest
import safetensors.torch
import torch

from coderepairrl.config.schema import Lora
from coderepairrl.errors import LearnerFault, RunError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.trainer import Trainer
from learners import start_learner

BATCHES = [([30, 12, 45, 8, 21, 33], 0), ([30, 12, 45], 1), ([19], 2), ([70, 72, 74, 71], 5)]
"""Lengths and seeds; the third has too few rows for two processes, the last a prompt longer than a micro-batch."""
SETTINGS = LearnSettings(algorithm="grpo", lr=1e-2, micro_tokens=50, eps_low=0.3, eps_high=0.3, max_grad_norm=1e9)
LORA = Lora(rank=4, alpha=8)
_NEEDS_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None and not os.environ.get("CI"),  # where the suite of the extras has it
    reason="needs deepspeed: scripts/setup.sh dev,deepspeed",
)
STRATEGIES = [
    *map(pytest.param, ("ddp", "fsdp2")),
    *(pytest.param(strategy, marks=_NEEDS_DEEPSPEED) for strategy in ("zero2", "zero3")),
]


def close_to(ours, theirs, tolerance=1e-5):
    counts = ("micro_batches", "computed_tokens", "repetition")  # rows are dealt in other micro-batches
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert name in counts or ours[name] == pytest.approx(value, rel=1e-4, abs=tolerance), name


def forked(rows):
    """Make the two longest rows branches of one episode, and let all others begin as they do."""
    rows = sorted(rows, key=lambda row: -len(row.ids))
    if len(rows) > 1:
        rows[0] = replace(rows[0], weight=0.7)
        rows[1] = replace(rows[1], weight=0.3, episode_id=rows[0].episode_id, advantage=rows[0].advantage)
        shared = [min(60 if len(row.ids) > 60 else 20, len(row.ids) - 2) for row in rows]
        rows = [replace(row, ids=rows[0].ids[:n] + row.ids[n:]) for n, row in zip(shared, rows, strict=True)]
    return rows


async def same_as_one(model, make_rows, tmp_path, settings, **more):
    """Compare steps, checkpoint, resume and published weights of two processes with one trainer; then kill one."""
    alone = Trainer(model, settings.with_changes(processes=1, strategy="ddp"))
    async with start_learner(model, tmp_path, settings, **more) as two:
        for lengths, seed in BATCHES:
            rows = forked(make_rows(lengths, seed))
            close_to(await two.step(rows, 8), alone.step(rows, 8))  # some of the 8 episodes have no row
        version, infinite = two.version, [replace(row, advantage=math.inf) for row in make_rows([20, 30], 3)]
        updates = settings.updates
        assert (await two.step(infinite))["skipped"] == alone.step(infinite)["skipped"] == updates
        assert two.version == alone.version == version + 1
        published = await two.publish()
        ours = safetensors.torch.load_file(published.path / "model.safetensors")
        theirs = safetensors.torch.load_file(alone.publish(tmp_path / "alone")[0] / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert max((ours[name] - value).abs().max().item() for name, value in theirs.items()) < 2e-4
        await two.save(tmp_path / "c")
        blocked = tmp_path / "file"
        blocked.write_text("")
        with pytest.raises(RunError, match="could not save"):  # one of them fails; the other does not wait for it
            await two.save(blocked / "c")
        expected = await two.step(make_rows([20, 30], 4))
        assert await two.restore(tmp_path / "c") == len(BATCHES) + 1
        assert await two.step(make_rows([20, 30], 4)) == expected  # bit for bit
        alone.restore(tmp_path / "c")  # two processes wrote it
        close_to(alone.step(make_rows([20, 30], 4)), expected)
        rows = [row.ids for row in make_rows([9, 14])]
        for a, b in zip(await two.logprobs(rows), alone.logprobs(rows, 1.0), strict=True):
            assert a == pytest.approx(b, abs=2e-3)

        if more:  # torchrun's
            return
        pids = two.pids
        os.kill(pids[1], signal.SIGSTOP)  # so that it dies in the middle of a step, while the other waits for it
        step = asyncio.create_task(two.step(make_rows([20, 30], 4)))
        await asyncio.sleep(0)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LearnerFault, match=rf"process {pids[1]} killed by SIGKILL"):
            await step
    assert not any(map(psutil.pid_exists, pids))


async def test_two_processes_do_what_one_does(miniature, make_rows, tmp_path):
    settings = SETTINGS.with_changes(processes=2, minibatches=2, old_logprobs="recomputed", mismatch_correction="token")
    await same_as_one(miniature, make_rows, tmp_path, settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "options",
    [
        {"lora": LORA, "beta": 0.1},
        pytest.param(
            {"gradient_checkpointing": True, "updates_per_batch": 2, "minibatches": 2, "old_logprobs": "recomputed"},
            marks=pytest.mark.by_hand,
        ),
    ],
    ids=["lora, KL", "checkpointing, four updates"],
)
async def test_every_strategy_agrees_with_one_process(strategy, options, miniature, make_rows, tmp_path):
    await same_as_one(miniature, make_rows, tmp_path, SETTINGS.with_changes(processes=2, strategy=strategy, **options))


@pytest.mark.by_hand
@pytest.mark.parametrize(("strategy", "lora"), [("ddp", LORA), ("fsdp2", None)])
async def test_values_of_rows_in_several_processes_are_those_of_one(strategy, lora, miniature, make_rows, tmp_path):
    """An episode's rows, whose advantages depend on each other's values, are in two of them."""
    terms = {"algorithm": "ppo", "value_head": True, "minibatches": 2}
    await same_as_one(
        miniature, make_rows, tmp_path, SETTINGS.with_changes(processes=2, strategy=strategy, lora=lora, **terms)
    )


@pytest.mark.by_hand  # many processors emulate bfloat16: minutes
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_adapters_on_a_bfloat16_model_are_what_peft_and_transformers_read(
    strategy, miniature, make_rows, tmp_path
):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = SETTINGS.with_changes(lr=1e-3, processes=2, strategy=strategy, precision="bf16", lora=LORA)
    alone = Trainer(miniature, settings.with_changes(processes=1, strategy="ddp"))
    async with start_learner(miniature, tmp_path, settings) as two:
        for lengths, seed in BATCHES:
            ours, theirs = await two.step(make_rows(lengths, seed)), alone.step(make_rows(lengths, seed))
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.02)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
        load = {"dtype": torch.bfloat16, "local_files_only": True}
        merged = AutoModelForCausalLM.from_pretrained((await two.publish()).path, **load).state_dict()
        adapter = (await two.publish("adapter")).path
        base = AutoModelForCausalLM.from_pretrained(miniature, **load)
        theirs = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
        assert merged.keys() == theirs.keys()
        assert all((theirs[name] - tensor).abs().max().item() < 5e-3 for name, tensor in merged.items())
        await two.save(tmp_path / "c")
        expected = await two.step(make_rows([20, 30], 4))
        await two.restore(tmp_path / "c")
        assert await two.step(make_rows([20, 30], 4)) == expected  # bit for bit


def test_processes_agree_on_how_they_compute(miniature, monkeypatch):
    """All compute row by row, and not in chunks, if one of them has to."""
    assert Trainer(miniature, SETTINGS)._micro_tokens == SETTINGS.micro_tokens
    monkeypatch.setattr("coderepairrl.learn.strategy.SingleProcess.gather", lambda self, value: [value, (True, False)])
    trainer = Trainer(miniature, SETTINGS)
    assert trainer._micro_tokens == 1 and not trainer._can_chunk
