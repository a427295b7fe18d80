"""What a run says of its episodes while it goes on."""

from __future__ import annotations

import pytest

from coderepairrl.train.progress import Progress
from coderepairrl.types import Ending, Episode


def void(number: int, fault: str) -> Episode:
    return Episode(f"train-{number}", "task", "train", 1, "group", number, Ending.VOID, fault=fault)


def test_a_cause_is_said_once_a_phase_and_then_counted(capsys: pytest.CaptureFixture[str]) -> None:
    full = "SandboxFault: the disk is full"
    with Progress(3) as progress:
        for phase in ("train", "eval"):
            progress.phase(phase, 400)
            for number in range(380):
                progress.episode(void(number, f"EngineFault: it died at request {number}\nlast words"))
            progress.episode(void(380, full))
    each = ["void: train-0: EngineFault: it died at request 0", f"void: train-380: {full}"]
    assert capsys.readouterr().err.splitlines() == [*each, "void: 379 more like EngineFault: it died at request 0"] * 2
