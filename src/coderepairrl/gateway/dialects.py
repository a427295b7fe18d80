"""The provider APIs that the gateway speaks, and HTTP replies and errors in them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from coderepairrl.gateway import chat, messages, responses
from coderepairrl.gateway.body import Dialect, ReplyWriter
from coderepairrl.gateway.call import Call
from coderepairrl.gateway.request import ApiError, Request
from coderepairrl.printable import printable

HEARTBEAT = 10.0
"""Seconds without output before a keep-alive."""
CLOSING = 408, 410, 413, 429
"""Statuses that close the connection, since further requests would also be refused."""
_NO_RETRY = {"x-should-retry": "false"}

log = logging.getLogger(__name__)

DIALECTS = (chat.DIALECT, responses.DIALECT, messages.DIALECT)


async def send_reply(request: web.Request, dialect: Dialect, parsed: Request, call: Call) -> web.StreamResponse:
    """Send the reply, streamed if requested. Raises `ApiError`."""
    return await (_send_stream if parsed.stream else _send_json)(request, dialect, parsed, call)


async def _send_json(request: web.Request, dialect: Dialect, parsed: Request, call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    while not await call.wait_for_end(HEARTBEAT):
        if not response.prepared:
            await response.prepare(request)
        await response.write(b" ")  # a keep-alive: whitespace may precede JSON
    try:
        body = json.dumps(dialect.writer(parsed, call).build_response(await call.result())).encode()
    except ApiError:
        if response.prepared and request.transport is not None:  # status 200 was sent: break the connection
            request.transport.abort()
            return response
        raise
    if not response.prepared:
        response.content_length = len(body)
        await response.prepare(request)
    await response.write_eof(body)
    call.delivered = True
    return response


async def _send_stream(request: web.Request, dialect: Dialect, parsed: Request, call: Call) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async for events in _iterate_events(dialect.writer(parsed, call), call):
        if not response.prepared:
            await response.prepare(request)
        await response.write(events)
    call.delivered = True
    await response.write_eof()
    return response


async def _iterate_events(writer: ReplyWriter, call: Call) -> AsyncIterator[bytes]:
    """Yield events and keep-alives. Raises `ApiError` only before the first; later it becomes an event."""
    has_begun = False
    try:
        async for delta in call.follow(HEARTBEAT):
            has_begun = True
            yield writer.keep_alive() if delta is None else writer.add(delta)
        completion = await call.result()
    except ApiError as failure:
        if not has_begun:
            raise
        yield writer.fail(failure)
    else:
        yield writer.end(completion)


def read_retry_count(request: web.Request) -> int | None:
    """Retry number from the client's SDK, if any."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if count.isdecimal() and len(count) < 10 else None  # Python refuses to convert very long numbers


@web.middleware
async def format_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Format every error in the client's dialect."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except web.RequestPayloadError:
        request.content.feed_eof()  # else aiohttp reads the rest before it answers
        failure = ApiError(400, "invalid_body", "the body is not in the encoding that its headers name")
    except web.HTTPException as error:
        failure = ApiError(error.status, "not_found" if error.status == 404 else "invalid_request", error.reason)
    except ConnectionError:  # the client went away
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=499)  # logged by aiohttp, received by no client
    except TimeoutError:  # aiohttp answers 504
        raise
    except Exception:
        log.exception("%s %s", request.method, printable(request.path))
        failure = ApiError(500, "gateway_fault", "the gateway failed")
    return _error_response(request, failure)


def _error_response(request: web.Request, failure: ApiError) -> web.Response:
    is_anthropic = "messages" in request.path.split("/") or "anthropic-version" in request.headers
    writer = messages.MessageWriter if is_anthropic else ReplyWriter
    response = web.json_response(writer.error(failure), status=failure.status, headers=_NO_RETRY)
    if failure.code in ("invalid_body", "episode_limit_reached") or failure.status in CLOSING:
        response.force_close()  # the rest of the connection is unreadable or pointless
    return response
