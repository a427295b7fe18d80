"""Families of models, each on a miniature of its architecture: its tokens, its template, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chatml import read_published
from families import FAMILIES
from family import Family, read_pieces
from spoken import encode_harmony, encode_reply

from coderepairrl import models, tokens
from coderepairrl.engines.tiny.config import ModelConfig
from coderepairrl.errors import ConfigError
from coderepairrl.tokens.verify import OPENING, TOOLS, verify_codec

EVERY = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: family.write(tmp_path_factory.mktemp("family")) for name, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def codecs(folders: dict[str, Path]) -> dict[str, tokens.Codec]:
    return {name: tokens.load_codec(folder, thinking=FAMILIES[name].always) for name, folder in folders.items()}


def read(codec: tokens.Codec, text: str) -> tokens.Reply:
    """Read a reply to `OPENING`, in whose text special tokens are themselves."""
    return codec.parse(codec.tokenizer.encode(text), codec.render(OPENING, TOOLS), TOOLS)


@EVERY
def test_recorded_ids_are_extended_exactly(name: str, codecs: dict[str, tokens.Codec]) -> None:
    """And what the template itself refuses is named."""
    family, codec = FAMILIES[name], codecs[name]
    findings = verify_codec(codec)
    assert bool(findings.forks) == bool(family.forks)
    assert all(any(word in each for word in family.forks) for each in findings.forks), findings.forks
    assert bool(findings.refused) == bool(family.refused)
    assert all(any(word in each for word in family.refused) for each in findings.refused)
    assert findings.rewritten == family.rewritten
    assert (codec.family, codec.format.name) == (family.renderer, family.format)
    assert [codec.tokenizer.to_bytes(stop).decode() for stop in codec.stop_ids] == list(family.eos)


SPOKEN = [(name, "") for name in FAMILIES]
SPOKEN += [(name, "I look.\n") for name in FAMILIES if FAMILIES[name].format != "llama3_json"]  # its call is the reply


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize(("name", "words"), SPOKEN)
def test_calls_are_read_from_sampled_ids(name: str, words: str, chunk: int, codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs[name]
    calls = [("shell", {"cmd": "    indented {<|im_end|> [ARGS]}"}), ("other", {"text": "é"})]
    if codec.format.name in ("llama3_json", "openai"):
        calls = calls[:1]
    ids = encode_reply(codec, words, calls, thought="hm" * FAMILIES[name].always)
    reply = read_pieces(codec, ids, chunk)
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls
    assert (reply.content, reply.malformed, reply.reasoning) == (words.strip(), (), "hm" * FAMILIES[name].always)


@EVERY
def test_any_ids_make_some_reply_and_a_stream_says_the_same(name: str, codecs: dict[str, tokens.Codec]) -> None:
    """Structure in every order, cut anywhere: the streamed text is the beginning of the reply."""
    codec = codecs[name]
    parts = [[token] for token in codec.tokenizer.added.values()]
    texts = ('{"name": "shell", "parameters": {}}', '{"name": "f"', "words", " {", "<function=f>", "</th", "ink>", "\n")
    parts += [*map(codec.encode, texts), codec.encode("é")[:1]]
    for number in range(150):
        ids = [token for at in range(6) for token in parts[(number * 7919 + at * at * 31 + at * number) % len(parts)]]
        assert all(text in codec.decode(ids) for text in read_pieces(codec, ids, 1, 1 + number % 9).malformed)


@EVERY
def test_text_that_looks_like_structure_is_text(name: str, codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs[name]
    special = codec.tokenizer.added
    text = " ".join(special)

    def structure(content: str, escaped: str = "") -> list[int]:
        arguments = json.dumps({"cmd": content})
        parameters = {"type": "object", "properties": {content: {"type": "string"}}}
        tool = {"type": "function", "function": {"name": content, "description": content, "parameters": parameters}}
        for char in escaped:  # some clients escape what HTML would read
            arguments = arguments.replace(char, f"\\u{ord(char):04x}")
        call = {"name": content, "arguments": arguments}
        conversation: list[dict[str, Any]] = [
            {"role": "system", "content": content},
            {"role": "user", "content": content},
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"id": "abcdefgh1", "type": "x", "function": call}],
            },
            {"role": "tool", "tool_call_id": "abcdefgh1", "content": content},
        ]
        ids = codec.render(conversation, [tool])
        assert codec.decode(ids).count(content) >= 3, "the system prompt, the question and the result are verbatim"
        return [token for token in ids if token in special.values()]

    assert structure(text) == structure("harmless")
    assert structure(text, escaped="<>[|｜]/") == structure("harmless")


def test_a_call_without_arguments_may_come_as_nothing(codecs: dict[str, tokens.Codec]) -> None:
    def rendered(arguments: str) -> list[int]:
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": "shell", "arguments": arguments}}
        return codecs["Qwen3"].render([*OPENING, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)

    assert rendered("") == rendered("null") == rendered("{}")


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5, 3.6", "GLM-4.5, 4.6"])
def test_a_renderer_writes_without_a_template(name: str, tmp_path: Path) -> None:
    """What its prompts write is read."""
    folder = FAMILIES[name].write(tmp_path)
    (folder / "chat_template.jinja").unlink()
    codec = tokens.load_codec(folder)
    assert codec.family == FAMILIES[name].renderer
    findings = verify_codec(codec)
    assert (findings.forks, findings.refused) == ((), ())


_RENAMED = ("tool_response>", "tool_output>", "<tool_output>")
_JOINED = (r"<tool_response>\n' }}", "<tool_response>' }}", "<tool_response>setup.py")


@pytest.mark.parametrize(
    ("name", "old", "new", "written"),
    [
        *((name, *_RENAMED) for name in ("Qwen3", "GLM-4.7")),
        *((name, *_JOINED) for name in ("Qwen3.5, 3.6", "GLM-4.5, 4.6")),
    ],
)
def test_a_template_with_results_of_its_own_writes_them(
    name: str, old: str, new: str, written: str, tmp_path: Path
) -> None:
    """A renderer that agrees about questions alone would show the policy results in tags it was not trained on."""
    family = FAMILIES[name]
    folder = family.write(tmp_path)
    template = folder / "chat_template.jinja"
    source = template.read_text()
    assert old in source
    template.write_text(source.replace(old, new))
    if name.startswith("GLM"):  # roles end its replies, which only its renderer knows
        with pytest.raises(ConfigError, match="otherwise than renderer glm.*no special token") as refused:
            tokens.load_codec(folder)
        assert "restore the template" in refused.value.fix
        return
    codec = tokens.load_codec(folder)
    assert codec.family == "template"
    call = {"name": "shell", "arguments": '{"cmd": "ls"}'}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": call}]}
    prompt = codec.decode(
        codec.render([*OPENING, called, {"role": "tool", "tool_call_id": "c", "content": "setup.py"}], TOOLS)
    )
    assert written in prompt


def test_another_familys_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = FAMILIES["Qwen2.5-Coder"].write(tmp_path, model_type="glm4_moe")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="is not that of renderer glm-4.5") as refused:
        tokens.load_codec(folder)
    assert "chat template" in refused.value.fix


def test_a_template_that_closes_every_thought_has_none_to_switch_on() -> None:
    with pytest.raises(ConfigError, match="no reasoning to switch on"):
        tokens.load_codec(models.find_model_folder("builtin:tiny"), thinking=True)


@EVERY
def test_reasoning_is_switched_where_there_is_some(name: str, folders: dict[str, Path]) -> None:
    if FAMILIES[name].always:
        with pytest.raises(ConfigError, match="always reasons|not a prefix") as refused:
            verify_codec(tokens.load_codec(folders[name]))
        assert "model.thinking=true" in refused.value.fix
        return
    if not FAMILIES[name].thinks:
        with pytest.raises(ConfigError, match="no reasoning to switch on|does not follow its prompt") as refused:
            verify_codec(tokens.load_codec(folders[name], thinking=True))
        assert "model.thinking=false" in refused.value.fix
        return
    off, on = tokens.load_codec(folders[name]), tokens.load_codec(folders[name], thinking=True)
    opened, (without, within) = FAMILIES[name].opens, FAMILIES[name].prompts
    assert off.decode(off.render(OPENING, TOOLS)).endswith(without)
    assert on.decode(on.render(OPENING, TOOLS)).endswith(within + "<think>\n" * (opened and "<think>" not in within))
    assert all(
        any(word in fork for word in ("user message", "system message", *FAMILIES[name].forks))
        for fork in verify_codec(on).forks
    )
    added, (begin, text, end) = on.tokenizer.added, FAMILIES[name].thought
    ids = [
        *[added[begin]] * (not opened),
        *on.encode(f"{text}hm\n"),
        added[end],
        *on.encode("\n\nI look."),
        on.stop_ids[0],
    ]
    reply = on.parse(ids, on.render(OPENING, TOOLS), TOOLS)
    assert (reply.reasoning, reply.content) == ("hm", "I look.")


def test_a_call_between_tags_keeps_its_code_and_its_types(codecs: dict[str, tokens.Codec]) -> None:
    """A stripped indentation would be another edit."""
    codec = codecs["Qwen3-Coder"]
    kinds = {"old": "string", "count": "integer", "all": "boolean", "lines": "array", "of": "string"}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    tool = {"type": "function", "function": {"name": "edit", "parameters": {"properties": properties}}}
    arguments = {"old": "    return 1\n", "count": 3, "all": True, "lines": [1, 2], "of": "3", "free": "x"}
    values = arguments | {"lines": "[1, 2]"}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    ids = codec.tokenizer.encode(f"<tool_call>\n<function=edit>\n{text}</function>\n</tool_call>")
    [call] = codec.parse(ids, tools=[tool]).calls
    assert json.loads(call.arguments) == arguments
    for broken in ("<function=edit", "words", "<function=edit>\n<parameter=old>\n1\n</function>"):
        for text in (f"\n{broken}\n", f"{broken}  "):
            reply = codec.parse(codec.tokenizer.encode(f"<tool_call>{text}</tool_call>"), tools=[tool])
            assert (reply.calls, reply.malformed) == ((), (f"<tool_call>{text}</tool_call>",))


def test_a_call_between_tags_is_read_whole_or_not_at_all(codecs: dict[str, tokens.Codec]) -> None:
    """A value cut at a tag within it would be written to a file cut short."""
    codec = codecs["Qwen3-Coder"]

    def call(function: str, *parameters: tuple[str, str]) -> str:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
        return f"\n<function={function}>\n{values}</function>\n"

    one, two = call("w", ("path", "a"), ("text", "one")), call("w", ("path", "b"), ("text", "x </function> y"))
    read = codec.parse(codec.tokenizer.encode(f"<tool_call>{one}{two}</tool_call>"))
    expected = [{"path": "a", "text": "one"}, {"path": "b", "text": "x </function> y"}]
    assert [(each.name, json.loads(each.arguments)) for each in read.calls] == [("w", each) for each in expected]
    for broken in (
        call("w", ("text", "x </parameter> y\nimportant tail")),
        one.replace("<parameter=text>", "and <parameter=text>"),
        one.replace("</function>", "and</function>"),
        f"{one}and{two}",
        call("w", ("path", "a"), ("path", "b")),
        one.replace("</parameter>\n<parameter=text>", "<parameter=text>"),
    ):
        reply = codec.parse(codec.tokenizer.encode(f"<tool_call>{broken}</tool_call>"))
        assert (reply.calls, reply.malformed) == ((), (f"<tool_call>{broken}</tool_call>",))


def test_a_call_to_a_channel_that_is_not_ended_is_none(codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["gpt-oss"]
    reply = codec.parse(
        encode_harmony(codec, "", ("shell", {"cmd": "    indented"}))[:-1], codec.render(OPENING, TOOLS), TOOLS
    )
    assert reply.calls == () and "indented" in reply.malformed[0]


def test_llama_may_tag_its_call(codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["Llama 3.1, 3.2, 3.3"]
    tag = codec.tokenizer.added["<|python_tag|>"]
    call = codec.encode('{"name": "shell", "parameters": {"cmd": "ls"}}')
    assert codec.parse([*codec.encode("I look."), tag, *call], tools=TOOLS).calls[0].name == "shell"
    broken = [tag, *codec.encode(" "), *call[:-3], *codec.encode(" \n")]
    assert codec.parse([*codec.encode("I look."), *broken], tools=TOOLS).malformed == (codec.decode(broken),)
    assert codec.parse(call).content.startswith("{")  # who offers no tools gets JSON as words


def test_json_that_is_no_call_of_llama_stays_words(codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["Llama 3.1, 3.2, 3.3"]
    tag = codec.tokenizer.added["<|python_tag|>"]
    package_json = '{"name": "my-app", "version": "1.0.0", "dependencies": {}}'
    for text in (
        package_json,
        '{"name": "shell"}',
        '{"name": "shell", "parameters": "ls"}',
        '{"name": "my-app", "parameters": {}}',
    ):
        reply = codec.parse(codec.encode(text), tools=TOOLS)
        assert (reply.content, reply.calls, reply.malformed) == (text, (), ())
    tagged = [tag, *codec.encode(package_json)]
    assert codec.parse(tagged, tools=TOOLS).malformed == (codec.decode(tagged),)
    other = codec.parse([tag, *codec.encode('{"name": "my-app", "arguments": {"a": 1}}')], tools=TOOLS)
    assert [(call.name, call.arguments) for call in other.calls] == [("my-app", '{"a": 1}')]


@EVERY
def test_the_tiny_engine_serves_the_families_that_say_so(
    name: str, folders: dict[str, Path], codecs: dict[str, tokens.Codec], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    if "tiny" in FAMILIES[name].engines:
        AutoConfig.from_pretrained(folders[name]).save_pretrained(tmp_path)  # which fills in defaults
        assert ModelConfig.read(tmp_path).vocab_size == codecs[name].vocab_size
    else:
        with pytest.raises(ConfigError, match="the tiny engine serves") as refused:
            ModelConfig.read(folders[name])
        assert "engine=vllm" in refused.value.fix


PLAIN = "Qwen2.5-Coder"
REFUSED = [
    (PLAIN, "if tools", "if false", {}, "does not show the policy its tools", ["instruct model"]),
    (PLAIN, "in message.tool_calls", "in []", {}, "does not show the policy its calls", ["instruct model"]),
    (
        "Qwen3-Coder",
        "<function=",
        "<call=",
        {},
        "an unknown format",
        ["hermes, qwen3_coder, llama3_json, mistral"],
    ),
    (PLAIN, "message.content + '<", "message.content.upper() + '<", {}, "drops the content of replies", []),
    (PLAIN, "{%- for message", "{{ raise_exception('no luck') }}{%- for message", {}, "no luck", []),
    (
        PLAIN,
        "{{- '<|im_start|>system",
        "{{- messages | length }}{{- '<|im_start|>system",
        {},
        "is not a prefix|cannot be extended",
        [],
    ),
    (
        PLAIN,
        "{%- if add_generation_prompt %}",
        "{%- if messages | length == 2 %}",
        {},
        "not a prefix|not the conversation",
        [],
    ),
    (
        "Llama 3.1, 3.2, 3.3",
        """{{- '{"name": "' + tool_call.name + '", ' }}
            {{- '"parameters": ' }}
            {{- tool_call.arguments | tojson }}
            {{- "}" }}""",
        """{{- '[' + tool_call.name + '(a=' + tool_call.arguments.a | tojson + ')]' }}""",
        {},
        r"writes a tool call as '\[look_up\(a=\"1\"\)\]', an unknown format",
        ["hermes"],
    ),
    ("Llama 3.1, 3.2, 3.3", "<|eot_id|>", "\\n", {}, "no special token", []),
    (PLAIN, "", "", {"vocab_size": 256}, "ids up to 260, outside the vocabulary of 256", ["resize its embedding"]),
    (PLAIN, "", "", {"text_config": {}}, "multimodal", []),
    (
        PLAIN,
        "",
        None,
        {"model_type": "llama"},
        "no renderer for model_type 'llama' of .*, which has no chat template",
        ["chat_template.jinja"],
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "config", "message", "fixes"), REFUSED, ids=[row[4] for row in REFUSED])
def test_a_refused_model_is_told_its_fault_and_fix(
    name: str, old: str, new: str | None, config: dict[str, Any], message: str, fixes: list[str], tmp_path: Path
) -> None:
    """`old` of its template replaced by `new`, or no template at all."""
    template = FAMILIES[name].write(tmp_path, **config) / "chat_template.jinja"
    assert old in template.read_text()
    if new is None:
        template.unlink()
    elif old:
        template.write_text(template.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message) as refused:
        verify_codec(tokens.load_codec(tmp_path))
    assert all(fix in refused.value.fix for fix in fixes)


def test_an_end_that_only_the_template_names(tmp_path: Path) -> None:
    """A config without an end of sequence is mended by it."""
    codec = tokens.load_codec(FAMILIES[PLAIN].write(tmp_path, eos_token_id=None))
    assert verify_codec(codec).forks == ()
    assert len(codec.stop_ids) == 1


def test_ends_that_only_its_generation_config_names(tmp_path: Path) -> None:
    """Instruct models stop at more tokens than config.json names."""
    folder = FAMILIES["Mistral (Tekken, v13)"].write(tmp_path)
    before = tokens.load_codec(folder).stop_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [*before, 257]}))
    assert 257 not in before and tokens.load_codec(folder).stop_ids == (*before, 257)


def test_padded_embeddings_are_none(tmp_path: Path) -> None:
    codec = tokens.load_codec(FAMILIES[PLAIN].write(tmp_path, vocab_size=320))
    assert codec.decode([319, *codec.encode("a")]) == "a"


@EVERY
def test_the_page_lists_every_tested_family(name: str) -> None:
    family = FAMILIES[name]
    page = Path(__file__).parents[2] / "docs" / "guides" / "models.md"
    switch = "always" if family.always else "on or off" if family.thinks else "none"
    refused = "; ".join(family.refused) or "-"
    names = " | ".join(f"`{each}`" for each in (family.model_type, family.renderer, family.format))
    rewritten = "; ".join(family.rewritten) or "-"
    row = f"| {name} | {names} | {switch} | {', '.join(family.engines)} | {refused} | {rewritten} |"
    assert row in page.read_text()


async def test_the_exam_of_a_model_reports_its_format_and_engines(tmp_path: Path) -> None:
    """One that passes is in tests/learn/test_loading.py."""
    from coderepairrl.checks.model import examine_model

    checks = {check.name: check for check in await examine_model(FAMILIES["Qwen3-Coder"].write(tmp_path))}
    assert "qwen3_coder" in checks["tool calls are read"].detail
    assert checks["engines"].detail.startswith("vllm; not tiny: the tiny engine serves")
    weights = checks["its weights fit"]
    assert not weights.ok
    assert "no weights" in weights.detail


_WEEK = '{"kind": "week"}'


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", "3"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"$ref": "#/$defs/Period"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"allOf": [{"type": "string"}]}, "12", "12"),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "boolean"}, "True", True),
        ({"$ref": "#/$defs/Period"}, _WEEK, {"kind": "week"}),
        ({"description": "Anything."}, "[1]", [1]),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"anyOf": "none", "oneOf": [3], "type": [[]]}, _WEEK, {"kind": "week"}),
        ("none", "words", "words"),
    ],
)
@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM-4.5, 4.6", "MiniMax-M2", "Seed-OSS"])
def test_a_value_has_the_type_that_its_schema_allows(
    name: str, schema: Any, text: str, value: object, codecs: dict[str, tokens.Codec]
) -> None:
    """Also for a schema that is not valid."""
    tool = {"type": "function", "function": {"name": "sales", "parameters": {"properties": {"it": schema}}}}
    [call] = codecs[name].parse(encode_reply(codecs[name], "", [("sales", {"it": text})]), tools=[tool]).calls
    assert json.loads(call.arguments) == {"it": value}


@pytest.mark.parametrize(
    "message",
    [
        '<|channel|>analysis to=container.exec code<|message|>{"cmd":["bash","-lc","ls"]}<|call|>',
        '<|channel|>shell<|message|>{"cmd": "ls"}<|call|>',
        '<|message|>{"cmd": "ls"}<|call|>',
        '<|channel|>commentary to=functions.shell json<|message|>{"cmd": "ls", "n": NaN}<|call|>',
        "<|channel|>commentary to=functions.shell<|call|>",
    ],
)
def test_a_call_of_gpt_oss_that_cannot_be_read_is_reported(message: str, codecs: dict[str, tokens.Codec]) -> None:
    thought = "<|channel|>analysis<|message|>think<|end|><|start|>assistant"
    reply = read(codecs["gpt-oss"], thought + message)
    assert (reply.reasoning, reply.calls) == ("think", ())
    assert [message in text for text in reply.malformed] == [True]
    assert message in reply.content


@pytest.mark.parametrize("head", ["<|message|>", "<|channel|>comment<|message|>", "<|channel|>final<|message|>"])
@pytest.mark.parametrize("start", ["<|start|>assistant", ""])
def test_no_message_of_gpt_oss_is_lost(head: str, start: str, codecs: dict[str, tokens.Codec]) -> None:
    """Without a channel that is known, or the role that some replies leave out."""
    text = f"<|channel|>analysis<|message|>think<|end|>{start}{head}Done.<|return|>"
    reply = read(codecs["gpt-oss"], text)
    assert (reply.reasoning, reply.content, reply.malformed) == ("think", "Done.", ())


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "shell", "arguments": null}', None),
        ('{"name": "shell", "arguments": ["ls"]}', None),
        ('{"name": "shell", "arguments": "ls -la"}', None),
        ('{"name": "shell", "arguments": {"cmd": "ls", "timeout": NaN}}', None),
        ('{"name": "shell", "arguments": {"cmd": "ls", "timeout": 1e999}}', None),
        ('{"name": "shell", "arguments": {"cmd": "ls"}, "parameters": {"cmd": "rm"}}', None),
        ('{"name": "shell", "parameters": {"cmd": "ls"}}', {"cmd": "ls"}),
        ('{"name": "shell", "arguments": "{\\"cmd\\": \\"ls\\"}"}', {"cmd": "ls"}),
        ('{"name": "shell"}', {}),
    ],
)
def test_arguments_of_hermes_are_an_object(body: str, arguments: object, codecs: dict[str, tokens.Codec]) -> None:
    codec = codecs["Qwen2.5-Coder"]
    reply = codec.parse(codec.tokenizer.encode(f"<tool_call>{body}</tool_call>"), tools=TOOLS)
    assert [json.loads(call.arguments) for call in reply.calls] == [arguments] * (arguments is not None)
    assert reply.malformed == (f"<tool_call>{body}</tool_call>",) * (arguments is None)


def test_a_conversation_continues_after_a_call_of_a_number(codecs: dict[str, tokens.Codec]) -> None:
    """The template would be given a name that is no text."""
    codec, news = codecs["Qwen2.5-Coder"], [{"role": "user", "content": "Go on."}]
    output = codec.tokenizer.encode('<tool_call>{"name": 5, "arguments": {}}</tool_call>')
    assert codec.parse(output).malformed
    extension = codec.extend(codec.render(OPENING, TOOLS), output, news)
    assert extension is not None and "Go on." in codec.decode(extension)


_LS = "<function=shell>\n<parameter=cmd>\nls\n</parameter>\n</function>"


@pytest.mark.parametrize("chunk", [1, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls", "malformed"),
    [
        (f"I list.\n\n{_LS}\n</tool_call>", "I list.", 1, ()),
        (_LS, "", 1, ()),
        (f"{_LS}</tool_call>\n{_LS}\n</tool_call>", "", 2, ()),
        (
            f"I list.\n<tool_call>{_LS}</tool_call>\n{_LS}\n</tool_call> and\n<tool_call>{_LS}</tool_call>",
            "I list.",
            3,
            (),
        ),
        (f"Two.\n{_LS}\n<tool_call>\n{_LS}\n</tool_call>", "Two.", 2, ()),
        (f"Cut.\n{_LS[:-3]}", None, 0, (_LS[:-3],)),
        (f"Cut.\n{_LS[:9]} rm>", None, 0, ()),
        (f"What `{_LS}` does, and\n<function=other>", None, 0, ()),
        ('I list.\n{"name": "shell"}</tool_call>', None, 0, ('I list.\n{"name": "shell"}</tool_call>',)),
    ],
)
def test_calls_of_qwen3_coder_without_their_opening_tag(
    text: str, content: str | None, calls: int, malformed: tuple[str, ...], chunk: int, codecs: dict[str, tokens.Codec]
) -> None:
    """Read as vLLM's parser reads them if they are whole, else malformed; what only looks like them stays words."""
    codec = codecs["Qwen3-Coder"]
    reply = read_pieces(codec, codec.tokenizer.encode(text), chunk)
    assert [(call.name, call.arguments) for call in reply.calls] == [("shell", '{"cmd": "ls"}')] * calls
    assert (reply.content, reply.malformed) == (text if content is None else content, malformed)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen3", '{"name": "shell", "arguments": {"cmd": "ls"}}\n</tool_call>'),
        ("Mistral (Tekken, v13)", 'shell[ARGS]{"cmd": "ls"}'),
        ("MiniMax-M2", '</think><invoke name="shell"></invoke>\n</minimax:tool_call>'),
        ("Kimi Linear, K2", "<|tool_call_begin|>functions.shell:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ],
)
def test_a_tag_of_a_call_that_was_not_opened_is_reported(name: str, text: str, codecs: dict[str, tokens.Codec]) -> None:
    reply = read(codecs[name], text)
    reported = text.partition("</think>")[2] or text
    assert (reply.calls, reply.malformed, reply.content) == ((), (reported,), reported)


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
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = codec.decode(
        codec.render([*OPENING, called, {"role": "tool", "tool_call_id": "call_12_0", "content": "a"}])
    )
    assert "[CALL_ID]call00000[ARGS]" in prompt and "[TOOL_RESULTS]call00000[TOOL_CONTENT]" in prompt


