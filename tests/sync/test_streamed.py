"""Weights without a file, over real gloo: all values arrive, and a broken transfer changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from coderepairrl.config import load_config
from coderepairrl.config.schema import Lora
from coderepairrl.engines import make_engine
from coderepairrl.engines.scripted import ScriptedEngine
from coderepairrl.errors import ConfigError, EngineFault, LearnerFault
from coderepairrl.learn import LearnSettings
from coderepairrl.plan.devices import check_route
from coderepairrl.sync import weights, wire
from coderepairrl.sync.weights import StreamedEngine
from coderepairrl.types import Sample
from learners import start_learner

torch.set_num_threads(1)
WAIT = 280.0
"""Seconds; longer than any transfer here."""


class Receiver(ScriptedEngine):
    """An engine that only receives weights, once at each of its `workers`."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__([])
        self.workers = workers
        self.weights: list[dict[str, torch.Tensor]] = []
        self.refuses = ""

    async def receivers(self) -> tuple[int, float]:
        return self.workers, WAIT

    async def load(self, path: Path, version: int, checksum: str) -> int:
        if self.refuses:
            raise EngineFault(self.refuses)
        ranks = range(1, self.workers + 1)
        arriving = [asyncio.to_thread(wire.receive, path / weights.OFFER, rank, self.workers, WAIT) for rank in ranks]
        try:
            arrived = await asyncio.gather(*arriving)
        except (wire.TransferError, ValueError) as error:
            raise EngineFault(f"did not arrive: {error}") from error
        if {digest for _, digest in arrived} != {checksum}:
            raise EngineFault("another checksum")
        self.weights = [tensors for tensors, _ in arrived]
        return version


def rows() -> list[Sample]:
    ids, on = tuple(range(20)), (False,) + (True,) * 19
    old, versions = (0.0,) + (-5.0,) * 19, (-1,) + (0,) * 19
    return [Sample(f"e{sign}", ids, on, old, versions, advantage=sign) for sign in (1.0, -1.0)]


PLAIN = LearnSettings(algorithm="grpo", lr=1e-2)


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        (PLAIN, 2),
        pytest.param(
            LearnSettings(algorithm="grpo", lr=1e-2, lora=Lora(rank=4, alpha=8), precision="bf16"),
            1,
            marks=pytest.mark.real,
        ),
        pytest.param(
            LearnSettings(algorithm="grpo", lr=1e-2, processes=2, strategy="fsdp2"), 1, marks=pytest.mark.real
        ),
    ],
    ids=["full", "merged", "fsdp2"],
)
async def test_streamed_weights_equal_those_in_a_file(
    settings: LearnSettings, workers: int, miniature: Path, tmp_path: Path
) -> None:
    receiver = Receiver(workers)
    async with start_learner(miniature, tmp_path, settings) as trained:
        engine = StreamedEngine(receiver, trained.send)
        for version in (1, 2):
            await trained.step(rows())
            offer = await trained.offer("gloo")
            assert not list(offer.path.glob("*.safetensors"))
            assert await engine.load(*offer) == version
            assert await engine.load(*offer) == version, "an engine that was restarted asks again"
            file = (await trained.publish()).path / "model.safetensors"
            truth = load_file(file)
            for arrived in receiver.weights:
                assert arrived.keys() == truth.keys()
                assert all(torch.equal(arrived[name], value) for name, value in truth.items())
            listed = wire.combine_digests(wire.DescribedTensor(name, value) for name, value in truth.items())
            assert listed == offer.checksum


async def test_a_failed_load_leaves_learner_and_engine_as_they_were(miniature: Path, tmp_path: Path) -> None:
    receiver = Receiver()
    async with start_learner(miniature, tmp_path, PLAIN) as trained:
        engine = StreamedEngine(receiver, trained.send)
        await trained.step(rows())
        first = await trained.offer("gloo")
        await engine.load(*first)
        before = receiver.weights
        with pytest.raises(EngineFault, match="another checksum"):
            await engine.load(first.path, 1, "0" * 64)
        receiver.refuses = "another model"  # the learner does not wait for it
        with pytest.raises(EngineFault, match="another model"):
            await engine.load(*first)
        receiver.refuses = ""
        await trained.step(rows())
        with pytest.raises(LearnerFault, match="version 1 were offered, and the learner is at 2"):
            await engine.load(*first)
        assert receiver.weights is before
        assert await engine.load(*await trained.offer("gloo")) == 2
        file = await trained.publish()  # a file is still a file
        with pytest.raises(FileNotFoundError):
            await engine.load(*file)


