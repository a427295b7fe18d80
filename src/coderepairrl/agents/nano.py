"""Nano: an agent with a prompt, two tools and hard limits.

History is never rewritten, so each request extends the previous one token for token. Exact semantics:
``docs/guides/nano.md``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from coderepairrl.agents.chat import Budget, Chat, LimitReached, Message, Reply
from coderepairrl.agents.examples import Examples, format_as_calls, resolve_examples
from coderepairrl.agents.texts import NANO, Texts, Wording, build_options, build_tool_schemas, fill_template
from coderepairrl.agents.tools import Result, Tools, command_names
from coderepairrl.errors import ConfigError
from coderepairrl.protocols import Agent, Sandbox
from coderepairrl.registry import suggest_nearest
from coderepairrl.types import AgentReport, Endpoint, FirstRequest, Task, ToolCall


@dataclass(frozen=True, slots=True)
class NanoOptions:
    """Options of Nano; episode limits come with the endpoint. Raises `ConfigError` for invalid values."""

    system: str = "full"
    """``full``, ``compact``, or the system prompt itself; empty sends none. ``{output_chars}`` and
    ``{shell_seconds}`` are filled in."""
    system_file: str = ""
    """A file with the system prompt, instead of `system`."""
    user_template: str = "{prompt}"
    """The first user message; ``{prompt}`` is the task's."""
    tools: Literal["full", "compact"] = "full"
    """``compact`` drops descriptions and the optional parameter `context`, and shortens answers."""
    names: Mapping[str, str] = field(default_factory=dict)
    """New names of tools, by shipped name, such as ``{shell = "run"}``."""
    descriptions: Mapping[str, str] = field(default_factory=dict)
    """Tool descriptions that replace the shipped ones, by tool."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Texts that replace the shipped ones, by field of `Texts`."""
    warnings: bool = True
    """Warn before limits, ahead of a tool's result."""
    low_tokens: int = 3_000
    critical_tokens: int = 1_500
    """Tokens left below which it warns, and warns urgently."""
    few_calls: int = 4
    """Calls left at which it warns."""
    nudge: bool = True
    """Remind a model that changed nothing; otherwise every reply without a tool call ends the episode."""
    output_chars: int = 2_000
    """Longer tool results are cut."""
    shell_seconds: float = 4.0
    """Longer commands are killed."""
    examples: Examples = 0
    """Worked examples before the issue, as `DirectOptions.examples`, written as tool calls."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request, such as ``temperature``; a training run's sampling overrides them."""

    def __post_init__(self) -> None:
        if "{prompt}" not in self.user_template:
            raise ConfigError(
                "agent.options.user_template has no {prompt}", fix="Put {prompt} where the issue belongs."
            )
        if self.system_file and self.system != "full":
            raise ConfigError("agent.options.system and agent.options.system_file exclude each other")
        if self.output_chars < 1 or self.shell_seconds <= 0:
            raise ConfigError("agent.options.output_chars and agent.options.shell_seconds must be positive")
        if reserved := sorted({"messages", "tools", "model", "stream", "n"} & set(self.request)):
            raise ConfigError(f"agent.options.request cannot set {', '.join(reserved)}")

    def check(self, wording: Wording) -> None:
        """Raise `ConfigError` for unknown keys, invalid tool names, or an unreadable system prompt."""
        for option, keys, allowed in (
            ("agent.options.names", self.names, list(wording.parameters)),
            ("agent.options.descriptions", self.descriptions, list(wording.descriptions)),
            ("agent.options.messages", self.messages, [text.name for text in fields(Texts)]),
        ):
            for key in keys:
                if key not in allowed:
                    raise ConfigError(f"{option} has no {key!r}", fix=suggest_nearest(key, allowed))
        names = [self.names.get(tool, tool) for tool in wording.parameters]
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
                raise ConfigError(
                    f"agent.options.names: {name!r} is not a valid tool name", fix="A-Z a-z 0-9 _ -, up to 64"
                )
            if names.count(name) > 1:
                raise ConfigError(f"agent.options.names: two tools are named {name!r}")
        self.build_opening("", wording)

    def texts(self, wording: Wording = NANO) -> Texts:
        """Texts that the model gets."""
        wording = wording.renamed(self.names)
        return replace(wording.compact if self.tools == "compact" else wording.full, **self.messages)

    def build_opening(self, prompt: str, wording: Wording = NANO) -> list[Message]:
        """Build the messages with system prompt and issue."""
        wording = wording.renamed(self.names)
        text = {"full": wording.system, "compact": wording.compact_system}.get(self.system, self.system)
        if self.system_file:
            try:
                text = Path(self.system_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"agent.options.system_file {self.system_file} cannot be read: {error}") from error
        text = fill_template(text, output_chars=self.output_chars, shell_seconds=f"{self.shell_seconds:g}")
        system = [{"role": "system", "content": text}] if text else []
        return [*system, {"role": "user", "content": fill_template(self.user_template, prompt=prompt)}]


