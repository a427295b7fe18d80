"""A session: one episode's model calls, from admission to commitment."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from coderepairrl.errors import CodeRepairError, EngineFault, Fault, GatewayFault
from coderepairrl.gateway.call import Call, Outcome
from coderepairrl.gateway.incoming import Body, Incoming
from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.gateway.source import Generating, Source
from coderepairrl.gateway.tree import Placement
from coderepairrl.gateway.workers import Desk, Workers
from coderepairrl.processes import clock
from coderepairrl.tokens import Reply, TooLong
from coderepairrl.types import Endpoint, Finish, Limits, Origin, Sampling, TokenSpan, Turn, conversation

OnTurn = Callable[[str, Turn], Awaitable[None] | None]
"""Called with the episode's id and a turn, before the turn's client learns of its end."""

REQUESTS = 16
"""Requests of any kind for each call that there may be: counts of tokens, retries, refusals."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens that one reply may have, and the episode's limit that set them, if one did."""

    max_tokens: int
    limit: str


class _Begun(NamedTuple):
    """A call that has found its place."""

    placement: Placement
    budget: Budget
    generation: Generating


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
        source: Source,
        workers: Workers,
        sampling: Sampling,
        seed: int,
        on_turn: OnTurn,
    ) -> None:
        self.episode_id = episode_id
        self.endpoint = endpoint
        self.fault: Fault | None = None
        self.limit = ""
        self.closed = False
        self._source = source
        self._sampling = sampling
        self._seed = seed
        self._on_turn = on_turn
        self.incoming = Incoming()
        self._desk = Desk(workers, source.writer, self._most[1])
        self._tree = source.tree(self._desk)
        self._placing = asyncio.Lock()
        self._deadline = asyncio.get_running_loop().time() + endpoint.limits.seconds
        self._started = 0
        self._requests = 0
        self._calls: dict[str, Call] = {}
        self._latest: Call | None = None
        self._named: dict[str, tuple[Call, Request]] = {}
        self._notes: Mapping[str, Any] = {}
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
    def spent(self) -> bool:
        """Whether it answers no further call."""
        ended = self.closed or self.fault is not None or bool(self.limit)
        late = asyncio.get_running_loop().time() >= self._deadline
        return ended or late or self._started >= self.limits.calls + 2

    @property
    def untouched(self) -> bool:
        """Whether nothing was recorded in it, and nothing runs."""
        return not self._tree.turns and not self._running

    @property
    def abandoned(self) -> bool:
        """Whether the client of its latest call went away without the whole response."""
        return self._latest is not None and self._latest.abandoned

    @property
    def _most(self) -> tuple[str, int]:
        """The limit that a long conversation meets first, and the tokens that it allows."""
        tokens, context = self.limits.tokens, self._source.context
        return ("tokens", tokens) if context is None or tokens <= context else ("context", context)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The committed turns, by index."""
        return tuple(self._tree.turns)

    @property
    def answered(self) -> bool:
        """Whether the model has replied: in whole, or in part before the client went away."""
        return any(turn.finish is not Finish.ABORT or turn.sampled for turn in self.turns)

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
        request = self._whole(request)
        call = Call(digest, self._started)
        self._start(call, request)  # before it can be joined
        self._calls[digest] = self._latest = call
        self._named[call.name] = call, self._remembered(request)
        self._started += 1
        return call

    def find(self, name: str) -> tuple[Request, Call, Outcome] | None:
        """The call of that name, if its client may ask for it again and it has ended with an outcome."""
        call, request = self._named.get(name, (None, None))
        if call is None or request is None or call.outcome is None or not request.store:
            return None
        return request, call, call.outcome

    def forget(self, name: str) -> None:
        """No longer answer for the call of that name. What was recorded of it stays."""
        self._named.pop(name, None)

    def check_requests(self) -> None:
        """Count a request, whatever it is. Raises `ApiError` where there were too many: none of it is read."""
        self._check_open()
        self._requests += 1
        if self._requests > REQUESTS * (self.limits.calls + 2):
            raise self._spent("calls", f"an episode of {self.limits.calls} model calls makes not so many requests")

    def refused(self, error: ApiError) -> None:
        """A request that was no call is counted as one: an agent that keeps sending what cannot be answered ends.

        What is never answered here (tokens that nobody can count) is asked for by whoever does not know, at every turn.
        """
        if error.code not in ("episode_limit_reached", "not_supported"):
            self._started += 1

    async def read(self, name: str, body: Body) -> Request:
        """`body` as a request of the dialect or counter `name`. Raises `ApiError`."""
        try:
            return await self._desk.parse(name, body)
        except TooLong as error:
            raise self._too_long(error.tokens) from error

    async def count(self, request: Request) -> int:
        """Tokens that the engine would be given for `request`; nothing is recorded. Raises `ApiError`."""
        self._check_open()
        if not self._source.counts:
            raise ApiError(404, "not_supported", "this model's tokens cannot be counted before it is asked")
        return self._tree.known(await self._place(self._whole(request)))

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

    async def _place(self, request: Request) -> Placement:
        try:
            async with self._placing:
                return await self._tree.place(request.messages, request.tools)
        except TooLong as error:
            raise self._too_long(error.tokens) from error
        except ValueError as error:
            raise ApiError(400, "invalid_value", f"messages cannot be written: {error}", param="messages") from error

    def _whole(self, request: Request) -> Request:
        """`request` with all messages of its conversation, those that it only refers to included."""
        if not request.after:
            return request
        call, asked = self._named.get(request.after, (None, None))
        if call is None or asked is None or call.outcome is None:
            message = f"there is no finished response {request.after} in this episode"
            raise ApiError(404, "previous_response_not_found", message, param="previous_response_id")
        before = conversation(self._tree.turns, call.outcome.turn.index)[asked.opening :]
        at = request.opening
        return replace(
            request,
            messages=(*request.messages[:at], *before, *request.messages[at:]),
            hidden=tuple((index + len(before), what) for index, what in request.hidden),
            after="",
        )

    def _remembered(self, request: Request) -> Request:
        """What later requests may need of `request`. What it has in common with the last one is kept once."""
        notes = _shared(self._notes, request.notes) if request.store else {}
        self._notes = notes or self._notes
        return replace(request, messages=(), tools=(), wishes={}, hidden=(), notes=notes)

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
        limit, most = self._most
        room = most - prompt
        if room <= 0:
            raise self._too_long(prompt)
        wanted = min(self._sampling.max_tokens, self.limits.turn_tokens)
        if request.max_tokens is not None:
            wanted = min(wanted, request.max_tokens)
        return Budget(min(wanted, room), limit if room < wanted else "")

    def _too_long(self, prompt: int) -> ApiError:
        limit, most = self._most
        return self._spent(limit, _too_long(prompt, most))

    def _spent(self, limit: str, message: str) -> ApiError:
        self.limit = self.limit or limit
        code = "context_length_exceeded" if limit in ("tokens", "context") else "episode_limit_reached"
        return ApiError(400, code, message, param="messages" if limit in ("tokens", "context") else None, limit=limit)

    def _start(self, call: Call, request: Request) -> None:
        begun: _Begun | None = None

        async def work() -> None:
            nonlocal begun
            placement = await self._place(request)
            call.prompt, call.cached = self._tree.known(placement), placement.cached
            budget = self._budget(request, call.prompt)
            sampling = replace(self._sampling, max_tokens=budget.max_tokens)
            generation = self._source.begin(request, placement, sampling, request_seed(self._seed, call.ordinal))
            begun = _Begun(placement, budget, generation)
            await generation.run(self._deadline, call.publish)

        async def finish(error: BaseException | None) -> None:
            try:
                await self._finish(call, request, begun, error)
            except Exception as failure:  # the log could not be written, or a bug of ours
                call.failure = _unavailable(self._failed(failure))
            finally:
                self._running.discard(call)

        self._running.add(call)
        call.start(work, finish)

    async def _finish(self, call: Call, request: Request, begun: _Begun | None, error: BaseException | None) -> None:
        """Commit the turn, and only then let followers see the end."""
        if isinstance(error, ApiError):  # nothing was sampled: the engine or the remote refused the request
            self.limit = self.limit or error.limit
            call.failure = error.again()
            return
        aborted = call.aborted and isinstance(error, asyncio.CancelledError)
        failure = None
        if error is not None:
            failure = self._gone() if aborted else _unavailable(self._failed(error))
        if begun is None:  # nothing was asked of the engine or the remote
            call.failure = failure
            return
        reply, rest = begun.generation.close()
        message = _message(call, reply)
        unfinished = "" if error is None else "aborted" if aborted else "fault"
        turn = await self._commit(call, request, begun, message, unfinished)
        if failure is not None:
            call.failure = failure
            return
        call.publish(rest)
        self._note_limit(turn, begun)
        call.outcome = self._outcome(turn, begun.generation, reply)

    async def _commit(self, call: Call, request: Request, begun: _Begun, message: Message, unfinished: str) -> Turn:
        """Record the turn, first in the log; `unfinished` is why its reply is not whole, empty for one that is."""
        async with self._commits:  # one at a time: the log's order is the tree's
            turn = self._turn(call, request, begun, message, unfinished)
            recorded = self._on_turn(self.episode_id, turn)
            if inspect.isawaitable(recorded):
                await recorded
            self._tree.add(turn, None if unfinished else begun.placement)
        return turn

    def _turn(self, call: Call, request: Request, begun: _Begun, message: Message, unfinished: str) -> Turn:
        placement, _, generation = begun
        output, tail = generation.spans()
        return Turn(
            index=len(self._tree.turns),
            base=placement.base,
            given=TokenSpan(tuple(placement.given), Origin.GIVEN),
            output=output,
            tail=tail,
            versions=tuple(generation.versions),
            sampling=generation.sampling,
            overridden=_overridden(self._wishes(request, placement), self._sampling),
            finish=Finish.ABORT if unfinished else generation.finish,
            dialect=request.dialect,
            digest=call.digest,
            messages=(*placement.news, message),
            started=call.started,
            ended=clock.now(),
            masked=unfinished or self._source.masked or ("" if self._sampling.trainable else "sampling"),
            tools=tuple(tool["function"]["name"] for tool in request.tools),
            fork=placement.fork,
            remote=generation.remote,
        )

    def _note_limit(self, turn: Turn, begun: _Begun) -> None:
        """Remember the limit that cut the reply short, or that its context exceeds."""
        limit, most = self._most
        if begun.generation.out_of_time:
            self.limit = self.limit or "time"
        elif turn.finish is Finish.LENGTH:
            self.limit = self.limit or begun.budget.limit
        if begun.generation.usage.context > most:  # only of a remote: its tokens are not counted before it is asked
            self.limit = self.limit or limit

    def _outcome(self, turn: Turn, generation: Generating, reply: Reply) -> Outcome:
        usage = generation.usage
        return Outcome(
            turn=turn,
            message=turn.messages[-1],
            malformed=reply.malformed,
            usage=usage,
            stop=generation.stopped_by,
            remaining_tokens=max(0, self._most[1] - usage.context),
            remaining_calls=max(0, self.limits.calls + 2 - self._started),
            limit=self.limit,
        )

    def _wishes(self, request: Request, placement: Placement) -> dict[str, Any]:
        """What the client asked for that is not fulfilled: what dialects have in common, and what its own has."""
        wishes = dict(request.wishes)
        if request.model != self.endpoint.model:
            wishes["model"] = request.model
        if request.messages[-1]["role"] == "assistant":
            wishes["prefill"] = True
        seen = len(request.messages) - len(placement.news)
        if hidden := [what for index, what in request.hidden if index >= seen]:
            wishes["not_shown"] = hidden
        fulfilled = self._source.forwarded(request)
        return {name: value for name, value in wishes.items() if name not in fulfilled}

    def _gone(self) -> ApiError:
        if self.closed:
            return ApiError(410, "episode_closed", "the episode is over")
        return ApiError(499, "client_closed_request", "the client went away")

    def _failed(self, error: BaseException) -> Fault:
        """The session's fault, which is its first."""
        if isinstance(error, Fault):
            fault = error
        elif isinstance(error, ValueError) and not isinstance(error, UnicodeError):
            fault = EngineFault(f"the engine refused a prompt: {error}")
        elif isinstance(error, CodeRepairError):  # a full disk, say: the next write to the log ends the run and says so
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


def _shared(old: Any, new: Any) -> Any:
    """`new`, in which what `old` has, too, is the same object."""
    if old == new:
        return old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {key: _shared(old.get(key), value) for key, value in new.items()}
    return new


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
    """What a client is told of a fault. What broke in the gateway itself is for its log, not for agents."""
    message = f"the {fault.boundary} failed" + ("" if isinstance(fault, GatewayFault) else f": {fault}")
    return ApiError(503, f"{fault.boundary}_fault", message)
