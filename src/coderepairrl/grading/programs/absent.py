"""Stand-ins for packages that a harness imports, but does not need for judging."""


def stub_modules(*names):
    """Let ``import NAME`` and submodules succeed; every attribute is an empty class."""
    import importlib.abc
    import importlib.machinery
    import sys
    import types

    class Nothing(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {"__init__": lambda self, *args, **options: None})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            if name.partition(".")[0] in names:
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
            return None

        def create_module(self, spec):
            return Nothing(spec.name)

        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())


def register_package(name):
    """Register package `name` without running its ``__init__``; return its folder."""
    import importlib.machinery
    import importlib.util
    import sys
    import types
    from pathlib import Path

    top, *rest = name.split(".")
    root = Path(next(iter(importlib.util.find_spec(top).submodule_search_locations)), *rest)
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = module.__spec__.submodule_search_locations = [str(root)]
    sys.modules[name] = module
    return root
