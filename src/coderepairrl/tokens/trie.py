"""Compressed trie (radix tree) of token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple


class PrefixMatch(NamedTuple):
    """Longest prefix of a sequence in a trie."""

    length: int
    owner: int | None
    """Sequence with this prefix; None if empty."""
    end: int | None
    """Last added sequence equal to it, if any."""


class Node:
    """Node, with the ids of the edge to it as `label`."""

    __slots__ = ("children", "end", "label", "owner")

    def __init__(self, label: array[int], owner: int) -> None:
        self.label = label
        self.owner = owner
        self.end: int | None = None
        self.children: dict[int, Node] = {}


class Trie:
    """Numbered sequences of ids below 2^31, in linear time and memory.

    >>> trie = Trie()
    >>> _ = trie.add((1, 2, 3, 4), 0), trie.add((1, 2, 9), 1)
    >>> len(trie), trie.longest((1, 2, 3, 7))
    (5, PrefixMatch(length=3, owner=0, end=None))
    """

    def __init__(self) -> None:
        self._root = Node(array("i"), -1)
        self._tokens = 0

    def __len__(self) -> int:
        """Number of distinct non-empty prefixes."""
        return self._tokens

    def add(self, ids: Sequence[int], number: int, after: Node | None = None) -> Node:
        """Add `ids` as sequence `number`, after the sequence that ends at `after`; returns the end node."""
        new = array("i", ids)
        node, at = after or self._root, 0
        while at < len(new):
            child = node.children.get(new[at])
            if child is None:
                child = node.children[new[at]] = Node(new[at:], number)
                self._tokens += len(child.label)
                node, at = child, len(new)
            else:
                shared = count_common_prefix(child.label, new, at)
                at += shared
                node = child if shared == len(child.label) else _split_node(node, child, shared)
        node.end = number
        return node

    def longest(self, ids: Sequence[int]) -> PrefixMatch:
        """Longest prefix of `ids` in any sequence."""
        sequence = array("i", ids)
        node, at = self._root, 0
        while at < len(sequence) and (child := node.children.get(sequence[at])) is not None:
            shared = count_common_prefix(child.label, sequence, at)
            at += shared
            if shared < len(child.label):
                return PrefixMatch(at, child.owner, None)
            node = child
        return PrefixMatch(at, node.owner if at else None, node.end)


def _split_node(parent: Node, child: Node, at: int) -> Node:
    upper = Node(child.label[:at], child.owner)
    parent.children[upper.label[0]] = upper
    child.label = child.label[at:]
    upper.children[child.label[0]] = child
    return upper


def count_common_prefix(first: Sequence[object], other: Sequence[object], start: int = 0) -> int:
    """Length of the common prefix of `first` and ``other[start:]``.

    >>> count_common_prefix("abcd", "xabd", 1)
    2
    """
    low, high = 0, min(len(first), len(other) - start)
    if first[:high] == other[start : start + high]:
        return high
    while high - low > 1:  # bisection: all slice comparisons together are as long as the first
        middle = (low + high) // 2
        if first[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
