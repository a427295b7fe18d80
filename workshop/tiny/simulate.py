"""Many simulated episodes at once: the policy on the tiny engine's forward pass, with `Workspace` for tools.

For the warm start and for quick experiments only. `crrl hello` and every published number of it use the real agent,
gateway, sandbox and rewards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.engines.tiny.scheduler import Piece
from coderepairrl.tasks.mutants.corpus_tasks import Exercise
from coderepairrl.tokens import Codec
from coderepairrl.types import ToolCall
from workshop.tiny import prompt
from workshop.tiny.workspace import Workspace


@dataclass(slots=True)
class Attempt:
    """One simulated episode: its ids, a mask of the sampled ones, their logprobs, and the files."""

    exercise: Exercise
    workspace: Workspace
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    calls: list[ToolCall] = field(default_factory=list)
    ended: str = ""
    turn: list[int] = field(default_factory=list)

    @property
    def content(self) -> str:
        """The file with the bug, as the episode left it."""
        return self.workspace.files[self.exercise.path]

    @property
    def exact(self) -> bool:
        """Whether the file equals the repaired one."""
        return self.content == self.exercise.fixed

    @property
    def empty(self) -> bool:
        """Whether nothing was changed."""
        return self.workspace.files == dict(self.exercise.files)


class Simulation:
    """Runs episodes with `codec` and a model's weights, `slots` at a time."""

    def __init__(self, codec: Codec, model: TinyModel, *, calls: int, turn_tokens: int, tokens: int) -> None:
        self.codec = codec
        self.model = model
        self.calls, self.turn_tokens, self.tokens = calls, turn_tokens, min(tokens, model.context)

    def run(
        self, weights: Weights, exercises: Sequence[Exercise], temperature: float, generator: torch.Generator
    ) -> list[Attempt]:
        """One episode per exercise; temperature 0 is greedy. Slots are refilled as episodes end."""
        attempts = [self._open(exercise) for exercise in exercises]
        waiting = list(reversed(attempts))
        running: dict[int, tuple[Attempt, int]] = {}  # slot to attempt and the number of its tokens in the cache
        while waiting or running:
            for slot in range(self.model.slots):
                if slot not in running and waiting:
                    running[slot] = (waiting.pop(), 0)
            slots = sorted(running)
            pieces, ids, wanted = [], [], []
            for slot in slots:
                attempt, cached = running[slot]
                pieces.append(Piece(slot, cached, len(attempt.ids) - cached))
                ids += attempt.ids[cached:]
                wanted.append(len(ids) - 1)
            tokens, logprobs = _sample(self.model.forward(weights, ids, pieces, wanted), temperature, generator)
            for slot, token, logprob in zip(slots, tokens, logprobs, strict=True):
                attempt = running[slot][0]
                running[slot] = (attempt, len(attempt.ids))
                self._append_sampled(attempt, token, logprob)
                if attempt.ended:
                    del running[slot]
        return attempts

    def _open(self, exercise: Exercise) -> Attempt:
        ids = self.codec.render(prompt.opening(exercise.prompt), prompt.TOOLS)
        return Attempt(exercise, Workspace(exercise.files), ids, [False] * len(ids), [0.0] * len(ids))

    def _append_sampled(self, attempt: Attempt, token: int, logprob: float) -> None:
        attempt.ids.append(token)
        attempt.sampled.append(True)
        attempt.logprobs.append(logprob)
        attempt.turn.append(token)
        if token in self.codec.stop_ids:
            self._act(attempt)
        elif len(attempt.turn) >= self.turn_tokens or len(attempt.ids) >= self.tokens:
            attempt.ended = "tokens"

    def _act(self, attempt: Attempt) -> None:
        """Execute the calls of the finished reply, and append their results."""
        reply = self.codec.parse(attempt.turn)
        if not reply.calls:
            attempt.ended = "submitted"
            return
        results: list[dict[str, Any]] = []
        for call in reply.calls:
            if len(attempt.calls) >= self.calls:
                attempt.ended = "calls"
                return
            text = _execute(attempt.workspace, call.name, call.arguments)
            failed = text.startswith(("error", "exit"))
            attempt.calls.append(ToolCall(len(attempt.calls), call.name, call.arguments, not failed))
            results.append({"role": "tool", "content": text})
        if len(attempt.calls) >= self.calls:
            attempt.ended = "calls"
            return
        prompt_ids = attempt.ids[: len(attempt.ids) - len(attempt.turn)]
        added = self.codec.extend(prompt_ids, attempt.turn, results)
        if added is None:
            raise RuntimeError("the tiny policy's conversation could not be extended")
        attempt.ids += added
        attempt.sampled += [False] * len(added)
        attempt.logprobs += [0.0] * len(added)
        attempt.turn = []
        if len(attempt.ids) >= self.tokens - 1:
            attempt.ended = "tokens"


def _execute(workspace: Workspace, name: str, arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    return workspace.call(name, parsed) if isinstance(parsed, dict) else prompt.TEXTS.malformed


def _sample(logits_WV: Tensor, temperature: float, generator: torch.Generator) -> tuple[list[int], list[float]]:
    logprobs = torch.log_softmax(logits_WV / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator).squeeze(1)
    return tokens.tolist(), logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()
