"""Pages, written or live, show every token and whether it was trained, and hostile text stays inert."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import UsageError
from coderepairrl.learn import TokenAccount
from coderepairrl.report import Site
from coderepairrl.report.conversation import build_conversation, build_turn_tree, find_unrecorded_calls
from coderepairrl.report.episodes import EpisodeView, render_episode
from coderepairrl.report.kit import PageContext, decode_pieces, parse_diff_lines
from coderepairrl.report.rows import CELLS, file_name
from coderepairrl.report.server import Server
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Fork, Origin, Score, Task, TokenSpan, ToolCall, Turn, VersionRange
from pages import Page
from report.runs import RunMaker, write_run

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)><!-- \u202e\x1b[31m\x00 \"' {{ 7*7 }}"


def decode(ids: Sequence[int]) -> str:
    """Decode ids that are bytes."""
    return bytes(ids).decode(errors="replace")


def make_span(text: str, origin: Origin = Origin.POLICY) -> TokenSpan:
    ids = tuple(text.encode(errors="replace"))
    return TokenSpan(ids, origin, tuple(-0.25 * (i % 4) for i in range(len(ids))) if origin is Origin.POLICY else ())


def make_turn(index: int, base: int | None, given: str, output: str, tail: str = "", **more: object) -> Turn:
    versions = (VersionRange(7, 0, 2), VersionRange(8, 2, len(output.encode()) + len(tail)))
    return Turn(index, base, make_span(given, Origin.GIVEN), make_span(output), make_span(tail), versions, **more)  # type: ignore[arg-type]


def make_call_message(name: str, arguments: object, **more: object) -> dict[str, object]:
    call = {"id": f"call-{name}", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def make_episode(id: str = "s00001-g00-00", **more: object) -> Episode:
    turns = (
        make_turn(
            0,
            None,
            f"issue: {EVIL}",
            "look",
            messages=({"role": "user", "content": EVIL}, make_call_message(EVIL, EVIL)),
        ),
        make_turn(1, 0, "result", f"é世 {EVIL}", "tail"),
        make_turn(2, 0, "other", "half", masked="aborted"),
    )
    calls = (ToolCall(0, "shell", EVIL, True, 5, 0.1, "ls"), ToolCall(9, EVIL, "{}", False))
    fields: dict[str, object] = {
        "turns": turns,
        "tool_calls": calls,
        "patch": b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old <b>\n+new \xff\n",
        "scores": (Score("patch_lines", 0.25, note=EVIL), Score("mine", 1.0, 0.0, passed=True)),
        "timings": {"generate": 1.0, "total": 2.0},
        "reason": "submitted",
        **more,
    }
    return Episode(id, f"toy/{EVIL}", "train", 1, "s00001-g00", 0, Ending.DONE, **fields)  # type: ignore[arg-type]


def render(episode: Episode, *, around: PageContext | None = None, **more: Any) -> str:
    return render_episode(EpisodeView(episode, decode, **more), around or PageContext("run", "run"))


def read_embedded_data(page: str) -> Any:
    """The data from which a page's script draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_every_token_is_there_with_its_facts() -> None:
    episode = make_episode()
    page = render(episode, trained={0: "trained", 1: "masked:sampling", 2: "dropped:aborted"}, advantage=1.5)
    data = read_embedded_data(page)
    assert list(data) == ["0", "1", "2"]
    for own in episode.turns:
        drawn = data[str(own.index)]
        for name, tokens in (("given", own.given), ("output", own.output), ("tail", own.tail)):
            assert tuple(drawn[name]["ids"]) == tokens.ids and len(drawn[name]["text"]) == len(tokens.ids)
            assert drawn[name]["logprobs"] == list(tokens.logprobs)
        assert drawn["versions"] == [[each.version, each.start, each.end] for each in own.versions]
    assert [(each["state"], each["reason"]) for each in data.values()] == [
        ("trained", ""),
        ("masked", "sampling"),
        ("dropped", "aborted"),
    ]
    assert "".join(data["1"]["output"]["text"]).startswith("é世 </pre></script>")
    assert "forks from turn 0" in page and "made more likely (advantage +1.50)" in page
    page = render(episode, trained=dict.fromkeys((0, 1, 2), "trained"), advantage=-1.5)
    assert "made less likely (advantage \N{MINUS SIGN}1.50)" in page


