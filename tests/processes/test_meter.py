"""What a process and its descendants use of the machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coderepairrl.processes.meter import Meter, ResourceUsage, sum_usage

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_processor_time_includes_running_and_ended_children() -> None:
    watch = Meter()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    ended = watch.read()
    assert ended.cpu_seconds >= 0.25
    waits = BUSY + "print('done', flush=True)\ninput()\n"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        running = watch.read()
        child.communicate(b"\n")
    assert running.cpu_seconds >= ended.cpu_seconds + 0.25


def test_gpu_time_is_that_of_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("0,1", 2), ("GPU-x", 1), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        used = Meter().read()
        assert used.gpu_seconds == pytest.approx(count * used.seconds, abs=0.01)


def test_the_usage_of_a_run_is_the_sum_of_its_processes_last_records() -> None:
    def record(seconds: float) -> dict[str, object]:
        return {"type": "used", "time": 0.0, **ResourceUsage(seconds, seconds, 2 * seconds)._asdict()}

    start = {"type": "start"}
    assert sum_usage([start]) is None
    assert sum_usage([start, record(1), record(3), start, start, record(2), {"type": "end"}]) == (5, 5, 10)
