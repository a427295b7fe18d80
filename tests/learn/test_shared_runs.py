"""Several runs on one learner: each has the bits of a learner of its own, and what befalls one is no other's."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch

from coderepairrl.config.sections.train import Lora
from coderepairrl.errors import LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import Learner, LearnSettings, rendezvous
from coderepairrl.learn.client import _packed
from coderepairrl.learn.conversions import merge, rounded
from coderepairrl.learn.shared_client import SharedClient
from coderepairrl.learn.shared_model import SharedModel
from coderepairrl.learn.shared_server import LearnerServer, hosted
from coderepairrl.learn.shared_worker import SharedWorker
from coderepairrl.learn.trainer import Trainer
from coderepairrl.processes.children import pack
from coderepairrl.processes.hosting import claim
from coderepairrl.types import Sample
from commands import CRRL

LENGTHS = [20, 9, 31]
ONE = LearnSettings(algorithm="grpo", lr=1e-2, lora=Lora(rank=4, alpha=8), seed=1)
OTHERS = {
    "another seed, rank, targets and KL term": ONE.but(seed=2, lora=Lora(rank=8, targets=("q_proj",)), beta=0.05),
    "all that wraps the model": ONE.but(gradient_checkpointing=True, micro_tokens=32, old_logprobs="recomputed"),
    "a value head": ONE.but(algorithm="ppo", value_head=True),
}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def parameters(trainer):
    return {name: p for name, p in trainer.policy.model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("form", ["float32", "bf16", "int8"])
def test_runs_by_turns_are_those_alone_bit_for_bit(name, form, miniature, make_rows, tmp_path):
    more = {"float32": {}, "bf16": {"precision": "bf16"}, "int8": {"quantise": "int8"}}[form]
    both, base = [each.but(**more) for each in (ONE, OTHERS[name])], SharedModel()
    shared = [Trainer(miniature, each, partial(base.acquire, str(at))) for at, each in enumerate(both)]
    found = [[trainer.step(make_rows(LENGTHS, seed)) for trainer in shared] for seed in range(3)]
    for at, settings in enumerate(both):
        alone = Trainer(miniature, settings)
        assert [alone.step(make_rows(LENGTHS, seed)) for seed in range(3)] == [each[at] for each in found]
        alone.save(tmp_path / "alone")
        shared[at].save(tmp_path / "shared")
        assert files(tmp_path / "alone") == files(tmp_path / "shared")
        assert shared[at].publish(tmp_path / "s")[1:] == alone.publish(tmp_path / "a")[1:]


def test_the_frozen_model_is_there_once_and_nobody_moves_it(miniature, make_rows):
    base = SharedModel()
    trainers = [Trainer(miniature, ONE.but(seed=seed), partial(base.acquire, str(seed))) for seed in range(3)]
    first, *others = map(parameters, trainers)
    before = {name: p.clone() for name, p in first.items()}
    for trainer in trainers:
        trainer.step(make_rows(LENGTHS))
    assert all(other[name] is p for name, p in first.items() for other in others)
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in first.items())
    own = [{p.data_ptr() for p in trainer.policy.parameters.values()} for trainer in trainers]
    assert not own[0] & own[1] and not own[1] & own[2]
    with pytest.raises(ValueError, match="stays on its device"):
        trainers[0].put_away()


def test_another_model_is_refused_while_others_train_on_the_first(miniature, tmp_path):
    base = SharedModel()
    provide = {name: partial(base.acquire, name) for name in "abc"}
    Trainer(miniature, ONE, provide["a"])
    with pytest.raises(UsageError, match="all weights are to be trained"):
        Trainer(miniature, ONE.but(lora=None), provide["b"])
    with pytest.raises(UsageError, match=r"float32 with .*=none, and this run's is bfloat16") as refused:
        Trainer(miniature, ONE.but(precision="bf16"), provide["b"])
    assert "crrl learner SOCKET --share" in refused.value.fix
    with pytest.raises(UsageError, match=r"quantise=int8"):
        Trainer(miniature, ONE.but(quantise="int8"), provide["b"])
    copied = shutil.copytree(miniature, tmp_path / "copied")
    Trainer(copied, ONE, provide["b"])  # the same weights at another place
    base.release("b")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    with pytest.raises(UsageError, match=r"different config\.json"):
        Trainer(copied, ONE, provide["b"])
    other = tmp_path / "other"
    rounded(miniature, other, "int8", "fp32")
    with pytest.raises(UsageError, match="different weights"):
        Trainer(other, ONE, provide["b"])
    base.release("a")
    Trainer(other, ONE, provide["b"])  # nobody has the first any more


def test_what_runs_make_of_the_same_weights_is_one_model(miniature, make_rows, tmp_path):
    """Each writes out what it begins with: adapters that are merged, then in 8 bits."""
    trainer, base = Trainer(miniature, ONE), SharedModel()
    trainer.step(make_rows(LENGTHS))
    trainer.save(tmp_path / "adapter")
    for run in "ab":
        merge(miniature, tmp_path / "adapter", tmp_path / f"merged-{run}", "fp32")
        rounded(tmp_path / f"merged-{run}", tmp_path / run, "int8", "fp32")
    for run in "ab":
        Trainer(tmp_path / run, ONE.but(quantise="int8"), partial(base.acquire, run))
    assert base._users == {*"ab"}


def test_what_ends_a_process_of_its_own_ends_one_runs_part(miniature, make_rows, monkeypatch):
    shared = SharedWorker()

    def ask(run, op, **arguments):
        return shared.answer({"op": op, "run": run, **arguments})

    rows = _packed(make_rows(LENGTHS))
    for run in "ab":
        assert "ok" in ask(run, "start", model=str(miniature), settings=ONE.model_dump(), gpu=False)
    step = Trainer.step

    def hungry(trainer, *arguments, **of):
        if trainer is shared._services["b"]._trainer:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return step(trainer, *arguments, **of)

    monkeypatch.setattr(Trainer, "step", hungry)
    assert "OutOfMemoryError: CUDA out of memory" in ask("b", "step", samples=rows, episodes=None, tokens=None)["died"]
    assert "no operation '_step'" in ask("b", "_step")["error"]
    assert "no model yet" in ask("b", "publish", folder="", form="adapter")["error"]
    assert ask("a", "step", samples=rows, episodes=None, tokens=None)["version"] == 1
    monkeypatch.setattr(
        shared._services["a"], "answer", lambda _: (_ for _ in ()).throw(torch.AcceleratorError("gone"))
    )
    with pytest.raises(torch.AcceleratorError):  # the device's state is lost, and with it everybody's
        ask("a", "publish", folder="", form="adapter")


class Server:
    """``crrl learner SOCKET --share``, a process."""

    def __init__(self, folder: Path) -> None:
        self.socket, self.folder = folder / "learner.sock", folder
        self.process = self.start()
        deadline = time.monotonic() + 60
        while "share this learner" not in self.said():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def start(self) -> subprocess.Popen[bytes]:
        command = [*CRRL, "learner", str(self.socket), "--share"]
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen([*command, "--logs", str(self.folder / "logs")], stdout=said, stderr=said)

    def said(self) -> str:
        return (self.folder / "said").read_text()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.said():
                await asyncio.sleep(0.05)

    @property
    def child(self) -> int:
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def shared(tmp_path):
    running = Server(tmp_path)
    yield running
    running.close()


@contextlib.asynccontextmanager
async def joined(model, tmp_path, settings=ONE, run="a", patience=300.0):
    how = {"log_dir": tmp_path / "none", "publish_dir": tmp_path / run, "patience": patience}
    running = await Learner.start(model, settings, shared=tmp_path / "learner.sock", run=run, **how)
    try:
        yield running
    finally:
        await running.close()


async def test_runs_through_one_process_and_a_resume_give_the_bits_of_learners_of_their_own(
    miniature, make_rows, tmp_path, shared
):
    settings = {"a": ONE, "b": OTHERS["another seed, rank, targets and KL term"], "c": ONE.but(seed=3)}

    async def run(name):
        """Two steps, a checkpoint, and another one in a learner that goes on from it."""
        rows = [make_rows(LENGTHS, seed) for seed in range(3)]
        async with joined(miniature, tmp_path, settings[name], name) as one:
            metrics = [await one.step(rows[0]), await one.step(rows[1])]
            await one.save(tmp_path / "shared" / name)
        async with joined(miniature, tmp_path, settings[name], name) as again:
            assert await again.restore(tmp_path / "shared" / name) == 2
            metrics.append(await again.step(rows[2]))
            return metrics, (await again.publish("adapter")).checksum

    found = await asyncio.gather(*map(run, settings))
    for (name, each), (metrics, checksum) in zip(settings.items(), found, strict=True):
        alone = Trainer(miniature, each)
        assert [alone.step(make_rows(LENGTHS, seed)) for seed in range(2)] == metrics[:2]
        alone.save(tmp_path / "alone")
        assert files(tmp_path / "alone") == files(tmp_path / "shared" / name)
        assert alone.step(make_rows(LENGTHS, 2)) == metrics[2]
        assert alone.publish(tmp_path / "published", "adapter")[2] == checksum
    assert not (tmp_path / "none").exists()
    assert shared.said().count("has joined") == shared.said().count("has left") == 6


async def test_a_run_that_is_killed_in_the_middle_of_a_step_leaves_the_others_as_they_are(
    miniature, make_rows, tmp_path, shared
):
    rows, code = (
        make_rows(LENGTHS),
        (
            "import asyncio, sys; from pathlib import Path; sys.path[:0] = sys.argv[1], sys.argv[2];"
            "from test_shared_runs import ONE, doomed; asyncio.run(doomed(*map(Path, sys.argv[3:])))"
        ),
    )
    async with joined(miniature, tmp_path) as one:
        first = await one.step(rows)
        command = [sys.executable, "-c", code, *map(str, Path(__file__).parents[:2]), str(miniature), str(tmp_path)]
        victim = subprocess.Popen(command)
        await shared.until("victim has joined")
        async with asyncio.timeout(60):
            while not (tmp_path / "victim" / "v000001").exists():
                await asyncio.sleep(0.02)
        victim.kill()
        victim.wait()
        assert await one.step(rows) and one.version == 2
        await shared.until("victim has left")
        checksum = (await one.publish("adapter")).checksum
    alone = Trainer(miniature, ONE)
    assert alone.step(rows) == first and alone.step(rows)
    assert alone.publish(tmp_path / "alone", "adapter")[2] == checksum


async def doomed(model, tmp_path):
    """Steps for ever, in a process of its own."""
    rows = [Sample("e", (1, 2, 3) * 50, (False, *[True] * 149), (0.0, *[-5.0] * 149), (-1, *[0] * 149), 1.0)]
    async with joined(model, tmp_path, ONE.but(seed=9), "victim") as one:
        await one.step(rows)
        await one.publish("adapter")
        while True:
            await one.step(rows)


async def test_a_process_that_dies_is_a_fault_of_every_run_and_the_next_start_has_another(
    miniature, make_rows, tmp_path, shared
):
    rows = make_rows(LENGTHS)
    async with joined(miniature, tmp_path) as one, joined(miniature, tmp_path, run="b") as two:
        os.kill(shared.child, signal.SIGSTOP)
        step = asyncio.create_task(one.step(rows))
        await asyncio.sleep(0.3)
        os.kill(shared.child, signal.SIGKILL)
        with pytest.raises(LearnerFault, match=r"during step of a: process \d+ killed by SIGKILL"):
            await step
        with pytest.raises(LearnerFault, match="during step of a"):
            await two.step(rows)
        async with joined(miniature, tmp_path, run="b") as again:
            os.kill(child := shared.child, signal.SIGKILL)
            await dead(child)
            async with joined(miniature, tmp_path, run="c") as third:  # though it died while nobody asked
                assert (await third.step(rows))["rows"] == 3
            with pytest.raises(LearnerFault, match="while nobody asked anything of it"):
                await again.step(rows)


async def test_a_request_that_hangs_ends_by_the_patience_of_its_run_whoever_waits(
    miniature, make_rows, tmp_path, shared
):
    rows = make_rows(LENGTHS)
    async with joined(miniature, tmp_path, run="b") as two, joined(miniature, tmp_path, patience=4.0) as one:
        os.kill(shared.child, signal.SIGSTOP)
        first, second = asyncio.create_task(one.step(rows)), asyncio.create_task(two.step(rows))
        with pytest.raises(LearnerFault, match=r"step of a took longer than its train.patience, 4 s: it was stopped"):
            await first
        with pytest.raises(LearnerFault, match="step of a took longer"):
            await second


async def dead(pid):
    async with asyncio.timeout(10):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


async def test_a_killed_host_is_a_fault_with_what_to_do_and_starts_again_where_it_was(
    miniature, make_rows, tmp_path, shared
):
    rows = make_rows(LENGTHS)
    async with joined(miniature, tmp_path) as one:
        await one.save(tmp_path / "checkpoint")
        child = shared.child
        shared.close()
        with pytest.raises(LearnerFault, match="is gone") as gone:
            await one.step(rows)
        assert f"crrl learner {shared.socket} --share" in gone.value.fix and "--resume" in gone.value.fix
    await dead(child)
    with pytest.raises(LearnerFault, match="no learner listens at train.learner=.*Connection refused"):
        async with joined(miniature, tmp_path):
            pass
    again = Server(tmp_path)  # over the socket that is left
    try:
        assert stat.S_IMODE(shared.socket.stat().st_mode) == 0o600
        async with joined(miniature, tmp_path) as one:
            assert await one.restore(tmp_path / "checkpoint") == 0
            assert (await one.step(rows))["rows"] == 3
        command = [*CRRL, "learner", str(shared.socket), "--share"]
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == 2 and "another process has a learner at" in second.stderr
        (tmp_path / "file").touch()
        third = subprocess.run([*CRRL, "learner", str(tmp_path / "file"), "--share"], capture_output=True, text=True)
        assert third.returncode == 2 and "file is no socket" in third.stderr and (tmp_path / "file").exists()
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(30) == 0
        assert not shared.socket.exists()
    finally:
        again.close()


async def test_memory_that_is_not_there_is_the_fault_of_the_run_that_asked(miniature, make_rows, tmp_path, shared):
    """With a limit on the process, as a real allocation fails."""
    small, large = make_rows(LENGTHS), make_rows([30_000])
    async with joined(miniature, tmp_path) as one, joined(miniature, tmp_path, ONE.but(seed=2), "b") as two:
        await one.step(small)
        await two.step(small)
        status = Path(f"/proc/{shared.child}/status").read_text()
        taken = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmSize"))
        resource.prlimit(shared.child, resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))
        with pytest.raises(LearnerFault, match="can't allocate memory"):
            await two.step(large)
        with pytest.raises(LearnerFault, match="no model yet"):
            await two.step(small)
        await one.step(small)
        checksum = (await one.publish("adapter")).checksum
    alone = Trainer(miniature, ONE)
    alone.step(small), alone.step(small)
    assert alone.publish(tmp_path / "alone", "adapter")[2] == checksum


async def test_who_is_no_run_or_has_other_versions_disturbs_nobody(miniature, make_rows, tmp_path, shared, monkeypatch):
    async with joined(miniature, tmp_path) as one:
        for said in (b"GET / HTTP/1.1\r\n\r\n", pack({"run": "b"}), b"\0\0\0\3[1]", b""):
            stranger(shared.socket, said)
        with monkeypatch.context() as other:
            other.setattr(rendezvous, "versions", lambda: {"torch": "1.0"})
            with pytest.raises(PrerequisiteError, match=r"torch 1\.0 \(there"):
                await SharedClient.connect(shared.socket, "old", 60.0)
        with monkeypatch.context() as other:
            other.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(UsageError, match="is of another user"):
                await SharedClient.connect(shared.socket, "theirs", 60.0)
        assert (await one.step(make_rows(LENGTHS)))["rows"] == 3


def stranger(path, *said):
    """Who waits for an answer between two things that it says, and goes away after the last one."""
    with socket.socket(socket.AF_UNIX) as each:
        each.connect(str(path))
        for number, part in enumerate(said):
            assert not number or each.recv(1 << 16)
            each.sendall(part)


async def test_a_run_that_breaks_off_or_keeps_to_no_protocol_is_alone_with_that(miniature, make_rows, tmp_path, shared):
    """Of the same name as another one that goes on."""
    rows = make_rows(LENGTHS)
    start = pack({"op": "start", "model": str(miniature), "settings": ONE.model_dump(), "gpu": False})
    greeting = pack({"run": "a", "patience": 60.0, "versions": rendezvous.versions()})
    async with joined(miniature, tmp_path) as one:
        await one.step(rows)
        for said in (
            start[: len(start) // 2],  # killed in the middle of a message
            start + pack({"op": "step"}),  # without waiting for its turn
            start,  # killed while it waits
            pack({"no": "op"}),
            pack({"op": ["step"]}),
            pack({"op": "no such"}),
            pack({"op": "step", "more": 1}),
            pack({"op": "leave"}),
            b"\0\0\0\4{" + b"}" * 3,
        ):
            stranger(shared.socket, greeting, said)
        async with joined(miniature, tmp_path) as same:
            assert await same.step(rows) and await one.step(rows)
            assert (same.version, one.version) == (1, 2)
        await shared.until("a connection is closed: ValueError('a request without a name')")
        async with asyncio.timeout(60):
            while shared.said().count("a has left") < 10:
                await asyncio.sleep(0.05)
        assert await one.step(rows) and "process that several runs share ended" not in shared.said()
        checksum = (await one.publish("adapter")).checksum
    alone = Trainer(miniature, ONE)
    for _ in range(3):
        alone.step(rows)
    assert alone.publish(tmp_path / "alone", "adapter")[2] == checksum


def test_a_run_that_leaves_leaves_nothing(miniature, make_rows):
    """Neither its adapters, nor its optimiser, nor modules that refer to both; a failed start neither."""
    worker = SharedWorker()
    rows = _packed(make_rows(LENGTHS))
    settings = ONE.but(gradient_checkpointing=True, value_head=True, algorithm="ppo")
    for run, told in (("a", settings), ("b", settings), ("c", ONE.but(lora=Lora(targets=("no_such",))))):
        worker.answer({"op": "start", "run": run, "model": str(miniature), "settings": told.model_dump(), "gpu": False})
    for run in "ab":
        assert "ok" in worker.answer({"op": "step", "run": run, "samples": rows, "episodes": None, "tokens": None})

    def kept():
        gc.collect()
        return sum(type(each) is torch.nn.Parameter and each.requires_grad for each in gc.get_objects())

    before = kept()
    one = len(worker._services["a"]._trainer.policy.parameters)
    for run in "abc":
        worker.answer({"op": "leave", "run": run})
    assert before - kept() >= 2 * one and not worker._services and not worker.model._users


class Counting(LearnerServer):
    """Takes a moment for each request, and has no process."""

    def __init__(self, log_dir):
        super().__init__(log_dir, say=print)
        self.order = []

    async def _worker(self):
        return None

    async def _forward(self, client, frame, patience):
        await asyncio.sleep(0.01)
        self.order.append(client.name)
        return {"ok": None, "version": 0}


@pytest.fixture
def temporary(monkeypatch):
    """Of a short name, as sockets have it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


