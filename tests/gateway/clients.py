"""Clients of the official SDKs for an endpoint."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from coderepairrl.types import Endpoint

_open: list[AsyncOpenAI | AsyncAnthropic] = []


def openai_client(endpoint: Endpoint, **options: Any) -> AsyncOpenAI:
    sdk = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)
    _open.append(sdk)
    return sdk


def anthropic_client(endpoint: Endpoint, **options: Any) -> AsyncAnthropic:
    sdk = AsyncAnthropic(base_url=endpoint.base_url.removesuffix("/v1"), api_key=endpoint.api_key, **options)
    _open.append(sdk)
    return sdk


async def close_all() -> None:
    while _open:
        await _open.pop().close()
