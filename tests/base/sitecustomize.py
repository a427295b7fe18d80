"""On PYTHONPATH it hides what the extra `train` installs, as if Python had only the base install."""

from __future__ import annotations

import sys

HIDDEN = {"torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers", "renderers", "openai", "httpx"}


class Without:
    """A finder that does not find what is hidden, neither modules nor metadata."""

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
