"""Rewards of the thesis, its draft and its code, for reproduction only."""