async def test_the_error_says_why_the_learner_stopped_sending(tmp_path: Path) -> None:
    async def full(offer: Path, version: int, receivers: int, seconds: float) -> str:
        return "there is no more room"

    make_offer(tmp_path)
    with pytest.raises(EngineFault, match="did not arrive: .*; the learner stopped sending: there is no more room"):
        await StreamedEngine(Receiver(), full).load(tmp_path, 1, "")


async def test_a_learner_that_dies_before_it_sends_is_a_fault(miniature: Path, tmp_path: Path) -> None:
    receiver = Receiver()
    async with start_learner(miniature, tmp_path, PLAIN) as trained:
        offer = await trained.offer("gloo")
        trained._children[0].process.kill()
        with pytest.raises(LearnerFault, match="died during send"):
            await StreamedEngine(receiver, trained.send).load(*offer)
        assert receiver.weights == []


BIG = 3 << 20
"""Numbers in a tensor: more than a socket buffers."""
END = f"""
import os, signal, sys
from pathlib import Path
import torch
from coderepairrl.sync import weights, wire

torch.set_num_threads(1)
folder, end = Path(sys.argv[1]), sys.argv[2]
def tensors():
    for n in range(4):
        if n == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield f"w{{n}}", torch.full(({BIG},), float(n))
broadcast, seen = wire.TransferGroup.broadcast, []
def dying(self, tensor):
    seen.append(broadcast(self, tensor))
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
if end == "sender":
    wire.send(folder / weights.OFFER, tensors(), 1, {WAIT})
else:
    wire.TransferGroup.broadcast = dying
    wire.receive(folder / weights.OFFER, 1, 1, {WAIT})
"""


def make_offer(folder: Path, values: Sequence[float] = (0.0, 1.0, 2.0, 3.0)) -> list[tuple[str, torch.Tensor]]:
    tensors = [(f"w{n}", torch.full((BIG,), value)) for n, value in enumerate(values)]
    described = [wire.DescribedTensor(*each) for each in tensors]
    wire.write_offer(folder / weights.OFFER, "gloo", described, called_off=weights.CALLED_OFF)
    return tensors


def test_a_process_that_dies_half_way_is_noticed_by_the_other(tmp_path: Path) -> None:
    for end in ("sender", "receiver"):
        folder = tmp_path / end
        folder.mkdir()
        tensors = iter(make_offer(folder))
        process = subprocess.Popen([sys.executable, "-c", END, str(folder), end])
        with pytest.raises(wire.TransferError, match="the transfer broke"):
            if end == "sender":
                wire.receive(folder / weights.OFFER, 1, 1, WAIT)
            else:
                wire.send(folder / weights.OFFER, tensors, 1, WAIT)
        assert end == "sender" or list(tensors) == [], "all processes of a learner draw to the end"
        assert process.wait() == -signal.SIGKILL
        left = {file.name for file in folder.iterdir()}
        assert left <= {weights.OFFER, "meet-store", "meet-ready-1", "meet-go"}


async def send_and_receive(folder: Path, tensors: list[tuple[str, torch.Tensor]]) -> list[Any]:
    sending = asyncio.to_thread(wire.send, folder / weights.OFFER, iter(tensors), 1, WAIT)
    receiving = asyncio.to_thread(wire.receive, folder / weights.OFFER, 1, 1, WAIT)
    return await asyncio.gather(sending, receiving, return_exceptions=True)


async def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    _, received = await send_and_receive(tmp_path, make_offer(tmp_path, [0.0, float("nan"), 1.0]))
    assert isinstance(received, ValueError) and "w1 has values that are not finite" in str(received)


