"""Trees, retries, limits, bad input and lifetimes, with raw HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.errors import GatewayFault, RunError, UsageError
from coderepairrl.gateway import Gateway, PolicySource, Session, chat, source
from coderepairrl.gateway.request import PrefixKeys
from coderepairrl.types import Finish, Fork, Sampling, conversation

from .conftest import SHELL, Said, World, check_exact_ids, wait_until
from .speech import post

ASK = ({"role": "system", "content": "Repair."}, {"role": "user", "content": "Fix it."})


async def raw(where: Session, body: Any, **headers: str) -> tuple[int, Any]:
    status, reply = await post(where, "chat", body, **headers)
    return status, json.loads(reply)


async def ask(where: Session, messages: Any = ASK, *, retry: int | None = 0, **fields: Any) -> Any:
    status, reply = await try_to_ask(where, messages, retry=retry, **fields)
    assert status == 200, reply
    return reply


async def try_to_ask(where: Session, messages: Any = ASK, *, retry: int | None = 0, **fields: Any) -> Any:
    headers = {} if retry is None else {"x-stainless-retry-count": str(retry)}
    return await raw(where, {"model": "policy", "messages": list(messages), **fields}, **headers)


_TEXTS = st.sampled_from(("", "a", "b", " a", "calls", "a\n"))
_MESSAGES = st.lists(
    st.one_of(
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(("user", "assistant")), _TEXTS),
        st.builds(
            lambda text, said: {
                "role": "assistant",
                "content": text,
                "tool_calls": [{"id": text, "function": {"name": "shell", "arguments": said}}],
            },
            _TEXTS,
            st.sampled_from(("{}", '{"cmd": "ls"}', '{"cmd":"ls"}', "{", '{"seconds": 5}')),
        ),
    ),
    max_size=4,
)
_TOOLS = st.sampled_from(
    tuple(
        [{"type": "function", "function": {"name": "shell", "parameters": {"properties": {"seconds": described}}}}]
        for described in ({}, {"default": 1}, {"default": True}, {"default": 5})
    )
)


@given(st.lists(st.tuples(_MESSAGES, _TOOLS), max_size=6))
def test_a_conversation_has_the_same_keys_whichever_came_before(asked: list[tuple[list[Any], list[Any]]]) -> None:
    names = PrefixKeys()
    for messages, tools in asked:
        found = names.compute(tuple(messages), tools)
        assert found == PrefixKeys().compute(tuple(messages), tools)
        assert len(found) == len(messages) + 1


def test_a_conversation_that_cannot_be_hashed_leaves_nothing_behind() -> None:
    names, broken = PrefixKeys(), (user("\ud800"), user("and this"))
    for _ in range(2):  # a repeated request fails the same way
        with pytest.raises(UnicodeEncodeError):
            names.compute(broken, ())
    assert names.compute((user("fix it"), *broken[1:]), ()) == PrefixKeys().compute((user("fix it"), *broken[1:]), ())


def message(reply: Any) -> dict[str, Any]:
    found: dict[str, Any] = reply["choices"][0]["message"]
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_call_that_our_own_bug_ends_is_a_fault_and_no_retry_joins_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's end, which follows from it, is no doing of the policy's."""
    session = world.open()
    with monkeypatch.context() as broken:
        broken.setattr(world.gateway.source, "begin", None)
        assert [(await try_to_ask(session, retry=count))[0] for count in (0, 1)] == [503, 503]
    assert isinstance(session.fault, GatewayFault) and "NoneType" in str(session.fault)
    assert (await try_to_ask(session, retry=2))[0] == 503
    assert session.turns == ()
    other = world.open("another")
    assert (await ask(other))["crrl"]["turn"] == 0


