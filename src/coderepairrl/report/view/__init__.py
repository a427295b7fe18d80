"""Pages of runs: episodes as a list, turn by turn and token by token, groups and tasks in columns.

A folder of linked files, or served live (`view.server`, which needs aiohttp and is not imported here).
"""

from coderepairrl.report.view.site import Site, write_one

__all__ = ["Site", "write_one"]
