"""Token accounting over the log: ``sampled = trained + masked + dropped``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coderepairrl.learn.stitch import TokenAccount


def count_run_tokens(records: Iterable[Mapping[str, Any]]) -> TokenAccount:
    """Account for a run's tokens."""
    return sum(count_tokens_by_kind(records).values(), TokenAccount())


def count_tokens_by_kind(records: Iterable[Mapping[str, Any]]) -> dict[str, TokenAccount]:
    """Account for a run's tokens by kind of task."""
    accounts = AccountBuilder()
    for record in records:
        accounts.take(record)
    return accounts.build_by_kind()


class AccountBuilder:
    """Builder of a run's accounts, record by record."""

    def __init__(self) -> None:
        self._trained: dict[str, TokenAccount] = {}
        self._episodes: dict[str, tuple[str, str, str]] = {}
        """Kind, phase and group by episode id."""
        self._stale: set[str] = set()
        self._sampled: Counter[str] = Counter()
        self._endings: dict[str, str] = {}
        self._consumed: set[str] = set()

    def take(self, record: Mapping[str, Any]) -> None:
        """Count a record; a turn may be a summary (`runs.log.Follower`)."""
        record_type = record["type"]
        if record_type == "episode":
            self._episodes[record["id"]] = (record.get("kind", ""), record["phase"], record["group"])
        elif record_type == "turn":
            turn = record.get("turn")
            sampled = len(turn["output"]["ids"]) + len(turn["tail"]["ids"]) if turn else record["sampled"]
            self._sampled[record["episode"]] += sampled
        elif record_type == "verdict":
            self._endings[record["verdict"]["id"]] = record["verdict"]["ending"]
        elif record_type == "step":
            for kind, entry in (record.get("kinds") or {"": record["account"]}).items():
                self._trained[kind] = self._trained.get(kind, TokenAccount()) + TokenAccount(**entry)
            self._consumed |= set(record["episodes"])
        elif record_type == "shed":  # groups too old to train
            self._stale |= {name for name, (_, _, group) in self._episodes.items() if group in record["groups"]}

    def build_by_kind(self) -> dict[str, TokenAccount]:
        """Accounts by kind of task.

        Unconsumed tokens are dropped as ``evaluation``, ``void``, ``stale``, ``interrupted`` or ``pending``.
        """
        accounts = dict(self._trained)
        for episode, tokens in self._sampled.items():
            if episode not in self._consumed:
                kind, phase, _ = self._episodes.get(episode, ("", "train", ""))
                reason = "stale" if episode in self._stale else _find_drop_reason(phase, self._endings.get(episode))
                entry = TokenAccount(sampled=tokens, dropped={reason: tokens})
                accounts[kind] = accounts.get(kind, TokenAccount()) + entry
        return accounts


def _find_drop_reason(phase: str, ending: str | None) -> str:
    if phase != "train":
        return "evaluation"
    if ending is None:
        return "interrupted"
    return "void" if ending == "void" else "pending"
