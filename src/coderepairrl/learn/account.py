"""Where every token that a run sampled went: ``sampled = trained + masked + dropped`` over the whole log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coderepairrl.learn.stitch import Account


def run_account(records: Iterable[Mapping[str, Any]]) -> Account:
    """The account of a run from its log.

    To the accounts of its steps come tokens that no step consumed, dropped as ``evaluation``, ``void`` (a try
    that was retried), ``interrupted`` (the run was stopped in mid-episode) or ``pending`` (a finished episode
    whose step has not been trained yet).
    """
    account = Account()
    phases: dict[str, str] = {}
    sampled: Counter[str] = Counter()
    endings: dict[str, str] = {}
    consumed: set[str] = set()
    for record in records:
        kind = record["type"]
        if kind == "episode":
            phases[record["id"]] = record["phase"]
        elif kind == "turn":
            turn = record["turn"]
            sampled[record["episode"]] += len(turn["output"]["ids"]) + len(turn["tail"]["ids"])
        elif kind == "verdict":
            endings[record["verdict"]["id"]] = record["verdict"]["ending"]
        elif kind == "step":
            account += Account(**record["account"])
            consumed |= set(record["episodes"])
    dropped: Counter[str] = Counter()
    for episode, tokens in sampled.items():
        if episode not in consumed:
            dropped[_reason(phases[episode], endings.get(episode))] += tokens
    return account + Account(sampled=dropped.total(), dropped=dict(dropped))


def _reason(phase: str, ending: str | None) -> str:
    if phase != "train":
        return "evaluation"
    if ending is None:
        return "interrupted"
    return "void" if ending == "void" else "pending"
