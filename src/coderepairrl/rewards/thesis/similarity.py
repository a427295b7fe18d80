"""`patch_similarity`: the thesis's reward, exactly."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from itertools import accumulate, takewhile

from cydifflib import SequenceMatcher

from coderepairrl.rewards.text import TextReward

LARGEST_PAIRS = 400_000_000
"""Product of both texts' characters (20,000 each); beyond, a single search may be slow."""
LARGEST_WORK = 20_000_000
"""Steps of all searches, about a second; adversarial texts take steps with the cube of their length."""
_FILE = "diff --git"
_NAME = re.compile(r"diff --git a/(.*) b/")


class PatchSimilarity(TextReward):
    """Similarity of whole per-file diff texts, in [0, 1].

        R = sum over files f of both patches of SM(g_f, a_f) / max(|F_a|, |F_g|)

    SM is the ratio 2M/T of `difflib.SequenceMatcher(None, g_f, a_f)` over characters, with difflib's default
    "autojunk". A file's text is everything from its ``diff --git a/X b/X`` line to the next, stripped; X names it, and
    the last of several counts.

    Source: the thesis and its code; equal to its published values on real predictions (tests). Known weaknesses:
    headers and context dominate, so a blank line next to the right hunk scores 0.52 to 0.60; blob hashes keep a perfect
    repair below 1.0; a patch without ``diff --git`` lines scores 0.
    """

    name = "patch_similarity"
    repairs = True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Never raises."""
        oracle_files, patch_files = files(oracle), files(patch)
        if not oracle_files or not patch_files:
            return 0.0
        shared = sum(ratio(oracle_files[name], patch_files[name]) for name in oracle_files if name in patch_files)
        return shared / max(len(oracle_files), len(patch_files))


def ratio(a: Sequence[Hashable], b: Sequence[Hashable], *, autojunk: bool = True) -> float:
    """``difflib.SequenceMatcher(None, a, b, autojunk).ratio()``, by cydifflib.

    Beyond `LARGEST_PAIRS` only common ends count, else the matches of `LARGEST_WORK` steps.

    >>> ratio("abcd", "bcde")
    0.75
    """
    if not a and not b:
        return 1.0
    if len(a) * len(b) <= LARGEST_PAIRS:
        return 2.0 * _matched(a, b, autojunk) / (len(a) + len(b))
    start = _common(a, b)
    end = min(_common(a[::-1], b[::-1]), min(len(a), len(b)) - start)
    return 2.0 * (start + end) / (len(a) + len(b))


def _matched(a: Sequence[Hashable], b: Sequence[Hashable], autojunk: bool) -> int:
    """Elements in difflib's matching blocks, up to `LARGEST_WORK` steps."""
    matcher = SequenceMatcher(None, a, b, autojunk)
    steps = [0, *accumulate(1 + len(matcher.b2j.get(element, ())) for element in a)]
    left, matched = LARGEST_WORK, 0
    parts = [(0, len(a), 0, len(b))]
    while parts:
        low, high, begin, end = parts.pop()
        left -= steps[high] - steps[low]
        if left < 0:
            break
        at, b_start, size = matcher.find_longest_match(low, high, begin, end)
        matched += size
        if size and low < at and begin < b_start:
            parts.append((low, at, begin, b_start))
        if size and at + size < high and b_start + size < end:
            parts.append((at + size, high, b_start + size, end))
    return matched


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def files(patch: bytes) -> dict[str, str]:
    r"""File texts by name; text before the first ``diff --git`` is named "".

    >>> files(b"diff --git a/x b/x\n+1\ndiff --git a/y b/y\n+2\n")["x"]
    'diff --git a/x b/x\n+1'
    """
    texts = {}
    before, *parts = ("\n" + patch.decode("utf-8", "surrogateescape")).split("\n" + _FILE)
    for part in (before, *(_FILE + part for part in parts)):
        if text := part.strip():
            name = _NAME.search(text.partition("\n")[0].splitlines()[0])
            texts[name[1] if name else ""] = text
    return texts
