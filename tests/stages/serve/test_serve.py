"""crrl serve: real processes, official SDKs, and plain chat clients whose conversations are sessions."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from fix.conftest import set_replies
from openai import APIStatusError, OpenAI

from coderepairrl.errors import UsageError
from coderepairrl.gateway import Gateway, Remote
from coderepairrl.runs import logged_episodes, open_run
from coderepairrl.stages.serve import AdminServer
from coderepairrl.stages.sessions import Sessions
from coderepairrl.types import Limits, Sampling

from .conftest import Served, Start, make_command

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "serve.md"
ASK: Any = [{"role": "user", "content": "Repair it."}]
KEY = "sk-very-secret-key"


def openai(session: dict[str, Any]) -> OpenAI:
    return OpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0)


def ids(described: dict[str, Any], leaf: int) -> list[int]:
    """Context of the engine after a turn, from the tree alone."""
    turn = described["turns"][leaf]
    before = [] if turn["base"] is None else ids(described, turn["base"])
    if fork := turn["fork"]:
        before = ids(described, fork["turn"])[: fork["tokens"]]
    return [*before, *turn["given"]["ids"], *turn["output"]["ids"]]


def test_the_example_of_the_docs(tiny: Served, miniature: Path) -> None:
    [example] = re.findall(r"```python\n# episode.py\n(.*?)```", DOCS.read_text(), re.S)
    environment = {**os.environ, "ADMIN": tiny.where["admin"].removeprefix("unix:"), "MODEL": str(miniature)}
    done = subprocess.run([sys.executable, "-c", example], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["0", "after", "None"],
        ["1", "after", "0"],
        ["2", "after", "1"],
    ]
    assert "of them trained, weight 1.0" in lines[3]
    assert lines[4] == "serving version 1"


def test_a_session_is_a_tree_of_exact_tokens(tiny: Served) -> None:
    session = tiny.open(id="mine", seed=3, limits={"tokens": 1000}, sampling={"max_tokens": 8})
    assert (session["limits"]["tokens"], session["sampling"]["max_tokens"], session["model"]) == (1000, 8, "policy")
    sdk = openai(session)
    first = sdk.chat.completions.create(model="policy", messages=ASK, temperature=0.1).choices[0].message.content
    more = [*ASK, {"role": "assistant", "content": first or ""}, {"role": "user", "content": "Again."}]
    sdk.chat.completions.create(model="policy", messages=more)
    Anthropic(base_url=session["root_url"], api_key="any", max_retries=0).messages.create(
        model="policy", messages=[{"role": "user", "content": "Something else."}], max_tokens=4
    )
    assert tiny.describe(session)["open"]
    described = tiny.close(session)
    version = tiny.host.get("/weights").json()["version"]
    assert [turn["base"] for turn in described["turns"]] == [None, 0, None]
    assert [turn["dialect"] for turn in described["turns"]] == ["chat", "chat", "messages"]
    assert [(turn["fate"], turn["reason"]) for turn in described["turns"]] == [("trained", "")] * 3
    assert described["turns"][0]["overridden"] == ["temperature=0.1"]
    for turn in described["turns"]:
        said = len(turn["output"]["ids"])
        assert len(turn["output"]["logprobs"]) == said > 0
        assert turn["versions"] == [{"version": version, "start": 0, "end": said}]
        assert turn["finish"] in ("stop", "length")
    assert {tuple(row["ids"]) for row in described["rows"]} == {tuple(ids(described, 1)), tuple(ids(described, 2))}
    assert sum(row["weight"] for row in described["rows"]) == pytest.approx(1.0)
    account = described["account"]
    assert account["sampled"] == account["trained"] == sum(sum(row["trained"]) for row in described["rows"])
    with pytest.raises(APIStatusError) as closed:
        sdk.chat.completions.create(model="policy", messages=ASK)
    assert closed.value.status_code == 410
    assert tiny.host.get("/sessions/mine").status_code == 404
    log = {episode.id: episode for episode in logged_episodes(open_run(Path(tiny.where["log"])).records())}
    assert [turn.output.ids for turn in log["mine"].turns] == [tuple(t["output"]["ids"]) for t in described["turns"]]


def test_the_hosts_api_is_for_its_owner_only(tiny: Served) -> None:
    session = tiny.open(id="once")
    assert tiny.host.post("/sessions", json={"id": "once"}).status_code == 409
    assert "once" in [line["id"] for line in tiny.host.get("/sessions").json()["sessions"]]
    assert tiny.host.get("/nowhere").status_code == 404
    assert stat.S_IMODE(Path(tiny.where["admin"].removeprefix("unix:")).stat().st_mode) == 0o600
    for path in ("/sessions", "/weights"):
        answer = httpx.get(tiny.where["gateway"] + path, headers={"Authorization": f"Bearer {session['key']}"})
        assert answer.status_code == 404, "agents find none of it at the gateway"
    tiny.close(session)


def test_a_remote_is_relayed_and_its_key_is_recorded_nowhere(
    tiny: Served, start: Start, tmp_path: Path, miniature: Path
) -> None:
    upstream = tiny.open(sampling={"max_tokens": 6})
    url = upstream["base_url"]
    log = tmp_path / "log"
    relay = start(url, "--key-env", "THEIR_KEY", "--admin-port", "0", "--log", str(log), THEIR_KEY=KEY)
    session = relay.open()
    assert openai(session).models.retrieve("their-name").id == "their-name"
    reply = openai(session).chat.completions.create(model="policy", messages=ASK)
    relayed, real = relay.close(session), tiny.close(upstream)
    [turn], [sampled] = relayed["turns"], real["turns"]
    assert reply.usage is not None and reply.usage.completion_tokens == len(sampled["output"]["ids"])
    assert turn["remote"]["usage"]["completion_tokens"] == len(sampled["output"]["ids"])
    assert (turn["fate"], turn["reason"]) == ("dropped", "relayed")
    assert relayed["rows"] == [] and relayed["account"]["sampled"] == 0
    assert relay.host.post("/weights", json={"path": "x", "version": 1, "checksum": "0" * 64}).status_code == 409
    assert relay.host.get("/weights").json() == {"version": None, "loadable": False}
    bare = httpx.get(relay.where["admin"] + "/sessions")
    assert (bare.status_code, bare.json()["error"]["code"]) == (401, "unauthorized")
    code, errors = relay.stop()
    assert (code, "Traceback" in errors) == (0, False), errors
    kept = [path.read_text() for path in log.rglob("*") if path.is_file()]
    assert kept and not [text for text in (*kept, errors, json.dumps(relayed)) if KEY in text]


def test_kill_9_loses_no_committed_turn(start: Start, miniature: Path, tmp_path: Path) -> None:
    """An engine that dies loses none either, and voids its session."""
    log = tmp_path / "log"
    served = start(str(miniature), "--log", str(log), *set_replies("I look.", "Done."))
    session = served.open(id="killed")
    sdk = openai(session)
    for messages, words in ((ASK, "I look."), ([*ASK, *ASK], "Done.")):
        assert sdk.chat.completions.create(model="policy", messages=messages).choices[0].message.content == words
    with pytest.raises(APIStatusError) as broken:
        sdk.chat.completions.create(model="policy", messages=[*ASK, *ASK, *ASK])
    assert broken.value.status_code == 503
    described = served.describe(session)
    assert "2 replies" in described["fault"]
    assert {(turn["fate"], turn["reason"]) for turn in described["turns"]} == {("dropped", "void")}
    code, _ = served.stop(signal.SIGKILL)
    assert code == -signal.SIGKILL
    turns = [record["turn"] for record in open_run(log).records() if record["type"] == "turn"]
    assert [turn["output"]["ids"] for turn in turns] == [turn["output"]["ids"] for turn in described["turns"]]
    assert [turn["masked"] for turn in turns] == ["", "", "fault"]


def test_a_signal_ends_an_engine_that_is_still_being_started(tmp_path: Path, miniature: Path) -> None:
    """A fake vLLM that never finishes loading holds a pipe open."""
    python, pipe = tmp_path / "python", tmp_path / "pipe"
    os.mkfifo(pipe)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec echo vllm 0.32.0\nexec sleep infinity > {pipe}\n')
    python.chmod(0o755)
    arguments = [str(miniature), "--port", "0", "engine=vllm", f"engine.options.python={python}"]
    process = subprocess.Popen(make_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with pipe.open("rb") as alive:  # which waits until it is being started
        process.send_signal(signal.SIGTERM)
        assert alive.read() == b"", "until the last one is gone"
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, ""), errors
    assert "Traceback" not in errors


async def test_the_socket_of_a_live_server_is_refused(tmp_path: Path) -> None:
    source = Remote("http://127.0.0.1:9/v1", model="m")
    sessions = Sessions(Gateway(source, sampling=Sampling(), on_turn=lambda *_: None), Limits())
    address, first = tmp_path / "a.sock", AdminServer(sessions, source)
    await first.start(socket=address)
    with pytest.raises(UsageError, match="in use"):
        await AdminServer(sessions, source).start(socket=address)
    await first.stop()
    again = AdminServer(sessions, source)
    assert await again.start(socket=address) == f"unix:{address}", "a dead one's is"
    await again.stop()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_plain_client_needs_no_session(start: Start) -> None:
    served = start("builtin:tiny", "rollout.turn_tokens=8")
    url = f"{served.where['gateway']}/v1"
    assert served.where["chat"] == url
    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["policy"]

    def ask(messages: list[dict[str, object]]) -> dict[str, object]:
        answer = client.chat.completions.create(model="gpt-x", messages=messages)  # type: ignore[arg-type]
        return {"role": "assistant", "content": answer.choices[0].message.content or ""}

    first: list[dict[str, object]] = [_message("Hello.")]
    first += [ask(first), _message("Go on.")]
    ask(first)
    assert list(_turns(served).values()) == [2], "one conversation, one session"
    ask([_message("Hello.")])
    assert sorted(_turns(served).values()) == [1, 2], "another one that begins alike is another"
    ask(first)
    assert len(_turns(served)) == 2 and sum(_turns(served).values()) == 4, "asked again, it is no new one"
    described = served.host.get(f"/sessions/{next(iter(_turns(served)))}").json()
    assert described["turns"][1]["base"] == 0, "a conversation goes on with its recorded tokens"

    question = {"model": "policy", "stream": True, "messages": first[:1]}
    with httpx.stream("POST", f"{url}/chat/completions", json=question) as streamed:
        assert streamed.status_code == 200 and "[DONE]" in streamed.read().decode(), "as curl does, without any key"
    assert len(_turns(served)) == 3


def test_with_keys_only_a_plain_client_is_refused(start: Start) -> None:
    served = start("builtin:tiny", "--keys-only")
    assert "chat" not in served.where
    url = f"{served.where['gateway']}/v1/chat/completions"
    assert httpx.post(url, json={"messages": [_message("Hello.")]}).status_code == 401


def _turns(served: Served) -> dict[str, int]:
    return {each["id"]: each["turns"] for each in served.host.get("/sessions").json()["sessions"]}


def _message(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def test_a_retry_continues_only_the_conversation_that_its_client_lost(start: Start, miniature: Path) -> None:
    texts = ["Hello, what is to be repaired?"] * 4
    served = start(str(miniature), *set_replies(*texts), "engine.options.endless=2")  # the third waits
    url = f"{served.where['gateway']}/v1/chat/completions"
    question = {"model": "policy", "messages": [_message("Hello.")]}
    again = {"x-stainless-retry-count": "1"}
    assert httpx.post(url, json=question).status_code == 200
    assert httpx.post(url, json=question, headers=again).status_code == 200, "whose first attempt never came"
    assert list(_turns(served).values()) == [1, 1], "another client was answered in whole: it has nothing to retry"

    streamed = {**question, "stream": True}
    with httpx.stream("POST", url, json=streamed, headers={"x-stainless-retry-count": "0"}) as lost:
        assert any('"content":"H' in line.replace(" ", "") for line in lost.iter_lines()), "it leaves within the reply"
    until(lambda: list(_turns(served).values()) == [1, 1, 1])  # what came of it is recorded
    described = served.host.get(f"/sessions/{list(_turns(served))[2]}").json()
    assert described["turns"][0]["finish"] == "abort"
    assert httpx.post(url, json=streamed, headers=again).status_code == 200
    assert list(_turns(served).values()) == [1, 1, 2], "its own"


def test_a_conversation_beyond_its_time_goes_on_in_a_new_session(start: Start) -> None:
    served = start("builtin:tiny", "rollout.turn_tokens=8", "rollout.seconds=1")
    url = f"{served.where['gateway']}/v1/chat/completions"
    begun = [_message("Hello.")]
    answer = httpx.post(url, json={"model": "policy", "messages": begun}).raise_for_status().json()
    time.sleep(1.1)
    begun += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""}, _message("Go on.")]
    assert httpx.post(url, json={"model": "policy", "messages": begun}).status_code == 200
    assert list(_turns(served).values()) == [1, 1]
