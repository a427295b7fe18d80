"""A learner on two nodes: network namespaces of this machine, the second of which sees none of the first one's files.

Over gloo: that it works over NCCL is not shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import pytest
from test_distributed import LORA, SETTINGS, STRATEGIES, close_to, learner, same_as_one

from coderepairrl.errors import LearnerFault, PrerequisiteError, UsageError
from coderepairrl.learn import NodePool, node, rendezvous
from coderepairrl.learn.node_pool import RemoteNode
from coderepairrl.learn.rendezvous import KEY, Address
from coderepairrl.learn.trainer import Trainer
from coderepairrl.processes.children import pack

TWO = SETTINGS.but(processes=2)
_NETWORKS = count(os.getpid() % 200)


class Far:
    """A network namespace, and ours beside it."""

    def __init__(self) -> None:
        self.name = f"crrl{secrets.token_hex(3)}"
        net = f"10.{os.getpid() % 250}.{next(_NETWORKS) % 250}"  # workers of one run have other numbers
        self.address = Address(f"{net}.1", 29400)
        ours, theirs = f"{self.name}a", f"{self.name}b"
        self._run("netns", "add", self.name)
        try:
            self._run("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", self.name)
            self._run("addr", "add", f"{net}.1/24", "dev", ours)
            self._run("link", "set", ours, "up")
            for words in (f"addr add {net}.2/24 dev {theirs}", f"link set {theirs} up", "link set lo up"):
                self._run("-n", self.name, *words.split())
        except BaseException:
            self.close()
            raise

    def _run(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr}")

    def unplug(self) -> None:
        self._run("link", "set", f"{self.name}a", "down")

    def close(self) -> None:
        self._run("netns", "del", self.name)

    def start(self, hidden: list[Path], log: Path, *more: str) -> subprocess.Popen[bytes]:
        """``crrl learner`` there, which sees nothing in the folders `hidden`."""
        command = [sys.executable, "-m", "coderepairrl.cli", "learner", str(self.address), "--node", "1", *more]
        hide = " && ".join(f"mount -t tmpfs none {folder}" for folder in hidden)
        with log.open("ab") as sink:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "-", *command],
                stdout=sink,
                stderr=sink,
                cwd="/tmp",
            )


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setenv(KEY, "a key for the tests of nodes")
    try:
        network = Far()
    except OSError as error:
        if os.environ.get("CI") and os.geteuid() == 0:
            raise
        pytest.skip(f"no network namespace can be made here: {error}")
    yield network
    network.close()


@contextlib.asynccontextmanager
async def two_nodes(far, hidden, log, seconds=120.0):
    """The controller's end, and the process of the other node."""
    nodes = await NodePool.open(far.address, 2, rendezvous.key(), seconds)
    started = far.start(hidden, log, "--logs", str(log.parent / "far-logs"))
    try:
        yield nodes, started
    finally:
        await nodes.close()
        try:
            await asyncio.to_thread(started.wait, 30)
        finally:
            started.kill()
            started.wait()


@pytest.fixture
def hidden(miniature, tmp_path):
    return [miniature, tmp_path]


@pytest.fixture
def log():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "node.log")


async def test_two_nodes_do_what_one_process_does(far, hidden, log, miniature, make_rows, tmp_path):
    """And one that is gone is named, comes again, and goes on from the checkpoint, as does a single process."""
    alone = Trainer(miniature, SETTINGS)
    async with two_nodes(far, hidden, log) as (nodes, first):
        async with learner(miniature, tmp_path, TWO, nodes) as two:
            rows = make_rows([30, 12, 45, 8])
            close_to(await two.step(rows, 8), alone.step(rows, 8))
            await two.save(tmp_path / "c")
            await two.restore(tmp_path / "c")
            expected = await two.step(make_rows([20, 30], 4))
            first.kill()
            with pytest.raises(LearnerFault, match=r"(?s)died during .*node 1 \(.*\) left the run"):
                await two.step(make_rows([20, 30], 5))
        second = far.start(hidden, log)
        async with learner(miniature, tmp_path, TWO, nodes) as again:
            assert await again.restore(tmp_path / "c") == 1
            assert await again.step(make_rows([20, 30], 4)) == expected  # bit for bit
            copies = list(Path(tempfile.gettempdir()).glob("crrl-broadcast-*"))
            assert not copies
        async with learner(miniature, tmp_path, SETTINGS) as one:  # another number of processes
            await one.restore(tmp_path / "c")
            close_to(await one.step(make_rows([20, 30], 4)), expected)
    assert await asyncio.to_thread(second.wait, 30) == 0, "it ends with the run"
    assert "with the run at" in log.read_text()


@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if "zero2" not in each.values])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all weights", marks=pytest.mark.by_hand),
        pytest.param({"lora": LORA, "beta": 0.1}, id="lora, KL"),
    ],
)
async def test_each_strategy_is_the_same_on_two_nodes(
    strategy, options, far, hidden, log, miniature, make_rows, tmp_path
):
    async with two_nodes(far, hidden, log) as (nodes, _):
        await same_as_one(miniature, make_rows, tmp_path, TWO.but(strategy=strategy, **options), nodes)


