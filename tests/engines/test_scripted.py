"""The scripted engine ends replies as a real one does."""

from __future__ import annotations

import pytest

from coderepairrl.engines import ScriptedEngine
from coderepairrl.errors import EngineFault
from coderepairrl.types import Sampling

from .conftest import ask


async def test_replies_come_in_order_and_end_where_an_engine_ends_them() -> None:
    engine = ScriptedEngine([[1, 2, 3, 4], [5, 6, 7], [8] * 50], context=20, chunk=3)
    assert (await ask(engine, [0], Sampling(stop_ids=(3,))))[0] == [1, 2, 3]
    assert (await ask(engine, [0], Sampling(max_tokens=2), 9))[0] == [5, 6]
    assert (await ask(engine, [0] * 12, Sampling()))[0] == [8] * 8
    assert [(len(request.ids), request.seed) for request in engine.requests] == [(1, 0), (1, 9), (12, 0)]
    with pytest.raises(EngineFault, match="3 replies"):
        await ask(engine, [0], Sampling())
    with pytest.raises(ValueError, match="no room"):
        await ask(engine, [0] * 20, Sampling())
