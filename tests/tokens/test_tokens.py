"""Messages to ids and back, on the miniature's byte-level tokenizer and on one with merges."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chatml import CHATML_TOKENS
from families import FAMILIES
from family import Family, learn_tokenizer, read_pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl import tokens
from coderepairrl.errors import ConfigError
from coderepairrl.tokens import template
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reply import EAGER
from coderepairrl.tokens.verify import OPENING, TOOLS, verify_codec

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
HALF = "half a character"


@pytest.fixture(scope="module")
def codec(miniature: Path) -> tokens.Codec:
    return tokens.load_codec(miniature)


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature with a tokenizer that merges, Qwen's way."""
    text = Path(__file__).read_text()
    pattern = r"\s*[\r\n]+|\s+(?!\S)|\s?\w+|[^\s\w]+"
    vocabulary = learn_tokenizer(pattern, text, text.replace("\n", "\n\n"), "<think> <tool_call> im_end im_start")
    return FAMILIES["Qwen3"].write(tmp_path_factory.mktemp("merging"), vocabulary)


@pytest.mark.parametrize("folder", ["miniature", "merging"])
def test_verify_finds_everything_extendable(folder: str, request: pytest.FixtureRequest) -> None:
    codec = tokens.load_codec(request.getfixturevalue(folder))
    assert verify_codec(codec).forks == ()
    assert codec.context == 4096
    assert len(codec.stop_ids) == 2


def test_with_thinking_on_a_question_forks_and_a_tool_result_does_not(miniature: Path) -> None:
    forks = verify_codec(tokens.load_codec(miniature, thinking=True)).forks
    assert forks
    assert all("user message" in name for name in forks)


@pytest.mark.parametrize("folder", ["miniature", "merging"])
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(SPECIAL), st.text(max_size=8), st.sampled_from(("<", "|>", "\n")))))
def test_text_in_messages_never_becomes_a_special_token(folder: str, parts: list[str], request: Any) -> None:
    codec = tokens.load_codec(request.getfixturevalue(folder)) if folder not in _CODECS else _CODECS[folder]
    _CODECS[folder] = codec
    text = "".join(parts)
    call = {"id": "c", "type": "function", "function": {"name": text, "arguments": json.dumps({"cmd": text})}}
    tools = [{"type": "function", "function": {"name": text, "description": text, "parameters": {text: text}}}]

    def conversation(content: str) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": content},
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "tool_calls": [call if content else _EMPTY_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": content},
        ]

    def structure(ids: list[int]) -> list[int]:
        return [token for token in ids if token in special]

    special = set(codec.tokenizer.added.values())
    empty = [{"type": "function", "function": {"name": "", "description": "", "parameters": {"": ""}}}]
    ids = codec.render(conversation(text), tools)
    assert structure(ids) == structure(codec.render(conversation(""), empty))
    if codec.decode(codec.encode(text)) == text:  # NFC changes what is not NFC
        assert codec.decode(ids).count(text) >= 3  # verbatim in the prompt, the question and the tool result


_CODECS: dict[str, tokens.Codec] = {}
_EMPTY_CALL = {"id": "c", "type": "function", "function": {"name": "", "arguments": "{}"}}


def test_ordinary_text_is_tokenized_as_ever(merging: Path) -> None:
    from tokenizers import Tokenizer

    codec = tokens.load_codec(merging)
    reference = Tokenizer.from_file(str(merging / "tokenizer.json"))
    text = Path(__file__).read_text().replace("<", "(")
    assert codec.encode(text) == reference.encode(text, add_special_tokens=False).ids
    # around an inert special token, too: the plain model sees one undisturbed string
    inert = codec.encode(f"{text}<|im_end|>{text}")
    assert codec.decode(inert) == f"{text}<|im_end|>{text}"
    assert inert[: len(codec.encode(text)) - 5] == codec.encode(text)[:-5]


