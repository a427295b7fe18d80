"""A family of models and its miniature: a tokenizer that splits into bytes, and a config of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from architectures import ARCHITECTURES, Architecture
from coderepairrl.tokens import Codec, Reply
from coderepairrl.tokens.verify import OPENING, TOOLS
from miniatures import split_bytes


@dataclass(frozen=True)
class Family:
    """Parts of a miniature, and expected properties."""

    architecture: str
    """A name in ARCHITECTURES, or a model_type of transformers."""
    tokens: tuple[str, ...]
    template: str
    eos: tuple[str, ...]
    bos: str = ""
    renderer: str = "template"
    format: str = "hermes"
    thinks: bool = False
    always: bool = False
    """Whether its reasoning cannot be switched off."""
    opens: bool = False
    """Whether prompts open the thoughts that are switched on."""
    prompts: tuple[str, str] = ("<think>\n\n</think>\n\n", "<|im_start|>assistant\n")
    """Ends of prompts without and with thoughts (less the words that open these)."""
    thought: tuple[str, str, str] = ("<think>", "\n", "</think>")
    """Begin and end of thoughts, and the text after their first token."""
    refused: tuple[str, ...] = ()
    """Words in the names of conversations that the family does not support."""
    rewritten: tuple[str, ...] = ()
    """Shapes of conversations that its template cannot write."""
    forks: tuple[str, ...] = ()
    """Words in the names of conversations that are rendered again, not extended."""
    engines: tuple[str, ...] = ("vllm",)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        architecture = ARCHITECTURES.get(self.architecture)
        return architecture.model_type if architecture else self.architecture

    def write(self, folder: Path, vocabulary: Any = None, **changes: Any) -> Path:
        """Write the family's config, tokenizer and template, without weights, to `folder`.

        `vocabulary` is a `tokenizers.Tokenizer` without special tokens; by default bytes.
        """
        spec, size = make_tokenizer(self.tokens, vocabulary)
        ids = {token: size - len(self.tokens) + at for at, token in enumerate(self.tokens)}
        sizes = {
            "vocab_size": size,
            "max_position_embeddings": 4096,
            "eos_token_id": [ids[token] for token in self.eos],
        }
        architecture = ARCHITECTURES.get(self.architecture, Architecture(self.architecture, {}))
        replace(architecture, config=architecture.config | sizes | self.config | changes).write(folder)
        named = {"bos_token": self.bos or None, "eos_token": self.eos[0]}
        (folder / "tokenizer.json").write_text(spec)
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "chat_template.jinja").write_text(self.template)
        return folder


def make_tokenizer(added: tuple[str, ...], vocabulary: Any = None) -> tuple[str, int]:
    """Make a ``tokenizer.json`` with special tokens; returns it and the vocabulary size."""
    from tokenizers import AddedToken

    tokenizer = vocabulary or split_bytes()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    return tokenizer.to_str(), tokenizer.get_vocab_size()


def learn_tokenizer(pattern: str, *texts: str) -> Any:
    """Learn a tokenizer of 600 pieces from `texts`, which are split by `pattern`."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render_reply(codec: Any, messages: list[dict[str, Any]], news: list[dict[str, Any]], tools: Any) -> list[int]:
    """Canonical ids of the last of `messages`, a reply, up to its stop token, which may begin `news`."""
    prompt, whole = codec.render(messages[:-1], tools), codec.render(messages, tools, prompt=False)
    assert whole[: len(prompt)] == prompt
    ends = [at for at in range(len(prompt), len(whole)) if whole[at] in codec.stop_ids]
    if ends:
        return list(whole[len(prompt) : ends[-1] + 1])
    return list(codec.render([*messages, *news], tools)[len(prompt) : len(whole) + 1])


def read_pieces(codec: Codec, ids: Sequence[int], *sizes: int) -> Reply:
    """Read `ids` in pieces of `sizes`, repeated; assert that this gives the same reply as reading them at once."""
    prompt, deltas, at, pieces = codec.render(OPENING, TOOLS), [], 0, cycle(sizes)
    reader = codec.stream(prompt, TOOLS)
    while at < len(ids):
        size = next(pieces)
        deltas += reader.feed(ids[at : at + size])
        at += size
    reply, rest = reader.close()
    deltas += rest
    assert reply == codec.parse(ids, prompt, TOOLS)
    assert "".join(delta.content for delta in deltas) == reply.content
    assert "".join(delta.reasoning for delta in deltas) == reply.reasoning
    assert tuple(delta.call for delta in deltas if delta.call) == reply.calls
    return reply
