"""``python -m workshop.tiny.teacher``: the scripted expert of `demonstrations` behind an OpenAI-compatible endpoint.

It answers a conversation about a task of the source ``mutants`` with the expert's next message, using the offered tools
of `nano` or `nano4`, so that trajectories can be collected from it as from any provider's model: by the real agent, in
the sandbox, judged by the rewards. It is stateless, and the same conversation always gets the same reply; the expert's
random choices are seeded by the issue. It knows the repairs, so its reward depends only on its habits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from aiohttp import web

from coderepairrl import models
from coderepairrl.errors import UsageError, exit_on_error
from coderepairrl.processes.signals import run_until_interrupted
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, load_mutants, make_exercise
from coderepairrl.tokens import Codec, load_codec
from workshop.tiny.demonstrations import Habits, Message, demonstrate, habits

NAME = "scripted-expert"
"""Name of the model."""


class Teacher:
    """The expert with some `habits` on the tasks that the source ``mutants`` makes with `seed`."""

    def __init__(self, own: Habits, seed: int = 0) -> None:
        self.habits = own
        self._exercises: dict[str, list[Exercise]] = {}
        for mutant in load_mutants():
            for quoted in (True, False):
                exercise = make_exercise(mutant, Random(f"{mutant.key}/{seed}"), quoted)
                if exercise is not None:
                    self._exercises.setdefault(exercise.prompt, []).append(exercise)

    def reply(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """The expert's next message in a conversation of an agent about one of the tasks, with the agent's `tools`.

        Of tasks that share an issue it takes the first that is consistent with the conversation. Raises `UsageError`
        for a conversation about another task, and for one whose replies are not the expert's.
        """
        issue = next((str(each.get("content")) for each in messages if each.get("role") == "user"), "")
        if issue not in self._exercises:
            raise UsageError("this is no task of the source mutants with the teacher's seed")
        so_far = [_normalise(each) for each in messages if each.get("role") in ("assistant", "tool")]
        for exercise in self._exercises[issue]:
            # seeded by the issue alone: tasks that share it agree until a file was read
            shown = demonstrate(exercise, self.habits, Random(issue), tools)
            whole = [each for each in shown if each["role"] in ("assistant", "tool")]
            if len(so_far) < len(whole) and so_far == [_normalise(each) for each in whole[: len(so_far)]]:
                return whole[len(so_far)]
        raise UsageError("the expert would not have said what the conversation has it say")


def _normalise(message: Message) -> tuple[Any, ...]:
    """The parts of a message to compare: an agent numbers its calls, and may repeat them in other JSON."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], (message.get("content") or "").strip(), calls


@cache
def _codec() -> Codec:
    return load_codec(models.find_model_folder("builtin:tiny"))


def completion(teacher: Teacher, body: Mapping[str, Any]) -> dict[str, Any]:
    """The response to a Chat Completions request, with tokens counted as those of ``builtin:tiny``. Raises what
    `Teacher.reply` raises, and `UsageError` for streaming."""
    if body.get("stream"):
        raise UsageError("this teacher does not stream")
    messages, tools = body["messages"], body.get("tools") or []
    reply = teacher.reply(messages, tools)
    turn = len(messages)
    calls = [{"id": f"call_{turn}_{at}", **call} for at, call in enumerate(reply.get("tool_calls", ()))]
    prompt_tokens = len(_codec().render(messages, tools))
    completion_tokens = len(_codec().encode(reply["content"] or json.dumps([call["function"] for call in calls])))
    return {
        "id": f"expert-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": NAME,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": reply["content"],
                    **({"tool_calls": calls} if calls else {}),
                },
                "finish_reason": "tool_calls" if calls else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def application(teacher: Teacher) -> web.Application:
    """An application with the routes ``/v1/models`` and ``/v1/chat/completions``."""

    async def cards(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    async def chat(request: web.Request) -> web.Response:
        try:
            return web.json_response(completion(teacher, await request.json()))
        except (UsageError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = str(error) if isinstance(error, UsageError) else f"the request is malformed: {error!r}"
            return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=400)

    app = web.Application()
    app.add_routes([web.get("/v1/models", cards), web.post("/v1/chat/completions", chat)])
    return app


async def serve(teacher: Teacher, port: int) -> None:
    """Listen on the loopback interface until cancelled; print the URL once ready. Port 0 takes any free port."""
    runner = web.AppRunner(application(teacher), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; by default a free one, which is printed")
    parser.add_argument("--exact", type=float, default=Habits().exact, help="share of the exercises that it repairs")
    parser.add_argument(
        "--unchanged", type=float, default=0.0, help="share in which it first replaces a line by itself"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the source mutants")
    options = parser.parse_args()
    teacher = Teacher(habits(options.exact, options.unchanged), options.seed)
    asyncio.run(run_until_interrupted(serve(teacher, options.port)))


if __name__ == "__main__":
    with exit_on_error():
        main()
