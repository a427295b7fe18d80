"""A teacher is found and compared with the student before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coderepairrl import models
from coderepairrl.config import load_config
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.learn import LearnSettings
from coderepairrl.plan import plan_run
from coderepairrl.plan.learner import check_teacher, learn_settings
from coderepairrl.plan.sizing import KNOWN
from coderepairrl.plan.sizing.learner import learner_memory
from coderepairrl.stages.policy import make_batch
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, Turn, VersionRange

STUDENT = models.model_folder("builtin:tiny")


def hello(teacher: object, *overrides: str) -> list[str]:
    return [f"train.teacher={teacher}", *overrides]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STUDENT, tmp_path / "teacher"))


def test_a_model_of_the_same_tokenizer_teaches(teacher: Path) -> None:
    for named, folder in (("builtin:tiny", STUDENT), (teacher, teacher)):
        config = load_config("hello", hello(named, "train.teacher_weight=0.3"))
        check_teacher(config, STUDENT)
        found = learn_settings(config)
        assert (Path(found.teacher), found.teacher_weight) == (folder.resolve(), 0.3)
    assert learn_settings(load_config("hello")).teacher == ""


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


def test_what_is_no_whole_model_is_refused(teacher: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(teacher)}))
    with pytest.raises(ConfigError, match="is an adapter of"):
        learn_settings(load_config("hello", hello(adapters)))
    with pytest.raises(UsageError, match="not a model"):
        learn_settings(load_config("hello", hello(tmp_path / "nothing")))
    (teacher / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="no weights"):
        learn_settings(load_config("hello", hello(teacher)))


def test_a_weight_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a teacher"):
        learn_settings(load_config("hello", ["train.teacher_weight=0.5"]))


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


def test_its_weights_are_counted() -> None:
    model, wise = KNOWN["Qwen3-0.6B"], KNOWN["Qwen3-4B"]
    settings = LearnSettings(precision="bf16", lora={"rank": 8})
    alone, both = (learner_memory(model, settings, longest=1024, teacher=each) for each in (None, wise))
    assert both.weights - alone.weights == 2 * wise.parameters


def test_fine_tuning_has_a_command_of_its_own() -> None:
    with pytest.raises(CodeRepairError, match="learns from examples"):
        plan_run(load_config("hello", ["train.algorithm=sft", "tasks.options.n=4", "eval.options.n=4"]))
