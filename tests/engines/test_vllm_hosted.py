"""A server that one process starts and several runs join: our side, with a script in vLLM's place.

It proves nothing about vLLM; `tests/e2e/test_study_shared.py` asks the real one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from coderepairrl.engines.scripted import Scripted
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.engines.vllm.hosted import Hosted
from coderepairrl.engines.vllm.places import claimed, version_at
from coderepairrl.errors import ConfigError, EngineFault, UsageError
from coderepairrl.rollout.supervise import SupervisedEngine
from coderepairrl.types import Sampling

from . import fake_vllm
from .conftest import ask
from .test_vllm import adapter, site
from .test_vllm_shared import TEN, numbered


@pytest.fixture
def spec(tmp_path: Path) -> Vllm:
    return Vllm(python=sys.executable, env=site(tmp_path / "site"), lora_rank=8, dtype="bfloat16")


async def shared(spec: Vllm, miniature: Path, folder: Path, said: list[str], runs: int = 2) -> Hosted:
    return await spec.share(
        miniature, runs=runs, train=True, address=folder / "server", log_dir=folder, restarts=1, say=said.append
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def hosted(spec: Vllm, miniature: Path, tmp_path: Path, said: list[str]) -> AsyncIterator[Hosted]:
    server = await shared(spec, miniature, tmp_path, said)
    yield server
    await server.close()


async def join(spec: Vllm, miniature: Path, folder: Path, name: str) -> VllmEngine:
    engine = await Vllm(**spec.joining(folder / "server")).start(miniature, log_dir=folder / name)
    assert isinstance(engine, VllmEngine)
    return engine


async def adapters(hosted: Hosted) -> list[str]:
    from coderepairrl.engines.vllm.link import Link

    return (await Link(hosted._server, 10.0).models())[1]


async def test_runs_join_it_by_its_socket(hosted: Hosted, spec: Vllm, miniature: Path, tmp_path: Path) -> None:
    assert version_at(f"unix:{tmp_path / 'server'}") == "0.32.0"
    started = psutil.Process(hosted._server.pid).cmdline()
    given = dict(pairwise(started))
    assert (given["--max-loras"], given["--max-cpu-loras"], given["--max-lora-rank"]) == ("4", "6", "8")
    one, two = [await join(spec, miniature, tmp_path, name) for name in ("one", "two")]
    await one.load(*numbered(adapter(tmp_path / "a"), 1))
    assert (await ask(one, [1], TEN))[2] == [1] * 10 and (await ask(two, [1], TEN))[2] == [0] * 10
    one._link.die("kill -9")
    await one.close()
    assert len(await adapters(hosted)) == 1
    await hosted.forget(tmp_path / "never" / "logs")
    assert not (tmp_path / "never").exists() and len(await adapters(hosted)) == 1
    await hosted.forget(tmp_path / "one")
    assert not await adapters(hosted)
    await two.close()
    await hosted._server.close()  # as while it is being replaced: what one run has left is no matter then
    await hosted.forget(tmp_path / "one")


async def test_a_run_outlives_its_death(
    hosted: Hosted, spec: Vllm, miniature: Path, tmp_path: Path, said: list[str]
) -> None:
    """One request is lost; the next ones wait for the server that is started anew."""

    async def again() -> VllmEngine:
        return await join(spec, miniature, tmp_path, "one")

    engine = SupervisedEngine(await again(), again, restarts=1)
    await engine.load(*numbered(adapter(tmp_path / "a"), 1))
    with pytest.raises(EngineFault):
        await ask(engine, [fake_vllm.DIE], TEN)
    assert (await ask(engine, [1], TEN))[2] == [1] * 10
    assert len(said) == 1 and "is started anew: vLLM 0.32.0 exited with 7" in said[0]
    with pytest.raises(EngineFault):
        await ask(engine, [fake_vllm.DIE], TEN)
    with pytest.raises(EngineFault, match=f"nobody listens at unix:{tmp_path / 'server'}") as gone:
        await ask(engine, [1], TEN)
    assert "crrl study" in gone.value.fix
    assert hosted.failure.startswith("the server that the runs share died 2 times in a row")
    await engine.close()


async def test_one_that_is_ill_is_replaced(
    hosted: Hosted, spec: Vllm, miniature: Path, tmp_path: Path, said: list[str]
) -> None:
    one = await join(spec, miniature, tmp_path, "one")
    with pytest.raises(EngineFault, match="EngineCore"):
        await ask(one, [fake_vllm.CORE], TEN)
    async with asyncio.timeout(20):
        while not said:
            await asyncio.sleep(0.1)
    two = await join(spec, miniature, tmp_path, "two")
    assert (await ask(two, [1], Sampling(max_tokens=3)))[2] == [0] * 3
    await asyncio.gather(one.close(), two.close())


async def test_two_processes_have_no_server_at_one_place(
    hosted: Hosted, spec: Vllm, miniature: Path, tmp_path: Path, said: list[str]
) -> None:
    assert claimed(f"unix:{tmp_path / 'server'}") and not claimed("http://127.0.0.1:1")
    with pytest.raises(UsageError, match="another process has a server at"):
        await shared(spec, miniature, tmp_path, said)


async def test_one_that_does_not_start_is_no_claim(
    spec: Vllm, miniature: Path, tmp_path: Path, said: list[str]
) -> None:
    dead = Vllm(python=spec.python, env=spec.env, lora_rank=8, dtype="bfloat16", args=["--fake", "die"])
    with pytest.raises(EngineFault, match="no memory for the keys"):
        await shared(dead, miniature, tmp_path, said)
    assert not claimed(f"unix:{tmp_path / 'server'}")


def test_what_nobody_can_share(tmp_path: Path) -> None:
    for engine, message in (
        (Vllm(url="http://a:1"), "joins a server, and one is to be started"),
        (Vllm(lora_rank=0), "sends full weights, which the other runs"),
        (Scripted(script={}), "engine 'scripted' has no server that several runs could join"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.joining(tmp_path)
    joining = Vllm(dtype="float32", slots=8, patience=9.0, max_loras=3).joining(Path("a/server"))
    assert joining == {"url": "unix:a/server", "shared": True, "slots": 8, "patience": 9.0}


HOLDER = """
import asyncio, sys
from pathlib import Path
from coderepairrl.engines.vllm import Vllm

async def main():
    model, folder, site = map(Path, sys.argv[1:])
    spec = Vllm(python=sys.executable, env={"PYTHONPATH": str(site)}, lora_rank=8, dtype="bfloat16")
    hosted = await spec.share(
        model, runs=1, train=True, address=folder / "server", log_dir=folder, restarts=1, say=print
    )
    print(hosted._server.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_it_ends_with_a_process_that_is_killed(spec: Vllm, miniature: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(miniature), str(tmp_path), spec.env["PYTHONPATH"]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        guard = psutil.Process(int(holder.stdout.readline()))
        family = [guard, *guard.children(recursive=True)]
        os.kill(holder.pid, signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    deadline = time.monotonic() + 5
    while claimed(f"unix:{tmp_path / 'server'}"):
        assert time.monotonic() < deadline
