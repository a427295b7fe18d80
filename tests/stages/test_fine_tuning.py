"""`crrl sft` on the tiny policy: examples it learns from, input it refuses, and kill -9."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from coderepairrl import models, tokens
from coderepairrl.cli.running import sft as command
from coderepairrl.config import Config, load_config
from coderepairrl.config.schema import Data
from coderepairrl.errors import CodeRepairError, ConfigError, UsageError
from coderepairrl.learn.trainer import Trainer
from coderepairrl.plan import imitation, resolve_evaluation
from coderepairrl.plan.imitation import resolve_imitation
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.plan.tasks import read_tasks_learned_by_model
from coderepairrl.report import Site
from coderepairrl.runs import RunFolder
from coderepairrl.runs.examples import Example, read_examples, write_examples
from coderepairrl.runs.storage import hash_files
from coderepairrl.stages import sft
from coderepairrl.stages.history import History
from coderepairrl.stages.life_cycle import locate_run_folder
from coderepairrl.stages.sft import format_fine_tuning, run_sft, summarise_fine_tuning
from coderepairrl.sync.weights import PublishedWeights
from coderepairrl.tasks.mutants.corpus_tasks import load_mutants, make_exercise
from coderepairrl.tasks.select import is_held_out
from commands import CRRL
from workshop.tiny import prompt
from workshop.tiny.demonstrations import Habits, demonstrate

SAID = {"role": "assistant", "content": "Done."}
TINY = models.find_model_folder("builtin:tiny")


def read(*paths: Path, **more: Any) -> imitation.TrainingExamples:
    data = Data(paths=tuple(map(str, paths)), max_tokens=1024, **more)
    return imitation.read_training_examples(data, TINY, tokens.load_codec(TINY))


HABITS = Habits(look_around=1.0, wrong_file=1.0)
"""Habits that the tiny policy does not have, so that it learns something."""


def make_examples(count: int = 24) -> Iterator[Example]:
    """Demonstrations by an expert, every third without tokens."""
    codec, own, rng = tokens.load_codec(TINY), tokens.digest_tokenizer(TINY), Random(0)
    pool = list(load_mutants())
    made = (make_exercise(rng.choice(pool), rng, quoted=True) for _ in range(2 * count))
    for number, one in zip(range(count), filter(None, made), strict=False):
        messages = tuple(demonstrate(one, HABITS, rng))
        (row,) = tokens.make_conversation_rows(codec, messages, prompt.TOOLS)
        ids = {} if number % 3 == 0 else {"ids": row.ids, "trained": row.trained, "tokenizer": own}
        task = f"toy/{number // 2}"
        yield Example(f"e{number}/0", f"e{number}", task, messages=messages, tools=tuple(prompt.TOOLS), **ids)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("examples") / "examples.parquet"
    write_examples(path, make_examples())
    return path


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples for several steps."""
    path = tmp_path_factory.mktemp("examples") / "few.parquet"
    write_examples(path, make_examples(10))
    return path


def arguments(table: Path, home: Path, *overrides: str) -> list[str]:
    paths = f"data.paths={json.dumps([str(table)])}"
    return ["sft-tiny", f"run.dir={home}", paths, "data.batch=4", "data.held_out=0.2", *overrides]


def load_arguments(words: Sequence[str]) -> Any:
    return load_config(words[0], words[1:])


async def run(words: Sequence[str], *, resume: bool = False) -> RunFolder:
    config = load_arguments(words)
    folder = locate_run_folder(config)
    await run_sft(resolve_imitation(config), folder, resume=resume, quiet=True)
    return folder


