"""Tracking of a run's metrics in TensorBoard, trackio or Weights & Biases, from its log.

A separate process (`coderepairrl.stages.trackers`) or a later one sends them; its position is recorded, so that none is
sent twice when a run is resumed.
"""

from coderepairrl.report.trackers.sending import send

__all__ = ["send"]
