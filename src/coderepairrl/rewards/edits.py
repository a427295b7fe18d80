"""`patch_edits`: similarity of two patches' edits and their places."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain

from cydifflib import SequenceMatcher, get_close_matches

from coderepairrl.rewards.changes import (
    Changes,
    EditClass,
    count_common_ends,
    find_free_files,
    is_parsable,
    read_changes,
    read_code_changes,
    read_old_lines,
)
from coderepairrl.rewards.lines import dice
from coderepairrl.rewards.parse import FilePatch, parse_patch
from coderepairrl.rewards.syntax import Tokens
from coderepairrl.rewards.text import TextReward

REACH = 6
"""Old lines over which nearness falls to 1/e; with 3 lines of context, git shows edits this close in one hunk."""
# most token pairs of one edit; beyond, all between the two sides' common ends counts as changed
_MOST_TOKEN_PAIRS = 250_000
# prefix of copied tokens only
_COPY_MARK = b"\1"
# least similarity (difflib's ratio) of an inserted line to an old one that it copies in part
_LEAST_COPIED = 0.75
_MOST_LINE_TOKENS, _MOST_COMPARED = 200, 4_000_000
"""Most tokens of an inserted line, and token pairs with old lines; beyond, only whole copies are found."""
_BRACKETS = frozenset(bytes((byte,)) for byte in b"()[]{}\"'`")

Region = tuple[int, int]
"""Start and end of an edit in old lines."""
Token = tuple[object, ...]
"""Tag and text of a changed token; or a fact."""


class PatchEdits(TextReward):
    """Similarity of added and of changed tokens, times nearness to the oracle's edits (version 3), in [0, 1].

    Whitespace is ignored unless the oracle uses it, comments and blank lines unless it has nothing else
    (`read_code_changes`). For file f, patch a and oracle g, A is the sequence of tokens of all added lines; C is that
    of changed tokens (tagged as deleted or inserted; without brackets and quotes unless the oracle changes nothing
    else) and of facts.

    An added line that the old file has nearby (in a hunk of either patch) and the oracle does not add is a copy: its
    tokens match none of C_g, nor does its deletion if an edit moves it. If a line inserted where none is
    removed has a difflib ratio of at least .75 to an old line nearby, their common part is a copy.

        D(x, y) = 2 LCS(x, y) / (|x| + |y|)                            (1 if both are empty)

        s_f = N_f D(A_a, A_g) D(C_a, C_g)

        R = sum of s_f over the files of both / max(number of files of a, number of files of g)

    N_f is the mean, over both patches, of the mean nearness of their edits: ``exp(-d / 6)`` for d old lines to the
    other patch's nearest edit; a fact is near only an equal one. s_f = 0 for a Python file that both create if only the
    oracle's parses. Up to 3 files that the oracle does not touch are free: tests by name, and new files that parse.

    Source: this project, by cross-validation (docs/guides/rewards.md). Known weaknesses: another correct repair earns
    little; code that never runs earns about half.
    """

    name = "patch_edits"
    takes_verified = True
    repairs = True
    version = 3

    def compare(self, oracle: bytes, patch: bytes, language: str = "") -> float:
        """Reward of `patch`. Raises `MalformedPatch`."""
        oracle_files, classes, oracle_changes, oracle_lines = _parse_oracle(oracle, language)
        files = parse_patch(patch)
        patch_changes = read_changes(files, classes, language, marked=True)
        if not patch_changes or not oracle_changes:
            return 0.0
        broken = _find_broken_files(files, oracle_files)
        both = sorted((patch_changes.keys() & oracle_changes.keys()) - broken)  # sums are rounded, so in one order
        patch_lines = read_old_lines(files, classes, language)
        shared = sum(
            _score_file(patch_changes[path], oracle_changes[path], patch_lines[path] | oracle_lines[path])
            for path in both
        )
        counted = patch_changes.keys() - find_free_files(files, {file.path for file in oracle_files})
        return shared / max(len(counted), len(oracle_changes))


@lru_cache(maxsize=32)
def _parse_oracle(
    oracle: bytes, language: str
) -> tuple[tuple[FilePatch, ...], EditClass, dict[str, Changes], dict[str, set[Tokens]]]:
    files = parse_patch(oracle)
    classes, oracle_changes = read_code_changes(files, language)
    return files, classes, oracle_changes, read_old_lines(files, classes, language)


def _find_broken_files(patch: Sequence[FilePatch], oracle: Sequence[FilePatch]) -> set[str]:
    """Files that both create, but only the oracle's parse."""
    sound = {file.path for file in oracle if not file.old and is_parsable(file)}
    return {file.path for file in patch if not file.old and file.path in sound and not is_parsable(file)}


