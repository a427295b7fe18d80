"""A learner that torchrun starts on two machines: here two torchrun processes, over gloo and loopback.

NCCL and real machines are not tested.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import psutil
import pytest
from test_distributed import LORA, SETTINGS, STRATEGIES, close_to, same_as_one

from coderepairrl.errors import LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import remote, torchrun
from coderepairrl.learn.learner import LearnerService
from coderepairrl.learn.remote import SECRET, RemoteLearner
from coderepairrl.learn.trainer import Trainer
from coderepairrl.processes.children import ChildDied, encode_frame
from coderepairrl.runs import RunFolder
from learners import start_learner

TWO = SETTINGS.with_changes(processes=2)
CRRL = [sys.executable, "-m", "coderepairrl.cli"]


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(SECRET, "a secret for the tests")


@pytest.fixture
def listen():
    return free_address()


def start_torchrun(listen, meeting, log, restarts):
    """Start torchrun with one rank; both print to `log`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--local-addr=127.0.0.1"]
    command += [f"--max-restarts={restarts}", "-m", "coderepairrl.learn.torchrun", listen]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=sink, env=env)


def kill_rank(machine):
    (rank,) = psutil.Process(machine.pid).children()
    rank.kill()


async def wait_for_exit(machines):
    return [await asyncio.to_thread(machine.wait, 60) for machine in machines]


@contextmanager
def two_machines(listen, folder, restarts=0):
    folder.mkdir(exist_ok=True)
    meeting = free_address()
    with ExitStack() as started:
        machines = []
        for number in range(2):
            machines.append(start_torchrun(listen, meeting, folder / f"torchrun-{number}.log", restarts))
            started.callback(machines[-1].wait)
            started.callback(machines[-1].kill)
        yield machines


async def test_two_machines_do_what_one_process_does(listen, miniature, make_rows, tmp_path):
    """A killed rank is reported; torchrun starts all ranks again, and they continue from the checkpoint."""
    alone = Trainer(miniature, SETTINGS)
    with two_machines(listen, tmp_path / "logs", restarts=3) as machines:
        async with start_learner(miniature, tmp_path, TWO, listen=listen) as two:
            close_to(await two.step(make_rows([30, 12, 45, 8]), 8), alone.step(make_rows([30, 12, 45, 8]), 8))
            await two.save(tmp_path / "c")
            await two.restore(tmp_path / "c")
            expected = await two.step(make_rows([20, 30], 4))
            kill_rank(machines[1])
            with pytest.raises(
                LearnerFault, match=r"died during .*connection to the learner, process .* was lost"
            ) as lost:
                await two.step(make_rows([20, 30], 5))
            assert f"-m coderepairrl.learn.torchrun {listen}" in lost.value.fix and "--resume" in lost.value.fix
        async with start_learner(miniature, tmp_path, TWO, listen=listen) as again:
            assert await again.restore(tmp_path / "c") == 1
            assert await again.step(make_rows([20, 30], 4)) == expected  # bit for bit
        assert await wait_for_exit(machines) == [0, 0], "they end with the run"
    async with start_learner(miniature, tmp_path, SETTINGS) as one:  # another number of processes
        await one.restore(tmp_path / "c")
        close_to(await one.step(make_rows([20, 30], 4)), expected)


@pytest.mark.real
@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if "zero2" not in each.values])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all weights", marks=pytest.mark.by_hand),
        pytest.param({"lora": LORA, "beta": 0.1}, id="lora, KL"),
    ],
)
async def test_each_strategy_is_the_same_on_two_machines(strategy, options, listen, miniature, make_rows, tmp_path):
    with two_machines(listen, tmp_path / "logs"):
        await same_as_one(miniature, make_rows, tmp_path, TWO.with_changes(strategy=strategy, **options), listen=listen)


@pytest.mark.real
async def test_a_run_whose_rank_is_killed_ends_with_the_same_weights(listen, tmp_path):
    """Torchrun ends with its rank; the run waits until it is started again."""

    def command(name, *more):
        settings = [f"run.name={name}", f"run.dir={tmp_path}", "run.steps=3", "train.processes=2"]
        settings += ["eval.before=false", "eval.after=false", "rollout.tasks_per_step=2", "rollout.concurrency=4"]
        return [*CRRL, "train", "hello", *settings, *more]

    subprocess.run(command("local"), check=True, capture_output=True)
    metrics = tmp_path / "remote" / "metrics.jsonl"
    with (
        two_machines(listen, tmp_path / "first") as first,
        subprocess.Popen(
            command("remote", f"train.listen={listen}"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run,
    ):
        try:
            async with asyncio.timeout(280):
                while not (metrics.exists() and metrics.read_text()):
                    assert run.poll() is None, run.stdout.read()
                    await asyncio.sleep(0.2)
                kill_rank(first[1])
                assert await wait_for_exit(first) == [1, 1]
                with two_machines(listen, tmp_path / "second") as second:
                    output = (await asyncio.to_thread(run.communicate))[0]
                    assert await wait_for_exit(second) == [0, 0]
        finally:
            run.kill()
    assert run.returncode == 0, output
    assert "connection to the learner" in output and output.count("start it: TORCH_") == 2, output
    logs = (RunFolder(tmp_path / name).records() for name in ("local", "remote"))
    local, remote = ([record["checksum"] for record in log if record["type"] == "step"] for log in logs)
    assert len(local) == 3 and local == remote


# Connections, without torchrun


def make_hello(ranks=2, **other):
    machine = {"host": "there", "gpu": True, "versions": remote.read_learner_versions()}
    return remote.read_secret() + encode_frame({"pid": 7, "machines": [machine] * ranks} | other)


async def connect(listen, data):
    """Connect and send `data`."""
    host, port = remote.parse_address(listen)
    async with asyncio.timeout(10):
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                break
            except OSError:
                await asyncio.sleep(0.01)
    writer.write(data)
    return reader, writer


async def accept(listen, data, seconds=10.0):
    """Start a run that waits for learners, connect to it and send `data`."""
    waiting = asyncio.create_task(RemoteLearner.accept(listen, 2, seconds))
    return waiting, *await connect(listen, data)


async def test_requests_arrive_until_the_learner_is_dismissed(listen):
    waiting, reader, writer = await accept(listen, make_hello())
    run = await waiting
    assert "welcome" in await remote._receive(reader)
    assert run.pid == 7 and run.name == "7 on there"
    await run.send({"op": "step"})
    assert await remote._receive(reader) == {"op": "step"}
    writer.write(encode_frame({"ok": 1}))
    assert await run.receive() == {"ok": 1}
    called_off = asyncio.create_task(run.receive())
    await asyncio.sleep(0)
    ending = asyncio.create_task(run.dismiss())
    assert await remote._receive(reader) == {"exit": 0}
    writer.close()
    await ending
    with pytest.raises(ChildDied):
        await called_off
    await run.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(32) + encode_frame({"pid": 7, "machines": []}),
        b"\x00\x01\x00\x00" + b"[" * 65536,
        hashlib.sha256(b"a secret for the tests").digest() + encode_frame({"op": "step"}),
        hashlib.sha256(b"a secret for the tests").digest() + encode_frame([]),
    ],
)
async def test_strangers_are_rejected(greeting, listen):
    waiting, reader, writer = await accept(listen, greeting)
    writer.write_eof()
    answer = await reader.read()
    assert b"error" in answer and b"welcome" not in answer and remote.read_secret() not in answer
    writer.close()
    _, writer = await connect(listen, make_hello())
    run = await waiting
    writer.close()
    await run.close()


