"""The line of a step: on one line of any terminal, and no rounding error read as a loss."""

from __future__ import annotations

import pytest

from coderepairrl.stages.progress import Progress

METRICS = {
    "reward": 0.41234567,
    "empty_patches": 0.125,
    "tool_success": 0.953125,
    "void": 0.0,
    "flat_groups": 3,
    "learn/loss": -9.313225746154785e-10,
    "learn/grad_norm": 0.5123456,
    "tokens_per_second": 1812.3,
}


@pytest.mark.parametrize("total", [50, 1_000_000])
@pytest.mark.parametrize("more", [{}, {"void": 12, "crash": 0.25}])
def test_a_step_is_a_line(total: int, more: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total) as progress:
        progress.step(total, METRICS | more)
    [line] = capsys.readouterr().err.splitlines()
    assert len(line) < 80, line
    assert "reward 0.412" in line and "e-10" not in line
    assert ("void 12" in line) is bool(more)
