"""Exam of sandboxes: ``crrl check sandbox NAME|module:Class``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from coderepairrl.checks.sandbox.questions import (
    Failed,
    Question,
    Scene,
    bridge,
    commands,
    diffs,
    disk,
    file_size,
    files,
    floods,
    keepers,
    large,
    memory,
    no_daemons,
    no_kernel_doors,
    no_network,
    no_secrets,
    no_writes,
    processes,
    speed,
    timeouts,
    unstoppable,
)
from coderepairrl.errors import CodeRepairError
from coderepairrl.processes.scratch import scratch
from coderepairrl.protocols import SandboxBackend
from coderepairrl.registry import Finding
from coderepairrl.types import Task


async def examine(backend: SandboxBackend) -> list[Finding]:
    """Collect what `sit` yields."""
    return [finding async for finding in sit(backend)]


async def sit(backend: SandboxBackend) -> AsyncIterator[Finding]:
    """Ask `backend` every question; yield findings in order."""
    with scratch("exam") as folder:
        folder.chmod(0o755)
        repository = folder / "repository"
        repository.mkdir()
        (repository / "app.py").write_bytes(b"def add(a, b):\n    return a - b\n")
        (repository / "notes.txt").write_bytes(b"one\r\ntwo\r\n")
        (folder / "secret").write_text("a host secret\n")
        scene = Scene(backend, Task("exam/1", "", "python", f"dir:{repository}", b""), folder)
        os.environ["CRRL_EXAM_KEY"] = "sk-exam"
        try:
            for question in QUESTIONS:
                yield await _ask(question, scene)
        finally:
            del os.environ["CRRL_EXAM_KEY"]


async def _ask(question: Question, scene: Scene) -> Finding:
    title = (question.__doc__ or question.__name__).strip().splitlines()[0].rstrip(".")
    if question in DANGEROUS and not scene.backend.info().isolates:
        return Finding(title, False, "not tried: nothing would keep it from the rest of this machine")
    try:
        async with asyncio.timeout(120):
            return Finding(title, True, await question(scene))
    except (Failed, CodeRepairError, OSError) as error:
        return Finding(title, False, str(error) or type(error).__name__)


BEHAVIOUR: tuple[Question, ...] = (commands, files, diffs, large, bridge)
LIMITS: tuple[Question, ...] = (timeouts, floods, processes, memory, file_size, disk, keepers)
ISOLATION: tuple[Question, ...] = (no_secrets, no_writes, no_network, no_kernel_doors)
LIFETIME: tuple[Question, ...] = (no_daemons, unstoppable)
DANGEROUS: tuple[Question, ...] = (processes, memory, unstoppable)
"""Questions that harm the machine without isolation."""
QUESTIONS = (*BEHAVIOUR, *LIMITS, *ISOLATION, *LIFETIME, speed)