async def test_a_run_is_the_learners_steps_on_the_examples_in_their_order(few: Path, tmp_path: Path) -> None:
    folder = await run(arguments(few, tmp_path, "data.epochs=1.5", "data.batch=2"))
    plan = resolve_imitation(load_arguments([str(folder.path)]))
    there = plan.examples.train
    steps = -(-round(1.5 * len(there)) // 2)
    trainer = Trainer(TINY, plan.learner)
    seen: list[int] = []
    for step in range(1, steps + 1):
        due = imitation.list_step_examples(plan.config.data, len(there), 0, step)
        seen += due
        found = trainer.step([row for at in due for row in there[at].samples])
        assert folder.metrics()[step - 1]["learn/loss"] == found["loss"]
    assert sorted(seen[: len(there)]) == list(range(len(there))) and len(seen) == round(1.5 * len(there))
    assert folder.metrics()[-1]["epoch"] == round(len(seen) / len(there), 4)
    rates = [row["learn/lr"] for row in folder.metrics()]
    assert len(rates) == steps and max(rates) == max(rates[:3]) and rates[-1] < 0.1 * max(rates)
    trainer.save(tmp_path / "again")
    saved = folder.list_checkpoints()[steps]
    assert hash_files(models.list_model_files(saved)) == hash_files(models.list_model_files(tmp_path / "again"))
    assert models.resolve_model(str(folder.path)).folder == saved
    assert read_tasks_learned_by_model(str(folder.path)) == {each.task for each in there}

    found = summarise_fine_tuning(folder)
    first = next(record for record in folder.records() if record["type"] == "held_out")
    assert found["steps"] == steps and found["held_out"]["last_loss"] < first["metrics"]["held_out/loss"]
    ending = format_fine_tuning(folder, plan.config)
    assert (
        f"{first['metrics']['held_out/loss']:.4f} before" in ending
        and f"{found['held_out']['last_loss']:.4f} after" in ending
    )
    assert f"crrl train FILE model.path={folder.path}" in ending
    about = folder.about()["data"]
    assert about["rendered"] == {"without tokens": 4} and about["train"] == len(there)
    assert {"learn/loss", "learn/accuracy", "learn/lr", "learn/nll"} <= folder.metrics()[-1].keys()
    assert folder.path.name in Site([folder.path]).page("index.html")
    with pytest.raises(ConfigError, match="no tasks are named"):
        resolve_evaluation(str(folder.path), [])
    [report] = Site([folder.path]).reports()
    assert report.status and len(report.steps) == steps and not [n for n in report.notices if "damage" in n]


def test_messages_are_rendered_to_the_very_tokens(table: Path, tmp_path: Path) -> None:
    plain = [replace(each, ids=(), trained=(), tokenizer="") for each in read_examples(table)]
    foreign = [replace(each, tokenizer="another") for each in read_examples(table)]
    found = []
    for name, some in (("plain", plain), ("foreign", foreign), ("own", read_examples(table))):
        write_examples(tmp_path / f"{name}.parquet", some)
        found.append(read(tmp_path / f"{name}.parquet"))
    assert found[0].train == found[1].train == found[2].train
    assert [each.rendered for each in found] == [
        {"without tokens": 24},
        {"without tokens": 8, "of another tokenizer or template": 16},
        {"without tokens": 8},
    ]


def logged_steps(folder: RunFolder) -> int:
    if not folder.log.exists():
        return 0
    return sum(line.startswith('{"type":"step"') for line in folder.log.read_text().splitlines())


@pytest.mark.parametrize("further", [(), ("train.lora=true", "train.beta=0.1", "run.checkpoint_every=2")])
def test_a_killed_run_goes_on_to_the_same_bits(few: Path, tmp_path: Path, further: tuple[str, ...]) -> None:
    def command(home: str, *more: str) -> list[str]:
        words = arguments(few, tmp_path / home, "data.epochs=1.25", "data.batch=2", *further)
        return [*CRRL, "sft", *words, *more]

    whole_run = subprocess.run(command("whole"), capture_output=True, text=True)
    assert whole_run.returncode == 0, whole_run.stderr
    whole, killed = (locate_run_folder(load_arguments(arguments(few, tmp_path / home))) for home in ("whole", "killed"))
    process = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while logged_steps(killed) < 3:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command("killed", "--resume", "--json"), capture_output=True, text=True)
    last = max(whole.list_checkpoints())
    assert json.loads(done.stdout)["steps"] == last == max(killed.list_checkpoints())
    ours, theirs = (hash_files(sorted(each.list_checkpoints()[last].glob("*.safetensors"))) for each in (killed, whole))
    assert ours == theirs
    losses = [[row["learn/loss"] for row in each.metrics()] for each in (killed, whole)]
    assert losses[0] == losses[1]
    assert [r["step"] for r in killed.records() if r["type"] == "step"] == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("overrides", "error", "match"),
    [
        (("data.paths=[]",), ConfigError, "nothing to learn from"),
        (('data.paths=["nowhere", "neither"]',), CodeRepairError, "nowhere is not there\n.*neither is not there"),
        (("data.max_tokens=20",), ConfigError, "24 examples cannot be learned from: 24 are longer"),
        (("data.max_tokens=20", "data.unfit=drop"), UsageError, "all were left out"),
        (("data.max_tokens=9000",), ConfigError, "reads at most"),
        (("data.held_out=0.99999",), UsageError, "all are held out"),
        (("data.held_out=0.00001",), UsageError, "holds out none of"),
        (("train.algorithm=grpo",), ConfigError, "crrl train does that"),
        (("train.eps_high=0.3",), ConfigError, "eps_high"),
        (("rollout.group_size=4",), ConfigError, "rollout.group_size has no meaning"),
        (("rollout.temperature=0.5",), ConfigError, "rollout.temperature has no meaning"),
        (("train.balance_kinds=true",), ConfigError, "train.balance_kinds has no meaning"),
        (("curriculum.band=true", "run.health.patience=3"), ConfigError, "curriculum.band, run.health have no meaning"),
        (("eval.every=5",), ConfigError, "no tasks are named to evaluate on"),
        (("train.warmup_updates=3",), CodeRepairError, "leave these out"),
        (("train.teacher=nowhere",), UsageError, "not a model"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    overrides: tuple[str, ...], error: type[CodeRepairError], match: str, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        resolve_imitation(load_arguments(arguments(table, tmp_path, *overrides)))
    assert not list(tmp_path.iterdir())


def test_a_rate_that_falls_to_zero_before_the_last_epoch_is_refused(table: Path, tmp_path: Path) -> None:
    """Whatever run.steps says: the examples decide the number of steps."""
    config = load_arguments(arguments(table, tmp_path, "data.epochs=2"))
    steps = resolve_imitation(config).config.run.steps
    assert steps < config.run.steps

    def decayed(updates: int) -> Config:
        train = config.train.model_copy(update={"warmup_ratio": None, "decay_updates": updates})
        return Config.model_validate(config.model_copy(update={"train": train}).model_dump())

    assert resolve_imitation(decayed(steps)).learner.rate(steps - 1) > 0
    with pytest.raises(ConfigError, match=f"decay_updates={steps - 1} ends before the run's {steps} updates"):
        resolve_imitation(decayed(steps - 1))


def test_one_path_is_enough_and_the_longest_example_is_as_long_as_the_model_reads(table: Path) -> None:
    config = load_arguments(["sft-tiny", f"data.paths={table}"])
    assert config.data.paths == (str(table),)
    data = config.data.model_copy(update={"max_tokens": None})
    assert imitation.read_training_examples(data, TINY, tokens.load_codec(TINY)).train


def test_examples_in_place_of_a_config_are_refused(table: Path) -> None:
    with pytest.raises(UsageError, match="but no settings") as caught:
        command(str(table.parent))
    assert f"data.paths={table.parent}" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"messages": (), "tokenizer": "another"}, "tokens of another tokenizer"),
        ({"ids": (), "trained": (), "messages": ({"role": "user", "content": "?"},)}, "no reply to learn from"),
        ({"ids": (), "trained": (), "messages": ({"role": "user", "content": "\ud800"}, SAID)}, "cannot be rendered"),
        ({"trained": None}, "nothing to learn"),
        ({"ids": -1}, "ids outside the vocabulary"),
        ({"ids": 1 << 20}, "ids outside the vocabulary"),
    ],
)
def test_examples_that_do_not_fit_are_named(changes: dict[str, Any], match: str, table: Path, tmp_path: Path) -> None:
    good, bad = (each for each in read_examples(table)[1:3])
    if changes.get("trained", ()) is None:
        changes = {"trained": (False,) * len(bad.ids)}
    elif isinstance(changes.get("ids"), int):
        changes = {"ids": (*bad.ids[:-1], changes["ids"])}
    write_examples(tmp_path / "t.parquet", [good, replace(bad, **changes)])
    with pytest.raises(ConfigError, match=match):
        read(tmp_path / "t.parquet", held_out=0.0)
    found = read(tmp_path / "t.parquet", held_out=0.0, unfit="drop")
    assert len(found.train) == 1 and [*found.dropped.values()] == [[bad.id]]


