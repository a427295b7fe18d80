"""Exam of engines: ``crrl check engine NAME``.

Logprobs must be the learner's, outputs independent of concurrent requests, and loaded weights used at once
and alone.

Relabelling gives new weights with known outputs: with embedding (and head) rows permuted by p, a sequence gets the
logprobs that the original gives the sequence mapped through p.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coderepairrl.checks.sandbox import Failed, expect
from coderepairrl.errors import CodeRepairError, ConfigError, EngineFault
from coderepairrl.protocols import Engine
from coderepairrl.registry import Finding
from coderepairrl.types import Chunk, Sampling

Reference = Callable[[list[list[int]], float], Awaitable[list[list[float]]]]
"""``(sequences, T)`` to ``log softmax(logits / T)`` of each sequence's ids but the first: len - 1 numbers."""

Publish = Callable[[int], Awaitable[tuple[Path, int, str]]]
"""``(version)`` to trained weights of a later version, for `Engine.load`; `Reference` uses them afterwards."""

TOLERANCE = 1e-4
"""Nats: allows only another order of sums."""

PATIENCE = 120.0
"""Seconds for one question."""

GREEDY = Sampling(temperature=0.0, max_tokens=32)
_TRIES = 10  # to catch requests in progress: on a busy machine they may have ended


