"""How long one session can delay others: calls of 16 honest sessions, by turns alone and beside an attacker.

Latencies depend on the load of the processors, to which the attacker adds. The CPU time of one turn of the server's
event loop, printed beside them, does not: it bounds how long one session can make the others wait.

The honest sessions are those of ``benchmarks/gateway.py``: conversations that grow to 8k tokens, in front of an engine
that answers at once. The attacker has a session of its own, with the same 32,768 tokens and unlimited calls, and sends
one kind of request, no two texts alike, as fast as it is answered, over four connections. Server, honest clients and
attacker are a process each.

Run: ``python benchmarks/attacks.py [--rounds 3] [--attacks "2 MB messages" ...]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from coderepairrl import tokens
from coderepairrl.gateway import Gateway, PolicySource
from coderepairrl.types import Limits, Sampling
from gateway import Instant, _model
from gateway import client as converse

SESSIONS, CALLS, TOKENS, CONNECTIONS = 16, 12, 32_768, 4


def _chat_body(content: str, count: int = 1) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": content}] * count}).encode()


def _tool_call_body(arguments: str) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": arguments}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    user = {"role": "user", "content": "a"}
    return json.dumps({"model": "policy", "messages": [user, reply, user]}).encode()


def _deep_body() -> bytes:
    """A body of half a million numbers, nested as deep as the parser allows."""
    return _chat_body("a")[:-1] + b',"x":' + b"[" * 190 + b"0," * 500_000 + b"0" + b"]" * 190 + b"}"


ATTACKS = {
    "2 MB messages": lambda: [
        _chat_body("@@@@@@" + "some words and more " * 100_000),
        _chat_body("@@@@@@" + "a" * 2_000_000),
    ],
    "60 MB messages": lambda: [_chat_body("some words and more " * 3_000_000)],
    "70,000 messages in 2 MB": lambda: [_chat_body("", 70_000)],
    "deep JSON": lambda: [b'{"a":' * 400_000, b"[" * 2_000_000, _tool_call_body("[" * 200_000), _deep_body()],
    "half-sent bodies": lambda: [],
}


class Timed(asyncio.SelectorEventLoop):
    """An event loop that records the CPU seconds of each of its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[float] = []

    def _run_once(self) -> None:
        began = time.thread_time()
        super()._run_once()  # type: ignore[misc]
        self.turns.append(time.thread_time() - began)


async def attack(kind: str, url: str) -> None:
    """Send `kind` until killed."""
    if kind == "half-sent bodies":
        await asyncio.gather(*(_half_sent(url) for _ in range(100)))
    bodies = ATTACKS[kind]()
    print("ready", flush=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def send(start: int) -> None:
            for number in range(start, sys.maxsize):
                body = bodies[number % len(bodies)].replace(b"@@@@@@", b"%06d" % (number % 10**6), 1)
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.post(f"{url}/chat/completions", data=io.BytesIO(body)) as answer:
                        await answer.read()

        await asyncio.gather(*(send(start) for start in range(CONNECTIONS)))


async def _half_sent(url: str) -> None:
    """Send a body a little at a time; reconnect when the server closes."""
    parts = urlsplit(url)
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n".encode()
    print("ready", flush=True)
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(head)
            while not reader.at_eof():
                writer.write(b" " * 1000)
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await reader.read(1 << 16)
            writer.close()
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _attacked(kind: str, url: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--attack", json.dumps([kind, url]), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        await asyncio.sleep(2.0)  # workers are started at the first large request
        yield
    finally:
        process.kill()
        await process.wait()


async def _honest(gateway: Gateway) -> list[float]:
    limits = Limits(calls=CALLS, tokens=TOKENS, seconds=600.0)
    sessions = [gateway.open(str(number), limits=limits, seed=number) for number in range(SESSIONS)]
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--client",
        json.dumps([session.endpoint.base_url for session in sessions]),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await client.communicate()
    for session in sessions:
        turns = await gateway.close(session)
        assert [turn.base for turn in turns] == [None, *range(CALLS - 1)]
    times: list[float] = json.loads(out)
    return times


async def serve(rounds: int, kinds: list[str]) -> None:
    """Run the gateway here and its clients in other processes; print a line for each kind of attack."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Timed)
    with tempfile.TemporaryDirectory() as folder:
        codec = tokens.load_codec(_model(Path(folder)))
        engine = Instant([*codec.encode("I look at the parser, then I run the tests."), codec.stop_ids[0]])
        gateway = Gateway(PolicySource(codec, engine), sampling=Sampling(), on_turn=lambda *_: None)
        await gateway.start()
        await _honest(gateway)
        for kind in kinds:
            alone, beside = _Measured(loop), _Measured(loop)
            refused = 0
            for _ in range(rounds):
                with alone:
                    alone.calls += await _honest(gateway)
                endless = Limits(calls=10**9, tokens=TOKENS, seconds=600.0)
                attacker = gateway.open("attacker", limits=endless, seed=0)
                async with _attacked(kind, attacker.endpoint.base_url):
                    with beside:
                        beside.calls += await _honest(gateway)
                refused += getattr(attacker, "_started", 0)
                await gateway.close(attacker)
            _report(kind, alone, beside, refused)
        await gateway.stop()


class _Measured:
    """Seconds of honest calls, and of the loop's turns inside the `with` block."""

    def __init__(self, loop: Timed) -> None:
        self.calls: list[float] = []
        self.turns: list[float] = []
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.turns.clear()

    def __exit__(self, *_: object) -> None:
        self.turns += self._loop.turns

    def summarise(self) -> tuple[float, float, float, float]:
        """Milliseconds: of calls the median and 99th percentile, of turns the 99th percentile and the longest."""
        calls, turns = (statistics.quantiles(times, n=100) for times in (self.calls, self.turns))
        return calls[49] * 1e3, calls[98] * 1e3, turns[98] * 1e3, max(self.turns) * 1e3


def _report(kind: str, alone: _Measured, beside: _Measured, refused: int) -> None:
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    alone_ms, beside_ms = alone.summarise(), beside.summarise()
    names = ("p50", "p99", "turn p99", "longest turn")
    pairs = "  ".join(
        f"{name} {before:6.1f} -> {after:6.1f}" for name, before, after in zip(names, alone_ms, beside_ms, strict=True)
    )
    print(
        f"{kind:24} ms: {pairs}  p99 ratio {beside_ms[1] / alone_ms[1]:.2f}  attacker's calls {refused}  load {load}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(asyncio.run(converse(json.loads(arguments.client), CALLS))))
    elif arguments.attack:
        asyncio.run(attack(*json.loads(arguments.attack)))
    else:
        with asyncio.Runner(loop_factory=Timed) as runner:
            runner.run(serve(arguments.rounds, arguments.attacks))