async def test_a_bug_before_a_call_begins_is_a_fault(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    session = world.open()
    with monkeypatch.context() as broken:
        broken.setattr(type(session), "parse", None)
        assert (await try_to_ask(session))[0] == 500
    assert isinstance(session.fault, GatewayFault) and "NoneType" in str(session.fault)
    assert session.turns == ()


async def test_an_absurd_count_of_retries_is_ignored(world: World) -> None:
    """A program in a sandbox can send such a header, and must not void its episode by it."""
    session = world.open()
    body = {"model": "policy", "messages": list(ASK)}
    status, _ = await raw(session, body, **{"x-stainless-retry-count": "9" * 5000})
    assert (status, session.fault) == (200, None)


class TestTree:
    async def test_a_client_may_trim_rename_and_reformat_what_it_sends_back(self, world: World, said: Said) -> None:
        world.engine.script = lambda *_: said("I look.", ("shell", {"cmd": "ls", "n": 1}))
        session = world.open()
        await ask(session, tools=[SHELL])
        back = {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look. \n"}],
            "reasoning_content": "made up",
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "shell", "arguments": '{"n":1,"cmd":"ls"}'}}
            ],
        }
        await ask(session, [*ASK, back, {"role": "tool", "tool_call_id": "x", "content": "a"}], tools=[SHELL])
        assert [turn.base for turn in session.turns] == [None, 0]
        check_exact_ids(session.turns, world.engine)

    @pytest.mark.parametrize(
        ("sampled", "sent", "rewritten"),
        [
            ({"path": "a", "n": 3.0}, '{"path": "a", "all": false}', False),  # defaults of the tool are filled in
            ({"path": "a", "n": 3.0}, '{"path": "a", "all": true}', True),
            ({}, "", False),
            ({}, "null", False),
            # as Claude Code 2.1.330 rewrites its own calls
            ({"command": "cd /workspace && cat calc.py"}, '{"command": "cat calc.py"}', True),
            ({"content": "x = 1   \n\n\n"}, '{"content": "x = 1\\n\\n\\n"}', True),
        ],
    )
    async def test_a_call_is_what_was_sampled_however_its_arguments_come_back(
        self, world: World, said: Said, sampled: dict[str, Any], sent: str, rewritten: bool
    ) -> None:
        properties = {"path": {"type": "string"}, "all": {"type": "boolean", "default": False}, "n": {"default": 3}}
        tool = {"type": "function", "function": {"name": "edit", "parameters": {"properties": properties}}}
        world.engine.script = lambda *_: said("I look.", ("edit", sampled))
        session, messages = world.open(), list(ASK)
        for result in ("one", "two", "three"):
            reply = message(await ask(session, messages, tools=[tool]))
            reply["tool_calls"][0]["function"]["arguments"] = sent
            messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": result}]
        assert [turn.base for turn in session.turns] == [None, 0, 1]
        assert ["rewritten=true" in turn.overridden for turn in session.turns] == [False, rewritten, rewritten]
        check_exact_ids(session.turns, world.engine)

    async def test_a_reply_sent_back_as_several_messages_is_one(self, world: World, said: Said) -> None:
        calls = (("shell", {"cmd": "ls"}), ("shell", {"cmd": "pwd"}))
        world.engine.script = lambda *_: said("I look.", *calls)
        session = world.open()
        first, second = message(await ask(session, tools=[SHELL]))["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in (first, second)]
        words, one, two = (
            {"role": "assistant", "content": text, "tool_calls": calls} | ({} if calls else {"tool_calls": None})
            for text, calls in (("I look.", []), (None, [first]), ("", [second]))
        )
        whole = {"role": "assistant", "content": None, "tool_calls": [first, second]}
        for sent in ([words, whole, *results], [words, one, results[0], two, results[1]], [whole, *results]):
            await ask(session, [*ASK, *sent], tools=[SHELL])
        assert [turn.base for turn in session.turns] == [None, 0, 0, 0]
        await ask(session, [*ASK, one, results[0]], tools=[SHELL])  # a call is left out
        await ask(session, [*ASK, {**whole, "content": "I do not look."}, *results], tools=[SHELL])
        assert [turn.base for turn in session.turns[4:]] == [None, None]
        check_exact_ids(session.turns, world.engine)

    async def test_rewritten_history_forks_where_it_differs(self, world: World, said: Said) -> None:
        world.engine.script = lambda *_: said(f"reply {len(world.engine.seen)}")
        session = world.open()
        first = message(await ask(session))
        second = message(await ask(session, [*ASK, first, user("more")]))
        await ask(session, [*ASK, first, user("more"), second, user("and more")])
        await ask(session, [*ASK, first, user("something else")])  # forks from the first turn
        await ask(session, [*ASK, {"role": "assistant", "content": "never said"}, user("more")])  # inside 0
        rewritten = {"role": "assistant", "content": "reply two, not what was said"}
        await ask(session, [*ASK, first, user("more"), rewritten, user("on")])  # inside 1, which goes on from 0
        await ask(session, ASK, tools=[SHELL])  # other tools are another prompt
        turns, prompts = session.turns, [prompt for prompt, *_ in world.engine.seen]
        assert [turn.base for turn in turns] == [None, 0, 1, 0, None, None, None]
        same = len(said.codec.encode("reply "))
        assert turns[4].fork == Fork(0, len(prompts[0]), 2)
        assert turns[5].fork == Fork(1, len(prompts[1]) + same, 4)
        assert turns[6].fork is not None and turns[6].fork.tokens < 50
        assert [m["content"] for m in turns[5].messages][:2] == ["reply two, not what was said", "on"]
        assert [m["content"] for m in conversation(turns, 5)][2:5] == [
            "reply 1",
            "more",
            "reply two, not what was said",
        ]
        check_exact_ids(turns, world.engine)

    async def test_equal_replies_are_distinguished_by_the_ids_of_their_calls(self, world: World, said: Said) -> None:
        world.engine.script = lambda *_: said("", ("shell", {"cmd": "ls"}))
        session = world.open()
        replies = await asyncio.gather(*(ask(session, tools=[SHELL]) for _ in range(3)))
        for reply in replies:
            call = message(reply)["tool_calls"][0]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "a"}
            await ask(session, [*ASK, message(reply), result], tools=[SHELL])
        assert [turn.base for turn in session.turns[3:]] == [reply["crrl"]["turn"] for reply in replies]
        assert len({seed for _, _, seed in world.engine.seen}) == 6
        check_exact_ids(session.turns, world.engine)

    async def test_turns_sampled_at_temperature_zero_are_masked(self, world: World) -> None:
        world.gateway.sampling = Sampling(temperature=0.0)
        session = world.open()
        await ask(session)
        assert session.turns[0].masked == "sampling"


