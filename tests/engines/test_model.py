"""The forward pass gives transformers' logits, and a row's bits do not depend on other rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from coderepairrl.engines.tiny import model as model_module
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.engines.tiny.model import TinyModel, Weights
from coderepairrl.engines.tiny.scheduler import Piece
from coderepairrl.engines.tiny.server import check_weights, read_weights
from coderepairrl.errors import ConfigError, EngineFault
from coderepairrl.sync.weights import list_weight_files

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied, two heads per key": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "odd sizes, biases": {
        "attention_bias": True,
        "hidden_size": 96,
        "intermediate_size": 100,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
    },
    "Llama, tied, scaled as Llama 3": {
        "model_type": "llama",
        "rope_parameters": LLAMA3,
    },
    "Llama, no grouping, all biases, slowed": {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
    "Mistral, a window of 100": {"model_type": "mistral", "sliding_window": 100, "tie_word_embeddings": False},
    "Qwen2, untied": {
        "model_type": "qwen2",
        "num_attention_heads": 6,
        "hidden_size": 192,
        "tie_word_embeddings": False,
    },
}


def build(folder: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any) -> Any:
    """Save a random model, a Qwen3 unless `changes` name another, and return it as transformers computes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 265,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.08,
        "pad_token_id": 0,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(settings | changes))).eval()
    with torch.no_grad():  # norms of all ones would hide a forgotten one, and so would biases of all zeros
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_those_of_transformers_and_do_not_depend_on_other_rows(
    shape: dict[str, Any], packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "PACK_BYTES", 0 if packed else 2**25)
    theirs = build(tmp_path, **shape)
    config = ModelConfig.read(tmp_path)
    weights = load(tmp_path)
    assert weights.head.packed == packed
    model = TinyModel(config, slots=9, context=1024)
    rng = random.Random(0)
    sequences = [[rng.randrange(config.vocab_size) for _ in range(size)] for size in (1, 2, 3, 65, 130, 300, 700)]
    alone = []
    for ids in sequences:
        alone.append(model.forward(weights, ids, [Piece(0, 0, len(ids))], range(len(ids))))
        with torch.inference_mode():
            torch.testing.assert_close(alone[-1], theirs(torch.tensor([ids])).logits[0], atol=1e-5, rtol=0)
    for _ in range(3):
        mixed = compute_in_pieces(model, weights, sequences, rng)
        assert all(same(a, b) for a, b in zip(alone, mixed, strict=True))


def load(folder: Path) -> Weights:
    config = ModelConfig.read(folder)
    check_weights(config, folder)
    return read_weights(config, folder)


def test_shards_of_bfloat16_are_computed_in_fp32(tmp_path: Path) -> None:
    theirs = build(tmp_path, dtype=torch.bfloat16, shard="100KB", model_type="llama")
    assert len(list_weight_files(tmp_path)) > 1
    model = TinyModel(ModelConfig.read(tmp_path), slots=1, context=64)
    ids = list(range(40))
    with torch.inference_mode():
        torch.testing.assert_close(
            model.forward(load(tmp_path), ids, [Piece(0, 0, 40)], range(40)),
            theirs(torch.tensor([ids])).logits[0],
            atol=1e-5,
            rtol=0,
        )
    list_weight_files(tmp_path)[1].unlink()
    with pytest.raises(EngineFault, match="no weights"):
        load(tmp_path)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit where the BLAS is known to allow it (see `coderepairrl.engines.tiny.model`)."""
    return torch.equal(a, b) if torch.backends.mkl.is_available() else torch.allclose(a, b, atol=1e-5, rtol=0)


def compute_in_pieces(model: TinyModel, weights: Weights, sequences: list[list[int]], rng: random.Random) -> list[Any]:
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
            output_rows = range(len(ids)) if rng.random() < 0.5 else [0, len(ids) - 1][: len(ids)]
            some = model.forward(weights, ids, pieces, output_rows)
            every = model.forward(weights, ids, pieces, range(len(ids)))  # again: the cache gets the same bits
            assert same(some, every[list(output_rows)])
            for row, owner in enumerate(owners):
                logits[owner].append(every[row])
    return [torch.stack(rows) for rows in logits]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "is GemmaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type='yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types={'sliding_attention'}"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters={'full_attention'}"),
        ({"vocab_size": None}, "NoneType"),
    ],
)
def test_other_models_are_refused(miniature: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((miniature / "config.json").read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.read(tmp_path)


def test_rope_theta_is_read_where_transformers_4_writes_it(miniature: Path, tmp_path: Path) -> None:
    raw = json.loads((miniature / "config.json").read_text())
    raw.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 12345.0}))
    assert ModelConfig.read(tmp_path).rope_theta == 12345.0
