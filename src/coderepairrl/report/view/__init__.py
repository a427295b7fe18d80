"""Pages of runs: their episodes as a list, each one turn by turn and token by token, groups and tasks side by side.

A folder of linked files, or served while a run goes on (`view.server`, which needs aiohttp and is not imported here).
"""

from coderepairrl.report.view.site import Site, write_one

__all__ = ["Site", "write_one"]
