"""Exams of implementations, with real learner and sandboxes."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

from coderepairrl import agents, engines, models, rewards, sandbox, tasks
from coderepairrl.config.schema import Route
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.learn import Learner, LearnSettings, init_random
from coderepairrl.printable import format_count
from coderepairrl.processes.scratch import scratch
from coderepairrl.registry import Finding, check_options, check_types, suggest_nearest
from coderepairrl.sync.weights import PublishedWeights, StreamedEngine
from coderepairrl.tasks import catalog
from coderepairrl.types import EngineNeeds, Sample

Options = Mapping[str, Any]


async def examine_sandboxes() -> AsyncIterator[Finding]:
    """Examine all sandboxes that work here; of others report what is missing (not `required`)."""
    for backend in sandbox.check_backends():
        yield backend
        if backend.ok and backend.name != "unsafe-local":
            async for finding in run_exam("sandbox", backend.name):
                yield finding._replace(name=f"{backend.name}: {finding.name}")


def run_exam(kind: str, name: str | None, options: Options | None = None) -> AsyncIterator[Finding]:
    """Examine implementation `name` of interface `kind`, made with `options`: one `Finding` per question.

    Findings on sandboxes come one by one, others at the end. Raises `UsageError` for an unknown kind, `ConfigError` for
    an unknown implementation or option.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no exam for {kind!r}", fix=suggest_nearest(kind, KINDS))
    default, examine = KINDS[kind]
    findings = examine(name or default, _flatten_options(kind, options or {}))
    return findings if isinstance(findings, AsyncIterator) else _yield_findings(findings)


async def _yield_findings(findings: list[Finding] | Awaitable[list[Finding]]) -> AsyncIterator[Finding]:
    for finding in findings if isinstance(findings, list) else await findings:
        yield finding


def _flatten_options(kind: str, options: Options) -> Options:
    # ``engine.options.slots=1``, as in a run's settings, means ``slots=1`` here.
    match options.get(kind):
        case {"options": Mapping() as nested, **rest}:
            others = {key: value for key, value in options.items() if key != kind}
            return {**others, **nested, **({kind: rest} if rest else {})}
    return options


async def _examine_sandbox_name(name: str, options: Options) -> AsyncIterator[Finding]:
    from coderepairrl.checks import redteam
    from coderepairrl.checks.sandbox import ask_questions

    backend = sandbox.make_backend(name, **options)
    backend.require()
    async for finding in ask_questions(backend):
        yield finding
    async for finding in redteam.examine_defences(backend):
        yield finding


async def _examine_engine_name(name: str, options: Options) -> list[Finding]:
    """Examine an engine with the real learner and a random policy.

    ``engine.weights`` adds weights sent by that route, ``engine.share_devices=turns`` adds sleep.
    """
    from coderepairrl.checks.engine import Publish, examine_engine
    from coderepairrl.plan.devices import check_sleeps
    from coderepairrl.processes.meter import list_visible_gpus

    route, sleeps, options = _split_engine_options(options)
    spec = engines.make_engine(name, **options)
    if route is not None and not spec.capabilities.can_receive:
        raise ConfigError(f"engine.weights={route}, and engine {spec.name!r} takes weights as files only")
    if route == "nccl" and not list_visible_gpus():
        raise ConfigError("engine.weights=nccl: NCCL works between GPUs, and there is none here")
    if sleeps:
        check_sleeps(spec)
    needs = EngineNeeds(sleep=sleeps)
    spec.require(needs)
    with scratch("exam") as folder:
        work = Path(folder)
        model = work / "model"
        await init_random(models.find_model_folder("builtin:tiny"), model, 0, log_dir=work)
        settings = LearnSettings(algorithm="grpo", lr=1e-3, old_logprobs="recomputed")
        async with AsyncExitStack() as stack:
            learner = await Learner.start(model, settings, log_dir=work, publish_dir=work)
            stack.push_async_callback(learner.close)
            engine = await spec.start(model, log_dir=work, needs=needs)
            stack.push_async_callback(engine.close)
            publish: Publish | None = None
            if route is not None:
                engine, publish = (
                    StreamedEngine(engine, learner.send),
                    functools.partial(_offer_weights, learner, route),
                )
            findings = await examine_engine(
                engine, model, reference=learner.logprobs, work=work, publish=publish, sleeps=sleeps
            )
    return findings


