"""Calls in lists, in Python or JSON, with numbers or ids: what is read, what is not, and what follows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import FAMILIES
from family import Family
from spoken import encode_reply, encode_tags

from coderepairrl import tokens
from coderepairrl.errors import ConfigError
from coderepairrl.tokens import pythonic
from coderepairrl.tokens.verify import OPENING, TOOLS, verify_codec


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tokens.Codec]:
    home = tmp_path_factory.mktemp("lists")
    names = ["LFM2", "Llama 4", "Granite 3", "Mistral (v11)", "Kimi Linear, K2", "Command R7B", "DeepSeek-V3.2"]
    names += ["MiniMax-M2", "GLM-4.7", "Qwen3", "gpt-oss", "Gemma 4 (E2B, E4B)", "OLMo 3"]
    return {
        name: tokens.load_codec(FAMILIES[name].write(home / str(at)), thinking=FAMILIES[name].always)
        for at, name in enumerate(names)
    }


def read(codec: tokens.Codec, text: str) -> tokens.Reply:
    return codec.parse(encode_tags(codec, text), codec.render(OPENING, TOOLS), TOOLS)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (r'[f(a="x\n\"y\" \d")]', {"a": 'x\n"y" \\d'}),
        ("f(a='it', b=-2, c=1.5, d=None)", {"a": "it", "b": -2, "c": 1.5, "d": None}),
        ("f(a=true, b=null, c=[1, {'k': False}])", {"a": True, "b": None, "c": [1, {"k": False}]}),
        ('f(from="a", x="in=1", lambda="é")', {"from": "a", "x": "in=1", "lambda": "é"}),
        ("f(x_reserved=1)", {"x_reserved": 1}),
        ("f()", {}),
    ],
)
def test_python_is_read_as_literals(text: str, arguments: dict[str, object]) -> None:
    assert pythonic.parse_python_calls(text) == [("f", arguments, "")]
    assert pythonic.parse_python_calls(pythonic.write_python_list(pythonic.parse_python_calls(text) or [])) == [
        ("f", arguments, "")
    ]


def test_names_may_have_dots_and_calls_follow_each_other() -> None:
    assert [call.name for call in pythonic.parse_python_calls("a.b(x=1)\nc()") or []] == ["a.b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        *("f(a=1, a=2)", "f(from=1, from=2)", "f({'a': 1})", "f(*a)", "f(**a)", "f(a=b)", "f(a=g())", "f(a=f'{x}')"),
        *("f(a={1: 2})", "f(a={'k': 1, 'k': 2})", "f(a={1})", "f(a=b'x')", "f(a=1e999)", "f(a=1j)", "f(a=...)"),
        *("f(a=0x" + "f" * 400 + ")", "f(a=-True)", "f(a='x", "x = f()", "import os", "words", "", "[]", "f", "f()()"),
        *("f(a=" + "[" * 300, "a" + ".a" * 100_000, "f(a=" + "-" * 100_000 + "1)", "f(a=" + "1+" * 100_000 + "1)"),
        "f(a='\0')",
    ],
    ids=lambda text: text[:12],
)
def test_other_python_is_no_call(text: str) -> None:
    assert pythonic.parse_python_calls(text) is None


def test_what_python_cannot_write_is_refused(codecs: dict[str, tokens.Codec]) -> None:
    """A name that would be read as another call, or as none."""
    for name, arguments in (("a-b", {}), ("f", {"a-b": 1}), ("f", {"a": float("inf")})):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": "c", "type": "function", "function": function}
        with pytest.raises(ValueError):
            codecs["LFM2"].render([*OPENING, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)


def test_words_around_a_call_of_lfm2_are_content(codecs: dict[str, tokens.Codec]) -> None:
    """Its makers' own example says what it does after the call; told to, it writes JSON."""
    for call in ('[shell(cmd="ls")]', '[{"name": "shell", "arguments": {"cmd": "ls"}}]'):
        reply = read(codecs["LFM2"], f"I look.<|tool_call_start|>{call}<|tool_call_end|>Looking.<|im_end|>")
        assert [(each.name, each.arguments) for each in reply.calls] == [("shell", '{"cmd": "ls"}')]
        assert (reply.content, reply.malformed) == ("I look.\nLooking.", ())


