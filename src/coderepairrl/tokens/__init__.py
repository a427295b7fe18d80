"""Conversion of messages to token ids and back, without torch or transformers: the `Codec` of a model, loaded here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import models
from coderepairrl.errors import ConfigError
from coderepairrl.processes.installs import require_train
from coderepairrl.tokens import template
from coderepairrl.tokens.codec import (
    GENERATION_PROMPT_IDS,
    RENDERING_MARGIN,
    Codec,
    CodecSource,
    Row,
    make_conversation_rows,
)
from coderepairrl.tokens.inert import InertTokenizer, TooLong
from coderepairrl.tokens.rendering import TemplateRenderer, make_package_renderer, parse_call_arguments
from coderepairrl.tokens.reply import Delta, FunctionCall, Reply, ReplyStream
from coderepairrl.tokens.template import Template, digest_tokenizer, read_json_object
from coderepairrl.tokens.verify import HISTORIES, OPENING, TOOLS, Messages

__all__ = [
    "GENERATION_PROMPT_IDS",
    "RENDERING_MARGIN",
    "Codec",
    "CodecSource",
    "Delta",
    "FunctionCall",
    "Reply",
    "ReplyStream",
    "Row",
    "TooLong",
    "digest_tokenizer",
    "load_codec",
    "make_conversation_rows",
]
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3",),
    "qwen3_5_text": ("qwen3.5", "qwen3.6"),
    "qwen3_5_moe_text": ("qwen3.5", "qwen3.6"),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
}
"""Renderers to try by ``model_type``; other models use their chat template (`rendering`)."""


@dataclass(frozen=True, slots=True)
class _ModelFiles:
    name: str
    kind: str
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    tokenizer: InertTokenizer
    template: Template | None


def load_codec(model: str | Path, *, thinking: bool = False) -> Codec:
    """Load the codec of `model`, a folder in Hugging Face layout.

    The renderer is the one for the config's ``model_type`` if it agrees with the chat template, else the template
    itself. Raises `ConfigError`, `PrerequisiteError`.
    """
    require_train()
    folder = Path(model)
    if missing := [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]:
        raise ConfigError(f"{folder} has no {' and no '.join(missing)}", fix="give a folder in Hugging Face layout")
    files = _read_model(str(model), folder)
    codec = _choose_codec(files, thinking)
    if files.template is not None:
        _check_thinking(files.template, codec)
    codec.loaded_from = CodecSource(str(folder.absolute()), thinking)
    return codec


def _read_model(name: str, folder: Path) -> _ModelFiles:
    config = read_json_object(folder / "config.json")
    if "text_config" in config:
        fix = (
            f"crrl export {name} FOLDER writes its language model alone"
            if models.has_separate_language_model(folder)
            else ""
        )
        raise ConfigError(
            f"{name} is multimodal (its config.json has a text_config)", fix=fix or "use a text-only model"
        )
    context_key = "max_position_embeddings"
    if context_key not in config and "model_max_length" in config:
        context_key = "model_max_length"  # Kimi Linear's name for it
    config = read_json_object(folder / "config.json", "vocab_size", context_key)
    spec = read_json_object(folder / "tokenizer.json", "model")
    stops = _read_stop_ids(config)
    if (generation := folder / "generation_config.json").is_file():
        stops = tuple(dict.fromkeys((*stops, *_read_stop_ids(read_json_object(generation)))))
    model = _ModelFiles(
        name=name,
        kind=config.get("model_type", ""),
        vocab_size=int(config["vocab_size"]),
        context=int(config[context_key]),
        eos=stops,
        tokenizer=InertTokenizer(spec, name=name, eos_token_id=stops[0] if stops else None),
        template=template.find_template(folder),
    )
    if model.tokenizer.largest_id >= model.vocab_size:
        raise ConfigError(
            f"the tokenizer of {name} has ids up to {model.tokenizer.largest_id}, outside the vocabulary of "
            f"{model.vocab_size} in its config.json: it is another model's, or tokens were added only to it",
            fix="give the model the tokenizer that it was trained with, or resize its embedding and save both",
        )
    return model


def _read_stop_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get("eos_token_id")
    return () if ids is None else tuple(int(each) for each in (ids if isinstance(ids, list) else [ids]))


def _choose_codec(model: _ModelFiles, thinking: bool) -> Codec:
    families = FAMILIES.get(model.kind, ())
    if model.template is None:
        if not families:
            raise ConfigError(
                f"no renderer for model_type {model.kind!r} of {model.name}, which has no chat template",
                fix="give the model a chat template (chat_template.jinja)",
            )
        return _make_codec(model, families[0], thinking)
    similar = ""  # a family that renders prompts as the template does, but not histories
    for family in families:
        # some models have one mode only and ignore the switch: use the mode that their template renders
        for enable_thinking in (thinking, not thinking):
            try:
                codec = _make_codec(model, family, thinking, enable_thinking=enable_thinking)
            except ConfigError:
                break  # another family's tokenizer: the template says why if it cannot be used either
            if _has_same_prompt(codec, model.template, thinking=thinking):
                if all(
                    _has_same_history(codec, model.template, later, last, thinking=thinking)
                    for later, last in HISTORIES
                ):
                    return codec
                similar = family
    try:
        return _make_codec(model, "template", thinking)
    except ConfigError as error:
        if not similar:
            raise
        raise ConfigError(
            f"the chat template of {model.name} writes calls, or messages after replies, otherwise than renderer "
            f"{similar}, and cannot render prompts itself: {error}",
            fix="restore the template that the model was published with",
        ) from error


def _make_codec(model: _ModelFiles, family: str, thinking: bool, *, enable_thinking: bool | None = None) -> Codec:
    enabled = thinking if enable_thinking is None else enable_thinking
    renderer: Any
    if family == "template" and model.template is not None:
        renderer = TemplateRenderer(model.tokenizer, model.template, eos=model.eos, thinking=enabled)
        call_format = renderer.format
    else:
        renderer, call_format = make_package_renderer(
            model.tokenizer, family, thinking=enabled, keep_thoughts=not thinking
        )
    return Codec(
        model.tokenizer,
        renderer,
        name=model.name,
        family=family,
        format=call_format,
        vocab_size=model.vocab_size,
        context=model.context,
        thinking=thinking,
    )


def _check_thinking(chat_template: Template, codec: Codec) -> None:
    if codec.format.always_reasons:
        if not codec.thinking:
            raise ConfigError(f"{codec.name} always reasons before it replies", fix="set model.thinking=true")
        return
    if not codec.thinking:
        return
    on, off = (chat_template.apply(OPENING, (), thinking=thinking) for thinking in (True, False))
    if on == off and ("<think>" not in on or on.rstrip().endswith("</think>")):
        raise ConfigError(
            f"model.thinking=true, and the chat template of {codec.name} has no reasoning to switch on",
            fix="set model.thinking=false",
        )


def _has_same_prompt(codec: Codec, chat_template: Template, *, thinking: bool) -> bool:
    return all(
        codec.decode(codec.render(OPENING, tools)) == chat_template.apply(OPENING, tools, thinking=thinking)
        for tools in ((), TOOLS)
    )


def _has_same_history(codec: Codec, chat_template: Template, later: Messages, last: str, *, thinking: bool) -> bool:
    """Whether the codec renders `later` after `OPENING` as the template does."""
    # before `last`, whitespace and <think> tags may differ: renderers keep earlier thoughts so that prompts extend

    def split_at_last(text: str) -> tuple[str, str]:
        before, _, after = text.rpartition(last)
        return re.sub(r"</?think>|\s+", "", before), after

    try:
        messages = [parse_call_arguments(message) for message in (*OPENING, *later)]
        expected = chat_template.apply(messages, TOOLS, thinking=thinking)
    except ConfigError:
        return False  # the template says why if it cannot be used either
    return split_at_last(codec.decode(codec.render((*OPENING, *later), TOOLS))) == split_at_last(expected)
