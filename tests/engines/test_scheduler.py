"""Scheduling without a model: which tokens are computed, which are copied, which requests wait."""

from __future__ import annotations

from coderepairrl.engines.tiny.scheduler import STEP_TOKENS, Piece, Scheduler, SequenceRequest
from coderepairrl.types import Sampling


class Bench:
    """A scheduler whose model samples the id 1000 + n as its n-th token."""

    def __init__(self, slots: int = 4, context: int = 4096) -> None:
        self.copies: list[tuple[int, int, int]] = []
        self.scheduler = Scheduler(slots=slots, context=context, copy=lambda *copy: self.copies.append(copy))

    def add(self, key: int, tokens: list[int], room: int = 3) -> SequenceRequest:
        request = SequenceRequest(key, list(tokens), Sampling(), [], room)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Piece]:
        step = self.scheduler.plan()
        assert len(step.ids) == sum(piece.size for piece in step.pieces) <= STEP_TOKENS
        assert len({piece.slot for piece in step.pieces}) == len(step.pieces)
        self.scheduler.mark_computed(step)
        for request in step.samplers:
            self.scheduler.append_token(request, 1000 + request.sampled)
        return step.pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self.scheduler.is_busy:
            pieces += self.step()
        return pieces


def test_a_conversations_next_turn_computes_only_what_is_new() -> None:
    bench = Bench()
    first = bench.add(0, list(range(100)))
    bench.finish()
    bench.add(1, [*first.tokens, 7, 8], room=1)
    # 100 + 3 tokens, of which the last sampled one never ran
    assert bench.finish() == [Piece(first.slot, 102, 3)]
    assert bench.copies == []
    assert bench.scheduler.counters["prefix_hit_tokens"] == 102


def test_attempts_at_one_task_compute_the_prompt_once() -> None:
    bench = Bench(slots=8)
    prompt = list(range(500))
    for key in range(8):
        bench.add(key, prompt)
    pieces = bench.finish()
    # the prompt once, its last token for each of the other seven, and two of the three sampled tokens of each
    assert sum(piece.size for piece in pieces) == 500 + 7 + 8 * 2
    assert sorted(size for _, _, size in bench.copies) == [499] * 7


def test_a_fork_leaves_the_conversation_it_came_from_in_the_cache() -> None:
    bench = Bench()
    first = bench.add(0, list(range(100)))
    bench.finish()
    bench.add(1, [*range(60), 9, 9, 9], room=1)
    fork = bench.finish()
    assert [piece.start for piece in fork] == [60] and fork[0].slot != first.slot
    bench.add(2, [*first.tokens, 5], room=1)
    assert [piece.start for piece in bench.finish()] == [102]


def test_a_long_prompt_does_not_delay_other_requests() -> None:
    bench = Bench(context=8192)
    short = bench.add(0, [1, 2, 3], room=50)
    bench.step()
    bench.add(1, list(range(3 * STEP_TOKENS)), room=1)
    for expected in range(2, 5):
        bench.step()
        assert short.sampled == expected


def test_requests_that_wait_for_an_aborted_request_compute_its_prompt_themselves() -> None:
    bench = Bench()
    prompt = list(range(3 * STEP_TOKENS))
    bench.add(0, prompt)
    waiting = bench.add(1, prompt, room=1)
    bench.step()
    assert waiting.slot == -1
    bench.scheduler.abort(0)
    bench.finish()
    assert waiting.sampled == 1
    assert bench.scheduler.counters["prefix_hit_tokens"] == STEP_TOKENS
