"""Pages in a real browser: no text of a hostile run is executed or breaks a page, and keys, filters and views work.

The content security policy of the pages is removed, so that only the escaping protects them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import chromium
from coderepairrl.report import Site
from coderepairrl.report.rows import file_name
from needs import need
from report.runs import RunMaker, read_rows, write_hostile_run, write_run

RUN = "document.documentElement.dataset.ran=1"
ATTACKS = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}><animate onbegin={RUN} attributeName=x dur=1s></svg>",
    f"</title></style></textarea></pre></svg></script><script>{RUN}</script>",
    f"\"'> <body onload={RUN}><input autofocus onfocus={RUN}>",
    f'\' onmouseover=\'{RUN}\' x=" onmouseover="{RUN}" y="',
    f"<a href='javascript:{RUN}'>here</a> javascript:{RUN}",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe><!-- <![CDATA[ -->",
    f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror={RUN}&gt;'>",
    "</table></div></section></main><style>* { display: none !important }</style>",
    "=HYPERLINK(1) | `x` {{ 7*7777777 }} {% raw %} \x1b[31m\u202e\u2066 \0 &lt;b&gt; \ud800",
)
EVIL = " ".join(ATTACKS)
LONG = "x" * 3000
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
LOOK = """(() => {
  for (const one of document.querySelectorAll("main *")) {
    for (const kind of ["mouseover", "focus"]) one.dispatchEvent(new Event(kind, {bubbles: true}));
  }
  const rolls = one => one.closest(".scroll, .diff, pre, figure, .call code, .facts, .outline, .list, .path");
  const hangs = one => !rolls(one) && one.getBoundingClientRect().right > innerWidth;
  return {
    scrolls: document.documentElement.scrollWidth - innerWidth,
    hangs: [...document.querySelectorAll("main *")].filter(hangs).slice(0, 9).map(one => one.outerHTML.slice(0, 60)),
    bodies: [...document.body.children].map(one => one.localName), height: document.body.scrollHeight,
    filled: document.body.innerText.includes("54444439"),
    elements: [...new Set([...document.querySelectorAll("body *")].map(one => one.localName))],
    links: [...document.querySelectorAll("[href]")].map(one => one.getAttribute("href")),
    ran: document.documentElement.dataset.ran || "",
  };
})()"""


@pytest.fixture(scope="module")
def browser() -> str:
    path = chromium.find_chromium()
    need(path, "no Chromium (fix: apt-get install chromium)")
    return str(path)


@pytest.fixture
async def tab(browser: str) -> AsyncIterator[chromium.Tab]:
    async with chromium.open_tab(browser) as found:
        await found.look()
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of page, without its content security policy."""
    folder = tmp_path_factory.mktemp("runs")
    made = [write_hostile_run(folder / ATTACKS[1].replace("/", ""), EVIL), write_hostile_run(folder / "long", LONG)]
    out = folder / "pages"
    found = {}
    for name, run, words in (("", made[0], EVIL), ("long ", made[1], LONG)):
        site = Site([run])
        found[f"{name}report"] = site.write(out / f"{name}site")
        there = found[f"{name}report"].parent / next(iter(site.runs))
        found[f"{name}index"] = there / "index.html"
        page = f"{file_name(f'{words}train-00001-000')}"
        found[f"{name}group"] = there / f"group/{page}.html"
        found[f"{name}episode"] = there / f"episode/{file_name(f'{words}train-00001-000-00')}.html"
        found[f"{name}task"] = sorted((there / "task").iterdir())[0]
        found[f"{name}single"] = site.write_episode(f"{words}train-00001-000-00", out / f"{name}single.html")
    found["reports"] = Site(made).write(out / "reports.html")
    for path in found.values():
        text, count = POLICY.subn("", path.read_text())
        assert count == 1
        path.write_text(text)
    return found


async def test_unescaped_attacks_run(tab: chromium.Tab, tmp_path: Path) -> None:
    """Control: without escaping, pointing, clicking and tabbing run each attack."""
    for number, text in enumerate(ATTACKS[:8]):
        path = tmp_path / f"{number}.html"
        path.write_text(f"<!DOCTYPE html><main><p>{text}</p><p title='{text}'>x</p><p title=\"{text}\">x</p></main>")
        await tab.open(path.as_uri())
        await tab.js(LOOK)
        await tab.js("document.querySelector('a')?.click()")
        await tab.until("document.documentElement.dataset.ran", 10)


@pytest.mark.parametrize("width", [1100, 390])
@pytest.mark.parametrize("name", ["", "long "])
async def test_no_hostile_script_runs_and_pages_stay_whole(
    name: str, width: int, tab: chromium.Tab, pages: dict[str, Path]
) -> None:
    await tab.look(width, 1400)
    for kind in ("report", "index", "group", "episode", "task", "single", *(("reports",) if not name else ())):
        path = pages[name * (kind != "reports") + kind]
        await tab.open(path.as_uri())
        shades = await tab.js("document.querySelectorAll('button[data-shade], button[data-view]').length")
        for shade in range(max(1, shades)):
            await tab.js(f"document.querySelectorAll('button[data-shade], button[data-view]')[{shade}]?.click()")
            await asyncio.sleep(0.1)
            seen = await tab.js(LOOK)
            assert seen["ran"] == "" and not seen["filled"], (kind, shade)
            harmful = {"img", "iframe", "math", "animate", "textarea", "style", "body"}
            assert harmful.isdisjoint(seen["elements"]), kind
            assert all(re.fullmatch(r"[A-Za-z0-9./_-]*(#[\w=&%.~()!*'-]*)?", link) for link in seen["links"]), kind
            assert seen["height"] > 200 and set(seen["bodies"]) <= {"nav", "main", "dialog", "script"}, kind
            if not (width < 600 and "report" in kind):
                assert (seen["scrolls"] <= 0, seen["hangs"]) == (True, []), (kind, shade)
    assert not [error for error in tab.errors if "exception" in error.lower()], tab.errors


