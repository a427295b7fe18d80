"""Compare tests with the checks' files when they are collected and called."""


def make_comparison(root, own, here, compiles, skip=None, loader=None, main=""):
    """Make five functions that compare tests with `own`, sources by path in the folder `root`.

    ``compiles(file, config)`` returns a file's code as importlib or (with a config) pytest compiles it, or None.
    `loader` is pytest's function that executes it, `skip` is `unittest.skip`, `main` the file of ``__main__``.
    """
    import importlib
    import os
    import sys
    import types

    source_of, files, ran, tables = {}, {}, {}, {}
    audited, loads = hasattr(sys, "addaudithook"), importlib._bootstrap._call_with_frames_removed.__code__
    for file in own:
        name = (file[: -len("/__init__.py")] if file.endswith("/__init__.py") else file[:-3]).rpartition("/")[2]
        if file.endswith(".py") and name != "conftest":
            files.setdefault(name, []).append(file)
    plain = ("@pytest.mark.", "@mark.", "@unittest.")  # these decorators return the function, or one that skips

    def inner(code):
        return [each for each in code.co_consts if hasattr(each, "co_consts")]

    skips = [deep for each in inner(skip.__code__) for deep in (each, *inner(each))] if skip else []

    def note(frame, code, *rest):
        """Remember the namespace in which `frame` executes `code`, from locals of importlib or pytest."""
        file = os.path.normpath(os.path.join(here, code.co_filename))
        if file in own and not rest and frame.f_code in (loads, getattr(loader, "__code__", None)):
            values = frame.f_locals
            by_importlib = frame.f_code is loads
            space, how = (values["args"][1], None) if by_importlib else (vars(values["module"]), values["self"].config)
            ran.setdefault(file, []).append((code, space, how))

    def file_of(name):
        """Checks' file that module `name` is loaded from."""
        if name == "__main__":
            return main
        other = getattr(sys.modules.get(name), "__file__", None) or ""
        for file in files.get(name.rpartition(".")[2], ()):
            dotted = file.replace("/__init__.py", ".py")[:-3].replace("/", ".")
            same = os.path.basename(other) == os.path.basename(file) and os.path.realpath(other) != file
            if dotted.endswith("." + name) and not (same and os.path.exists(other)):
                return file
        return ""

    def lines_of(file):
        if file not in source_of:
            text = own[file].decode("utf-8", "replace")
            source_of[file] = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return source_of[file]

    def look(file, module):
        """Whether `module` was executed from `file`; puts codes of its definitions into `tables`."""
        known = ran.get(file, ())
        if file == main or not (audited or loader):
            known = [(compiles(file), vars(module), None)]
        elif not audited or any(how and compiles(file, how) is None for _, _, how in known):
            return True
        code = next((each for each, space, how in known if space is vars(module) and each == compiles(file, how)), None)
        left, found = [("", code)] if code else [], tables.setdefault(file, {})
        while left:
            path, outer = left.pop()
            for each in inner(outer):
                found.setdefault(path + each.co_name, []).append(each)
                if not each.co_flags & 1:  # a class
                    left.append((path + each.co_name + ".", each))
        return code is not None

    def chain(function):
        """Codes of a function and of those it wraps."""
        codes = []
        while function is not None and len(codes) < 20:
            function = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
            code = getattr(function, "__code__", None)
            codes += [code] if isinstance(code, types.CodeType) else []
            wrapped = getattr(function, "__dict__", {}).get("__wrapped__")
            function = getattr(function, "func", None) if type(function).__module__ == "functools" else wrapped
        return codes

    def chains(functions):
        return [code for each in functions for code in chain(each) or chain(type(each).__call__)]

    def decorators(file, code):
        found = []
        for line in lines_of(file)[code.co_firstlineno - 1 :]:
            if line.lstrip().startswith(("def ", "async ", "class ")):
                break
            found += [line.strip()] if line.lstrip().startswith("@") else []
        return found

    def altered(file, path, cls):
        """Whether decorators or a metaclass may replace `file`'s function at `path`."""
        found = tables.get(file, {})
        lines = decorators(file, found[path][0])
        owner = path.rpartition(".")[0]
        lines += decorators(file, found[owner][0]) if owner in found else []
        plainly_made = type(cls).__name__ in ("type", "ABCMeta")
        return not plainly_made or not all(line.startswith(plain) for line in lines)

    def strange(function, file, path, cls=object):
        """Whether `function` of `cls` differs from `file`'s at `path`."""
        expected, codes = tables.get(file, {}).get(path, ()), chain(function)
        if not expected or any(code in expected for code in codes[:1]):
            return False
        if path.rpartition(".")[2] + " =" in own[file].decode("utf-8", "replace"):
            return False
        if not altered(file, path, cls):
            return not any(code in skips for code in codes[:1])
        others = [code for each, found in tables.get(file, {}).items() if each != path for code in found]
        return bool(codes) and not any(code in expected for code in codes) and codes[-1] in others

    def differs(cls, name, function, file=""):
        """Whether test `name` of a class, or of `file`, differs from the checks' files."""
        for each in getattr(cls, "__mro__", ()):
            file, path = file_of(each.__module__), each.__qualname__ + "." + name
            if file and path in tables.get(file, {}):
                return strange(function, file, path, each)
        return not cls and file in own and file.endswith(".py") and strange(function, file, name)

    def incomplete():
        """Test file whose module or definitions differ from its source, or ""."""
        for module_name, module in list(sys.modules.items()):
            file = file_of(module_name)
            if not file or not isinstance(module, types.ModuleType):
                continue
            lines, space = lines_of(file), vars(module)
            if not look(file, module):
                return file[len(root) + 1 :]
            for path, codes in tables.get(file, {}).items():
                owner, _, name = path.rpartition(".")
                line = lines[codes[0].co_firstlineno - 1]
                if name.startswith(("<", "__")) or "." in owner or (not owner and line[:1].isspace()):
                    continue
                cls = space.get(owner) if owner else object
                if owner and not isinstance(cls, type):
                    continue
                there = vars(cls) if owner else space
                if name in there:
                    bad = codes[0].co_flags & 1 and strange(there[name], file, path, cls)
                else:  # unless it is defined on a condition, or deleted
                    bad = len(line) - len(line.lstrip()) < 5 and (not owner or name.startswith("test"))
                    bad = bad and not altered(file, path, cls)
                    bad = bad and not any(each.lstrip().startswith("del ") and name in each for each in lines)
                if bad:
                    return file[len(root) + 1 :] + ": " + path
        return ""

    return note, chain, chains, differs, incomplete
