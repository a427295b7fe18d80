"""Chat templates of Qwen, Llama and Mistral in their published formats, and their special tokens; for these tests."""

from __future__ import annotations

SYSTEM = (
    r"{%- if messages[0].role == 'system' %}{%- set first = messages[0].content %}{%- set rest = messages[1:] %}"
    r"{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}"
)
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
_ARGUMENTS = (
    r"{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    r"{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    r"{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}"
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
    r"{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}" + _ARGUMENTS + r"{%- endfor %}",
    prompt="",
    result=r"{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}"
    r"{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    r"{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}",
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
# Every reply begins with thoughts, perhaps empty ones; those before a user's last message are emptied.
NEMOTRON3 = (
    SYSTEM + r"{{- '<|im_start|>system\n' + first }}"
    r"{%- if tools %}{{- '\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}"
    r"{%- for tool in tools %}{{- '\n<function>\n<name>' + tool.function.name + '</name>' }}"
    r"{{- '\n<parameters>' + tool.function.parameters | tojson + '</parameters>\n</function>' }}{%- endfor %}"
    r"{{- '\n</tools>' }}{%- endif %}{{- '<|im_end|>\n' }}"
    r"{%- set last = namespace(user=-1) %}{%- for m in rest %}{%- if m.role == 'user' %}"
    r"{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in rest %}{%- if m.role == 'tool' %}"
    r"{{- '<|im_start|>user\n' if loop.previtem.role != 'tool' else '' }}"
    r"{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    r"{{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '' }}{%- elif m.role == 'assistant' %}"
    r"{%- set thoughts = m.reasoning_content if m.reasoning_content and loop.index0 > last.user else '' %}"
    r"{{- '<|im_start|>assistant\n<think>' + ('\n' + thoughts + '\n' if thoughts else '') + '</think>' }}"
    r"{{- '\n' if thoughts else '' }}{{- m.content | trim }}{{- '\n' if m.tool_calls else '' }}"
    r"{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    + _ARGUMENTS
    + r"{{- '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    r"{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    r"{{- '<think>\n' if enable_thinking else '<think></think>' }}{%- endif %}"
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
