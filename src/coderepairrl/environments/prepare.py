"""Environments made ready: built, several at a time, each once. Afterwards no network is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from coderepairrl.environments.build import KIND, Environment, Specification, build
from coderepairrl.errors import CodeRepairError, several
from coderepairrl.types import Task


async def prepare_environments(
    tasks: Iterable[Task], *, jobs: int = 2, say: Callable[[str], None] = lambda _: None
) -> list[Environment]:
    """Build the environments that `tasks` specify, `jobs` at a time; those that are there are verified.

    All of them are tried; raises the errors of those that cannot be had together, each a `CodeRepairError`.
    """
    wanted = dict.fromkeys(task.environment for task in tasks if task.environment.startswith(f"{KIND}:"))
    room, problems = asyncio.Semaphore(jobs), list[CodeRepairError]()

    async def attempt(number: int, text: str) -> Environment | None:
        async with room:
            began = time.monotonic()
            try:
                asked = Specification.parse(text)
                made = await build(asked)
            except CodeRepairError as error:
                problems.append(error)
                say(f"environment {number} of {len(wanted)}: not built")
                return None
            say(f"environment {number} of {len(wanted)}: {made.folder.name}, {time.monotonic() - began:.1f} s")
            return made

    made = await asyncio.gather(*(attempt(number, text) for number, text in enumerate(wanted, 1)))
    if problems:
        raise several(problems)
    return [each for each in made if each is not None]