def test_hostile_text_is_inert() -> None:
    task = Task(EVIL, EVIL, EVIL, "", EVIL.encode(), repository=EVIL, created=EVIL)
    alone = render(make_episode(), around=PageContext(EVIL, notice=EVIL), task=task)
    for page in (render(make_episode(), around=PageContext(EVIL, "run", notice=EVIL), task=task), alone):
        reader = Page(page)
        assert not reader.elements & {"img", "iframe", "object"}
        assert page.count("<script") == 3, "the data of the page, twice, and our own"
        assert not {name for name in reader.attributes if name.startswith("on")}
        assert "default-src 'none'" in page and "unsafe-inline'; script-src" in page
        assert not re.search(r"""["'(]https?://(?!www\.w3\.org/2000/svg)|@import|url\(""", page)
        assert not set("\u202e\x1b\x00") & set(page)
        assert "{{ 7*7 }}" in html.unescape(page)
        page.encode()


def test_patch_scores_and_timings_are_shown() -> None:
    task = Task("t", "It is broken.", "python", "", b"diff --git a/x b/x\n@@ -1 +1 @@\n-old <b>\n+right\n")
    page = render(make_episode(), task=task)
    assert page.count('<code class="del both">-old &lt;b&gt;</code>') == 2, "in the attempt and in the reference"
    assert '<code class="add">+new \ufffd</code>' in page and '<code class="add">+right</code>' in page
    assert "+1 \u22121" in page and "It is broken." in page
    assert "0.250" in page and "✓ checks passed" in page and "measured only" in page
    assert "Similarity of the changed lines" in page and "Known weaknesses" in page, "the reward is explained"
    assert "generate 1.0 s" in page and "other 1.0 s" in page


def test_an_empty_episode_and_an_empty_run_have_pages(tmp_path: Path) -> None:
    empty = make_episode(turns=(), tool_calls=(), patch=b"", scores=(), timings={}, fault=f"SandboxFault: {EVIL}")
    page = render(dataclasses.replace(empty, ending=Ending.VOID))
    assert "never called" in page and "SandboxFault" in page and "left as it was" in page
    maker = RunMaker(tmp_path / "run")
    maker.log.close()
    assert read_embedded_data(Site([maker.folder.path]).page("run/index.html"))["rows"] == []
    maker.folder.log.unlink()
    assert read_embedded_data(Site([maker.folder.path]).page("run/index.html"))["rows"] == []


def test_a_crash_is_shown_with_its_reward_and_how_it_broke() -> None:
    how = f"mine ended with exit code 1: {EVIL}\nKeyError: 'cmd'"
    crashed = dataclasses.replace(
        make_episode(), ending=Ending.CRASH, reason="exit 1", crash=how, printed="no such model"
    )
    page = render(crashed)
    assert '<span class="badge crash">crash · exit 1</span>' in page
    assert "KeyError: &#39;cmd&#39;" in page and "no such model" in page
    assert f"<b>{crashed.reward:.3f}</b><span>reward</span>" in page


def test_a_conversation_has_its_calls_with_what_came_of_them() -> None:
    edit = json.dumps({"path": "x.py", "old_string": "a - b", "new_string": "a + b"})
    system = {"role": "system", "content": [{"type": "text", "text": "be"}]}
    answer = {"role": "tool", "content": "x.py", "tool_call_id": "call-ls"}
    turns = (
        make_turn(0, None, "", "x", messages=(system, make_call_message("ls", {}))),
        make_turn(1, 0, "", "x", messages=(answer, make_call_message("edit", edit))),
        make_turn(2, 1, "", "x", messages=({"role": "assistant", "content": "done", "reasoning_content": "hm"},)),
    )
    calls = (ToolCall(0, "ls", "{}", True), ToolCall(1, "edit", edit, False), ToolCall(1, "unasked", "{}", True))
    episode = make_episode(turns=turns, tool_calls=calls)
    said = build_conversation(episode)
    assert [message.role for message in said[0]] == ["system", "assistant"] and said[0][0].text == "be"
    assert said[1][0].label == "ls", "a tool's answer says whose it is"
    assert [(call.name, call.result and call.result.ok) for call in said[1][1].calls] == [("edit", False)]
    assert [field.kind for field in said[1][1].calls[0].fields] == ["", "del", "add"]
    assert (said[2][0].text, said[2][0].thought) == ("done", "hm")
    assert [call.name for call in find_unrecorded_calls(episode)] == ["unasked"]
    assert [node.title for node in build_turn_tree(episode, said)] == ["ls", "edit x.py", "done"]


