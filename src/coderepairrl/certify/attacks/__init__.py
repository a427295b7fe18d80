"""Attacks of `coderepairrl.certify.redteam`."""
