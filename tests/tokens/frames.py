"""Chat templates of families that do not use Qwen's format, in their published formats, and their special tokens.

Written for these tests. GLM's text about tools is taken from the package `renderers`, whose prompts must agree.
"""

from __future__ import annotations

from renderers.glm5 import _TOOLS_FOOTER, _TOOLS_HEADER

# A reply is ended only by the next role.
GLM47 = (
    r"[gMASK]<sop>{%- if tools %}{{- '<|system|>" + _TOOLS_HEADER.replace("\n", r"\n") + r"' }}"
    r"{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}"
    r"{{- '" + _TOOLS_FOOTER.replace("\n", r"\n") + r"' }}{%- endif %}"
    r"{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    r"{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    r"{%- for m in messages %}{%- if m.role in ('system', 'user') %}{{- '<|' + m.role + '|>' + m.content }}"
    r"{%- elif m.role == 'tool' %}{{- '<|observation|>' if loop.previtem.role != 'tool' else '' }}"
    r"{{- '<tool_response>' + m.content + '</tool_response>' }}{%- else %}{{- '<|assistant|>' }}"
    r"{{- '<think>' + m.reasoning_content if m.reasoning_content and loop.index0 > last.user else '' }}"
    r"{{- '</think>' + m.content | trim }}"
    r"{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function.name }}"
    r"{%- for k, v in call.function.arguments | items %}{{- '<arg_key>' + k + '</arg_key>' }}"
    r"{{- '<arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}{%- endfor %}"
    r"{{- '</tool_call>' }}{%- endfor %}{%- endif %}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    r"{{- '<think>' if enable_thinking else '</think>' }}{%- endif %}"
)
GLM_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

HARMONY_TOKENS = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|call|>", "<|endofprompt|>"),
)

DEEPSEEK = (
    r"{{- bos_token }}{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}{%- if tools %}"
    r"{{- '\n\n## Tools\nYou have access to the following tools:\n' }}{%- for tool in tools %}"
    r"{{- tool | tojson + '\n' }}{%- endfor %}{%- endif %}{%- set at = namespace(user=false) %}"
    r"{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- set at.user = true %}"
    r"{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    r"{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜></think>' if at.user else '' }}{%- set at.user = false %}"
    r"{{- m.content }}{%- for call in m.tool_calls or [] %}{{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}"
    r"{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    r"{{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}{%- endfor %}{{- eos_token }}"
    r"{%- endif %}{%- endfor %}{%- if add_generation_prompt and at.user %}"
    r"{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif %}"
)
DEEPSEEK_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>", "<｜User｜>", "<｜Assistant｜>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
)

MINIMAX = (
    r"{%- if messages[0].role == 'system' %}{%- set first = messages[0].content %}{%- set rest = messages[1:] %}"
    r"{%- else %}{%- set first = 'You are a helpful assistant.' %}{%- set rest = messages %}{%- endif %}"
    r"{{- ']~!b[]~b]system\n' + first }}{%- if tools %}{{- '\n\n# Tools\n\n<tools>\n' }}{%- for tool in tools %}"
    r"{{- '<tool>' + tool.function | tojson(ensure_ascii=False) + '</tool>\n' }}{%- endfor %}{{- '</tools>' }}"
    r"{%- endif %}{{- '[e~[\n' }}{%- set last = namespace(user=-1) %}{%- for m in rest %}{%- if m.role == 'user' %}"
    r"{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    r"{%- for m in rest %}{%- if m.role == 'user' %}{{- ']~b]user\n' + m.content + '[e~[\n' }}"
    r"{%- elif m.role == 'tool' %}{{- ']~b]tool' if loop.previtem.role != 'tool' else '' }}"
    r"{{- '\n<response>' + m.content + '</response>' }}"
    r"{{- '[e~[\n' if loop.last or loop.nextitem.role != 'tool' else '' }}{%- else %}{{- ']~b]ai\n' }}"
    r"{%- if m.reasoning_content and loop.index0 > last.user %}"
    r"{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content }}"
    r"{%- if m.tool_calls %}{{- '\n<minimax:tool_call>\n' }}{%- for call in m.tool_calls %}"
    r"""{{- '<invoke name="' + call.function.name + '">\n' }}{%- for k, v in call.function.arguments | items %}"""
    r"""{{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\n' }}{%- endfor %}"""
    r"{{- '</invoke>\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}{{- '[e~[\n' }}{%- endif %}"
    r"{%- endfor %}{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}"
)
MINIMAX_TOKENS = (
    "]~!b[",
    "]~b]",
    "[e~[",
    "]!p~[",
    "<think>",
    "</think>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
)

SEED = (
    r"{%- for m in messages %}{%- if m.role == 'assistant' %}{{- bos_token + 'assistant\n' + m.content }}"
    r"{%- for call in m.tool_calls or [] %}{{- '\n<seed:tool_call>\n<function=' + call.function.name + '>\n' }}"
    r"{%- for k, v in call.function.arguments | items %}"
    r"{{- '<parameter=' + k + '>' + (v if v is string else v | tojson) + '</parameter>\n' }}{%- endfor %}"
    r"{{- '</function>\n</seed:tool_call>' }}{%- endfor %}{{- eos_token }}"
    r"{%- else %}{{- bos_token + m.role + '\n' + m.content }}{%- if tools and loop.first %}"
    r"{{- '\n\nTools:\n' + tools | tojson }}{%- endif %}{{- eos_token }}{%- endif %}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- bos_token + 'assistant\n' }}{%- endif %}"
)
SEED_TOKENS = (
    *("<seed:bos>", "<seed:eos>", "<seed:pad>", "<seed:think>", "</seed:think>"),
    *("<seed:tool_call>", "</seed:tool_call>"),
)

GEMMA4_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"),
)
