"""Readers of published or logged trajectories, one per format.

A reader takes a file or row and returns a `Trajectory`, or raises `ValueError`.
"""

from coderepairrl.report.trajectories.others.files import FORMATS, Damaged, Window, read
from coderepairrl.report.trajectories.others.trajectory import Trajectory

__all__ = ["FORMATS", "Damaged", "Trajectory", "Window", "read"]