def test_forks_have_lanes_of_their_own() -> None:
    turns = [
        make_turn(0, None, "a", "b"),
        make_turn(1, 0, "a", "b"),
        make_turn(2, 0, "a", "b"),
        make_turn(3, 1, "a", "b"),
    ]
    turns.append(make_turn(4, None, "a", "b", fork=Fork(3, 1, 1)))
    turns.append(make_turn(5, None, "a", "b"))
    episode = make_episode(turns=tuple(turns))
    nodes = build_turn_tree(episode, build_conversation(episode))
    assert [(node.lane, node.parent) for node in nodes] == [(0, None), (0, 0), (1, 0), (0, 1), (2, 3), (3, None)]
    assert "forks from turn 0" in render(episode) and "forks inside turn 3" in render(episode)


@given(st.binary(max_size=40))
def test_pieces_are_one_per_token_and_lose_no_text(data: bytes) -> None:
    shown = decode_pieces(tuple(data), decode)
    assert len(shown) == len(data)
    text = data.decode(errors="replace")
    if "\ufffd" not in text:
        assert "".join(shown) == text


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_name_has_a_file_of_its_own(one: str, other: str) -> None:
    name = file_name(one)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,110}", name), name
    assert (name == file_name(other)) == (one == other)


@pytest.fixture
def run(tmp_path: Path, miniature: Path) -> RunFolder:
    """A run of two groups and an evaluation, written as the loop writes it."""
    folder = RunFolder(tmp_path / "run")
    config = Config.model_validate({"run": {"name": "run"}, "model": {"path": str(miniature)}})
    folder.create(to_toml(config), {"name": "run", "seed": 0})
    log = folder.writer()
    rewards = {"a-00": 1.0, "a-01": 0.0, "b-00": 0.5, "b-01": 0.5}
    for id, reward in rewards.items():
        log_episode(log, dataclasses.replace(make_episode(id), group=id[0], scores=(Score("patch_lines", reward),)))
    advantages = {"a-00": 1.0, "a-01": -1.0}  # both of b earned the same
    log.append("step", step=1, episodes=list(rewards), advantages=advantages, metrics={}, account=TokenAccount())
    log_episode(log, dataclasses.replace(make_episode("late-00"), group="late"))
    log_episode(log, dataclasses.replace(make_episode("e-00"), phase="eval", group="e"))
    log.append("episode", id="open-00", phase="eval", step=1, group="open", attempt=0, task="t", seed=1)
    log.append("turn", episode="open-00", turn=make_episode().turns[0])
    log.close()
    return folder


def log_episode(log: object, episode: Episode) -> None:
    append = log.append  # type: ignore[attr-defined]
    about = {"phase": episode.phase, "group": episode.group, "task": episode.task_id}
    append("episode", id=episode.id, step=1, attempt=0, seed=1, **about)
    for each in episode.turns:
        append("turn", episode=episode.id, turn=each)
    append("verdict", verdict=dataclasses.replace(episode, turns=()))


def read_list(site: Site, folder: str = "run") -> dict[str, dict[str, Any]]:
    data = read_embedded_data(site.page(f"{folder}/index.html"))
    assert tuple(data["cells"]) == CELLS
    rows = [dict(zip(CELLS, row, strict=True)) for row in data["rows"]]
    return {row["id"]: row for row in rows}


