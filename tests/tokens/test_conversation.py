"""Rows to train on from conversations that were not sampled: what a gateway would have recorded, for every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from family import render_reply

from coderepairrl import tokens
from coderepairrl.tokens.verify import OPENING, TOOLS

Messages = list[dict[str, Any]]


def call(cmd: str, content: str = "", **more: str) -> dict[str, Any]:
    function = {"name": "shell", "arguments": json.dumps({"cmd": cmd})}
    calls = [{"id": "abcdefgh1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefgh1", "content": text}


def attempt(*replies: dict[str, Any]) -> Messages:
    """A conversation in which every reply but the last is answered by a tool."""
    answered = [[reply, result(f"line {at} <|im_end|></s><|eot_id|>\n")] for at, reply in enumerate(replies)]
    return [*map(dict, OPENING), *(message for pair in answered for message in pair)][:-1]


def learned(codec: tokens.Codec, row: tokens.Row) -> str:
    return codec.decode([token for token, is_trained in zip(*row, strict=True) if is_trained])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_is_the_row_that_a_gateway_would_record(name: str, tmp_path: Path) -> None:
    """Ids are the prompt, each reply as it is sampled, and the exact extension; trained are the replies."""
    family = FAMILIES[name]
    codec = tokens.load_codec(family.write(tmp_path / "model"), thinking=family.always)
    thought = {"reasoning_content": "hm"} if family.opens and family.always else {}
    done = {"role": "assistant", "content": "Done.", **thought}
    messages = attempt(call("ls", **thought), call("cat a", **thought), done)
    (row,) = tokens.make_conversation_rows(codec, messages, TOOLS)
    ids, trained = list(codec.render(messages[:2], TOOLS)), [False] * len(codec.render(messages[:2], TOOLS))
    for at in (2, 4, 6):
        before = codec.render(messages[:at], TOOLS)
        assert before == ids
        news = messages[at + 1 : at + 2] or [{"role": "user", "content": "?"}]
        output = render_reply(codec, messages[: at + 1], news, TOOLS)
        assert at == 6 or codec.spell(messages[at], calls=at // 2 - 1) == output
        added = codec.extend(before, output, messages[at + 1 : at + 2]) if at < 6 else []
        assert added is not None
        ids += [*output, *added]
        trained += [True] * len(output) + [False] * len(added)
    assert (list(row.ids), list(row.trained)) == (ids, trained)
    text = learned(codec, row)
    assert sum(text.count(codec.decode([stop])) for stop in codec.stop_ids) == 3 and "Done." in text
    assert "line" not in text and "role" not in text and "assistant" not in text and "<think>" not in text
    parsed = codec.parse(ids[len(codec.render(messages[:2], TOOLS)) :][: trained.count(True)], tools=TOOLS)
    assert parsed.calls[0].name == "shell"


def test_messages_after_the_last_reply_are_left_out_and_content_may_be_absent(miniature: Path) -> None:
    codec = tokens.load_codec(miniature)
    reply = {**call("ls"), "content": None}
    whole = tokens.make_conversation_rows(codec, [*map(dict, OPENING), reply, result("a")], TOOLS)
    assert whole == tokens.make_conversation_rows(codec, [*map(dict, OPENING), call("ls")], TOOLS)
    assert whole[0].ids[-1] in codec.stop_ids and whole[0].trained[-1]


def test_thoughts_are_learned_with_thinking_and_left_out_without(miniature: Path) -> None:
    messages = attempt(call("ls", reasoning_content="I look."), {"role": "assistant", "content": "Done."})
    thinking, plain = tokens.load_codec(miniature, thinking=True), tokens.load_codec(miniature)
    (row,) = tokens.make_conversation_rows(thinking, messages, TOOLS)
    text = learned(thinking, row)
    assert text.startswith("<think>\nI look.\n</think>\n\n<tool_call>")
    assert text.endswith("<|im_end|>Done.<|im_end|>"), "the empty thoughts before the second reply are not learned"
    assert thinking.decode(row.ids).endswith("<think>\n\n</think>\n\nDone.<|im_end|>")
    (row,) = tokens.make_conversation_rows(plain, messages, TOOLS)
    assert "think" not in learned(plain, row) and "I look." not in plain.decode(row.ids)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("thought", ["I look.", ""])
def test_thoughts_in_tags_equal_separate_thoughts(thought: str, thinking: bool, miniature: Path) -> None:
    codec = tokens.load_codec(miniature, thinking=thinking)
    apart, within = call("ls", "So.", reasoning_content=thought), call("ls", f"<think>\n{thought}\n</think>\n\nSo.")
    assert tokens.make_conversation_rows(codec, attempt(within), TOOLS) == tokens.make_conversation_rows(
        codec, attempt(apart), TOOLS
    )


def test_each_reply_is_learned_in_one_row_where_the_history_is_rewritten(miniature: Path) -> None:
    codec = tokens.load_codec(miniature, thinking=True)
    ask = {"role": "user", "content": "And now?"}
    first, second = ({"role": "assistant", "content": c, "reasoning_content": f"{c}?"} for c in ("One", "Two"))
    rows = tokens.make_conversation_rows(codec, [*map(dict, OPENING), first, ask, second], TOOLS)
    assert [learned(codec, row) for row in rows] == [
        f"<think>\n{c}?\n</think>\n\n{c}<|im_end|>" for c in ("One", "Two")
    ]
    assert "One?" not in codec.decode(rows[1].ids) and "One" in codec.decode(rows[1].ids)


@pytest.mark.parametrize(("messages", "why"), [([*OPENING], "no reply"), ([call("ls")], "begins with a reply")])
def test_conversations_without_a_reply_or_a_prompt_are_refused(miniature: Path, messages: Messages, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tokens.make_conversation_rows(tokens.load_codec(miniature), messages, TOOLS)


def test_a_digest_is_of_the_tokenizer_and_the_template_and_of_nothing_else(tmp_path: Path) -> None:
    family = FAMILIES["Qwen2.5-Coder"]
    folder = family.write(tmp_path / "model")
    digest = tokens.digest_tokenizer(folder)
    spec = json.loads((folder / "tokenizer.json").read_text())

    def saved(**changes: Any) -> str:
        (folder / "tokenizer.json").write_text(json.dumps(dict(reversed((spec | changes).items())), indent=1))
        return tokens.digest_tokenizer(folder)

    assert digest == tokens.digest_tokenizer(family.write(tmp_path / "another", num_hidden_layers=7))
    assert digest == saved(padding={"strategy": "BatchLongest"}), "the order of keys, and what training left over"
    assert digest != saved(added_tokens=spec["added_tokens"][:-1])
    assert digest == saved()
    merged = [saved(model=spec["model"] | {"merges": merges}) for merges in (["a b"], [["a", "b"]])]
    assert merged[0] == merged[1] != digest == saved(), "merges may be written in either way"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x", "pad_token": "<|im_end|>"}))
    assert digest == tokens.digest_tokenizer(folder), "tokens that the template does not name"
    (folder / "chat_template.jinja").write_text(family.template + " ")
    assert digest != tokens.digest_tokenizer(folder)
