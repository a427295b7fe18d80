"""The training loop: `loop` is the page to read."""

from coderepairrl.train.command import Interrupted, needs, plan, run, summary

__all__ = ["Interrupted", "needs", "plan", "run", "summary"]
