"""Resuming: which settings may change, and how a log becomes the weights of its end, from any checkpoint."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from coderepairrl.config import Config, load_config, to_toml
from coderepairrl.errors import ConfigError, LearnerFault, RunError
from coderepairrl.learn import Form, LearnSettings
from coderepairrl.learn.account import count_run_tokens
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.rollout.curriculum import Curriculum, WeightedTasks
from coderepairrl.rollout.groups import plan_due_groups
from coderepairrl.runs import RunFolder
from coderepairrl.stages import policy
from coderepairrl.stages.changes import MAY_CHANGE, WHY_NOT, Change, config_at_step, explain_refusal, list_changes
from coderepairrl.stages.history import History, read_consumed_episodes, read_finished_episodes, read_history
from coderepairrl.sync.weights import PublishedWeights
from coderepairrl.types import Ending, Episode, Origin, Score, Task, TokenSpan, Turn, VersionRange

RATES = (1e-3, 2e-3, 3e-3)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


class Learner:
    """Weights are a digest of all batches so far, each with its settings."""

    started = 0

    def __init__(self, settings: LearnSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.state, self.version, self.closed = "initial", 0, False
        Learner.started += 1

    async def step(self, samples: Sequence[object], episodes: int, tokens: int) -> dict[str, Any]:
        assert not self.closed
        self.state = digest(self.state, self.settings.model_dump(), samples)
        self.version += 1
        return {}

    async def publish(self, form: Form = "model") -> PublishedWeights:
        path = self.folder / f"v{self.version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_text(self.state)
        return PublishedWeights(path, self.version, self.state)

    async def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "state").write_text(json.dumps([self.state, self.version]))

    async def restore(self, path: Path) -> None:
        self.state, self.version = json.loads((path / "state").read_text())

    async def close(self, *, restarts: bool = False) -> None:
        self.closed = True


class Engine:
    adapters = False

    def __init__(self) -> None:
        self.served = ""

    async def load(self, path: Path, version: int, checksum: str) -> int:
        assert (path / "model.safetensors").read_text() == checksum, "what is served has not been deleted"
        self.served = checksum
        return version


class Story:
    """A run resumed with other learning rates after some steps, and its kept checkpoints."""

    def __init__(self, home: Path, steps: int, rates: Mapping[int, float], kept: Sequence[int]) -> None:
        self.run = RunFolder(home / "story")
        config = self.config(RATES[0])
        self.run.create(to_toml(config), {})
        self.history = History()
        made = Learner(make_learn_settings(config), home)
        now = RATES[0]
        for step in range(1, steps + 1):
            if (new := rates.get(step - 1, now)) != now:
                self.history.changes.append(Change(step - 1, "train.lr", now, new)._asdict())
                now = new
                made.settings = make_learn_settings(self.config(now))
            asyncio.run(made.step([f"sample {step}"], 1, 1))
            if step in kept:
                asyncio.run(made.save(self.run.checkpoints / f"{step:05d}"))
            self.history.steps.append({"step": step, "checksum": made.state})
        if (new := rates.get(steps, now)) != now:
            self.history.changes.append(Change(steps, "train.lr", now, new)._asdict())
            now = new
        self.last = self.config(now)

    def config(self, rate: float) -> Config:
        run = {"name": "story", "dir": str(self.run.path.parent), "keep_checkpoints": 9, "retries": 2}
        return Config.model_validate({"run": run, "train": {"lr": rate}})

    def restored(self, monkeypatch: pytest.MonkeyPatch) -> tuple[policy.LivePolicy, Engine]:
        home = self.run.path.parent
        weights = home / "weights"

        async def start_learner(chosen: LearnSettings) -> Any:
            return Learner(chosen, weights)

        def consumed(run: RunFolder, steps: Sequence[Mapping[str, Any]]) -> dict[int, int]:
            return {record["step"]: record["step"] for record in steps}

        monkeypatch.setattr(policy, "read_consumed_episodes", consumed)
        monkeypatch.setattr(
            policy, "make_batch", lambda step, _: SimpleNamespace(samples=[f"sample {step}"], episodes=1, tokens=1)
        )
        engine, first = Engine(), Learner(make_learn_settings(self.last), weights)
        live = policy.LivePolicy(self.last, self.run, start_learner, cast(Any, engine), cast(Any, first))
        asyncio.run(live.restore(self.history))
        return live, engine


@settings(max_examples=60)
@given(
    st.integers(0, 7),
    st.dictionaries(st.integers(0, 7), st.sampled_from(RATES), max_size=5),
    st.lists(st.integers(1, 7), max_size=3, unique=True),
)
def test_replay_gives_the_logged_weights_after_any_changes_from_any_checkpoints(
    steps: int, rates: dict[int, float], kept: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as monkeypatch:
        story = Story(Path(home), steps, rates, [step for step in kept if step <= steps])
        live, engine = story.restored(monkeypatch)
        learner = cast(Learner, live.learner)
        assert learner.settings == make_learn_settings(story.last), "it goes on with the last settings"
        assert live.version == steps
        assert engine.served == (story.history.steps[-1]["checksum"] if steps else "")
        # A second time nothing before the last change is replayed, and all is the same.
        state, Learner.started = learner.state, 0
        live, engine = story.restored(monkeypatch)
        assert cast(Learner, live.learner).state == state
        assert Learner.started == 1, "the one that was there already"


def test_weights_that_differ_from_the_log_become_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(tmp_path, 4, {2: RATES[1]}, [])
    story.history.steps[1] = {"step": 2, "checksum": "other libraries"}
    with pytest.raises(RunError, match="to step 2 gives different weights"):
        story.restored(monkeypatch)
    assert story.run.list_checkpoints() == {}


@pytest.mark.parametrize("deaths", [2, 3])
@pytest.mark.parametrize("fatal", ["step", "publish", "save"])
def test_a_learner_that_dies_is_replaced_as_often_as_is_allowed(
    fatal: str, deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death while it is restored counts too."""
    story = Story(tmp_path, 2, {}, [])
    live, engine = story.restored(monkeypatch)
    seen: list[str] = []
    live.on_death = seen.append
    works, left = getattr(Learner, fatal), [deaths]

    async def dying(learner: Learner, *given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise LearnerFault("it died")
        return await works(learner, *given)

    monkeypatch.setattr(Learner, fatal, dying)
    more = cast(Any, SimpleNamespace(samples=["sample 3"], episodes=1, tokens=1))
    goes_on = live.save(story.history) if fatal == "save" else live.improve(more, story.history)
    if deaths > 2:
        with pytest.raises(LearnerFault):
            asyncio.run(goes_on)
        return
    asyncio.run(goes_on)
    assert len(seen) == deaths
    if fatal == "save":
        assert json.loads((story.run.checkpoints / "00002/state").read_text())[0] == engine.served
    else:
        whole = Story(tmp_path / "whole", 3, {}, [])
        assert engine.served == whole.history.steps[-1]["checksum"]


CONFIG = Config.model_validate({"run": {"name": "changing"}})


def every_setting() -> set[str]:
    """Every setting, by dotted key."""
    keys = {"reward"}
    for name in Config.model_fields:
        section = getattr(CONFIG, name)
        keys |= {f"{name}.{key}" for key in type(section).model_fields} if isinstance(section, BaseModel) else set()
    return keys


def test_every_setting_may_change_or_has_a_reason_why_not() -> None:
    known = every_setting()
    may = {key for key in known if any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)}
    assert all(explain_refusal(key) for key in known - may)
    assert {name for name in (*MAY_CHANGE, *WHY_NOT) if "." in name} <= known, "what the two lists name exists"
    assert not {"train.algorithm", "run.seed", "model.path", "rollout.temperature"} & may


