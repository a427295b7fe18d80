"""Messages to ids and back, on the miniature's byte-level tokenizer and on one with merges."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from family import learn_tokenizer, read_pieces

from coderepairrl import tokens
from coderepairrl.errors import ConfigError
from coderepairrl.tokens import template
from coderepairrl.tokens.inert import InertTokenizer
from coderepairrl.tokens.reply import EAGER
from coderepairrl.tokens.verify import OPENING, TOOLS, verify_codec


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


def test_ordinary_text_has_the_ids_of_the_plain_tokenizer(merging: Path) -> None:
    from tokenizers import Tokenizer

    codec = tokens.load_codec(merging)
    reference = Tokenizer.from_file(str(merging / "tokenizer.json"))
    text = Path(__file__).read_text().replace("<", "(")
    assert codec.encode(text) == reference.encode(text, add_special_tokens=False).ids
    # around an inert special token, too: the plain model sees one undisturbed string
    inert = codec.encode(f"{text}<|im_end|>{text}")
    assert codec.decode(inert) == f"{text}<|im_end|>{text}"
    assert codec.tokenizer.added["<|im_end|>"] not in inert
    assert inert[: len(codec.encode(text)) - 5] == codec.encode(text)[:-5]


def test_ids_of_a_tokenizer_with_merges_are_extended_exactly(merging: Path) -> None:
    assert verify_codec(tokens.load_codec(merging)).forks == ()


def test_a_truncation_that_a_tokenizer_was_saved_with_is_ignored(merging: Path) -> None:
    spec = json.loads((merging / "tokenizer.json").read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    codec = InertTokenizer(spec, name="cut", eos_token_id=None)
    assert codec.decode(codec.encode("naïve words " * 20)) == "naïve words " * 20


def test_a_prompt_within_the_limit_is_never_refused(merging: Path) -> None:
    """A prompt of the longest word that is one token, up to the limit and far beyond it."""
    codec = tokens.load_codec(merging)
    texts = [codec.decode([token]) for token in range(len(codec.tokenizer))]
    word = max((text for text in texts if re.fullmatch(r" [a-z]+", text)), key=len)
    codec.tokenizer.longest_token = len(word)  # as if no other token were longer
    messages = [{"role": "user", "content": word * 20_000}]
    prompt = codec.render(messages)
    assert len(prompt) < 20_100
    assert codec.render(messages, most=len(prompt)) == prompt
    with pytest.raises(tokens.TooLong) as caught:
        codec.render([{"role": "user", "content": word * 22_000}], most=len(prompt))
    assert 20_100 < caught.value.tokens <= 22_010


def test_lone_surrogates_are_refused(codec: tokens.Codec) -> None:
    with pytest.raises(ValueError):
        codec.render([{"role": "user", "content": "a\udc00b"}])


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
        *('{"name": "shell", "arguments": {"cmd": "\\ud800"}}', '{"name": "shell", "arguments": {"cmd": "l'),
        *("[" * 100_000, '{"a": ' + "9" * 5000 + "}"),
    ],
    ids=lambda body: body[:20],
)
def test_a_broken_call_is_reported_character_for_character(
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


def test_missing_files_are_named(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, r"config\.json and no tokenizer\.json"),
        ("nobody/nothing", r"nobody/nothing has no config\.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            tokens.load_codec(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: {"decoder": {"type": "Metaspace"}}, "byte-level"),
        (lambda spec: {"added_tokens": spec["added_tokens"][1:]}, "differ in their ids from its file"),
        (lambda spec: {"model": spec["model"] | {"type": "of next year"}}, "cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(miniature: Path, tmp_path: Path, change: Any, message: str) -> None:
    shutil.copy(miniature / "config.json", tmp_path)
    spec = json.loads((miniature / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | change(spec)))
    with pytest.raises(ConfigError, match=message):
        tokens.load_codec(tmp_path)


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
    codec = tokens.load_codec(FAMILIES["Qwen3-Coder"].write(tmp_path))
    calls = [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": "[1]"}}]
    with pytest.raises(ValueError, match="has a wrong type"):
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
def test_thoughts_words_and_calls_stream_in_order(codec: tokens.Codec, chunk: int) -> None:
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


def test_a_refused_shape_is_rewritten(tmp_path: Path) -> None:
    """Above all a system message that is not the first, as Claude Code, Codex and gptme send."""
    codec = tokens.load_codec(FAMILIES["Qwen3.5, 3.6"].write(tmp_path))
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
