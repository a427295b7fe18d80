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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coderepairrl import tokens
from coderepairrl.gateway.dialects import DIALECTS
from coderepairrl.gateway.request import ApiError, Message, PrefixKeys, Request, add_tools_key
from coderepairrl.processes.children import Parent
from coderepairrl.tokens import Codec, CodecSource, TooLong

BATCH = 256
"""Messages that are pickled at a time."""
MEMORY = 2 << 30
"""Bytes that a job may allocate beyond the idle process."""
REST = 2 << 20
"""Pickled bytes of a request without its messages."""
REPEATED = 4
"""Longest replies relative to the prompt limit, since templates drop earlier thoughts."""

PARSERS: dict[str, Callable[[bytes], Request]] = {
    **{dialect.name: dialect.parse for dialect in DIALECTS},
    **{dialect.counter.path: dialect.counter.parse for dialect in DIALECTS if dialect.counter is not None},
}
"""Parsers of bodies by dialect name or counter path."""


def pickle_batches(messages: Sequence[Message]) -> Iterator[bytes]:
    """Pickle `messages` in batches."""
    return (pickle.dumps(messages[at : at + BATCH]) for at in range(0, len(messages), BATCH))


def unpickle_batches(pieces: Sequence[bytes]) -> tuple[Message, ...]:
    """Unpickle `batches`."""
    return tuple(message for piece in pieces for message in pickle.loads(piece))


class Jobs:
    """Methods from pieces (bytes) to pieces, called by `RequestProcessor`."""

    def __init__(self) -> None:
        self._loaded_from: CodecSource | None = None
        self._codec: Codec | None = None

    def parse(self, setup: bytes, *body: bytes) -> list[bytes]:
        """Parse a body; returns a request, then message batches. Raises `ApiError`, `TooLong`."""
        name, loaded_from, most = pickle.loads(setup)
        request = PARSERS[name](b"".join(body))
        if most is not None:
            if len(request.messages) > most:
                raise TooLong(len(request.messages))
            if loaded_from is not None:
                self._check_text_sizes(self._load_codec(loaded_from), request.messages, most)
        rest = pickle.dumps(replace(request, messages=(), tools=add_tools_key(request.tools)))
        if len(rest) > REST:
            message = f"tools and settings take more than {REST >> 20} MiB"
            raise ApiError(413, "request_too_large", message)
        return [rest, *pickle_batches(request.messages)]

    def keys(self, tools: bytes, *messages: bytes) -> list[bytes]:
        """Default arguments, then joined `PrefixKeys.of`."""
        prefix_keys = PrefixKeys()
        keys = prefix_keys.of(unpickle_batches(messages), pickle.loads(tools))
        return [pickle.dumps(prefix_keys.defaults), b"".join(keys)]

    def render(self, setup: bytes, *messages: bytes) -> list[bytes]:
        """`Codec.render`."""
        loaded_from, tools, most = pickle.loads(setup)
        return [
            array("I", self._load_codec(loaded_from).render(unpickle_batches(messages), tools, most=most)).tobytes()
        ]

    def extend(self, setup: bytes, *messages: bytes) -> list[bytes]:
        """`Codec.extend`; nothing for None."""
        loaded_from, prompt, output, calls, most = pickle.loads(setup)
        ids = self._load_codec(loaded_from).extend(prompt, output, unpickle_batches(messages), calls=calls, most=most)
        return [] if ids is None else [array("I", ids).tobytes()]

    def spell(self, setup: bytes, reply: bytes) -> list[bytes]:
        """`Codec.spell`; nothing for None."""
        loaded_from, calls, most = pickle.loads(setup)
        ids = self._load_codec(loaded_from).spell(pickle.loads(reply), calls=calls, most=most)
        return [] if ids is None else [array("I", ids).tobytes()]

    def _load_codec(self, loaded_from: CodecSource) -> Codec:
        if self._codec is None or loaded_from != self._loaded_from:
            self._codec = tokens.load_codec(loaded_from.model, thinking=loaded_from.thinking)
            self._loaded_from = loaded_from
            _limit_memory()
        return self._codec

    def _check_text_sizes(self, codec: Codec, messages: Sequence[Message], most: int) -> None:
        least = codec.tokenizer.count_at_least
        requests = replies = 0
        for message in messages:
            if message["role"] == "assistant":
                replies += least(message["content"]) + least(message.get("reasoning_content", ""))
                replies += sum(least(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
            else:
                requests += least(message["content"].strip())  # some templates do
        if requests > most + tokens.ASIDE or replies > REPEATED * most + tokens.ASIDE:
            raise TooLong(max(requests, replies // REPEATED))


def main() -> None:
    """Run jobs until the parent closes the connection."""
    parent, jobs = Parent.connect(), Jobs()
    os.nice(5)  # the event loop has priority on machines with few processors
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # end this process before others
    _limit_memory()
    while True:
        try:
            kind, *pieces = parent.receive_pieces()
        except EOFError:
            return
        parent.send_pieces(_run_job(getattr(jobs, kind.decode()), pieces))


def _run_job(job: Callable[..., list[bytes]], pieces: list[bytes]) -> list[bytes]:
    try:
        return [b"done", *job(*pieces)]
    except ApiError as error:
        fields: dict[str, Any] = {"param": error.param, "limit": error.limit}
        return [b"refused", pickle.dumps((error.status, error.code, error.message, fields))]
    except TooLong as error:
        return [b"too long", str(error.tokens).encode()]
    except ValueError as error:
        return [b"unwritable", str(error).encode(errors="replace")]
    except MemoryError:
        return [b"too large"]
    except Exception:
        return [b"failed", traceback.format_exc().encode(errors="replace")]


def _limit_memory() -> None:
    data = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
