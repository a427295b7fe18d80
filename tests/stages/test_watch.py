"""The line that an evaluation prints of each attempt."""

from __future__ import annotations

import pytest

from coderepairrl.stages.watch import Watch
from coderepairrl.types import Ending, Episode, Score

TESTS = (Score("tests", 0.0, 1.0, passed=False),)


@pytest.mark.parametrize(
    ("episode", "says"),
    [
        (Episode("e", "t", "eval", 0, "g", 0, Ending.DONE, patch=b"x", scores=TESTS), "#0: not resolved; "),
        (
            Episode("e", "t", "eval", 0, "g", 1, Ending.LIMIT, reason="tokens", scores=TESTS),
            "#1: not resolved, empty patch, limit (tokens) before the first reply; ",
        ),
    ],
)
def test_it_says_what_ended_an_attempt_that_the_agent_did_not_end(episode: Episode, says: str) -> None:
    said: list[str] = []
    Watch(2, 1, [], None, said.append)(episode)
    assert says in said[0]
