"""Miniatures of the model families: each one's special tokens and a chat template in its published format.

The templates are written for these tests. Tokenizers split into bytes; configs name random weights of tiny models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import frames

HERMES_TOOLS = (
    r"{{- '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
    r"function signatures within <tools></tools> XML tags:\n<tools>' }}"
    r"{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
    r"""{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within """
    r"""<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}"""
    r"""\n</tool_call>' }}"""
)
HERMES_CALL = (
    r"""'<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson """
    r"""+ '}\n</tool_call>'"""
)
RESULT = (
    r"{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    r"{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    r"{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)


def chatml(*, lead: str, tools: str, calls: str, prompt: str, result: str = RESULT) -> str:
    """Qwen's frame around each generation's own ways."""
    return (
        r"{%- if messages[0].role == 'system' %}{%- set first = messages[0].content %}{%- set rest = messages[1:] %}"
        + rf"{{%- else %}}{{%- set first = {lead} %}}{{%- set rest = messages %}}{{%- endif %}}"
        + r"{%- if first or tools %}{{- '<|im_start|>system\n' + first }}"
        + rf"{{%- if tools %}}{tools}{{%- endif %}}{{{{- '<|im_end|>\n' }}}}{{%- endif %}}"
        + r"{%- for m in rest %}{%- if m.role == 'tool' %}"
        + result
        + r"{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant' }}"
        + calls
        + r"{{- '<|im_end|>\n' }}"
        + r"{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        + r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        + prompt
        + r"{%- endif %}"
    )


QWEN25 = chatml(
    lead="'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'",
    tools=HERMES_TOOLS,
    calls=r"{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
    rf"{{%- for call in m.tool_calls %}}{{{{- '\n' + {HERMES_CALL} }}}}{{%- endfor %}}",
    prompt="",
)
# The first message of Qwen3 stands without the blank lines where there is no system message; nothing here has none.
QWEN3 = chatml(
    lead="''",
    tools=HERMES_TOOLS,
    calls=r"{{- '\n' + m.content }}{%- for call in m.tool_calls %}{%- if m.content or not loop.first %}{{- '\n' }}"
    rf"{{%- endif %}}{{{{- {HERMES_CALL} }}}}{{%- endfor %}}",
    prompt=r"{%- if enable_thinking is defined and enable_thinking is false %}"
    r"{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
)
QWEN3_CODER = chatml(
    lead="'You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks.' if tools else ''",
    tools=r"{{- '\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}{%- for tool in tools %}"
    r"{{- '\n<function>\n<name>' + tool.function.name + '</name>\n<description>' + tool.function.description }}"
    r"{{- '</description>\n<parameters>' }}{%- for name, field in tool.function.parameters.properties | items %}"
    r"{{- '\n<parameter>\n<name>' + name + '</name>\n<type>' + field.type + '</type>\n</parameter>' }}{%- endfor %}"
    r"{{- '\n</parameters>\n</function>' }}{%- endfor %}{{- '\n</tools>\n\nIf you choose to call a function ONLY "
    r"reply in the following format with NO suffix:\n\n<tool_call>\n<function=example_function_name>\n"
    r"<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>' }}",
    calls=r"{%- if m.content %}{{- '\n' + m.content | trim + '\n' }}{%- endif %}{%- for call in m.tool_calls %}"
    r"{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    r"{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    r"{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    r"{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}",
    prompt="",
    result=r"{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}"
    r"{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    r"{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}",
)
_ARGUMENTS = (
    r"{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    r"{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    r"{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}"
)
QWEN35 = (
    r"{%- if messages[0].role == 'system' %}{%- set first = messages[0].content | trim %}{%- set rest = messages[1:] %}"
    r"{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}"
    r"{%- if tools %}{{- '<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}"
    r"{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
    r"{{- '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    r"<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    r"<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    r"</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified "
    r"format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    r"- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural "
    r"language BEFORE the function call, but NOT after\n- If there is no function call available, answer the question "
    r"like normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>' }}"
    r"{%- if first %}{{- '\n\n' + first }}{%- endif %}{{- '<|im_end|>\n' }}"
    r"{%- elif first %}{{- '<|im_start|>system\n' + first + '<|im_end|>\n' }}{%- endif %}"
    r"{%- set last = namespace(query=-1) %}{%- for m in rest %}{%- if m.role == 'user' %}"
    r"{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}"
    r"{%- for m in rest %}{%- if m.role == 'user' or m.role == 'system' %}"
    r"{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}"
    r"{%- elif m.role == 'tool' %}" + RESULT + r"{%- else %}{{- '<|im_start|>assistant\n' }}"
    r"{%- if loop.index0 > last.query %}{{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}"
    r"{%- endif %}{{- m.content | trim }}{%- for call in m.tool_calls or [] %}"
    r"{%- if loop.first and m.content | trim %}{{- '\n\n' }}{%- elif not loop.first %}{{- '\n' }}{%- endif %}"
    r"{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    + _ARGUMENTS
    + r"{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    r"{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}"
    r"{%- endif %}"
)
HEADER = r"'<|start_header_id|>%s<|end_header_id|>\n\n'"
LLAMA3 = (
    r"{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set first = messages[0].content | trim %}"
    r"{%- set rest = messages[1:] %}{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}"
    rf"{{{{- {HEADER % 'system'} }}}}{{%- if tools %}}{{{{- 'Environment: ipython\n' }}}}{{%- endif %}}"
    r"{{- 'Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n' + first + '<|eot_id|>' }}"
    r"{%- for m in rest %}{%- if loop.first and tools %}"
    rf"{{{{- {HEADER % 'user'} }}}}{{{{- 'Given the following functions, please respond with a JSON for a function "
    r"call with its proper arguments that best answers the given prompt.\n\nRespond in the format "
    r"""{"name": function name, "parameters": dictionary of argument name and its value}.Do not use variables."""
    r"\n\n' }}"
    r"{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}"
    r"{{- m.content | trim + '<|eot_id|>' }}{%- elif m.tool_calls %}{%- if m.tool_calls | length != 1 %}"
    r"{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    rf"{{%- set call = m.tool_calls[0].function %}}{{{{- {HEADER % 'assistant'} }}}}"
    r"""{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}"""
    rf"{{%- elif m.role == 'tool' %}}{{{{- {HEADER % 'ipython'} + m.content | tojson + '<|eot_id|>' }}}}"
    r"{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    r"{%- endif %}{%- endfor %}"
    rf"{{%- if add_generation_prompt %}}{{{{- {HEADER % 'assistant'} }}}}{{%- endif %}}"
)
MISTRAL = (
    r"{{- bos_token }}{%- if messages[0].role == 'system' %}"
    r"{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{%- set rest = messages[1:] %}"
    r"{%- else %}{%- set rest = messages %}{%- endif %}"
    r"{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    r"{%- set turns = namespace(index=0) %}{%- for m in rest %}"
    r"{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    r"{%- if (m.role == 'user') != (turns.index % 2 == 0) %}"
    r"{{- raise_exception('roles must alternate user and assistant, except for tool calls and results') }}{%- endif %}"
    r"{%- set turns.index = turns.index + 1 %}{%- endif %}"
    r"{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    r"{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    r"{%- else %}{{- m.content }}{%- for call in m.tool_calls or [] %}"
    r"{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}"
    r"{{- eos_token }}{%- endif %}{%- endfor %}"
)

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
THOUGHTS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LLAMA_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
MISTRAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]"),
)


@dataclass(frozen=True)
class Family:
    """What a miniature is made of, and what must come of it."""

    model_type: str
    tokens: tuple[str, ...]
    template: str
    eos: tuple[str, ...]
    bos: str = ""
    renderer: str = "template"
    format: str = "hermes"
    thinks: bool = False
    always: bool = False
    """Whether it reasons whatever it is told."""
    opens: bool = False
    """Whether prompts open the thoughts that are switched on."""
    prompts: tuple[str, str] = ("<think>\n\n</think>\n\n", "<|im_start|>assistant\n")
    """What prompts end with, without thoughts and with them (but for what opens these)."""
    thought: tuple[str, str, str] = ("<think>", "\n", "</think>")
    """What thoughts begin and end with, and the text after their first token."""
    refused: tuple[str, ...] = ()
    """Words in the names of conversations that the family does not know."""
    forks: tuple[str, ...] = ()
    """Words in the names of conversations that are rendered again, not extended."""
    engines: tuple[str, ...] = ("vllm",)
    config: tuple[tuple[str, Any], ...] = ()

    def write(self, folder: Path, **changes: Any) -> Path:
        """A folder with the family's config, tokenizer and template, and no weights."""
        spec, size = tokenizer(self.tokens)
        ids = {token: size - len(self.tokens) + at for at, token in enumerate(self.tokens)}
        config = {
            **{"model_type": self.model_type, "vocab_size": size, "max_position_embeddings": 4096},
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 8, "eos_token_id": [ids[token] for token in self.eos]},
            **dict(self.config),
            **changes,
        }
        named = {"bos_token": self.bos or None, "eos_token": self.eos[0]}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(spec)
        (folder / "tokenizer_config.json").write_text(json.dumps(named))
        (folder / "chat_template.jinja").write_text(self.template)
        return folder


def tokenizer(added: tuple[str, ...]) -> tuple[str, int]:
    """A byte-level ``tokenizer.json`` with special tokens, and its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    return made.to_str(), made.get_vocab_size()


def sampled(codec: Any, messages: list[dict[str, Any]], news: list[dict[str, Any]], tools: Any) -> list[int]:
    """Canonical ids of the last of `messages`, a reply, up to its stop token, which may begin `news`."""
    prompt, whole = codec.render(messages[:-1], tools), codec.render(messages, tools, prompt=False)
    assert whole[: len(prompt)] == prompt
    ends = [at for at in range(len(prompt), len(whole)) if whole[at] in codec.stop_ids]
    if ends:
        return list(whole[len(prompt) : ends[-1] + 1])
    return list(codec.render([*messages, *news], tools)[len(prompt) : len(whole) + 1])


ONE_CALL = ("several tool calls",)
_GLM = (
    *(("n_routed_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 16)),
    *(("first_k_dense_replace", 1), ("n_group", 1), ("topk_group", 1)),
)
FAMILIES = {
    "Qwen3": Family(
        "qwen3",
        (*CHATML_TOKENS, *THOUGHTS),
        QWEN3,
        ("<|im_end|>", "<|endoftext|>"),
        renderer="qwen3",
        thinks=True,
        engines=("tiny", "vllm"),
        config=(("tie_word_embeddings", True), ("rms_norm_eps", 1e-6)),
    ),
    "Qwen3 MoE": Family(
        "qwen3_moe",
        (*CHATML_TOKENS, *THOUGHTS),
        QWEN3,
        ("<|im_end|>", "<|endoftext|>"),
        renderer="qwen3",
        thinks=True,
        config=(("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 16)),
    ),
    "Qwen3.5, 3.6": Family(
        "qwen3_5_text",
        (*CHATML_TOKENS, *THOUGHTS, *VISION),
        QWEN35,
        ("<|im_end|>", "<|endoftext|>"),
        renderer="qwen3.5",
        format="qwen3_coder",
        thinks=True,
        opens=True,
        config=(
            *(("linear_num_key_heads", 2), ("linear_num_value_heads", 4), ("linear_key_head_dim", 8)),
            *(("linear_value_head_dim", 8), ("layer_types", ["linear_attention", "full_attention"])),
        ),
    ),
    "Qwen3-Coder": Family(
        "qwen3_moe",
        (*CHATML_TOKENS, *THOUGHTS),
        QWEN3_CODER,
        ("<|im_end|>", "<|endoftext|>"),
        format="qwen3_coder",
        config=(("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 16)),
    ),
    "Qwen2.5-Coder": Family("qwen2", CHATML_TOKENS, QWEN25, ("<|im_end|>", "<|endoftext|>")),
    "Llama 3.1, 3.2, 3.3": Family(
        "llama",
        LLAMA_TOKENS,
        LLAMA3,
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
        format="llama3_json",
        refused=ONE_CALL,
    ),
    "Mistral (Tekken, v13)": Family(
        "mistral",
        MISTRAL_TOKENS,
        MISTRAL,
        ("</s>",),
        bos="<s>",
        format="mistral",
        refused=("tool call, then a user", "tool calls, then a user", "result and a user"),
        config=(("sliding_window", None),),  # as all with this tokenizer have it
    ),
    "GLM-4.5, 4.6": Family(
        "glm4_moe",
        frames.GLM_TOKENS,
        frames.GLM45,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        renderer="glm-4.5",
        format="glm45",
        thinks=True,
        prompts=("<|assistant|>\n<think></think>", "<|assistant|>"),
        config=_GLM,
    ),
    "GLM-4.7": Family(
        "glm4_moe",
        frames.GLM_TOKENS,
        frames.GLM47,
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        renderer="glm-5",
        format="glm45",
        thinks=True,
        opens=True,
        prompts=("<|assistant|></think>", "<|assistant|><think>"),
        config=_GLM,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        frames.HARMONY_TOKENS,
        frames.HARMONY,
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        format="openai",
        always=True,
        refused=(*ONE_CALL, "a reply in words, then a tool", "in words, then several tool"),
        forks=("in words, then a user", "tool call, then several"),
        config=(("num_local_experts", 4), ("num_experts_per_tok", 2), ("sliding_window", 8)),
    ),
    "DeepSeek-V3.1": Family(
        "deepseek_v3",
        frames.DEEPSEEK_TOKENS,
        frames.DEEPSEEK,
        ("<｜end▁of▁sentence｜>",),
        bos="<｜begin▁of▁sentence｜>",
        format="deepseek_v31",
        refused=(),
        config=(
            *(("n_routed_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 16), ("n_group", 1)),
            *(("topk_group", 1), ("q_lora_rank", 8), ("kv_lora_rank", 8), ("qk_nope_head_dim", 8)),
            *(
                ("qk_rope_head_dim", 4),
                ("v_head_dim", 8),
                ("first_k_dense_replace", 1),
                ("num_key_value_heads", 4),
                ("head_dim", 4),
            ),
        ),
    ),
    "MiniMax-M2": Family(
        "minimax_m2",
        frames.MINIMAX_TOKENS,
        frames.MINIMAX,
        ("[e~[",),
        bos="]~!b[",
        format="minimax_m2",
        always=True,
        opens=True,
        forks=("user message",),
        config=(("num_local_experts", 4), ("num_experts_per_tok", 2)),
    ),
    "Seed-OSS": Family(
        "seed_oss", frames.SEED_TOKENS, frames.SEED, ("<seed:eos>",), bos="<seed:bos>", format="seed_oss"
    ),
    "Gemma 4 (E2B, E4B)": Family(
        "gemma4_text",
        frames.GEMMA4_TOKENS,
        frames.GEMMA4,
        ("<turn|>", "<eos>", "<|tool_response>"),
        bos="<bos>",
        format="gemma4",
        thinks=True,
        prompts=("<|turn>model\n", "<|turn>model\n"),
        thought=("<|channel>", "thought\n", "<channel|>"),
        forks=("in words, then a tool", "in words, then several", "words and a tool call", "call, then several"),
        config=(("hidden_size_per_layer_input", 8), ("vocab_size_per_layer_input", 512)),
    ),
}