VALUES: dict[str, list[Any]] = {
    "train.lr": [1e-3, 2e-3, 3e-3],
    "train.betas": [[0.9, 0.99], [0.8, 0.95]],
    "train.eps_low": [None, 0.1],
    "rollout.tokens": [5000, 6000],
    "curriculum.refill": [0, 4],
    "rollout.concurrency": [2, 3],
    "train.patience": [10.0, 20.0],
}


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(sorted(VALUES)), st.integers(0, 2)), max_size=12))
def test_each_step_has_the_settings_it_was_made_with(drawn: list[tuple[int, str, int]]) -> None:
    """Compared with a run played forward, with repeated and reverted changes of a setting."""
    now: dict[str, Any] = {key: values[0] for key, values in VALUES.items()}
    made: dict[int, dict[str, Any]] = {}
    changes = []
    for step in range(1, 9):
        for at, key, number in drawn:
            new = VALUES[key][number % len(VALUES[key])]
            if at == step - 1 and new != now[key]:
                changes.append(Change(step - 1, key, now[key], new)._asdict())
                now = {**now, key: new}
        made[step] = now
    config = _with(now)
    for step, chosen in made.items():
        machine = {key: now[key] for key in ("rollout.concurrency", "train.patience")}
        assert config_at_step(config, changes, step) == _with(chosen | machine), f"step {step}"


def _with(chosen: dict[str, Any]) -> Config:
    data: dict[str, Any] = {"run": {"name": "changing"}}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        data.setdefault(section, {})[name] = value
    return Config.model_validate(data)


def test_values_of_two_versions_of_a_reward_are_not_mixed_and_steps_stay_made(tmp_path: Path) -> None:
    folder, own = RunFolder(tmp_path / "run"), Config.model_validate({"run": {"name": "changing", "steps": 1}})
    folder.create(to_toml(own), {"config": own.model_dump(mode="json"), "rewards": {"patch_edits": 1}})
    assert list_changes(folder, History(), own, {"patch_edits": 1}, ()) == []
    with pytest.raises(ConfigError, match="patch_edits version 1, and this installation computes version 2"):
        list_changes(folder, History(), own, {"patch_edits": 2}, ())
    two = History(steps=[{"step": 1}, {"step": 2}])
    with pytest.raises(ConfigError, match="already has 2 steps, more than run.steps=1"):
        list_changes(folder, two, own, {"patch_edits": 1}, ())


