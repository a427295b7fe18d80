"""Seconds to open a run of 10,000 episodes: reading its log, its list in a real browser, one episode's page.

    python benchmarks/view.py [--episodes 10000] [--turns 4] [--tokens 200] [--run FOLDER]

The run is synthetic: episodes of `--turns` turns, each with `--tokens` given and as many sampled tokens. Seconds are
CPU and wall-clock; in the browser (Chromium, if installed) wall-clock, from the request until the list is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from coderepairrl.config import Config, to_toml
from coderepairrl.report import Site
from coderepairrl.report.server import Server
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, ToolCall, Turn, VersionRange

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import chromium

T = TypeVar("T")
PATCH = b"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n def x():\n-    return 1\n+    return 2\n"


def main() -> None:
    """Print one line of Markdown per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--pages", type=int, default=200, help="further episode pages to render")
    parser.add_argument("--run", type=Path, help="folder in which the run is made and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or Path(temporary) / "run"
        if not (run / "run.json").exists():
            make(run, options.episodes, options.turns, options.tokens)
        print(f"log of {(run / 'log.jsonl').stat().st_size / 1e6:,.0f} MB\n\n| what | CPU s | clock s |\n|---|---|---|")
        measure(run, Path(temporary) / "pages", options.pages)


def measure(run: Path, out: Path, pages: int) -> None:
    site = timed("reading the log", lambda: Site([run]))
    timed("the report, its first page", lambda: site.page("index.html"))
    index = timed("rendering the list", lambda: site.page("run/index.html"))
    [loaded] = site.runs.values()
    names = list(loaded.rows.by_id)
    timed("rendering the first episode's page", lambda: site.page(f"run/episode/{names[0]}.html"))
    for path in ("assets/style.css", "assets/list.js"):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(site.page(path))
    (out / "run").mkdir()
    (out / "run/index.html").write_text(index)
    timed(f"rendering {pages} more", lambda: [site.page(f"run/episode/{name}.html") for name in names[:pages]])
    timed("searching the text of all", lambda: loaded.rows.follower.search("nowhere"))
    print(f"\nthe list is {len(index) / 1e6:.1f} MB")
    if browser := chromium.find_chromium():
        asyncio.run(browse(browser, run, out))


async def browse(browser: str, run: Path, out: Path) -> None:
    print("\n| in Chromium | clock s |\n|---|---|")
    async with chromium.open_tab(browser) as tab:
        await tab.look()
        for _ in range(3):
            await opened(tab, "the list from a file", (out / "run/index.html").as_uri())
        started = time.perf_counter()
        server = Server(Site([run], live=True))
        url = await server.start()
        await opened(tab, "from a server that starts", f"{url}/run/index.html", started)
        for _ in range(2):
            await opened(tab, "from a server that runs", f"{url}/run/index.html")
        await tab.js("document.querySelector('#query').value = 'reward>0.5 tool:shell'")
        started = time.perf_counter()
        await tab.js("document.querySelector('#query').dispatchEvent(new Event('input'))")
        await tab.until("document.querySelector('#count').textContent.includes(' of ')")
        print(f"| a filter | {time.perf_counter() - started:.2f} |")
        await server.stop()


async def opened(tab: chromium.Tab, what: str, url: str, started: float | None = None) -> None:
    await tab.open("about:blank")
    started = started or time.perf_counter()
    await tab.open(url)
    await tab.until("document.querySelectorAll('.row').length > 0")
    print(f"| {what} | {time.perf_counter() - started:.2f} |")


def timed(what: str, work: Callable[[], T]) -> T:
    started, cpu = time.perf_counter(), time.process_time()
    result = work()
    print(f"| {what} | {time.process_time() - cpu:.2f} | {time.perf_counter() - started:.2f} |", flush=True)
    return result


def make(path: Path, episodes: int, turns: int, tokens: int) -> None:
    """Write a run with groups of eight and a hundred episodes a step."""
    folder = RunFolder(path)
    folder.create(to_toml(Config.model_validate({"run": {"name": "made"}})), {"name": "made", "seed": 0})
    rng = random.Random(0)
    given = TokenSpan(tuple(rng.randrange(400) for _ in range(tokens)), Origin.GIVEN)
    output = TokenSpan(given.ids, Origin.POLICY, tuple(-rng.random() for _ in given.ids))
    call = {"id": "c", "function": {"name": "shell", "arguments": json.dumps({"cmd": "cat x.py"})}}
    messages = (
        {"role": "tool", "content": "x = 1\n" * 100},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    versions = (VersionRange(1, 0, tokens),)
    shared_turns = tuple(
        Turn(index, index - 1 if index else None, given, output, versions=versions, messages=messages)
        for index in range(turns)
    )
    calls = tuple(ToolCall(index, "shell", '{"cmd": "cat x.py"}', True, 600, 0.1, "cat") for index in range(turns))
    log = folder.writer()
    log.append("start", step=0, engine="tiny", sandbox="bwrap")
    for number in range(episodes):
        name = f"train-{number // 100:05d}-{number // 8:05d}-{number % 8:02d}"
        task, group = f"mutants/some.function{number % 100}/comparison-{number % 100:08x}", name[:-3]
        about = {"phase": "train", "step": number // 100, "group": group, "attempt": number % 8}
        log.append("episode", id=name, task=task, seed=1, **about)
        for turn in shared_turns:
            log.append("turn", episode=name, turn=turn)
        episode = Episode(
            name,
            task,
            ending=Ending.DONE,
            tool_calls=calls,
            patch=PATCH,
            scores=(Score("patch_edits", rng.random(), 0.5), Score("tests", float(rng.random() < 0.5), 0.5)),
            **about,  # type: ignore[arg-type]
        )
        log.append("verdict", verdict=episode)
    log.close()


if __name__ == "__main__":
    main()
