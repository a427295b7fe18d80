"""Pages of runs: episodes turn by turn and token by token, groups and tasks in columns.

Written as linked files or served live (`view.server`, which needs aiohttp).
"""

from coderepairrl.report.view.site import Site, write_one

__all__ = ["Site", "write_one"]
