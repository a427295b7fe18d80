"""The real vLLM on this CPU computes what the learner does, of the weights that the learner writes for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coderepairrl.engines.vllm.server import default_python

from .conftest import require_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "eos_token_id": 1},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "glm4_moe": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1},
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "seed_oss": {},
}
ROW = [5, 6, 7, 8, 9, 10]
ASK = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, row = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2, skip_tokenizer_init=True)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": row}], asked)
    print("LOGPROBS", json.dumps([each[id].logprob for each, id in zip(answer.prompt_logprobs[1:], row[1:])]))
"""


@pytest.mark.parametrize(("model_type", "fused"), [*((each, False) for each in FAMILIES), ("qwen3_moe", True)])
def test_vllm_computes_what_the_learner_does(model_type: str, fused: bool, tmp_path: Path) -> None:
    """Also of a checkpoint, which has the experts of a layer in one tensor (`fused`)."""
    from coderepairrl.learn.pack import pack, scored
    from coderepairrl.learn.policy import Policy, init_random

    require_vllm()
    (tmp_path / "config").mkdir()
    config = {"model_type": model_type, **SIZES, **FAMILIES[model_type]}
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    init_random(tmp_path / "config", tmp_path / "model", 0)
    policy = Policy.load(tmp_path / "model")
    ours = policy.logprobs(pack(scored([ROW])), 1.0).tolist()
    served = tmp_path / "model"
    if fused:
        served = tmp_path / "checkpoint"
        served.mkdir()
        policy.save(served)
        index = json.loads((served / "model.safetensors.index.json").read_text())
        assert "model.layers.0.mlp.experts.gate_up_proj" in index["weight_map"]
    (tmp_path / "ask.py").write_text(ASK)
    alone = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    alone |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [default_python(), str(tmp_path / "ask.py"), str(served), json.dumps(ROW)]
    done = subprocess.run(command, env=os.environ | alone, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert said, done.stderr[-2000:]
    theirs = json.loads(said[0].removeprefix("LOGPROBS "))
    assert theirs == pytest.approx(ours, abs=1e-4)
