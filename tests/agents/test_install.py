"""Installing agents: with an `npm` that needs no network; what pip does is tested with the real programs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coderepairrl import agents
from coderepairrl.agents import recipe
from coderepairrl.agents.command import Program
from coderepairrl.agents.recipe import BUILT_IN, install_agent, install_folder
from coderepairrl.cli import app
from coderepairrl.errors import ConfigError, PrerequisiteError, RunError
from coderepairrl.processes.caches import agents_cache

NPM = """\
#!/bin/sh
echo "$@" >> "$CRRL_CACHE/asked"
test -e "$CRRL_CACHE/broken" && exit 1
test -e "$CRRL_CACHE/flaky" && rm "$CRRL_CACHE/flaky" && exit 1
while [ "$1" != --prefix ]; do shift; done
echo '{"packages": {"": {}, "node_modules/@a/b": {"version": "1.2.3"}}}' > "$2/package-lock.json"
"""
RECIPE = 'argv = ["{install}/npm/run"]\n[install]\nnpm = ["@a/b@1.2.3"]\n'


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A recipe file, an `npm` of our own, and a cache that sandboxes of root could enter."""
    with tempfile.TemporaryDirectory(prefix="crrl-test-") as name:  # pytest's own are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        for each in ("bin", "cache"):
            (folder / each).mkdir()
        (folder / "bin" / "npm").write_text(NPM)
        (folder / "bin" / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("CRRL_CACHE", str(folder / "cache"))
        (folder / "mine.toml").write_text(RECIPE)
        yield str(folder / "mine.toml")


def count_npm_calls(mine: str) -> int:
    return len(Path(mine).with_name("cache").joinpath("asked").read_text().splitlines())


def test_it_is_installed_once_and_then_known(mine: str) -> None:
    with pytest.raises(PrerequisiteError) as raised:
        agents.make_agent(mine)
    assert raised.value.fix == f"crrl agents install {mine}"
    target, versions = install_agent(mine)
    assert versions == {"npm": {"@a/b": "1.2.3"}}
    assert install_agent(mine) == (target, versions)
    assert count_npm_calls(mine) == 1
    agent = agents.make_agent(mine)
    assert isinstance(agent, Program)
    assert agent.binds == (str(target),)
    assert target.parent == agents_cache()


def test_a_failed_installation_counts_as_not_installed(mine: str) -> None:
    broken = Path(mine).with_name("cache") / "broken"
    broken.touch()
    with pytest.raises(RunError, match="npm could not install @a/b@1.2.3"):
        install_agent(mine)
    with pytest.raises(PrerequisiteError):
        agents.make_agent(mine)
    broken.unlink()
    target, _ = install_agent(mine)
    assert (target / "npm" / "package-lock.json").exists()
    assert count_npm_calls(mine) == 3


def test_a_torn_record_counts_as_not_installed(mine: str) -> None:
    target, versions = install_agent(mine)
    (target / "installed.json").write_text("")
    with pytest.raises(PrerequisiteError):
        agents.make_agent(mine)
    assert install_agent(mine) == (target, versions)
    assert count_npm_calls(mine) == 2


def test_a_cache_that_is_no_folder_is_refused(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRRL_CACHE", mine)
    with pytest.raises(PrerequisiteError) as raised:
        install_agent(mine)
    assert "set CRRL_CACHE" in raised.value.fix


@pytest.mark.real
def test_nothing_is_imported_from_the_folder_that_it_is_started_in(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, mark = Path(mine).with_name("repository"), Path(mine).with_name("mark")
    repository.mkdir()
    for name in ("venv", "pip", "json"):
        (repository / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    Path(mine).write_text('argv = ["true"]\n[install]\npip = ["b"]\n')
    with pytest.raises(RunError, match="pip could not install b"):
        install_agent(mine)
    assert not mark.exists()


def test_a_download_that_breaks_off_is_begun_again(mine: str) -> None:
    flaky = Path(mine).with_name("cache") / "flaky"
    flaky.touch()
    install_agent(mine)
    assert (count_npm_calls(mine), flaky.exists()) == (2, False)


def test_another_version_is_another_installation(mine: str) -> None:
    before, _ = install_agent(mine)
    Path(mine).write_text(RECIPE.replace("1.2.3", "1.2.4"))
    with pytest.raises(PrerequisiteError):
        agents.make_agent(mine)
    after, _ = install_agent(mine)
    assert before != after
    assert before.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only sandboxes of root are somebody else's")
def test_a_cache_that_sandboxes_cannot_enter_is_refused(mine: str) -> None:
    Path(mine).with_name("cache").chmod(0o700)
    with pytest.raises(PrerequisiteError, match="closed to other users"):
        install_agent(mine)


def test_agents_that_cannot_be_installed_are_named(mine: str) -> None:
    with pytest.raises(ConfigError) as raised:
        install_agent("aidr")
    assert "aider" in raised.value.fix
    with pytest.raises(ConfigError, match="nothing to install"):
        Path(mine).write_text('argv = ["true"]\n')
        install_agent(mine)


def test_commands_list_and_install(mine: str) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["agents", "install", mine, "--json"])
    assert json.loads(done.stdout)["npm"] == {"@a/b": "1.2.3"}
    done = runner.invoke(app, ["agents", "list", "--json"])
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert set(listed) == {*BUILT_IN, *recipe.list_recipes()}
    assert set(BUILT_IN) < set(agents.SHIPPED)
    assert {listed[name]["state"] for name in recipe.list_recipes()} == {"not installed"}
    assert len(runner.invoke(app, ["agents", "list"]).stdout.splitlines()) == len(listed)
    assert install_folder("aider", recipe.load_recipe("aider")).name.startswith("aider-")