async def test_runs_take_turns_and_an_address_may_be_long(tmp_path, temporary):
    address = tmp_path / ("x" * 120) / "learner"
    server = Counting(tmp_path)

    async def ask(run, times):
        client = await SharedClient.connect(address, run, 60.0)
        for _ in range(times):
            await client.send({"op": "step"})
            await client.receive()
        await client.close()

    async with hosted(server, address):
        eager = [asyncio.create_task(ask(name, 15)) for name in "ab"]
        while len(server.order) < 6:
            await asyncio.sleep(0.01)
        began = len(server.order)
        await ask("c", 5)
        mine = [at for at, name in enumerate(server.order[began:]) if name == "c"]
        assert max(b - a for a, b in pairwise([0, *mine])) <= 4
        await asyncio.gather(*eager)
        with pytest.raises(UsageError, match="another process has a learner at"):
            async with hosted(server, address):
                pass
    assert not os.path.lexists(address) and not [*temporary.iterdir()]
    address.mkdir()
    with pytest.raises(UsageError, match="cannot make"):
        async with hosted(server, address):
            pass


async def test_a_process_that_dies_again_and_again_is_given_up(miniature, tmp_path, monkeypatch):
    monkeypatch.setattr("coderepairrl.learn.shared_server.MODULE", "coderepairrl.no_such_module")
    said: list[str] = []
    server = LearnerServer(tmp_path, say=said.append, restarts=1)
    async with hosted(server, tmp_path / "learner.sock"):
        for _ in range(2):
            with pytest.raises(LearnerFault, match="No module named"):
                async with joined(miniature, tmp_path):
                    pass
        assert server.failure.startswith("the learner that the runs share died 2 times in a row")
        with pytest.raises(LearnerFault, match="died 2 times in a row") as given_up:
            async with joined(miniature, tmp_path):
                pass
    assert str(tmp_path / "learner.log") in given_up.value.fix and said[-1] == server.failure


def test_a_lock_is_no_way_to_files_of_ours(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / "learner.sock.lock").symlink_to(mine)
    with pytest.raises(UsageError, match="cannot lock"):
        claim(tmp_path / "learner.sock", "learner", "")
    assert mine.read_text() == "precious"


def test_the_servers_side_loads_no_torch():
    code = "import sys, coderepairrl.learn.shared_server; print({'torch', 'transformers', 'numpy'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
