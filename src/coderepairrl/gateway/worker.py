"""Process for requests too large for the event loop (see `workers`).

It may be killed at any time and is replaced, so a costly job affects only its session.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from coderepairrl import tokens
from coderepairrl.errors import GatewayFault
from coderepairrl.gateway.dialects import DIALECTS
from coderepairrl.gateway.request import (
    ApiError,
    Defaults,
    Message,
    PrefixKeys,
    Request,
    add_tools_key,
    hash_message,
)
from coderepairrl.processes.children import Parent
from coderepairrl.tokens import Codec, CodecSource, TooLong

MEMORY = 2 << 30
"""Bytes that a job may allocate beyond the idle process."""
MAX_SETTINGS = 2 << 20
"""Most pickled bytes of a request without messages."""
MAX_REPLIES = 4
"""Longest replies, as a multiple of the prompt limit: templates drop earlier thoughts."""

PARSERS: dict[str, Callable[[bytes], Request]] = {
    **{dialect.name: dialect.parse for dialect in DIALECTS},
    **{dialect.counter.path: dialect.counter.parse for dialect in DIALECTS if dialect.counter is not None},
}
"""Parsers of bodies by dialect name or counter path."""


def parse(name: str, source: CodecSource | None, most: int | None, body: bytes) -> Request:
    """Parse a body. Raises `ApiError`, and `TooLong` beyond `most` tokens."""
    request = PARSERS[name](body)
    if most is not None:
        least_tokens = sum(1 + len(message.get("tool_calls", ())) for message in request.messages)
        if least_tokens > most:
            raise TooLong(least_tokens)
        if source is not None:
            _check_text_sizes(_load_codec(source), request.messages, most)
    request = replace(request, tools=add_tools_key(request.tools))
    if len(pickle.dumps(replace(request, messages=()))) > MAX_SETTINGS:
        message = f"tools and settings take more than {MAX_SETTINGS >> 20} MiB"
        raise ApiError(413, "request_too_large", message)
    return request


def hash_prefixes(messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]) -> tuple[list[bytes], Defaults]:
    """Compute prefix keys and default arguments."""
    prefix_keys = PrefixKeys()
    return prefix_keys.compute(messages, tools), prefix_keys.defaults


def call_codec(
    source: CodecSource, method: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> array[int] | None:
    """Call `method` of the codec, which returns ids or None."""
    ids = getattr(_load_codec(source), method)(*arguments, **options)
    return None if ids is None else array("I", ids)


JOBS: dict[str, Callable[..., Any]] = {job.__name__: job for job in (parse, hash_prefixes, hash_message, call_codec)}
"""Functions that `RequestProcessor` calls."""


@lru_cache(maxsize=1)
def _load_codec(source: CodecSource) -> Codec:
    codec = tokens.load_codec(source.model, thinking=source.thinking)
    _limit_memory()
    return codec


def _check_text_sizes(codec: Codec, messages: Sequence[Message], most: int) -> None:
    # raise `TooLong` if a lower bound of the token count is beyond `most`; rendering for the count would take long
    count_at_least = codec.tokenizer.count_at_least
    request_tokens = reply_tokens = 0
    for message in messages:
        if message["role"] == "assistant":
            reply_tokens += count_at_least(message["content"]) + count_at_least(message.get("reasoning_content", ""))
            for call in message.get("tool_calls", ()):
                reply_tokens += sum(map(count_at_least, (call["id"], *call["function"].values())))
        else:
            request_tokens += count_at_least(message["content"].strip())  # some templates strip it
            request_tokens += count_at_least(message.get("tool_call_id", ""))
    if request_tokens > most + tokens.RENDERING_MARGIN or reply_tokens > MAX_REPLIES * most + tokens.RENDERING_MARGIN:
        raise TooLong(max(request_tokens, reply_tokens // MAX_REPLIES))


def main() -> None:
    """Run jobs until the parent closes the connection."""
    parent = Parent.connect()
    os.nice(5)  # the event loop has priority on machines with few processors
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # end this process before others
    _limit_memory()
    while True:
        try:
            job, *body = parent.receive_pieces()
        except EOFError:
            return
        parent.send_pieces([_run_job(job, body)])


def _run_job(job: bytes, body: Sequence[bytes]) -> bytes:
    """Pickled pair of a job's error and its result, one of which is None."""
    error: Exception
    try:
        name, arguments = pickle.loads(job)
        return pickle.dumps((None, JOBS[name](*arguments, *body)))
    except (ApiError, TooLong) as refusal:
        error = refusal
    except ValueError as unwritable:
        error = ValueError(str(unwritable))
    except MemoryError:
        return TOO_LARGE
    except Exception:
        error = GatewayFault(f"a request could not be processed: {traceback.format_exc().strip().splitlines()[-1]}")
    return pickle.dumps((error, None))


TOO_LARGE = pickle.dumps((ApiError(413, "request_too_large", "the request takes too much memory or time"), None))
"""Answer to a job that takes too much memory or time."""


def _limit_memory() -> None:
    data_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])  # sixth field: see proc(5)
    resource.setrlimit(resource.RLIMIT_DATA, (data_pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