@pytest.mark.parametrize(
    ("terms", "shown"),
    [
        ({"algorithm": "ppo"}, 0.25),
        ({"overlong_buffer": 9, "mask_truncated": True}, 0.25),
        ({"algorithm": "ppo", "value_head": True}, None),
    ],
)
def test_advantages_are_those_of_the_step(
    terms: dict[str, Any], shown: float | None, tmp_path: Path, miniature: Path
) -> None:
    """With a value head, tokens have different ones, and none is shown."""
    folder = RunFolder(tmp_path / "run")
    about = {"run": {"name": "run"}, "model": {"path": str(miniature)}, "reward": "patch_lines", "train": terms}
    folder.create(to_toml(Config.model_validate(about)), {"name": "run", "seed": 0})
    log = folder.writer()
    for id in ("a-00", "a-01", "a-02"):
        ending = Ending.LIMIT if id == "a-02" else Ending.DONE
        log_episode(
            log, dataclasses.replace(make_episode(id), group="a", ending=ending, scores=(Score("patch_lines", 1.0),))
        )
    site = Site([folder.path])
    assert {row["advantage"] for row in read_list(site).values()} == {None}
    account = {"metrics": {}, "account": TokenAccount()}
    log.append("step", step=1, episodes=["a-00", "a-01", "a-02"], advantages={"a-00": 0.25}, **account)
    log.close()
    site = Site([folder.path])
    assert [row["advantage"] for row in read_list(site).values()] == [shown, None, None]
    states = [read_embedded_data(site.page(f"run/episode/{id}.html"))["0"] for id in ("a-00", "a-01", "a-02")]
    assert [each["state"] for each in states] == ["trained", "dropped", "dropped"]
    masked = "truncated" if "mask_truncated" in terms else "flat_group"
    assert [each["reason"] for each in states[1:]] == ["flat_group", masked]


def test_the_list_has_the_values_that_episodes_are_found_by(run: RunFolder) -> None:
    rows = read_list(Site([run.path]))
    assert list(rows) == ["a-00", "a-01", "b-00", "b-01", "late-00", "e-00", "open-00"]
    assert [rows[name]["advantage"] for name in ("b-00", "late-00", "e-00")] == [None] * 3
    assert rows["a-00"]["advantage"] == 1.0 == -rows["a-01"]["advantage"]
    first = rows["a-00"]
    assert (first["reward"], first["ending"], first["turns"], first["calls"], first["failed"]) == (1.0, "done", 3, 2, 1)
    assert (first["added"], first["deleted"], first["seconds"]) == (1, 1, 2.0)
    assert first["tokens"] == make_episode().sampled and first["tools"][0] == "shell"
    assert (rows["open-00"]["ending"], rows["open-00"]["reward"], rows["open-00"]["turns"]) == ("open", None, 1)


def test_tokens_are_shown_as_they_were_used(run: RunFolder) -> None:
    site = Site([run.path])

    def list_states(name: str) -> list[str]:
        return [
            f"{each['state']} {each['reason']}".strip()
            for each in read_embedded_data(site.page(f"run/episode/{name}.html")).values()
        ]

    assert list_states("a-00") == ["trained", "trained", "dropped aborted"]
    assert list_states("b-00") == ["dropped flat_group"] * 3
    assert list_states("late-00") == ["sampled no step has consumed it"] * 3
    assert list_states("e-00") == ["sampled evaluation"] * 3, (
        "tokens of an evaluation are not dropped: nothing is struck through"
    )
    assert list_states("open-00") == ["sampled open"]
    assert "No tokenizer" not in site.page("run/episode/a-00.html")


def test_a_missing_tokenizer_is_said(run: RunFolder) -> None:
    config = run.config.read_text()
    path = json.loads(re.search(r'^path = (".*")$', config, re.MULTILINE)[1])  # type: ignore[index]
    run.config.write_text(config.replace(path, "/nonexistent"))
    page = Site([run.path]).page("run/episode/a-00.html")
    assert "No tokenizer was found" in page
    assert read_embedded_data(page)["0"]["output"]["text"][0] == "⟨108⟩"


def test_pages_of_a_damaged_run_show_the_rest_and_a_notice(run: RunFolder) -> None:
    with run.log.open("ab") as log:
        log.write(b"{ no\n")
    run.config.write_text("[train]\nno = 1\n")
    site = Site([run.path])
    assert len(read_list(site)) == 7 and "config.toml cannot be read" in site.page("run/index.html")
    assert "damaged at line" in site.page("run/index.html")
    assert "sampled" in site.page("run/episode/a-00.html")


