"""The exact texts between Nano and the tiny policy, for the shipped config, the tokenizer and the warm start.

The tiny policy knows one system prompt, one pair of tool schemas and Nano's `compact` answers. They are Nano's own
(`agents.texts`), so that nothing here can drift from what the agent really sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coderepairrl.agents.texts import COMPACT, COMPACT_SYSTEM, build_tool_schemas

AGENT_OPTIONS: Mapping[str, Any] = {
    "system": "compact",
    "tools": "compact",
    "warnings": False,
    "nudge": False,
}
"""Nano's options for the tiny policy, as they stand in the shipped config."""

TEXTS = COMPACT
SYSTEM = COMPACT_SYSTEM
TOOLS: list[dict[str, Any]] = build_tool_schemas("compact", {})
DONE = "done"
"""The policy's last reply, which submits."""


def opening(prompt: str) -> list[dict[str, Any]]:
    """The first messages of a conversation about the issue `prompt`."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
