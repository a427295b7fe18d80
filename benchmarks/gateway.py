"""Cost of the gateway per call: 32 sessions at once, an instant engine, against an echo server in the same run.

Every session is a conversation that grows to about 8k tokens, call by call. The echo server (aiohttp, too) parses
the same bodies and answers with a short message. The same client, in a process of its own, calls both in
alternation; between its calls a conversation pauses for up to 0.5 s, as if a tool ran.

Run: ``python benchmarks/gateway.py [--sessions 32] [--calls 12]``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from coderepairrl import tokens
from coderepairrl.gateway import Gateway, PolicySource, chat
from coderepairrl.gateway.request import PrefixKeys
from coderepairrl.gateway.workers import RequestBody
from coderepairrl.types import Chunk, Limits, Sampling

TOOL = {
    "type": "function",
    "function": {"name": "shell", "description": "Run a command.", "parameters": {"type": "object"}},
}
SOURCE = Path(tokens.__file__).with_name("codec.py").read_text(encoding="utf-8")
ROUNDS = 3
THINK = 0.5
"""Seconds at most between a reply and the next call: a tool runs. Long enough that neither server is saturated."""


class Instant:
    """An engine that has its answer ready."""

    name = "instant"
    context = 1 << 20

    def __init__(self, reply: Sequence[int]) -> None:
        self.reply = tuple(reply)
        self._chunk = Chunk(self.reply, (-0.1,) * len(reply), 0)

    async def generate(self, ids: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Chunk, None]:
        yield self._chunk

    async def load(self, path: Path, version: int, checksum: str) -> int:
        return version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None: ...


def _model(folder: Path) -> Path:
    """Configuration and tokenizer (a byte-level BPE of 4,096 pieces) of a Qwen3 without weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    package = Path(tokens.__file__).parents[1]
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in package.rglob("*.py")), trainer)
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    tools = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in (*names, *tools)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "qwen3", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def _echo(request: web.Request) -> web.Response:
    body = json.loads(await request.read())
    message = {"role": "assistant", "content": body["messages"][-1]["content"][:60]}
    return web.json_response({"choices": [{"message": message}]})


async def serve(sessions: int, calls: int) -> None:
    """Run both servers in this process and a client in another; print the comparison."""
    with tempfile.TemporaryDirectory() as folder:
        codec = tokens.load_codec(_model(Path(folder)))
    end = codec.stop_ids[0]
    engine = Instant([*codec.encode("I look at the parser, then I run the tests."), end])
    gateway = Gateway(PolicySource(codec, engine), sampling=Sampling(), on_turn=lambda *_: None)
    await gateway.start()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", _echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    times: dict[str, list[float]] = {"echo": [], "gateway": []}
    spent = dict.fromkeys(times, 0.0)
    for _ in range(ROUNDS):
        opened = [
            gateway.open(str(n), limits=Limits(calls=calls, tokens=1 << 20, seconds=600.0), seed=n)
            for n in range(sessions)
        ]
        urls = {
            "echo": [f"http://127.0.0.1:{site.port}/v1"] * sessions,
            "gateway": [session.endpoint.base_url for session in opened],
        }
        for name in times:
            before = time.process_time()
            client = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--client", json.dumps([urls[name], calls]), stdout=asyncio.subprocess.PIPE
            )
            out, _ = await client.communicate()
            times[name] += json.loads(out)
            spent[name] += time.process_time() - before
        longest = 0
        for session in opened:
            turns = await gateway.close(session)
            assert [turn.base for turn in turns] == [None, *range(calls - 1)]
            longest = max(longest, sum(len(turn.given) + len(turn.output) for turn in turns))
    _report(times, spent, longest)
    _parts(codec, [*engine.reply], calls)
    await _memory(gateway, calls)
    await gateway.stop()
    await runner.cleanup()


def _report(times: dict[str, list[float]], spent: dict[str, float], longest: int) -> None:
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{len(times['echo'])} calls each, up to {longest} tokens, {os.cpu_count()} cores, load {load}")
    cpu = {name: spent[name] / len(times[name]) for name in times}
    quantiles = {name: statistics.quantiles(values, n=100) for name, values in times.items()}
    for name, values in quantiles.items():
        print(
            f"{name:8} p50 {values[49] * 1e3:7.2f} ms   p99 {values[98] * 1e3:7.2f} ms   "
            f"processor {cpu[name] * 1e3:.2f} ms per call"
        )
    p50, p99 = (quantiles["gateway"][at] / quantiles["echo"][at] for at in (49, 98))
    print(f"ratio    p50 {p50:7.2f}      p99 {p99:7.2f}      processor {cpu['gateway'] / cpu['echo']:.2f}")


