"""The rewards of the thesis, its draft and its code, under their own names: to reproduce it, not to train on."""
