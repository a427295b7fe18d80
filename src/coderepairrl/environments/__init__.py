"""Environments of tasks: Python environments and images."""

from coderepairrl.environments.build import KIND, CondaFile, Environment, Specification, build, prepare_environments
from coderepairrl.environments.fetch import NoRoom
from coderepairrl.environments.fingerprints import list_fingerprints, read_fingerprint
from coderepairrl.environments.images import ReadyImage, prepare_images
from coderepairrl.environments.pythons import sandbox_version
from coderepairrl.environments.verify import check_environments, check_unchanged, verify_states

__all__ = [
    "KIND",
    "CondaFile",
    "Environment",
    "NoRoom",
    "ReadyImage",
    "Specification",
    "build",
    "check_environments",
    "check_unchanged",
    "list_fingerprints",
    "prepare_environments",
    "prepare_images",
    "read_fingerprint",
    "sandbox_version",
    "verify_states",
]
