"""Limits and durations do not change when the machine's clock is set during a run."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import cycle
from pathlib import Path

import aiohttp
import pytest

import coderepairrl
from coderepairrl import tokens
from coderepairrl.engines import ScriptedEngine
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.gateway.remote import _parse_retry_after
from coderepairrl.processes.meter import unix_time
from coderepairrl.runs import Log
from coderepairrl.types import Limits, Sampling, Turn

WALL = ("time.time(", "datetime.now(", "utcnow(", "time.time_ns(", "CLOCK_REALTIME")


@pytest.mark.parametrize("seconds", [30.0, 0.4])
async def test_limits_and_durations_ignore_a_clock_that_jumps(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    real_time, jumps = time.time, cycle([86_400.0, -86_400.0])
    monkeypatch.setattr(time, "time", lambda: real_time() + next(jumps))
    assert abs(time.time() - time.time()) > 86_400, "the control"
    codec, turns, log = tokens.load_codec(miniature), list[Turn](), Log(tmp_path / "log.jsonl")

    def record(episode: str, turn: Turn) -> None:
        turns.append(turn)
        log.append("turn", episode=episode)

    engine = ScriptedEngine(lambda *_: [*codec.encode("a story"), codec.stop_ids[0]], chunk=1, delay=0.03)
    server = Gateway(PolicySource(codec, engine), sampling=Sampling(), on_turn=record)
    await server.start()
    session = server.open("e", limits=Limits(seconds=seconds), seed=0)
    async with aiohttp.ClientSession() as client:
        began, statuses = time.monotonic(), []
        for number in range(3):
            body = {"model": "policy", "messages": [{"role": "user", "content": f"{number}"}]}
            async with client.post(f"{session.endpoint.base_url}/chat/completions", json=body) as answer:
                statuses.append(answer.status)
            if seconds < 1:
                await asyncio.sleep(0.25)
        took = time.monotonic() - began
    await server.stop()
    log.close()
    assert statuses[0] == 200
    assert (statuses[-1] == 200) == (seconds > 1)
    assert session.limit == ("" if seconds > 1 else "time")
    stamps = [json.loads(line)["time"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert stamps == sorted(stamps)
    assert stamps[-1] - stamps[0] <= took
    assert all(0 <= turn.ended - turn.started <= took for turn in turns)
    assert abs(unix_time() - real_time()) < 3600


NOW, LATER = "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:09 GMT"


@pytest.mark.parametrize(
    ("retry_after", "date", "seconds"),
    [(LATER, NOW, 9.0), (NOW, LATER, 0.0), ("3", NOW, 3.0), (LATER, "", 0.0), ("soon", NOW, 0.0), ("", "", 0.0)],
)
def test_a_time_to_retry_is_relative_to_the_remotes_clock(retry_after: str, date: str, seconds: float) -> None:
    assert _parse_retry_after(retry_after, date) == seconds


def test_no_other_module_reads_the_clock_of_the_machine() -> None:
    """Except the crash test, which compares it with other processes' logs."""
    root = Path(coderepairrl.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in WALL)
    }
    assert readers == {"processes/meter.py", "checks/crash.py"}
