"""What a process uses of the machine: measured where it can be read, and None where not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coderepairrl.processes.meter import Meter, ResourceUsage, sum_usage

BUSY = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"


def test_processor_time_is_that_of_running_and_of_ended_children(tmp_path: Path) -> None:
    watch = Meter(powercap=tmp_path, nvml="libnone.so.1")
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    ended = watch.read()
    assert ended.cpu_seconds >= 0.25
    waits = BUSY + "print('done', flush=True)\ninput()\n"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        running = watch.read()
        child.communicate(b"\n")
    assert running.cpu_seconds >= ended.cpu_seconds + 0.25
    assert (running.cpu_joules, running.gpu_seconds, running.gpu_joules) == (None, None, None), "not readable, and no 0"


def test_energy_of_packages_counts_on_where_the_counter_begins_anew(tmp_path: Path) -> None:
    for name, range_uj in (("intel-rapl:0", 9_999_999), ("intel-rapl:1", 4_999_999), ("intel-rapl:0:0", 999)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "max_energy_range_uj").write_text(f"{range_uj}\n")
        (tmp_path / name / "energy_uj").write_text("4000000\n")
    watch = Meter(powercap=tmp_path, nvml="libnone.so.1")
    assert watch.read().cpu_joules == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("9000000\n")
    assert watch.read().cpu_joules == pytest.approx(5.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("1000000\n")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("4500000\n")
    assert watch.read().cpu_joules == pytest.approx(5 + 2 + 0.5)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert watch.read().cpu_joules is None
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("4500000\n")
    assert watch.read().cpu_joules is None, "what passed meanwhile nobody knows"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_gpus_are_asked_through_their_drivers_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that is made for the test, with the functions of NVML that are called: device i counts 1000 (i + 1) mJ
    more each time."""
    (tmp_path / "nvml.c").write_text(
        "static unsigned long long used[4];\n"
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *n) { *n = 4; return 0; }\n"
        "int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = &used[i]; return i < 4 ? 0 : 2; }\n"
        "int nvmlDeviceGetHandleByUUID(const char *u, void **d) { *d = &used[3]; return u[4] == 'x' ? 0 : 2; }\n"
        "int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *mj) {\n"
        "  unsigned long long *own = d; *own += 1000 * (own - used + 1); *mj = *own; return 0; }\n"
    )
    library = tmp_path / "libnvml.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    for visible, count, joules in ((None, 4, 10), ("1,2", 2, 5), ("GPU-x", 1, 4), ("", 0, 0)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        used = Meter(powercap=tmp_path, nvml=str(library)).read()
        assert used.gpu_seconds == pytest.approx(count * used.seconds, abs=0.01)
        assert used.gpu_joules == pytest.approx(joules)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert Meter(powercap=tmp_path, nvml=str(library)).read().gpu_seconds is None, "there is no such GPU"


def test_a_run_used_what_its_processes_used_each_since_it_began() -> None:
    def record(seconds: float, joules: float | None = 1.0) -> dict[str, object]:
        return {"type": "used", "time": 0.0, **ResourceUsage(seconds, seconds, joules, None, None)._asdict()}

    start = {"type": "start"}
    assert sum_usage([start]) is None
    assert sum_usage([start, record(1), record(3), start, start, record(2), {"type": "end"}]) == (5, 5, 2, None, None)
    assert sum_usage([start, record(1), start, record(2, None)]) == (3, 3, None, None, None), (
        "one of them could not read it"
    )