def test_runs_with_equal_attempt_ids_are_learned_from_together(table: Path, tmp_path: Path) -> None:
    ours, theirs = read_examples(table)[1:3]
    for name, some in (("a", [ours]), ("b", [replace(theirs, id=ours.id)]), ("twice", [ours, ours])):
        write_examples(tmp_path / f"{name}.parquet", some)
    assert len(read(tmp_path / "a.parquet", tmp_path / "b.parquet", held_out=0.0).train) == 2
    shutil.copy(tmp_path / "a.parquet", tmp_path / "copy.parquet")
    for paths in (["twice.parquet"], ["a.parquet", "copy.parquet"]):
        with pytest.raises(UsageError, match="is in .* and in"):
            read(*(tmp_path / path for path in paths))


async def test_without_evaluations_the_engine_need_not_be_installed(few: Path, tmp_path: Path) -> None:
    words = arguments(few, tmp_path, "data.epochs=0.3", "engine=vllm", "engine.options.python=/nowhere/python")
    folder = await run(words)
    assert folder.about()["versions"]["vllm"] == "absent"


async def test_evaluations_keep_only_the_newest_weights(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = resolve_imitation(load_arguments(arguments(few, tmp_path, "data.epochs=0.3")))
    every_step = plan.config.eval.model_copy(update={"every": 1})
    plan.config = plan.config.model_copy(update={"eval": every_step})
    served: list[str] = []

    async def publish(form: str) -> PublishedWeights:
        path = tmp_path / f"v{len(served)}"
        path.mkdir()
        return PublishedWeights(path, len(served), "")

    async def load(path: Path, version: int, checksum: str) -> None:
        served.append(path.name)

    async def evaluate(*_: object) -> None:
        assert [each.name for each in tmp_path.glob("v*")] == served[-1:]

    monkeypatch.setattr(sft, "evaluate_policy", evaluate)
    parts: Any = dict.fromkeys(("folder", "log", "progress", "first_metrics"))
    learner: Any = SimpleNamespace(publish=publish, version=0)
    parts["evaluation"] = SimpleNamespace(eval_tasks={"eval": ("a task",)})
    engine: Any = SimpleNamespace(load=load)
    run = sft._SftContext(
        plan=plan, history=History(), model=TINY, outbox=tmp_path, learner=learner, engine=engine, **parts
    )
    for step in range(4):
        await sft._evaluate_if_due(run, step)
    assert served == ["v0", "v1", "v2"], "not the initial ones, which the engine has"


async def test_another_run_or_other_examples_are_not_resumed(few: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.parquet"
    shutil.copy(few, own)
    words = arguments(own, tmp_path / "runs", "data.epochs=0.3")
    await run(words)
    with pytest.raises(UsageError, match="already holds a run"):
        await run(words)
    with pytest.raises(ConfigError, match=r"train.lr=.* cannot become"):
        await run([*words, "train.lr=1e-5"], resume=True)
    write_examples(own, list(read_examples(own))[1:])
    with pytest.raises(CodeRepairError, match="other examples|run.steps|asked for"):
        await run(words, resume=True)


def test_held_out_tasks_are_others_than_those_of_a_source() -> None:
    """All examples of a task are on one side, and a share of any tasks is held out, of those that MD5 chose, too."""
    collected = [name for name in map(str, range(4000)) if is_held_out(name, 0.25)]
    again = [name for name in collected if is_held_out(f"sft/{name}", 0.1)]
    assert 0.05 < len(again) / len(collected) < 0.15


def test_the_thesis_settings() -> None:
    config = load_config("sft-thesis")
    learn = make_learn_settings(config)
    assert (learn.algorithm, learn.lr, learn.beta, config.data.epochs) == ("sft", 1e-4, 0.01, 1)
    assert learn.lora is not None and config.data.max_tokens == 16_384
    assert (learn.warmup_updates, learn.decay_updates) == (2, 18), "a tenth of 20 steps, where no epoch decides"
