"""Tracking in TensorBoard, trackio or Weights & Biases, fed from a run's log.

Sent by a separate process (`coderepairrl.stages.trackers`) or later. The position in the log is recorded, so that
resuming sends nothing twice.
"""

from coderepairrl.report.trackers.sending import send

__all__ = ["send"]