def test_a_tokenizer_that_was_saved_with_a_limit_has_none(merging: Path) -> None:
    spec = json.loads((merging / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    codec = InertTokenizer(spec, name="cut", eos_token_id=None)
    assert codec.decode(codec.encode("naïve words " * 20)) == "naïve words " * 20


@pytest.mark.parametrize("folder", ["miniature", "merging"])
def test_texts_that_wait_for_their_ids_change_nothing(folder: str, request: pytest.FixtureRequest) -> None:
    """A renderer that is given every id at once writes the same."""
    codec = tokens.load_codec(request.getfixturevalue(folder))
    long = Path(__file__).read_text().replace("<", "(")[:3000]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": long})}}
    asked = [{"role": "system", "content": long}, {"role": "user", "content": "short"}]
    news = [{"role": "tool", "tool_call_id": "c", "content": text} for text in (long, "", "short", f"\n{long}é")]
    said = {"role": "assistant", "content": long, "tool_calls": [call]}
    plain = {"tools": list(TOOLS), "add_generation_prompt": True}
    assert codec.render([*asked, said, *news], TOOLS) == codec.renderer.render_ids([*asked, said, *news], **plain)
    prompt, output = codec.render(asked, TOOLS), [*codec.encode(long), codec.stop_ids[0]]
    whole = codec.renderer.bridge_to_next_turn(prompt, output, news, tools=list(TOOLS)).token_ids
    assert codec.extend(prompt, output, news) == whole[len(prompt) + len(output) :]


def test_lone_surrogates_are_refused(codec: tokens.Codec) -> None:
    with pytest.raises(ValueError):
        codec.render([{"role": "user", "content": "a\udc00b"}])


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            (
                *SPECIAL,
                " ",
                "\n",
                "words",
                '{"name": "f", "arguments": {"a": 1}}',
                '{"name": "f"',
                "</th",
                "ink>",
                "é",
                HALF,
            )
        ),
        max_size=12,
    ),
    sizes=st.lists(st.integers(1, 9), min_size=1),
)
def test_a_stream_of_calls_and_thoughts_says_what_the_whole_output_says(
    codec: tokens.Codec, parts: list[str], sizes: list[int]
) -> None:
    added = codec.tokenizer.added
    half = codec.encode("é")[:1]
    output = [
        token
        for part in parts
        for token in ([added[part]] if part in added else half if part == HALF else codec.encode(part))
    ]
    read_pieces(codec, output, *sizes)


def test_a_stop_string_ends_the_content_and_marks_where_the_output_ends(codec: tokens.Codec) -> None:
    stream = codec.stream(codec.render(OPENING), stop=("\nObservation:", "STOP"))
    ids = codec.encode("I act\nObserve\nObservation: 5")
    out = [delta.content for token in ids for delta in stream.feed([token])]
    reply, rest = stream.close()
    assert "".join(out) == reply.content == "I act\nObserve"
    assert rest == []
    assert stream.cut is not None
    assert codec.decode(ids[: stream.cut]) == "I act\nObserve\nObservation:"


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        *('{"name": "she', '  {"a":\t1}\n\n', "", " \n", "3", "é 🛠️ \n\n x", '\n{"name": 3}', "{}"),
        *('{"name": "shell", "arguments": {"cmd": "l', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"),
    ],
    ids=lambda body: body[:20],
)
def test_a_broken_call_is_told_character_for_character(
    codec: tokens.Codec, body: str, closed: bool, thinks: bool
) -> None:
    """Blanks and all: an agent that shows it to the policy again shows what the policy said."""
    added = codec.tokenizer.added
    before = [added["<think>"], *codec.encode("hm"), added["</think>"]] if thinks else []
    good = '\n{"name": "shell", "arguments": {}}\n'
    before += [*codec.encode("See:"), added["<tool_call>"], *codec.encode(good), added["</tool_call>"]]
    call = [added["<tool_call>"], *codec.encode(body), *[added["</tool_call>"]] * closed]
    reply = read_pieces(codec, [*before, *call, added["<|im_end|>"]], 1 << 20)
    assert [call.name for call in reply.calls] == ["shell"]
    assert reply.malformed == (codec.decode(call),)
    assert reply.content == f"See:\n{codec.decode(call)}"