def test_brackets_are_words_unless_they_call_a_tool(codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["Llama 4"]
    for text in ("[1, 2]", "[x] done", "[other(a=1)]", "see [shell(] there", "a[shell] = 1"):
        reply = read(codec, text)
        assert (reply.content, reply.calls, reply.malformed) == (text, (), ())
    assert read(codec, '<|python_start|>[shell(cmd="ls")]<|python_end|><|eot|>').calls[0].arguments == '{"cmd": "ls"}'
    broken = read(codec, '[shell(cmd="ls]')
    assert (broken.calls, broken.malformed) == ((), ('[shell(cmd="ls]',))


def test_a_template_may_write_lists_for_any_model(tmp_path: Path) -> None:
    """Without a token that says so, such as Gemma 3 has none."""
    family = FAMILIES["Llama 4"]
    plain = Family(family.model_type, family.tokens[:-2], family.template, family.eos, bos=family.bos)
    codec = tokens.load_codec(plain.write(tmp_path))
    assert (codec.format.name, verify_codec(codec).forks) == ("pythonic", ())


REPEATED = [
    ("GLM-4.7", "<tool_call>shell" + "<arg_key>cmd</arg_key><arg_value>ls</arg_value>" * 2 + "</tool_call>"),
    (
        "MiniMax-M2",
        '</think><minimax:tool_call>\n<invoke name="shell">\n'
        + '<parameter name="cmd">ls</parameter>\n' * 2
        + "</invoke>\n</minimax:tool_call>",
    ),
    ("Qwen3", '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls", "cmd": "rm"}}\n</tool_call>'),
    ("Granite 3", '<|tool_call|>[{"name": "shell", "arguments": {"cmd": "ls", "cmd": "rm"}}]'),
    ("Mistral (v11)", '[TOOL_CALLS]shell[CALL_ID]abcdefgh1[ARGS]{"cmd": "ls", "cmd": "rm"}'),
    ("Gemma 4 (E2B, E4B)", '<|tool_call>call:shell{cmd:<|"|>ls<|"|>,cmd:<|"|>rm<|"|>}<tool_call|>'),
    ("gpt-oss", '<|channel|>commentary to=functions.shell <|message|>{"cmd": "ls", "cmd": "rm"}<|call|>'),
    ("OLMo 3", "<function_calls>shell(cmd='ls', cmd='rm')</function_calls>"),
    (
        "DeepSeek-V3.2",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="shell">\n'
        + '<｜DSML｜parameter name="cmd" string="true">ls</｜DSML｜parameter>\n' * 2
        + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
]


@pytest.mark.parametrize(("name", "text"), REPEATED, ids=[name for name, _ in REPEATED])
def test_a_parameter_that_is_given_twice_is_no_call(name: str, text: str, codecs: dict[str, tokens.Codec]) -> None:
    """One of its values would be lost without a word."""
    reply = read(codecs[name], text)
    assert reply.calls == ()
    assert len(reply.malformed) == 1


def test_values_of_dsml_are_text_or_json(codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["DeepSeek-V3.2"]

    def call(*parameters: tuple[str, str, str]) -> str:
        values = "".join(
            f'<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n'
            for key, kind, value in parameters
        )
        return (
            f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{values}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
        )

    [made] = read(codec, call(("a", "true", " 1\n"), ("b", "false", "[1]"), ("c", "false", "null"))).calls
    assert json.loads(made.arguments) == {"a": " 1\n", "b": [1], "c": None}
    for broken in (call(("a", "false", "ls")), call().replace("</｜DSML｜invoke>", ""), call() + "words"):
        reply = read(codec, f"I look.\n\n{broken}")
        assert reply.calls == () and len(reply.malformed) == 1


@pytest.mark.parametrize("name", ["Kimi Linear, K2", "Command R7B"])
def test_results_have_the_number_that_the_policy_gave_its_call(name: str, codecs: dict[str, tokens.Codec]) -> None:
    """Also where an earlier part of the conversation is not at hand, as extending has only the reply."""
    codec = codecs[name]
    prompt = codec.render(OPENING, TOOLS)
    result = {"role": "tool", "tool_call_id": "call_8_0", "content": "a"}
    more = codec.extend(prompt, encode_reply(codec, "", [("shell", {"cmd": "ls"})], first=5), [result])
    assert more is not None
    number = '"tool_call_id": "5"' if name == "Command R7B" else "## Return of functions.shell:5\n"
    assert number in codec.decode(more)
    [call] = codec.parse(encode_reply(codec, "", [("shell", {"cmd": "ls"})], first=5), prompt, TOOLS).calls
    assert call.id == "", "clients get ids that do not come twice"


def test_a_policy_that_miscounts_gets_what_its_template_writes(codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["Command R7B"]
    prompt = codec.render(OPENING, TOOLS)
    result = {"role": "tool", "tool_call_id": "c", "content": "a"}
    ids = encode_reply(codec, "", [("shell", {"cmd": "ls"}), ("shell", {"cmd": "pwd"})])
    twice = encode_tags(codec, codec.decode(ids).replace('"tool_call_id": "1"', '"tool_call_id": "0"'))
    assert codec.extend(prompt, ids, [result]) is not None
    assert codec.extend(prompt, twice, [result]) is None
    assert codec.extend(prompt, encode_reply(codec, "", [("shell", {"cmd": "ls"})], first=100_000), [result]) is None


def test_ids_that_mistral_refuses_are_not_read_and_those_of_clients_made_to_fit(
    codecs: dict[str, tokens.Codec],
) -> None:
    codec = codecs["Mistral (v11)"]
    assert read(codec, '[TOOL_CALLS]shell[CALL_ID]abc[ARGS]{"cmd": "ls"}').calls == ()
    call = {"id": "call_12_0", "type": "function", "function": {"name": "shell", "arguments": '{"cmd": "ls"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    shown = codec.decode(codec.render([*OPENING, said, {"role": "tool", "tool_call_id": "call_12_0", "content": "a"}]))
    assert "[CALL_ID]call00000[ARGS]" in shown and "[TOOL_RESULTS]call00000[TOOL_CONTENT]" in shown


def test_a_fork_that_forgets_what_was_said_is_refused(tmp_path: Path) -> None:
    """Others are reported, since the policy is shown what its template writes."""
    family = FAMILIES["Gemma 4 (E2B, E4B)"]
    folder = family.write(tmp_path)
    source = (folder / "chat_template.jinja").read_text()
    moved = "{%- endif %}{%- endfor %}{{- m.content | trim }}"
    assert source.count(moved) == 1
    kept = "{{- m.content | trim if loop.last or not m.tool_calls else '' }}"
    (folder / "chat_template.jinja").write_text(source.replace(moved, "{%- endif %}{%- endfor %}" + kept))
    with pytest.raises(ConfigError, match="is rendered again, without 'I look.'"):
        verify_codec(tokens.load_codec(folder))


def test_gemma_3_is_for_agents_without_tools(tmp_path: Path) -> None:
    """Its template knows a user and a model that take turns, and no tools."""
    turns = (
        "{{ bos_token }}{%- set ns = namespace(first='') %}{%- if messages[0].role == 'system' %}"
        "{%- set ns.first = messages[0].content + '\n\n' %}{%- set messages = messages[1:] %}{%- endif %}"
        "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{{ (ns.first if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{%- endfor %}"
        "{{ '<start_of_turn>model\n' if add_generation_prompt else '' }}"
    )
    marks = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    folder = Family("gemma3_text", marks, turns, ("<end_of_turn>", "<eos>"), bos="<bos>").write(tmp_path)
    codec = tokens.load_codec(folder)
    assert not codec.has_tools and verify_codec(codec).forks == ()
    assert codec.parse(codec.encode(" <tool_call>{}</tool_call> Hi. "), codec.render(OPENING)).content == (
        "<tool_call>{}</tool_call> Hi."
    )
    for messages, tools in ((OPENING, TOOLS), ((*OPENING, {"role": "tool", "content": "ok"}), ())):
        with pytest.raises(ValueError, match="writes no tools: it is for agents that offer none"):
            codec.render(messages, tools)
