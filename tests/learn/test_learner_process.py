"""The learner as the controller sees it: a process that answers, refuses and may die."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from coderepairrl.errors import LearnerFault, RunError, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.learner import LearnerService
from coderepairrl.learn.trainer import Trainer
from learners import start_learner

LENGTHS = [20, 9, 31]
SETTINGS = LearnSettings(algorithm="grpo", lr=1e-2, beta=0.05)


async def test_the_process_does_what_the_trainer_does_bit_for_bit(miniature, make_rows, tmp_path):
    """Through JSON frames and another process: equal metrics, equal checksums, also after a resume."""
    trainer = Trainer(miniature, SETTINGS)
    expected = [trainer.step(make_rows(LENGTHS, seed), 5) for seed in range(3)]  # two of the 5 episodes have no rows
    assert expected[0]["denominator"] == 5
    checksum = trainer.publish(tmp_path / "expected")[2]
    async with start_learner(miniature, tmp_path, SETTINGS) as one:
        assert one.version == 0
        assert [await one.step(make_rows(LENGTHS, seed), 5) for seed in range(2)] == expected[:2]
        await one.save(tmp_path / "checkpoint")
        with pytest.raises(LearnerFault, match="flat or void"):
            await one.step([])
        blocked = tmp_path / "file"
        blocked.write_text("")
        with pytest.raises(RunError, match="could not save"):
            await one.save(blocked / "checkpoint")
        with pytest.raises(UsageError, match="not a whole checkpoint"):
            await one.restore(tmp_path / "nowhere")
        waiting = asyncio.create_task(one.step(make_rows(LENGTHS, 7)))
        await asyncio.sleep(0)
        waiting.cancel()  # the step is carried out, and its reply is dropped
        rows = [row.ids for row in make_rows(LENGTHS)]
        assert [len(scores) for scores in await one.logprobs(rows)] == [n - 1 for n in LENGTHS]
        assert one.version == 3
        assert await one.restore(tmp_path / "checkpoint") == one.version == 2
        assert await one.step(make_rows(LENGTHS, 2), 5) == expected[2]
        published = await one.publish()
        assert (published.version, published.checksum) == (3, checksum)
        assert published.path.parent == tmp_path / "weights"


async def test_a_killed_learner_is_a_fault_and_its_checkpoint_survives(miniature, make_rows, tmp_path):
    async with start_learner(miniature, tmp_path, SETTINGS) as one:
        await one.save(tmp_path / "checkpoint")
        os.kill(one.pids[0], signal.SIGSTOP)
        step = asyncio.create_task(one.step(make_rows(LENGTHS)))
        await asyncio.sleep(0.05)
        os.kill(one.pids[0], signal.SIGKILL)
        with pytest.raises(LearnerFault, match=r"died during step.*SIGKILL"):
            await step
        with pytest.raises(LearnerFault):
            await one.publish()
    async with start_learner(miniature, tmp_path, SETTINGS) as two:
        assert await two.restore(tmp_path / "checkpoint") == 0
        assert (await two.step(make_rows(LENGTHS)))["rows"] == len(LENGTHS)


async def test_a_stopped_learner_is_killed_after_its_patience(miniature, make_rows, tmp_path):
    async with start_learner(miniature, tmp_path, SETTINGS) as one:
        os.kill(one.pids[0], signal.SIGSTOP)
        one._patience = 0.5
        with pytest.raises(
            LearnerFault, match=rf"answer step within 0.5 s.*process {one.pids[0]} was stopped"
        ) as caught:
            await one.step(make_rows(LENGTHS))
        assert "train.patience" in caught.value.fix
        one._patience = 280.0
        with pytest.raises(LearnerFault, match="died during publish"):
            await one.publish()


def test_only_listed_operations_are_carried_out():
    assert "no operation '__init__'" in LearnerService().answer({"op": "__init__"})["error"]
