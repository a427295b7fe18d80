"""Token accounting over the log: ``sampled = trained + masked + dropped``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coderepairrl.learn.stitch import TokenAccount


def count_run_tokens(records: Iterable[Mapping[str, Any]]) -> TokenAccount:
    """Sum of `count_tokens_by_kind`."""
    return sum(count_tokens_by_kind(records).values(), TokenAccount())


def count_tokens_by_kind(records: Iterable[Mapping[str, Any]]) -> dict[str, TokenAccount]:
    """`AccountBuilder` of all `records`."""
    accounts = AccountBuilder()
    for record in records:
        accounts.take(record)
    return accounts.build_by_kind()


class AccountBuilder:
    """Account for a run's tokens, record by record."""

    def __init__(self) -> None:
        self._trained: dict[str, TokenAccount] = {}
        self._begun: dict[str, tuple[str, str, str]] = {}
        self._stale: set[str] = set()
        self._sampled: Counter[str] = Counter()
        self._endings: dict[str, str] = {}
        self._consumed: set[str] = set()

    def take(self, record: Mapping[str, Any]) -> None:
        """Count a record; a turn may also be one of `runs.log.Follower`."""
        type = record["type"]
        if type == "episode":
            self._begun[record["id"]] = (record.get("kind", ""), record["phase"], record["group"])
        elif type == "turn":
            turn = record.get("turn")
            sampled = len(turn["output"]["ids"]) + len(turn["tail"]["ids"]) if turn else record["sampled"]
            self._sampled[record["episode"]] += sampled
        elif type == "verdict":
            self._endings[record["verdict"]["id"]] = record["verdict"]["ending"]
        elif type == "step":
            for kind, entry in (record.get("kinds") or {"": record["account"]}).items():
                self._trained[kind] = self._trained.get(kind, TokenAccount()) + TokenAccount(**entry)
            self._consumed |= set(record["episodes"])
        elif type == "shed":
            self._stale |= {name for name, (_, _, group) in self._begun.items() if group in record["groups"]}

    def build_by_kind(self) -> dict[str, TokenAccount]:
        """Accounts by kind of task.

        Unconsumed tokens are dropped as ``evaluation``, ``void``, ``stale``, ``interrupted`` or ``pending``.
        """
        accounts = dict(self._trained)
        for episode, tokens in self._sampled.items():
            if episode not in self._consumed:
                kind, phase, _ = self._begun.get(episode, ("", "train", ""))
                reason = "stale" if episode in self._stale else _reason(phase, self._endings.get(episode))
                entry = TokenAccount(sampled=tokens, dropped={reason: tokens})
                accounts[kind] = accounts.get(kind, TokenAccount()) + entry
        return accounts


def _reason(phase: str, ending: str | None) -> str:
    if phase != "train":
        return "evaluation"
    if ending is None:
        return "interrupted"
    return "void" if ending == "void" else "pending"
