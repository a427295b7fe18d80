"""Whether a run's clip can do its job, by its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import rewards, stages
from coderepairrl.config import Config, apply_overrides, load_config, to_toml
from coderepairrl.errors import ConfigError
from coderepairrl.plan.learner import check_clip, describe_clip, is_engine_half, learn_settings, resolve_numerics
from coderepairrl.runs import RunFolder
from coderepairrl.stages import preview_run
from coderepairrl.stages.changes import Change, list_changes
from coderepairrl.stages.history import History

VLLM = "engine=vllm"
HALF = "engine.options.dtype=bfloat16"


def model(folder: Path, dtype: str | None) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": dtype} if dtype else {}))
    return f"model.path={folder}"


def test_what_an_engine_computes_in(tmp_path: Path) -> None:
    half, full, silent = (model(tmp_path / str(dtype), dtype) for dtype in ("bfloat16", "float32", None))
    assert is_engine_half(load_config("hello")) is False
    assert is_engine_half(load_config("hello", [VLLM, half])) is True
    assert is_engine_half(load_config("hello", [VLLM, half, "model.init=random"])) is False  # they are drawn in float32
    assert is_engine_half(load_config("hello", [VLLM, half, "engine.options.dtype=float32"])) is False
    assert (
        is_engine_half(load_config("hello", [VLLM, full]))
        is is_engine_half(load_config("hello", [VLLM, silent]))
        is False
    )
    assert is_engine_half(load_config("hello", [VLLM, full, "engine.options.dtype=half"])) is True
    assert is_engine_half(load_config("hello", [VLLM, "model.path=Qwen/Qwen3-8B"])) is True  # as it was published
    assert is_engine_half(load_config("hello", [VLLM, f"model.path={tmp_path}/missing"])) is None
    assert is_engine_half(load_config("hello", [VLLM, half, "engine.options.url=http://127.0.0.1:1"])) is None
    assert is_engine_half(load_config("hello", ["engine=scripted"])) is None


@pytest.mark.parametrize(
    ("overrides", "who"),
    [
        (["train.precision=bf16"], "train.precision=bf16: "),
        ([VLLM, HALF], "a half-precision engine: "),
        ([VLLM, HALF, "train.precision=bf16"], "train.precision=bf16 and a half-precision engine: "),
    ],
)
def test_gspo_on_rounding_noise_is_refused_with_the_fix(overrides: list[str], who: str) -> None:
    with pytest.raises(ConfigError, match=who) as refused:
        check_clip(load_config("hello", overrides))
    assert "train.old_logprobs=recomputed" in refused.value.fix
    check_clip(load_config("hello", [*overrides, "train.old_logprobs=recomputed"]))
    check_clip(load_config("hello", [*overrides, "train.algorithm=grpo"]))  # whose range is 0.2


async def test_a_run_and_a_plan_refuse_it(tmp_path: Path) -> None:
    config = load_config("hello", ["train.precision=bf16", f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match="rounding"):
        preview_run(config)
    with pytest.raises(ConfigError, match="rounding"):
        await stages.run_training(config, quiet=True)
    assert not list(tmp_path.iterdir())


def begun(path: Path, config: Config) -> RunFolder:
    folder = RunFolder(path)
    versions = rewards.reward_versions(config.reward, config.eval.reward or {})
    folder.create(to_toml(config), {"rewards": versions, "config": config.model_dump(mode="json")})
    return folder


def changes(folder: RunFolder, config: Config) -> list[Change]:
    versions = rewards.reward_versions(config.reward, config.eval.reward or {})
    return list_changes(folder, History(), config, versions, ())


def test_the_clip_of_gspo_is_not_for_older_weights(tmp_path: Path) -> None:
    config = load_config("hello", [f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match="one update moves a row's ratio"):
        preview_run(apply_overrides(config, ["rollout.max_staleness=1"]))
    with pytest.raises(ConfigError, match="no ratio to the weights that sampled"):
        preview_run(apply_overrides(config, ["rollout.max_staleness=1", "train.algorithm=reinforce"]))
    with pytest.raises(ConfigError, match="max_staleness=1"):
        changes(begun(tmp_path / "run", config), apply_overrides(config, ["rollout.max_staleness=1"]))
    turns = apply_overrides(config, ["train.old_logprobs=recomputed"])
    assert changes(begun(tmp_path / "turns", turns), apply_overrides(turns, ["rollout.max_staleness=1"]))
    off = apply_overrides(turns, ["train.mismatch_correction=off"])  # what `auto` came to where nothing was stale
    with pytest.raises(ConfigError, match="count as on-policy"):
        changes(begun(tmp_path / "off", off), apply_overrides(off, ["rollout.max_staleness=1"]))


def test_a_resume_does_not_bring_it_back(tmp_path: Path) -> None:
    config = load_config("hello", ["train.precision=bf16", "train.old_logprobs=recomputed", f"run.dir={tmp_path}"])
    folder = begun(tmp_path / "run", config)
    assert changes(folder, apply_overrides(config, ["train.lr=1e-5"]))
    with pytest.raises(ConfigError, match="rounding"):
        changes(folder, apply_overrides(config, ["train.old_logprobs=recorded"]))
    noisy = apply_overrides(config, ["train.old_logprobs=recorded"])  # of an older version: it may go on as it is
    assert changes(begun(tmp_path / "noisy", noisy), apply_overrides(noisy, ["train.lr=1e-5"]))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "never: with one update per batch every ratio is 1 up to float32 rounding"),
        (["train.old_logprobs=recomputed"], "never: with one update per batch and old_logprobs=recomputed"),
        (["train.minibatches=2"], "from the second of a batch's 2 updates on"),
        (["train.minibatches=2", "train.updates_per_batch=3"], "from the second of a batch's 6 updates on"),
        ([VLLM, HALF, "train.algorithm=grpo"], "if engine and learner differ"),
        (["engine=scripted"], "if engine and learner differ"),
        (["train.algorithm=grpo", "rollout.max_staleness=1"], "if weights have changed since a token was sampled"),
    ],
)
def test_when_the_clip_acts(overrides: list[str], says: str) -> None:
    config = load_config("hello", overrides)
    assert describe_clip(config, learn_settings(config)).startswith(says)


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ([], "off"),
        (["train.old_logprobs=recomputed"], "off"),  # in float32 there is nothing to correct
        (["train.old_logprobs=recomputed", "train.precision=bf16"], "token"),
        (["train.old_logprobs=recomputed", "rollout.max_staleness=1"], "token"),
        (["train.algorithm=grpo", "rollout.max_staleness=1"], "off"),  # the ratio is to the engine
        (["train.old_logprobs=recomputed", VLLM, HALF], "token"),
        (["train.old_logprobs=recomputed", VLLM, HALF, "train.mismatch_correction=off"], "off"),
        ([VLLM, HALF, "train.algorithm=grpo"], "off"),
    ],
)
def test_the_mismatch_is_corrected_where_there_is_one(overrides: list[str], kind: str) -> None:
    assert learn_settings(load_config("hello", overrides)).mismatch_correction == kind


def test_a_run_writes_down_what_auto_stands_for() -> None:
    """Else it would be another method after a resume with another engine."""
    config = resolve_numerics(load_config("hello", ["train.old_logprobs=recomputed", VLLM, HALF]))
    assert config.train.mismatch_correction == "token"
    assert resolve_numerics(apply_overrides(config, ["engine.options.dtype=float32"])) == apply_overrides(
        config, ["engine.options.dtype=float32"]
    )


def test_the_correction_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="nothing to correct"):
        learn_settings(load_config("hello", ["train.mismatch_correction=token"]))


def test_decay_counts_the_updates_of_minibatches() -> None:
    def rates(**terms: Any) -> Config:
        base = {"run": {"name": "a", "steps": 10}, "train": {"decay_updates": 35, "warmup_updates": 5, **terms}}
        return Config.model_validate(base)

    assert learn_settings(rates(minibatches=4)).rate(39) < 1e-6
    with pytest.raises(ValueError, match="ends before the run's 80 updates"):
        rates(minibatches=4, updates_per_batch=2)
    with pytest.raises(ValueError, match="minibatches=33 of the 32 episodes"):
        rates(minibatches=33)
