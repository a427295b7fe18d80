"""Export of episodes: a table of chats, and trajectories with token ids.

Both hold conversations, patches and scores, but no configuration, servers or program output.
"""

from coderepairrl.report.trajectories.atif import Origin, write_atif
from coderepairrl.report.trajectories.table import write_parquet

__all__ = ["Origin", "write_atif", "write_parquet"]
