"""What a task needs to run: Python environments, built from a specification, and images, fetched and unpacked without a
daemon or root. Sandboxes are shown both read-only."""

from coderepairrl.environments.build import Environment, Specification, build
from coderepairrl.environments.images import Ready as ReadyImage
from coderepairrl.environments.images import prepare_images
from coderepairrl.environments.prepare import prepare_environments
from coderepairrl.environments.verify import check_unchanged

__all__ = [
    "Environment",
    "ReadyImage",
    "Specification",
    "build",
    "check_unchanged",
    "prepare_environments",
    "prepare_images",
]
