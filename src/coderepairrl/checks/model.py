"""Exam of model folders: prompts, replies, engines (``crrl check model FOLDER``)."""

from __future__ import annotations

from pathlib import Path

from coderepairrl import tokens
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.errors import ConfigError, EngineFault, UsageError
from coderepairrl.learn import check_weights
from coderepairrl.processes.scratch import scratch
from coderepairrl.registry import Finding
from coderepairrl.sync import weights
from coderepairrl.tokens.codec import NO_TOOLS_ADVICE
from coderepairrl.tokens.verify import verify_codec


async def examine_model(folder: Path, *, thinking: bool = False) -> list[Finding]:
    """Examine a model, `thinking` as in `load_codec`. Raises `ConfigError` for an unusable one."""
    codec = tokens.load_codec(folder, thinking=thinking)
    verified = verify_codec(codec)
    writer = "its own chat template" if codec.family == "template" else f"renderer {codec.family}"
    calls = f"format {codec.format.name}" if codec.has_tools else f"its template writes no tools: {NO_TOOLS_ADVICE}"
    ends = ", ".join(codec.decode([stop]) for stop in codec.stop_ids)
    return [
        Finding("prompts are written", True, f"by {writer}, reasoning {'on' if thinking else 'off'}"),
        Finding("tool calls are read", True, f"{calls}; replies end with {ends}"),
        Finding("recorded ids are extended", True, _join_names("but for rendering again: ", verified.forks)),
        Finding("conversations it knows", True, _join_names("its template refuses ", verified.refused)),
        Finding("shapes that agents send", True, _join_names("written in another shape: ", verified.rewritten)),
        await _weights_finding(folder, codec),
        Finding("engines", True, _describe_engines(folder)),
    ]


def _join_names(what: str, names: tuple[str, ...]) -> str:
    return what + "; ".join(names) if names else "all"


async def _weights_finding(folder: Path, codec: tokens.Codec) -> Finding:
    # Embedding rows beyond the last token are padding; with too few, some prompts are unreadable.
    name = "its weights fit"
    try:
        shapes = weights.read_headers(folder)
    except EngineFault as fault:
        return Finding(name, False, f"{fault}: {fault.fix or 'only model.init=random can use it'}")
    try:
        with scratch("model") as logs:
            await check_weights(folder, log_dir=logs)
    except UsageError as error:
        return Finding(name, False, f"{error} ({error.fix})" if error.fix else str(error))
    rows = next((each.shape[0] for key, each in shapes.items() if key.endswith("embed_tokens.weight")), None)
    detail = f"{codec.tokenizer.largest_id + 1} tokens, {codec.vocab_size} by its config, {rows} rows of its embedding"
    return Finding(name, rows == codec.vocab_size, detail)


def _describe_engines(folder: Path) -> str:
    try:
        ModelConfig.read(folder).check_tensors(folder, weights.read_headers(folder))
    except (ConfigError, EngineFault) as error:
        return f"vllm; not tiny: {error}"
    return "tiny, vllm"
