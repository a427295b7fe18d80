"""Miniatures of the model families: each one's special tokens and its chat template, or one in the same format.

Tokenizers split into bytes; configs name random weights of tiny models.
"""

from __future__ import annotations

import chatml
import frames
import lists
from chatml import read_published
from family import Family

from coderepairrl.tokens.shapes import Shape

ONE_CALL = ("several tool calls",)
SYSTEMS = ("a late system message", "several system messages")
QWEN = (*chatml.CHATML_TOKENS, *chatml.THOUGHTS)
QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
BOTH = ("tiny", "vllm")
FAMILIES = {
    "Qwen3": Family("qwen3", QWEN, read_published("qwen3"), QWEN_ENDS, renderer="qwen3", thinks=True, engines=BOTH),
    "Qwen3 MoE": Family("Qwen3 MoE", QWEN, read_published("qwen3"), QWEN_ENDS, renderer="qwen3", thinks=True),
    "Qwen3.5, 3.6": Family(
        "Qwen3.5",
        (*QWEN, *chatml.VISION),
        read_published("qwen3_5_think"),
        QWEN_ENDS,
        renderer="qwen3.5",
        format="qwen3_coder",
        thinks=True,
        opens=True,
        rewritten=SYSTEMS,
    ),
    "Qwen3-Coder": Family("Qwen3 MoE", QWEN, chatml.QWEN3_CODER, QWEN_ENDS, format="qwen3_coder"),
    "Qwen2.5-Coder": Family("Qwen2", chatml.CHATML_TOKENS, read_published("qwen2_5"), QWEN_ENDS, engines=BOTH),
    "Llama 3.1, 3.2, 3.3": Family(
        "Llama",
        chatml.LLAMA_TOKENS,
        read_published("llama3_1"),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        format="llama3_json",
        engines=BOTH,
        refused=ONE_CALL,
        rewritten=("no user first", *SYSTEMS[1:]),
    ),
    "Mistral (Tekken, v13)": Family(
        "Mistral",
        chatml.MISTRAL_TOKENS,
        chatml.MISTRAL,
        ("</s>",),
        bos="<s>",
        format="mistral",
        engines=BOTH,
        rewritten=tuple(sorted(set(Shape) - {Shape.ORPHAN})),
    ),
    "GLM-4.5, 4.6": Family(
        "GLM-4.5",
        frames.GLM_TOKENS,
        read_published("glm4moe"),
        GLM_ENDS,
        renderer="glm-4.5",
        format="glm45",
        thinks=True,
        prompts=("<|assistant|>\n<think></think>", "<|assistant|>"),
        rewritten=SYSTEMS[:1],
    ),
    "GLM-4.7": Family(
        "GLM-4.5",
        frames.GLM_TOKENS,
        frames.GLM47,
        GLM_ENDS,
        renderer="glm-5",
        format="glm45",
        thinks=True,
        opens=True,
        prompts=("<|assistant|></think>", "<|assistant|><think>"),
        rewritten=SYSTEMS[:1],
    ),
    "gpt-oss": Family(
        "gpt-oss",
        frames.HARMONY_TOKENS,
        read_published("gptoss"),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        format="openai",
        always=True,
        refused=ONE_CALL,
        forks=("in words, then",),
        rewritten=tuple(sorted({*SYSTEMS, Shape.ORPHAN})),
    ),
    "DeepSeek-V3.1": Family(
        "DeepSeek-V3",
        frames.DEEPSEEK_TOKENS,
        frames.DEEPSEEK,
        ("<｜end▁of▁sentence｜>",),
        bos="<｜begin▁of▁sentence｜>",
        format="deepseek_v31",
        rewritten=SYSTEMS,
    ),
    "MiniMax-M2": Family(
        "MiniMax-M2",
        frames.MINIMAX_TOKENS,
        frames.MINIMAX,
        ("[e~[",),
        bos="]~!b[",
        format="minimax_m2",
        always=True,
        opens=True,
        forks=("user message", "system message"),
        rewritten=SYSTEMS,
    ),
    "Seed-OSS": Family(
        "Seed-OSS",
        frames.SEED_TOKENS,
        frames.SEED,
        ("<seed:eos>",),
        bos="<seed:bos>",
        format="seed_oss",
        engines=BOTH,
    ),
    "Gemma 4 (E2B, E4B)": Family(
        "Gemma 4",
        frames.GEMMA4_TOKENS,
        read_published("gemma4"),
        ("<turn|>", "<eos>", "<|tool_response>"),
        bos="<bos>",
        format="gemma4",
        thinks=True,
        prompts=("<|turn>model\n", "<|turn>model\n"),
        thought=("<|channel>", "thought\n", "<channel|>"),
        forks=("in words, then a tool", "in words, then several", "words and a tool call", "call, then several"),
        config={"vocab_size_per_layer_input": 512},
        rewritten=(Shape.ORPHAN, Shape.AFTER_CALL),
    ),
    "Granite 4": Family("Granite 4", lists.GRANITE4_TOKENS, lists.GRANITE4, ("<|end_of_text|>",)),
    "Mistral (v3 to v7)": Family(
        "Mistral",
        lists.MISTRAL7_TOKENS,
        lists.MISTRAL7,
        ("</s>",),
        bos="<s>",
        format="mistral",
        engines=BOTH,
        rewritten=SYSTEMS,
    ),
    "Mistral (v11)": Family(
        "Mistral",
        lists.MISTRAL11_TOKENS,
        lists.MISTRAL11,
        ("</s>",),
        bos="<s>",
        format="mistral",
        engines=BOTH,
        rewritten=SYSTEMS,
    ),
    "SmolLM3": Family("SmolLM3", QWEN, read_published("qwen2_5"), QWEN_ENDS),
    "Nemotron 3": Family(
        "Nemotron-H",
        QWEN,
        read_published("nemotron_3_nano"),
        QWEN_ENDS,
        format="qwen3_coder",
        thinks=True,
        opens=True,
        prompts=("<think></think>", "<|im_start|>assistant\n"),
    ),
    "Kimi Linear, K2": Family(
        "Kimi Linear", lists.KIMI_TOKENS, lists.KIMI, ("<|im_end|>", "[EOS]"), bos="[BOS]", format="kimi_k2"
    ),
}
