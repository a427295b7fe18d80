"""Adapters of the trackers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Tracked(NamedTuple):
    """Run as trackers see it."""

    folder: Path
    name: str
    id: str
    """Stable when the run is resumed."""
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Destination of metrics."""

    def send(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Send `metrics` of training step `step`, logged at Unix `time`."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoard:
    """Event files in ``RUN/tensorboard``; view with ``tensorboard --logdir runs``."""

    def __init__(self, run: Tracked) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run.folder / "tensorboard"))

    def send(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """See `Tracker.send`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time=time)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class Trackio:
    """Local database (``TRACKIO_DIR``), unless ``TRACKIO_SPACE_ID`` or ``TRACKIO_SERVER_URL`` is set."""

    def __init__(self, run: Tracked) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", "coderepairrl"),
            name=f"{run.name}-{run.id}",  # by which it is found again
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def send(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """See `Tracker.send`; records the time of sending."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Tracker.close`."""
        self._trackio.finish()  # not the run's own, which atexit would repeat


class WeightsAndBiases:
    """Server of ``wandb login`` or ``WANDB_BASE_URL``; files in ``RUN/wandb`` if ``WANDB_MODE=offline``."""

    def __init__(self, run: Tracked) -> None:
        import wandb

        self._run = wandb.init(
            dir=run.folder,
            project=os.environ.get("WANDB_PROJECT", "coderepairrl"),
            name=run.name,
            id=run.id,
            resume="allow",
            config=dict(run.config),
            # of this machine and its code it is told nothing
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        # not wandb's own step, of which none may come later than a greater one
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """See `Tracker.send`."""
        self._run.log({"step": step, "_timestamp": time, **metrics})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Tracked], Tracker]] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}