async def test_learners_that_do_not_fit_the_run_are_refused(listen):
    same = {"host": "there", "gpu": True, "versions": remote.read_learner_versions()}
    machines = [same | {"versions": same["versions"] | {"torch": "2.12.0"}}] * 2
    apart = [same, same | {"host": "here", "gpu": False}]
    for greeting, error, message in (
        (make_hello(machines=machines), PrerequisiteError, r"on there has different versions: torch 2.12.0 \(here"),
        (make_hello(machines=apart), PrerequisiteError, "on here sees no GPU"),
        (make_hello(3), UsageError, "started 3 learner processes, and train.processes=2"),
    ):
        waiting, reader, writer = await accept(listen, greeting)
        with pytest.raises(error, match=message) as caught:
            await waiting
        assert caught.value.fix and str(caught.value) in (await remote._receive(reader))["error"]
        writer.close()


async def test_waiting_for_a_learner_has_a_limit(listen):
    waiting, _, writer = await accept(listen, bytes(32), seconds=1.0)
    with pytest.raises(LearnerFault, match=f"no learner .* 1 s .* this run's {SECRET} was rejected") as caught:
        await waiting
    assert "torchrun" in caught.value.fix and "--resume" in caught.value.fix
    writer.close()


async def test_an_address_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listen = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"cannot listen at train.listen={listen}"):
            await RemoteLearner.accept(listen, 2, 1.0)


async def test_a_learner_with_another_secret_gives_up(listen, monkeypatch):
    waiting = asyncio.create_task(RemoteLearner.accept(listen, 2, 5.0))
    await asyncio.sleep(0.1)
    monkeypatch.setenv(SECRET, "a secret of another run")
    with pytest.raises(LearnerFault, match=f"crrl rejects this connection: wrong {SECRET}"):
        await asyncio.to_thread(torchrun._connect, listen, [])
    waiting.cancel()


def test_a_learner_without_a_run_gives_up(listen, monkeypatch):
    monkeypatch.setattr(torchrun, "_CONNECT_SECONDS", 0.0)
    with pytest.raises(LearnerFault, match=f"no run listens at {listen} within 0 s"):
        torchrun._connect(listen, [])


@pytest.mark.parametrize("text", ["", "10.0.0.1", "10.0.0.1:", ":80", "h:port", "h:70000", "0.0.0.0:80", "[::]:80"])
def test_invalid_addresses_are_refused(text):
    with pytest.raises(UsageError) as caught:
        remote.parse_address(text)
    assert caught.value.fix


def test_a_short_secret_is_refused_and_not_repeated(monkeypatch):
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(PrerequisiteError) as caught:
        remote.read_secret()
    assert "openssl rand" in caught.value.fix and "short" not in str(caught.value)


@pytest.mark.parametrize("change", ["missing", "other"])
async def test_each_machine_must_have_the_files(change, miniature, tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun, "gather_values", lambda value, group: [value])
    monkeypatch.setenv("LOCAL_RANK", "0")
    async with remote.digest_common_files([miniature], [tmp_path / "logs"]) as files:
        assert {path.rpartition("/")[2] for path in files} > {"config.json", "model.safetensors"} and len(files) == 3
        assert "error" in torchrun._serve_request(
            LearnerService(), {"op": "step", "files": files}, None
        )  # by the service
        path = next(path for path in files if path.endswith("safetensors"))
        mark = next((tmp_path / "logs").iterdir())
        if change == "missing":
            path = str(mark)
            mark.unlink()
        else:
            files[path] = "0" * 64
        reply = torchrun._serve_request(LearnerService(), {"op": "start", "files": files}, None)
    assert path in reply["error"] and reply["kind"] == "usage" and "engine.weights_dir" in reply["fix"]
    assert not list((tmp_path / "logs").iterdir())
