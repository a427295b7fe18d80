"""A session: one episode's model calls, from admission to commitment."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from coderepairrl.errors import CodeRepairError, EngineFault, Fault, GatewayFault
from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.generation import Generation
from coderepairrl.gateway.request import ApiError, Message, Request, argument_defaults, next_key
from coderepairrl.gateway.tree import HistoryPolicy, Placement, TurnTree
from coderepairrl.protocols import Engine
from coderepairrl.tokens import Codec, Reply
from coderepairrl.types import Endpoint, Finish, Limits, Origin, Sampling, TokenSpan, Turn, path

OnTurn = Callable[[str, Turn], Awaitable[None] | None]
"""Called with the episode's id and a turn, before the turn's client learns of its end."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens that one reply may have, and the episode's limit that set them, if one did."""

    max_tokens: int
    limit: str


class Session:
    """The recorded calls of one episode.

    `fault` is the infrastructure fault that happened in it, if any: the episode is void. `limit` is the first
    limit that ended it or cut a reply short: ``calls``, ``tokens``, ``context``, ``time``, or empty.
    """

    def __init__(
        self,
        episode_id: str,
        endpoint: Endpoint,
        *,
        codec: Codec,
        engine: Engine,
        sampling: Sampling,
        seed: int,
        on_turn: OnTurn,
        history_policy: HistoryPolicy = "splice",
    ) -> None:
        self.episode_id = episode_id
        self.endpoint = endpoint
        self.fault: Fault | None = None
        self.limit = ""
        self.closed = False
        self._codec = codec
        self._engine = engine
        self._sampling = sampling
        self._seed = seed
        self._on_turn = on_turn
        self._tree = TurnTree(codec, history_policy)
        self._deadline = asyncio.get_running_loop().time() + endpoint.limits.seconds
        self._started = 0
        self._calls: dict[str, Call] = {}
        self._named: dict[str, tuple[Call, int]] = {}
        self._running: set[Call] = set()
        self._commits = asyncio.Lock()

    @property
    def key(self) -> str:
        """The secret that leads here."""
        return self.endpoint.api_key

    @property
    def limits(self) -> Limits:
        """What the episode may spend."""
        return self.endpoint.limits

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The committed turns, by index."""
        return tuple(self._tree.turns)

    def admit(self, request: Request, digest: str, retry: int | None) -> Call:
        """Start a call, or join the one that `request` repeats. Raises `ApiError`.

        `retry` is what the client's SDK counts (``x-stainless-retry-count``): 0 is a new call though its body
        be old (a second sample), more is a retry, and None is a client that does not say, whose repetition of
        a body is a retry while the first response has not been written to the end.
        """
        self._check_open()
        if repeated := self._repeated(digest, retry):
            return repeated
        if self._started >= self.limits.calls + 2:
            raise self._spent("calls", f"the episode's {self.limits.calls} + 2 model calls are made")
        if asyncio.get_running_loop().time() >= self._deadline:
            raise self._spent("time", f"the episode's {self.limits.seconds:g} seconds are over")
        placement = self._place(request)
        cached, prompt = len(placement.before), len(placement.before) + len(placement.given)
        budget = self._budget(request, prompt)
        call = self._calls[digest] = Call(digest, self._started, prompt=prompt, cached=cached)
        self._named[call.name] = call, request.opening
        self._started += 1
        self._start(call, request, placement, budget)
        return call

    def count(self, request: Request) -> int:
        """Tokens that the engine would be given for `request`; nothing is recorded. Raises `ApiError`."""
        self._check_open()
        placement = self._place(request)
        return len(placement.before) + len(placement.given)

    async def close(self) -> tuple[Turn, ...]:
        """Refuse all later requests, abort running calls, and return every turn."""
        self.closed = True
        running = list(self._running)
        for call in running:
            call.abort()
        for call in running:
            await call.wait()
        return self.turns

    def _check_open(self) -> None:
        if self.closed:
            raise ApiError(410, "episode_closed", "the episode is over")
        if self.fault is not None:
            raise _unavailable(self.fault)

    def _place(self, request: Request) -> Placement:
        try:
            return self._tree.place(self._conversation(request), request.tools)
        except ValueError as error:
            raise ApiError(400, "invalid_value", f"messages cannot be written: {error}", param="messages") from error

    def _conversation(self, request: Request) -> tuple[Message, ...]:
        """All messages of `request`, those that it only refers to included."""
        if not request.after:
            return request.messages
        call, inherited = self._named.get(request.after, (None, 0))
        if call is None or call.outcome is None:
            message = f"there is no finished response {request.after!r} in this episode"
            raise ApiError(404, "previous_response_not_found", message, param="previous_response_id")
        before = [message for turn in path(self._tree.turns, call.outcome.turn.index) for message in turn.messages]
        opening = request.messages[: request.opening]
        return (*opening, *before[inherited:], *request.messages[request.opening :])

    def _repeated(self, digest: str, retry: int | None) -> Call | None:
        call = self._calls.get(digest)
        if call is None or retry == 0 or call.aborted or call.failure is not None:
            return None
        if call.outcome is None:
            return call
        if (retry is None and call.delivered) or self._tree.extended(call.outcome.turn.index):
            return None
        return call

    def _budget(self, request: Request, prompt: int) -> Budget:
        rooms = {"tokens": self.limits.tokens - prompt, "context": self._engine.context - prompt}
        limit, room = min(rooms.items(), key=lambda item: item[1])
        if room <= 0:
            raise self._spent(limit, _too_long(prompt, prompt + room))
        wanted = min(self._sampling.max_tokens, self.limits.turn_tokens)
        if request.max_tokens is not None:
            wanted = min(wanted, request.max_tokens)
        return Budget(min(wanted, room), limit if room < wanted else "")

    def _spent(self, limit: str, message: str) -> ApiError:
        self.limit = self.limit or limit
        code = "context_length_exceeded" if limit in ("tokens", "context") else "episode_limit_reached"
        return ApiError(400, code, message, param="messages" if limit in ("tokens", "context") else None, limit=limit)

    def _start(self, call: Call, request: Request, placement: Placement, budget: Budget) -> None:
        prompt = placement.prompt
        stop = (*self._sampling.stop, *request.stop)
        sampling = replace(
            self._sampling,
            max_tokens=budget.max_tokens,
            stop_ids=tuple(dict.fromkeys((*self._codec.stop_ids, *self._sampling.stop_ids))),
            stop=stop,
        )
        reader = self._codec.stream(prompt, request.tools, stop=stop)
        generation = Generation(prompt, sampling, reader, vocab_size=self._codec.vocab_size)
        seed = request_seed(self._seed, call.ordinal)
        turn = Turn(
            index=-1,  # given at commitment
            base=placement.base,
            given=TokenSpan(tuple(placement.given), Origin.GIVEN),
            output=TokenSpan((), Origin.POLICY),
            sampling=sampling,
            overridden=_overridden(request.wishes, self._sampling),
            dialect=request.dialect,
            digest=call.digest,
            messages=placement.news,
            started=time.time(),
        )

        async def finish(error: BaseException | None) -> None:
            try:
                await self._finish(call, request, turn, placement.key, generation, budget, error)
            except Exception as failure:  # the log could not be written, or a bug of ours
                call.failure = _unavailable(self._failed(failure))
            finally:
                self._running.discard(call)

        self._running.add(call)
        call.start(generation.run(self._engine, seed, self._deadline, call.publish), finish)

    async def _finish(
        self,
        call: Call,
        request: Request,
        turn: Turn,
        key: bytes,
        generation: Generation,
        budget: Budget,
        error: BaseException | None,
    ) -> None:
        """Commit the turn, and only then let followers see the end."""
        aborted = call.aborted and isinstance(error, asyncio.CancelledError)
        fault = None if error is None or aborted else self._failed(error)
        reply, rest = generation.reply.close()
        message = _message(call, reply)
        output, tail = generation.spans()
        masked = "aborted" if aborted else "fault" if fault else "" if self._sampling.trainable else "sampling"
        turn = replace(
            turn,
            output=output,
            tail=tail,
            versions=tuple(generation.versions),
            finish=Finish.ABORT if error is not None else generation.finish,
            messages=(*turn.messages, message),
            masked=masked,
        )
        said = None if error is not None else next_key(key, message, argument_defaults(request.tools))
        turn = await self._commit(turn, said)
        if aborted:
            call.failure = (
                ApiError(410, "episode_closed", "the episode is over")
                if self.closed
                else ApiError(499, "client_closed_request", "the client went away")
            )
            return
        if fault is not None:
            call.failure = _unavailable(fault)
            return
        if generation.out_of_time:
            self.limit = self.limit or "time"
        elif turn.finish is Finish.LENGTH:
            self.limit = self.limit or budget.limit
        call.publish(rest)
        call.outcome = Outcome(
            turn=turn,
            message=message,
            malformed=reply.malformed,
            reasoning=generation.reply.reasoning,
            stop=generation.reply.stopped_by,
            remaining_tokens=max(0, min(self.limits.tokens, self._engine.context) - call.prompt - len(output)),
            remaining_calls=max(0, self.limits.calls + 2 - self._started),
            limit=self.limit,
        )

    async def _commit(self, turn: Turn, key: bytes | None) -> Turn:
        """Give `turn` its index and record it, one at a time: the log's order is the tree's."""
        async with self._commits:
            turn = replace(turn, index=len(self._tree.turns), ended=time.time())
            recorded = self._on_turn(self.episode_id, turn)
            if inspect.isawaitable(recorded):
                await recorded
            self._tree.add(turn, key)
        return turn

    def _failed(self, error: BaseException) -> Fault:
        """The session's fault, which is its first."""
        if isinstance(error, Fault):
            fault = error
        elif isinstance(error, ValueError) and not isinstance(error, UnicodeError):
            fault = EngineFault(f"the engine refused a prompt: {error}")
        elif isinstance(error, CodeRepairError):  # a full disk, say: whoever writes next ends the run and says so
            fault = GatewayFault(str(error), fix=error.fix)
        else:
            log.error("episode %s: unexpected %r", self.episode_id, error, exc_info=error)
            fault = GatewayFault(f"{type(error).__name__}: {error}")
        self.fault = self.fault or fault
        return fault


def request_seed(seed: int, ordinal: int) -> int:
    """Seed (63 bits) of a session's call number `ordinal`, counted as calls are admitted, retries left out.

    >>> request_seed(7, 0) == request_seed(7, 0) != request_seed(7, 1)
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{ordinal}".encode(), digest_size=8).digest()) >> 1


def _too_long(prompt: int, most: int) -> str:
    """In the words by which agents recognise it, whichever provider they were written for."""
    return f"prompt is too long: {prompt} tokens > {most} maximum; this model's maximum context length is {most} tokens"


def _overridden(wishes: Mapping[str, Any], sampling: Sampling) -> tuple[str, ...]:
    missing = object()
    return tuple(
        f"{name}={json.dumps(value, sort_keys=True)}"
        for name, value in sorted(wishes.items())
        if getattr(sampling, name, missing) != value
    )


def _message(call: Call, reply: Reply) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call.tool_call_id(position, function),
                "type": "function",
                "function": {"name": function.name, "arguments": function.arguments},
            }
            for position, function in enumerate(reply.calls)
        ]
    return message


def _unavailable(fault: Fault) -> ApiError:
    return ApiError(503, f"{fault.boundary}_fault", f"the {fault.boundary} failed: {fault}")
