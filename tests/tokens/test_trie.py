"""Tries of ids: what they find is shown by forks (tests/gateway) and accounts (tests/learn/test_stitch.py)."""

from __future__ import annotations

import itertools
import time

from coderepairrl.tokens.trie import Trie


def test_time_is_linear_in_tokens() -> None:
    """Neither where sequences part matters, nor how long they are: at most 40 times as slow for 16 times as much."""

    def seconds(tokens: int) -> float:
        ids = list(range(tokens))
        rows = [[*ids[: tokens * part // 8], -1, *ids[tokens * part // 8 :]] for part in range(8)]
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            trie = Trie()
            for number, row in enumerate(itertools.chain(rows, rows)):
                trie.add(row, number)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(64_000) < 40 * seconds(4_000)
