"""Stages of runs. Start reading at `train`."""
