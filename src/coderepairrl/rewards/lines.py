"""`patch_lines`: share of the oracle's changed lines."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from coderepairrl.rewards.changes import Changes, count_common_ends, find_edit_classes, read_changes
from coderepairrl.rewards.parse import parse_patch
from coderepairrl.rewards.syntax import Tokens
from coderepairrl.rewards.text import TextReward

CHANCE = 0.5
"""Token similarity that earns nothing. 90 % of random line pairs in files of SWE-bench oracles are below 0.44."""
REMOVED_WEIGHT = 0.5
"""Weight of removed lines, which only locate a change; a junk edit of the right line earns a third, not half."""
SAME_PLACE = 6
"""Most old lines between insertions at one place; with 3 lines of context, git shows them in one hunk."""
PAIRS = 20_000
"""Most line pairs that are compared by token; a longer alignment counts equal lines only."""
SEQUENCE_PAIRS = 400_000_000
"""Most pairs of whole sequences of lines or tokens; beyond, only common ends count."""


class PatchLines(TextReward):
    """Similarity of the changed lines (version 1), in [0, 1].

    A file is its removed lines R and added lines A, in old-file order, and its facts (`changes`). A line is its tokens,
    with indentation where it has meaning.

    Lines x, y of n and m tokens with a longest common subsequence of c have similarity

        s(x, y) = max(0, (2c / (n + m) - 1/2) / (1 - 1/2)),    s = 1 iff equal

    `M(X, Y)` is the largest sum of s over any alignment of two sequences of lines in order. With patch a, oracle g:

                1/2 M(R_a, R_g) + M(A_a, A_g) + |facts_a & facts_g|
        s_f = ------------------------------------------------------------------ ,
              1/2 max(|R_a|, |R_g|) + max(|A_a| + |facts_a|, |A_g| + |facts_g|)

        R = sum of s_f over the files of both / max(number of files of a, number of files of g)

    s_f = 0 unless a and g share a changed line or fact of f, or insert lines at most 6 old lines apart.

    Source: this project. Known weaknesses: another correct repair earns little; a moved line counts as changed.
    """

    name = "patch_lines"
    takes_verified = True
    repairs = True

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Raises `MalformedPatch`."""
        oracle_files, patch_files = parse_patch(oracle), parse_patch(patch)
        edit_classes = find_edit_classes(oracle_files, language)
        patch_changes, oracle_changes = (
            read_changes(files, edit_classes, language) for files in (patch_files, oracle_files)
        )
        if not patch_changes or not oracle_changes:
            return 0.0
        both = patch_changes.keys() & oracle_changes.keys()
        shared = sum(_score_file(patch_changes[path], oracle_changes[path]) for path in sorted(both))
        return shared / max(len(patch_changes), len(oracle_changes))


def _score_file(patch: Changes, oracle: Changes) -> float:
    """s_f of the formula."""
    removed, has_equal_removed = align_lines(patch.removed, oracle.removed)
    added, has_equal_added = align_lines(patch.added, oracle.added)
    facts = len(patch.facts & oracle.facts)
    if not (has_equal_removed or has_equal_added or facts or _has_near_insertions(patch.insertions, oracle.insertions)):
        return 0.0
    most_removed = max(len(patch.removed), len(oracle.removed))
    most_added = max(len(side.added) + len(side.facts) for side in (patch, oracle))
    return (REMOVED_WEIGHT * removed + added + facts) / (REMOVED_WEIGHT * most_removed + most_added)


def _has_near_insertions(patch: Sequence[int], oracle: Sequence[int]) -> bool:
    # both ascend, and a policy may insert at very many places: hence by bisection
    return any(bisect_left(oracle, at - SAME_PLACE) < bisect_right(oracle, at + SAME_PLACE) for at in patch)


def align_lines(a: Sequence[Tokens], b: Sequence[Tokens]) -> tuple[float, bool]:
    """Largest summed similarity of an alignment in order, and whether any line is equal."""
    start, end = count_common_ends(a, b)
    equal = start + end
    has_equal = equal > 0 or not set(a).isdisjoint(b)
    a, b = a[start : len(a) - end], b[start : len(b) - end]
    if not a or not b:
        return float(equal), has_equal
    if len(a) * len(b) > PAIRS:
        return float(equal + compute_lcs_length(a, b)), has_equal
    best = [0.0] * (len(b) + 1)  # best[j]: sum for the lines of `a` so far and the first j of `b`
    for x in a:
        diagonal = 0.0
        for j, y in enumerate(b, start=1):
            above = best[j]
            best[j] = max(above, best[j - 1], diagonal + compute_line_similarity(x, y))
            diagonal = above
    return equal + best[-1], has_equal


def compute_line_similarity(x: Tokens, y: Tokens) -> float:
    """s of the formula: 1 for equal lines, 0 at chance level; symmetric.

    >>> compute_line_similarity((b"return", b"a", b"-", b"b"), (b"return", b"a", b"+", b"b"))
    0.5
    """
    if x == y:
        return 1.0
    if 2 * min(len(x), len(y)) / (len(x) + len(y)) <= CHANCE:
        return 0.0
    return max(0.0, (dice(x, y) - CHANCE) / (1 - CHANCE))


def dice(x: Sequence[object], y: Sequence[object]) -> float:
    """Dice coefficient by the longest common subsequence.

    >>> dice("abcd", "abd")
    0.8571428571428571
    """
    if not x and not y:
        return 1.0
    start, end = count_common_ends(x, y)
    common = start + end + compute_lcs_length(x[start : len(x) - end], y[start : len(y) - end])
    return 2 * common / (len(x) + len(y))


def compute_lcs_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common subsequence; 0 beyond `SEQUENCE_PAIRS`.

    Bit-parallel (Crochemore et al. 2001, "A fast and practical bit-vector algorithm for the longest common subsequence
    problem").

    >>> compute_lcs_length("nematode", "empty")
    3
    """
    if len(a) < len(b):
        a, b = b, a
    if len(a) * len(b) > SEQUENCE_PAIRS:
        return 0
    places = _index_places(a, set(b))
    ones = (1 << len(a)) - 1
    row = ones
    for item in b:
        matches = row & places.get(item, 0)
        if matches:
            row = ((row + matches) | (row - matches)) & ones
    return len(a) - row.bit_count()


def _index_places(items: Sequence[object], wanted: set[object]) -> dict[object, int]:
    """Map each wanted item to bits: bit i says whether ``items[i]`` equals it."""
    places_by_item: dict[object, list[int]] = {}
    for place, item in enumerate(items):
        if item in wanted:
            places_by_item.setdefault(item, []).append(place)
    bits = {}
    for item, places in places_by_item.items():
        field = bytearray(places[-1] // 8 + 1)  # setting bits of a long integer one by one would be quadratic
        for place in places:
            field[place // 8] |= 1 << (place % 8)
        bits[item] = int.from_bytes(field, "little")
    return bits