async def test_a_list_is_filtered_sorted_and_walked_by_keys(tab: chromium.Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4)
    first = Site([run]).write(tmp_path / "pages").parent / "run/index.html"
    rows = read_rows(run)
    await tab.open(first.as_uri())

    async def count() -> int:
        return int((await tab.js("document.getElementById('count').textContent")).split()[0])

    async def filtered(query: str, wanted: int) -> None:
        await tab.press("/")
        await tab.js("document.getElementById('query').value = ''")
        await tab.type(query)
        await tab.until(f"document.getElementById('count').textContent.startsWith('{wanted} ')")
        await tab.press("Escape")

    assert await count() == len(rows)
    await filtered("phase=eval", sum(row.phase == "eval" for row in rows))
    await filtered("reward>0.5 -ending:limit", sum((row.reward or 0) > 0.5 and row.ending != "limit" for row in rows))
    await filtered("tests=1 step:2", sum(row.scores.get("tests") == 1 and row.step == 2 for row in rows))
    function = rows[0].task.split("/")[1]
    await filtered(f"{function} tool:shell", sum(function in row.task and "shell" in row.tools for row in rows))
    [loaded] = Site([run]).runs.values()
    patched = sum(bool(loaded.view_episode(row.id).episode.patch) for row in rows)
    await filtered('text:"DIFF --git a/x"', patched)
    await filtered("nonsense>x", len(rows))
    assert "nonsense" in await tab.js("document.getElementById('wrong').innerText")
    await filtered("phase=train", sum(row.phase == "train" for row in rows))
    await tab.js("[...document.querySelectorAll('.head button')].find(one => one.textContent === 'reward').click()")
    await tab.press("j", "j", "j")
    order = sorted(
        (row for row in rows if row.phase == "train"),
        key=lambda row: (row.reward is None, -(row.reward or 0), row.step, row.group, row.attempt),
    )
    await tab.press("Enter")
    await tab.until(f"location.pathname.endsWith('/episode/{order[2].id}.html')")
    await tab.until(f"document.querySelector('#walk .num')?.textContent === '3 of {len(order)}'")
    await tab.press("]")
    await tab.until(f"location.pathname.endsWith('/episode/{order[3].id}.html')")
    entries = (await tab.send("Page.getNavigationHistory"))["entries"]
    await tab.send("Page.navigateToHistoryEntry", entryId=entries[-3]["id"])
    await tab.until("document.getElementById('count')?.textContent.includes(' of ')")
    assert "sort=-reward" in await tab.js("location.hash"), "the list keeps its filter and order"
    await tab.press("2")
    await tab.until("document.querySelector('[data-view=groups]').getAttribute('aria-pressed') === 'true'")
    assert await tab.js("document.querySelector('.dots').children.length") >= 4
    assert tab.errors == []


async def test_tokens_are_drawn_with_what_became_of_them(tab: chromium.Tab, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    trained = next(row for row in read_rows(run) if row.advantage)
    evaluated = next(row for row in read_rows(run) if row.phase == "eval")
    folder = Site([run]).write(tmp_path / "pages").parent / "run/episode"
    for row in (trained, evaluated):
        await tab.look(1100, 20_000)
        await tab.open(f"{(folder / row.id).as_uri()}.html#turn-1")
        assert await tab.js("document.querySelector('.turn.here').id") == "turn-1"
        await tab.press("2")
        await tab.until("[...document.querySelectorAll('.tokens')].every(one => one.firstChild)")
        assert await tab.js("document.querySelectorAll('.tokens .t.p').length") == row.tokens
        struck = "one => getComputedStyle(one).textDecorationLine !== 'none'"
        assert not await tab.js(f"[...document.querySelectorAll('.tokens .t.p')].some({struck})")
        await tab.press("k")
        assert await tab.js("location.hash") == "#turn-0"
    assert tab.errors == []


async def test_ten_thousand_episodes_are_a_list_like_any_other(tab: chromium.Tab, tmp_path: Path) -> None:
    maker = RunMaker(tmp_path / "run")
    for number in range(10_000):
        about = {"phase": "train", "step": number // 100, "group": f"g{number // 8}", "attempt": number % 8}
        maker.record("episode", id=f"e{number}", task=f"toy/{number % 50}", seed=1, **about)
        score = {"name": "tests", "value": number % 2, "weight": 1.0}
        verdict = {"id": f"e{number}", "task_id": f"toy/{number % 50}", **about, "ending": "done", "scores": [score]}
        maker.record("verdict", verdict=verdict)
    maker.log.close()
    page = tmp_path / "pages/run/index.html"
    site = Site([maker.folder.path])
    for path in ("assets/style.css", "assets/list.js", "run/index.html"):
        (tmp_path / "pages" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pages" / path).write_text(site.page(path))
    await tab.open(page.as_uri())
    assert await tab.js("document.getElementById('count').textContent") == "10,000 episodes"
    assert await tab.js("document.querySelectorAll('.row').length") < 100, "what is out of sight is not drawn"
    await tab.js("scrollTo(0, document.body.scrollHeight)")
    await tab.until("[...document.querySelectorAll('.row')].some(one => one.href.endsWith('/e9999.html'))")
    assert tab.errors == []
