"""Pages show every token with what became of it, whatever a hostile model wrote."""

from __future__ import annotations

import dataclasses
import html
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.config import Config, to_toml
from coderepairrl.errors import UsageError
from coderepairrl.report.view import Row, render, render_episode, render_index
from coderepairrl.report.view.text import pieces, visible
from coderepairrl.runs import RunFolder
from coderepairrl.types import Ending, Episode, Origin, Score, TokenSpan, ToolCall, Turn, VersionRange
from pages import Page

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> \u202e\x1b[31m\x00 \"' {{ 7*7 }}"


def decode(ids: Sequence[int]) -> str:
    """Ids are bytes."""
    return bytes(ids).decode(errors="replace")


def span(text: str, origin: Origin = Origin.POLICY) -> TokenSpan:
    ids = tuple(text.encode(errors="replace"))
    return TokenSpan(ids, origin, tuple(-0.25 * (i % 4) for i in range(len(ids))) if origin is Origin.POLICY else ())


def turn(index: int, base: int | None, given: str, output: str, tail: str = "", **more: object) -> Turn:
    versions = (VersionRange(7, 0, 2), VersionRange(8, 2, len(output.encode()) + len(tail)))
    return Turn(index, base, span(given, Origin.GIVEN), span(output), span(tail), versions, **more)  # type: ignore[arg-type]


def make(id: str = "s00001-g00-00", **more: object) -> Episode:
    turns = (
        turn(0, None, f"issue: {EVIL}", "look"),
        turn(1, 0, "result", f"é世 {EVIL}", "tail"),
        turn(2, 0, "other", "half", masked="aborted"),
    )
    calls = (ToolCall(0, "shell", EVIL, True, 5, 0.1, "ls"), ToolCall(9, EVIL, "{}", False))
    fields: dict[str, object] = {
        "turns": turns,
        "tool_calls": calls,
        "patch": b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old <b>\n+new \xff\n",
        "scores": (Score("patch_lines", 0.25, note=EVIL),),
        "timings": {"generate": 1.0, "total": 2.0},
        "reason": "submitted",
        **more,
    }
    return Episode(id, f"toy/{EVIL}", "train", 1, "s00001-g00", 0, Ending.DONE, **fields)  # type: ignore[arg-type]


def test_every_token_is_there_with_its_facts() -> None:
    episode = make()
    page = render_episode(episode, decode, {0: "trained", 1: "masked:sampling", 2: "dropped:aborted"}, 1.5)
    tokens = Page(page).tokens
    spans = [part for each in episode.turns for part in (each.given, each.output, each.tail)]
    assert len(tokens) == sum(map(len, spans))
    infos = [info for info, _ in tokens]
    assert sum(info.endswith("trained") for info in infos) == 4
    assert sum(info.endswith("masked (sampling)") for info in infos) == len(episode.turns[1].output)
    assert sum(info.endswith("dropped (stop_string)") for info in infos) == 4
    assert sum(info.endswith("dropped (aborted)") for info in infos) == 4
    assert sum(info.startswith("given") for info in infos) == sum(len(each.given) for each in episode.turns)
    assert "policy · id 111 · logprob -0.2500 · version 7 · trained" in infos
    assert "policy · id 107 · logprob -0.7500 · version 8 · trained" in infos
    shown = "".join(text for info, text in tokens if "masked" in info)
    assert shown.startswith("é世 </pre><script>")
    assert "forks from turn 0" in page


def test_hostile_text_is_inert() -> None:
    for page in (render_episode(make(), decode, run=EVIL, notice=EVIL), render_index([Row(make(EVIL))], run=EVIL)):
        reader = Page(page)
        assert not reader.elements & {"script", "img", "iframe", "object", "link", "svg"}
        assert not {name for name in reader.attributes if name.startswith("on")}
        assert "default-src 'none'" in page
        assert not re.search(r"https?://|@import|url\(", page)
        assert not set("\u202e\x1b\x00") & set(page)
        assert "{{ 7*7 }}" in html.unescape(page)
        page.encode()


def test_patch_scores_and_timings_are_shown() -> None:
    page = render_episode(make(), decode)
    assert '<code class="del">-old &lt;b&gt;</code><code class="add">+new \ufffd</code>' in page
    assert "+1 \u22121" in page
    assert "0.250" in page
    assert "generate 1.00 s" in page
    assert "other 1.00 s" in page


def test_an_empty_episode_and_an_empty_run_have_pages() -> None:
    empty = make(turns=(), tool_calls=(), patch=b"", scores=(), timings={}, fault=f"SandboxFault: {EVIL}")
    page = render_episode(dataclasses.replace(empty, ending=Ending.VOID), decode)
    assert "never called" in page
    assert "SandboxFault" in page
    assert "left as it was" in page
    assert "No episode" in render_index([])


def test_a_crash_is_shown_with_its_reward_and_how_it_broke() -> None:
    how = f"mine ended with exit code 1: {EVIL}\nKeyError: 'cmd'"
    crashed = dataclasses.replace(make(), ending=Ending.CRASH, reason="exit 1", crash=how)
    page = render_episode(crashed, decode)
    assert '<span class="badge crash">crash · exit 1</span>' in page
    assert "KeyError: &#39;cmd&#39;" in page
    assert f"<b>{crashed.reward:.3f}</b><span>reward</span>" in page
    index = render_index([Row(crashed, None)])
    assert "crash · exit 1" in index and f"{crashed.reward:.2f}" in index and "<span>crash</span>" in index


def test_what_a_program_printed_is_shown_and_open_where_there_is_no_patch() -> None:
    page = render_episode(dataclasses.replace(make(), printed=f"no such model {EVIL}", patch=b""), decode)
    assert "<details open>" in page and "no such model" in page and "<script>" not in page
    page = render_episode(dataclasses.replace(make(), printed="fine"), decode)
    assert "<details>" in page and "What the program printed" in page
    assert "What the program printed" not in render_episode(make(), decode)


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(ValueError, match="turn 0"):
        render_episode(make(), decode, {0: "perhaps"})


@given(st.text())
def test_visible_text_can_be_written_and_hides_nothing(text: str) -> None:
    shown = visible(text + "\ud800")
    shown.encode()
    assert all(char.isprintable() or char in "\n\t\u200d" or char.isspace() for char in shown)


@given(st.binary(max_size=40))
def test_pieces_are_one_per_token_and_lose_no_text(data: bytes) -> None:
    shown = pieces(tuple(data), decode)
    assert len(shown) == len(data)
    text = data.decode(errors="replace")
    if "\ufffd" not in text:
        assert "".join(piece.text for piece in shown) == text


@pytest.fixture
def run(tmp_path: Path, miniature: Path) -> RunFolder:
    """A run of two groups and an evaluation, written as the loop writes it."""
    folder = RunFolder(tmp_path / "run")
    config = Config.model_validate({"run": {"name": "run"}, "model": {"path": str(miniature)}})
    folder.create(to_toml(config), {"name": "run", "seed": 0})
    log = folder.writer()
    rewards = {"a-00": 1.0, "a-01": 0.0, "b-00": 0.5, "b-01": 0.5}
    for id, reward in rewards.items():
        _log(log, dataclasses.replace(make(id), group=id[0], scores=(Score("patch_lines", reward),)))
    _log(log, dataclasses.replace(make("e-00"), phase="eval", group="e"))
    log.close()
    return folder


def _log(log: object, episode: Episode) -> None:
    append = log.append  # type: ignore[attr-defined]
    append("episode", id=episode.id, phase=episode.phase, step=1, group=episode.group, attempt=0, task="t", seed=1)
    for each in episode.turns:
        append("turn", episode=episode.id, turn=each)
    append("verdict", verdict=dataclasses.replace(episode, turns=()))


def test_a_run_folder_has_an_index_and_pages(run: RunFolder) -> None:
    index = render(run.path)
    assert [id in index for id in ("a-00", "a-01", "b-00", "e-00")] == [True] * 4
    assert index.count("+1.00") == 1
    page = render(run.path, "a-00")
    infos = [info for info, _ in Page(page).tokens]
    assert sum(info.endswith("trained") for info in infos) == 4 + len(make().turns[1].output)
    assert sum(info.endswith("dropped (aborted)") for info in infos) == 4
    assert "dropped (flat_group)" in render(run.path, "b-00")
    assert "dropped (evaluation)" in render(run.path, "e")
    assert "No tokenizer" not in page


def test_with_a_kl_term_flat_groups_are_shown_as_trained(run: RunFolder) -> None:
    run.config.write_text(run.config.read_text().replace("\nbeta = 0.0", "\nbeta = 0.1"))
    page = render(run.path, "b-00")
    assert "dropped (flat_group)" not in page and "trained" in page


def test_a_missing_tokenizer_is_said(run: RunFolder) -> None:
    config = run.config.read_text()
    path = json.loads(re.search(r'^path = (".*")$', config, re.MULTILINE)[1])  # type: ignore[index]
    run.config.write_text(config.replace(path, "/nonexistent"))
    page = render(run.path, "a-00")
    assert "No tokenizer was found" in page
    assert "⟨108⟩" in page


def test_what_is_not_there_is_named(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        render(tmp_path)
    with pytest.raises(UsageError) as raised:
        render(run.path, "a-03")
    assert "a-00" in raised.value.fix
    with pytest.raises(UsageError, match="begins the ids of 2"):
        render(run.path, "a-0")


def test_a_terminal_is_shown_the_command_and_not_the_html(run: RunFolder) -> None:
    controller, terminal = os.openpty()
    crrl = Path(sys.executable).parent / "crrl"
    done = subprocess.run([crrl, "view", run.path], stdout=terminal, stderr=subprocess.PIPE, text=True)
    os.close(terminal)
    os.close(controller)
    assert done.returncode == 2 and f"view {run.path} -o index.html" in done.stderr
    piped = subprocess.run([crrl, "view", run.path], capture_output=True, text=True)
    assert piped.returncode == 0 and piped.stdout.startswith("<!DOCTYPE html>")
