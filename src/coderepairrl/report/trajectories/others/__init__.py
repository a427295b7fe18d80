"""Trajectories that others published or that agents logged, one small reader for each format.

A reader gets what one file or row says and returns a `Trajectory`, or raises `ValueError` for what is none.
"""

from coderepairrl.report.trajectories.others.files import FORMATS, Damaged, Window, read
from coderepairrl.report.trajectories.others.trajectory import Trajectory

__all__ = ["FORMATS", "Damaged", "Trajectory", "Window", "read"]
