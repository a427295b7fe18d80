"""What a task needs to run: Python environments, built from a specification, and images, fetched and unpacked without a
daemon or root. Sandboxes are shown both read-only."""

from coderepairrl.environments.build import Environment, Specification, build
from coderepairrl.environments.images import prepare_images
from coderepairrl.environments.verify import check_unchanged

__all__ = ["Environment", "Specification", "build", "check_unchanged", "prepare_images"]
