"""The real vLLM server on this CPU is killed, stopped or fails in a load: each is a fault, and no process is left."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import psutil
import pytest

from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.errors import EngineFault
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.types import Sampling

from .conftest import ask, load, load_reference, require_vllm

pytestmark = [pytest.mark.by_hand, pytest.mark.timeout(3600)]

GREEDY = Sampling(temperature=0.0, max_tokens=16)
TORN = '''
    import crrl_worker

    class Extension(crrl_worker.Extension):
        """Fails when the new weights are in the model already."""

        def _reload(self, **source):
            super()._reload(**source)
            if "torn" in str(source):
                raise RuntimeError("the network went away")
'''


@pytest.fixture(autouse=True)
def vllm() -> None:
    require_vllm()


def list_processes(engine: VllmEngine) -> list[psutil.Process]:
    """The server's processes, the API server first; without the guard."""
    assert engine.pid is not None
    return psutil.Process(engine.pid).children(recursive=True)


def find_survivors(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=60)[1]  # type: ignore[no-any-return]


async def test_a_server_that_is_torn_stopped_or_killed_is_replaced(miniature: Path, tmp_path: Path) -> None:
    (tmp_path / "torn_worker.py").write_text(textwrap.dedent(TORN))
    engines: list[VllmEngine] = []

    async def start() -> VllmEngine:
        engine = await Vllm(
            context=512,
            start_seconds=1500,
            env={"PYTHONPATH": str(tmp_path)},
            args=["--worker-extension-cls", "torn_worker.Extension"],
        ).start(miniature, log_dir=tmp_path)
        engines.append(engine)
        return engine

    engine = SupervisedEngine(await start(), start, restarts=3)
    model = load_reference(miniature)
    for name in ("one", "torn", "three"):  # each the last one, changed
        model.model.norm.weight.data += 0.5
        model.save_pretrained(tmp_path / name)

    await load(engine, tmp_path / "one", 1)
    before = await ask(engine, [1, 2, 3], GREEDY)
    assert set(before[2]) == {1}
    with pytest.raises(EngineFault, match="serves version 1 again: RuntimeError: the network went away"):
        await load(engine, tmp_path / "torn", 2)
    assert await ask(engine, [1, 2, 3], GREEDY) == before and len(engines) == 1

    stopped = list_processes(engines[0])
    engines[0].server.patience = 20.0
    stream = engine.generate([1, 2, 3], Sampling(max_tokens=500), 1)
    await anext(stream)
    for process in stopped:
        process.suspend()
    with pytest.raises(EngineFault, match="has 1 requests and sent nothing for 20 s"):
        async for _ in stream:
            pass
    assert find_survivors(stopped) == []
    assert await ask(engine, [1, 2, 3], GREEDY) == before and len(engines) == 2

    killed = list_processes(engines[1])
    killed[-1].suspend()  # so that the load cannot be over before its end
    loading = asyncio.create_task(load(engine, tmp_path / "three", 3))
    while not engines[1]._traffic.is_holding:
        await asyncio.sleep(0.01)
    killed[-1].kill()
    assert await loading == 3 and len(engines) == 3, "the next server has the weights of the failed load"
    assert find_survivors(killed) == []
    assert set((await ask(engine, [1, 2, 3], GREEDY))[2]) == {3}

    last = list_processes(engines[2])
    await engine.close()
    assert find_survivors(last) == []
