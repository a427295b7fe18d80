"""The fake keeps the protocol's promises, so that tests above it mean something."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import EngineFault
from coderepairrl.types import Sampling

from .conftest import ask


async def test_replies_in_order_cut_as_an_engine_cuts() -> None:
    engine = ScriptedEngine([[1, 2, 3, 4], [5, 6, 7], [8] * 50], context=20, chunk=3)
    assert (await ask(engine, [0], Sampling(stop_ids=(3,))))[0] == [1, 2, 3]
    assert (await ask(engine, [0], Sampling(max_tokens=2), 9))[0] == [5, 6]
    assert (await ask(engine, [0] * 12, Sampling()))[0] == [8] * 8
    assert [(len(asked.ids), asked.seed) for asked in engine.requests] == [(1, 0), (1, 9), (12, 0)]
    with pytest.raises(EngineFault, match="3 replies"):
        await ask(engine, [0], Sampling())
    with pytest.raises(ValueError, match="no room"):
        await ask(engine, [0] * 20, Sampling())


async def test_versions_change_within_a_reply_and_only_for_the_announced_file(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda *_: [1, 2, 3, 4], chunk=2)
    weights = tmp_path / "w"
    weights.write_bytes(b"weights")
    stream = engine.generate([0], Sampling(), 0)
    assert (await anext(stream)).version == 0
    with pytest.raises(EngineFault, match="SHA-256"):
        await engine.load(weights, 1, "0" * 64)
    assert await engine.load(weights, 2, hashlib.sha256(b"weights").hexdigest()) == 2
    assert (await anext(stream)).version == 2


async def test_abort_and_death() -> None:
    engine = ScriptedEngine(lambda *_: [1, 2, 3, 4], chunk=2)
    stream = engine.generate([0], Sampling(), 0)
    await anext(stream)
    assert (await engine.health())["running"] == 1
    await stream.aclose()
    assert (engine.aborted, (await engine.health())["running"]) == (1, 0)
    stream = engine.generate([0], Sampling(), 0)
    await anext(stream)
    engine.kill("out of memory")
    for call in (anext(stream), engine.health()):
        with pytest.raises(EngineFault, match="out of memory"):
            await call
