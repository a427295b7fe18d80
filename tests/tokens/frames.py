"""Chat templates of families whose frame is not Qwen's, in their published formats, and their special tokens.

Written for these tests. What GLM says about its tools is taken from the package `renderers`, whose prompts must agree.
"""

from __future__ import annotations

from chatml import SYSTEM
from renderers import glm5, glm45


def glm(tools: tuple[str, str], newline: str, off: tuple[str, str]) -> str:
    r"""GLM-4.5's frame (`newline` ``\n``) or GLM-4.7's (none).

    `off` is what a question and a prompt end with, unthinking.

    Nothing ends a reply but the next role.
    """
    asked, opened = off
    value = "v if v is string else v | tojson"
    thoughts = "'<think>' + m.reasoning_content + '</think>'"
    return (
        r"[gMASK]<sop>{%- if tools %}{{- '<|system|>" + tools[0].replace("\n", r"\n") + r"' }}"
        r"{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '"
        + tools[1].replace("\n", r"\n")
        + r"' }}{%- endif %}"
        r"{%- set last = namespace(user=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        r"{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
        r"{%- for m in messages %}{%- if m.role in ('system', 'user') %}"
        rf"{{{{- '<|' + m.role + '|>{newline}' + m.content }}}}"
        rf"{{{{- '{asked}' if m.role == 'user' and not enable_thinking else '' }}}}"
        r"{%- elif m.role == 'tool' %}{{- '<|observation|>' if loop.previtem.role != 'tool' else '' }}"
        rf"{{{{- '{newline}<tool_response>{newline}' + m.content + '{newline}</tool_response>' }}}}"
        rf"{{%- else %}}{{{{- '<|assistant|>{newline}' }}}}"
        rf"{{{{- {thoughts} if m.reasoning_content and loop.index0 > last.user else '{opened}' }}}}"
        rf"{{{{- '{newline}' + m.content | trim if m.content | trim else '' }}}}"
        r"{%- for call in m.tool_calls or [] %}"
        rf"{{{{- '{newline}<tool_call>' + call.function.name + '{newline}' }}}}"
        r"{%- for k, v in call.function.arguments | items %}"
        rf"{{{{- '<arg_key>' + k + '</arg_key>{newline}<arg_value>' + ({value}) + '</arg_value>{newline}' }}}}"
        r"{%- endfor %}{{- '</tool_call>' }}{%- endfor %}{%- endif %}{%- endfor %}"
        r"{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
        + (
            rf"{{{{- '' if enable_thinking else '\n{opened}' }}}}"
            if newline
            else rf"{{{{- '<think>' if enable_thinking else '{opened}' }}}}"
        )
        + r"{%- endif %}"
    )


GLM45 = glm((glm45._TOOLS_HEADER, glm45._TOOLS_FOOTER), r"\n", ("/nothink", "<think></think>"))
GLM47 = glm((glm5._TOOLS_HEADER, glm5._TOOLS_FOOTER), "", ("", "</think>"))
GLM_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "/nothink", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

HARMONY = (
    SYSTEM + r"{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
    r"Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\n"
    r"Reasoning: medium\n\n# Valid channels: analysis, commentary, "
    r"final. Channel must be included for every message.' }}"
    r"""{%- if tools %}{{- "\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}"""
    r"{{- '<|end|>' }}{%- if first or tools %}{{- '<|start|>developer<|message|>' }}"
    r"{%- if first %}{{- '# Instructions\n\n' + first + '\n\n' }}{%- endif %}"
    r"{%- if tools %}{{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}{%- for tool in tools %}"
    r"{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + ' = (_: {\n' }}"
    r"{%- for name, field in tool.function.parameters.properties | items %}{{- name + ': ' + field.type + ',\n' }}"
    r"{%- endfor %}{{- '}) => any;\n\n' }}{%- endfor %}{{- '} // namespace functions' }}{%- endif %}{{- '<|end|>' }}"
    r"{%- endif %}{%- set last = namespace(name=none) %}{%- for m in rest %}{%- if m.role == 'user' %}"
    r"{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- elif m.role == 'tool' %}"
    r"{%- if last.name is none %}{{- raise_exception('a result without a call') }}{%- endif %}"
    r"{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}"
    r"{{- '<|end|>' }}{%- elif m.tool_calls %}{%- set call = m.tool_calls[0].function %}"
    r"{%- set later = namespace(final=false) %}{%- for n in rest[loop.index:] %}"
    r"{%- if n.role == 'assistant' and not n.tool_calls %}{%- set later.final = true %}{%- endif %}{%- endfor %}"
    r"{%- if m.content and not later.final %}"
    r"{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    r"{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    r"{{- call.arguments | tojson + '<|call|>' }}{%- set last.name = call.name %}"
    r"{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    r"{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{%- set last.name = none %}"
    r"{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
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

_ARGUMENT = r"""('<|"|>' + v + '<|"|>' if v is string else v | tojson)"""
GEMMA4 = (
    r"{{- bos_token }}{%- if enable_thinking or tools or messages[0].role == 'system' %}{{- '<|turn>system\n' }}"
    r"{{- '<|think|>\n' if enable_thinking else '' }}"
    r"{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}{%- for tool in tools or [] %}"
    r"""{{- '<|tool>declaration:' + tool.function.name + '{description:<|"|>' + tool.function.description }}"""
    r"""{{- '<|"|>}<tool|>' }}{%- endfor %}{{- '<turn|>\n' }}{%- endif %}"""
    r"{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    r"{%- set last = namespace(user=-1, model=false, kind='') %}{%- for m in rest %}{%- if m.role == 'user' %}"
    r"{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}"
    r"{%- for m in rest %}{%- if m.role == 'user' %}{{- '<|turn>user\n' + m.content | trim + '<turn|>\n' }}"
    r"{%- set last.model, last.kind = false, 'words' %}{%- elif m.role == 'assistant' %}"
    r"{{- '' if last.model else '<|turn>model\n' }}{%- set last.model, last.kind = true, 'words' %}"
    r"{%- if m.reasoning_content and loop.index0 > last.user %}"
    r"{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{%- endif %}"
    r"{%- for call in m.tool_calls or [] %}{{- '<|tool_call>call:' + call.function.name + '{' }}"
    r"{%- for k, v in call.function.arguments | dictsort %}{{- (',' if not loop.first else '') + k + ':' + "
    + _ARGUMENT
    + r" }}{%- endfor %}{{- '}<tool_call|>' }}{%- set last.kind = 'call' %}{%- endfor %}"
    r"{%- set more = namespace(on=last.kind == 'call') %}{%- for n in rest[loop.index:] %}"
    r"{%- set more.on = more.on and n.role == 'tool' %}{%- if more.on %}{%- set last.kind = 'result' %}"
    r"{{- '<|tool_response>response:' + (m.tool_calls | selectattr('id', 'equalto', n.tool_call_id) | "
    r"map(attribute='function.name') | first | default('unknown')) + "
    r"""'{value:<|"|>' + n.content + '<|"|>}<tool_response|>' }}{%- endif %}{%- endfor %}{{- m.content | trim }}"""
    r"{%- set next = rest[loop.index:] | rejectattr('role', 'equalto', 'tool') | list %}"
    r"{%- if last.kind == 'call' %}{{- '<|tool_response>' }}"
    r"{%- elif next and next[0].role == 'assistant' %}"
    r"{%- elif not (last.kind == 'result' and not m.content and not next) %}{{- '<turn|>\n' }}{%- endif %}"
    r"{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{%- if last.kind == 'words' %}{{- '<|turn>model\n' }}"
    r"{%- elif last.kind == 'result' and enable_thinking %}{{- '<|channel>thought\n' }}{%- endif %}{%- endif %}"
)
GEMMA4_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"),
)