def test_a_fork_that_drops_a_message_is_refused(tmp_path: Path) -> None:
    """Others are reported, since the policy is shown what its template writes."""
    family = FAMILIES["Gemma 4 (E2B, E4B)"]
    folder = family.write(tmp_path)
    source = (folder / "chat_template.jinja").read_text()
    words = "{{- captured_content -}}"
    assert source.count(words) == 1
    forgotten = "{{- captured_content if loop.last or not message['tool_calls'] else '' -}}"
    (folder / "chat_template.jinja").write_text(source.replace(words, forgotten))
    with pytest.raises(ConfigError, match="is rendered again, without 'I look.'"):
        verify_codec(tokens.load_codec(folder))


def test_gemma_3_is_for_agents_without_tools(tmp_path: Path) -> None:
    """Its template knows a user and a model that take turns, and no tools."""
    marks = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    folder = Family("gemma3_text", marks, read_published("gemma3"), ("<end_of_turn>", "<eos>"), bos="<bos>").write(
        tmp_path
    )
    codec = tokens.load_codec(folder)
    assert not codec.has_tools and verify_codec(codec).forks == ()
    assert codec.parse(codec.encode(" <tool_call>{}</tool_call> Hi. "), codec.render(OPENING)).content == (
        "<tool_call>{}</tool_call> Hi."
    )
    for messages, tools in ((OPENING, TOOLS), ((*OPENING, {"role": "tool", "content": "ok"}), ())):
        with pytest.raises(ValueError, match="writes no tools: it is for agents that offer none"):
            codec.render(messages, tools)