async def test_tensors_other_than_offered_are_not_sent(tmp_path: Path) -> None:
    tensors = make_offer(tmp_path)
    sent, received = await send_and_receive(tmp_path, [tensors[0], ("w2", tensors[2][1]), *tensors[2:]])
    assert isinstance(sent, ValueError) and "w2 is sent where w1 was offered" in str(sent)
    assert isinstance(received, wire.TransferError)


def test_waiting_for_the_other_end_has_a_limit(tmp_path: Path) -> None:
    make_offer(tmp_path)
    with pytest.raises(wire.TransferError, match="did not connect within"):
        wire.send(tmp_path / weights.OFFER, iter([]), 1, 0.0)
    with pytest.raises(wire.TransferError, match="did not connect within"):
        wire.receive(tmp_path / weights.OFFER, 1, 1, 0.0)


SIZES = st.sampled_from([1, 2, 3, 7, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16, (5 << 16) + 3])


@given(SIZES, st.sampled_from(list(wire.DTYPES.values())), st.data())
def test_a_digest_sees_every_change(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = wire.digest_tensor(tensor)
    assert before == wire.digest_tensor(tensor.clone().view(1, -1).t()), "the shape does not matter"
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    changed = tensor.clone()
    changed.view(torch.int16)[one * tensor.element_size() // 2] += 1
    assert wire.digest_tensor(changed) != before
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    assert (wire.digest_tensor(swapped) == before) == torch.equal(swapped, tensor)


def test_an_offer_lists_sizes_and_shapes(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.zeros(n, 3, dtype=dtype) for n, dtype in enumerate(wire.DTYPES.values())}
    described = [wire.DescribedTensor(*each) for each in tensors.items()]
    wire.write_offer(tmp_path / weights.OFFER, "gloo", described, called_off=weights.CALLED_OFF)
    assert weights.count_bytes(tmp_path) == sum(tensor.nbytes for tensor in tensors.values())
    assert {name: each.shape for name, each in weights.read_headers(tmp_path).items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


def check(*overrides: str) -> None:
    config = load_config("hello", overrides)
    check_route(config, make_engine(config.engine.name, **config.engine.options))


def test_routes_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = ("engine=vllm", "engine.weights=nccl")
    adapters = ("engine=vllm", "engine.weights=gloo", "train.lora=true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for overrides in ((), nccl, (*adapters, "engine.options={lora_rank=0}")):
        check(*overrides)
    with pytest.raises(ConfigError, match="takes weights as files only"):
        check("engine.weights=gloo")
    with pytest.raises(ConfigError, match="adapters are sent"):
        check(*adapters)
    with pytest.raises(ConfigError, match="a GPU for each"):
        check(*nccl, "engine.share_devices=true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="there is none here"):
        check(*nccl)


def test_a_step_of_nccl_raises_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads how from the environment, which stays as it was for the groups of a learner and of vLLM."""
    seen: list[tuple[str, timedelta]] = []

    class Group:
        class Options:
            _timeout = timedelta()

        def __init__(self, store: object, rank: int, ranks: int, options: Options) -> None:
            seen.append((os.environ["TORCH_NCCL_BLOCKING_WAIT"], options._timeout))

    monkeypatch.setattr(wire.dist, "ProcessGroupNCCL", Group, raising=False)
    for before in (None, "0"):
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        wire._make_nccl_group(object(), 0, 2, timedelta(seconds=7))
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert seen == [("1", timedelta(seconds=7))] * 2


async def test_processes_leave_nccl_together_unless_one_failed(tmp_path: Path) -> None:
    """Memory that one frees another may still read; a process that failed keeps none waiting."""

    def end(rank: int, name: str, seconds: float = WAIT) -> wire.TransferGroup:
        store = wire.dist.FileStore(str(tmp_path / name), 2)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=seconds))
        group = object.__new__(wire.TransferGroup)
        group._place = rank, 2, store
        return group

    for name, failed in (("well", False), ("failed", True)):
        waiting = asyncio.create_task(asyncio.to_thread(end(0, name)._wait_until_done, failed=False))
        await asyncio.to_thread(end(1, name)._wait_until_done, failed=failed)
        await waiting
    with pytest.raises(wire.TransferError, match="the processes did not disconnect"):
        end(0, "alone", seconds=0.1)._wait_until_done(failed=False)
