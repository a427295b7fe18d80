"""Plans of evaluations and collections from the arguments of `crrl eval` and `crrl collect`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from coderepairrl import config as configs
from coderepairrl import tasks
from coderepairrl.config import Config
from coderepairrl.config.schema import Agent
from coderepairrl.errors import UsageError
from coderepairrl.plan import COLLECTION, EVALUATION, resolve_evaluation
from coderepairrl.plan.model import plan_model
from coderepairrl.plan.terms import AgentPlan
from coderepairrl.registry import suggest_nearest, suggest_run
from coderepairrl.runs import RunFolder, open_run
from coderepairrl.stages.evaluation import COLLECTING, PRESETS, Evaluation
from coderepairrl.stages.life_cycle import find_free_folder, require_command
from coderepairrl.stages.shards import WHOLE, Shard, parse_shard
from coderepairrl.stats.measures import Prices


def preset_settings(name: str | None) -> tuple[str, ...]:
    """Settings of the preset `name`. Raises `UsageError` for an unknown one."""
    if name is None:
        return ()
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}", fix=suggest_nearest(name, PRESETS))
    return PRESETS[name]


def plan_evaluations(
    what: str,
    settings: Sequence[str] = (),
    policies: Sequence[str] = (),
    *,
    agents: Sequence[str] = (),
    output: Path | None = None,
    resume: bool = False,
    shard: str | None = None,
    prices: str | None = None,
    collects: bool = False,
) -> list[Evaluation]:
    """Plan an evaluation, or with `collects` a collection, for each of `policies` (none: the file's).

    `what` is a TOML file, shipped config or run that has the settings; or a task source, with its options in
    `settings`; or, with `resume`, an evaluation's folder. Each of `agents` attempts all tasks under the same limits.
    Several policies have a run folder each, by name.

    Raises as `resolve_evaluation`, and `UsageError` for contradictory arguments.
    """
    if resume and (Path(what) / "run.json").is_file() and open_run(Path(what)).command() in ("eval", "collect"):
        if policies or output is not None:
            fix = f"crrl {'collect' if collects else 'eval'} {what} --resume"
            raise UsageError(f"{what} already has a policy and a folder, which a resumed run keeps", fix=fix)
        return [_plan_resumed(RunFolder(Path(what)), settings, agents, shard, collects)]
    labels = [_policy_label(policy) for policy in policies]
    if same_label := [policy for policy, label in zip(policies, labels, strict=True) if labels.count(label) > 1]:
        raise UsageError(
            f"--policy {' and '.join(same_label)} have the same name, {_policy_label(same_label[0])}",
            fix="measure each in a separate call",
        )
    task_share, settings = parse_shard(shard) if shard else WHOLE, [*(COLLECTING if collects else ()), *settings]
    plans = [_plan_policy(what, settings, policy, agents, collects) for policy in policies or (None,)]
    home = _choose_folder(plans[0].config, output, task_share, resume=resume)
    folders = [RunFolder(home / label) for label in labels] if len(plans) > 1 else [RunFolder(home)]
    return [
        Evaluation(
            plan,
            folder,
            task_share,
            _parse_prices(prices, plan),
            # with several policies, those that no earlier call reached start now
            resume=resume and (len(plans) == 1 or (folder.path / "run.json").is_file()),
            collects=collects,
        )
        for plan, folder in zip(plans, folders, strict=True)
    ]


def _plan_resumed(
    folder: RunFolder, settings: Sequence[str], agents: Sequence[str], shard: str | None, collects: bool
) -> Evaluation:
    require_command(folder, "collect" if collects else "eval")
    about = folder.about()
    plan = _plan_with_agents(str(folder.config), settings, agents, collects=collects)
    prices = Prices(*about["prices"]) if about.get("prices") else None
    task_share = parse_shard(shard or about.get("shard", str(WHOLE)))
    return Evaluation(plan, folder, task_share, prices, resume=True, collects=collects)


def _policy_label(policy: str) -> str:
    """Folder name for `policy`.

    >>> list(map(_policy_label, ["runs/mine", "runs/mine/checkpoints/00010", "builtin:tiny", "https://a.org/v1"]))
    ['mine', 'mine-00010', 'builtin-tiny', 'a.org-v1']
    """
    parts = [part for part in Path(policy.partition("://")[2] or policy).parts if part != "checkpoints"]
    shown = 2 if "checkpoints" in Path(policy).parts or "://" in policy else 1
    return re.sub(r"[^\w.]+", "-", "-".join(parts[-shown:])).strip("-.") or "policy"


def _plan_with_agents(
    model: str,
    settings: Sequence[str],
    agents: Sequence[str],
    *,
    settings_of: Path | None = None,
    collects: bool,
) -> AgentPlan:
    """Call `resolve_evaluation` with other `agents`; the settings' agent keeps its options."""
    if agents:
        served = plan_model(model, settings, COLLECTION if collects else EVALUATION, settings_of)
        configured = served.config.agent if served.can_make("config") else Agent()  # errors are reported below
        settings = [*settings, *_agent_settings(agents, configured)]
    return resolve_evaluation(model, settings, settings_of=settings_of, collects=collects)


def _agent_settings(agents: Sequence[str], configured: Agent) -> list[str]:
    """Settings that give each of `agents` an evaluation; the first is called ``eval``.

    >>> _agent_settings(["claude-code", "nano"], Agent(options={"tools": "compact"}))
    ['agent={"name" = "claude-code"}', 'eval.also.nano={agent={"name" = "nano", "options" = {"tools" = "compact"}}}']
    """
    if twice := [name for name in agents if agents.count(name) > 1]:
        raise UsageError(f"--agent {twice[0]} is named twice", fix="--attempts N has it attempt each task N times")
    with_options = {configured.name: configured.model_dump()} if configured.options else {}
    first, *other_agents = [configs.to_inline(with_options.get(name, {"name": name})) for name in agents]
    labels = [re.sub(r"\W", "_", Path(name.rpartition(":")[2]).stem.lower()) for name in agents[1:]]
    return [
        f"agent={first}",
        *(f"eval.also.{label}={{agent={agent}}}" for label, agent in zip(labels, other_agents, strict=True)),
    ]


def find_config_file(what: str) -> Path | None:
    """TOML file, shipped config or run that `what` names; None for a task source."""
    if what in configs.shipped_configs():
        return configs.shipped_configs()[what]
    return configs.find_run_folder(what) or (Path(what).expanduser() if what.endswith(".toml") else None)


def _plan_policy(
    what: str, settings: Sequence[str], policy: str | None, agents: Sequence[str], collects: bool
) -> AgentPlan:
    if (file := find_config_file(what)) is None:
        return _plan_on_source(what, settings, policy, agents, collects)
    settings = [f"run.name={_name_run(what, collects)}", *settings]
    if policy is None:
        return _plan_with_agents(str(file), settings, agents, collects=collects)
    if policy.endswith(".toml"):
        raise UsageError(
            f"{policy} and {what} both have settings", fix="name the model itself: its folder, its run, or its URL"
        )
    # not `file`: a run's config.toml would count as the user's own file, which may name programs to run
    settings_of = configs.shipped_configs().get(what) or Path(what).expanduser()
    return _plan_with_agents(policy, settings, agents, settings_of=settings_of, collects=collects)


def _plan_on_source(
    source: str, settings: Sequence[str], policy: str | None, agents: Sequence[str], collects: bool
) -> AgentPlan:
    """Plan an evaluation on task source `source`, which replaces the policy's task and reward settings."""
    if policy is None:
        command = "collect" if collects else "eval"
        raise UsageError("no policy is named", fix=f"crrl {command} {source} --policy RUN|FOLDER|builtin:tiny|URL")
    if source not in tasks.SHIPPED and ":" not in source:
        suggestion = suggest_run(Path(source)) if "/" in source else ""
        raise UsageError(
            f"{source} is not a TOML file, shipped config, run or task source",
            fix=suggestion or suggest_nearest(source, [*configs.shipped_configs(), *tasks.SHIPPED]),
        )
    settings, option_words = split_settings(settings)
    options = configs.parse_options(option_words, "path")
    names_rewards = any(each.startswith(("eval.reward", "reward", "kinds")) for each in settings)
    section, split = ("tasks", "train") if collects else ("eval", "test")
    source_settings = (
        *(f"run.name={_name_run(source, collects)}", "kinds={}", "eval.also={}", "eval.tasks=0", "eval.reward={}"),
        *(["tasks.sources=[]", 'eval.source=""'] if collects else []),
        *([] if names_rewards else ["reward={}"]),  # the tasks decide what is measured
        *(f"{section}.source={configs.to_inline(source)}", f'{section}.split="{split}"'),
        *(f"{section}.options.{key}={configs.to_inline(value)}" for key, value in options.items()),
    )
    return _plan_with_agents(policy, [*source_settings, *settings], agents, collects=collects)


def split_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split KEY=VALUE `words` into settings, and options of a task source."""
    settings = [each for each in words if each.partition("=")[0].partition(".")[0].strip() in Config.model_fields]
    return settings, [each for each in words if each not in settings]


def _name_run(what: str, collects: bool = False) -> str:
    """Name the run on `what`: a path, source or ``module:Class``.

    >>> _name_run("quixbugs"), _name_run("runs/mine"), _name_run("my.sources:Bugs")
    ('eval-quixbugs', 'eval-mine', 'eval-Bugs')
    """
    return f"{'collect' if collects else 'eval'}-{Path(what.rpartition(':')[2]).stem or 'run'}"


def _choose_folder(config: Config, output: Path | None, shard: Shard, *, resume: bool) -> Path:
    """Folder `output`, else ``RUN.DIR/RUN.NAME``, numbered if taken."""
    if output is not None:
        return output
    name = config.run.name if shard == WHOLE else f"{config.run.name}-{shard.number}of{shard.of}"
    folder = Path(config.run.dir) / name
    return folder if resume else find_free_folder(folder)


def _parse_prices(text: str | None, plan: AgentPlan) -> Prices | None:
    if text is None:
        return None
    if plan.config.engine.name != "relay":
        raise UsageError("--prices is for a policy behind a URL", fix="leave it out")
    with suppress(TypeError, ValueError):
        prices = Prices(*map(float, text.split(",")))
        if all(price is None or 0 <= price < float("inf") for price in prices):
            return prices
    raise UsageError(
        f"not prices: {text!r}", fix="per million tokens: --prices PROMPT,REPLY or PROMPT,REPLY,CACHED (0.15,0.6)"
    )