class Nano(Agent):
    """Agent in the controller with tools in the sandbox. Takes `NanoOptions` by name."""

    name = "nano"
    placement: Literal["host", "sandbox"] = "host"
    wording: Wording = NANO
    toolbox: type[Tools] = Tools

    def __init__(self, **options: Any) -> None:
        self.options = build_options(NanoOptions, self.name, options)
        self.options.check(self.wording)

    def first_request(self, task: Task) -> FirstRequest:
        """Build the complete first request."""
        options = self.options
        descriptions = {options.names.get(tool, tool): text for tool, text in options.descriptions.items()}
        tools = build_tool_schemas(options.tools, descriptions, self.wording.renamed(options.names))
        *system, issue = options.build_opening(task.prompt, self.wording)
        return FirstRequest([*system, *self._example_messages(task), issue], tools)

    def _example_messages(self, task: Task) -> list[Message]:
        options, parameters = self.options, self.wording.parameters
        # the command tool and the patch tool, of Nano or of Nano4
        tools = [tool for tool in parameters if tool in ("shell", "apply_patch", "bash", "str_replace")]
        parameters_by_name = {options.names.get(tool, tool): list(parameters[tool]) for tool in tools}
        repairs = resolve_examples(options.examples, task.id)
        examples = format_as_calls(repairs, parameters_by_name, options.texts(self.wording).patched)
        return [
            {**each, "content": fill_template(options.user_template, prompt=each["content"])}
            if each["role"] == "user"
            else each
            for each in examples
        ]

    async def run(self, task: Task, sandbox: Sandbox, endpoint: Endpoint) -> AgentReport:
        """Repair `task` until the model submits or a limit is reached.

        The report's `exit` is ``submitted``, ``calls``, ``tokens`` or ``time``; its `log` is the conversation as JSON
        lines. Raises `GatewayFault`, `SandboxFault`, and `AgentFault`.
        """
        async with Chat(endpoint, self.options.request) as chat:
            return await _NanoRun(self, task, sandbox, endpoint, chat).run()