def test_what_would_make_it_another_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Also if it is missing from a config.toml that was edited by hand."""
    agent = {"name": "nano", "options": {"tools": "compact"}}
    folder, own = RunFolder(tmp_path / "run"), Config.model_validate({"run": {"name": "changing"}, "agent": agent})
    folder.create(to_toml(own), {"config": own.model_dump(mode="json"), "rewards": {}})
    for override, reason in (
        ("train.algorithm=grpo", "train the rest of the run differently"),
        ("run.seed=1", "seeds its random choices"),
        ("agent.options.tools=full", "a different program"),
    ):
        with pytest.raises(ConfigError, match=reason):
            list_changes(folder, History(), load_config(folder.path, [override]), {}, ())
    folder.config.write_text(to_toml(Config.model_validate({"run": {"name": "changing"}})))
    with pytest.raises(ConfigError, match=r"agent\.options\.tools='compact', which cannot become unset"):
        list_changes(folder, History(), load_config(folder.path), {}, ())


GROUPS = ("train-00001-000", "train-00001-001", "train-00002-000", "train-00002-001")
CROSSED = {1: (GROUPS[0], GROUPS[3]), 2: (GROUPS[2],)}
"""Groups by consuming step; group 1 of the first step is finished and not yet consumed."""
TASKS = [Task(f"toy/{at}", "repair it", "python", "dir:x", b"") for at in range(4)]


def attempt(group: str, number: int, *, retry: int = 0, ending: Ending = Ending.DONE) -> Episode:
    chance = random.Random(f"{group}/{number}")
    said = tuple(chance.randrange(256) for _ in range(12))
    span = TokenSpan(said, Origin.POLICY, tuple(-5.5 + chance.random() / 8 for _ in said))
    turn = Turn(0, None, TokenSpan((1, 2, 3), Origin.GIVEN), span, versions=(VersionRange(0, 0, len(said)),))
    name = f"{group}-{number:02d}" + (f"-retry{retry}" if retry else "")
    scores = (Score("reward", float(number)),)
    return Episode(name, "toy", "train", int(group[6:11]), group, number, ending, turns=(turn,), scores=scores)


def crossed(home: Path) -> RunFolder:
    """Write the log of a run whose steps consumed `CROSSED`."""
    config = Config.model_validate({"run": {"name": "crossed", "dir": str(home)}})
    run = RunFolder(home / "crossed")
    run.create(to_toml(config), {})
    spoilt = attempt(GROUPS[0], 1, ending=Ending.VOID)
    episodes = [spoilt, *(attempt(g, at, retry=g == GROUPS[0] and at) for g in GROUPS for at in range(2))]
    with closing(run.writer()) as log:
        for e in sorted(episodes, key=lambda episode: episode.attempt):
            log.append("episode", id=e.id, phase="train", step=e.step, group=e.group, attempt=e.attempt, task="toy")
            for turn in e.turns:
                log.append("turn", episode=e.id, turn=turn)
            log.append("verdict", verdict=replace(e, turns=()))
        for step, groups in CROSSED.items():
            own = [e for group in groups for e in episodes if e.group == group and e.ending is not Ending.VOID]
            account = asdict(policy.make_batch(own, config).account)
            log.append("step", step=step, episodes=[e.id for e in own], account=account, metrics={})
    return run


def test_groups_cross_steps_and_what_was_left_behind_comes_first(tmp_path: Path) -> None:
    run = crossed(tmp_path)
    account = count_run_tokens(run.records())
    assert account.is_balanced and account.trained == 6 * 12
    assert account.dropped == {"void": 12, "pending": 2 * 12}
    slots = plan_due_groups(
        Curriculum(sources=(WeightedTasks(TASKS),), per_step=2, seed=0), 2, 2, read_history(run).consumed
    )
    assert [slot.group for slot in slots] == [GROUPS[1], "train-00003-000"]
    assert [e.id for e in read_finished_episodes(run, [GROUPS[1]])] == [f"{GROUPS[1]}-00", f"{GROUPS[1]}-01"]


def test_an_episode_that_is_lost_is_named(tmp_path: Path) -> None:
    run = crossed(tmp_path)
    steps = read_history(run).steps
    lines = run.log.read_text().splitlines(keepends=True)
    run.log.write_text("".join(line for line in lines if not ('"verdict"' in line and f"{GROUPS[3]}-01" in line)))
    with pytest.raises(RunError, match=f"{GROUPS[3]}-01"):
        read_consumed_episodes(run, steps)
