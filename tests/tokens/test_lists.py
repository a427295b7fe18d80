"""Calls with numbers or ids, or with repeated parameters: what is read, what is not, and what follows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import FAMILIES
from family import Family
from spoken import encode_reply, encode_tags

from coderepairrl import tokens
from coderepairrl.errors import ConfigError
from coderepairrl.tokens.verify import OPENING, TOOLS, verify_codec


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tokens.Codec]:
    home = tmp_path_factory.mktemp("lists")
    names = ["Mistral (v11)", "Kimi Linear, K2", "MiniMax-M2", "GLM-4.7", "Qwen3", "gpt-oss", "Gemma 4 (E2B, E4B)"]
    return {
        name: tokens.load_codec(FAMILIES[name].write(home / str(at)), thinking=FAMILIES[name].always)
        for at, name in enumerate(names)
    }


def read(codec: tokens.Codec, text: str) -> tokens.Reply:
    return codec.parse(encode_tags(codec, text), codec.render(OPENING, TOOLS), TOOLS)


REPEATED = [
    ("GLM-4.7", "<tool_call>shell" + "<arg_key>cmd</arg_key><arg_value>ls</arg_value>" * 2 + "</tool_call>"),
    (
        "MiniMax-M2",
        '</think><minimax:tool_call>\n<invoke name="shell">\n'
        + '<parameter name="cmd">ls</parameter>\n' * 2
        + "</invoke>\n</minimax:tool_call>",
    ),
    ("Qwen3", '<tool_call>\n{"name": "shell", "arguments": {"cmd": "ls", "cmd": "rm"}}\n</tool_call>'),
    ("Mistral (v11)", '[TOOL_CALLS]shell[CALL_ID]abcdefgh1[ARGS]{"cmd": "ls", "cmd": "rm"}'),
    ("Gemma 4 (E2B, E4B)", '<|tool_call>call:shell{cmd:<|"|>ls<|"|>,cmd:<|"|>rm<|"|>}<tool_call|>'),
    ("gpt-oss", '<|channel|>commentary to=functions.shell <|message|>{"cmd": "ls", "cmd": "rm"}<|call|>'),
]


@pytest.mark.parametrize(("name", "text"), REPEATED, ids=[name for name, _ in REPEATED])
def test_a_parameter_that_is_given_twice_is_no_call(name: str, text: str, codecs: dict[str, tokens.Codec]) -> None:
    """One of its values would be lost without a word."""
    reply = read(codecs[name], text)
    assert reply.calls == ()
    assert len(reply.malformed) == 1


def test_results_have_the_number_that_the_policy_gave_its_call(codecs: dict[str, tokens.Codec]) -> None:
    """Also where an earlier part of the conversation is not at hand, as extending has only the reply."""
    codec = codecs["Kimi Linear, K2"]
    prompt = codec.render(OPENING, TOOLS)
    result = {"role": "tool", "tool_call_id": "call_8_0", "content": "a"}
    more = codec.extend(prompt, encode_reply(codec, "", [("shell", {"cmd": "ls"})], first=5), [result])
    assert more is not None
    assert "## Return of functions.shell:5\n" in codec.decode(more)
    [call] = codec.parse(encode_reply(codec, "", [("shell", {"cmd": "ls"})], first=5), prompt, TOOLS).calls
    assert call.id == "", "clients get ids that do not come twice"


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
