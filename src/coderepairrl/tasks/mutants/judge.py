"""Run checks on mutants in a helper process that forks once per mutant.

``python -S -E judge.py`` reads one JSON job per line, ``{"source": ..., "checks": [[call, want], ...]}``, and answers
each with a line: null if all checks pass, ``[index, got]`` for the first check that fails, or ``[-1, reason]`` if the
mutant hangs, exceeds memory or does not compile. A separate script, since a process with threads must not fork.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

CPU_SECONDS, SECONDS = 0.1, 5  # far above what checks of a healthy function take
MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 10_000
"""Longest reported value, in characters."""

Failure = list[Any]
"""``[index, got]`` or ``[-1, reason]`` (see above)."""


def judge_mutants(jobs: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> list[Failure | None]:
    """Return the failure of each (source, checks), or None, in order. Raises RuntimeError if the helper breaks."""
    lines = [json.dumps({"source": source, "checks": list(checks)}) for source, checks in jobs]
    ran = subprocess.run(
        [sys.executable, "-S", "-E", "-B", __file__],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    answers = ran.stdout.splitlines()
    if ran.returncode != 0 or len(answers) != len(lines):
        raise RuntimeError(f"the mutant judge broke after {len(answers)} of {len(lines)} jobs: {ran.stderr[-500:]}")
    return [json.loads(answer) for answer in answers]


def _find_failure(source: str, checks: Sequence[tuple[str, str]]) -> Failure | None:
    scope: dict[str, Any] = {}
    try:
        exec(compile(source, "mutant", "exec"), scope)
    except SyntaxError:
        return [-1, "does not compile"]
    for index, (call, want) in enumerate(checks):
        try:
            got = eval(call, scope)
            failed = got != eval(want, scope)
        except MemoryError:
            return [-1, "out of memory"]
        except Exception as error:
            return [index, type(error).__name__]
        if failed:
            return [index, repr(got)[:MAX_CHARACTERS]]
    return None


def _judge_in_fork(source: str, checks: Sequence[tuple[str, str]]) -> Failure | None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            signal.alarm(SECONDS)  # for a mutant that sleeps, which takes no CPU time
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):  # the mutant must not read the jobs, nor print among the answers
                os.dup2(null, number)
            os.write(writer, json.dumps(_find_failure(source, checks)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    failure: Failure | None = json.loads(answer) if answer else [-1, "hangs"]
    return failure


def _main() -> None:
    for line in sys.stdin:
        if line.strip():
            job = json.loads(line)
            print(json.dumps(_judge_in_fork(job["source"], job["checks"])))


if __name__ == "__main__":
    _main()
