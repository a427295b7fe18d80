"""Runs the exam of one implementation, with the real neighbours that it needs."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from coderepairrl import agents, engines, models, rewards, sandbox, tasks
from coderepairrl.check.report import Entry
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import Learner, LearnSettings, init_random
from coderepairrl.registry import Check, check_options, nearest

Options = Mapping[str, Any]


async def examine_sandboxes() -> AsyncIterator[Entry]:
    """The exams of all sandboxes that isolate and work here; for the others, what is missing (not `required`)."""
    for name, ok, detail, fix in sandbox.available():
        yield Entry(name, ok, detail, fix, required=False)
        if ok and name != "unsafe-local":
            async for entry in examine("sandbox", name):
                yield entry._replace(name=f"{name}: {entry.name}")


async def examine(kind: str, name: str | None, options: Options | None = None) -> AsyncIterator[Entry]:
    """The exam of implementation `name` of seam `kind`, made with `options`, one entry per question.

    Those of sandboxes come as they are answered, the others at the end. Raises `UsageError` for an unknown seam,
    `ConfigError` for an unknown implementation or option.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no exam for {kind!r}", fix=nearest(kind, KINDS))
    default, sit = KINDS[kind]
    async for check in sit(name or default, options or {}):
        yield Entry(check.name, check.ok, check.detail)


async def _sandbox(name: str, options: Options) -> AsyncIterator[Check]:
    from coderepairrl.sandbox import redteam
    from coderepairrl.sandbox.exam import sit

    backend = sandbox.make(name, **options)
    sandbox.require(backend)
    async for check in sit(backend):
        yield check
    async for check in redteam.examine(backend):
        yield check


async def _engine(name: str, options: Options) -> AsyncIterator[Check]:
    """Against the real learner on a random policy, since engine and learner must agree to the fourth digit."""
    from coderepairrl.engines.exam import examine as sit

    with tempfile.TemporaryDirectory(prefix="crrl-exam-") as folder:
        work = Path(folder)
        model = work / "model"
        await init_random(models.folder("builtin:tiny"), model, 0, log_dir=work)
        learner = await Learner.start(model, LearnSettings(), log_dir=work, publish_dir=work)
        engine = await engines.make(name, model, log_dir=work, **options)
        try:
            checks = await sit(engine, model, reference=learner.logprobs, work=work)
        finally:
            await engine.close()
            await learner.close()
    for check in checks:
        yield check


async def _agent(name: str, options: Options) -> AsyncIterator[Check]:
    from coderepairrl.agents.command import Program
    from coderepairrl.agents.exam import examine as sit
    from coderepairrl.check import programs

    agent = agents.make(name, **options)
    if isinstance(agent, Program):
        backend = sandbox.make(sandbox.default_name(), show=agent.binds)
        sandbox.require(backend)
        checks = await programs.examine(agent, backend)
    else:
        checks = await sit(agent)
    for check in checks:
        yield check


async def _reward(name: str, options: Options) -> AsyncIterator[Check]:
    from coderepairrl.rewards.exam import examine as sit

    if options:
        raise ConfigError(f"reward {name!r} has no option {min(options)!r}", fix="rewards take no options")
    [(reward, _)] = rewards.make(name)
    for check in await sit(reward, sandbox.make(sandbox.default_name())):
        yield check


async def _tasks(name: str, options: Options) -> AsyncIterator[Check]:
    from coderepairrl.tasks.exam import examine as sit

    for check in await sit(tasks.make(name, **options), sandbox.make(sandbox.default_name())):
        yield check


async def _model(name: str, options: Options) -> AsyncIterator[Check]:
    from coderepairrl.check.model import examine as sit

    check_options("model", name, sit, options)
    for check in sit(models.folder(name), **options):
        yield check


KINDS: dict[str, tuple[str, Callable[[str, Options], AsyncIterator[Check]]]] = {
    "sandbox": ("bwrap", _sandbox),
    "engine": ("tiny", _engine),
    "agent": ("nano", _agent),
    "reward": ("patch_lines", _reward),
    "tasks": ("handmade", _tasks),
    "model": ("builtin:tiny", _model),
}
"""Seams, and models, with the one that ships as their default."""
