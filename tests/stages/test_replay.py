"""Bringing a learner back to the end of a log whose settings changed on the way: from any checkpoint, or from none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import LearnerFault, RunError
from coderepairrl.learn import Form, LearnSettings
from coderepairrl.plan.learner import learn_settings as learn_settings
from coderepairrl.runs import RunFolder
from coderepairrl.stages import policy
from coderepairrl.stages.changes import Change
from coderepairrl.stages.history import History
from coderepairrl.sync.weights import Published

RATES = (1e-3, 2e-3, 3e-3)


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


class Learner:
    """Its weights are a digest of all batches so far and of the settings that each was trained with."""

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

    async def publish(self, form: Form = "model") -> Published:
        path = self.folder / f"v{self.version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "model.safetensors").write_text(self.state)
        return Published(path, self.version, self.state)

    async def save(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "state").write_text(json.dumps([self.state, self.version]))

    async def restore(self, path: Path) -> None:
        self.state, self.version = json.loads((path / "state").read_text())

    async def close(self, *, again: bool = False) -> None:
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
    """A run of `steps` steps, resumed with other learning rates after some of them, with the checkpoints it kept."""

    def __init__(self, home: Path, steps: int, rates: Mapping[int, float], kept: Sequence[int]) -> None:
        self.run = RunFolder(home / "story")
        config = self.config(RATES[0])
        self.run.create(to_toml(config), {})
        self.history = History()
        made = Learner(learn_settings(config), home)
        now = RATES[0]
        for step in range(1, steps + 1):
            if (new := rates.get(step - 1, now)) != now:
                self.history.changes.append(Change(step - 1, "train.lr", now, new)._asdict())
                now = new
                made.settings = learn_settings(self.config(now))
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
        engine, first = Engine(), Learner(learn_settings(self.last), weights)
        live = policy.LivePolicy(self.last, self.run, start_learner, cast(Any, engine), cast(Any, first))
        asyncio.run(live.restore(self.history))
        return live, engine


@settings(max_examples=60)
@given(
    st.integers(0, 7),
    st.dictionaries(st.integers(0, 7), st.sampled_from(RATES), max_size=5),
    st.lists(st.integers(1, 7), max_size=3, unique=True),
)
def test_weights_come_out_whatever_changed_and_whichever_checkpoints_are_left(
    steps: int, rates: dict[int, float], kept: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as monkeypatch:
        story = Story(Path(home), steps, rates, [step for step in kept if step <= steps])
        live, engine = story.restored(monkeypatch)
        learner = cast(Learner, live._learner)
        assert learner.settings == learn_settings(story.last), "it goes on with the last settings"
        assert live.version == steps
        assert engine.served == (story.history.steps[-1]["checksum"] if steps else "")
        # A second time nothing before the last change is replayed, and all is the same.
        state, Learner.started = learner.state, 0
        live, engine = story.restored(monkeypatch)
        assert cast(Learner, live._learner).state == state
        assert Learner.started == 1, "the one that was there already"


def test_weights_that_are_not_the_logged_ones_become_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path, 4, {2: RATES[1]}, [])
    story.history.steps[1] = {"step": 2, "checksum": "other libraries"}
    with pytest.raises(RunError, match="to step 2 gives different weights"):
        story.restored(monkeypatch)
    assert story.run.saved_checkpoints() == {}


@pytest.mark.parametrize("deaths", [2, 3])
@pytest.mark.parametrize("fatal", ["step", "publish", "save"])
def test_a_learner_that_dies_is_replaced_as_often_as_is_allowed(
    fatal: str, deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it dies; one that dies once more while it is brought back is one more death."""
    story = Story(tmp_path, 2, {}, [])
    live, engine = story.restored(monkeypatch)
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
    assert live.restarts == deaths
    if fatal == "save":
        assert json.loads((story.run.checkpoints / "00002/state").read_text())[0] == engine.served
    else:
        whole = Story(tmp_path / "whole", 3, {}, [])
        assert engine.served == whole.history.steps[-1]["checksum"]
