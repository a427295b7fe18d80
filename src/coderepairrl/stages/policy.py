"""The policy in training: learner and engine at the same version."""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coderepairrl.config import Config
from coderepairrl.errors import RunError, UsageError
from coderepairrl.learn import (
    RECIPES,
    Batch,
    Form,
    Learner,
    LearnSettings,
    RewardShaping,
    build_batch,
    compute_advantages,
)
from coderepairrl.learn.stitch import Balance
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.protocols import Engine
from coderepairrl.runs import RunFolder
from coderepairrl.runs.storage import find_damage
from coderepairrl.stages.changes import config_at_step
from coderepairrl.stages.history import History, read_consumed_episodes
from coderepairrl.stages.life_cycle import retry_learner, save_checkpoint
from coderepairrl.sync import weights
from coderepairrl.sync.weights import PublishedWeights
from coderepairrl.types import Episode

T = TypeVar("T")


def make_batch(episodes: Sequence[Episode], config: Config) -> Batch:
    """Make the batch of a step; a replay makes the same."""
    train = config.train
    balance: Balance = ""
    if train.balance_kinds:
        balance = "episodes" if RECIPES[train.algorithm].aggregation in ("episode", "row") else "tokens"
    return build_batch(
        episodes,
        max_tokens=config.rollout.tokens,
        weights={name: kind.weight for name, kind in config.kinds.items()},
        balance=balance,
        **_advantage_options(config),
    )


def count_informative(episodes: Sequence[Episode], config: Config) -> int:
    """Count groups with an episode to learn from."""
    groups, _ = compute_advantages(episodes, **_advantage_options(config))
    return sum(any(value is not None for value in group.values) for group in groups.values())


def _advantage_options(config: Config) -> dict[str, Any]:
    train, tokens = config.train, config.rollout.tokens
    limits = {"": tokens, **{name: kind.tokens or tokens for name, kind in config.kinds.items()}}
    return {
        # a value head gets the rewards themselves
        "baseline": "none" if train.value_head else train.advantage or RECIPES[train.algorithm].baseline,
        "informative": config.curriculum.refill > 0,
        "kl": train.beta > 0 or train.entropy > 0 or bool(train.teacher) or train.value_head,
        "shaping": RewardShaping(train.overlong_buffer, limits, train.tie_break, train.mask_truncated),
    }