def _parts(codec: tokens.Codec, reply: list[int], calls: int) -> None:
    """Print the cost of each part of the last call of a conversation, and of rendering all of it."""
    messages = _messages(calls)
    raw = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
    before, output = codec.render(messages[:-2], [TOOL]), codec.encode("I look.")
    fresh = (f"{number} " for number in range(10**6))  # texts that were never seen are tokenized, others remembered

    def new(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [message | {"content": next(fresh) + message["content"]} for message in some]

    def read() -> None:
        stream = codec.stream(before, [TOOL])
        stream.feed(reply)
        stream.close()

    def report(name: str, what: Callable[[], object]) -> float:
        taken = _measure_best(what)
        print(f"  {name:52} {taken * 1e3:6.2f} ms")
        return taken

    print(f"of a call with {len(raw)} bytes and {len(before)} recorded tokens, alone and at its best:")
    report("parsing and checking the body", lambda: chat.parse(raw))
    report("naming the request, to know its retries", lambda: _name(raw))
    keys = PrefixKeys()
    keys.compute(tuple(messages), [TOOL])
    report("naming its conversation, to find it", lambda: keys.compute((*messages[:-1], *new(messages[-1:])), [TOOL]))
    extending = report("extending by the last message", lambda: codec.extend(before, output, new(messages[-1:])))
    report("  of it, tokenizing", lambda: codec.encode(next(fresh) + messages[-1]["content"]))
    report("reading the reply", read)
    scratch = report("instead: rendering all", lambda: codec.render(new(messages), [TOOL]))
    report(
        "with all but the last message seen before", lambda: codec.render([*messages[:-1], *new(messages[-1:])], [TOOL])
    )
    print(f"extending costs {extending / scratch:.3f} of rendering all")


def _name(body: bytes) -> str:
    arrived = RequestBody("chat")
    arrived.add(body)
    return arrived.digest


async def _memory(gateway: Gateway, calls: int) -> None:
    """Print the memory that a turn leaves allocated, in each half of a conversation of `2 * calls` turns."""
    session = gateway.open("long", limits=Limits(calls=2 * calls, tokens=1 << 20, seconds=600.0), seed=0)
    messages, held = _messages(1), [0]
    tracemalloc.start()
    for number in range(1, 2 * calls + 1):
        raw = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
        outcome = await session.admit(chat.parse(raw), _name(raw), None).result()
        messages.append(dict(outcome.message))
        messages.append({"role": "tool", "tool_call_id": "c", "content": f"{random.random()}{_result(number)}"})
        if number % calls == 0:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    first, second = ((after - before) / calls / 1024 for before, after in pairwise(held))
    print(f"memory per turn of 700 tokens: {first:.0f} KiB of the first {calls}, {second:.0f} KiB of the next")


def _measure_best(what: Callable[[], object]) -> float:
    taken = []
    for _ in range(20):
        start = time.perf_counter()
        what()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _result(number: int) -> str:
    """About 700 tokens of source code."""
    return (SOURCE * 3)[700 * number :][:2400]


def _messages(calls: int) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "You repair code."}, {"role": "user", "content": _result(0)}]
    for number in range(1, calls):
        messages += [{"role": "assistant", "content": "I look."}, {"role": "tool", "content": _result(number)}]
    return messages


async def client(urls: list[str], calls: int) -> list[float]:
    """Hold the conversations of all URLs at the same time; returns the seconds of each call."""
    taken: list[float] = []

    async def converse(http: aiohttp.ClientSession, url: str) -> None:
        messages = _messages(1)
        for number in range(1, calls + 1):
            await asyncio.sleep(random.uniform(0, THINK))
            body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
            start = time.perf_counter()
            async with http.post(f"{url}/chat/completions", data=body) as response:
                data = await response.read()
            taken.append(time.perf_counter() - start)
            messages.append(json.loads(data)["choices"][0]["message"])
            # no two results are equal, so that none is cached from another session
            messages.append({"role": "tool", "tool_call_id": "c", "content": f"{random.random()}{_result(number)}"})

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(converse(http, url) for url in urls))
    return taken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        print(json.dumps(asyncio.run(client(*json.loads(arguments.client)))))
    else:
        asyncio.run(serve(arguments.sessions, arguments.calls))
