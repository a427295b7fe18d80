"""A trie of token ids: what sequences begin with alike is held once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class Known(NamedTuple):
    """The longest beginning of a sequence that a trie holds."""

    length: int
    """In tokens."""
    owner: int | None
    """A sequence that begins with it; None if not even the first token is known."""
    end: int | None
    """The last added of the sequences that are it and nothing more, if there is one."""


class Node:
    """Tokens between two branches, below those of its parents. Its end stays its end when others branch off."""

    __slots__ = ("children", "end", "label", "owner")

    def __init__(self, label: array[int], owner: int) -> None:
        self.label = label
        self.owner = owner
        self.end: int | None = None
        self.children: dict[int, Node] = {}


class Trie:
    """Sequences of ids below 2^31, by a number of each.

    A node has as many tokens as no branch divides, so that memory and time are linear in tokens: 4 bytes each, and two
    nodes at most for a sequence.

    >>> trie = Trie()
    >>> _ = trie.add((1, 2, 3, 4), 0), trie.add((1, 2, 9), 1)
    >>> len(trie), trie.longest((1, 2, 3, 7))
    (5, Known(length=3, owner=0, end=None))
    """

    def __init__(self) -> None:
        self._root = Node(array("i"), -1)
        self._tokens = 0

    def __len__(self) -> int:
        """Distinct tokens: as many as there are different beginnings, the empty one left out."""
        return self._tokens

    def add(self, ids: Sequence[int], number: int, after: Node | None = None) -> Node:
        """Hold `ids` as sequence `number`; where it ends.

        With `after`, what `add` gave for another sequence, `ids` are only what comes after that one.
        """
        new = array("i", ids)
        node, at = after or self._root, 0
        while at < len(new):
            child = node.children.get(new[at])
            if child is None:
                child = node.children[new[at]] = Node(new[at:], number)
                self._tokens += len(child.label)
                node, at = child, len(new)
            else:
                same = common(child.label, new, at)
                at += same
                node = child if same == len(child.label) else _branched(node, child, same)
        node.end = number
        return node

    def longest(self, ids: Sequence[int]) -> Known:
        """The longest beginning of `ids` that a sequence begins with."""
        wanted = array("i", ids)
        node, at = self._root, 0
        while at < len(wanted) and (child := node.children.get(wanted[at])) is not None:
            same = common(child.label, wanted, at)
            at += same
            if same < len(child.label):
                return Known(at, child.owner, None)
            node = child
        return Known(at, node.owner if at else None, node.end)


def _branched(parent: Node, child: Node, at: int) -> Node:
    """A new node for the first `at` tokens of `child`, which stays below it with the others."""
    upper = Node(child.label[:at], child.owner)
    parent.children[upper.label[0]] = upper
    child.label = child.label[at:]
    upper.children[child.label[0]] = child
    return upper


def common(one: Sequence[object], other: Sequence[object], start: int = 0) -> int:
    """How many items `one` begins with that are those of `other` from `start` on. Both are strings, or arrays of ids.

    >>> common("abcd", "xabd", 1)
    2
    """
    low, high = 0, min(len(one), len(other) - start)
    if one[:high] == other[start : start + high]:
        return high
    while high - low > 1:  # halves, so that all comparisons together are as long as the first
        middle = (low + high) // 2
        if one[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
