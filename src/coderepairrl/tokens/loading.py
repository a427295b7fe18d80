"""Loads a model's `Codec`: which renderer writes its prompts, and which ids structure its replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coderepairrl import models
from coderepairrl.errors import ConfigError, PrerequisiteError
from coderepairrl.tokens import template
from coderepairrl.tokens.codec import Codec, LoadedFrom
from coderepairrl.tokens.fallback import TemplateRenderer
from coderepairrl.tokens.formats import HERMES, NEVER, QWEN3_CODER, Format, Reader
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reply import Markers
from coderepairrl.tokens.template import Template
from coderepairrl.tokens.verify import QUESTION, TOOLS

FAMILIES = {"qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_5_text": "qwen3.5", "qwen3_5_moe_text": "qwen3.5"}
"""Renderers by ``model_type``; all other models use their chat template (`fallback`)."""
RENDERERS = ("qwen3", "qwen3.5", "template")


@dataclass(frozen=True, slots=True)
class _Model:
    """What the codec needs from a model's folder."""

    name: str
    kind: str
    """``model_type``."""
    vocab_size: int
    context: int
    eos: tuple[int, ...]
    tokenizer: InertTokenizer
    template: Template | None


def load(model: str | Path, *, renderer: str = "auto", thinking: bool = False) -> Codec:
    """The codec of `model`, a folder in Hugging Face layout or a name on the hub. Loads no torch.

    `renderer` ``auto`` is the one for the config's ``model_type`` if its output agrees with the model's chat template
    (or there is none), else ``template``, which renders by the chat template itself. A named renderer is not compared.
    Raises `ConfigError`, `PrerequisiteError`.
    """
    folder = _folder(model)
    described = _read(str(model), folder)
    family = _family(described, renderer)
    if thinking and described.template is not None:
        _check_thinks(described.template, described.name)
    codec = _agreeing(described, family, thinking) if renderer == "auto" else _codec(described, family, thinking)
    codec.loaded_from = LoadedFrom(str(folder.absolute()), renderer, thinking)
    return codec


def _read(name: str, folder: Path) -> _Model:
    """The model in `folder`. Raises `ConfigError` for a multimodal one, or one with another model's tokenizer."""
    config = _object(folder / "config.json")
    if "text_config" in config:
        fix = f"crrl export {name} FOLDER writes its language model alone" if models.multimodal(folder) else ""
        raise ConfigError(
            f"{name} is multimodal (its config.json has a text_config)", fix=fix or "use a model of text only"
        )
    config = _object(folder / "config.json", "vocab_size", "max_position_embeddings")
    spec = _object(folder / "tokenizer.json", "model")
    eos = config.get("eos_token_id")
    stops = () if eos is None else tuple(int(each) for each in (eos if isinstance(eos, list) else [eos]))
    model = _Model(
        name=name,
        kind=config.get("model_type", ""),
        vocab_size=int(config["vocab_size"]),
        context=int(config["max_position_embeddings"]),
        eos=stops,
        tokenizer=InertTokenizer(spec, name=name, eos_token_id=stops[0] if stops else None),
        template=template.find(folder),
    )
    if model.tokenizer.largest >= model.vocab_size:
        raise ConfigError(
            f"the tokenizer of {name} has ids up to {model.tokenizer.largest}, outside the vocabulary of "
            f"{model.vocab_size} in its config.json: it is another model's, or tokens were added to it alone",
            fix="give the model the tokenizer that it was trained with, or resize its embedding and save both",
        )
    return model


def _family(model: _Model, renderer: str) -> str:
    """The renderer (of `RENDERERS`) to try for `model`. Raises `ConfigError` where there is none."""
    family, source = renderer, model.template
    if renderer == "auto":
        family = FAMILIES.get(model.kind, "template" if source else "")
        if source is not None and "<think>" not in model.tokenizer.added:
            family = "template"  # the Qwen3 renderer needs the thinking tokens
    if family not in RENDERERS or (family == "template" and source is None):
        what = f"renderer {renderer!r}" if renderer != "auto" else f"model_type {model.kind!r}"
        raise ConfigError(
            f"no renderer for {what} of {model.name}" + (", which has no chat template" if source is None else ""),
            fix=f"give the model a chat template (chat_template.jinja), or choose one of: {', '.join(RENDERERS)}",
        )
    return family


def _agreeing(model: _Model, family: str, thinking: bool) -> Codec:
    """The codec by the renderer `family` if it agrees with the model's chat template, else by the template."""
    if model.template is None or family == "template":
        return _codec(model, family, thinking)
    # some models have one mode only and ignore the switch: use the mode that their template renders
    for enable_thinking in (thinking, not thinking):
        codec = _codec(model, family, thinking, enable_thinking=enable_thinking)
        if _agrees(codec, model.template, thinking=thinking):
            return codec
    return _codec(model, "template", thinking)


