"""Cost of turning episodes into rows and of counting distinct tokens: 64 episodes of 30,000 tokens.

    python benchmarks/stitch.py [--episodes 64] [--tokens 30000]

``append``: each turn extends the one before. ``fork``: each of 30 turns forks from the one before, as with a program
that leaves replies out of its prompts. Counting and the memory of the trie are for one episode's rows at a time, as in
`stitch_episode`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from coderepairrl.learn.stitch import stitch_episode
from coderepairrl.tokens.trie import Trie
from coderepairrl.types import Ending, Episode, Fork, Origin, Sample, TokenSpan, Turn, VersionRange

TURNS = 30
SAID = 200


def main(argv: list[str] | None = None) -> None:
    """Print one line of Markdown per kind of episode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=30_000)
    options = parser.parse_args(argv)
    print("| episodes | rows | row tokens | distinct | expansion | stitching, s | of which counting, s | trie, MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in ("append", "fork"):
        episodes = [episode(kind, options.tokens, seed) for seed in range(options.episodes)]
        made, seconds = timed(lambda: [stitch_episode(each, 1.0, max_tokens=1 << 20) for each in episodes])  # noqa: B023
        rows = [samples for samples, _ in made]
        counts, counting = timed(lambda: [count(samples) for samples in rows])  # noqa: B023
        held = sum(account.row_tokens for _, account in made)
        distinct = sum(account.distinct_tokens for _, account in made)
        assert distinct == sum(counts)
        print(
            f"| {kind} | {sum(map(len, rows))} | {held:,} | {distinct:,} | {held / distinct:.2f} | {seconds:.2f} "
            f"| {counting:.2f} | {memory(rows[0]):.2f} |"
        )


def episode(kind: str, tokens: int, seed: int) -> Episode:
    """An episode of `TURNS` turns, the last of which ends at `tokens` tokens."""
    dice = random.Random(seed)
    step = tokens // TURNS
    turns: list[Turn] = []
    for index in range(TURNS):
        fork = Fork(index - 1, step * index - SAID, 0) if kind == "fork" and index else None
        given = step - (0 if fork else SAID)
        turns.append(
            Turn(
                index,
                None if fork or not index else index - 1,
                TokenSpan(tuple(dice.choices(range(150_000), k=given)), Origin.GIVEN),
                TokenSpan(tuple(dice.choices(range(150_000), k=SAID)), Origin.POLICY, (-1.0,) * SAID),
                versions=(VersionRange(0, 0, SAID),),
                fork=fork,
            )
        )
    return Episode(str(seed), "t", "train", 0, "g", 0, Ending.DONE, turns=tuple(turns))


def count(rows: tuple[Sample, ...]) -> int:
    """Count the distinct tokens of an episode's rows."""
    trie = Trie()
    for number, row in enumerate(rows):
        trie.add(row.ids, number)
    return len(trie)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Result of `work`, and the median seconds of three runs."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return result, statistics.median(times)


def memory(rows: tuple[Sample, ...]) -> float:
    """Peak MiB of counting the distinct tokens of an episode's rows."""
    tracemalloc.start()
    count(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


if __name__ == "__main__":
    main()
