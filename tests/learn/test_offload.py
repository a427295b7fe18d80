"""Offloaded tensors come back bit for bit, and later steps are as without offloading."""

from __future__ import annotations

import pytest
import torch

from coderepairrl.config.schema import Lora
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.offload import Offloader
from coderepairrl.learn.trainer import Trainer

LENGTHS = [30, 12, 45]
KINDS = {
    "all weights": LearnSettings(algorithm="grpo", lr=1e-2),
    "a reference": LearnSettings(algorithm="grpo", lr=1e-2, beta=0.1),
    "adapters": LearnSettings(algorithm="grpo", lr=1e-2, precision="bf16", lora=Lora(rank=4)),
    "values": LearnSettings(algorithm="ppo", lr=1e-2, value_head=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_go_on_bit_for_bit(kind, miniature, make_rows, tmp_path):
    straight, moved = (Trainer(miniature, KINDS[kind]) for _ in range(2))
    for seed in range(3):
        assert moved.step(make_rows(LENGTHS, seed)) == straight.step(make_rows(LENGTHS, seed))
        published = [trainer.publish(tmp_path / "published")[2] for trainer in (moved, straight)]
        size = moved.offload()
        assert size > 0 and moved.offload() == 0
        for trainer, name in ((moved, "moved"), (straight, "straight")):
            trainer.save(tmp_path / f"{name}{seed}")  # from the host's memory
        assert moved.reload() == size and moved.reload() == 0
        assert [trainer.publish(tmp_path / "published")[2] for trainer in (moved, straight)] == published
        saved = [{f.name: f.read_bytes() for f in (tmp_path / f"{n}{seed}").glob("*")} for n in ("moved", "straight")]
        assert saved[0] == saved[1]


def test_tied_weights_stay_one():
    first, twin = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    twin.weight = torch.nn.Parameter(first.weight.data)  # another parameter on the same values
    offloader = Offloader(torch.device("cpu"))
    optimizer = torch.optim.AdamW(first.parameters())
    assert offloader.offload([first, twin], optimizer) == 4 * (9 + 3 + 3)
    first.weight.data[0, 0] = 7.0
    assert twin.weight[0, 0] == 7.0
    offloader.restore()
    first.weight.data[0, 0] = 8.0
    assert twin.weight[0, 0] == 8.0


def test_an_offloaded_trainer_refuses_to_compute(miniature, make_rows, tmp_path):
    trainer = Trainer(miniature, KINDS["adapters"])
    trainer.save(tmp_path / "saved")
    trainer.offload()
    for use in (
        lambda: trainer.step(make_rows(LENGTHS)),
        lambda: trainer.measure(make_rows(LENGTHS)),
        lambda: trainer.logprobs([[1, 2, 3]], 1.0),
        lambda: trainer.publish(tmp_path),
        lambda: trainer.restore(tmp_path / "saved"),
    ):
        with pytest.raises(ValueError, match="call reload first"):
            use()
    trainer.reload()
    trainer.restore(tmp_path / "saved")
    assert len(trainer.step(make_rows(LENGTHS))) > 0