def _score_file(patch: Changes, oracle: Changes, old: set[Tokens]) -> float:
    """s_f of the formula; `old`: known lines of the old file."""
    near = (_compute_mean_nearness(patch, oracle) + _compute_mean_nearness(oracle, patch)) / 2
    if near == 0.0:
        return 0.0
    copies = _find_copies(patch, old, set(oracle.added))
    patch_tokens, oracle_tokens = _list_changed_tokens(patch, copies), _list_changed_tokens(oracle, {})
    if any(token not in _BRACKETS for _, token in oracle_tokens):
        patch_tokens, oracle_tokens = (
            [tagged for tagged in side if tagged[1] not in _BRACKETS] for side in (patch_tokens, oracle_tokens)
        )
    added = dice(_join_tokens(patch.added, {}), _join_tokens(oracle.added, {}))
    return near * added * dice(patch_tokens, oracle_tokens)


def _compute_mean_nearness(one: Changes, other: Changes) -> float:
    """Mean nearness of the edits and facts of `one` to those of `other`."""
    targets = [(edit.at, edit.at + edit.height) for edit in other.edits]
    total = float(len(one.facts & other.facts))
    for edit in one.edits:
        total += math.exp(-_measure_distance((edit.at, edit.at + edit.height), targets) / REACH)
    return total / (len(one.facts) + len(one.edits))


def _measure_distance(region: Region, targets: Sequence[Region]) -> float:
    """Old lines between `region` and the nearest of the sorted `targets`; infinite without one."""
    at = bisect_left(targets, region)
    neighbours = targets[max(at - 1, 0) : at + 1]
    return min((max(start - region[1], region[0] - end, 0) for start, end in neighbours), default=math.inf)


def _find_copies(patch: Changes, old: set[Tokens], oracle_added: set[Tokens]) -> dict[Tokens, Tokens]:
    """Added lines that copy an old one, with copied tokens marked."""
    copies = {line: tuple(_COPY_MARK + token for token in line) for line in set(patch.added) & old - oracle_added}
    inserted = {
        line for edit in patch.edits if not edit.removed for line in edit.added if len(line) <= _MOST_LINE_TOKENS
    }
    inserted -= oracle_added | old
    if sum(map(len, inserted)) * sum(map(len, old)) <= _MOST_COMPARED:
        for line in inserted:
            for nearest in get_close_matches(line, old, 1, _LEAST_COPIED):
                marked = list(line)
                for i, _, size in SequenceMatcher(None, line, nearest, autojunk=False).get_matching_blocks():
                    marked[i : i + size] = [_COPY_MARK + token for token in line[i : i + size]]
                copies[line] = tuple(marked)
    return copies


def _join_tokens(lines: Sequence[Tokens], copies: Mapping[Tokens, Tokens]) -> list[bytes]:
    return list(chain.from_iterable(copies.get(line, line) for line in lines))


def _list_changed_tokens(change: Changes, copies: Mapping[Tokens, Tokens]) -> list[Token]:
    """C of the formula: tokens tagged ``-`` or ``+``, then facts."""
    changed_tokens: list[Token] = []
    for edit in change.edits:
        moved = {line: copies[line] for line in copies.keys() & edit.added}
        old, new = _join_tokens(edit.removed, moved), _join_tokens(edit.added, copies)
        start, end = count_common_ends(old, new)
        for i, i_end, j, j_end in _find_changed_spans(old[start : len(old) - end], new[start : len(new) - end]):
            changed_tokens += [("-", token) for token in old[start + i : start + i_end]]
            changed_tokens += [("+", token) for token in new[start + j : start + j_end]]
    return changed_tokens + sorted(change.facts)


def _find_changed_spans(old: Sequence[bytes], new: Sequence[bytes]) -> list[tuple[int, int, int, int]]:
    if not old or not new or len(old) * len(new) > _MOST_TOKEN_PAIRS:
        return [(0, len(old), 0, len(new))]
    opcodes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [span for tag, *span in opcodes if tag != "equal"]
