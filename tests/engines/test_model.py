"""The forward pass: transformers' logits, and rows whose bits nothing around them can change."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from coderepairrl.engines.tiny.config import ModelConfig, weights_of
from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.engines.tiny.scheduler import Piece
from coderepairrl.engines.tiny.server import read_weights
from coderepairrl.errors import ConfigError

SHAPES: dict[str, dict[str, Any]] = {
    "tied, two heads per key": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "untied, no grouping": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "odd sizes": {
        "hidden_size": 96,
        "intermediate_size": 100,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
    },
}


def build(folder: Path, **changes: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": 265,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).eval()
    with torch.no_grad():  # norms of all ones would hide a forgotten one
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_transformers_and_rows_do_not_know_their_neighbours(shape: dict[str, Any], tmp_path: Path) -> None:
    theirs = build(tmp_path, **shape)
    config = ModelConfig.read(tmp_path)
    weights = read_weights(config, weights_of(tmp_path))
    model = TinyModel(config, slots=9, context=1024)
    rng = random.Random(0)
    sequences = [[rng.randrange(config.vocab_size) for _ in range(size)] for size in (1, 2, 3, 65, 130, 300, 700)]
    alone = []
    for ids in sequences:
        alone.append(model.forward(weights, ids, [Piece(0, 0, len(ids))], range(len(ids))))
        with torch.inference_mode():
            torch.testing.assert_close(alone[-1], theirs(torch.tensor([ids])).logits[0], atol=1e-5, rtol=0)
    for _ in range(3):
        mixed = in_random_company(model, weights, sequences, rng)
        assert all(same(a, b) for a, b in zip(alone, mixed, strict=True))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit where the BLAS is known to allow it (see `coderepairrl.engines.tiny.model`)."""
    return torch.equal(a, b) if torch.backends.mkl.is_available() else torch.allclose(a, b, atol=1e-5, rtol=0)


def in_random_company(model: TinyModel, weights: Weights, sequences: list[list[int]], rng: random.Random) -> list[Any]:
    """Logits of every token, computed in random pieces that share their passes with other sequences' pieces."""
    slots = rng.sample(range(model.slots), len(sequences))
    at = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(done < len(ids) for done, ids in zip(at, sequences, strict=True)):
        ids, pieces, owners = [], [], []
        for i in sorted(range(len(sequences)), key=lambda i: slots[i]):
            left = len(sequences[i]) - at[i]
            if left and rng.random() < 0.8:
                size = min(left, rng.choice([1, 1, 1, 2, 3, 7, 50, 100, 400]))
                pieces.append(Piece(slots[i], at[i], size))
                ids += sequences[i][at[i] : at[i] + size]
                owners += [i] * size
                at[i] += size
        if ids:
            wanted = range(len(ids)) if rng.random() < 0.5 else [0, len(ids) - 1][: len(ids)]
            some = model.forward(weights, ids, pieces, wanted)
            every = model.forward(weights, ids, pieces, range(len(ids)))  # again: the cache gets the same bits
            assert same(some, every[list(wanted)])
            for row, owner in enumerate(owners):
                logits[owner].append(every[row])
    return [torch.stack(rows) for rows in logits]


def test_what_is_copied_or_wiped_is_whole(tmp_path: Path) -> None:
    build(tmp_path, **SHAPES["odd sizes"])
    config = ModelConfig.read(tmp_path)
    weights = read_weights(config, weights_of(tmp_path))
    model = TinyModel(config, slots=3, context=256)
    ids = [random.Random(3).randrange(265) for _ in range(150)]
    truth = model.forward(weights, ids, [Piece(0, 0, 150)], [149])
    model.copy(0, 2, 149)
    assert same(model.forward(weights, ids[149:], [Piece(2, 149, 1)], [0]), truth)
    model.wipe(2, 150)
    assert not same(model.forward(weights, ids[149:], [Piece(2, 149, 1)], [0]), truth)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": None}, "NoneType"),
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3Moe"),
    ],
)
def test_other_models_are_refused(miniature: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((miniature / "config.json").read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.read(tmp_path)


def test_the_old_and_the_new_place_of_rope_theta(miniature: Path, tmp_path: Path) -> None:
    raw = json.loads((miniature / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 12345.0}))
    assert ModelConfig.read(tmp_path).rope_theta == 12345.0
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": {"rope_theta": 54321.0}}))
    assert ModelConfig.read(tmp_path).rope_theta == 54321.0