def test_open_episodes_of_an_ended_process_are_unfinished(run: RunFolder) -> None:
    log = run.writer()
    log.append("start", step=0)
    log.close()
    site = Site([run.path])
    assert read_list(site)["open-00"]["ending"] == "unfinished"
    assert "unfinished" in site.page("run/episode/open-00.html")


def test_every_link_of_a_written_folder_leads_somewhere(tmp_path: Path, run: RunFolder) -> None:
    made = write_run(tmp_path / "a run's <name>", 2, evaluations=(0, 2), run={"name": "x"})
    first = Site([run.path, made]).write(tmp_path / "pages")
    assert first == tmp_path / "pages/index.html"
    pages = sorted((tmp_path / "pages").rglob("*.html"))
    reached, ahead = set(), [first]
    while ahead:
        page = ahead.pop()
        if page in reached or page.suffix != ".html":
            continue
        reached.add(page)
        text = page.read_text()
        links = [each.partition("#")[0] for each in Page(text).links]
        for link in filter(None, links):
            there = (page.parent / html.unescape(link)).resolve()
            assert there.is_file(), (page, link)
            ahead.append(there)
        if page.name == "index.html" and page != first:
            rows = read_embedded_data(text)["rows"]
            cells = [dict(zip(CELLS, row, strict=True)) for row in rows]
            ahead += [page.parent / f"episode/{row['page'] or row['id']}.html" for row in cells]
            ahead += [page.parent / f"group/{row['group_page'] or row['group']}.html" for row in cells]
    assert reached == set(pages)
    assert not list((tmp_path / "pages").rglob(".*")), "no temporary file stays"


def test_groups_are_compared_turn_by_turn_and_tasks_over_steps(run: RunFolder, tmp_path: Path) -> None:
    page = Site([run.path]).page("run/group/a.html")
    assert page.count("attempt 0</a></th>") == 2
    assert page.count('class="shared"') == 3, "the second attempt has the turns of the first"
    site = Site([write_run(tmp_path / "made", steps=3, evaluations=(0, 3))])
    rows = read_list(site, "made").values()
    task = next(row["task"] for row in rows if row["phase"] == "eval")
    same = [row for row in rows if row["task"] == task]
    page = site.page(f"made/task/{file_name(task)}.html")
    assert len({row["step"] for row in same}) > 1
    assert all(page.count(f"../episode/{row['id']}.html") >= 1 for row in same)


def test_a_single_page_has_everything_in_it(run: RunFolder, tmp_path: Path) -> None:
    site = Site([run.path])
    path = site.write_episode("a-00")
    assert path == run.path / "report/a-00.html"
    page = path.read_text()
    assert Page(page).links == [link for link in Page(page).links if link.startswith("#")]
    assert "script-src 'sha256-" in html.unescape(page) and "<style>" in page and read_embedded_data(page)
    assert site.write_episode("e", tmp_path / "x/y.html") == tmp_path / "x/y.html"


