"""Prompts by a renderer of the package `renderers`."""
# calls are read in the prompts' own format (`tokens.formats`): the package's parsers strip the whitespace of values

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coderepairrl.errors import ConfigError
from coderepairrl.tokens.formats import CALL, QUESTION, TOOL, written
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reading import Message, Reader, in_thoughts

CLASSES = {
    "qwen3": "Qwen3",
    "qwen3.5": "Qwen35",
    "qwen3.6": "Qwen36",
    "glm-4.5": "GLM45",
    "glm-5": "GLM5",
    "glm-5.1": "GLM51",
    "minimax-m2": "MiniMaxM2",
    "nemotron-3": "Nemotron3",
    "nemotron-3-ultra": "Nemotron3Ultra",
    "nemotron-3.5": "Nemotron35",
    "llama-3": "Llama3",
}


class PackageRenderer:
    """Renderer `name`. `thinking` switches reasoning; `keep_thoughts` keeps earlier thoughts in prompts.

    Raises `ConfigError` for another family's tokenizer, and an unknown format of calls.
    """

    def __init__(self, tokenizer: InertTokenizer, name: str, *, thinking: bool, keep_thoughts: bool) -> None:
        import renderers

        make = getattr(renderers, f"{CLASSES[name]}Renderer")
        config = getattr(renderers, f"{CLASSES[name]}RendererConfig")
        switches = {key: thinking for key in ("enable_thinking", "thinking") if key in config.model_fields}
        try:
            self._inner = make(tokenizer, config(thinking_retention="all" if keep_thoughts else None, **switches))
        except AssertionError as error:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} is not that of renderer {name}: {error}",
                fix="set model.renderer=template, or use the family's own tokenizer",
            ) from error
        self._reader = Reader(tokenizer)
        self._stop = set(self.get_stop_token_ids())
        prompt = self.render_ids([QUESTION], tools=[TOOL], add_generation_prompt=True)
        if not (keep_thoughts or switches or in_thoughts(prompt, self._reader.thoughts, self._stop)):
            raise ConfigError(f"renderer {name} has no reasoning to switch on", fix="set model.thinking=false")
        answered = (QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]})
        self.format = written(
            tokenizer,
            self.render_ids([QUESTION], tools=[TOOL]),
            prompt,
            self.render_ids(answered, tools=[TOOL]),
            self.get_stop_token_ids(),
        )

    def earlier(self, count: int) -> tuple[Message, ...]:
        """Nothing: these families do not number calls."""
        return ()

    def get_stop_token_ids(self) -> list[int]:
        """Ids that end a reply."""
        return list(self._inner.get_stop_token_ids())

    def render_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Ids of a conversation."""
        return list(self._inner.render_ids(list(messages), tools=tools, add_generation_prompt=add_generation_prompt))

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
    ) -> Any:
        """Extend the ids by `new_messages`; None if impossible."""
        return self._inner.bridge_to_next_turn(
            list(previous_prompt_ids), list(previous_completion_ids), list(new_messages), tools=tools
        )

    def parse_response(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Message] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> Any:
        """Parse into a `renderers.base.ParsedResponse`."""
        return self.format.reply(self._reader, token_ids, prompt_ids or (), self._stop, tools or ())