def _split_engine_options(options: Options) -> tuple[Route | None, bool, Options]:
    """``engine.weights``, whether devices are shared by turns, other options. Raises `ConfigError`."""
    plain_options = {key: value for key, value in options.items() if key != "engine"}
    match options.get("engine", {}):
        case {"weights": route, **others} if route in get_args(Route) and not others:
            return route, False, plain_options
        case {"share_devices": "turns", **others} if not others:
            return None, True, plain_options
        case {**others} if not others:
            return None, False, plain_options
    routes = ", ".join(get_args(Route))
    fix = f"engine.weights is one of {routes}, or engine.share_devices is turns"
    raise ConfigError(f"engine={options['engine']} is not an option here", fix=fix)


async def _offer_weights(learner: Learner, route: Route, version: int) -> PublishedWeights:
    """Train beyond `version`; offer the weights by `route`."""
    trained, logprobs, versions = (False,) + (True,) * 19, (0.0,) * 20, (-1,) + (0,) * 19
    rows = {1.0: tuple(range(20)), -1.0: tuple(range(20, 40))}  # by advantage: any ids will do
    samples = [
        Sample(f"e{advantage}", ids, trained, logprobs, versions, advantage=advantage)
        for advantage, ids in rows.items()
    ]
    while learner.version <= version:
        await learner.step(samples)
    return await learner.offer(route)


async def _examine_agent_name(name: str, options: Options) -> list[Finding]:
    from coderepairrl.checks.agent import examine_agent, examine_agent_program

    agent = agents.make_agent(name, **options)
    if agent.placement != "sandbox":
        return await examine_agent(agent)
    choice = sandbox.choose_backend()
    sandbox.check_agent(choice, agent.name, agent.not_in)
    backend = sandbox.make_backend(choice.name, agent.binds)
    backend.require()
    return await examine_agent_program(agent, backend)


async def _examine_reward_name(name: str, options: Options) -> list[Finding]:
    from coderepairrl.checks.reward import examine_reward

    if options:
        raise ConfigError(f"reward {name!r} has no option {min(options)!r}", fix="rewards take no options")
    reward = rewards.make_reward(name)
    findings = await examine_reward(reward, sandbox.make_backend(sandbox.choose_backend().name))
    if not reward.repairs and (failed := [at for at, finding in enumerate(findings) if not finding.ok]):
        # on the last failed finding only: one fix covers all
        fix = "it promises no measure of repair (Reward.repairs): add a reward that runs tests, or give it weight 0"
        findings[failed[-1]] = findings[failed[-1]]._replace(fix=fix)
    return findings


def _examine_tasks_name(name: str, options: Options) -> Awaitable[list[Finding]]:
    from coderepairrl.checks.task_source import examine_task_source

    # Preparing may take minutes, in which an event loop would keep signals from ending it.
    source = tasks.make_source(name, **options)
    source.prepare()
    return examine_task_source(source, sandbox.make_backend(sandbox.choose_backend().name))


def _examine_environments_name(name: str, options: Options) -> list[Finding]:
    """Compare environments and images of a source's tasks with their digests, reading every file."""
    from coderepairrl.environments.verify import verify_states

    states = verify_states(list(catalog.load_source(*catalog.resolve_source(name, options))))
    return [
        Finding(each.name, each.state == "as built", f"{each.state}, {format_count(each.tasks, 'task')}", each.fix)
        for each in states
    ] or [Finding("environments", True, "its tasks need none")]


async def _examine_model_name(name: str, options: Options) -> list[Finding]:
    from coderepairrl.checks.model import examine_model

    check_options("model", name, examine_model, options)
    check_types("model", name, examine_model, options)
    folder = models.find_model_folder(models.fetch_model(name) if models.is_hub_name(name) else name)
    return await examine_model(folder, **options)


def _examine_crash_name(name: str, options: Options) -> AsyncIterator[Finding]:
    from coderepairrl.checks.crash import examine_recovery

    check_options("crash", name, examine_recovery, options)
    check_types("crash", name, examine_recovery, options)
    return examine_recovery(name, **options)


Exam = Callable[[str, Options], AsyncIterator[Finding] | Awaitable[list[Finding]] | list[Finding]]
KINDS: dict[str, tuple[str, Exam]] = {
    "sandbox": ("bwrap", _examine_sandbox_name),
    "engine": ("tiny", _examine_engine_name),
    "agent": ("nano", _examine_agent_name),
    "reward": ("patch_edits", _examine_reward_name),
    "tasks": ("handmade", _examine_tasks_name),
    "environments": ("mutants", _examine_environments_name),
    "model": ("builtin:tiny", _examine_model_name),
    "crash": ("each", _examine_crash_name),
}
"""Interfaces, environments, models and the crash test, with default implementations."""
