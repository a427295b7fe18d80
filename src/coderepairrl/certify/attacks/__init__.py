"""The attacks of `coderepairrl.certify.redteam`: what they go for, where they run, and what runs there."""