async def test_a_node_whose_cable_is_pulled_is_noticed(far, hidden, log, miniature, make_rows, tmp_path):
    async with two_nodes(far, hidden, log) as (nodes, started):
        async with learner(miniature, tmp_path, TWO, nodes) as two:
            await two.step(make_rows([30, 12]))
            far.unplug()
            async with asyncio.timeout(90):
                with pytest.raises(LearnerFault, match="node 1"):
                    await two.step(make_rows([20, 30], 5))
        started.kill()


async def test_a_run_whose_node_is_killed_goes_on_when_it_is_back(far, hidden, log, tmp_path):
    """By the commands alone: the run restarts its learner with the node that has come again."""
    far_logs = ["--logs", str(log.parent / "far-logs")]
    first = far.start([tmp_path], log, *far_logs)
    settings = ["run.steps=3", f"run.dir={tmp_path / 'run'}", "train.processes=2", "train.nodes=2"]
    settings += [f"train.rendezvous={far.address}", "eval.before=false", "eval.after=false", "rollout.tasks_per_step=2"]
    command = [sys.executable, "-m", "coderepairrl.cli", "train", "hello", *settings]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path
    )
    try:
        async with asyncio.timeout(280):
            metrics = tmp_path / "run" / "hello" / "metrics.jsonl"
            while not (metrics.exists() and metrics.read_text()):
                assert process.returncode is None, (await process.communicate())[0].decode()
                await asyncio.sleep(0.2)
            first.send_signal(signal.SIGKILL)
            second = far.start([tmp_path], log, *far_logs)
            said, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        first.kill()
        first.wait()
    assert process.returncode == 0, said.decode()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert await asyncio.to_thread(second.wait, 30) == 0


# -- Who comes: without processes or namespaces


@pytest.fixture
async def nodes(monkeypatch):
    monkeypatch.setenv(KEY, "a key for the tests of nodes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    opened = await NodePool.open(Address("127.0.0.1", port), 3, rendezvous.key(), 5.0)
    yield opened
    await opened.close()


def come(nodes, number, tmp_path):
    return asyncio.create_task(node.run_node(nodes._address, number, seconds=5.0, log_dir=tmp_path))


async def all_here(nodes, *numbers):
    async with asyncio.timeout(5):
        while set(nodes._joined) != set(numbers):
            await asyncio.sleep(0.01)


async def test_nodes_come_and_go_home_with_the_run(nodes, tmp_path):
    working = [come(nodes, number, tmp_path) for number in (1, 2)]
    await all_here(nodes, 1, 2)
    await nodes.close()
    await asyncio.gather(*working)


async def test_a_node_that_never_comes_is_named(nodes, tmp_path):
    nodes._seconds = 0.5
    working = come(nodes, 2, tmp_path)
    with pytest.raises(LearnerFault, match=r"node 1 has not come to 127.0.0.1:\d+ within 0.5 s") as caught:
        await nodes.spawn(3, 1)
    assert "crrl learner 127.0.0.1" in caught.value.fix and "--node 1" in caught.value.fix
    await nodes.close()
    await working


async def test_a_controller_that_never_comes(monkeypatch, tmp_path):
    monkeypatch.setenv(KEY, "a key for the tests of nodes")
    with pytest.raises(LearnerFault, match=r"no controller at 127.0.0.1:9 within 1.5 s: .*refused"):
        await node.run_node(Address("127.0.0.1", 9), 1, seconds=1.5, log_dir=tmp_path)


async def test_a_controller_that_goes_away_ends_the_node(nodes, tmp_path):
    working = come(nodes, 1, tmp_path)
    await all_here(nodes, 1)
    await nodes._joined[1].channel.close()
    with pytest.raises(LearnerFault, match="went away"):
        await working


async def test_other_versions_are_refused_at_both_ends(nodes, tmp_path, monkeypatch):
    ours = rendezvous.versions()
    asked = iter([ours | {"torch": "2.12.0", "deepspeed": "0.18"}, ours])
    monkeypatch.setattr(rendezvous, "versions", lambda: next(asked))
    beginning = asyncio.create_task(nodes.spawn(3, 1))
    await asyncio.sleep(0)
    for refused in (come(nodes, 1, tmp_path), beginning):
        with pytest.raises(
            PrerequisiteError, match=r"node 1 \(.*\) has other versions: torch 2.12.0 \(here .*\), deepspeed"
        ) as it:
            await refused
        assert "the same on every node" in it.value.fix
    assert not nodes._joined


@pytest.mark.parametrize("number", [1, 3])
async def test_numbers_that_are_taken_or_too_large(number, nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "_VANISHED", 0.5)
    first = come(nodes, 1, tmp_path)
    await all_here(nodes, 1)
    with pytest.raises(UsageError, match=r"node 1 is here" if number == 1 else r"has come, and train.nodes=3"):
        await come(nodes, number, tmp_path)
    await nodes.close()
    await first


async def test_a_node_that_comes_again_before_its_end_was_noticed_waits(nodes, tmp_path, monkeypatch):
    vanished = come(nodes, 1, tmp_path)
    await all_here(nodes, 1)
    old = nodes._joined[1]
    beginning = asyncio.create_task(nodes._wait_for_all())
    again = come(nodes, 1, tmp_path)
    async with asyncio.timeout(5):
        while not nodes._taken:
            await asyncio.sleep(0.01)
    assert not again.done() and not beginning.done() and nodes._joined[1] is old
    await old.channel.close()
    with pytest.raises(LearnerFault):
        await vanished
    async with asyncio.timeout(5):
        while nodes._joined.get(1) in (old, None):
            await asyncio.sleep(0.01)
    other = come(nodes, 2, tmp_path)
    await beginning
    await nodes.close()
    await asyncio.gather(again, other)


async def test_two_that_come_at_once_with_one_number_are_not_both_welcome(nodes, tmp_path, monkeypatch):
    send, welcomed = rendezvous.Channel.send, []

    async def slow(channel, frame):
        if "welcome" in frame:
            welcomed.append(frame)
            await asyncio.sleep(0.3)
        await send(channel, frame)

    monkeypatch.setattr(rendezvous.Channel, "send", slow)
    working = [come(nodes, 1, tmp_path) for _ in range(2)]
    async with asyncio.timeout(5):
        while not nodes._taken:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.4)
    assert len(welcomed) == 1
    for each in working:
        each.cancel()
    await asyncio.gather(*working, return_exceptions=True)