class TestRetries:
    async def test_a_retry_replays_the_finished_call_until_the_conversation_goes_on(self, world: World) -> None:
        session = world.open()
        first = await ask(session)
        assert (await ask(session, retry=1))["id"] == first["id"]
        assert len(session.turns) == 1
        await ask(session, [*ASK, message(first), user("more")])
        assert (await ask(session, retry=1))["id"] != first["id"]
        assert [turn.base for turn in session.turns] == [None, 0, None]

    async def test_without_a_count_a_repeated_body_is_a_retry_until_the_reply_was_read(
        self, world: World, said: Said
    ) -> None:
        world.holds(said("a story"))
        session = world.open()
        asked = [asyncio.create_task(ask(session, retry=None)) for _ in range(2)]
        await wait_until(lambda: any(call._followers == 2 for call in session._calls.values()))
        world.engine.gate.set()
        first, second = [await each for each in asked]
        assert first["id"] == second["id"] and len(world.engine.seen) == 1
        assert (await ask(session, retry=None))["id"] != first["id"], "a second sample"
        assert [turn.base for turn in session.turns] == [None, None]

    async def test_a_joined_call_survives_its_first_client(self, world: World, said: Said) -> None:
        world.holds(said("a story"))
        session = world.open()
        first = asyncio.create_task(ask(session))
        await wait_until(lambda: world.engine.seen)
        second = asyncio.create_task(ask(session, retry=1))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.05)
        world.engine.gate.set()
        assert message(await second)["content"] == "a story"
        assert session.turns[0].masked == ""

    async def test_a_retry_after_the_client_went_away_is_a_new_call(self, world: World, said: Said) -> None:
        world.holds(said("a story"))
        session = world.open()
        first = asyncio.create_task(ask(session))
        await wait_until(lambda: world.engine.seen)
        first.cancel()
        await wait_until(lambda: session.turns)
        world.engine.gate.set()
        await ask(session, retry=1)
        assert [turn.masked for turn in session.turns] == ["aborted", ""]
        check_exact_ids(session.turns, world.engine)


