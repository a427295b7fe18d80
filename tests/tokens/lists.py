"""Chat templates of families that write their calls as lists, or number them, in their published formats.

Written for these tests, with the special tokens of each.
"""

from __future__ import annotations

from chatml import SYSTEM

PYTHON = (
    r"{{- call.function.name + '(' }}{%- for name, value in call.function.arguments | items %}"
    r"{{- (', ' if not loop.first else '') + name + '=' + value | tojson }}{%- endfor %}{{- ')' }}"
)
JSON = r"""'{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}'"""

# Liquid's own template leaves calls out: histories have them in the content.
LFM2 = (
    r"{{- bos_token }}"
    + SYSTEM
    + r"{%- if tools %}{%- set first = first + '\nList of tools: <|tool_list_start|>' + tools | tojson"
    r" + '<|tool_list_end|>' %}{%- endif %}{{- '<|im_start|>system\n' + first + '<|im_end|>\n' if first else '' }}"
    r"{%- for m in rest %}{{- '<|im_start|>' + m.role + '\n' }}"
    r"{{- '<|tool_response_start|>' + m.content + '<|tool_response_end|>' if m.role == 'tool' else m.content }}"
    r"{{- '<|im_end|>\n' }}{%- endfor %}{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
LFM2_TOKENS = (
    *("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_list_start|>"),
    *("<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_response_start|>", "<|tool_response_end|>"),
)

OLMO3 = (
    SYSTEM
    + r"{{- '<|im_start|>system\n' + first + '<functions>' + (tools or []) | tojson + '</functions><|im_end|>\n' }}"
    r"{%- for m in rest %}{{- '<|im_start|>' + ('environment' if m.role == 'tool' else m.role) + '\n' + m.content }}"
    r"{%- if m.tool_calls %}{{- '<function_calls>' }}{%- for call in m.tool_calls %}"
    r"{{- '\n' if not loop.first else '' }}"
    + PYTHON
    + r"{%- endfor %}{{- '</function_calls>' }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    r"{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
OLMO3_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<functions>", "</functions>", "<function_calls>"),
    "</function_calls>",
)

LLAMA4 = (
    r"{{- bos_token }}" + SYSTEM + r"{%- if first or tools %}{{- '<|header_start|>system<|header_end|>\n\n' + first }}"
    r"{%- if tools %}{{- '\nFunctions, to invoke as [name(parameter=value)]:\n' + tools | tojson }}{%- endif %}"
    r"{{- '<|eot|>' }}{%- endif %}{%- for m in rest %}{%- if m.role == 'tool' %}"
    r"{{- '<|header_start|>ipython<|header_end|>\n\n' + m.content | tojson }}{%- else %}"
    r"{{- '<|header_start|>' + m.role + '<|header_end|>\n\n' + m.content }}{%- if m.tool_calls %}{{- '[' }}"
    r"{%- for call in m.tool_calls %}{{- ', ' if not loop.first else '' }}"
    + PYTHON
    + r"{%- endfor %}{{- ']' }}{%- endif %}{%- endif %}{{- '<|eot|>' }}{%- endfor %}"
    r"{{- '<|header_start|>assistant<|header_end|>\n\n' if add_generation_prompt else '' }}"
)
LLAMA4_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"),
    *("<|python_start|>", "<|python_end|>"),
)

ROLE = r"'<|start_of_role|>' + %s + '<|end_of_role|>'"
# Granite 3's own template leaves calls out, as LFM2's does.
GRANITE3 = (
    SYSTEM + rf"{{{{- {ROLE % repr('system')} + first + '<|end_of_text|>\n' }}}}{{%- if tools %}}"
    rf"{{{{- {ROLE % repr('available_tools')} + tools | tojson + '<|end_of_text|>\n' }}}}{{%- endif %}}"
    rf"{{%- for m in rest %}}{{{{- {ROLE % 'm.role'} + m.content + '<|end_of_text|>\n' }}}}{{%- endfor %}}"
    rf"{{{{- {ROLE % repr('assistant')} if add_generation_prompt else '' }}}}"
)
GRANITE4 = (
    SYSTEM
    + rf"{{{{- {ROLE % repr('system')} + first }}}}{{%- if tools %}}{{{{- '\n\n<tools>' }}}}{{%- for tool in tools %}}"
    r"{{- '\n' + tool | tojson }}{%- endfor %}{{- '\n</tools>\n\nCalls are JSON within <tool_call></tool_call>.' }}"
    r"{%- endif %}{{- '<|end_of_text|>\n' }}{%- for m in rest %}{%- if m.role == 'tool' %}"
    rf"{{{{- {ROLE % repr('user')} if loop.previtem.role != 'tool' else '' }}}}"
    r"{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    r"{{- '<|end_of_text|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}{%- else %}"
    rf"{{{{- {ROLE % 'm.role'} + m.content }}}}{{%- for call in m.tool_calls or [] %}}"
    r"{{- '\n' if m.content or not loop.first else '' }}"
    rf"{{{{- '<tool_call>\n' + {JSON} + '\n</tool_call>' }}}}{{%- endfor %}}"
    r"{{- '<|end_of_text|>\n' }}{%- endif %}"
    rf"{{%- endfor %}}{{{{- {ROLE % repr('assistant')} if add_generation_prompt else '' }}}}"
)
GRANITE_TOKENS = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
GRANITE4_TOKENS = (*GRANITE_TOKENS[:3], "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Phi-4's own template shows no tools to an agent: this is one to put beside the model.
PHI4 = (
    SYSTEM
    + r"{{- '<|system|>' + first }}{{- '<|tool|>' + tools | tojson + '<|/tool|>' if tools else '' }}{{- '<|end|>' }}"
    r"{%- for m in rest %}{{- '<|' + ('tool_response' if m.role == 'tool' else m.role) + '|>' + m.content }}"
    r"{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for call in m.tool_calls %}"
    rf"{{{{- (', ' if not loop.first else '') + {JSON} }}}}{{%- endfor %}}{{{{- ']<|/tool_call|>' }}}}{{%- endif %}}"
    r"{{- '<|end|>' }}{%- endfor %}{{- '<|assistant|>' if add_generation_prompt else '' }}"
)
PHI4_TOKENS = (
    *("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
    *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
)

MISTRAL_SYSTEM = (
    r"{{- bos_token }}" + SYSTEM + r"{{- '[SYSTEM_PROMPT]' + first + '[/SYSTEM_PROMPT]' if first else '' }}"
    r"{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' if tools else '' }}"
    r"{%- for m in rest %}{%- for call in m.tool_calls or [] %}{%- if call.id | length != 9 %}"
    r"{{- raise_exception('ids of calls have nine characters') }}{%- endif %}{%- endfor %}"
    r"{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}{%- elif m.role == 'tool' %}"
    r"{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}"
    r"{%- else %}{{- m.content }}"
)
MISTRAL7 = (
    MISTRAL_SYSTEM + r"{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}"
    r"{{- ', ' if not loop.first else '' }}"
    r"""{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}"""
    r"""{{- ', "id": "' + call.id + '"}' }}{%- endfor %}{{- ']' }}{%- endif %}"""
    r"{{- eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL11 = (
    MISTRAL_SYSTEM
    + r"{%- for call in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id }}"
    r"{{- '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}{{- eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL7_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
MISTRAL11_TOKENS = (*MISTRAL7_TOKENS, "[CALL_ID]", "[ARGS]")

KIMI = (
    r"{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}"
    r"{%- if messages[0].role != 'system' %}"
    r"{{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' }}"
    r"{%- endif %}{%- for m in messages %}"
    r"{{- '<|im_' + ('system' if m.role == 'tool' else m.role) + '|>' + m.role + '<|im_middle|>' }}"
    r"{{- '## Return of ' + m.tool_call_id + '\n' if m.role == 'tool' else '' }}{{- m.content }}"
    r"{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for call in m.tool_calls %}"
    r"{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}"
    r"{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}"
    r"{{- '<|im_end|>' }}{%- endfor %}"
    r"{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt else '' }}"
)
KIMI_TOKENS = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)

TURN = r"'<|START_OF_TURN_TOKEN|><|%s_TOKEN|>'"
COHERE = (
    r"{{- bos_token }}" + SYSTEM + rf"{{{{- {TURN % 'SYSTEM'} + '# System Preamble\n' }}}}"
    r"{%- if tools %}{{- '## Available Tools\n```json\n' }}"
    r"{{- tools | tojson + '\n```\n' }}{%- endif %}{{- first + '<|END_OF_TURN_TOKEN|>' }}"
    r"{%- set seen = namespace(ids=[]) %}{%- for m in rest %}{%- if m.role == 'user' %}"
    rf"{{{{- {TURN % 'USER'} + m.content + '<|END_OF_TURN_TOKEN|>' }}}}{{%- elif m.role == 'tool' %}}"
    rf"{{{{- {TURN % 'SYSTEM'} + '<|START_TOOL_RESULT|>[\n' if loop.previtem.role != 'tool' else ',\n' }}}}"
    r"{%- set number = namespace(at='') %}{%- for id in seen.ids %}{%- if id == m.tool_call_id %}"
    r"{%- set number.at = loop.index0 | string %}{%- endif %}{%- endfor %}"
    r"""{{- '    {"tool_call_id": "' + number.at + '", "results": {"0": ' + m.content | tojson }}"""
    r"""{{- '}, "is_error": null}' }}"""
    r"{{- '\n]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>' if loop.last or loop.nextitem.role != 'tool' else '' }}"
    rf"{{%- else %}}{{{{- {TURN % 'CHATBOT'} }}}}{{%- if m.tool_calls %}}"
    r"{{- '<|START_THINKING|>' + (m.reasoning_content or m.content) + '<|END_THINKING|><|START_ACTION|>[\n' }}"
    r"{%- for call in m.tool_calls %}"
    r"""{{- '    {"tool_call_id": "' + seen.ids | length | string + '", "tool_name": "' + call.function.name }}"""
    r"""{{- '", "parameters": ' + call.function.arguments | tojson + '}' + (',\n' if not loop.last else '\n') }}"""
    r"{%- set seen.ids = seen.ids + [call.id] %}{%- endfor %}{{- ']<|END_ACTION|>' }}{%- else %}"
    r"{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif %}{{- '<|END_OF_TURN_TOKEN|>' }}"
    rf"{{%- endif %}}{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- {TURN % 'CHATBOT'} }}}}"
    r"{{- '<|START_THINKING|><|END_THINKING|>' if not enable_thinking else '' }}{%- endif %}"
)
COHERE_TOKENS = (
    *("<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),
    *("<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
)

_THINKS = r"('<think>' if enable_thinking and loop.index0 >= last.user else '</think>')"
# DeepSeek publishes a program instead of a template (encoding_dsv32.py): this writes what it does.
DEEPSEEK32 = (
    r"{{- bos_token }}"
    + SYSTEM
    + r"{{- first }}{%- if tools %}{{- '\n\n## Tools\n<functions>\n' }}{%- for tool in tools %}"
    r"{{- tool.function | tojson + '\n' }}{%- endfor %}{{- '</functions>\n' }}{%- endif %}"
    r"{%- set last = namespace(user=-1) %}{%- for m in rest %}{%- if m.role == 'user' %}"
    r"{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in rest %}{%- if m.role == 'user' %}"
    rf"{{{{- '<｜User｜>' + m.content + '<｜Assistant｜>' + {_THINKS} }}}}{{%- elif m.role == 'tool' %}}"
    r"{{- '\n\n<function_results>' if loop.previtem.role != 'tool' else '' }}"
    r"{{- '\n<result>' + m.content + '</result>' }}{%- if loop.last or loop.nextitem.role != 'tool' %}"
    rf"{{{{- '\n</function_results>\n\n' + {_THINKS} }}}}{{%- endif %}}{{%- else %}}"
    r"{{- (m.reasoning_content or '') + '</think>' if enable_thinking and loop.index0 > last.user else '' }}"
    r"{{- m.content }}{%- if m.tool_calls %}{{- '\n\n<｜DSML｜function_calls>\n' }}{%- for call in m.tool_calls %}"
    r"""{{- '<｜DSML｜invoke name="' + call.function.name + '">\n' }}"""
    r"""{%- for k, v in call.function.arguments | items %}{{- '<｜DSML｜parameter name="' + k + '" string="' }}"""
    r"""{{- ('true">' + v if v is string else 'false">' + v | tojson) + '</｜DSML｜parameter>\n' }}{%- endfor %}"""
    r"{{- '</｜DSML｜invoke>\n' }}{%- endfor %}{{- '</｜DSML｜function_calls>' }}{%- endif %}{{- eos_token }}"
    r"{%- endif %}{%- endfor %}"
)
DEEPSEEK32_TOKENS = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    "｜DSML｜",
)
