"""On-policy distillation through the whole loop: the student comes nearer to its teacher on rows that it never saw."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import torch

from coderepairrl import models, stages, tokens
from coderepairrl.config import load
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.trainer import Trainer
from coderepairrl.tasks.mutants.corpus_tasks import exercise, mutants
from coderepairrl.types import Sample
from workshop.tiny.demonstrations import Habits, demonstrate, row

TEACHER = models.folder("builtin:tiny")


def blurred(folder: Path) -> Path:
    """The tiny policy with noise on its weights: it can still act, and has something to learn from what it was."""
    shutil.copytree(TEACHER, folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = safetensors.torch.load_file(path)
    noisy = {
        name: (value.float() + 0.5 * value.float().std() * torch.randn(value.shape, generator=generator)).contiguous()
        if value.ndim == 2
        else value.float()
        for name, value in tensors.items()
    }
    safetensors.torch.save_file(noisy, path, metadata={"format": "pt"})
    return folder


def apart(folder: Path) -> float:
    """Mean KL(teacher || model), in nats a token, on held-out demonstrations."""
    codec, rng = tokens.load(TEACHER), Random(1)
    pool = [mutant for mutant in mutants() if mutant.split == "test"]
    made = filter(None, (exercise(rng.choice(pool), rng, quoted=True) for _ in range(8)))
    rows = [row(codec, demonstrate(one, Habits(), rng)) for one in made]
    samples = [
        Sample(f"e{at}", tuple(ids), tuple(said), (0.0,) * len(ids), (-1,) * len(ids), 0.0)
        for at, (ids, said) in enumerate(rows)
    ]
    settings = LearnSettings(algorithm="sft", teacher=str(TEACHER))
    return float(Trainer(folder, settings).measure(samples)["teacher_kl"])


@pytest.mark.usefixtures("isolating")
async def test_a_few_steps_bring_the_student_nearer_to_its_teacher(tmp_path: Path) -> None:
    student = blurred(tmp_path / "student")
    config = load(
        "hello",
        [
            *(f"run.dir={tmp_path / 'runs'}", "run.steps=4", "run.checkpoint_every=4", f"model.path={student}"),
            *("train.teacher=builtin:tiny", "eval.before=false", "eval.after=false", "reward=patch_edits"),
            *("rollout.tasks_per_step=2", "rollout.group_size=2", "rollout.calls=2"),
            *("tasks.verify=false", "train.lr=1e-3"),
        ],
    )
    done = await stages.run(config, quiet=True)
    trained = Path(done["run"]) / "checkpoints" / "00004"
    before, after = apart(student), apart(trained)
    assert after < 0.7 * before, (before, after)
    assert apart(TEACHER) == pytest.approx(0.0, abs=1e-6)