class TestLimits:
    async def test_one_long_reply_is_no_limit_of_the_episode(self, world: World, said: Said) -> None:
        world.engine.script = lambda *_: said("x" * 300)
        session = world.open(turn_tokens=20)
        reply = await ask(session)
        assert reply["usage"]["completion_tokens"] == 20
        assert session.limit == ""

    async def test_time_cuts_a_reply_and_refuses_the_next(
        self, world: World, said: Said, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, deadlines = asyncio.timeout(None), []

        def timeout_at(when: float) -> asyncio.Timeout:
            deadlines.append(when)
            return clock

        monkeypatch.setattr(source, "asyncio", SimpleNamespace(timeout_at=timeout_at))
        world.holds(said("a story"))
        session = world.open()
        running = asyncio.create_task(ask(session))
        await wait_until(lambda: world.engine.seen and world.engine.seen[0][1])
        assert deadlines == [session._budget.deadline]
        session._budget.deadline = asyncio.get_running_loop().time()
        clock.reschedule(session._budget.deadline)
        reply = await running
        assert (reply["choices"][0]["finish_reason"], message(reply)["content"]) == ("length", "a s")
        assert session.limit == "time"
        status, reply = await try_to_ask(session)
        assert (status, reply["error"]["code"]) == (400, "episode_limit_reached")
        assert world.engine.closed == 1

    async def test_a_reply_reports_what_is_left_of_the_limits(self, world: World) -> None:
        session = world.open(calls=5, tokens=1000)
        reply = await ask(session)
        used = reply["usage"]["total_tokens"]
        assert reply["crrl"] == {
            "turn": 0,
            "context_tokens": used,
            "remaining_tokens": 1000 - used,
            "remaining_calls": 6,
            "limit": "",
            "malformed": [],
        }


BAD_BODIES: dict[str, tuple[bytes, str | None]] = {
    "a list": (b"[]", None),
    "no messages": (b'{"model": "policy", "messages": []}', "messages"),
    "no role": (b'{"model": "policy", "messages": [{"content": "a"}]}', "messages.0.role"),
    "text as max_tokens": (b'{"model": "policy", "messages": [%s], "max_tokens": "5"}', "max_tokens"),
    "two choices": (b'{"model": "policy", "messages": [%s], "n": 2}', "n"),
    "a tool without a name": (
        b'{"model": "policy", "messages": [%s], "tools": [{"type": "function", "function": {}}]}',
        "tools.0.function.name",
    ),
}


class TestBadInput:
    @pytest.mark.parametrize("name", BAD_BODIES)
    async def test_a_bad_body_is_refused_in_openais_shape(self, world: World, name: str) -> None:
        body, param = BAD_BODIES[name]
        session = world.open()
        status, reply = await raw(session, body.replace(b"%s", b'{"role": "user", "content": "a"}'))
        assert status == 400
        assert (reply["error"]["type"], reply["error"]["param"]) == ("invalid_request_error", param)
        assert session.turns == ()
        assert session.fault is None

    async def test_unknown_fields_are_welcome(self, world: World) -> None:
        session = world.open()
        messages = [{"role": "developer", "content": [{"type": "text", "text": "a", "cache_control": {}}], "name": "x"}]
        await ask(session, messages, store=False, metadata={"a": "b"}, user="me", service_tier="auto")
        assert session.turns[0].messages[0] == {"role": "system", "content": "a"}

    @pytest.mark.parametrize(
        "change",
        [
            lambda chunk: chunk._replace(logprobs=chunk.logprobs[1:]),
            lambda chunk: chunk._replace(logprobs=tuple(float("nan") for _ in chunk.ids)),
            lambda chunk: chunk._replace(logprobs=tuple(1.0 for _ in chunk.ids)),
            lambda chunk: chunk._replace(ids=tuple(10**6 for _ in chunk.ids)),
            lambda chunk: chunk._replace(ids=tuple(258 for _ in chunk.ids)),
        ],
    )
    async def test_an_answer_that_cannot_be_true_is_a_fault(self, world: World, said: Said, change: Any) -> None:
        generate = world.engine.generate

        async def lie(*args: Any) -> Any:
            async for chunk in generate(*args):
                yield change(chunk)

        world.engine.script = lambda *_: said("a story")
        world.engine.generate = lie  # type: ignore[method-assign]
        session = world.open()
        status, reply = await try_to_ask(session)
        assert (status, reply["error"]["code"]) == (503, "engine_fault")
        assert session.fault is not None
        assert session.fault.boundary == "engine"


class TestLifetime:
    async def test_an_engine_that_ends_early_is_a_fault(self, world: World, said: Said) -> None:
        world.engine.script = lambda *_: said("a story", end=False)
        session = world.open()
        assert (await try_to_ask(session))[0] == 503
        assert session.turns[0].masked == "fault"

    async def test_a_closed_session_refuses_and_has_recorded_what_ran(self, world: World, said: Said) -> None:
        world.holds(said("a story"))
        session, other = world.open(), world.open("other")
        running = asyncio.create_task(try_to_ask(session))
        await wait_until(lambda: world.engine.seen and world.engine.seen[0][1])
        (turn,) = await world.gateway.close(session)
        assert (turn.finish, turn.masked) == (Finish.ABORT, "aborted")
        assert (await running)[0] == 410
        status, reply = await try_to_ask(session)
        assert (status, reply["error"]["code"]) == (410, "episode_closed")
        world.engine.gate.set()
        await ask(other)
        assert [episode for episode, _ in world.committed] == ["episode", "other"]

    async def test_a_call_that_is_left_before_it_began_asks_no_engine(self, world: World) -> None:
        session = world.open()
        call = session.admit(chat.parse(json.dumps({"model": "policy", "messages": ASK}).encode()), "digest", None)
        with call.follower():
            pass
        await call.wait()
        assert call.failure is not None and call.failure.code == "client_closed_request"
        assert (session.turns, world.engine.seen) == ((), [])

    async def test_an_engine_that_cancels_itself_is_a_fault(self, world: World) -> None:
        def cancel(*_: object) -> list[int]:
            raise asyncio.CancelledError

        world.engine.script = cancel
        session = world.open()
        status, reply = await try_to_ask(session)
        assert (status, reply["error"]["code"]) == (503, "gateway_fault")
        assert [turn.masked for turn in session.turns] == ["fault"]

    async def test_a_turn_that_cannot_be_recorded_is_a_fault_and_no_turn(self, world: World) -> None:
        def full(episode: str, turn: object) -> None:
            raise RunError("no space left on device")

        session = world.open()
        session._on_turn = full
        status, reply = await try_to_ask(session)
        assert (status, reply["error"]["code"]) == (503, "gateway_fault")
        assert "no space left" in str(session.fault)
        assert session.turns == ()

    async def test_a_unix_socket_serves_the_same(self, world: World, tmp_path: Path) -> None:
        address = tmp_path / "gateway.sock"
        policy = PolicySource(world.gateway.source.codec, world.engine)
        gateway = Gateway(policy, sampling=Sampling(), on_turn=world.gateway._on_turn)
        await gateway.start(socket=address)
        endpoint = gateway.open("e", limits=world.open().limits, seed=0).endpoint
        assert endpoint.socket == str(address)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(address))) as session:
            url = endpoint.base_url.replace(gateway.url, "http://gateway")
            async with session.get(f"{url}/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
            async with session.get("http://gateway/health") as response:
                assert await response.json() == {"status": "ok"}, "no details of other episodes or the engine"
        await gateway.stop()

    async def test_an_address_in_use_is_a_clear_error(self, world: World, tmp_path: Path) -> None:
        first, second = (Gateway(world.gateway.source, sampling=Sampling(), on_turn=lambda *_: None) for _ in range(2))
        async with first.listening(tmp_path / "g.sock"):
            address = first.url.removeprefix("http://")
            with pytest.raises(UsageError, match=f"^{address} is in use$") as caught:
                await second.start(port=int(address.partition(":")[2]))
            assert "port" in caught.value.fix
            with pytest.raises(UsageError, match=r"^\S+/g\.sock is in use"):
                await second.start(socket=tmp_path / "g.sock")

    async def test_keys_are_secrets_and_not_names(self, world: World) -> None:
        keys = {world.open(f"e{n}").key for n in range(50)}
        assert len(keys) == 50
        assert all(len(bytes.fromhex(key)) == 16 for key in keys)  # 128 bits, and nothing that an option begins with
