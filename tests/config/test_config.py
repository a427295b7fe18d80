"""Configurations: what they may hold, where each setting comes from, and no secrets."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl.cli import app
from coderepairrl.config import (
    apply_overrides,
    list_settings,
    load_config,
    load_run,
    parse_override,
    to_inline,
    to_toml,
)
from coderepairrl.config.reference import format_config_reference
from coderepairrl.errors import ConfigError, ExitCode, UsageError
from coderepairrl.plan import resolve_evaluation
from workshop.tiny.bar import BAR


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_hello_measures_what_its_bar_needs() -> None:
    assert BAR.keys() <= load_config("hello", []).eval.reward.keys()


def test_overrides_and_short_sections(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[run]\nname = "a"\n[engine]\nname = "tiny"\noptions = {slots = 4}\n')
    config = load_config(file, ["train.lr=3e-6", "engine=vllm", "reward={patch_lines=0.6,tests=0.4}", "run.name=b-1"])
    assert config.train.lr == 3e-6
    assert (config.engine.name, config.engine.options) == ("vllm", {})
    assert config.reward == {"patch_lines": 0.6, "tests": 0.4}
    assert config.run.name == "b-1"
    assert load_config(file, ["reward=tests", "reward.patch_edits=0.5"]).reward == {"tests": 1.0, "patch_edits": 0.5}
    lora = load_config(file, ["train.lora=true", "train.lora.rank=8"]).train.lora
    assert lora is not None and (lora.rank, lora.alpha) == (8, 64)


def test_a_table_extends_a_section_that_was_only_a_name(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", '\ufeffagent = "direct"\n[run]\nname = "a"\n[kinds.hard]\nagent = "nano4"\n')
    text = 'extends = "base.toml"\n[agent.options]\nformat = "function"\n[kinds.hard.agent.options]\nsystem = "x"\n'
    config = load_config(write(tmp_path / "child.toml", text))
    assert (config.agent.name, config.agent.options) == ("direct", {"format": "function"})
    assert config.kinds["hard"].agent is not None and config.kinds["hard"].agent.name == "nano4"


@pytest.mark.parametrize(
    "value", ['\N{GRINNING FACE} é\n\t"\\', ["\N{GRINNING FACE}"], {"\N{GRINNING FACE}": 1e-7}, 1e22, True]
)
def test_a_value_written_as_an_override_is_read_back(value: object) -> None:
    assert parse_override(f"key={to_inline(value)}") == ("key", value)


def test_folders_may_be_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave ``KEY=~/VALUE`` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "base.toml", '[run]\nname = "a"\n')
    (tmp_path / "files").mkdir()
    file = write(
        tmp_path / "files" / "a.toml", 'extends = "~/base.toml"\ncurriculum = {band = true, probe = "~/run"}\n'
    )
    config = load_config(file, ["run.dir=~/runs", "engine.weights_dir=~/shared"])
    folders = config.run.dir, config.engine.weights_dir, config.curriculum.probe
    assert folders == tuple(str(tmp_path / name) for name in ("runs", "shared", "run"))


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
        ("reward={tests=1", "'reward={tests=1' has no closing '}'", "'reward={tests=1}'"),
        ("run.name=a/b", "run.name: must be a letter or digit, then letters, digits", ""),
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

    def read_error(source: str | Path, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(source, overrides)
        return str(caught.value)

    assert read_error("thesis", "train.lrr=1") == "override 'train.lrr=1': unknown key 'train.lrr'"
    assert read_error("thesis", "train.lora={rank=0}").startswith("override 'train.lora={rank=0}': train.lora.rank: ")
    assert read_error("thesis", "rollout.turn_tokens=99999", "run.steps=3") == (
        "override 'rollout.turn_tokens=99999': rollout.turn_tokens exceeds rollout.tokens"
    )
    assert read_error("thesis", "train.lr=1", "train.lr=-1").startswith("override 'train.lr=-1': train.lr: ")
    together = read_error(
        "hello", "rollout.turn_tokens=2048", "curriculum.refill=1", "train.value_head=true", "train.minibatches=65"
    )
    assert all(each in together for each in ("exceeds rollout.tokens", "curriculum.refill", "train.minibatches=65"))
    also = read_error("hello", "eval.also.greedy.temperature=-1", "eval.also.b.foo=1")
    blamed = dict(each.split(": eval.also: ") for each in also.split("; "))
    assert blamed["override 'eval.also.b.foo=1'"].startswith("b.foo: a further evaluation varies")
    assert blamed["override 'eval.also.greedy.temperature=-1'"].startswith("greedy.temperature: Input should be")
    file = write(tmp_path / "a.toml", 'extends = "thesis"\n[train]\nlr = -1\n')
    assert [line.split(": ")[0] for line in read_error(file, "rollout.tokens=-1").split("; ")] == [
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


def test_the_reference_is_current() -> None:
    folder = Path(__file__).parents[2] / "docs" / "reference"
    assert {path.stem: path.read_text() for path in folder.glob("config*.md")} == format_config_reference(), (
        "run: python -m coderepairrl.config.reference docs/reference"
    )


def test_each_setting_says_who_set_it(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.toml", 'extends = "hello"\n[run]\nname = "mine"\n[train]\nlr = 1e-3\nlora = {alpha = 16}\n'
    )
    found = {each.key: each for each in list_settings(file, ["train.lora.rank=8", "sandbox=bwrap", "reward=tests"])}

    assert (found["rollout.calls"].value, found["rollout.calls"].default) == (5, 30)
    assert found["rollout.calls"].source == "preset hello"
    assert (found["run.name"].value, found["run.name"].default) == ("mine", "required")
    assert found["run.name"].source == found["train.lr"].source == f"file {file}"
    assert (found["train.lora.rank"].value, found["train.lora.rank"].source) == (8, "override train.lora.rank=8")
    assert (found["train.lora.alpha"].value, found["train.lora.alpha"].source) == (16, f"file {file}")
    assert (found["sandbox.name"].value, found["sandbox.name"].source) == ("bwrap", "override sandbox=bwrap")
    assert [key for key in found if key.startswith("reward")] == ["reward.tests"]
    assert (found["gpu.tflops"].value, found["gpu.tflops"].source) == (312.0, "default")


@pytest.mark.parametrize("name", ["hello", "thesis-32b"])
def test_the_settings_are_the_config_that_is_run(name: str) -> None:
    data = load_config(name).model_dump(mode="json")
    for each in list_settings(name):
        value = data
        for part in each.key.split("."):
            value = value[part]
        assert value == each.value, each.key


def test_the_command(tmp_path: Path) -> None:
    def run_config(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["config", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    rows = {line.split()[0]: line for line in run_config("hello", "train.lr=1e-3").splitlines()}
    assert rows["train.lr"].split() == ["train.lr", "0.001", "0.0001", "override", "train.lr=1e-3"]
    assert rows["train.beta"].split() == ["train.beta", "0.0", "0.0", "default"]
    assert {"key": "run.steps", "value": 60, "default": 20, "source": "preset hello"} in json.loads(
        run_config("hello", "--json")
    )
    assert {each["source"] for each in json.loads(run_config("--json"))} == {"default"}


def test_another_source_of_tasks_has_none_of_the_options_of_the_first(tmp_path: Path) -> None:
    """Options of training and of evaluation belong to the first source."""
    text = 'extends = "hello"\n[run]\nname = "mine"\n[tasks]\nsource = "handmade"\n'
    for config in (load_config(write(tmp_path / "mine.toml", text)), load_config("hello", ["tasks.source=handmade"])):
        assert (config.tasks.source, config.tasks.options, config.eval.options) == ("handmade", {}, {})
    more = text + "options = { n = 3 }\n[eval]\noptions = { n = 2 }\n"
    config = load_config(write(tmp_path / "more.toml", more))
    assert (config.tasks.options, config.eval.options) == ({"n": 3}, {"n": 2})
    config = load_config("hello", ["tasks.options.n=3", "tasks.source=jsonl", "eval.source=mutants"])
    assert (config.tasks.options, config.eval.options) == ({"n": 3}, {"split": "test", "n": 256})
    several = write(tmp_path / "several.toml", text.replace("[tasks]", "[[tasks.sources]]"))
    for config in (load_config(several), load_config("hello", ['tasks.sources=[{source="handmade"}]'])):
        assert ([each.source for each in config.tasks.sources], config.eval.options) == (["handmade"], {})
    one = write(tmp_path / "one.toml", 'extends = "several.toml"\n[tasks]\nsource = "mutants"\n')
    write(several, '[run]\nname = "mine"\n[[tasks.sources]]\nsource = "handmade"\n[eval]\noptions = { n = 3 }\n')
    for config in (load_config(one), load_config(several, ["tasks.source=mutants"])):
        assert (config.tasks.source, config.tasks.sources, config.eval.options) == ("mutants", (), {})
    same = load_config(write(tmp_path / "same.toml", text.replace("handmade", "mutants")))
    assert (same.tasks, same.eval) == (load_config("hello").tasks, load_config("hello").eval)


SECRET = "s3cr3t-of-mine"
LOOKS_LIKE_ONE = "sk-proj-a1B2c3D4e5F6g7H8i9J0k1L2"
HIDDEN = [
    f"engine.options.api_key={SECRET}",
    f"engine.options.apiKey={SECRET}",
    f'engine.options.extra_body={{auth={{token="{SECRET}"}}}}',
    f'engine.options.args=["--hf-token", "{SECRET}"]',
    f'engine.options.args=["--hf-token={SECRET}"]',
    "agent.options.env.DB_PASSWORD=12345678",
    f"agent.options.env.PGPASSWORD={SECRET}",
    f"agent.options.env.GITHUB_PAT={SECRET}",
    f"agent.options.env.SMTP_PASS={SECRET}",
    f"agent.options.env.DB_PW={SECRET}",
    f"agent.options.env.MY_CREDENTIALS={SECRET}",
    f'engine.options.headers={{Authorization="Basic {SECRET}"}}',
    f'agent.options.argv=["sh", "-c", "OPENAI={LOOKS_LIKE_ONE} my-agent"]',
    f"agent.options.env.OPENAI_API_KEY_2={SECRET}",
    f"tasks.options.url=https://example.org/x?api_key={SECRET}",
    f"tasks.options.url=https://me:{SECRET}@example.org/x",
    f'kinds.hard.agent={{name="command",options={{env={{MY_TOKEN="{SECRET}"}}}}}}',
]


@pytest.mark.parametrize("given", HIDDEN)
def test_a_secret_in_clear_is_refused_and_not_repeated(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret in clear") as refused:
        load_config("hello", [given])
    shown = f"{refused.value} {refused.value.fix}"
    assert SECRET not in shown and LOOKS_LIKE_ONE not in shown and "12345678" not in shown
    assert given.partition("=")[0] in shown and "environment variable" in shown
    for refuse in (
        lambda: apply_overrides(load_config("hello"), [given]),
        lambda: list_settings("hello", [given]),
        lambda: resolve_evaluation("builtin:tiny", [given]),
    ):
        with pytest.raises((ConfigError, UsageError)) as again:
            refuse()
        assert SECRET not in str(again.value)


def test_a_file_with_one_is_refused_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[run]\nname = "a"\n[engine.options]\napi_key = {json.dumps(SECRET)}\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: engine\.options\.api_key is a secret in clear") as refused:
        load_config(file)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        "engine.options.key_env=MY_KEY",
        "engine.options.env_key=MY_KEY",
        'agent.options.env={OPENAI_API_KEY="{api_key}",HOST_API_KEY="$OPENAI_API_KEY"}',
        'agent.options.argv=["my-agent", "--api-key", "{api_key}", "--max-tokens", "512"]',
        'engine.options.args=["--enable-prefix-caching", "--key-file", "/etc/key"]',
        "engine.options.max_tokens=512",
        "engine.options.key=3",
        "engine.options.eos_token=</s>",
        "tasks.options.url=ssh://git@example.org/x",
        "model.path=models/hf-qwen2-instruct-merged-v1",
    ],
)
def test_names_of_variables_placeholders_and_counts_are_no_secrets(given: str) -> None:
    load_config("hello", [given])
