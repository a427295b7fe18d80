"""Chat templates of Granite, Mistral before v13 and Kimi, in their published formats.

Written for these tests, with the special tokens of each.
"""

from __future__ import annotations

SYSTEM = (
    r"{%- if messages[0].role == 'system' %}{%- set first = messages[0].content %}{%- set rest = messages[1:] %}"
    r"{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}"
)
JSON = r"""'{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}'"""

ROLE = r"'<|start_of_role|>' + %s + '<|end_of_role|>'"
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
GRANITE4_TOKENS = (
    *("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<tool_call>", "</tool_call>", "<tool_response>"),
    "</tool_response>",
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
