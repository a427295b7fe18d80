"""What a run says of its episodes while it goes on."""

from __future__ import annotations

import pytest

from coderepairrl.stages.progress import Progress
from coderepairrl.types import Ending, Episode, Score


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


def test_crashes_are_shown_by_kind_and_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What a program printed may be the policy's own words."""
    with Progress(3) as progress:
        progress.phase("train", 8)
        for number in range(5):
            how, last = ("exit 1", f"KeyError: \x1b[2J{number}") if number else ("SIGKILL", "running")
            crash = f"AgentFault: mine ended: Traceback\n  line 1\n{last}\n"
            episode = Episode(f"train-{number}", "task", "train", 1, "group", number, Ending.CRASH, how, crash=crash)
            progress.episode(episode)
        progress.step(1, {"reward": 0.5, "crash": 5 / 8})
        progress.step(2, {"reward": 0.5, "crash": 0.0})
    kill, exit_, step, quiet, more = capsys.readouterr().err.splitlines()
    assert kill == "crash: train-0: SIGKILL: running"
    assert exit_ == "crash: train-1: exit 1: KeyError: [2J1"
    assert "crash 0.625" in step and "crash" not in quiet
    assert more == "crash: 3 more like exit 1: KeyError: [2J1"


def test_why_scores_are_zero_is_shown_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    def scored(*scores: Score) -> Episode:
        return Episode("train-0", "task", "train", 1, "group", 0, Ending.DONE, scores=scores)

    with Progress(3) as progress:
        for _ in range(3):
            progress.episode(scored(Score("patch_lines", 0.0, 1.0, "empty patch"), Score("tests", 1.0, 0.0, "")))
        progress.episode(scored(Score("patch_lines", 0.7), Score("tests", 0.0, 0.0, "no [bold]module[/] pytest")))
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.splitlines() == [
        "patch_lines: 3 of 4 scores are 0, of which",
        "       3  empty patch",
        "tests: 1 of 4 scores are 0, of which",
        "       1  no [bold]module[/] pytest",
    ]


@pytest.mark.parametrize(
    ("replayed", "how"),
    [
        (range(1, 9), "steps 1 to 8 replayed from the log"),
        (range(8, 9), "step 8 replayed from the log"),
        (range(9, 9), "from its checkpoint"),
    ],
)
def test_a_resumed_run_says_where_it_goes_on(replayed: range, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Replaying takes a while, in which a run that seems to be at step 0 looks as if it had been lost."""
    with Progress(50) as progress:
        progress.resume(8, replayed)
        with progress.console.capture() as panel:
            progress.console.print(progress._panel())
    assert capsys.readouterr().err == f"resumed after step 8 of 50: {how}\n"
    assert "replay" in panel.get() and "8/50" in panel.get()
