"""Rewards of the thesis, its draft and its code: to reproduce it, not to train on."""