class _NanoRun:
    def __init__(self, agent: Nano, task: Task, sandbox: Sandbox, endpoint: Endpoint, chat: Chat) -> None:
        self.options = options = agent.options
        self.texts = options.texts(agent.wording)
        messages, self.schemas = agent.first_request(task)
        self.messages = [dict(message) for message in messages]
        self.tools = agent.toolbox(sandbox, self.texts, options.output_chars, options.names)
        self.shipped_names = {options.names.get(tool, tool): tool for tool in agent.wording.parameters}
        self.budget = Budget(endpoint.limits)
        self.chat = chat
        self.turn = -1
        self.tool_calls: list[ToolCall] = []

    async def run(self) -> AgentReport:
        exit = "submitted"
        try:
            while not (await self._act_on_reply(await self._ask())):
                pass
        except LimitReached as reached:
            exit = reached.limit
        log = "\n".join(json.dumps(message) for message in self.messages)
        return AgentReport(exit, tuple(self.tool_calls), log)

    async def _ask(self) -> Reply:
        if limit := self.budget.spent():
            raise LimitReached(limit)
        budget = self.budget
        reply = await self.chat.complete(self.messages, self.schemas, budget.reply_tokens(), budget.seconds_left)
        budget.record_tokens(reply.context_tokens, reply.remaining_tokens)
        self.messages.append(reply.message)
        self.turn = self.turn + 1 if reply.turn is None else reply.turn
        return reply

    async def _act_on_reply(self, reply: Reply) -> bool:
        """Act on a reply; return whether it was the last."""
        if not reply.tool_calls and not reply.malformed:
            if not self.options.nudge or await self.tools.has_changed():
                return True
            self.budget.act()
            self._append({"role": "user"}, self.texts.nudge)
            return False
        limit = None
        for call in reply.tool_calls:
            limit = limit or self.budget.exhausted()
            header = {"role": "tool", "tool_call_id": call.get("id") or ""}
            if limit:  # calls beyond the limit are not executed, but answered
                self.messages.append(header | {"content": fill_template(self.texts.refused, limit=limit)})
            else:
                self.budget.act()
                self._append(header, await self._execute(call))
        for text in reply.malformed:  # without an id, so the answer is a user message
            limit = limit or self.budget.exhausted()
            if not limit:
                self.budget.act()
                self._append({"role": "user"}, self._answer_malformed_call(text))
        if limit:
            raise LimitReached(limit)
        return False

    async def _execute(self, call: Mapping[str, Any]) -> str:
        function = call.get("function") or {}
        called, raw = str(function.get("name", "")), function.get("arguments", "")
        name = self.shipped_names.get(called, "")
        started = time.monotonic()
        command = ""
        arguments, problem = _parse_arguments(raw)
        if arguments is None:
            result = Result(fill_template(self.texts.malformed, problem=problem), False)
        else:
            command = " ".join(command_names(self.tools.command_line(name, arguments)))
            timeout = min(self.options.shell_seconds, self.budget.seconds_left)
            unknown = Result(fill_template(self.texts.unknown_tool, name=called), False)
            result = await self.tools.run(name, arguments, timeout) or unknown
        text = result.text
        if result.truncated or len(text) > self.options.output_chars:
            text = f"{text[: self.options.output_chars]}\n{self.texts.truncated}"
        raw_text = raw if isinstance(raw, str) else json.dumps(raw)
        seconds = time.monotonic() - started
        self.tool_calls.append(ToolCall(self.turn, called, raw_text, result.ok, len(text), seconds, command))
        return text

    def _answer_malformed_call(self, text: str) -> str:
        match = re.search(r'"name"\s*:\s*"(\w+)"', text)
        answer = fill_template(self.texts.malformed, problem="the call cannot be read")
        self.tool_calls.append(ToolCall(self.turn, match[1] if match else "unknown", text, False, len(answer)))
        return answer

    def _append(self, message: Message, text: str) -> None:
        warning = self._choose_warning()
        self.messages.append(message | {"content": f"{warning}\n{text}" if warning else text})

    def _choose_warning(self) -> str:
        """Most urgent warning, by the limits left *after* the current action."""
        if not self.options.warnings:
            return ""
        tokens, calls = self.budget.tokens_left, self.budget.calls_left
        if tokens < self.options.critical_tokens:
            return self.texts.critical_tokens
        if tokens < self.options.low_tokens:
            return self.texts.low_tokens
        if 1 < calls <= self.options.few_calls:
            return fill_template(self.texts.few_calls, left=calls)
        return self.texts.last_call if calls == 1 else ""


def _parse_arguments(raw: object) -> tuple[dict[str, Any] | None, str]:
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        return None, str(error)
    return (arguments, "") if isinstance(arguments, dict) else (None, f"a {type(arguments).__name__}")
