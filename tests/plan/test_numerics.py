"""What a run learns from and how: its clip, its teacher, and the reward of one that names none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import models, rewards
from coderepairrl.config import Config, apply_overrides, load_config, shipped_configs, to_toml
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.plan import plan_run
from coderepairrl.plan.learner import (
    check_clip,
    check_teacher,
    describe_clip,
    is_engine_half,
    make_learn_settings,
    resolve_numerics,
    warn_of_default_rate,
)
from coderepairrl.plan.sizing.architecture import KNOWN
from coderepairrl.plan.sizing.learner import compute_learner_memory
from coderepairrl.plan.tasks import choose_reward, resolve_rewards
from coderepairrl.runs import RunFolder
from coderepairrl.stages.changes import Change, fill_rewards, list_changes
from coderepairrl.stages.history import History
from coderepairrl.stages.policy import make_batch
from coderepairrl.types import Checks, Command, Ending, Episode, Origin, Score, Task, TokenSpan, Turn, VersionRange

VLLM = "engine=vllm"
HALF = "engine.options.dtype=bfloat16"


def model(folder: Path, dtype: str | None) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": dtype} if dtype else {}))
    return f"model.path={folder}"


def test_all_weights_at_the_learning_rate_of_adapters_are_warned_of() -> None:
    published = {"run": {"name": "x"}, "model": {"path": "org/name"}}
    assert "train.lr=1e-5" in warn_of_default_rate(Config.model_validate(published))
    for train in ({"lr": 1e-4}, {"lora": True}):
        assert not warn_of_default_rate(Config.model_validate({**published, "train": train}))
    assert not any(warn_of_default_rate(load_config(name)) for name in shipped_configs())


def test_whether_an_engine_computes_in_half_precision(tmp_path: Path) -> None:
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


def begun(path: Path, config: Config) -> RunFolder:
    folder = RunFolder(path)
    versions = rewards.collect_spec_versions(config.reward, config.eval.reward or {})
    folder.create(to_toml(config), {"rewards": versions, "config": config.model_dump(mode="json")})
    return folder


def changes(folder: RunFolder, config: Config) -> list[Change]:
    versions = rewards.collect_spec_versions(config.reward, config.eval.reward or {})
    return list_changes(folder, History(), config, versions, ())


def test_the_clip_of_gspo_is_not_for_older_weights(tmp_path: Path) -> None:
    config = load_config("hello", [f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match="one update moves a row's ratio"):
        plan_run(apply_overrides(config, ["rollout.max_staleness=1"]))
    with pytest.raises(ConfigError, match="no ratio to the weights that sampled"):
        plan_run(apply_overrides(config, ["rollout.max_staleness=1", "train.algorithm=reinforce"]))
    with pytest.raises(ConfigError, match="max_staleness=1"):
        changes(begun(tmp_path / "run", config), apply_overrides(config, ["rollout.max_staleness=1"]))
    turns = apply_overrides(config, ["train.old_logprobs=recomputed"])
    assert changes(begun(tmp_path / "turns", turns), apply_overrides(turns, ["rollout.max_staleness=1"]))
    off = apply_overrides(turns, ["train.mismatch_correction=off"])  # the value of `auto` without stale samples
    with pytest.raises(ConfigError, match="count as on-policy"):
        changes(begun(tmp_path / "off", off), apply_overrides(off, ["rollout.max_staleness=1"]))


def test_a_resume_is_refused_a_clip_on_rounding_noise(tmp_path: Path) -> None:
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
        (["train.minibatches=2", "train.updates_per_batch=3"], "from the second of a batch's 6 updates on"),
        ([VLLM, HALF, "train.algorithm=grpo"], "if engine and learner differ"),
        (["engine=scripted"], "if engine and learner differ"),  # whose precision is not known
        (["train.algorithm=grpo", "rollout.max_staleness=1"], "if weights have changed since a token was sampled"),
    ],
)
def test_when_the_clip_acts(overrides: list[str], says: str) -> None:
    config = load_config("hello", overrides)
    assert describe_clip(config, make_learn_settings(config)).startswith(says)


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
    ],
)
def test_the_mismatch_is_corrected_where_there_is_one(overrides: list[str], kind: str) -> None:
    assert make_learn_settings(load_config("hello", overrides)).mismatch_correction == kind


def test_a_run_writes_down_what_auto_stands_for() -> None:
    """Else it would be another method after a resume with another engine."""
    config = resolve_numerics(load_config("hello", ["train.old_logprobs=recomputed", VLLM, HALF]))
    assert config.train.mismatch_correction == "token"
    assert resolve_numerics(apply_overrides(config, ["engine.options.dtype=float32"])) == apply_overrides(
        config, ["engine.options.dtype=float32"]
    )


def test_decay_counts_the_updates_of_minibatches() -> None:
    def rates(**terms: Any) -> Config:
        base = {"run": {"name": "a", "steps": 10}, "train": {"decay_updates": 35, "warmup_updates": 5, **terms}}
        return Config.model_validate(base)

    assert make_learn_settings(rates(minibatches=4)).rate(39) < 1e-6
    with pytest.raises(ValueError, match="ends before the run's 80 updates"):
        rates(minibatches=4, updates_per_batch=2)
    with pytest.raises(ValueError, match="minibatches=33 exceeds the 32 episodes"):
        rates(minibatches=33)


STUDENT = models.find_model_folder("builtin:tiny")


def hello(teacher: object, *overrides: str) -> list[str]:
    return [f"train.teacher={teacher}", *overrides]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STUDENT, tmp_path / "teacher"))


def test_a_model_of_the_same_tokenizer_teaches(teacher: Path) -> None:
    for named, folder in (("builtin:tiny", STUDENT), (teacher, teacher)):
        config = load_config("hello", hello(named, "train.teacher_weight=0.3"))
        check_teacher(config, STUDENT)
        found = make_learn_settings(config)
        assert (Path(found.teacher), found.teacher_weight) == (folder.resolve(), 0.3)
    assert make_learn_settings(load_config("hello")).teacher == ""


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_another_tokenizer_or_template_is_refused_before_anything_starts(file: str, teacher: Path) -> None:
    path = teacher / file
    if file.endswith(".json"):
        spec = json.loads(path.read_text())
        path.write_text(json.dumps(spec | {"added_tokens": spec["added_tokens"][:-1]}))
    else:
        path.write_text(path.read_text() + "{# another #}")
    with pytest.raises(ConfigError, match="different tokenizers or chat templates"):
        check_teacher(load_config("hello", hello(teacher)), STUDENT)
    with pytest.raises(CodeRepairError, match="different tokenizers or chat templates"):
        plan_run(load_config("hello", hello(teacher, "tasks.options.n=4", "eval.options.n=4")))


def test_a_teacher_must_be_a_whole_model(teacher: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(teacher)}))
    with pytest.raises(ConfigError, match="is an adapter of"):
        make_learn_settings(load_config("hello", hello(adapters)))
    with pytest.raises(UsageError, match="not a model"):
        make_learn_settings(load_config("hello", hello(tmp_path / "nothing")))
    (teacher / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        make_learn_settings(load_config("hello", hello(teacher)))


def test_a_weight_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a teacher"):
        make_learn_settings(load_config("hello", ["train.teacher_weight=0.5"]))


def test_attempts_that_all_earned_the_same_are_learned_from_with_a_teacher() -> None:
    def episode(attempt: int) -> Episode:
        output = TokenSpan((3, 4), Origin.POLICY, (-0.1, -0.2))
        turn = Turn(0, None, TokenSpan((1, 2), Origin.GIVEN), output, versions=(VersionRange(0, 0, 2),))
        scores = (Score("patch_edits", 0.5),)
        return Episode(f"e{attempt}", "t", "train", 1, "g", attempt, Ending.DONE, turns=(turn,), scores=scores)

    both = [episode(0), episode(1)]
    assert not make_batch(both, load_config("hello")).samples
    made = make_batch(both, load_config("hello", hello("builtin:tiny")))
    assert [sample.advantage for sample in made.samples] == [0.0, 0.0]


def test_the_weights_of_a_teacher_are_counted() -> None:
    model, wise = KNOWN["Qwen3-0.6B"], KNOWN["Qwen3-4B"]
    settings = LearnSettings(precision="bf16", lora={"rank": 8})
    alone, both = (compute_learner_memory(model, settings, longest=1024, teacher=each) for each in (None, wise))
    assert both.weights - alone.weights == 2 * wise.parameters


def test_training_refuses_the_algorithm_of_fine_tuning() -> None:
    with pytest.raises(CodeRepairError, match="learns from examples"):
        plan_run(load_config("hello", ["train.algorithm=sft", "tasks.options.n=4", "eval.options.n=4"]))


DIFF = b"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"
CHECKS = Checks((Command(("python3", "check.py")),))
BOTH = Task("both", "", "python", "dir:/w", DIFF, CHECKS)
TESTED = Task("tested", "", "python", "dir:/w", b"", CHECKS)
ALIKE = Task("alike", "", "python", "dir:/w", DIFF)
ASKED = Task("asked", "", "python", "", b"", answer="CWE-79", kind="detect")


def settle(config: Config, *tasks: Task) -> Config:
    return resolve_rewards(config, tasks, tasks)[0]


def configured(**sections: object) -> Config:
    return Config.model_validate({"run": {"name": "a", "steps": 9}, **sections})


@pytest.mark.parametrize(
    ("tasks", "paid", "measured"),
    [
        ([BOTH], {"hybrid": 1.0}, {"tests": 1.0, "patch_edits": 0.0}),
        ([BOTH, ALIKE], {"patch_edits": 1.0}, {"patch_edits": 1.0}),
        ([BOTH, TESTED], {"tests": 1.0}, {"tests": 1.0}),
        ([ASKED], {"label": 1.0}, {"label": 1.0}),
    ],
)
def test_one_rule_holds_for_all_tasks(tasks: list[Task], paid: dict[str, float], measured: dict[str, float]) -> None:
    settled = settle(configured(), *tasks)
    assert (settled.reward, settled.eval.reward) == (paid, measured)
    assert "temperature" not in settled.eval.model_fields_set, "nobody gave it"
    assert settled.tasks.verified_references == (4 if "hybrid" in paid else 0)


def test_tasks_that_have_nothing_in_common_are_refused_with_the_setting_that_helps() -> None:
    with pytest.raises(ConfigError, match="no one measure") as caught:
        choose_reward([TESTED, ALIKE], for_training=True)
    assert caught.value.fix == "name it: reward=NAME"


def test_what_is_named_stays_and_kinds_with_a_reward_do_not_count() -> None:
    named = settle(configured(reward="patch_lines"), BOTH)
    assert (named.reward, named.eval.reward, named.tasks.verified_references) == ({"patch_lines": 1.0}, {}, 0)
    mixed = configured(kinds={"detect": {"reward": "label"}}, tasks={"verified_references": 2})
    assert settle(mixed, BOTH, ASKED).reward == {"hybrid": 1.0}
    assert settle(mixed, BOTH, ASKED).tasks.verified_references == 2
    assert settle(configured(run={"name": "a", "steps": 1}), *[BOTH] * 8).tasks.verified_references == 0
    with pytest.raises(ConfigError, match="file_match is not measured"):
        settle(configured(train={"tie_break": {"file_match": 0.1}}), BOTH)


def test_a_run_of_an_older_version_resumes_with_the_default_that_it_began_with(tmp_path: Path) -> None:
    older = configured(reward={"patch_edits": 1.0}, tasks={"verified_references": 0})
    (tmp_path / "config.toml").write_text(to_toml(older))
    resumed = fill_rewards(RunFolder(tmp_path), configured())
    assert (resumed.reward, resumed.eval.reward, resumed.tasks.verified_references) == ({"patch_edits": 1.0}, {}, 0)
    asked = fill_rewards(RunFolder(tmp_path), configured(reward="hybrid"))
    assert asked.reward == {"hybrid": 1.0}, "a change of it is seen, and refused"
