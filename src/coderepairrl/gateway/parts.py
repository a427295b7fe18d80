"""Message content as text.

Other content, often from the policy's tools, becomes a placeholder that depends only on it, such as ``[image:
image/png, 12345 bytes, not shown]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

WORDS = frozenset(("text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"))
"""Kinds of parts that are text."""
KINDS = {
    **dict.fromkeys(("image_url", "input_image", "output_image"), "image"),
    **dict.fromkeys(("input_audio", "output_audio"), "audio"),
    **dict.fromkeys(("video_url", "input_video"), "video"),
    "input_file": "file",
}
LONGEST = 100
"""Characters of a name or address in a placeholder."""


class ContentReader:
    r"""Reads a request's content; `hidden` lists replaced parts as (`at`, description).

    `known` reads a dialect's special parts, or returns None.

    >>> parts = ContentReader()
    >>> parts.text([{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "https://a.b/c"}}])
    'Look:\n[image: https://a.b/c, not shown]'
    >>> parts.hidden
    [(0, 'image: https://a.b/c')]
    """

    def __init__(self, known: Callable[[Mapping[str, Any]], str | None] = lambda part: None) -> None:
        self.at = 0
        self.hidden: list[tuple[int, str]] = []
        self._known = known

    def text(self, content: object, between: str = "") -> str:
        """Join `content` (a string, parts, or other JSON); placeholders get their own line."""
        if isinstance(content, str):
            return content
        written, after_placeholder = "", False
        for part in content if isinstance(content, list) else [] if content is None else [content]:
            before = len(self.hidden)
            words = self._words(part)
            placeholder = len(self.hidden) > before
            if written:
                written += between or ("\n" if placeholder or after_placeholder else "")
            written, after_placeholder = written + words, placeholder
        return written

    def placeholder(self, part: Mapping[str, Any]) -> str:
        """Build the placeholder of a non-text part."""
        description = described(part)
        self.hidden.append((self.at, description))
        return f"[{description}, not shown]"

    def _words(self, part: Any) -> str:
        if isinstance(part, str) or part is None:
            return part or ""
        if not isinstance(part, dict):
            return json.dumps(part)
        kind = str(part.get("type"))
        if (dialect_text := self._known(part)) is not None:
            return dialect_text
        if isinstance(words := part.get("refusal" if kind == "refusal" else "text"), str):
            return words
        if kind in WORDS:
            return ""
        if kind == "document" and isinstance(source := part.get("source"), dict):
            if source.get("type") == "text" and isinstance(source.get("data"), str):
                return str(source["data"])
            if source.get("type") == "content":
                return self.text(source.get("content"), "\n")
        if kind == "search_result":
            heads = [each for each in (part.get("title"), part.get("source")) if isinstance(each, str)]
            return "\n".join([*heads, self.text(part.get("content"), "\n")])
        return self.placeholder(part)


def described(part: Mapping[str, Any]) -> str:
    """Describe a part by kind, name, media type and size.

    >>> described({"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"})
    'file: a.pdf, application/pdf, 3 bytes'
    """
    type = part.get("type")
    kind = KINDS.get(type) or _plain(type) or "part" if isinstance(type, str) else "part"
    inner = (part.get(key) for key in ("source", "image_url", "input_audio", "file", "video_url"))
    fields = {**part, **{key: value for each in inner if isinstance(each, dict) for key, value in each.items()}}
    texts: dict[str, str] = {key: value for key, value in fields.items() if isinstance(value, str) and value}
    name = texts.get("filename") or texts.get("title") or texts.get("name")
    media = texts.get("media_type") or texts.get("mime_type") or texts.get("format")
    keys = ("data", "file_data", "url", "image_url", "file_url")
    data: str = next((texts[key] for key in keys if key in texts), "")
    size = -1
    if data_url := re.match(r"data:([^,;]*)([^,]*),", data):
        media = data_url[1] or media
        payload = data[data_url.end() :]
        size = _decoded(payload) if data_url[2].endswith(";base64") else len(unquote_to_bytes(payload))
    elif re.match(r"[a-z][a-z0-9+.-]*://", data):
        name = name or data
    elif data:
        size = _decoded(data)
    else:
        name = name or texts.get("file_id") or texts.get("tool_name")
    details = [_plain(text) for text in (name, media) if text] + ([] if size < 0 else [f"{size} bytes"])
    return f"{kind}: {', '.join(details)}" if details else kind


def _decoded(base64: str) -> int:
    return (len(base64) - base64.count("\n") - base64[-2:].count("=")) * 3 // 4


def _plain(text: str) -> str:
    line = re.sub(r"[^\w ./:+@#%&=?~,()-]+", " ", text[: 2 * LONGEST]).strip()
    return line if len(line) <= LONGEST and len(text) <= 2 * LONGEST else f"{line[:LONGEST]}..."
