"""The training loop: `loop` is the page to read."""

from coderepairrl.train.command import Interrupted, plan, run, summary

__all__ = ["Interrupted", "plan", "run", "summary"]
