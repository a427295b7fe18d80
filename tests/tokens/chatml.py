"""Chat templates of Qwen and Mistral, and their special tokens.

Some are as published, from the package `trl`; the others are written for these tests in their published formats.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def read_published(name: str) -> str:
    """Read a template of the package `trl`, without importing it."""
    package = find_spec("trl")
    assert package is not None and package.origin is not None, "a dependency of the tests"
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


QWEN3_CODER = (
    r"{%- if messages[0].role == 'system' %}{%- set first = messages[0].content %}{%- set rest = messages[1:] %}"
    r"{%- else %}{%- set first = 'You are Qwen, a helpful AI assistant that can interact with a computer to solve "
    r"tasks.' if tools else '' %}{%- set rest = messages %}{%- endif %}"
    r"{%- if first or tools %}{{- '<|im_start|>system\n' + first }}{%- if tools %}"
    r"{{- '\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>' }}{%- for tool in tools %}"
    r"{{- '\n<function>\n<name>' + tool.function.name + '</name>\n<description>' + tool.function.description }}"
    r"{{- '</description>\n<parameters>' }}{%- for name, field in tool.function.parameters.properties | items %}"
    r"{{- '\n<parameter>\n<name>' + name + '</name>\n<type>' + field.type + '</type>\n</parameter>' }}{%- endfor %}"
    r"{{- '\n</parameters>\n</function>' }}{%- endfor %}{{- '\n</tools>\n\nIf you choose to call a function ONLY "
    r"reply in the following format with NO suffix:\n\n<tool_call>\n<function=example_function_name>\n"
    r"<parameter=example_parameter_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>' }}{%- endif %}"
    r"{{- '<|im_end|>\n' }}{%- endif %}{%- for m in rest %}{%- if m.role == 'tool' %}"
    r"{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user\n' }}{%- endif %}"
    r"{{- '<tool_response>\n' + m.content + '\n</tool_response>\n' }}"
    r"{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    r"{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant' }}"
    r"{%- if m.content %}{{- '\n' + m.content | trim + '\n' }}{%- endif %}{%- for call in m.tool_calls %}"
    r"{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}"
    r"{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\n' }}"
    r"{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    r"{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    r"{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
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
