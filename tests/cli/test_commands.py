"""The command line as a whole: help everywhere, completion, and names that do not exist."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from coderepairrl.cli import EXAMPLES, app
from coderepairrl.config import load_config, shipped_configs
from coderepairrl.plan.terms import check_names
from commands import CRRL

ROOT = Path(__file__).parents[2]
GROUPS = {str(group.name): group.typer_instance for group in app.registered_groups}
PARTS = ["", *(command.callback.__name__ for command in app.registered_commands if command.callback), *GROUPS]
PARTS += [f"{name} {command.name}" for name, group in GROUPS.items() for command in group.registered_commands]


@pytest.fixture(scope="module")
def built() -> Callable[[Sequence[str]], Any]:
    """The command line, built once: `CliRunner` builds it for each call, which takes it longer than the call."""
    return get_command(app)


@pytest.mark.parametrize("command", PARTS)
def test_short_help(command: str, built: Callable[[Sequence[str]], Any], capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            built([*command.split(), flag])
        assert not ended.value.code and "Usage:" in capsys.readouterr().out


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_has_examples_that_can_be_typed(command: str, built: Callable[[Sequence[str]], Any]) -> None:
    assert EXAMPLES.keys() == set(PARTS[1:]) - GROUPS.keys()
    for example in EXAMPLES[command]:
        words, context, group = shlex.split(example), None, built
        for name in command.split():
            assert words.pop(0) == name
            leaf = group.get_command(context, name)  # type: ignore[attr-defined]
            group, context = leaf, None
        assert leaf.make_context(command, words) and f"crrl {example}" in leaf.epilog


def test_the_page_of_commands_has_them_all() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for command in PARTS[1:]:
        assert any(all(f"`{word}`" in row for word in command.split()) for row in rows), command


@pytest.mark.parametrize(("words", "expected"), [("crrl tr", "train"), ("crrl tasks ver", "verify")])
def test_completion(words: str, expected: str) -> None:
    asked = {"_CRRL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    script = "import sys; sys.argv[0] = 'crrl'; from coderepairrl.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == [expected], done


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        ("report runs/shrot", "there is no run runs/shrot", "did you mean 'short'?"),
        ("train runs/shrot --resume", "no config file runs/shrot", "did you mean 'short'?"),
        ("serve runs/shrot", "runs/shrot is not a model", "did you mean 'short'?"),
        ("report one", "one is not a run folder (it has no run.json)", "name the folder of a run"),
        ("serve gpt-4o", "gpt-4o is not a model", "take the URL of an API"),
        ("tasks list handmade selct.n=2", "'handmade' has no option 'selct'", "did you mean 'select'?"),
        ("export nowhere out", "nowhere is not a model: there is no such folder", "a folder in Hugging Face layout"),
        ("export runs out", "runs is not a model: it has no config.json", "name one of the runs in it: runs/short"),
        ("run nowhere", "there is no jobs file nowhere", "known: ablations"),
        ("hello runs/short", "'runs/short' is not KEY=VALUE", "crrl hello --resume runs/short"),
        ("hello --resume runs/shrot", "there is no run runs/shrot", "did you mean 'short'?"),
        ("hello run.steps=two", "run.steps: must be a whole number, not 'two'", "write for example run.steps="),
        ("tasks list git_history path=one", "no commit has exactly one parent", "git fetch --unshallow"),
        ("tasks verify tasks.jsonl", "tasks.jsonl does not exist", "name a task source, a file"),
        ("tasks verify handmade --mutants 3", "--mutants is for --deep", "leave out --mutants"),
        ("tasks verify handmade --deep --reward tests", "--reward is not for --deep", "leave out --reward"),
        ("tasks shell handmade handmade/pagr", "handmade has no task handmade/pagr", "such as handmade/pager"),
        ("serve ~nobody-here/x", "a path begins with ~ and an unknown user name", "write the folder out"),
        ("compare 1/2 2/2 --format latex --json", "--json and --format latex exclude each other", "name one of them"),
        ("train hello --verbose", "--verbose is an option of --dry-run", "add --dry-run, or leave out --verbose"),
        ("compare 1/2 2/2 --tasks absent.txt", "--tasks completes reports and outcome files", "leave out --tasks"),
        ("run miniature --commands --json", "--commands prints a script for a shell", "leave out --json"),
        ("check model builtin:tiny thinking=no", "option thinking: Input should be a valid boolean, not 'no'", ""),
        ("check crash lerner", "the crash test kills no 'lerner'", "did you mean 'learner'?"),
        ("check crash each kills=0", "kills=0: the crash test takes one kill or more", "crrl check crash each kills=6"),
        ("check tasks tasks.jsonl", "tasks.jsonl is not a task source", "write jsonl path=tasks.jsonl"),
        ("config kinds.toml", "kinds.hard.agent.name: unknown agent 'nanoo'", "did you mean 'nano'?"),
        ("config hello reward=pacth_lines", "reward: unknown reward 'pacth_lines'", "did you mean 'patch_lines'?"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(words: str, message: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "short").mkdir(parents=True)
    (tmp_path / "runs" / "short" / "run.json").write_text('{"schema": 3}')
    (tmp_path / "one").mkdir()
    for argv in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", tmp_path / "one", *argv], check=True)
    (tmp_path / "kinds.toml").write_text('extends = "hello"\n[run]\nname = "x"\n[kinds.hard]\nagent = "nanoo"\n')
    done = subprocess.run([*CRRL, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and fix in done.stderr, done.stderr
    assert "model.path" not in done.stderr and "Errno" not in done.stderr


@pytest.mark.parametrize("preset", sorted(shipped_configs()))
def test_all_that_shipped_configs_name_is_there(preset: str) -> None:
    check_names(load_config(preset))


def test_one_task_is_one_task(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"id": "a", "prompt": "p", "language": "c", "answer": "x"}\n')
    command = [*CRRL, "tasks", "export", "jsonl", "é.jsonl", "path=one.jsonl"]
    for encoding, name in (("utf-8", "é"), ("ascii", "\\xe9")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
        assert done.stdout == f"{name}.jsonl: 1 task\n", done.stderr
        (tmp_path / "é.jsonl").unlink()