class Answer(NamedTuple):
    """Output of a request; `versions` per token."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]

    def add(self, chunk: Chunk) -> None:
        """Add a chunk."""
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend([chunk.version] * len(chunk.ids))

    async def read(self, stream: AsyncGenerator[Chunk, None]) -> None:
        """Add all chunks of `stream`."""
        async for chunk in stream:
            self.add(chunk)


async def examine_engine(
    engine: Engine,
    model: Path,
    *,
    reference: Reference,
    work: Path,
    publish: Publish | None = None,
    sleeps: bool = False,
) -> list[Finding]:
    """Examine `engine`, which serves only the folder `model`.

    `reference` gives the learner's logprobs under the fp32 weights in `model`; weights of that size go to `work`.
    With `publish` the learner's new weights are loaded; with `sleeps` the engine is put to sleep.

    Leaves the model's weights served, under a later version. Raises `ConfigError` for unreadable weights; failures are
    `Finding` objects.
    """
    candidate = _Candidate(engine, model, reference, work)
    questions = dict(QUESTIONS)
    if publish is not None:
        questions["the learner's own weights go live"] = lambda candidate: _check_published_weights(candidate, publish)
    if sleeps:
        questions["requests survive a sleep, and no prefix does"] = _check_sleep
    findings: list[Finding] = []
    for name, examiner in questions.items():
        try:
            async with asyncio.timeout(PATIENCE):
                detail = await examiner(candidate)
            findings.append(Finding(name, True, detail))
        except Failed as failure:
            findings.append(Finding(name, False, str(failure)))
        except TimeoutError:
            findings.append(Finding(name, False, f"not done within {PATIENCE:.0f} s"))
        except (CodeRepairError, ValueError) as error:
            findings.append(Finding(name, False, f"{type(error).__name__}: {error}"))
    return findings


class _Candidate:
    def __init__(self, engine: Engine, model: Path, reference: Reference, work: Path) -> None:
        self.engine = engine
        self.reference = reference
        self.original = model / "model.safetensors"
        self.work = work
        self.vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
        self.rng = np.random.default_rng(0)
        self._version = 0
        relabelling = np.random.default_rng(1).permutation(self.vocabulary)
        self.relabelled = work / "relabelled.safetensors"
        self._permutation: list[int] = relabelling.tolist()
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        self._write(self.relabelled, lambda name, value: value[relabelling] if name in tables else value)
        noise = np.random.default_rng(2)
        self.absurd = work / "absurd.safetensors"
        self._write(self.absurd, lambda _, value: value + noise.standard_normal(value.shape).astype(value.dtype))

    def _write(self, path: Path, change: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        from safetensors.numpy import load_file, save_file

        try:
            tensors = load_file(self.original)
        except (OSError, TypeError, KeyError) as error:  # NumPy has no bfloat16
            raise ConfigError(f"the exam cannot read {self.original}: {error}", fix="examine fp32 weights") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(change(name, value)) for name, value in tensors.items()}, path)

    def prompt(self, size: int) -> list[int]:
        ids: list[int] = self.rng.integers(0, self.vocabulary, size).tolist()
        return ids

    async def ask(self, ids: Sequence[int], sampling: Sampling, seed: int = 0) -> Answer:
        answer = Answer([], [], [])
        await answer.read(self.engine.generate(ids, sampling, seed))
        return answer

    async def ask_all(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Greedy answers to `prompts`, asked at once."""
        return await asyncio.gather(*(self.ask(prompt, GREEDY) for prompt in prompts))

    async def load(self, path: Path) -> int:
        """Load under the next version, which the engine must return."""
        self._version = max(self._version, int((await self.engine.health())["version"])) + 1
        acknowledged = await self.engine.load(path, self._version, hashlib.sha256(path.read_bytes()).hexdigest())
        if acknowledged != self._version:
            raise Failed(f"a load of version {self._version} was acknowledged as {acknowledged}")
        return acknowledged

    async def expect_refusal(self, path: Path, version: int, checksum: str, message: str) -> None:
        """Load what the engine must refuse."""
        try:
            await self.engine.load(path, version, checksum)
        except EngineFault:
            return
        raise Failed(message)

    async def logprob_error(
        self, prompts: Sequence[list[int]], answers: Sequence[Answer], temperature: float = 1.0
    ) -> float:
        """Largest difference between the answers' logprobs and the learner's, in nats."""
        sequences = [[*prompt, *answer.ids] for prompt, answer in zip(prompts, answers, strict=True)]
        truths = await self.reference(sequences, temperature)
        return max(
            abs(logprob - true)
            for answer, truth in zip(answers, truths, strict=True)
            for logprob, true in zip(answer.logprobs, truth[len(truth) - len(answer.ids) :], strict=True)
        )

    async def relabelled_logprob_error(self, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> float:
        """`logprob_error` of an engine that serves `relabelled`."""
        mapped = [answer._replace(ids=[self._permutation[token] for token in answer.ids]) for answer in answers]
        return await self.logprob_error([[self._permutation[token] for token in prompt] for prompt in prompts], mapped)


def _is_same(answer: Answer, before: Answer) -> bool:
    # a GPU computes a cached prompt by other kernels, which changes last bits
    moved = max((abs(a - b) for a, b in zip(answer.logprobs, before.logprobs, strict=False)), default=0.0)
    return (answer.ids, answer.versions) == (before.ids, before.versions) and moved <= TOLERANCE


async def _check_logprobs(candidate: _Candidate) -> str:
    # Conversations of three turns, two with a common beginning: prefixes come from the cache.
    worst, hits = 0.0, (await candidate.engine.health()).get("prefix_hit_tokens")
    for temperature in (1.0, 0.7):
        shared = candidate.prompt(100)
        prompts = [shared, [*shared, *candidate.prompt(7)], candidate.prompt(3)]
        sampling = Sampling(temperature=temperature, max_tokens=24)
        for turn in range(3):
            answers = await asyncio.gather(*(candidate.ask(prompt, sampling, turn) for prompt in prompts))
            worst = max(worst, await candidate.logprob_error(prompts, answers, temperature))
            prompts = [
                [*prompt, *answer.ids, *candidate.prompt(11)] for prompt, answer in zip(prompts, answers, strict=True)
            ]
    expect(worst <= TOLERANCE, f"logprobs differ by up to {worst:.1e}, allowed are {TOLERANCE:.0e}")
    reused = ""
    if hits is not None:
        hits = (await candidate.engine.health())["prefix_hit_tokens"] - hits
        expect(hits > 0, "no prefix was reused in any turn")
        reused = f", {hits:.0f} prompt tokens from the cache"
    return f"largest difference {worst:.1e}{reused}"


async def _check_concurrency(candidate: _Candidate) -> str:
    # A difference passes if the learner gives both tokens the same logprob.
    prompts = [candidate.prompt(size) for size in (5, 17, 40, 64, 65, 90, 130, 200, 33, 1, 77, 128)]
    serial = [await candidate.ask(prompt, GREEDY) for prompt in prompts]
    together = await candidate.ask_all(prompts)
    ties = 0
    for prompt, alone, batched in zip(prompts, serial, together, strict=True):
        if alone.ids == batched.ids:
            continue
        at = next(i for i, (a, b) in enumerate(zip(alone.ids, batched.ids, strict=True)) if a != b)
        prefix = [*prompt, *alone.ids[:at]]
        logprobs = await candidate.reference([[*prefix, alone.ids[at]], [*prefix, batched.ids[at]]], 1.0)
        gap = abs(logprobs[0][-1] - logprobs[1][-1])
        expect(gap <= TOLERANCE, f"token {at} differs under concurrency, {gap:.1e} nats apart: no tie")
        ties += 1
    exact = sum(alone.logprobs == batched.logprobs for alone, batched in zip(serial, together, strict=True))
    return f"{len(prompts)} concurrent requests equal serial ones, {exact} bit for bit, {ties} up to a tie"


async def _check_seeds(candidate: _Candidate) -> str:
    # The other prompts together exceed the tokens of an engine's step.
    sampling = Sampling(max_tokens=48)
    prompt = candidate.prompt(50)
    alone = await candidate.ask(prompt, sampling, seed=7)
    expect((await candidate.ask(prompt, sampling, seed=7)).ids == alone.ids, "the same seed gave another stream")
    longest = min(700, candidate.engine.context // 2)
    company = [candidate.ask(candidate.prompt(longest - 9 * i), sampling, seed=i) for i in range(7)]
    together = await asyncio.gather(*company[:4], candidate.ask(prompt, sampling, seed=7), *company[4:])
    expect(together[4].ids == alone.ids, "a stream changed with concurrent requests")
    expect((await candidate.ask(prompt, sampling, seed=8)).ids != alone.ids, "another seed gave the same stream")
    return "reproducible, and the same alone and with 7 others"


async def _check_loads(candidate: _Candidate) -> str:
    prompt = candidate.prompt(40)
    version = await candidate.load(candidate.original)
    before = await candidate.ask(prompt, GREEDY)
    expect(set(before.versions) == {version}, f"tokens after load {version} are tagged {set(before.versions)}")
    data = candidate.relabelled.read_bytes()
    truncated = candidate.work / "truncated.safetensors"
    truncated.write_bytes(data[: len(data) // 2])
    missing = candidate.work / "missing.safetensors"
    for path, checksum in (
        (candidate.relabelled, "0" * 64),
        (truncated, hashlib.sha256(truncated.read_bytes()).hexdigest()),
        (missing, "0" * 64),
    ):
        message = f"{path.name} was accepted despite its checksum or content"
        await candidate.expect_refusal(path, version + 1000, checksum, message)
        after = await candidate.ask(prompt, GREEDY)
        expect(_is_same(after, before), f"the refused {path.name} changed what is served")
    expect((await candidate.engine.health())["version"] == version, "health reports a refused version")
    return "acknowledged and tagged; wrong checksum, half a file and no file refused, old version untouched"


async def _check_prefix_cache(candidate: _Candidate) -> str:
    prompts = [candidate.prompt(150), candidate.prompt(60)]
    old = await candidate.ask_all(prompts)
    prompts += [[*prompt, *answer.ids, 1] for prompt, answer in zip(prompts, old, strict=True)]
    await candidate.load(candidate.relabelled)
    off = await candidate.relabelled_logprob_error(prompts, await candidate.ask_all(prompts))
    expect(off <= TOLERANCE, f"after a load, logprobs are off by {off:.1e}: keys of the old weights are in use")
    await candidate.load(candidate.original)
    back = await candidate.logprob_error(prompts, await candidate.ask_all(prompts))
    expect(back <= TOLERANCE, f"with the original weights again, logprobs are off by {back:.1e}")
    return f"logprobs match the new weights to {off:.1e}, and the original ones, loaded again, to {back:.1e}"


async def _check_absurd_update(candidate: _Candidate) -> str:
    prompt = candidate.prompt(80)
    await candidate.load(candidate.original)
    before = await candidate.ask(prompt, GREEDY)
    await candidate.load(candidate.absurd)
    try:
        broken = await candidate.ask(prompt, GREEDY)
        how = f"logprobs off by {await candidate.logprob_error([prompt], [broken]):.2g}"
        expect(await candidate.logprob_error([prompt], [broken]) > 0.1, "an absurd update changed nothing")
    except EngineFault as fault:  # refusing non-finite numbers counts as broken
        how = str(fault)
    await candidate.load(candidate.original)
    after = await candidate.ask(prompt, GREEDY)
    expect((after.ids, after.logprobs) == (before.ids, before.logprobs), "the roll-back is not bit for bit")
    return f"{how}; rolled back bit for bit"


async def _check_swap(candidate: _Candidate) -> str:
    for _ in range(_TRIES):
        old, seen = await _sample_during_swap(candidate)
        if all(old < versions[-1] for versions in seen):
            fewest = min(versions.count(old) for versions in seen)
            return f"{len(seen)} streams have tokens of both versions, at least {fewest} of the old one"
    raise Failed(f"in none of {_TRIES} swaps did all requests in progress get tokens of both versions")


async def _sample_during_swap(candidate: _Candidate) -> tuple[int, list[list[int]]]:
    """Old version, and token versions of streams begun under it."""
    # On a busy machine the server may finish before the client gets the first token.
    length = min(2000, candidate.engine.context - 60)  # long enough to outlast a load
    sampling = Sampling(temperature=1.0, max_tokens=length)
    streams = [candidate.engine.generate(candidate.prompt(20 + i), sampling, i) for i in range(3)]
    answers = [Answer([], [], []) for _ in streams]
    for answer, stream in zip(answers, streams, strict=True):
        answer.add(await anext(stream))
    new = await candidate.load(candidate.relabelled)
    await asyncio.gather(*map(Answer.read, answers, streams))
    await candidate.load(candidate.original)
    seen = [answer.versions for answer in answers]
    old = seen[0][0]
    for versions in seen:
        expect(len(versions) == length, f"a stream of {length} tokens ended after {len(versions)}")
        expect(versions == sorted(versions), "an old version came back after a new one")
        is_sound = versions[0] == old < new and {*versions} <= {old, new}
        expect(is_sound, f"tokens around a swap have versions {sorted({*versions})}")
    return old, seen


async def _check_sleep(candidate: _Candidate) -> str:
    # The engine wakes with the same weights, then with others.
    length = min(1000, candidate.engine.context // 2)
    prompts = [candidate.prompt(150), candidate.prompt(31)]
    first = await candidate.ask_all(prompts)
    for _ in range(_TRIES):
        was_sampling, answers, late = await _sample_during_sleep(candidate, prompts, length, candidate.engine.wake)
        off = await candidate.logprob_error(prompts, answers)
        expect(off <= TOLERANCE, f"after a sleep, logprobs are off by {off:.1e}")
        expect(len(late.ids) == GREEDY.max_tokens, "a request that came while it slept was cut short")
        if was_sampling:
            break
    else:
        raise Failed(f"{_TRIES} times, requests had ended before the engine slept")
    new = int((await candidate.engine.health())["version"]) + 1

    async def load() -> None:
        await candidate.load(candidate.relabelled)

    _, answers, late = await _sample_during_sleep(candidate, prompts, length, load)
    seen = sorted({version for answer in answers for version in answer.versions})
    expect({*seen} <= {new - 1, new}, f"tokens around a sleep with a load have versions {seen}")
    expect({*late.versions} == {new}, f"a request that came while it slept has versions {sorted({*late.versions})}")
    longer = [[*prompt, *answer.ids, 1] for prompt, answer in zip(prompts, first, strict=True)]
    after = [*prompts, *longer]
    off_after = await candidate.relabelled_logprob_error(after, await candidate.ask_all(after))
    expect(off_after <= TOLERANCE, f"after a sleep with a load, logprobs are off by {off_after:.1e}")
    await candidate.load(candidate.original)
    return f"after a sleep, logprobs match to {off:.1e}; after one with a load, the new weights' to {off_after:.1e}"


async def _sample_during_sleep(
    candidate: _Candidate, prompts: Sequence[list[int]], length: int, wake: Callable[[], Awaitable[None]]
) -> tuple[bool, list[Answer], Answer]:
    """Whether requests ran as the engine fell asleep, their answers, and a later request's."""
    streams = [candidate.engine.generate(prompt, Sampling(max_tokens=length), i) for i, prompt in enumerate(prompts)]
    answers = [Answer([], [], []) for _ in streams]
    reading = [asyncio.ensure_future(answer.read(stream)) for answer, stream in zip(answers, streams, strict=True)]
    while not all(answer.ids for answer in answers):
        await asyncio.sleep(0.001)
    await candidate.engine.sleep()
    arrived = -1
    # wait until all tokens sampled before the sleep have arrived
    while (count := sum(len(answer.ids) for answer in answers)) != arrived:
        arrived = count
        await asyncio.sleep(0.5)
    late = asyncio.ensure_future(candidate.ask(prompts[0], GREEDY))
    await asyncio.sleep(0.5)
    expect(sum(len(answer.ids) for answer in answers) == arrived and not late.done(), "it samples while it sleeps")
    was_sampling = not any(each.done() for each in reading)
    await wake()
    await asyncio.gather(*reading)
    for answer in answers:
        expect(len(answer.ids) == length, f"a stream of {length} tokens ended after {len(answer.ids)}")
    return was_sampling, answers, await late


async def _check_abort(candidate: _Candidate) -> str:
    for _ in range(_TRIES):
        if (seconds := await _close_streams_midway(candidate)) is not None:
            return f"idle {1000 * seconds:.0f} ms after the last token was read"
    raise Failed(f"nothing runs while four requests are open, {_TRIES} times")


async def _close_streams_midway(candidate: _Candidate) -> float | None:
    """Seconds from the last token read until idle; None if requests had ended."""
    length = candidate.engine.context - 60
    streams = [candidate.engine.generate(candidate.prompt(30), Sampling(max_tokens=length), i) for i in range(4)]
    for stream in streams:
        await anext(stream)
    running = (await candidate.engine.health())["running"] > 0
    started = asyncio.get_running_loop().time()
    for stream in streams:
        await stream.aclose()
    health: Mapping[str, float] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            while (health := await candidate.engine.health())["running"] > 0:
                await asyncio.sleep(0.01)
    expect(health["running"] == 0, f"{health['running']:.0f} requests run 5 s after they were closed")
    return asyncio.get_running_loop().time() - started if running else None


async def _check_request_limits(candidate: _Candidate) -> str:
    prompt = candidate.prompt(30)
    free = await candidate.ask(prompt, Sampling(max_tokens=20), seed=3)
    expect(len(free.ids) == 20, f"max_tokens=20 gave {len(free.ids)} tokens")
    stop = free.ids[9]
    stopped = await candidate.ask(prompt, Sampling(max_tokens=20, stop_ids=(stop, candidate.vocabulary - 1)), seed=3)
    cut = free.ids[: free.ids.index(stop) + 1]
    expect(stopped.ids[: len(cut)] == cut[: len(stopped.ids)], "a stop id changed the tokens before it")
    expect(stopped.ids[-1] in (stop, candidate.vocabulary - 1), "a stop id did not end the request, or was swallowed")
    full = await candidate.ask(candidate.prompt(candidate.engine.context - 5), Sampling(max_tokens=100), seed=0)
    expect(len(full.ids) == 5, f"with room for 5 tokens, {len(full.ids)} came")
    try:
        await candidate.ask(candidate.prompt(candidate.engine.context), Sampling(max_tokens=1), seed=0)
    except ValueError:
        return "a stop id is emitted; it, max_tokens and a full context end requests; a longer prompt is refused"
    raise Failed("a prompt as long as the context was accepted")


async def _check_published_weights(candidate: _Candidate, publish: Publish) -> str:
    # As in a run: refused under another checksum, then served with the learner's logprobs.
    prompt = candidate.prompt(60)
    before = await candidate.ask(prompt, GREEDY)
    path, version, checksum = await publish(int((await candidate.engine.health())["version"]))
    moved = await candidate.logprob_error([prompt], [before])
    expect(moved > TOLERANCE, "the learner's logprobs have not changed, so a load cannot be seen")
    await candidate.expect_refusal(path, version, checksum[::-1], "the weights were accepted under another checksum")
    expect(_is_same(await candidate.ask(prompt, GREEDY), before), "refused weights changed what is served")
    acknowledged = await candidate.engine.load(path, version, checksum)
    expect(acknowledged == version, f"a load of version {version} was acknowledged as {acknowledged}")
    off = await candidate.logprob_error([prompt], [await candidate.ask(prompt, GREEDY)])
    expect(off <= TOLERANCE, f"logprobs are off by {off:.1e}: other weights are served than the learner has")
    await candidate.load(candidate.original)
    return f"refused under another checksum, then served: logprobs moved by {moved:.1g}, and match to {off:.1e}"


QUESTIONS: dict[str, Callable[[_Candidate], Awaitable[str]]] = {
    "logprobs are the learner's": _check_logprobs,
    "concurrent output equals serial": _check_concurrency,
    "a seed fixes a stream": _check_seeds,
    "loads are acknowledged and whole": _check_loads,
    "no prefix outlives its weights": _check_prefix_cache,
    "an absurd update breaks, a roll-back restores": _check_absurd_update,
    "requests survive a swap": _check_swap,
    "abort frees the slot": _check_abort,
    "limits hold": _check_request_limits,
}
"""Properties by name, in order."""
