from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from coderepairrl.config import apply_overrides, load_config, load_run, shipped, to_toml
from coderepairrl.config.reference import reference
from coderepairrl.config.schema import Config
from coderepairrl.errors import ConfigError, ExitCode
from workshop.tiny.bar import BAR


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_what_pays_by_default_and_what_the_bar_of_hello_measures(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "run.toml", '[run]\nname = "a"\n'), []).reward == {}
    hello = load_config("hello", [])
    repaired = {"patch_edits": 0.5, "tests": 0.5}
    assert hello.reward == {**repaired, "repeats": 0.1}
    assert hello.eval.reward == {**repaired, "patch_lines": 0.0, "patch_similarity": 0.0}
    assert BAR.keys() <= hello.eval.reward.keys()


def test_overrides_and_short_sections(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[run]\nname = "a"\n[engine]\nname = "tiny"\noptions = {slots = 4}\n')
    config = load_config(file, ["train.lr=3e-6", "engine=vllm", "reward={patch_lines=0.6,tests=0.4}", "run.name=b-1"])
    assert config.train.lr == 3e-6
    assert (config.engine.name, config.engine.options) == ("vllm", {})
    assert config.reward == {"patch_lines": 0.6, "tests": 0.4}
    assert config.run.name == "b-1"


def test_extends_one_level(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", '[run]\nname = "base"\nsteps = 7\n[reward]\ntests = 1.0\n')
    child = write(tmp_path / "child.toml", 'extends = "base.toml"\nreward = "patch_lines"\n[run]\nname = "child"\n')
    config = load_config(child)
    assert (config.run.name, config.run.steps, config.reward) == ("child", 7, {"patch_lines": 1.0})
    grandchild = write(tmp_path / "grandchild.toml", 'extends = "child.toml"\n')
    with pytest.raises(ConfigError, match="extends another file itself"):
        load_config(grandchild)


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("train.lrr=1", "unknown key 'train.lrr'", "'train.lr'"),
        ("trian.lr=1", "unknown key 'trian'", "'train'"),
        ("learning_rate=1", "unknown key 'learning_rate'", "docs/reference/config.md"),
        ("group_size=4", "unknown key 'group_size'", "'rollout.group_size'"),
        ("train.algorithm=ppo2", "train.algorithm", ""),
        ("train.eps_low=1.0", "train.eps_low: Input should be less than 1", ""),
        ("rollout.group_size=1", "rollout.group_size", ""),
        ("rollout.turn_tokens=99999", "exceeds rollout.tokens", ""),
        ("reward={tests=0}", "at least one weight", ""),
        ("nonsense", "not KEY=VALUE", "train.lr"),
    ],
)
def test_bad_input_names_the_key_and_the_fix(tmp_path: Path, override: str, message: str, fix: str) -> None:
    file = write(tmp_path / "a.toml", '[run]\nname = "a"\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert message in str(caught.value)
    assert fix in caught.value.fix
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_mistake_is_named_by_where_it_was_written(tmp_path: Path) -> None:
    """An override as it is, a file by its path."""

    def said(source: str | Path, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(source, overrides)
        return str(caught.value)

    assert said("thesis", "train.lrr=1") == "override 'train.lrr=1': unknown key 'train.lrr'"
    assert said("thesis", "train.lora={rank=0}").startswith("override 'train.lora={rank=0}': train.lora.rank: ")
    assert said("thesis", "rollout.turn_tokens=99999", "run.steps=3") == (
        "override 'rollout.turn_tokens=99999': rollout.turn_tokens exceeds rollout.tokens"
    )
    assert said("thesis", "train.lr=1", "train.lr=-1").startswith("override 'train.lr=-1': train.lr: ")
    file = write(tmp_path / "a.toml", 'extends = "thesis"\n[train]\nlr = -1\n')
    assert [line.split(": ")[0] for line in said(file, "rollout.tokens=-1").split("; ")] == [
        "override 'rollout.tokens=-1'",
        str(file),
    ]


def test_unreadable_files(tmp_path: Path) -> None:
    for content in ("run = [", "\udcff"):
        broken = tmp_path / "broken.toml"
        broken.write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match="broken.toml"):
            load_config(broken)
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="run"):
        load_config(write(tmp_path / "nameless.toml", "[train]\nlr = 1.0\n"))


def test_resolved_config_reads_back(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "a.toml", '[run]\nname = "a"\n[tasks.options]\npath = "x.jsonl"\n'))
    again = write(tmp_path / "again.toml", to_toml(config))
    assert load_config(again) == config
    assert tomllib.loads(to_toml(config))["train"]["algorithm"] == "gspo"


def test_a_run_of_another_version_is_read_and_not_continued(tmp_path: Path) -> None:
    """`--resume` would go on with another loss, under the name of the one that the run began with."""
    written = to_toml(load_config("hello")).replace(
        "[train]\n", '[gateway]\naccept = []\n\n[train]\nhead = "model"\n"a.b" = 1\n'
    )
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / "config.toml", written)
    write(tmp_path / "run" / "run.json", "{}")
    with pytest.raises(ConfigError, match=r"has settings that this version lacks: gateway, train\.head, train\.a\.b"):
        load_config(tmp_path / "run")
    assert load_run(tmp_path / "run") == apply_overrides(load_config("hello"), [f"run.dir={tmp_path}"])
    assert load_run(tmp_path / "run", ["train.lr=1e-3"]).train.lr == 1e-3


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_config_parses(name: str) -> None:
    assert load_config(name).run.name


def test_the_reference_is_current() -> None:
    written = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
    assert written.read_text() == reference(), "run: python -m coderepairrl.config.reference > docs/reference/config.md"


def test_settings_in_the_documentation_exist(tmp_path: Path) -> None:
    """Every TOML block that is a configuration, not an agent's recipe, can be loaded."""
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)]
    configurations = [block for block in blocks if tomllib.loads(block).keys() <= Config.model_fields.keys()]
    assert len(configurations) >= 5
    for block in configurations:
        load_config(write(tmp_path / "documented.toml", block), ["run.name=documented"])
