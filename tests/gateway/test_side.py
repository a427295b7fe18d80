"""Calls outside the main conversation, as programs make them, are found, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coderepairrl.gateway import Session
from coderepairrl.gateway.side import find_side_turns
from coderepairrl.learn.stitch import list_fates, stitch_episode
from coderepairrl.types import Ending, Episode, Origin, TokenSpan, Turn

from .conftest import SHELL, Said, World
from .speech import SPEAKERS, send_messages

ISSUE = "add() subtracts."
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
SYSTEM = "You repair code, in steps, until the tests pass. The time is "


class Program:
    """A main conversation with a shell, and other calls, in one dialect."""

    def __init__(self, session: Session, dialect: str) -> None:
        self.session, self.dialect = session, dialect
        self.messages: list[dict[str, Any]] = [self.system("10:03."), {"role": "user", "content": f"Issue: {ISSUE}\n"}]

    @staticmethod
    def system(text: str) -> dict[str, Any]:
        return {"role": "system", "content": SYSTEM + text}

    async def send(self, messages: list[dict[str, Any]], *tools: dict[str, Any]) -> dict[str, Any]:
        more: dict[str, Any] = {"tools": [self.tool(tool["function"]) for tool in tools]}
        if self.dialect == "messages":  # which has the system prompt in its own field
            more["system"], messages = messages[0]["content"], messages[1:]
        return await send_messages(self.session, self.dialect, messages, **more)

    def tool(self, function: dict[str, Any]) -> dict[str, Any]:
        if self.dialect == "messages":
            return {"name": function["name"], "input_schema": function["parameters"]}
        return {"type": "function", "function": function} | (function if self.dialect == "responses" else {})

    async def work(self, *tools: dict[str, Any]) -> None:
        """A step of the main conversation."""
        reply = await self.send(self.messages, *(tools or (SHELL,)))
        self.messages += [reply, {"role": "user", "content": "Go on."}]

    async def title(self) -> None:
        await self.send([{"role": "system", "content": "Generate a title."}, *self.messages[1:2]])

    async def summary(self) -> None:
        """With the whole conversation in it, and the same tools."""
        asked = [{"role": "system", "content": "Summarize conversations."}, *self.messages[1:]]
        await self.send([*asked, {"role": "user", "content": "Summarize."}], SHELL)

    async def sub_agent(self) -> None:
        asked = [{"role": "system", "content": "You search."}, {"role": "user", "content": "Find add()."}]
        reply = await self.send(asked, SEARCH)
        await self.send([*asked, reply, {"role": "user", "content": "Where?"}], SEARCH)

    def episode(self, side_calls: Any) -> Episode:
        turns = self.session.turns
        side = find_side_turns(turns, side_calls, ISSUE)
        return Episode("e", "t", "train", 0, "g", 0, Ending.DONE, turns=turns, side=side)


@pytest.fixture(params=SPEAKERS)
async def program(request: pytest.FixtureRequest, world: World, said: Said) -> Program:
    world.engine.script = lambda *_: said(f"words {len(world.engine.seen)}")
    return Program(world.open(calls=100), request.param)


@pytest.mark.parametrize(("side_calls", "side"), [("mask", (0, 2, 3, 4, 6)), ("tools", (0,)), ("train", ())])
async def test_titles_summaries_and_sub_agents_are_outside_the_main_conversation(
    program: Program, side_calls: Any, side: tuple[int, ...]
) -> None:
    await program.title()
    await program.work()
    await program.sub_agent()
    await program.summary()
    await program.work()
    await program.summary()
    await program.work()
    episode = program.episode(side_calls)
    assert episode.side == side
    rows, account = stitch_episode(episode, 1.0, max_tokens=1 << 20)
    lost = sum(len(episode.turns[index].output) for index in side)
    assert account.is_balanced
    assert (account.trained, account.masked, account.dropped) == (
        account.sampled - lost,
        {},
        {"side": lost} if side else {},
    )
    assert [fate for fate, _ in list_fates(episode, max_tokens=1 << 20)] == [
        "dropped" if turn.index in side else "trained" for turn in episode.turns
    ]
    assert sum(row.weight for row in rows) == pytest.approx(1)


async def test_an_agent_may_write_into_its_system_prompt_and_load_tools(program: Program) -> None:
    """Some programs put the time into it, or find tools by a tool."""
    await program.work()
    program.messages[0] = program.system("10:04.")
    await program.work()
    await program.work(SHELL, SEARCH)
    program.messages[0] = program.system("10:05, and there is a new file.")
    await program.work(SHELL, SEARCH)
    assert program.episode("mask").side == ()


async def test_without_tools_the_system_prompt_decides(program: Program) -> None:
    """Agents that read commands from text offer none."""
    for _ in range(2):
        reply = await program.send(program.messages)
        program.messages += [reply, {"role": "user", "content": "Go on."}]
        await program.title()
    assert program.episode("mask").side == (1, 3)
    assert program.episode("tools").side == (1, 3)


async def test_a_longer_sub_agent_is_still_outside_the_main_conversation(program: Program) -> None:
    await program.work()
    await program.sub_agent()
    await program.sub_agent()
    assert program.episode("mask").side == (1, 2, 3, 4)
    assert find_side_turns(program.session.turns, "mask") == (0,), "without a task's prompt, the most turns decide"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(((), ("a",), ("a", "b"))),
            st.sampled_from(("", "one", "another thing")),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_one_conversation_is_always_the_main_one(asked: list[tuple[tuple[str, ...], str, bool]]) -> None:
    turns = []
    for index, (tools, system, extends) in enumerate(asked):
        base = index - 1 if extends and index and asked[index - 1][:2] == (tools, system) else None
        opening = [{"role": "system", "content": system}] if system and base is None else []
        messages = [*opening, {"role": "user", "content": "q"}, {"role": "assistant", "content": str(index)}]
        said = TokenSpan((1,), Origin.POLICY, (-1.0,))
        turns.append(Turn(index, base, TokenSpan((1,), Origin.GIVEN), said, tools=tools, messages=tuple(messages)))
    masked, acting = find_side_turns(turns, "mask"), find_side_turns(turns, "tools")
    main = [turn for turn in turns if turn.index not in masked]
    assert main and len({turn.tools for turn in main}) == 1
    assert bool(main[0].tools) == any(turn.tools for turn in turns)
    assert set(acting) == {index for index in masked if not turns[index].tools}
    assert find_side_turns(turns, "train") == ()
    assert masked == tuple(sorted(masked))
