"""Runs the exam of one implementation, with the real neighbours that it needs."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from coderepairrl import agents, engines, models, rewards, sandbox, tasks
from coderepairrl.check.report import Entry
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import Learner, LearnSettings, init_random
from coderepairrl.registry import Check, check_options, nearest

Options = Mapping[str, Any]


async def examine_sandboxes() -> list[Entry]:
    """The exams of all sandboxes that isolate and work here; for the others, what is missing (not `required`)."""
    entries = []
    for name, ok, detail, fix in sandbox.available():
        if not ok:
            entries.append(Entry(name, False, detail, fix, required=False))
        elif name != "unsafe-local":
            entries += [Entry(f"{name}: {entry.name}", *entry[1:]) for entry in await examine("sandbox", name)]
    return entries


async def examine(kind: str, name: str | None, options: Options | None = None) -> list[Entry]:
    """The exam of implementation `name` of seam `kind`, made with `options`, one entry per question.

    Raises `UsageError` for an unknown seam, `ConfigError` for an unknown implementation or option.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no exam for {kind!r}", fix=nearest(kind, KINDS))
    default, sit = KINDS[kind]
    return [Entry(f"{check.name}", check.ok, check.detail) for check in await sit(name or default, options or {})]


async def _sandbox(name: str, options: Options) -> list[Check]:
    from coderepairrl.sandbox import redteam
    from coderepairrl.sandbox.exam import examine as sit

    backend = sandbox.make(name, **options)
    sandbox.require(backend)
    return [*await sit(backend), *await redteam.examine(backend)]


async def _engine(name: str, options: Options) -> list[Check]:
    """Against the real learner on a random policy, since engine and learner must agree to the fourth digit."""
    from coderepairrl.engines.exam import examine as sit

    with tempfile.TemporaryDirectory(prefix="crrl-exam-") as folder:
        work = Path(folder)
        model = work / "model"
        await init_random(models.folder("builtin:tiny"), model, 0, log_dir=work)
        learner = await Learner.start(model, LearnSettings(), log_dir=work, publish_dir=work)
        engine = await engines.make(name, model, log_dir=work, **options)
        try:
            return list(await sit(engine, model, reference=learner.logprobs, work=work))
        finally:
            await engine.close()
            await learner.close()


async def _agent(name: str, options: Options) -> list[Check]:
    from coderepairrl.agents.command import Program
    from coderepairrl.agents.exam import examine as sit
    from coderepairrl.check import programs

    agent = agents.make(name, **options)
    if not isinstance(agent, Program):
        return list(await sit(agent))
    backend = sandbox.make(sandbox.default_name(), show=agent.binds)
    sandbox.require(backend)
    return await programs.examine(agent, backend)


async def _reward(name: str, options: Options) -> list[Check]:
    from coderepairrl.rewards.exam import examine as sit

    if options:
        raise ConfigError(f"reward {name!r} has no option {min(options)!r}", fix="rewards take no options")
    [(reward, _)] = rewards.make(name)
    return list(await sit(reward, sandbox.make(sandbox.default_name())))


async def _tasks(name: str, options: Options) -> list[Check]:
    from coderepairrl.tasks.exam import examine as sit

    return list(await sit(tasks.make(name, **options), sandbox.make(sandbox.default_name())))


async def _model(name: str, options: Options) -> list[Check]:
    from coderepairrl.check.model import examine as sit

    check_options("model", name, sit, options)
    return sit(models.folder(name), **options)


KINDS: dict[str, tuple[str, Callable[[str, Options], Awaitable[list[Check]]]]] = {
    "sandbox": ("bwrap", _sandbox),
    "engine": ("tiny", _engine),
    "agent": ("nano", _agent),
    "reward": ("patch_lines", _reward),
    "tasks": ("handmade", _tasks),
    "model": ("builtin:tiny", _model),
}
"""Seams, and models, with the one that ships as their default."""
