"""`crrl serve` for a plain chat client: a base URL, any key, and each conversation is a session."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from openai import OpenAI

from serve.conftest import Served, Start


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

    def sessions() -> dict[str, int]:
        return {each["id"]: each["turns"] for each in served.host.get("/sessions").json()["sessions"]}

    first: list[dict[str, object]] = [{"role": "user", "content": "Hello."}]
    first += [ask(first), {"role": "user", "content": "Go on."}]
    ask(first)
    assert list(sessions().values()) == [2], "one conversation, one session"
    ask([{"role": "user", "content": "Hello."}])
    assert sorted(sessions().values()) == [1, 2], "another one that begins alike is another"
    ask(first)
    assert len(sessions()) == 2 and sum(sessions().values()) == 4, "asked again, it is not a new one"
    told = served.host.get(f"/sessions/{next(iter(sessions()))}").json()
    assert told["turns"][1]["base"] == 0, "a conversation goes on with its recorded tokens"

    question = {"model": "policy", "stream": True, "messages": first[:1]}
    with httpx.stream("POST", f"{url}/chat/completions", json=question) as streamed:
        assert streamed.status_code == 200 and "[DONE]" in streamed.read().decode(), "as curl does, without any key"
    assert len(sessions()) == 3


def test_whom_it_does_not_answer(start: Start) -> None:
    """Web pages, keys of sessions that are none, and, where it is asked to, everybody without one."""
    question = {"messages": [{"role": "user", "content": "Hello."}]}
    served = start("builtin:tiny")
    url = f"{served.where['gateway']}/v1/chat/completions"
    for headers in ({"Origin": "http://evil.example"}, {"Authorization": f"Bearer {'0' * 32}"}):
        assert httpx.post(url, json=question, headers=headers).status_code == 401
    assert httpx.post(url.replace("/v1", f"/s/{'0' * 32}/v1"), json=question).status_code == 401
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000"):
        assert httpx.post(url, json=question, headers={"Host": host}).status_code == 401, "DNS rebinding"
        assert httpx.get(url.replace("chat/completions", "models"), headers={"Host": host}).status_code == 401
    assert httpx.post(url, content=b"[" * 100_000).status_code == 400
    large = b'{"messages": [' + b"{}," * 400_000 + b"{}]}"
    assert httpx.post(url, content=large).status_code == 413, "who has no session is not read at length"
    assert httpx.post(url, content=iter([large])).status_code == 413
    assert served.host.get("/sessions").json()["sessions"] == []

    closed = start("builtin:tiny", "--keys-only")
    assert "chat" not in closed.where
    assert httpx.post(f"{closed.where['gateway']}/v1/chat/completions", json=question).status_code == 401


def _turns(served: Served) -> dict[str, int]:
    return {each["id"]: each["turns"] for each in served.host.get("/sessions").json()["sessions"]}


def _said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_retry_is_let_into_no_conversation_but_the_one_that_its_client_lost(start: Start, miniature: Path) -> None:
    texts = json.dumps(["Hello, what is to be repaired?"] * 4)
    third_waits = ["engine=fix_engines:Says", f"engine.options.texts={texts}", "engine.options.endless=2"]
    served = start(str(miniature), *third_waits)
    url = f"{served.where['gateway']}/v1/chat/completions"
    question = {"model": "policy", "messages": [_said("Hello.")]}
    again = {"x-stainless-retry-count": "1"}
    assert httpx.post(url, json=question).status_code == 200
    assert httpx.post(url, json=question, headers=again).status_code == 200, "whose first attempt never came"
    assert list(_turns(served).values()) == [1, 1], "another client was answered in whole: it has nothing to retry"

    streamed = {**question, "stream": True}
    with httpx.stream("POST", url, json=streamed, headers={"x-stainless-retry-count": "0"}) as lost:
        assert any('"content":"H' in line.replace(" ", "") for line in lost.iter_lines()), "it leaves within the reply"
    until(lambda: list(_turns(served).values()) == [1, 1, 1])  # what came of it is recorded
    told = served.host.get(f"/sessions/{list(_turns(served))[2]}").json()
    assert told["turns"][0]["finish"] == "abort"
    assert httpx.post(url, json=streamed, headers=again).status_code == 200
    assert list(_turns(served).values()) == [1, 1, 2], "its own"


def test_a_conversation_beyond_its_time_goes_on_in_a_new_session(start: Start) -> None:
    served = start("builtin:tiny", "rollout.turn_tokens=8", "rollout.seconds=1")
    url = f"{served.where['gateway']}/v1/chat/completions"
    begun = [_said("Hello.")]
    answer = httpx.post(url, json={"model": "policy", "messages": begun}).raise_for_status().json()
    time.sleep(1.1)
    begun += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""}, _said("Go on.")]
    assert httpx.post(url, json={"model": "policy", "messages": begun}).status_code == 200
    assert list(_turns(served).values()) == [1, 1]
