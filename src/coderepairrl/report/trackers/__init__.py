"""TensorBoard, trackio, Weights & Biases: the metrics of a run, read from its log, where somebody else draws them.

The run folder is the truth. A tracker gets what the log says, in a process of its own (`coderepairrl.stages.trackers`),
or later: how far it has come is kept beside, so that nothing is sent twice when a run is resumed.
"""

from coderepairrl.report.trackers.sending import send

__all__ = ["send"]