async def test_what_a_process_says_right_after_it_began_is_heard():
    frames = [{"rank": 1, "died": "an old one"}, {"spawned": [7]}, {"rank": 1, "reply": {"hello": True}}]
    asked = asyncio.Event()

    class AtOnce:
        async def send(self, frame):
            asked.set()

        async def receive(self):
            await asked.wait()
            if not frames:
                raise OSError("closed")
            return frames.pop(0)

    far = RemoteNode(1, "there", AtOnce())
    listening = asyncio.create_task(far.receive_frames())
    [child] = await far.spawn(range(1, 2), 2, "10.0.0.1:1")
    assert child.pid == 7 and await child.receive() == {"hello": True}
    await listening


async def test_another_key_is_refused_and_nothing_is_said(nodes, tmp_path, monkeypatch):
    nodes._key = b"the key of somebody else"
    with pytest.raises(UsageError, match=f"no crrl with this {KEY}"):
        await come(nodes, 1, tmp_path)
    assert not nodes._joined and nodes._refused is None


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"",
        pack({"node": 1, "nonce": "x"}) + pack({"proof": "0" * 64, "host": "h", "versions": {}}),
        pack({"node": 1, "nonce": "x"}) + pack({"proof": None}),
        pack({"spawn": {}}),
        b"\x00\x00\x00\x02[]",
    ],
)
async def test_strangers_get_nothing(said, nodes, tmp_path):
    reader, writer = await asyncio.open_connection(*nodes._address)
    writer.write(said)
    writer.write_eof()
    answer = await reader.read()
    assert len(answer) < 200 and b"welcome" not in answer and not nodes._joined
    writer.close()
    await writer.wait_closed()
    working = [come(nodes, number, tmp_path) for number in (1, 2)]
    await all_here(nodes, 1, 2)
    await nodes.close()
    await asyncio.gather(*working)


async def test_a_proof_of_one_exchange_is_none_of_another(nodes):
    """What was overheard opens nothing: numbers are new each time, and each end proves another sentence."""
    channel = rendezvous.Channel(*await asyncio.open_connection(*nodes._address))
    await channel.send({"node": 1, "nonce": "n"})
    hello = await channel.receive_greeting()
    await channel.send({"proof": hello["proof"], "host": "h", "versions": rendezvous.versions()})
    with pytest.raises(OSError, match="closed"):
        await channel.receive_greeting()
    assert not nodes._joined
    await channel.close()


@pytest.mark.parametrize("text", ["", "10.0.0.1", "10.0.0.1:", ":80", "h:port", "h:70000", "0.0.0.0:80", "[::]:80"])
def test_rendezvous_that_cannot_be(text):
    with pytest.raises(UsageError) as caught:
        Address.parse(text)
    assert caught.value.fix


@pytest.mark.parametrize("given", [None, "short"])
def test_there_must_be_a_key(given, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    if given:
        monkeypatch.setenv(KEY, given)
    with pytest.raises(PrerequisiteError) as caught:
        rendezvous.key()
    assert "openssl rand" in caught.value.fix and "short" not in str(caught.value)


async def test_an_address_of_another_machine(monkeypatch):
    with pytest.raises(UsageError, match=r"cannot listen at train.rendezvous=192.0.2.1:29400"):
        await NodePool.open(Address("192.0.2.1", 29400), 2, b"k" * 16, 1.0)
    with pytest.raises(UsageError, match=r"no network interface of this machine has the address 192.0.2.1"):
        rendezvous.interface("192.0.2.1")
    assert rendezvous.interface("127.0.0.1") == ("lo" if sys.platform == "linux" else "lo0")