class TestBadModels:
    def copy(self, miniature: Path, folder: Path, name: str, **changes: object) -> Path:
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(miniature / file, folder)
        spec = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(spec | changes))
        return folder

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        for folder, message in (
            (tmp_path, r"config\.json and no tokenizer\.json"),
            ("nobody/nothing", r"nobody/nothing has no config\.json"),
        ):
            with pytest.raises(ConfigError, match=message):
                tokens.load_codec(folder)

    def test_an_unknown_family(self, miniature: Path, tmp_path: Path) -> None:
        folder = self.copy(miniature, tmp_path, "config.json", model_type="gpt2")
        with pytest.raises(ConfigError, match="gpt2") as caught:
            tokens.load_codec(folder)
        assert "chat template" in caught.value.fix

    def test_a_tokenizer_that_is_not_byte_level(self, miniature: Path, tmp_path: Path) -> None:
        folder = self.copy(miniature, tmp_path, "tokenizer.json", decoder={"type": "Metaspace"})
        with pytest.raises(ConfigError, match="byte-level"):
            tokens.load_codec(folder)

    def test_a_tokenizer_without_the_tokens(self, miniature: Path, tmp_path: Path) -> None:
        spec = json.loads((miniature / "tokenizer.json").read_text())
        others = [token | {"content": token["content"].replace("tool_call", "tool")} for token in spec["added_tokens"]]
        folder = self.copy(miniature, tmp_path, "tokenizer.json", added_tokens=others)
        with pytest.raises(ConfigError, match="<tool_call>"):
            tokens.load_codec(folder)
        folder = self.copy(miniature, tmp_path, "tokenizer.json", added_tokens=spec["added_tokens"][1:])
        with pytest.raises(ConfigError, match="differ in their ids from its file"):
            tokens.load_codec(folder)
        folder = self.copy(miniature, tmp_path, "tokenizer.json", model=spec["model"] | {"type": "of next year"})
        with pytest.raises(ConfigError, match="cannot be read"):
            tokens.load_codec(folder)


def test_a_model_that_never_thinks_gets_no_empty_thought(tmp_path: Path) -> None:
    template, thought = FAMILIES["Qwen3"].write(tmp_path) / "chat_template.jinja", r"<think>\n\n</think>\n\n"
    assert thought in template.read_text()
    template.write_text(template.read_text().replace(thought, ""))
    codec = tokens.load_codec(tmp_path)
    assert codec.family == "qwen3"
    assert codec.decode(codec.render(OPENING)).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("family", ["Granite 4", "GLM-4.7", "gpt-oss"])