@dataclass(eq=False)
class LivePolicy:
    """Learner and engine of a run; a learner that dies is restored from the log."""

    config: Config
    run: RunFolder
    start: Callable[[LearnSettings], Awaitable[Learner]]
    engine: Engine
    learner: Learner
    """Started just now, with the initial weights."""
    adapters: bool = False
    """Whether the engine of a LoRA run gets the adapter, not merged weights."""
    on_death: Callable[[str], None] = lambda _: None
    """Gets the reason of each death of a learner."""

    def __post_init__(self) -> None:
        self._form: Form = "adapter" if self.adapters and self.config.train.lora is not None else "model"
        self._is_fresh = True  # the learner was just started, with this config
        self._takes_turns = self.config.engine.share_devices == "turns"
        self._served: PublishedWeights | None = None

    @property
    def version(self) -> int:
        """Policy version: number of trained batches."""
        return self.learner.version

    async def restore(self, history: History) -> None:
        """Bring the learner to the end of `history` from a checkpoint and the logged steps after it, and serve it.

        Replays steps bit for bit. Raises `RunError` if the weights differ from the log's, for example on a different
        machine or with different library versions. An engine that takes turns on the devices sleeps meanwhile.
        """
        if self._takes_turns:  # the learner was just started on the device, and needs no reload
            await self.engine.sleep()
        steps = replayed_steps(self.run, history)
        start = steps.start - 1
        configs = {step: config_at_step(self.config, history.changes, step) for step in steps}
        configs[steps.stop] = self.config  # of the next step, which is not replayed
        await self._load_checkpoint(configs[steps.start], start)
        episodes = read_consumed_episodes(self.run, history.steps[start:])
        for step, config in configs.items():
            # settings that changed before this step need another learner, which continues from a new checkpoint
            if step > steps.start and make_learn_settings(config) != make_learn_settings(configs[step - 1]):
                if self.learner.version:  # published only to compare the checksum
                    shutil.rmtree((await self._publish_verified(history, step - 1)).path)
                await save_checkpoint(self.learner, self.run, self.config, step - 1)
                await self._load_checkpoint(config, step - 1)
            if step in steps and (batch := make_batch(episodes[step], config)).samples:
                await self.learner.step(batch.samples, batch.episodes, batch.tokens)
        if self.learner.version:
            await self._serve(await self._publish_verified(history, history.step))
        elif self._takes_turns:
            await self.learner.offload()
            await self.engine.wake()

    async def _load_checkpoint(self, config: Config, step: int) -> None:
        """Load the checkpoint of `step` (0: initial weights), in a new learner if `config` needs one."""
        if not self._is_fresh or make_learn_settings(config) != make_learn_settings(self.config):
            await self.learner.close(restarts=True)
            self.learner = await self.start(make_learn_settings(config))
        self._is_fresh = False
        if step:
            try:
                await self.learner.restore(self.run.list_checkpoints()[step])
            except UsageError as error:
                raise UsageError(str(error), fix=self._explain_removal(step)) from error

    def _explain_removal(self, step: int) -> str:
        # replaying the log gives the same weights from any checkpoint, or from none
        saved = self.run.list_checkpoints()
        earlier = (saved[number] for number in sorted(saved, reverse=True) if number < step)
        undamaged = next((path for path in earlier if not find_damage(path)), None)
        start = f"{undamaged}, which is not damaged," if undamaged else "the first step"
        return f"restore it from a copy, or: rm -r {saved[step]}; --resume then replays the log from {start} to its end"

    async def _publish_verified(self, history: History, step: int) -> PublishedWeights:
        """Publish the learner's weights. Raises `RunError` if they differ from those logged after `step`."""
        published = await self._publish()
        if published.checksum != history.steps[step - 1]["checksum"]:
            raise RunError(
                f"replaying {self.run.log} to step {step} gives different weights than the run had",
                fix="resume with the library versions in run.json, on the same kind of machine",
            )
        return published

    async def improve(self, batch: Batch, history: History) -> tuple[dict[str, Any], str]:
        """Train on `batch` and serve the new weights; return metrics and the weights' checksum.

        Adds the metrics ``sync_seconds`` and ``sync_bytes``; if engine and learner take turns on the devices also
        ``sleep_seconds``, ``wake_seconds`` (engine), ``take_back_seconds``, ``put_away_seconds``, ``moved_bytes``
        (learner). Without samples, changes nothing.
        """
        if not batch.samples:
            return {}, self._served.checksum if self._served else ""

        async def update() -> tuple[dict[str, Any], str]:
            device_seconds = await self._switch_to_learner()
            metrics = await self.learner.step(batch.samples, batch.episodes, batch.tokens)
            published = await self._publish()
            return metrics | device_seconds | await self._serve(published), published.checksum

        return await self._retry(update, history)

    async def save(self, history: History) -> Path:
        """Write ``checkpoints/STEP``; delete the oldest beyond `run.keep_checkpoints`."""
        return await self._retry(lambda: save_checkpoint(self.learner, self.run, self.config, history.step), history)

    async def _retry(self, action: Callable[[], Awaitable[T]], history: History) -> T:
        return await retry_learner(action, lambda: self.restore(history), self.config.run.retries, self.on_death)

    async def close(self) -> None:
        """End the learner, but not the engine."""
        await self.learner.close()

    async def _publish(self) -> PublishedWeights:
        if (route := self.config.engine.weights) != "file":
            return await self.learner.offer(route)
        return await self.learner.publish(self._form)

    async def _switch_to_learner(self) -> dict[str, float]:
        if not self._takes_turns:
            return {}
        began = time.monotonic()
        await self.engine.sleep()
        asleep = time.monotonic()
        await self.learner.reload()
        reloaded = time.monotonic()
        return {"sleep_seconds": round(asleep - began, 3), "take_back_seconds": round(reloaded - asleep, 3)}

    async def _serve(self, published: PublishedWeights) -> dict[str, float]:
        """Load the published weights into the engine; return bytes and seconds."""
        size, began = weights.count_bytes(published.path), time.monotonic()
        moved = await self.learner.offload() if self._takes_turns else 0
        offloaded = time.monotonic()
        await self.engine.load(*published)
        numbers = {"sync_seconds": round(time.monotonic() - offloaded, 3), "sync_bytes": size}
        if self._takes_turns:
            wake = round((await self.engine.health()).get("wake_seconds", 0.0), 3)
            numbers |= {"put_away_seconds": round(offloaded - began, 3), "wake_seconds": wake, "moved_bytes": moved}
        if self._served is not None and self._served.path != published.path:
            shutil.rmtree(self._served.path, ignore_errors=True)
        self._served = published
        return numbers


def replayed_steps(run: RunFolder, history: History) -> range:
    """Steps of the log after the newest checkpoint, which a restored learner replays."""
    newest = max((step for step in run.list_checkpoints() if step <= history.step), default=0)
    return range(newest + 1, history.step + 1)
