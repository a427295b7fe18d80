"""Live pages: served to this machine alone, and telling what the run folder has at this moment."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from coderepairrl.errors import UsageError
from coderepairrl.report import Site
from coderepairrl.report.kit import diff_lines
from coderepairrl.report.rows import CELLS
from coderepairrl.report.server import Server
from report.runs import Maker


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    made = Maker(tmp_path / "run")
    made.start()
    made.attempt("first", 0, "train", 1, "toy/one")
    return made


@pytest.fixture
async def url(maker: Maker) -> AsyncIterator[str]:
    server = Server(Site([maker.folder.path], live=True))
    yield await server.start()
    await server.stop()
    maker.log.close()


async def get(url: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as answer:
        return answer.status, await answer.text(), answer.headers


async def asked(url: str) -> Any:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        assert answer.status == 200 and answer.content_type == "application/json"
        return await answer.json()


async def test_what_is_appended_to_the_run_is_there_at_once(url: str, maker: Maker) -> None:
    status, page, _ = await get(url)
    assert status == 200 and "1</b><span>training episodes" in page
    status, page, _ = await get(f"{url}/run/index.html")
    assert status == 200 and "first-00" in page
    before = await asked(f"{url}/run/rows.json?since=0")
    assert [row[0] for row in before["rows"]] == ["first-00"]
    assert (await asked(f"{url}/run/rows.json?since={before['state']}"))["rows"] == []
    maker.record("episode", id="next", phase="eval", step=1, group="next", attempt=0, task="toy/two", seed=1)
    after = await asked(f"{url}/run/rows.json?since={before['state']}")
    assert [dict(zip(CELLS, row, strict=True))["ending"] for row in after["rows"]] == ["open"]
    assert await asked(f"{url}/run/state.json?page=next") == {"ending": "open", "turns": 0}
    status, page, _ = await get(f"{url}/run/episode/next.html")
    assert status == 200 and "never called yet" in page
    assert (await asked(f"{url}/run/search.json?text=TOY/two"))["found"] == []
    assert (await asked(f"{url}/run/search.json?text=FIRST-00"))["found"] == ["first-00"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil", "10.0.0.1", ""])
async def test_nobody_else_is_answered(url: str, host: str) -> None:
    status, page, _ = await get(f"{url}/run/index.html", Host=host)
    assert status in (400, 403) and "first" not in page


async def test_who_asks_by_a_name_of_this_machine_is_answered_safely(url: str) -> None:
    for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):
        status, _, headers = await get(f"{url}/run/index.html", Host=host)
        assert status == 200 and headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        *("none", "run", "run/", "run/episode/none.html", "run/rows.json", "run/rows.json?since=x", "run/text.js"),
        *("run/state.json?page=none", "run/search.json", "assets/kit.py", "../../etc/passwd", "run/log.jsonl"),
        *("assets/..%2f..%2fkit.py", "%00", "run/episode/%ff.html"),
    ],
)
async def test_what_is_not_there_is_not_found(url: str, path: str) -> None:
    status, text, _ = await get(f"{url}/{path}")
    assert (status, text) == (404, "there is no such page\n")


async def test_a_fault_in_a_page_is_no_missing_page(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "reports", lambda site: {}["broken"])
    status, _, _ = await get(f"{url}/index.html")
    assert status == 500


async def test_the_command_serves_until_it_is_interrupted(maker: Maker) -> None:
    crrl = Path(sys.executable).parent / "crrl"
    process = await asyncio.create_subprocess_exec(
        *(crrl, "report", maker.folder.path, "--serve", "--episode", "first"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    said = (await process.stdout.readline()).decode().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/run/episode/first-00\.html", said)
    assert (await get(said))[0] == 200
    os.kill(process.pid, signal.SIGINT)
    assert await process.wait() == 0
    maker.log.close()


VERDICT = (
    '{"type":"verdict","verdict":{"id":"x","task_id":"t","phase":"train","step":1,"group":"first","attempt":1,%s}}'
)
FOREIGN = {
    "an episode without its group": '{"type":"episode","id":"x"}',
    "scores that are none": VERDICT % '"ending":"done","scores":null',
    "a score that is not finite": VERDICT % '"ending":"done","scores":[{"name":"a","value":NaN}]',
    "an ending of another version": VERDICT % '"ending":"exploded","scores":[]',
    "a step without a number": '{"type":"step","episodes":[]}',
    "nested too deep": "[" * 100_000,
}


@pytest.mark.parametrize("record", FOREIGN.values(), ids=FOREIGN)
async def test_a_record_that_is_none_ends_what_is_shown_with_a_notice_and_breaks_no_page(
    record: str, url: str, maker: Maker
) -> None:
    with maker.folder.log.open("a") as log:
        log.write(f"{record}\n")
    for path in ("index.html", "run/index.html"):
        status, page, _ = await get(f"{url}/{path}")
        assert status == 200 and "The log is damaged at byte" in page
    assert "first-00" in page
    assert (await get(f"{url}/run/group/first.html"))[0] == 200
    assert Site([maker.folder.path]).write(maker.folder.path / "pages").is_file()


def test_no_page_has_all_of_a_patch_without_end() -> None:
    lines = diff_lines(b"@@ -0,0 +1 @@\n" + b"+x\n" * (1 << 20))
    assert len(lines) < 100_000 and lines[-1].text == "(2,883,598 bytes more are not shown)"


async def test_a_port_that_is_taken_is_said(url: str, maker: Maker) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        await Server(Site([maker.folder.path], live=True)).start(int(url.rpartition(":")[2]))
