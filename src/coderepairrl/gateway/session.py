"""One episode's model calls, from request to recorded turn."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from coderepairrl.errors import CodeRepairError, EngineFault, Fault, GatewayFault
from coderepairrl.gateway.budget import EpisodeBudget, ReplyBudget
from coderepairrl.gateway.call import Call, Completion
from coderepairrl.gateway.remote import RemoteRejected
from coderepairrl.gateway.request import ApiError, Message, Request
from coderepairrl.gateway.responses import resolve_references
from coderepairrl.gateway.source import PendingReply, ReplySource
from coderepairrl.gateway.tree import Placement
from coderepairrl.gateway.workers import IncomingBodies, RequestBody, RequestProcessor, WorkerPool
from coderepairrl.processes.meter import unix_time
from coderepairrl.tokens import Reply, TooLong
from coderepairrl.types import Endpoint, Finish, Limits, Origin, Sampling, TokenSpan, Turn, conversation, offered_tools

OnTurn = Callable[[str, Turn], Awaitable[None] | None]
"""Called with the episode's id and a turn before the client gets the turn's end."""

log = logging.getLogger(__name__)


class _PlacedCall(NamedTuple):
    placement: Placement
    budget: ReplyBudget
    generation: PendingReply


class Session:
    """Recorded calls of an episode; `fault` is the first infrastructure fault, which voids it."""

    def __init__(
        self,
        episode_id: str,
        endpoint: Endpoint,
        *,
        source: ReplySource,
        workers: WorkerPool,
        sampling: Sampling,
        seed: int,
        on_turn: OnTurn,
    ) -> None:
        self.episode_id = episode_id
        self.endpoint = endpoint
        self.fault: Fault | None = None
        self.closed = False
        self._source = source
        self._sampling = sampling
        self._seed = seed
        self._on_turn = on_turn
        self.incoming = IncomingBodies()
        self._budget = EpisodeBudget(endpoint.limits, source.context)
        self._processor = RequestProcessor(workers, source.codec, self._budget.tokens)
        self._tree = source.tree_type(self._processor)
        self._placing = asyncio.Lock()
        self._calls: dict[str, Call] = {}  # by digest of the body, the latest of each
        self._latest: Call | None = None
        self._stored: dict[str, tuple[Call, Request]] = {}  # by `Call.name`; requests without messages
        self._notes: Mapping[str, Any] = {}  # of the latest stored request; the next one shares its equal parts
        self._running: set[Call] = set()
        self._generating: set[PendingReply] = set()
        self._commits = asyncio.Lock()

    @property
    def key(self) -> str:
        """The session's secret."""
        return self.endpoint.api_key

    @property
    def limits(self) -> Limits:
        """The episode's limits."""
        return self.endpoint.limits

    @property
    def limit(self) -> str:
        """First limit met (`EpisodeBudget.limit`), or empty."""
        return self._budget.limit

    @property
    def is_spent(self) -> bool:
        """Whether further calls are refused."""
        return self.closed or self.fault is not None or self._budget.is_exhausted

    @property
    def is_untouched(self) -> bool:
        """Whether it has neither turns nor running calls."""
        return not self._tree.turns and not self._running

    @property
    def is_abandoned(self) -> bool:
        """Whether the latest call's client left before the response was complete."""
        return self._latest is not None and self._latest.is_abandoned

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Committed turns, by index."""
        return tuple(self._tree.turns)

    @property
    def has_sampled(self) -> bool:
        """Whether the model has sampled anything."""
        return any(turn.finish is not Finish.ABORT or turn.sampled for turn in self.turns)

    def start_clock(self) -> None:
        """Count seconds from now."""
        self._budget.start_clock()

    def admit(self, request: Request, digest: str, retry: int | None) -> Call:
        """Start a call, or join the one that `request` repeats. Raises `ApiError`.

        `retry` is ``x-stainless-retry-count``: 0 always starts a call, more is a retry. With None, a repeated body is a
        retry until the first response is completely written.
        """
        self._check_open()
        if repeated := self._find_repeated_call(digest, retry):
            return repeated
        self._budget.check_call()
        request = self._prepend_history(request)
        call = Call(digest, self._budget.calls)
        self._start(call, request)  # before another request can join it
        self._calls[digest] = self._latest = call
        self._stored[call.name] = call, self._strip_request(request)
        self._budget.calls += 1
        return call

    def find(self, name: str) -> tuple[Request, Call, Completion] | None:
        """Find a completed, stored call by `Call.name`."""
        call, request = self._stored.get(name, (None, None))
        if call is None or request is None or call.completion is None or not request.store:
            return None
        return request, call, call.completion

    def forget(self, name: str) -> None:
        """Hide a call from `find`. Its turn stays recorded."""
        self._stored.pop(name, None)

    def count_request(self) -> None:
        """Count a request before reading it. Raises `ApiError` beyond the limit."""
        self._check_open()
        self._budget.count_request()

    def charge_refusal(self, error: ApiError) -> None:
        """Count a refused request as a call, to stop an agent that repeats invalid ones."""
        if error.code not in ("episode_limit_reached", "not_supported"):  # some clients try to count tokens first
            self._budget.calls += 1

    async def parse(self, name: str, body: RequestBody) -> Request:
        """Parse with `worker.PARSERS[name]`, and look up references. Raises `ApiError`."""
        try:
            request = await self._processor.parse(name, body)
        except TooLong as error:
            raise self._budget.prompt_too_long_error(error.tokens) from error
        return resolve_references(request, self.find) if request.unread else request

    async def count(self, request: Request) -> int:
        """Count prompt tokens. Raises `ApiError`."""
        self._check_open()
        if self._source.codec is None:
            raise ApiError(404, "not_supported", "a remote model's tokens are only known after its reply")
        return self._tree.prompt_tokens(await self._place(self._recognise_replies(self._prepend_history(request))))

    async def close(self) -> tuple[Turn, ...]:
        """Refuse requests, abort running calls, and return every turn."""
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
            raise _unavailable_error(self.fault)

    async def _place(self, request: Request) -> Placement:
        try:
            async with self._placing:
                return await self._tree.place(request.messages, request.tools)
        except TooLong as error:
            raise self._budget.prompt_too_long_error(error.tokens) from error
        except ValueError as error:
            raise ApiError(400, "invalid_value", f"messages cannot be rendered: {error}", param="messages") from error

    def _recognise_replies(self, request: Request) -> Request:
        recognised = self._tree.recognise_replies(request.messages)
        hidden = tuple((recognised.places[at], description) for at, description in request.hidden)
        settings = {**request.client_settings, **({"rewritten": True} if recognised.is_rewritten else {})}
        return replace(request, messages=recognised.messages, hidden=hidden, client_settings=settings)

    def _prepend_history(self, request: Request) -> Request:
        if not request.continued_call:
            return request
        call, stored_request = self._stored.get(request.continued_call, (None, None))
        if call is None or stored_request is None or call.completion is None:
            message = f"this episode has no finished response {request.continued_call}"
            raise ApiError(404, "previous_response_not_found", message, param="previous_response_id")
        history = conversation(self._tree.turns, call.completion.turn.index)[stored_request.opening :]
        opening, new_messages = request.messages[: request.opening], request.messages[request.opening :]
        return replace(
            request,
            messages=(*opening, *history, *new_messages),
            hidden=tuple((index + len(history), description) for index, description in request.hidden),
            continued_call="",
        )

    def _strip_request(self, request: Request) -> Request:
        notes = _share_equal_parts(self._notes, request.notes) if request.store else {}
        self._notes = notes or self._notes
        return replace(request, messages=(), tools=(), client_settings={}, hidden=(), notes=notes)

    def _find_repeated_call(self, digest: str, retry: int | None) -> Call | None:
        call = self._calls.get(digest)
        if call is None or retry == 0 or call.aborted or call.failure is not None:
            return None
        if call.completion is None:
            return call
        if (retry is None and call.delivered) or self._tree.is_extended(call.completion.turn.index):
            return None
        return call

    def _start(self, call: Call, request: Request) -> None:
        placed: _PlacedCall | None = None

        async def work() -> None:
            nonlocal placed, request
            request = self._recognise_replies(request)
            placement = await self._place(request)
            call.prompt, call.cached = self._tree.prompt_tokens(placement), placement.cached
            reply_tokens = min(self._sampling.max_tokens, request.max_tokens or self._sampling.max_tokens)
            budget = self._budget.budget_reply(call.prompt, reply_tokens)
            sampling = replace(self._sampling, max_tokens=budget.max_tokens)
            generation = self._source.begin(request, placement, sampling, request_seed(self._seed, call.ordinal))
            placed = _PlacedCall(placement, budget, generation)
            self._generating.add(generation)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await generation.run(self._budget.deadline, call.publish)
            waited = loop.time() - began
            is_remote = self._source.codec is None  # it reports its tokens only with the complete reply
            has_sampled = self.has_sampled or any(each.usage.sampled for each in self._generating)
            # the engine is to blame only if it had most of the episode's time
            if generation.out_of_time and not is_remote and not has_sampled and waited > self.limits.seconds / 2:
                raise EngineFault(
                    f"no token was sampled in the episode's {self.limits.seconds:g} seconds",
                    fix="raise rollout.seconds, lower rollout.concurrency, or find out what slows the engine",
                )

        async def finish(error: BaseException | None) -> None:
            try:
                await self._finish(call, request, placed, error)
            except Exception as failure:  # the log could not be written, or a bug
                call.failure = _unavailable_error(self._record_fault(failure))
            finally:
                self._running.discard(call)
                if placed is not None:
                    self._generating.discard(placed.generation)

        self._running.add(call)
        call.start(work, finish)

    async def _finish(
        self, call: Call, request: Request, placed: _PlacedCall | None, error: BaseException | None
    ) -> None:
        if isinstance(error, RemoteRejected) and self.has_sampled:  # it refuses the messages, not the run's settings
            error = ApiError(400, "remote_refused", str(error))
        if isinstance(error, ApiError):  # refused by the engine or the remote: nothing was sampled
            self._budget.record_limit(error.limit)
            call.failure = error.without_traceback()
            return
        aborted = call.aborted and isinstance(error, asyncio.CancelledError)
        failure = None
        if error is not None:
            failure = self._abort_error() if aborted else _unavailable_error(self._record_fault(error))
        if placed is None:  # it failed before anything was sampled
            call.failure = failure
            return
        reply, last_deltas = placed.generation.close()
        message = _reply_message(call, reply)
        unfinished = "" if error is None else "aborted" if aborted else "fault"  # becomes `Turn.masked`
        async with self._commits:  # keeps the order of the log and the tree the same
            turn = self._build_turn(call, request, placed, message, unfinished)
            recorded = self._on_turn(self.episode_id, turn)
            if inspect.isawaitable(recorded):
                await recorded
            self._tree.add(turn, None if unfinished else placed.placement)
        if failure is not None:
            call.failure = failure
            return
        call.publish(last_deltas)
        usage = placed.generation.usage
        if placed.generation.out_of_time:
            self._budget.record_limit("time")
        elif turn.finish is Finish.LENGTH:
            self._budget.record_limit(placed.budget.limit)
        self._budget.record_context(usage.context)
        call.completion = Completion(
            turn=turn,
            message=turn.messages[-1],
            malformed=reply.malformed,
            usage=usage,
            stop=placed.generation.stopped_by,
            remaining_tokens=max(0, self._budget.tokens - usage.context),
            remaining_calls=max(0, self._budget.max_calls - self._budget.calls),
            limit=self.limit,
        )

    def _build_turn(self, call: Call, request: Request, placed: _PlacedCall, message: Message, unfinished: str) -> Turn:
        placement, _, generation = placed
        output, tail = generation.spans()
        tools = tuple(request.tools)
        inherited = () if placement.base is None else offered_tools(self._tree.turns, placement.base)
        return Turn(
            index=len(self._tree.turns),
            base=placement.base,
            given=TokenSpan(tuple(placement.given), Origin.GIVEN),
            output=output,
            tail=tail,
            versions=tuple(generation.versions),
            sampling=generation.sampling,
            overridden=_format_overridden(self._list_overridden_settings(request, placement), self._sampling),
            finish=Finish.ABORT if unfinished else generation.finish,
            dialect=request.dialect,
            digest=call.digest,
            messages=(*placement.new_messages, message),
            started=call.started,
            ended=unix_time(),
            masked=unfinished or self._source.masked or ("" if self._sampling.trainable else "sampling"),
            tools=tuple(tool["function"]["name"] for tool in tools),
            schemas=() if inherited == tools else tools,
            fork=placement.fork,
            remote=generation.remote,
        )

    def _list_overridden_settings(self, request: Request, placement: Placement) -> dict[str, Any]:
        settings = dict(request.client_settings)
        if request.model != self.endpoint.model:
            settings["model"] = request.model
        if request.messages[-1]["role"] == "assistant":
            settings["prefill"] = True
        first_new = len(request.messages) - len(placement.new_messages)
        changes = self._source.codec.changes(request.messages) if self._source.codec is not None else ()
        if reshaped := dict.fromkeys(description for index, description in changes if index >= first_new):
            settings["reshaped"] = list(reshaped)
        if hidden := [description for index, description in request.hidden if index >= first_new]:
            settings["not_shown"] = hidden
        forwarded_settings = self._source.forwarded_settings(request)
        return {name: value for name, value in settings.items() if name not in forwarded_settings}

    def _abort_error(self) -> ApiError:
        if self.closed:
            return ApiError(410, "episode_closed", "the episode is over")
        return ApiError(499, "client_closed_request", "the client went away")

    def _record_fault(self, error: BaseException) -> Fault:
        if isinstance(error, Fault):
            fault = error
        elif isinstance(error, ValueError) and not isinstance(error, UnicodeError):
            fault = EngineFault(f"the engine refused a prompt: {error}")
        elif isinstance(error, CodeRepairError):  # a full disk, for example: the next write to the log ends the run
            fault = GatewayFault(str(error), fix=error.fix)
        else:
            log.error("episode %s: unexpected %r", self.episode_id, error, exc_info=error)
            fault = GatewayFault(f"{type(error).__name__}: {error}")
        self.fault = self.fault or fault
        return fault


def request_seed(seed: int, ordinal: int) -> int:
    """Seed (63 bits) of a session's call `ordinal`, not counting retries.

    >>> request_seed(7, 0) == request_seed(7, 0) != request_seed(7, 1)
    True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{ordinal}".encode(), digest_size=8).digest()) >> 1


def _share_equal_parts(old: Any, new: Any) -> Any:
    # return `new`, its parts replaced by equal ones of `old`, so that memory holds them once
    if old == new:
        return old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {key: _share_equal_parts(old.get(key), value) for key, value in new.items()}
    return new


def _format_overridden(settings: Mapping[str, Any], sampling: Sampling) -> tuple[str, ...]:
    missing = object()
    return tuple(
        f"{name}={json.dumps(value, sort_keys=True)}"
        for name, value in sorted(settings.items())
        if getattr(sampling, name, missing) != value
    )


def _reply_message(call: Call, reply: Reply) -> Message:
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


def _unavailable_error(fault: Fault) -> ApiError:
    # details of the gateway's own faults are for its log, not for agents
    message = f"the {fault.boundary} failed" + ("" if isinstance(fault, GatewayFault) else f": {fault}")
    return ApiError(503, f"{fault.boundary}_fault", message)
