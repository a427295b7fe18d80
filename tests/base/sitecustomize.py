"""Hides the packages of the extra `train` when on PYTHONPATH, as if only the base were installed."""

from __future__ import annotations

import sys

HIDDEN = {"torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "renderers", "openai", "httpx"}


class Without:
    """A finder that hides modules and metadata of `HIDDEN`."""

    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self._finder.find_spec(name, path, target)

    def find_distributions(self, context):
        found = getattr(self._finder, "find_distributions", lambda _: ())(context)
        return (each for each in found if each.metadata["Name"].lower() not in HIDDEN)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
