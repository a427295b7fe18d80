"""Continuous batching, without tensors: which tokens run next, and where the cache stores them.

The cache has one row (slot) per sequence. A finished request's keys stay in its slot, and later prompts with the same
prefix reuse them: in place for a conversation's next turn, otherwise as a copy. Requests wait in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from coderepairrl.types import Sampling

STEP_TOKENS = 1024
"""Most tokens per forward pass, so that a long prompt does not delay all other requests."""

WORTH_WAITING = 32
"""A request waits for another one that is computing at least this many tokens of the same prompt."""


class Piece(NamedTuple):
    """Tokens ``start : start + size`` of the sequence in `slot`."""

    slot: int
    start: int
    size: int


@dataclass(slots=True, eq=False)
class SequenceRequest:
    """A sequence being generated."""

    key: int
    """Id of the request; rises in order of arrival."""
    tokens: list[int]
    """Prompt and sampled ids."""
    sampling: Sampling
    draws: list[float]
    """Uniform random numbers, one per token to sample."""
    room: int
    """Number of tokens that it may still sample."""
    stop: frozenset[int] = frozenset()
    sampled: int = 0
    """Number of tokens sampled."""
    slot: int = -1
    computed: int = 0
    """Number of leading tokens whose keys and values are cached."""


@dataclass(slots=True)
class Step:
    """One forward pass over `ids`; `samplers` get tokens from the logits at rows `output_rows`."""

    ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    samplers: list[SequenceRequest] = field(default_factory=list)
    output_rows: list[int] = field(default_factory=list)


class Scheduler:
    """Assigns slots, reuses shared prefixes and fills forward passes.

    `copy(source, target, count)` copies keys and values of the first `count` tokens between slots.
    """

    def __init__(self, *, slots: int, context: int, copy: Callable[[int, int, int], None]) -> None:
        self.context = context
        self.waiting: deque[SequenceRequest] = deque()
        self.running: dict[int, SequenceRequest] = {}
        self.counters = {"prompt_tokens": 0, "prefix_hit_tokens": 0, "generated_tokens": 0}
        """Totals since the start."""
        self._copy = copy
        self._owner: list[SequenceRequest | None] = [None] * slots
        self._ids = np.zeros((slots, context), dtype=np.int32)
        self._known = np.zeros(slots, dtype=np.int64)
        """Number of valid ids in each row of `_ids`, computed or not."""
        self._computed = np.zeros(slots, dtype=np.int64)
        self._touched = np.zeros(slots, dtype=np.int64)
        """Number of cells of each slot written since the last `invalidate_cache`."""
        self._released_at = [0] * slots
        self._clock = 0
        """Counts releases: the slot released longest ago is reused first."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def free_tokens(self) -> int:
        """Number of cache cells that no running request occupies."""
        return int(self._ids.size - sum(len(request.tokens) for request in self.running.values()))

    def add(self, request: SequenceRequest) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def abort(self, key: int) -> None:
        """Drop a request; unknown and finished ones are ignored."""
        if request := self.running.get(key):
            self._release(request)
        self.waiting = deque(request for request in self.waiting if request.key != key)

    def plan(self) -> Step:
        """Admit requests, then fill a step: first the next token of each sequence, then prompts, oldest first."""
        self._admit()
        step = Step()
        budget = STEP_TOKENS
        prefilling: list[SequenceRequest] = []
        for request in sorted(self.running.values(), key=lambda request: request.slot):
            if len(request.tokens) - request.computed == 1 and budget:
                self._schedule(step, request, 1)
                budget -= 1
            else:
                prefilling.append(request)
        for request in sorted(prefilling, key=lambda request: request.key):
            if count := min(len(request.tokens) - request.computed, budget):
                self._schedule(step, request, count)
                budget -= count
        return step

    def mark_computed(self, step: Step) -> None:
        """Mark the step's keys and values as cached."""
        for piece in step.pieces:
            end = piece.start + piece.size
            self._computed[piece.slot] = end
            if request := self._owner[piece.slot]:
                request.computed = end

    def append_token(self, request: SequenceRequest, token: int) -> bool:
        """Append a token; returns whether the request ended and released its slot."""
        slot = request.slot
        self._ids[slot, len(request.tokens)] = token
        self._known[slot] += 1
        request.tokens.append(token)
        request.sampled += 1
        request.room -= 1
        self.counters["generated_tokens"] += 1
        if request.room and token not in request.stop:
            return False
        self._release(request)
        return True

    def invalidate_cache(self) -> list[tuple[int, int]]:
        """Invalidate the cache for new weights; running requests are recomputed.

        Returns the slots that were written, with the number of cells written in each.
        """
        written = [(int(slot), int(self._touched[slot])) for slot in np.flatnonzero(self._touched)]
        self._computed[:] = 0
        self._touched[:] = 0
        for slot, owner in enumerate(self._owner):
            if owner is None:
                self._known[slot] = 0
            else:
                owner.computed = 0
        return written

    def _schedule(self, step: Step, request: SequenceRequest, count: int) -> None:
        start = request.computed
        step.pieces.append(Piece(request.slot, start, count))
        step.ids.extend(request.tokens[start : start + count])
        self._touched[request.slot] = max(self._touched[request.slot], start + count)
        if start + count == len(request.tokens):
            step.samplers.append(request)
            step.output_rows.append(len(step.ids) - 1)

    def _release(self, request: SequenceRequest) -> None:
        self._clock += 1
        self._owner[request.slot] = None
        self._released_at[request.slot] = self._clock
        self._known[request.slot] = self._computed[request.slot]
        del self.running[request.key]

    def _admit(self) -> None:
        postponed: deque[SequenceRequest] = deque()
        while self.waiting and len(self.running) < len(self._owner):
            request = self.waiting.popleft()
            shared = self._count_shared(request.tokens)
            valid = np.minimum(shared, self._computed)
            if shared.max() - valid.max() >= WORTH_WAITING:
                postponed.append(request)  # another request is computing this prompt: copy its keys afterwards
                continue
            self._assign_slot(request, int(valid.argmax()), int(valid.max()))
        self.waiting.extendleft(reversed(postponed))  # in order of arrival again

    def _count_shared(self, tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Number of leading ids shared with each slot, not counting the last id."""
        size = len(tokens) - 1  # the last id always runs, for its logits
        differs = self._ids[:, :size] != np.array(tokens[:-1], dtype=np.int32)
        shared = np.where(differs.any(1), differs.argmax(1), size) if size else np.zeros(len(self._known), np.int64)
        return np.minimum(shared, self._known)

    def _assign_slot(self, request: SequenceRequest, source: int, count: int) -> None:
        """Start `request` in a free slot, with the first `count` keys of the slot `source`."""
        idle = [slot for slot, owner in enumerate(self._owner) if owner is None]
        # in place only if all of the source is reused; else its keys may serve further prompts
        continues_source = self._owner[source] is None and count > 0 and count == self._computed[source]
        others = [slot for slot in idle if slot != source or not count] or idle
        oldest = min(others, key=lambda slot: (self._computed[slot] > 0, self._released_at[slot]))
        slot = source if continues_source else oldest
        if count and slot != source:
            self._copy(source, slot, count)
            self._touched[slot] = max(self._touched[slot], count)
        request.slot, request.computed = slot, count
        self._owner[slot] = request
        self._ids[slot, : len(request.tokens)] = request.tokens
        self._known[slot], self._computed[slot] = len(request.tokens), count
        self.running[request.key] = request
        self.counters["prompt_tokens"] += len(request.tokens)
        self.counters["prefix_hit_tokens"] += count
