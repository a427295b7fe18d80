"""Clients that rewrite history: what was said keeps its tokens, and a prompt is attached where it differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from coderepairrl.gateway import Session
from coderepairrl.types import Turn, conversation, sequence

from .conftest import SHELL, Said, World, check_exact_ids
from .speech import SPEAKERS, send_messages
from .test_identity import trains_what_was_served

TASK: list[dict[str, Any]] = [{"role": "system", "content": "Repair."}, {"role": "user", "content": "Fix it."}]
PRUNED = "[old tool result removed]"


class Agent:
    """A conversation in one dialect, as the client keeps it: without the thoughts that it receives."""

    def __init__(self, session: Session, dialect: str) -> None:
        self.session, self.dialect, self.messages = session, dialect, [*TASK]

    async def ask(self, *new_messages: dict[str, Any]) -> Turn:
        self.messages += new_messages
        reply = await send_messages(self.session, self.dialect, self.messages)
        self.messages.append({name: said for name, said in reply.items() if name != "reasoning_content"})
        return self.session.turns[-1]

    def result(self, text: str) -> dict[str, Any]:
        """Result of the last call."""
        return {"role": "tool", "tool_call_id": self.messages[-1]["tool_calls"][0]["id"], "content": text}


@pytest.fixture(params=SPEAKERS)
async def agent(request: pytest.FixtureRequest, world: World, said: Said) -> Agent:
    """Its policy thinks before each call, which no client sends back."""

    def script(*_: Any) -> list[int]:
        number = len(world.engine.seen)
        return [*said.thought(f"hm {number}"), *said(f"Step {number}.", ("shell", {"cmd": f"ls {number}"}))]

    world.engine.script = script
    return Agent(world.open(), request.param)


def places(needles: Sequence[Sequence[int]], ids: Sequence[int]) -> list[int]:
    """Where each of `needles` begins in `ids`, -1 for nowhere."""
    starts = range(len(ids))
    return [next((at for at in starts if tuple(ids[at : at + len(each)]) == tuple(each)), -1) for each in needles]


async def test_a_pruned_tool_result_leaves_the_replies_after_it_as_they_were_said(world: World, agent: Agent) -> None:
    await agent.ask()
    for number in range(3):
        await agent.ask(agent.result(f"listing {number}\n" * 9))
    agent.messages[3] |= {"content": PRUNED}
    turn = await agent.ask(agent.result("listing 3"))
    turns, prompt = agent.session.turns, world.engine.seen[-1][0]
    assert [each.base for each in turns[:4]] == [None, 0, 1, 2], "thoughts that the client drops stay"
    outputs = [each.output.ids for each in turns[:4]]
    found = places(outputs, prompt)
    assert -1 not in found and found == sorted(found)
    # the fork is in the result that was pruned: from there on, all is new
    assert turn.base is None and turn.fork is not None and turn.fork.turn == 1
    assert turn.fork.messages == 3
    shared = len(sequence(turns, 0))
    assert shared < turn.fork.tokens < shared + len(turns[1].given)
    assert "listing 0" not in world.gateway.source.codec.decode(prompt)
    assert [m["content"] for m in conversation(turns, turn.index)][3] == PRUNED
    # a client that only appends to that continues it
    assert (await agent.ask(agent.result("listing 4"))).base == turn.index
    check_exact_ids(agent.session.turns, world.engine)
    trains_what_was_served(agent.session.turns, world.engine)


async def test_replies_in_their_usual_spelling_give_the_rendered_prompt(world: World, said: Said, agent: Agent) -> None:
    """Only the spelling of replies, and their thoughts, distinguish such a prompt from a rendered one."""
    world.engine.script = lambda *_: said(f"Step {len(world.engine.seen)}.", ("shell", {"cmd": "ls"}))
    await agent.ask()
    for number in range(3):
        await agent.ask(agent.result(f"listing {number}"))
    agent.messages[3] |= {"content": PRUNED}
    agent.messages[4] = agent.messages[4] | {"content": "A step that nobody said."}
    turn = await agent.ask(agent.result("listing 3"))
    asked = conversation(agent.session.turns, turn.index)[:-1]
    assert [message["content"] for message in asked][3:5] == [PRUNED, "A step that nobody said."]
    assert list(world.engine.seen[-1][0]) == world.gateway.source.codec.render(asked, [SHELL])


async def test_a_reply_that_the_client_forgets_shares_what_came_before_it(world: World, agent: Agent) -> None:
    """As mini-swe-agent does with one that has no call: its next prompt has the complaint in the reply's place."""
    first = await agent.ask()
    agent.messages.pop()
    turn = await agent.ask({"role": "user", "content": "No call was found in the response."})
    assert turn.base is None and turn.fork is not None
    header = len(first.given) - turn.fork.tokens
    assert (turn.fork.turn, turn.fork.messages) == (0, 2) and 0 <= header < 20
    assert len(turn.messages) == 2
    trains_what_was_served(agent.session.turns, world.engine)
