"""Each tracker gets all metrics of a run once, and a run survives its trackers' failures."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import json
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.config import Config, to_toml
from coderepairrl.errors import UsageError
from coderepairrl.report import trackers
from coderepairrl.report.trackers import feed_trackers, send_metrics
from coderepairrl.runs import RunFolder
from commands import CRRL
from needs import need

from .runs import RunMaker, write_run

Points = dict[str, list[tuple[int, float]]]
"""By metric: step and value, in the order in which they were sent."""


def read_logged_points(run: Path) -> Points:
    found: Points = {}
    for record in RunFolder(run).records():
        if record["type"] in ("step", "eval"):
            for name, value in trackers.flatten_record(record).items():
                found.setdefault(name, []).append((record["step"], value))
    return found


def read_tensorboard(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag: [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def read_trackio(run: Path) -> Points:
    """Read in another process, since trackio reads its folder's place only once."""
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; [run] = S.get_run_records('coderepairrl');"
        "print(json.dumps(S.get_logs('coderepairrl', run['name'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: Points = {}
    for row in json.loads(done.stdout.splitlines()[-1]):
        for name, value in row.items():
            if "/" in name:
                found.setdefault(name, []).append((row["step"], value))
    return found


def read_wandb(run: Path) -> Points:
    from wandb.proto import wandb_internal_pb2 as messages

    found: Points = {}
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for data in read_leveldb_log(file.read_bytes()):
            record = messages.Record.FromString(data)
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for name, value in row.items():
                if "/" in name:
                    found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def read_leveldb_log(data: bytes, block: int = 1 << 15) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which wandb writes after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb}


@pytest.fixture(params=READERS)
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    need(importlib.util.find_spec(request.param), f"needs {request.param} (the extra dev)")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return str(request.param)


def run_crrl(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CRRL, *map(str, arguments)], capture_output=True, text=True)


def test_all_that_is_logged_arrives_once(tracker: str, tmp_path: Path) -> None:
    """Also from a resumed run, and from a log whose last line is torn."""
    maker = RunMaker(tmp_path / "runs" / "mine", run={"steps": 4})
    maker.run(2, evaluations=(0,), end=False)
    torn = b'{"type":"step","step":3,"metrics":{"rew'
    run = maker.folder.path
    with maker.folder.log.open("ab") as log:
        log.write(torn)
    first = run_crrl("export", run, "--to", tracker)
    assert first.returncode == 0 and first.stdout.splitlines()[-1] == f"3 records sent to {tracker}", first
    maker.log = maker.folder.writer()  # which cuts it off
    maker.start()
    maker.evaluate(2)
    maker.evaluate(2, "greedy")
    maker.step(3)
    maker.log.close()
    second = run_crrl("export", run, "--to", tracker)
    assert second.returncode == 0 and second.stdout.splitlines()[-1] == f"3 records sent to {tracker}", second
    assert run_crrl("export", run, "--to", tracker).stdout.splitlines()[-1] == f"0 records sent to {tracker}"
    wanted, found = read_logged_points(run), READERS[tracker](run)
    assert found.keys() == wanted.keys() and {"train/reward", "eval/reward_low", "greedy/reward"} <= found.keys()
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6), name


@pytest.mark.parametrize("mark", [b"half\0", b"-3", b"99999999"])
def test_a_mark_that_says_nothing_is_an_error_that_names_it(mark: bytes, tmp_path: Path) -> None:
    need(importlib.util.find_spec("tensorboard"), "needs tensorboard (the extra dev)")
    run = write_run(tmp_path / "run", steps=2)
    (run / "tensorboard").mkdir()
    (run / "tensorboard/sent").write_bytes(mark)
    with pytest.raises(UsageError, match="sent is not a position in the log"):
        send_metrics(run, "tensorboard")
    assert (run / "tensorboard/sent").read_bytes() == mark


def test_a_tracker_that_fails_leaves_the_rest_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, had = write_run(tmp_path / "run", steps=3), list[int]()

    def send(metrics: Any, step: int, time: float) -> None:
        if len(had) == 2 and not mended:
            raise ConnectionError("the server went away")
        had.append(step)

    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": lambda run: nullcontext(send)})
    mended = False
    done = CliRunner().invoke(app, ["export", str(run), "--to", "tensorboard"])
    assert str(done.exception) == "tensorboard: the server went away"
    mended = True
    assert (send_metrics(run, "tensorboard"), send_metrics(run, "tensorboard")) == (
        2,
        0,
    )  # of 3 steps and an evaluation
    assert had == [0, 1, 2, 3]


def test_export_options_that_exclude_each_other_are_refused() -> None:
    for arguments, error in (
        (["--to", "wandb", "--precision", "fp32"], "--precision"),
        (["place", "--to", "wandb"], "sends metrics and writes no place"),
        ([], "TARGET is missing"),
    ):
        assert error in str(CliRunner().invoke(app, ["export", "run", *arguments]).exception)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    config = Config.model_validate({"run": {"name": "run"}})
    folder.create(to_toml(config), {"name": "run", "config": config.model_dump(mode="json")})
    return folder


def write_package(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)


async def test_a_tracker_that_breaks_is_reported_once(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path / "broken", "wandb", "raise OSError('api.wandb.ai cannot be reached')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    said: list[str] = []
    async with feed_trackers(folder, ["wandb"], said.append):
        while not said:  # while the run goes on
            await asyncio.sleep(0.02)
    assert said == [
        "wandb stopped: OSError: api.wandb.ai cannot be reached; the run folder has all metrics:"
        f" crrl export {folder.path} --to wandb"
    ]


async def test_a_tracker_that_hangs_holds_nothing_up(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coderepairrl.report.trackers._PATIENCE", 0.01)
    write_package(tmp_path / "hangs", "trackio", "import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hangs"))
    said: list[str] = []
    async with feed_trackers(folder, ["trackio"], said.append):
        pass
    assert said == [f"trackio has not received all metrics: crrl export {folder.path} --to trackio"]


def test_what_a_killed_run_has_logged_is_still_sent(folder: RunFolder) -> None:
    """After kill -9, the tracker's process sends the rest and ends."""
    need(importlib.util.find_spec("tensorboard"), "needs tensorboard (the extra dev)")
    code = (
        "import asyncio, os, signal, sys; from pathlib import Path; from coderepairrl.runs import RunFolder\n"
        "from coderepairrl.report.trackers import feed_trackers\n"
        "async def main(folder):\n"
        "    log, sent = folder.writer(), folder.path / 'tensorboard' / 'sent'\n"
        "    async with feed_trackers(folder, ['tensorboard'], print):\n"
        "        log.append('step', step=1, metrics={'reward': 0.5})\n"
        "        while not (sent.exists() and sent.read_text()): await asyncio.sleep(0.02)\n"
        "        log.append('step', step=2, metrics={'reward': 0.7})\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main(RunFolder(Path(sys.argv[1]))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with (folder.path / "tensorboard" / "sent").open() as sent:
        fcntl.flock(sent, fcntl.LOCK_SH)  # which it holds until it ends
        assert int(sent.read()) == folder.log.stat().st_size
