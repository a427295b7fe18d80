"""Texts that are tokenized after a renderer has put everything in order.

Renderers handle ids one by one (whose they are, whether they are content), which costs as much as tokenizing them.
To a renderer that only orders ids, a long text is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from coderepairrl.tokens.inert import SHORT, InertTokenizer


class Text(int):
    """Stands for the ids of `text`: no id of any vocabulary."""

    text: str


class Later:
    """What `renderers` needs of a tokenizer to write."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: InertTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name_or_path
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a short `text`, which a renderer may compare with others; else one `Text`."""
        if len(text) <= SHORT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        later = Text(-1)
        later.text = text
        return [later]


def ids(tokenizer: InertTokenizer, written: Sequence[int]) -> list[int]:
    """`written` with the ids of its texts."""
    found: list[int] = []
    for token in written:
        if isinstance(token, Text):
            found += tokenizer.encode(token.text)
        else:
            found.append(token)
    return found