def test_half_a_character_in_arguments_is_replaced(tmp_path: Path, family: str) -> None:
    """As in a request's own text. The tokenizer's error was no ValueError, and voided the episode."""
    codec = tokens.load_codec(FAMILIES[family].write(tmp_path), thinking=FAMILIES[family].always)

    def write(arguments: str) -> list[int]:
        calls = [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": arguments}}]
        return codec.render([*OPENING, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS)

    assert write(r'{"cmd": "\ud83d <|end|>"}') == write('{"cmd": "\ufffd <|end|>"}')
    assert write(r'{"cmd": "\ud83d\ude00"}') == write('{"cmd": "\U0001f600"}')


def test_values_that_a_template_cannot_write_are_refused(tmp_path: Path) -> None:
    codec = tokens.load_codec(FAMILIES["Gemma 4 (E2B, E4B)"].write(tmp_path))
    calls = [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": "[1]"}}]
    with pytest.raises(ValueError, match="of another type"):
        codec.render([*OPENING, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *itertools.product(("config.json", "tokenizer.json"), (b"", b'{"vocab', b"[1]", b"{}", b"\xff\xfe")),
        *itertools.product(("generation_config.json", "tokenizer_config.json"), (b"", b"[1]")),
    ],
)
def test_a_damaged_model_folder_is_named(miniature: Path, tmp_path: Path, name: str, content: bytes) -> None:
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((miniature / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name) as caught:
        tokens.load_codec(tmp_path)
    assert "again" in caught.value.fix


def test_many_calls_are_parsed_a_few_times(codec: tokens.Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that repeats an empty call, to the end of 4,096 tokens, kept the event loop for half a minute."""
    added, parsed = codec.tokenizer.added, list[int]()
    body = codec.encode('{"name": "shell", "arguments": {}}')
    reader = codec.stream(codec.render(OPENING, TOOLS), TOOLS)
    parse = reader._parse

    def noting(ids: Sequence[int]) -> tokens.Reply:
        parsed.append(len(ids))
        return parse(ids)

    monkeypatch.setattr(reader, "_parse", noting)
    output = [added["<tool_call>"], *body, added["</tool_call>"]] * 200
    deltas = reader.feed(output)
    assert len(parsed) == len(deltas) == EAGER
    reply, rest = reader.close()
    assert tuple(delta.call for delta in [*deltas, *rest]) == reply.calls
    assert len(reply.calls) == 200


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_thoughts_words_and_calls_stream_in_the_order_in_which_they_were_said(codec: tokens.Codec, chunk: int) -> None:
    """A client that opens an item per kind sees each kind once, however much the engine says at a time."""
    added = codec.tokenizer.added
    ids = [added["<think>"], *codec.encode("hm, so"), added["</think>"], *codec.encode("I look.\n")]
    for cmd in ("ls", "pwd"):
        call = json.dumps({"name": "shell", "arguments": {"cmd": cmd}})
        ids += [added["<tool_call>"], *codec.encode(f"\n{call}\n"), added["</tool_call>"]]
    ids.append(added["<|im_end|>"])
    reader = codec.stream(codec.render(OPENING, TOOLS), TOOLS)
    deltas = [delta for at in range(0, len(ids), chunk) for delta in reader.feed(ids[at : at + chunk])]
    reply, rest = reader.close()
    assert rest == []
    kinds = ["thought" if delta.reasoning else "word" if delta.content else "call" for delta in deltas]
    assert list(dict.fromkeys(kinds)) == ["thought", "word", "call"]
    assert kinds == sorted(kinds, key=["thought", "word", "call"].index)
    assert "".join(delta.content for delta in deltas) == reply.content == "I look."
    assert reader.reasoning == len(codec.encode("hm, so")) + 1


OTHER = """
{%- if messages[0].role == 'system' %}{%- set lead = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set lead = 'You help.' %}{%- set rest = messages %}{%- endif %}
{{- '<|im_start|>system\\n' + lead }}
{%- if tools %}{{- '\\nTools:' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for m in rest %}
{%- if m.role == 'tool' %}
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role == 'system' %}{{- raise_exception('system comes first') }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def with_template(folder: Path, template: str = OTHER) -> tokens.Codec:
    """Of a model without a renderer: it is prompted by its own template, if that can be extended exactly."""
    marks = (*CHATML_TOKENS, "<tool_response>", "</tool_response>")
    family = Family("Qwen2", marks, template.strip(), ("<|im_end|>", "<|endoftext|>"))
    return tokens.load_codec(family.write(folder))


def test_a_shape_that_the_template_refuses_is_written_as_another(tmp_path: Path) -> None:
    """Above all a system message that is not the first, as Claude Code, Codex and gptme send."""
    codec = with_template(tmp_path)
    system, late = OPENING[0]["content"], {"role": "system", "content": "a"}
    joined = [{"role": "system", "content": f"{system}\n\na"}, OPENING[1]]
    for opening in ([*OPENING, late], [OPENING[0], late, OPENING[1]]):
        assert codec.render(opening) == codec.render(joined)
        assert codec.changes(opening) == [(opening.index(late), "several system messages")]
    answered = [*OPENING, {"role": "assistant", "content": "b"}]
    assert codec.render([*answered, late]) == codec.render([*answered, {"role": "user", "content": "a"}])
    assert codec.changes([*answered, late]) == [(3, "a late system message")]
    assert codec.changes(answered) == []


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "'<|im_start|>system\\n'",
            "'<|im_start|>system %d\\n' % (messages | length)",
            "is not a prefix|cannot be extended",
        ),
        ("+ m.content }}\n{%- for call", "+ m.content.upper() }}\n{%- for call", "drops the content of replies"),
        ("{{- '<|im_end|>\\n' }}\n{%- endif %}\n{%- endfor %}", "{%- endif %}\n{%- endfor %}", "no special"),
        ("m.tool_calls or []", "[]", "not shown"),
        ("{%- if add_generation_prompt %}", "{%- if messages | length == 2 %}", "not a prefix|not the conversation"),
        (OTHER, "{{ raise_exception('no luck') }}", "no luck"),
    ],
    ids=lambda text: text[:20],
)
def test_a_template_that_cannot_be_extended_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    broken = OTHER.replace(old, new)
    assert broken != OTHER
    with pytest.raises(ConfigError, match=why):
        verify_codec(with_template(tmp_path, broken))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(300) %}" * 3 + "{% endfor %}" * 3, "more than 0.1 s"),
        ("{% set n = namespace(s='a') %}{% for a in range(28) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "MiB"),
    ],
    ids=["time", "memory"],
)
def test_a_template_that_does_not_end_is_refused(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with a model, and is applied while a run is planned."""
    monkeypatch.setattr(template, "SECONDS", 0.1)
    monkeypatch.setattr(template, "MEMORY", 64 << 20)
    with pytest.raises(ConfigError, match=message):
        template.Template(source).apply([], [], thinking=False)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert template.Template("{{ messages | length }}").apply([{}], [], thinking=False) == "1"
