"""A prefix tree changes only speed: each distinct token is computed once, and logprobs and gradients are those of rows
alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forest import ROWS, compare_runs, run_alone, run_batch, run_rows
from gradient import check_gradient, gradient_of_step

from coderepairrl.config.schema import Lora
from coderepairrl.errors import UsageError
from coderepairrl.learn import LearnSettings, attention
from coderepairrl.learn.pack import build_prefix_tree, count_distinct_tokens, cut_rows, pack_rank_share, pack_samples
from coderepairrl.learn.policy import Policy
from coderepairrl.learn.trainer import Trainer
from coderepairrl.types import Sample
from peak import Peak


def gathered(*inputs):
    """Replace `_TreeAttention.apply` by attention as on a GPU, which has no chunks."""
    *arguments, layer = inputs
    if layer is not None:
        raise UsageError("no chunks")
    return attention._attend_gathered(*arguments)


GATHERED = SimpleNamespace(apply=gathered)


BEGINNINGS = {row.ids[: n + 1] for row in ROWS for n in range(len(row.ids))}


@pytest.fixture(scope="module")
def expected(miniature: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return run_alone(miniature)


@pytest.fixture(params=["merged", "gathered", "gathered, heads repeated"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the attention for CPUs, for GPUs, or for GPUs in float32."""
    if request.param != "merged":
        monkeypatch.setattr(attention, "_TreeAttention", GATHERED)
        repeats = request.param == "gathered, heads repeated"
        monkeypatch.setattr(attention, "_needs_repeated_heads", lambda query: repeats)


def test_rows_of_a_tree_have_the_logprobs_and_gradients_of_rows_alone(implementation, miniature, expected):
    """Windows are in `test_attention_is_that_of_a_mask_in_float64` and among the architectures."""
    logprobs, gradients = compare_runs(run_batch(Policy.load(miniature), pack_samples(ROWS)), expected)
    assert logprobs < 1e-5 and gradients < 1e-5


def dense(query, key, value, spans, window):
    """Compute attention with one mask over all tokens."""
    seen = torch.zeros(query.shape[2], query.shape[2], dtype=torch.bool)
    for span in spans:
        path = [at for start, stop in span.keys for at in range(start, stop)]
        for n in range(span.depth, span.length):
            seen[path[n], path[max(0, n + 1 - window) : n + 1]] = True
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    weights = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 5, 17])
def test_attention_is_that_of_a_mask_in_float64(implementation, window):
    spans = build_prefix_tree([row.ids for row in ROWS]).spans
    assert max(len(span.before) for span in spans) > 2
    draw = torch.Generator().manual_seed(0)
    tokens = spans[-1].stop
    sizes = [(1, tokens, 6, 8), (1, tokens, 2, 8), (1, tokens, 2, 8)]
    inputs = [torch.randn(size, generator=draw, dtype=torch.float64).transpose(1, 2) for size in sizes]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    out, _ = attention.tree_attention(torch.nn.Module(), *inputs, None, scaling=0.3, sliding_window=window, spans=spans)
    exact = dense(*inputs, spans, window or tokens)
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((tensor * weights).sum(), inputs) for tensor in (out, exact))
    assert (out - exact).abs().max().item() < 1e-12
    assert all((a - b).abs().max().item() < 1e-12 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_large_bias_of_keys_does_not_round_gradients(chunk):
    """Published Qwen2.5 has one that is nearly all of its keys, and float32 rounded gradients to 1e-3."""
    whole = build_prefix_tree([row.ids for row in ROWS])
    draw = torch.Generator().manual_seed(0)
    sizes = [(1, len(whole.ids), heads, 8) for heads in (6, 2, 2)]
    query, key, value = (torch.randn(size, generator=draw).transpose(1, 2) for size in sizes)
    inputs = [tensor.requires_grad_() for tensor in (query, key + 300 * torch.randn(8, generator=draw), value)]
    layer = torch.nn.Linear(1, 1, bias=True)
    layer.layer_idx = 0
    store = attention.TreeCache(len(whole.ids)) if chunk else None
    parts = attention.split_into_chunks(whole.spans, chunk) if chunk else [whole.spans]

    def attend(spans):
        slice_T = slice(spans[0].start, spans[-1].stop)
        chosen = [tensor[:, :, slice_T] for tensor in inputs]
        return slice_T, attention.tree_attention(layer, *chosen, None, scaling=0.3, spans=spans, store=store)[0]

    with torch.no_grad():
        joined = torch.cat([attend(spans)[1] for spans in parts], 1)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = dense(*exact, whole.spans, len(whole.ids))
    assert (joined - expected).abs().max() < 2e-5
    weights = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), exact[:1])
    ours = torch.zeros_like(theirs)
    for spans in reversed(parts):
        slice_T, out = attend(spans)
        ours += torch.autograd.grad((out * weights[:, slice_T]).sum(), inputs[0])[0]
    assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("lora", [None, Lora(rank=4, alpha=8)], ids=["full", "lora"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointing"])
def test_every_distinct_token_is_computed_once(lora, again, miniature):
    """Tokens are counted at the embedding; gradients are those of one row per micro-batch."""
    settings = LearnSettings(lora=lora, gradient_checkpointing=again)
    policy = Policy.load(miniature, settings)
    for name, parameter in policy.parameters.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    counts: list[int] = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _m, ids, _out: counts.append(ids[0].numel()))
    once = run_batch(policy, pack_samples(ROWS))
    assert counts == [len(BEGINNINGS)] == [count_distinct_tokens([row.ids for row in ROWS])]
    logprobs, gradients = compare_runs(once, run_rows(policy, max_logits=3 * 265))
    assert logprobs < 1e-5 and gradients < 1e-5


@pytest.mark.parametrize("budget", [16, 33, 48])
@pytest.mark.parametrize("chunked", [False, True], ids=["cut", "chunks"])
def test_any_budget_gives_the_same_gradient(chunked, budget, miniature, monkeypatch):
    monkeypatch.setattr(Policy, "can_chunk", chunked)
    settings = LearnSettings(algorithm="gspo", eps_low=0.3, eps_high=0.3, beta=0.1)
    whole, gradient = gradient_of_step(Trainer(miniature, settings), ROWS, monkeypatch)
    parts, summed = gradient_of_step(Trainer(miniature, settings.with_changes(micro_tokens=budget)), ROWS, monkeypatch)
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert whole["computed_tokens"] == whole["distinct_tokens"] == parts["distinct_tokens"] == len(BEGINNINGS)
    assert parts["micro_batches"] > 1
    assert (parts["computed_tokens"] > parts["distinct_tokens"]) == (not chunked or budget == 48)
    check_gradient(summed, gradient, 1e-6)


@pytest.mark.parametrize(
    ("rows", "budgets", "ranks"),
    [
        ([row.ids for row in ROWS], range(1, 100), 1),
        *(([(n,) * n for n in (30, 12, 45, 8, 21, 33, 60, 5, 4)], (50,), ranks) for ranks in (2, 3, 4)),
    ],
    ids=["one process", "two", "three", "four"],
)
def test_a_cut_is_within_the_budget_and_in_whole_rounds(rows, budgets, ranks):
    for budget in budgets:
        parts = cut_rows(rows, budget, ranks)
        assert sorted(at for part in parts for at in part) == list(range(len(rows)))
        assert all(count_distinct_tokens([rows[at] for at in part]) <= budget or len(part) == 1 for part in parts)
        assert len(parts) % ranks == 0 or len(parts) == len(rows)
    assert cut_rows([(1,) * 7], 50, ranks) == [[0]] and cut_rows([], 10, ranks) == []


def test_a_cut_repeats_as_little_as_it_can():
    """Cuts are between rows that share least."""
    groups = [(group,) * 30 + (attempt,) * 5 for group in range(3) for attempt in range(4)]  # 50 distinct tokens each
    assert cut_rows(groups, 75) == cut_rows(groups, 50) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [len(part) for part in cut_rows(groups, 100)] in ([4, 8], [8, 4])
    dealt = [(group,) * 100 + (group, attempt) * 20 for attempt in range(8) for group in range(4)]
    for ranks in (1, 2, 4):  # four groups of eight attempts, which share a prompt
        parts = cut_rows(dealt, 1000, ranks)
        assert len(parts) == max(2, ranks)
        assert sum(count_distinct_tokens([dealt[at] for at in part]) for part in parts) == count_distinct_tokens(dealt)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"trained": (True,) * 8}, "first token"),
        ({"trained": (False,) * 8}, "no token to train"),
        ({"logprobs": (0.0,) * 9}, "diff"),
    ],
)
def test_refuses_rows_that_cannot_be_trained(make_rows, broken, message):
    with pytest.raises(ValueError, match=message):
        pack_rank_share([replace(make_rows([8])[0], **broken)], 100)


