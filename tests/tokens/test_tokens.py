"""Messages to ids and back, on the miniature's byte-level tokenizer and on one with merges."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chatml import QWEN3
from hypothesis import given, settings
from hypothesis import strategies as st

from coderepairrl import tokens
from coderepairrl.errors import ConfigError
from coderepairrl.tokens import template
from coderepairrl.tokens.verify import OPENING, TOOLS, verify_codec

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
HALF = "half a character"


@pytest.fixture(scope="module")
def codec(miniature: Path) -> tokens.Codec:
    return tokens.load_codec(miniature)


@pytest.fixture(scope="module")
def merging(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature with a tokenizer that merges, Qwen's way: regex pre-tokenizer, NFC, a trained BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("merging")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s?\w+|[^\s\w]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = Path(__file__).read_text()
    tokenizer.train_from_iterator([text, text.replace("\n", "\n\n"), "<think> <tool_call> im_end im_start"], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL[:3]])
    rest = (*SPECIAL[3:], "<tool_response>", "</tool_response>")
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in rest])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((miniature / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": tokenizer.get_vocab_size()}))
    return folder


def test_loading_imports_no_torch_and_no_transformers(miniature: Path) -> None:
    program = (
        "import sys; from coderepairrl import tokens; from coderepairrl.tokens.verify import verify_codec;"
        "verify_codec(tokens.load_codec(sys.argv[1]));"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(miniature)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    sizes=st.lists(st.integers(1, 9), min_size=400),
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
    _check_stream(codec, codec.render(OPENING, TOOLS), output, sizes)


def _check_stream(codec: tokens.Codec, prompt: list[int], output: list[int], sizes: list[int]) -> None:
    stream = codec.stream(prompt, TOOLS)
    deltas, at = [], 0
    for size in sizes:
        deltas += stream.feed(output[at : at + size])
        at += size
    stream.feed(output[at:])
    reply, rest = stream.close()
    deltas += rest
    assert reply == codec.parse(output, prompt, TOOLS)
    assert "".join(delta.content for delta in deltas) == reply.content
    assert "".join(delta.reasoning for delta in deltas) == reply.reasoning
    assert tuple(delta.call for delta in deltas if delta.call) == reply.calls


def test_a_stop_string_ends_the_content_and_marks_where_the_output_ends(codec: tokens.Codec) -> None:
    stream = codec.stream(codec.render(OPENING), stop=("\nObservation:", "STOP"))
    ids = codec.encode("I act\nObserve\nObservation: 5")
    out = [delta.content for token in ids for delta in stream.feed([token])]
    reply, rest = stream.close()
    assert "".join(out) == reply.content == "I act\nObserve"
    assert rest == []
    assert stream.cut is not None
    assert codec.decode(ids[: stream.cut]) == "I act\nObserve\nObservation:"


@pytest.mark.parametrize(
    "body", ['{"name": "shell", "arguments": {"cmd": "l', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "{}", "3", ""]
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_broken_call_is_content_and_said_to_be_malformed(codec: tokens.Codec, body: str, closed: bool) -> None:
    added = codec.tokenizer.added
    output = [*codec.encode("See:"), added["<tool_call>"], *codec.encode(body), *[added["</tool_call>"]] * closed]
    reply = codec.parse([*output, added["<|im_end|>"]], codec.render(OPENING, TOOLS), TOOLS)
    assert reply.calls == ()
    assert len(reply.malformed) == 1
    assert reply.content.startswith("See:")
    assert body in reply.content
    assert ("</tool_call>" in reply.content) is closed


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("body", ['{"name": "she', '  {"a":\t1}\n\n', "", " \n", "3", "é 🛠️ \n\n x", '\n{"name": 3}'])
def test_a_broken_call_is_told_character_for_character(
    codec: tokens.Codec, body: str, closed: bool, thinks: bool
) -> None:
    """Blanks and all: an agent that shows it to the policy again shows what the policy said."""
    added = codec.tokenizer.added
    before = [added["<think>"], *codec.encode("hm"), added["</think>"]] if thinks else []
    good = '\n{"name": "shell", "arguments": {}}\n'
    before += [*codec.encode("See:"), added["<tool_call>"], *codec.encode(good), added["</tool_call>"]]
    call = [added["<tool_call>"], *codec.encode(body), *[added["</tool_call>"]] * closed]
    stream = codec.stream(codec.render(OPENING, TOOLS), TOOLS)
    told = "".join(delta.content for delta in stream.feed([*before, *call, added["<|im_end|>"]]))
    reply, rest = stream.close()
    assert [call.name for call in reply.calls] == ["shell"]
    assert reply.malformed == (codec.decode(call),)
    assert reply.content == f"See:\n{codec.decode(call)}"
    assert told + "".join(delta.content for delta in rest) == reply.content


class TestBadModels:
    def copy(self, miniature: Path, folder: Path, name: str, **changes: object) -> Path:
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(miniature / file, folder)
        spec = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(spec | changes))
        return folder

    def test_missing_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"config\.json and no tokenizer\.json"):
            tokens.load_codec(tmp_path)

    def test_a_name_is_no_folder(self) -> None:
        with pytest.raises(ConfigError, match=r"nobody/nothing has no config\.json"):
            tokens.load_codec("nobody/nothing")

    def test_an_unknown_family(self, miniature: Path, tmp_path: Path) -> None:
        folder = self.copy(miniature, tmp_path, "config.json", model_type="gpt2")
        with pytest.raises(ConfigError, match="gpt2") as caught:
            tokens.load_codec(folder)
        assert "chat template" in caught.value.fix
        assert verify_codec(tokens.load_codec(folder, renderer="qwen3")).forks == ()

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
        with pytest.raises(ConfigError, match="other ids than its file says"):
            tokens.load_codec(folder)

    def test_a_vocabulary_too_small_for_the_stop_tokens(self, miniature: Path, tmp_path: Path) -> None:
        folder = self.copy(miniature, tmp_path, "config.json", vocab_size=200)
        with pytest.raises(ConfigError, match="outside the vocabulary"):
            verify_codec(tokens.load_codec(folder))


CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' + messages[0].content + '\\n\\n# Tools\\n\\nYou may call one or more "
    "functions to assist with the user query.\\n\\nYou are provided with function signatures within <tools></tools> "
    "XML tags:\\n<tools>' }}{%- for tool in tools %}{{ '\\n' + tool | tojson }}{%- endfor %}{{ '\\n</tools>\\n\\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n\' }}'
    "{%- set messages = messages[1:] %}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
THOUGHT = r"<think>\n\n</think>\n\n"


class TestTheModelsOwnTemplate:
    def folder(self, miniature: Path, folder: Path, template: str) -> Path:
        for file in ("config.json", "tokenizer.json"):
            shutil.copy(miniature / file, folder)
        (folder / "chat_template.jinja").write_text(template)
        return folder

    def test_a_hybrid_model_gets_an_empty_thought(self, miniature: Path, tmp_path: Path) -> None:
        codec = tokens.load_codec(self.folder(miniature, tmp_path, QWEN3))
        assert codec.family == "qwen3"
        assert codec.decode(codec.render(OPENING)).endswith("<think>\n\n</think>\n\n")
        assert verify_codec(codec).forks == ()

    def test_a_model_that_never_thinks_gets_none(self, miniature: Path, tmp_path: Path) -> None:
        assert THOUGHT in QWEN3
        codec = tokens.load_codec(self.folder(miniature, tmp_path, QWEN3.replace(THOUGHT, "")))
        assert codec.family == "qwen3"
        assert codec.decode(codec.render(OPENING)).endswith("<|im_start|>assistant\n")

    def test_another_dialect_is_refused(self, miniature: Path, tmp_path: Path) -> None:
        folder = self.folder(miniature, tmp_path, CHATML.replace("# Tools", "## Tools"))
        with pytest.raises(ConfigError, match="not shown its calls"):
            tokens.load_codec(folder)  # in its own words, then, which are none for calls
        assert verify_codec(tokens.load_codec(folder, renderer="qwen3")).forks == ()

    def test_a_template_that_fails_is_reported(self, miniature: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no luck"):
            tokens.load_codec(self.folder(miniature, tmp_path, "{{ raise_exception('no luck') }}"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b'{"vocab', b"[1]", b"{}", b"\xff\xfe"])
def test_a_damaged_model_folder_is_named(miniature: Path, tmp_path: Path, name: str, content: bytes) -> None:
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((miniature / file).read_bytes())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name) as caught:
        tokens.load_codec(tmp_path)
    assert "again" in caught.value.fix


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


class TestOtherFamilies:
    """Models without a renderer of their own are prompted by their own template, if that can be extended exactly."""

    def folder(self, merging: Path, folder: Path, template: str = OTHER) -> Path:
        self.drop(merging, folder, "think")
        config = json.loads((merging / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
        (folder / "chat_template.jinja").write_text(template.strip())
        return folder

    def drop(self, merging: Path, folder: Path, name: str) -> None:
        """The tokenizer without some added tokens."""
        spec = json.loads((merging / "tokenizer.json").read_text())
        first = spec["added_tokens"][0]["id"]
        kept = [token for token in spec["added_tokens"] if name not in token["content"]]
        spec["added_tokens"] = [token | {"id": first + number} for number, token in enumerate(kept)]
        (folder / "tokenizer.json").write_text(json.dumps(spec))

    def test_a_shape_that_the_template_refuses_is_written_as_another(self, merging: Path, tmp_path: Path) -> None:
        """Above all a system message that is not the first, as Claude Code, Codex and gptme send."""
        codec = tokens.load_codec(self.folder(merging, tmp_path))
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
        ("change", "why"),
        [
            (
                ("'<|im_start|>system\\n'", "'<|im_start|>system %d\\n' % (messages | length)"),
                "is not a prefix|cannot be extended",
            ),
            (("+ m.content }}\n{%- for call", "+ m.content.upper() }}\n{%- for call"), "what a reply says"),
            (("{{- '<|im_end|>\\n' }}\n{%- endif %}\n{%- endfor %}", "{%- endif %}\n{%- endfor %}"), "no special"),
            (("m.tool_calls or []", "[]"), "not shown"),
            (
                ("{%- if add_generation_prompt %}", "{%- if messages | length == 2 %}"),
                "not a prefix|not the conversation",
            ),
        ],
    )
    def test_a_template_that_cannot_be_extended_is_refused(
        self, merging: Path, tmp_path: Path, change: tuple[str, str], why: str
    ) -> None:
        broken = OTHER.replace(*change)
        assert broken != OTHER
        with pytest.raises(ConfigError, match=why):
            verify_codec(tokens.load_codec(self.folder(merging, tmp_path, broken)))

    def test_no_tokens_for_calls(self, merging: Path, tmp_path: Path) -> None:
        folder = self.folder(merging, tmp_path)
        self.drop(merging, folder, "tool_call")
        with pytest.raises(ConfigError, match="<tool_call>"):
            tokens.load_codec(folder)


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
