"""What the programs of others do to tokens: the table of docs/agents.md, from one small repair by each.

    python benchmarks/agents.py [NAME | RECIPE.toml ...]

Every installed program is asked unless some are named. The engine says what a script tells it to.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from coderepairrl import agents
from coderepairrl.agents import recipe
from coderepairrl.agents.install import installed
from coderepairrl.agents.listing import program
from coderepairrl.learn.stitch import stitch

TESTS = Path(__file__).parents[1] / "tests"
COLUMNS = (
    "agent",
    "program",
    "dialect",
    "turns",
    "first prompt",
    "rows",
    "row tokens",
    "expansion",
    "delivered",
    "reward",
)
"""Lengths in tokens of a vocabulary of 8k."""


async def main(names: list[str]) -> None:
    """Print the table in Markdown."""
    sys.path[:0] = [str(TESTS), str(TESTS / "agents")]  # which have the repairs, and check more
    from programs import SCRIPTS, build_policy, play

    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="crrl-agents-") as work:
        model = build_policy(Path(work, "model"))
        for name in names:
            folder = Path(work, recipe.label(name))
            folder.mkdir()
            for path in (Path(work), folder):
                path.chmod(0o755)  # sandboxes may be another user's
            script = SCRIPTS[recipe.label(name)]
            print(row(name, await play(agents.make(name), script, folder=folder, model=model)), flush=True)


def row(name: str, outcome: Any) -> str:
    """One line of the table."""
    found, episode = recipe.load(name), outcome.episode
    rows, account = stitch(episode, 1.0, max_tokens=1 << 20)
    values = (
        f"`{recipe.label(name)}`",
        program(found),
        found.dialect,
        len(episode.turns),
        len(outcome.engine.requests[0].ids),
        len(rows),
        account.row_tokens,
        f"{account.expansion:.2f}",
        f"{account.delivered:.2f}",
        f"{episode.reward:g}" if episode.scores else episode.fault,
    )
    return f"| {' | '.join(map(str, values))} |"


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or [name for name in recipe.names() if installed(name, recipe.load(name))]))