@pytest.mark.parametrize("chunk", [1, 7, 30, 200])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointing"])
def test_a_tree_in_chunks_has_the_same_logprobs_and_gradients(again, chunk, miniature, expected):
    policy = Policy.load(miniature, LearnSettings(gradient_checkpointing=again))
    logprobs, gradients = compare_runs(run_batch(policy, replace(pack_samples(ROWS), chunk_tokens=chunk)), expected)
    assert logprobs < 1e-5 and gradients < 1e-5


def test_a_prompt_longer_than_a_micro_batch_is_shared_in_no_more_memory(miniature, monkeypatch):
    """A tree is computed in chunks of half a micro-batch; without chunks, each row is a micro-batch, however long."""
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 256, (300,), generator=draw).tolist()
    rows = []
    for number in range(6):
        ids = (*prompt, *torch.randint(0, 256, (20,), generator=draw).tolist())
        on = (*[False] * 300, *[True] * 20)
        rows.append(Sample(f"e{number}", ids, on, tuple(-5.6 * i for i in on), tuple(i - 1 for i in on), 1.0 - number))
    for lora in (None, Lora(rank=4, alpha=8)):
        settings = LearnSettings(algorithm="grpo", beta=0.1, lora=lora, micro_tokens=200)
        results = []
        for chunked in (True, False):
            trainer, counts = Trainer(miniature, settings), []
            embedding = trainer.policy.model.get_input_embeddings()
            embedding.register_forward_hook(lambda _m, ids, _out, counts=counts: counts.append(ids[0].numel()))
            with monkeypatch.context() as patch:
                if not chunked:
                    patch.setattr(trainer, "_all_can_chunk", False)
                with Peak() as peak:
                    results.append((*gradient_of_step(trainer, rows, monkeypatch), peak.bytes))
            assert max(counts) == (100 if chunked else 320)
        (once, ours, little), (alone, theirs, much) = results
        assert (once["computed_tokens"], once["repetition"]) == (420, 1.0) and alone["computed_tokens"] == 6 * 320
        assert once["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        check_gradient(ours, theirs, 1e-6, least=1e-4)
        assert little < much
