"""Attacks of `coderepairrl.checks.redteam`."""
