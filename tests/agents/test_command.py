"""`command` with a stand-in program, through the real gateway and in the real sandbox, and each of its endings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import ISSUE, Outcome, Reply, call, check_repair, play, stand_in

from coderepairrl import agents
from coderepairrl.agents.command import Command, Program
from coderepairrl.agents.recipe import agent_label, list_recipes, load_recipe
from coderepairrl.agents.texts import fill_template
from coderepairrl.errors import ConfigError
from coderepairrl.runs.log import read_records
from coderepairrl.types import Ending, Limits

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
STAND_IN = stand_in() | {"discard": [".agent-cache"]}
EDIT = call("bash", cmd="sed -i 's/a - b/a + b/' calc/add.py")
REPAIR = [call("bash", cmd="cat calc/add.py; mkdir .agent-cache; touch .agent-cache/x"), EDIT, Reply("Done.")]


async def run(folder: Path, miniature: Path, script: Any, limits: Limits | None = None, **options: Any) -> Outcome:
    return await play(Command(**(STAND_IN | options)), script, folder=folder, model=miniature, limits=limits)


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        (REPAIR, {"argv": ["no-such-program"]}, "cannot be run: no-such-program: command not found"),
        (REPAIR, {"argv": ["echo", "{prompt}"]}, f"ended without a call to the model: {ISSUE}"),
        (
            REPAIR,
            {"argv": ["python3", "-c", "import no_such_module"]},
            '[install] pip = ["PACKAGE==VERSION"], then crrl agents install RECIPE): Traceback',
        ),
    ],
    ids=["missing", "silent", "without a module"],
)
async def test_a_program_that_never_asks_the_model_voids_its_episode(
    tmp_path: Path, miniature: Path, script: list[Reply], options: dict[str, Any], words: str
) -> None:
    outcome = await run(tmp_path, miniature, script, **options)
    assert (outcome.episode.ending, outcome.episode.reason) == (Ending.VOID, "agent")
    assert words in outcome.episode.fault
    assert words.rpartition(": ")[2] in outcome.episode.printed


LOUD = """\
echo first; python3 "$@"; code=$?
head -c 100000 /dev/zero | tr '\\0' x; echo; echo last >&2; exit $code
"""


@pytest.mark.parametrize(
    ("script", "ending"), [([Reply("Nothing to do.")], Ending.DONE), ([Reply("I give up.")], Ending.CRASH)]
)
async def test_what_a_program_printed_is_kept_beside_its_episode(
    tmp_path: Path, miniature: Path, script: list[Reply], ending: Ending
) -> None:
    """Its beginning and its end: whoever finds an empty patch wants to know why."""
    argv = ["sh", "-c", LOUD, "sh", *STAND_IN["argv"][1:]]
    outcome = await run(tmp_path, miniature, script, argv=argv)
    assert outcome.episode.ending is ending, outcome.describe()
    assert (outcome.episode.patch, len(outcome.episode.turns)) == (b"", 1)
    printed = outcome.episode.printed
    assert printed.startswith("first\n") and printed.endswith("xxx\nlast\n") and "characters left out" in printed
    assert len(printed) < 9_000
    *_, verdict = (record for record in read_records(tmp_path / "log.jsonl") if record["type"] == "verdict")
    assert verdict["verdict"]["printed"] == printed


async def test_folders_that_the_policy_closes_are_removed_all_the_same(tmp_path: Path, miniature: Path) -> None:
    """It is no crash, and no way to keep what the recipe discards in the patch."""
    close = call(
        "bash", cmd="mkdir -p .agent-cache/x/y $HOME/z && chmod -R 000 .agent-cache $HOME/z; ln -s / $HOME/root"
    )
    outcome = await run(tmp_path, miniature, [EDIT, close, Reply("Done.")])
    check_repair(outcome)


async def test_exit_codes_of_success_are_the_recipes(tmp_path: Path, miniature: Path) -> None:
    outcome = await run(tmp_path, miniature, [*REPAIR[:2], Reply("I give up.")], exit_codes=[0, 1])
    check_repair(outcome)


async def test_placeholders_and_standard_input(tmp_path: Path, miniature: Path) -> None:
    show = 'cat; printf "%s\\n" "$@" "$KEY" "$(pwd)"; test "$HOME" = "$1" && cat "$1/a/b.json" "$ASK"'
    argv = ["sh", "-c", show, "sh", "{home}", "{base_url}", "{root_url}/v1", "{calls} {tokens} {{model}}", "{workdir}"]
    env = {"KEY": "{api_key}", "ASK": "{prompt_file}"}
    agent = Command(argv=argv, env=env, files={"a/b.json": '{"m": "{model}"}\n'}, stdin="<{prompt}>")
    outcome = await play(agent, REPAIR, folder=tmp_path, model=miniature, limits=Limits(calls=3, tokens=999))
    lines = outcome.episode.printed.splitlines()
    assert lines[0].startswith(f"<{ISSUE}>")
    assert lines[1] == lines[2]
    assert lines[1].startswith("http://127.0.0.1:")
    key = lines[1].split("/")[-2]
    assert lines[3:] == ["3 999 {{model}}", lines[4], key, lines[4], '{"m": "policy"}', ISSUE]


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ('{"a":{"model":"{model}"}}', '{"a":{"model":"m"}}'),
        ('{"limit":{"context":{tokens}}}', '{"limit":{"context":9}}'),
        ('{"models":{"{model}":{"x":[{tokens},{tokens}]}}}', '{"models":{"m":{"x":[9,9]}}}'),
        ("{{model}} {{model}}} {{{model}}}", "{{model}} {{model}}} {{{model}}}"),
        ("{{tokens}, {tokens}}", "{9, 9}"),
        ("{other} {} {model", "{other} {} {model"),
    ],
)
def test_a_placeholder_is_filled_whatever_brace_stands_beside_it(text: str, filled: str) -> None:
    assert fill_template(text, model="m", tokens=9) == filled


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"argv": ["x", "{base_ulr}"]}, "base_url"),
        ({"argv": ["x", '{"a":{"b":{tokns}}}']}, "tokens"),
        ({"argv": []}, "argv is empty"),
        ({"argv": ["x"], "evn": {}}, "env"),
        ({"argv": "x"}, "agent.options.argv"),
        ({"argv": ["x"], "files": {"../x": ""}}, "relative"),
        ({"argv": ["x"], "discard": ["/etc"]}, "relative"),
        ({"argv": ["x"], "install": {"pipe": ["x"]}}, "install"),
        ({}, "argv"),
    ],
)
def test_wrong_recipes_are_refused_at_the_door(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        agents.make_agent("command", **options)
    assert hint in f"{raised.value} {raised.value.fix}"


def test_a_shells_own_braces_are_no_placeholders() -> None:
    assert Command(argv=["sh", "-c", "echo ${HOME} | grep -E 'a{2}'"]).recipe.argv[2] == "echo ${HOME} | grep -E 'a{2}'"


def test_a_recipe_of_your_own_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('argv = ["mine"]\nenv = { A = "1", B = "2" }\n')
    agent = agents.make_agent(str(file), env={"B": "3"})
    assert isinstance(agent, Program)
    assert (agent.name, agent.recipe.env, agent.binds) == ("mine", {"A": "1", "B": "3"}, ())
    file.write_text("argv = [")
    with pytest.raises(ConfigError, match="not TOML"):
        agents.make_agent(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        agents.make_agent(str(tmp_path / "other.toml"))


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_are_right(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.about and recipe.install and agent_label(name) == name
    assert all("==" in requirement for requirement in recipe.install.pip)
    assert all("@" in package[1:] for package in recipe.install.npm)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_examples_are_right(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert recipe.about and all("==" in requirement for requirement in recipe.install.pip)
    assert "{api_key}" not in " ".join(recipe.argv), "command lines are public"
    for name, text in recipe.files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
            assert max(map(len, text.splitlines())) <= 120
