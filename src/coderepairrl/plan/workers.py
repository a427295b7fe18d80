"""Setup of workers that make a plan's attempts on other machines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from coderepairrl import rewards
from coderepairrl.config import Config
from coderepairrl.errors import ConfigError
from coderepairrl.plan.kinds import make_kinds
from coderepairrl.plan.place import choose_place
from coderepairrl.plan.problems import Made, Problems
from coderepairrl.rollout import Terms, ray_cluster
from coderepairrl.rollout.worker import WorkerSetup
from coderepairrl.tokens import Codec
from coderepairrl.types import Task


def worker_setup(
    config: Config, codec: Codec, *, sandbox: str, evaluations: Mapping[str, tuple[Task, ...]], learns: bool
) -> WorkerSetup:
    """Setup for attempts under `config` in the chosen `sandbox`; without `learns`, for `evaluations` only."""
    if codec.loaded_from is None:
        raise AssertionError("a plan's codec is loaded from a folder")
    if config.sandbox.name == "auto":  # the same everywhere, or a machine that lacks it says so
        config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"name": sandbox})})
    return WorkerSetup(
        codec.loaded_from,
        partial(terms, config, tuple(evaluations), learns),
    )


def terms(config: Config, evaluations: tuple[str, ...], learns: bool) -> Mapping[str, Terms]:
    """Terms of each kind of task, with the parts of `config` made on this machine. Raises as `Problems.report`."""
    problems = Problems()
    paid = problems.attempt(lambda: rewards.make(config.reward if learns else config.eval.reward or config.reward))
    measured = problems.attempt(lambda: rewards.make(config.eval.reward)) if config.eval.reward else paid
    place = choose_place(config, problems)
    phases = Made[Mapping[str, tuple[Task, ...]]]([dict.fromkeys(evaluations, ())])
    kinds = make_kinds(config, (paid, measured, place), phases, problems)
    problems.report()
    return kinds.value


def check_executor(config: Config, *, remote: bool = False) -> None:
    """Raise `ConfigError` for what attempts on other machines cannot do. `remote`: others serve the model."""
    if config.rollout.executor == "local":
        return
    if remote:
        raise ConfigError(
            "attempts with a model that somebody else serves are made on one machine, for they hardly load it",
            fix="leave rollout.executor out",
        )
    address = config.rollout.ray.address
    if (address not in ("auto", "local") and not address.rpartition(":")[2].isdecimal()) or "://" in address:
        raise ConfigError(
            f"rollout.ray.address={address}: the run itself is on a machine of the cluster, so no client's address will"
            " do",
            fix="auto, local, or HOST:PORT of the cluster's head (ray start prints it)",
        )


def require_ray(config: Config) -> None:
    """Raise `PrerequisiteError` if Ray is needed and not installed, or its cluster is unreachable."""
    if config.rollout.executor != "ray" or not config.rollout.ray.address:  # which `check_executor` refuses
        return
    ray_cluster.head(config.rollout.ray.address)