def test_missing_runs_and_unclear_episode_ids_are_refused(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not a run folder"):
        Site([tmp_path / "empty"])
    with pytest.raises(UsageError) as raised:
        Site([run.path]).choose_first_path("a-03")
    assert "a-00" in raised.value.fix
    with pytest.raises(UsageError, match="2 episodes have an id that begins with"):
        Site([run.path]).choose_first_path("a-0")


def test_the_command_writes_a_folder_or_a_page(run: RunFolder, tmp_path: Path) -> None:
    crrl = Path(sys.executable).parent / "crrl"

    def run_report(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([crrl, "report", *map(str, words)], capture_output=True, text=True, env={**os.environ})

    done = run_report(run.path)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"{run.path}/report/index.html\n",
        f"reading     {run.path}\n",
    )
    done = run_report(run.path, "--episode", "a-00", "-o", tmp_path / "a.html")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/a.html\n")
    done = run_report(run.path, "a-00")
    assert done.returncode == 2 and "--episode a-00" in done.stderr
    done = run_report(run.path, "-o", tmp_path / "alone.html")
    assert done.stdout == f"{tmp_path}/alone.html\n" and Page((tmp_path / "alone.html").read_text()).links == []
    write_run(tmp_path / "other")
    done = run_report(tmp_path)  # the runs in a folder
    assert done.stdout == f"{tmp_path}/other/report/compare/index.html\n"


@pytest.fixture
def maker(tmp_path: Path) -> RunMaker:
    made = RunMaker(tmp_path / "run")
    made.start()
    made.attempt("first", 0, "train", 1, "toy/one")
    return made


@pytest.fixture
async def url(maker: RunMaker) -> AsyncIterator[str]:
    server = Server(Site([maker.folder.path], live=True))
    yield await server.start()
    await server.stop()
    maker.log.close()


async def get(url: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as answer:
        return answer.status, await answer.text(), answer.headers


async def get_json(url: str) -> Any:
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        assert answer.status == 200 and answer.content_type == "application/json"
        return await answer.json()


async def test_a_live_server_shows_new_records_at_once(url: str, maker: RunMaker) -> None:
    status, page, _ = await get(url)
    assert status == 200 and "1</b><span>training episodes" in page
    status, page, _ = await get(f"{url}/run/index.html")
    assert status == 200 and "first-00" in page
    before = await get_json(f"{url}/run/rows.json?since=0")
    assert [row[0] for row in before["rows"]] == ["first-00"]
    assert (await get_json(f"{url}/run/rows.json?since={before['state']}"))["rows"] == []
    maker.record("episode", id="next", phase="eval", step=1, group="next", attempt=0, task="toy/two", seed=1)
    after = await get_json(f"{url}/run/rows.json?since={before['state']}")
    assert [dict(zip(CELLS, row, strict=True))["ending"] for row in after["rows"]] == ["open"]
    assert await get_json(f"{url}/run/state.json?page=next") == {"ending": "open", "turns": 0}
    status, page, _ = await get(f"{url}/run/episode/next.html")
    assert status == 200 and "never called yet" in page
    assert (await get_json(f"{url}/run/search.json?text=TOY/two"))["found"] == []
    assert (await get_json(f"{url}/run/search.json?text=FIRST-00"))["found"] == ["first-00"]


async def test_only_requests_by_a_name_of_this_machine_are_answered(url: str) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example:80", "10.0.0.1", ""):
        status, page, _ = await get(f"{url}/run/index.html", Host=host)
        assert status in (400, 403) and "first" not in page
    for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):
        status, _, headers = await get(f"{url}/run/index.html", Host=host)
        assert status == 200 and headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Content-Type-Options"] == "nosniff"


async def test_unknown_addresses_are_not_found(url: str) -> None:
    for path in (
        *("none", "run", "run/", "run/episode/none.html", "run/rows.json", "run/rows.json?since=x", "run/text.js"),
        *("run/state.json?page=none", "run/search.json", "assets/kit.py", "../../etc/passwd", "run/log.jsonl"),
        *("assets/..%2f..%2fkit.py", "%00", "run/episode/%ff.html"),
    ):
        status, text, _ = await get(f"{url}/{path}")
        assert (status, text) == (404, "page not found\n"), path


async def test_a_fault_in_a_page_is_no_missing_page(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "reports", lambda site: {}["broken"])
    assert (await get(f"{url}/index.html"))[0] == 500


async def test_the_command_serves_until_it_is_interrupted(maker: RunMaker) -> None:
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
async def test_after_a_malformed_record_pages_show_what_came_before_and_a_notice(
    record: str, url: str, maker: RunMaker
) -> None:
    with maker.folder.log.open("a") as log:
        log.write(f"{record}\n")
    for path in ("index.html", "run/index.html"):
        status, page, _ = await get(f"{url}/{path}")
        assert status == 200 and "The log is damaged at line" in page
    assert "first-00" in page
    assert (await get(f"{url}/run/group/first.html"))[0] == 200
    assert Site([maker.folder.path]).write(maker.folder.path / "pages").is_file()


def test_a_huge_patch_is_cut_on_pages() -> None:
    lines = parse_diff_lines(b"@@ -0,0 +1 @@\n" + b"+x\n" * (1 << 20))
    assert len(lines) < 100_000 and lines[-1].text == "(2,883,598 bytes more are not shown)"


async def test_a_taken_port_is_refused(url: str, maker: RunMaker) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        await Server(Site([maker.folder.path], live=True)).start(int(url.rpartition(":")[2]))
