"""How other agent programs treat tokens: the table of docs/measurements/agents.md, from one small repair by each.

    python benchmarks/agents.py [--outside] [NAME | RECIPE.toml ...]

Runs every installed program unless some are named, one at a time, at the limits that docs/guides/agents.md
recommends, with the chat templates of two model families. The engine replays a script in no time: wall-clock and CPU
seconds are those of the program and its sandbox. --outside runs without a sandbox (sandbox=unsafe-local), to compare;
edits by a path in /workspace fail there.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

from coderepairrl import agents, sandbox
from coderepairrl.agents import recipe
from coderepairrl.agents.recipe import installed_program, installed_versions
from coderepairrl.learn.stitch import stitch_episode

TESTS = Path(__file__).parents[1] / "tests"
COLUMNS = (
    "agent",
    "model",
    "program",
    "dialect",
    "calls",
    "of which side",
    "first prompt",
    "rows",
    "row tokens",
    "expansion",
    "delivered",
    "rewritten",
    "reward",
    "seconds",
    "processor",
)
"""Lengths in tokens of a vocabulary of 8k."""


async def main(names: list[str], outside: bool) -> None:
    """Print the table in Markdown."""
    sys.path[:0] = [str(TESTS), str(TESTS / "agents"), str(TESTS / "tokens")]  # the scripted repairs are there
    from families import FAMILIES
    from programs import RECOMMENDED, SCRIPTS, learn_vocabulary, play

    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="crrl-agents-") as work:
        Path(work).chmod(0o755)  # sandboxes may be another user's
        for name, family in itertools.product(names, ("Qwen3", "Qwen3.5, 3.6")):
            folder = Path(work, f"{recipe.agent_label(name)}-{FAMILIES[family].model_type}")
            model = FAMILIES[family].write(folder / "model", learn_vocabulary(), max_position_embeddings=1 << 16)
            folder.chmod(0o755)
            script = SCRIPTS[recipe.agent_label(name)]
            agent = agents.make_agent(name)
            spent = _children_cpu_seconds()
            options = {"backend": sandbox.make_backend("unsafe-local")} if outside else {}
            played = await play(agent, script, folder=folder, model=model, context=RECOMMENDED.tokens, **options)
            print(row(name, family, played, _children_cpu_seconds() - spent), flush=True)


def _children_cpu_seconds() -> float:
    """CPU seconds of all descendants that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(name: str, family: str, outcome: Any, processor: float) -> str:
    """One line of the table. `processor`: CPU seconds of the program."""
    agent_recipe, episode = recipe.load_recipe(name), outcome.episode
    rows, account = stitch_episode(episode, 1.0, max_tokens=1 << 20)
    prompts = [len(request.ids) for at, request in enumerate(outcome.engine.requests) if at not in episode.side]
    values = (
        f"`{recipe.agent_label(name)}`",
        family,
        installed_program(agent_recipe),
        agent_recipe.dialect,
        len(episode.turns),
        len(episode.side),
        next(iter(prompts), 0),
        len(rows),
        account.row_tokens,
        f"{account.expansion:.2f}",
        f"{account.delivered:.2f}",
        sum("rewritten=true" in turn.overridden for turn in episode.turns),
        f"{episode.reward:g}" if episode.scores else episode.fault,
        f"{episode.timings['total']:.0f}",
        f"{processor:.0f}",
    )
    return f"| {' | '.join(map(str, values))} |"


if __name__ == "__main__":
    chosen = [word for word in sys.argv[1:] if word != "--outside"]
    found = [name for name in recipe.list_recipes() if installed_versions(name, recipe.load_recipe(name))]
    asyncio.run(main(chosen or found, outside="--outside" in sys.argv))
