"""The real programs, as their authors release them, each repairing a bug in the sandbox through the gateway.

CI runs one for each dialect; what is marked `by_hand` takes longer, and repeats the kind.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import FILES, FIX, SCRIPTS, Outcome, Reply, build_policy, call, check_repair, play

from coderepairrl import agents
from coderepairrl.agents.recipe import install_agent, load_recipe
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.stitch import stitch_episode
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Ending, Limits

pytestmark = pytest.mark.timeout(900)
PNG = (  # 8 by 8, grey
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAADklEQVR4nGNogAIGyhgAgIQgAQ2AJGEAAAAASUVORK5CYII="
)
DOCS = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_policy(tmp_path_factory.mktemp("policy"))


async def repair(name: str, script: Sequence[Reply], folder: Path, model: Path, **more: Any) -> Outcome:
    install_agent(name)
    return await play(agents.make_agent(name), script, folder=folder, model=model, **more)


def train_on(outcome: Outcome, policy: Path) -> None:
    """One real step on what was recorded: the learner computes the engine's logprobs, and its weights move."""
    rows, _ = stitch_episode(outcome.episode, 1.0, max_tokens=1 << 16)
    trainer = Trainer(policy, LearnSettings())
    before = {name: tensor.clone() for name, tensor in trainer.policy.parameters.items()}
    metrics = trainer.step(rows)
    assert metrics["mismatch_max"] < 1e-4
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.policy.parameters.items())


def bases(outcome: Outcome) -> list[int | None]:
    """What each turn extends, token for token."""
    return [turn.base for turn in outcome.episode.turns]


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("mini-swe-agent", "chat"), ("nano-agent", "chat"), ("pi", "chat"), ("codex", "responses")],
)
async def test_a_program_that_only_appends_is_one_conversation(
    tmp_path: Path, policy: Path, name: str, dialect: str
) -> None:
    outcome = await repair(name, SCRIPTS[name], tmp_path, policy, forced=True)
    turns = check_repair(outcome)
    assert bases(outcome) == [None, 0, 1, 2]
    assert {turn.dialect for turn in turns} == {dialect}
    assert "return a - b" in outcome.prompts[1]
    assert "passes" in outcome.prompts[3]
    train_on(outcome, policy)


@pytest.mark.by_hand
async def test_aider(tmp_path: Path, policy: Path) -> None:
    """It has no tools: it adds the file that the model names, tells it why an edit failed, and applies the next."""
    outcome = await repair("aider", SCRIPTS["aider"], tmp_path, policy, forced=True)
    assert len(check_repair(outcome)) == 3
    assert "summaries of some files" in outcome.prompts[0], "the map of the repository"
    assert "assert add(2, 3) == 5" in outcome.prompts[1]
    assert "failed to match" in outcome.prompts[2]
    train_on(outcome, policy)


@pytest.mark.by_hand
@pytest.mark.parametrize(("name", "side"), [("opencode", 1), ("gptme", 1), ("continue", 0), ("cline", 0)])
async def test_side_calls_are_apart(tmp_path: Path, policy: Path, name: str, side: int) -> None:
    """Those that ask for a title are no part of the conversation, which is one."""
    outcome = await repair(name, SCRIPTS[name], tmp_path, policy, forced=True)
    turns = check_repair(outcome)
    assert len(turns) == len(SCRIPTS[name]) + side
    assert outcome.episode.side == outcome.side and len(outcome.side) == side
    assert "passes" in outcome.prompts[-1]
    roots = [turn.index for turn in turns if turn.base is None and turn.index not in outcome.side]
    assert len(roots) == 1, bases(outcome)
    train_on(outcome, policy)


@pytest.mark.by_hand
@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
async def test_libraries_with_a_page_of_glue(tmp_path: Path, policy: Path, example: Path) -> None:
    outcome = await repair(str(example), SCRIPTS[example.stem], tmp_path, policy, forced=True)
    assert outcome.episode.ending is Ending.DONE and outcome.episode.reward == 1.0, outcome.describe()
    assert {turn.dialect for turn in outcome.episode.turns} == {load_recipe(str(example)).dialect}
    assert "passes" in outcome.prompts[-1]
    train_on(outcome, policy)


async def test_claude_code(tmp_path: Path, policy: Path) -> None:
    """It sends an Edit back with its default filled in, which is no fork: the default is in the tool's schema. And at
    32,768 tokens it asks for no summaries, as it would from its second step on."""
    outcome = await repair("claude-code", SCRIPTS["claude-code"], tmp_path, policy, forced=True)
    turns = check_repair(outcome)
    assert bases(outcome) == [None, 0, 1, 2, 3]
    assert {turn.dialect for turn in turns} == {"messages"}
    assert ["rewritten=true" in turn.overridden for turn in turns] == [False, True, False, False, True]  # without cd
    assert "    return a - b" in outcome.prompts[1]
    assert "passes" in outcome.prompts[4]
    train_on(outcome, policy)


@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("codex", [call("view_image", path="/workspace/shot.png")]),
        (
            "claude-code",
            [call("Read", file_path="/workspace/shot.png"), call("ToolSearch", query="select:NotebookEdit")],
        ),
    ],
)
async def test_who_opens_an_image_goes_on(tmp_path: Path, policy: Path, name: str, look: list[Reply]) -> None:
    """It is named to the policy, the turn says so, and the episode stays one path: also when tools come later."""
    files = {**FILES, "shot.png": base64.b64decode(PNG)}
    outcome = await repair(name, [*look, *SCRIPTS[name]], tmp_path, policy, files=files)
    turns = check_repair(outcome)
    assert bases(outcome) == [None, *range(len(turns) - 1)]
    assert "[image, not shown]" in outcome.prompts[1]
    assert ['not_shown=["image"]' in turn.overridden for turn in turns] == [False, True] + [False] * (len(turns) - 2)
    if name == "claude-code":
        assert '"notebook_path"' not in outcome.prompts[0] and '"notebook_path"' in outcome.prompts[2]


@pytest.mark.by_hand
async def test_the_recipe_of_the_docs(tmp_path: Path, policy: Path) -> None:
    [block] = re.findall(r"```toml\n# qwen-code.toml\n(.*?)```", DOCS.read_text(), re.S)
    assert len(block.splitlines()) <= 20
    recipe = tmp_path / "qwen-code.toml"
    recipe.write_text(block)
    outcome = await repair(str(recipe), SCRIPTS["qwen-code"], tmp_path, policy, forced=True)
    check_repair(outcome)
    assert bases(outcome) == [None, 0, 1, 2, 3]
    assert "passes" in outcome.prompts[4]
    train_on(outcome, policy)


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("codex", call("exec_command", cmd=FIX)),
        ("claude-code", call("Bash", command=FIX, description="fix")),
    ],
)
async def test_a_limit_of_the_gateway_is_an_ending(tmp_path: Path, miniature: Path, name: str, loop: Reply) -> None:
    """However the program takes it: by an exit code of failure, or politely."""
    limits = Limits(calls=1, tokens=1 << 20, seconds=240.0)
    outcome = await repair(name, [loop], tmp_path, miniature, limits=limits)
    assert (outcome.episode.ending, outcome.episode.reason) == (Ending.LIMIT, "calls"), outcome.describe()
    assert len(outcome.engine.requests) == 3
    check_repair(outcome, ending=Ending.LIMIT)
