"""Token accounting over the log: ``sampled = trained + masked + dropped``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coderepairrl.learn.stitch import Account


def run_account(records: Iterable[Mapping[str, Any]]) -> Account:
    """Sum of `accounts_by_kind`."""
    return sum(accounts_by_kind(records).values(), Account())


def accounts_by_kind(records: Iterable[Mapping[str, Any]]) -> dict[str, Account]:
    """Account for a run's tokens, by kind of task.

    Unconsumed tokens are dropped as ``evaluation``, ``void``, ``stale``, ``interrupted`` or ``pending``.
    """
    accounts: dict[str, Account] = {}
    begun: dict[str, tuple[str, str, str]] = {}
    stale: set[str] = set()
    sampled: Counter[str] = Counter()
    endings: dict[str, str] = {}
    consumed: set[str] = set()

    def add(kind: str, entry: Account) -> None:
        accounts[kind] = accounts.get(kind, Account()) + entry

    for record in records:
        type = record["type"]
        if type == "episode":
            begun[record["id"]] = (record.get("kind", ""), record["phase"], record["group"])
        elif type == "turn":
            turn = record["turn"]
            sampled[record["episode"]] += len(turn["output"]["ids"]) + len(turn["tail"]["ids"])
        elif type == "verdict":
            endings[record["verdict"]["id"]] = record["verdict"]["ending"]
        elif type == "step":
            for kind, entry in (record.get("kinds") or {"": record["account"]}).items():
                add(kind, Account(**entry))
            consumed |= set(record["episodes"])
        elif type == "shed":
            stale |= {name for name, (_, _, group) in begun.items() if group in record["groups"]}
    for episode, tokens in sampled.items():
        if episode not in consumed:
            kind, phase, _ = begun[episode]
            reason = "stale" if episode in stale else _reason(phase, endings.get(episode))
            add(kind, Account(sampled=tokens, dropped={reason: tokens}))
    return accounts


def _reason(phase: str, ending: str | None) -> str:
    if phase != "train":
        return "evaluation"
    if ending is None:
        return "interrupted"
    return "void" if ending == "void" else "pending"
