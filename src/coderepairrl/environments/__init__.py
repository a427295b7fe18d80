"""What a task needs to run: Python environments, built from a specification and shown to sandboxes read-only."""

from coderepairrl.environments.build import Environment, Specification, build
from coderepairrl.environments.verify import check_unchanged

__all__ = ["Environment", "Specification", "build", "check_unchanged"]