def _codec(model: _Model, family: str, thinking: bool, *, enable_thinking: bool | None = None) -> Codec:
    """The codec by the renderer `family`, whose thinking switch is `enable_thinking` (by default `thinking`)."""
    enabled = thinking if enable_thinking is None else enable_thinking
    renderer: Any
    if family == "template" and model.template is not None:
        renderer = TemplateRenderer(model.tokenizer, model.template, eos=model.eos, thinking=enabled)
        calls = renderer.format
    elif family == "qwen3.5":
        renderer = _qwen35(model.tokenizer, enable_thinking=enabled, keep_thoughts=not thinking)
        calls = QWEN3_CODER
    else:
        renderer = _qwen3(model.tokenizer, enable_thinking=enabled, keep_thoughts=not thinking)
        calls = HERMES
    return Codec(
        model.tokenizer,
        renderer,
        _markers(model.tokenizer, renderer.get_stop_token_ids(), calls, thoughts=family != "template"),
        name=model.name,
        family=family,
        format=calls,
        vocab_size=model.vocab_size,
        context=model.context,
        thinking=thinking,
    )


def _object(path: Path, *keys: str) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError` if it cannot be read or lacks one of `keys`."""
    fix = f"save or download {path.parent} again"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", fix=fix) from error
    if missing := [key for key in keys if not isinstance(value, dict) or key not in value]:
        raise ConfigError(f"{path} has no {' and no '.join(missing)}", fix=fix)
    result: dict[str, Any] = value
    return result


def _folder(model: str | Path) -> Path:
    """The folder with the model's config and tokenizer, downloaded if `model` is a name on the hub."""
    folder = Path(model)
    names = ("config.json", "tokenizer.json")
    if folder.is_dir():
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{folder} has no {' and no '.join(missing)}", fix="give a folder in Hugging Face layout")
        return folder
    from huggingface_hub import snapshot_download

    try:
        patterns = [*names, "tokenizer_config.json", "chat_template.jinja"]
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except Exception as error:  # a dozen types, from bad names to no network
        raise PrerequisiteError(
            f"{model} is neither a folder nor a model that can be had: {error}", fix=f"hf download {model}"
        ) from error


def _markers(tokenizer: InertTokenizer, stop: Sequence[int], calls: Format, *, thoughts: bool) -> Markers:
    """The ids that structure replies. Raises `ConfigError` for a missing one; those of thinking only if `thoughts`."""
    names = ("<think>", "</think>", calls.begin, calls.end)
    needed = [*(names[:2] if thoughts else ()), *calls.needs]
    if missing := [name for name in needed if name not in tokenizer.added]:
        raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} has no token {', '.join(missing)}")
    think, thought, begin, end = (tokenizer.added.get(name, NEVER) for name in names)
    return Markers(frozenset(stop), think, thought, begin, end, calls.held)


def _check_thinks(source: Template, model: str) -> None:
    """Raise `ConfigError` if the template has no thinking to switch on: it knows no thoughts, or always closes them."""
    on, off = (source.apply(QUESTION, (), thinking=thinking) for thinking in (True, False))
    if on == off and ("<think>" not in on or on.rstrip().endswith("</think>")):
        raise ConfigError(
            f"model.thinking=true, and the chat template of {model} has no reasoning to switch on",
            fix="set model.thinking=false",
        )


def _qwen3(tokenizer: InertTokenizer, *, enable_thinking: bool, keep_thoughts: bool) -> Any:
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer

    retention = "all" if keep_thoughts else None
    try:
        return Qwen3Renderer(
            tokenizer, Qwen3RendererConfig(enable_thinking=enable_thinking, thinking_retention=retention)
        )
    except AssertionError as error:
        raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} is not Qwen3's: {error}") from error


def _qwen35(tokenizer: InertTokenizer, *, enable_thinking: bool, keep_thoughts: bool) -> Any:
    """Its template forgets the empty thoughts of earlier turns, which `renderers` keeps as they were sampled.

    Calls are read by `formats`, which keep the indentation of values.
    """
    from renderers.configs import Qwen35RendererConfig
    from renderers.qwen35 import Qwen35Renderer
    from renderers.reasoning import prompt_ends_in_reasoning

    class Renderer(Qwen35Renderer):  # type: ignore[misc]
        def parse_response(
            self, token_ids: Sequence[int], *, tools: Any = None, prompt_ids: Sequence[int] | None = None
        ) -> Any:
            ids, stop = list(token_ids), set(self.get_stop_token_ids())
            ids = ids[: next((at for at, token in enumerate(ids) if token in stop), len(ids))]
            reader = Reader(tokenizer)
            thinking = bool(prompt_ends_in_reasoning(reader, list(prompt_ids or ()), stop_ids=stop))
            return QWEN3_CODER.read(reader, ids, list(tools or ()), thinking)

    retention = "all" if keep_thoughts else None
    try:
        return Renderer(tokenizer, Qwen35RendererConfig(enable_thinking=enable_thinking, thinking_retention=retention))
    except AssertionError as error:
        raise ConfigError(f"the tokenizer of {tokenizer.name_or_path} is not Qwen3.5's: {error}") from error


def _agrees(codec: Codec, source: Template, *, thinking: bool) -> bool:
    """Whether the codec renders the first prompt of a conversation as the template does."""
    return all(
        codec.decode(codec.render(QUESTION, tools)) == source.apply(QUESTION, tools, thinking=thinking)
        for tools in ((), TOOLS)
    )
