"""Pages about a hostile run in a real browser: nothing of it runs, and the page stays a page.

The pages forbid themselves scripts; here that is taken away as well, so that it is the escaping that is seen to hold.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coderepairrl import report
from coderepairrl.report.view import Row, render, render_index
from coderepairrl.types import Ending, Episode, Score, ToolCall
from report.runs import Maker

pytestmark = pytest.mark.slow

RUN = "document.documentElement.dataset.ran=1"
ATTACKS = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}><animate onbegin={RUN} attributeName=x dur=1s></svg>",
    f"</title></style></textarea></pre></svg><script>{RUN}</script>",
    f"\"'> <body onload={RUN}><input autofocus onfocus={RUN}>",
    f'\' onmouseover=\'{RUN}\' x=" onmouseover="{RUN}" y="',
    f"<a href='javascript:{RUN}'>here</a> javascript:{RUN}",
    f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe><!-- <![CDATA[ -->",
    f"<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror={RUN}&gt;'>",
    "</table></div></section></main><style>* { display: none !important }</style>",
    "=HYPERLINK(1) | `x` {{ 7*7 }} {% raw %} \x1b[31m\u202e\u2066 \0 &lt;b&gt; \ud800",
)
EVIL = " ".join(ATTACKS)
LONG = "x" * 3000
WITHOUT_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
LOOK = """<script>
for (const one of document.querySelectorAll("main *")) {
  for (const kind of ["mouseover", "focus", "click"]) one.dispatchEvent(new Event(kind, {bubbles: false}));
}
setTimeout(() => {
  const rolls = one => one.closest(".scroll, .diff, pre, figure, .call code, .facts");
  const hangs = one => !rolls(one) && one.getBoundingClientRect().right > innerWidth;
  document.documentElement.dataset.seen = JSON.stringify({
    scrolls: document.documentElement.scrollWidth - innerWidth,
    hangs: [...document.querySelectorAll("main *")].filter(hangs).slice(0, 9).map(one => one.outerHTML.slice(0, 60)),
    bodies: document.body.children.length, height: document.body.scrollHeight,
    filled: document.body.innerText.includes("49 "),
    elements: [...new Set([...document.querySelectorAll("body *")].map(one => one.localName))],
    links: [...document.querySelectorAll("a")].map(one => one.getAttribute("href")),
  });
}, 500);
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    missing = "no Chromium (fix: apt-get install chromium)"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("runs")
    made = [hostile(folder / ATTACKS[1].replace("/", ""), EVIL), hostile(folder / "long", LONG)]
    episodes = [episode(EVIL, EVIL), episode(LONG, LONG)]
    return {
        "report": report.render(report.load(made[:1])),
        "long report": report.render(report.load(made[1:])),
        "reports": report.render(report.load(made)),
        "index": render(made[0]),
        "long index": render(made[1]),
        "linked index": render_index([Row(each, 1.0, "page.html") for each in episodes], run=EVIL, notice=EVIL),
        "episode": render(made[0], "train-00001-000-00"),
        "long episode": render(made[1], "train-00001-000-00"),
    }


def hostile(path: Path, evil: str) -> Path:
    """A run all of whose words are `evil`."""
    option = evil.replace("\ud800", "")  # which TOML cannot have
    maker = Maker(path, name="run", agent={"name": "nano", "options": {option: option}})
    plain = maker._episode

    def written(id: str, task: str, ending: Ending, step: int) -> Episode:
        return episode(evil, evil, plain(id, f"{evil}/{task}", ending, step))

    maker._episode = written  # type: ignore[method-assign]
    maker.run(2, evaluations=(0, 2))
    about: dict[str, Any] = json.loads((path / "run.json").read_text())
    told = {"name": evil, "commit": evil, "argv": [evil], "platform": evil, "versions": {evil: evil}, "seed": evil}
    (path / "run.json").write_text(json.dumps(about | told))
    return path


def episode(name: str, evil: str, made: Episode | None = None) -> Episode:
    made = made or Episode(name, name, "train", 1, name, 0, Ending.DONE)
    patch = f"diff --git a/{evil} b/{evil}\n--- a/{evil}\n+++ b/{evil}\n@@ -1 +1 @@ {evil}\n-{evil}\n+{evil}\n"
    scores = (*made.scores, Score(evil, 0.5, 0.0, evil))
    return replace(
        made,
        tool_calls=(ToolCall(0, evil, evil, True, command=evil), ToolCall(99, evil, evil, False)),
        scores=scores if made.ending is not Ending.VOID else (),
        reason=evil,
        fault=evil if made.ending is Ending.VOID else "",
        crash=evil if made.ending is Ending.CRASH else "",
        patch=b"" if made.ending is Ending.VOID else patch.encode(errors="replace"),
        printed=evil,
        turns=tuple(replace(turn, finish=turn.finish, dialect=evil, overridden=(evil,)) for turn in made.turns),
    )


def opened(browser: str, page: str, folder: Path, screenshot: str = "") -> str:
    """The document as the browser has it in the end."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    command += ["--window-size=1100,1400", "--virtual-time-budget=3000", "--host-resolver-rules=MAP * ~NOTFOUND"]
    if screenshot:
        subprocess.run([*command, f"--screenshot={screenshot}", path.as_uri()], check=True, capture_output=True)
    done = subprocess.run([*command, "--dump-dom", path.as_uri()], check=True, capture_output=True, timeout=120)
    return done.stdout.decode()


@pytest.mark.parametrize("attack", range(8))
def test_a_browser_would_run_it(attack: int, browser: str, tmp_path: Path) -> None:
    """Unescaped, and with somebody who points, clicks and tabs."""
    text = ATTACKS[attack]
    page = f"<!DOCTYPE html><main><p>{text}</p><p title='{text}'>x</p><p title=\"{text}\">x</p></main>"
    if "javascript:" in text:
        page += "<script>document.querySelector('a').click()</script>"
    assert "data-ran" in opened(browser, page + LOOK, tmp_path), text


@pytest.mark.parametrize(
    "name", ["report", "long report", "reports", "index", "long index", "linked index", "episode", "long episode"]
)
def test_nothing_runs_and_the_page_is_whole(name: str, pages: dict[str, str], browser: str, tmp_path: Path) -> None:
    page = pages[name]
    assert "data-ran" not in opened(browser, page, tmp_path, f"{tmp_path}/{name.replace(' ', '-')}.png")
    bare, count = WITHOUT_POLICY.subn("", page)
    assert count == 1
    document = opened(browser, bare.replace("</body>", f"{LOOK}</body>"), tmp_path)
    assert "data-ran" not in document
    found = re.search(r'data-seen="([^"]*)"', document)
    assert found, "our own script ran, so others would have"
    seen = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert set(seen["elements"]).isdisjoint({"img", "iframe", "math", "animate", "textarea", "style", "body"})
    assert set(seen["links"]) <= {"page.html"} and not seen["filled"]
    assert seen["height"] > 500 and seen["bodies"] == 2, "main, and our script"
    assert (seen["scrolls"] <= 0, seen["hangs"]) == (True, [])
