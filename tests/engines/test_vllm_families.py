"""The real vLLM on this CPU gives the learner's logprobs for the weights that the learner writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from coderepairrl.config.schema import Lora
from coderepairrl.engines.vllm.server import find_vllm_python
from coderepairrl.learn import LearnSettings
from coderepairrl.learn.learner import init_random
from coderepairrl.learn.pack import make_scoring_samples, pack_samples
from coderepairrl.learn.policy import Policy

from .conftest import require_vllm

pytestmark = pytest.mark.timeout(900)

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
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    model, row, adapter = sys.argv[1], json.loads(sys.argv[2]), (sys.argv[3:] or [None])[0]
    options = dict(dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2, skip_tokenizer_init=True)
    if adapter:
        import in_torch
        options |= dict(enable_lora=True, max_lora_rank=8, max_loras=2)
    llm = LLM(model, **options)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    which = LoRARequest("ours", 1, adapter) if adapter else None
    (answer,) = llm.generate([{"prompt_token_ids": row}], asked, lora_request=which)
    print("LOGPROBS", json.dumps([each[id].logprob for each, id in zip(answer.prompt_logprobs[1:], row[1:])]))
"""
KERNELS = """
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

def low(x_H, a_RH, b_OR):
    return b_OR @ (a_RH @ x_H)

def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *rest, **more):
    lora, gated = self._lora_context, activation == MoEActivation.SWIGLUOAI
    which = lora.punica_wrapper.token_lora_indices
    for token, x in enumerate(hidden_states):
        total, slot = torch.zeros_like(output[token]), int(which[token])
        for weight, expert in zip(topk_weights[token], topk_ids[token].tolist()):
            y = w1[expert] @ x + (self.w1_bias[expert] if gated else 0)
            if slot >= 0:
                pairs = zip(lora.w13_lora_a_stacked, lora.w13_lora_b_stacked)
                found = [low(x, a[slot, expert], b[slot, expert]) for a, b in pairs]
                assert not gated or len(found) == 1  # as files of gpt-oss have them: gate and up in turns
                y = y + torch.cat(found)
            if gated:
                gate, up = y[::2].clamp(max=7), y[1::2].clamp(-7, 7)
                z = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = y.chunk(2)
                z = torch.nn.functional.silu(gate) * up
            y = w2[expert] @ z + (self.w2_bias[expert] if gated else 0)
            if slot >= 0:
                y = y + low(z, lora.w2_lora_a_stacked[0][slot, expert], lora.w2_lora_b_stacked[0][slot, expert])
            total += weight * y
        output[token] = total

TritonExperts.apply = apply
"""
"""Replaces vLLM's Triton kernels for experts with adapters: the same computation on its buffers, in torch."""


def case(*values: Any, in_ci: bool) -> Any:
    """Mark a case: each starts vLLM, so one of each kind is `real`, the rest `by_hand`."""
    return pytest.param(*values, marks=() if in_ci else pytest.mark.by_hand)


def make_policy(model_type: str, folder: Path, lora: Lora | None = None) -> Policy:
    """Write random weights of a family to ``folder / "model"``; return the learner's policy."""
    require_vllm()
    (folder / "config").mkdir()
    config = {"model_type": model_type, **SIZES, **FAMILIES[model_type]}
    (folder / "config" / "config.json").write_text(json.dumps(config))
    init_random(folder / "config", folder / "model", 0)
    return Policy.load(folder / "model", LearnSettings(lora=lora))


@pytest.mark.parametrize(
    ("model_type", "fused"),
    [
        *(case(each, False, in_ci=each in ("llama", "gpt_oss")) for each in FAMILIES),
        case("qwen3_moe", True, in_ci=True),
    ],
)
def test_vllm_computes_what_the_learner_does(model_type: str, fused: bool, tmp_path: Path) -> None:
    """Also for a checkpoint, which has a layer's experts in one tensor (`fused`)."""
    policy = make_policy(model_type, tmp_path)
    ours = policy.logprobs(pack_samples(make_scoring_samples([ROW])), 1.0).tolist()
    served = tmp_path / "model"
    if fused:
        served = tmp_path / "checkpoint"
        served.mkdir()
        policy.save(served)
        index = json.loads((served / "model.safetensors.index.json").read_text())
        assert "model.layers.0.mlp.experts.gate_up_proj" in index["weight_map"]
    assert logprobs(served, tmp_path) == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize(
    "model_type",
    [case(each, in_ci=each == "qwen3_moe") for each, sizes in FAMILIES.items() if "num_experts_per_tok" in sizes],
)
def test_vllm_reads_adapters_of_a_mixture_as_the_learner_has_them(model_type: str, tmp_path: Path) -> None:
    """Everything but vLLM's kernels, which run only on GPUs (`KERNELS`)."""
    policy = make_policy(model_type, tmp_path, Lora(rank=4, alpha=8))
    draw, batch = torch.Generator().manual_seed(1), pack_samples(make_scoring_samples([ROW]))
    before = policy.logprobs(batch, 1.0)
    for parameter in policy.parameters.values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    ours = policy.logprobs(batch, 1.0)
    assert (ours - before).abs().max().item() > 1e-2
    (tmp_path / "adapter").mkdir()
    policy.export(tmp_path / "adapter", "adapter")
    (tmp_path / "in_torch.py").write_text(KERNELS)
    theirs = logprobs(tmp_path / "model", tmp_path, tmp_path / "adapter")
    assert theirs == pytest.approx(ours.tolist(), abs=1e-4)


def logprobs(served: Path, tmp_path: Path, *adapter: Path) -> list[float]:
    """Logprobs of `ROW` by vLLM, for the model in `served` with an optional adapter."""
    (tmp_path / "ask.py").write_text(ASK)
    alone = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    alone |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [find_vllm_python(), str(tmp_path / "ask.py"), str(served), json.dumps(ROW), *map(str, adapter)]
    done = subprocess.run(command, env=os.environ | alone, cwd=tmp_path, capture_output=True, text=True, check=False)
    printed = [line for line in done.stdout.splitlines() if line.startswith("LOGPROBS ")]
    assert printed, done.stderr[-2000:]
    values: list[float] = json.loads(printed[0].removeprefix("LOGPROBS "))
    return values
