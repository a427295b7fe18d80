"""Compare tests with the checks' files when they are collected and called."""


def make_comparison(root, check_sources, start_folder, compile_file, skip=None, loader=None, main=""):
    """Make five functions that compare tests with `check_sources`, contents by path in the folder `root`.

    ``compile_file(file, config)`` returns a file's code as importlib or (with a config) pytest compiles it, or None.
    `loader` is pytest's function that executes a file, `skip` is `unittest.skip`, `main` the file of ``__main__``.
    """
    import importlib
    import os
    import sys
    import types

    lines_by_file, files_by_module, executed = {}, {}, {}
    codes_by_name = {}  # of each file: lists of codes by the qualified name of a function or class
    has_hooks, execute_code = hasattr(sys, "addaudithook"), importlib._bootstrap._call_with_frames_removed.__code__
    for file in check_sources:
        name = (file[: -len("/__init__.py")] if file.endswith("/__init__.py") else file[:-3]).rpartition("/")[2]
        if file.endswith(".py") and name != "conftest":
            files_by_module.setdefault(name, []).append(file)
    plain = ("@pytest.mark.", "@mark.", "@unittest.")  # these decorators return the function, or one that skips

    def list_inner(code):
        return [each for each in code.co_consts if hasattr(each, "co_consts")]

    skip_codes = []
    for outer in list_inner(skip.__code__) if skip else ():
        skip_codes += [outer, *list_inner(outer)]

    def record_execution(frame, code, *rest):
        """Remember the namespace in which `frame` executes `code`, from locals of importlib or pytest."""
        file = os.path.normpath(os.path.join(start_folder, code.co_filename))
        if file in check_sources and not rest and frame.f_code in (execute_code, getattr(loader, "__code__", None)):
            values = frame.f_locals
            if frame.f_code is execute_code:
                space, config = values["args"][1], None
            else:
                space, config = vars(values["module"]), values["self"].config
            executed.setdefault(file, []).append((code, space, config))

    def find_check_file(module_name):
        """Checks' file that a module is loaded from, or ""."""
        if module_name == "__main__":
            return main
        loaded_from = getattr(sys.modules.get(module_name), "__file__", None) or ""
        for file in files_by_module.get(module_name.rpartition(".")[2], ()):
            dotted = file.replace("/__init__.py", ".py")[:-3].replace("/", ".")
            is_namesake = os.path.basename(loaded_from) == os.path.basename(file)
            is_namesake = is_namesake and os.path.realpath(loaded_from) != file and os.path.exists(loaded_from)
            if dotted.endswith("." + module_name) and not is_namesake:
                return file
        return ""

    def list_lines(file):
        if file not in lines_by_file:
            text = check_sources[file].decode("utf-8", "replace")
            lines_by_file[file] = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return lines_by_file[file]

    def index_codes(file, module):
        """Put codes of the definitions in `file` into `codes_by_name`; return whether `module` was executed from it."""
        executions = executed.get(file, ())
        if file == main or not (has_hooks or loader):
            executions = [(compile_file(file), vars(module), None)]
        elif not has_hooks or any(config and compile_file(file, config) is None for _, _, config in executions):
            return True
        matching = (
            code for code, space, config in executions if space is vars(module) and code == compile_file(file, config)
        )
        executed_code = next(matching, None)
        remaining, codes = [("", executed_code)] if executed_code else [], codes_by_name.setdefault(file, {})
        while remaining:
            qualname, outer = remaining.pop()
            for code in list_inner(outer):
                codes.setdefault(qualname + code.co_name, []).append(code)
                if not code.co_flags & 1:  # a class: functions have CO_OPTIMIZED
                    remaining.append((qualname + code.co_name + ".", code))
        return executed_code is not None

    def list_codes(function):
        """Codes of a function and of those it wraps."""
        codes = []
        while function is not None and len(codes) < 20:
            function = getattr(function, "__func__", None) or getattr(function, "fget", None) or function
            code = getattr(function, "__code__", None)
            codes += [code] if isinstance(code, types.CodeType) else []
            wrapped = getattr(function, "__dict__", {}).get("__wrapped__")
            function = getattr(function, "func", None) if type(function).__module__ == "functools" else wrapped
        return codes

    def list_all_codes(functions):
        return [code for each in functions for code in list_codes(each) or list_codes(type(each).__call__)]

    def list_decorators(file, code):
        decorators = []
        for line in list_lines(file)[code.co_firstlineno - 1 :]:
            if line.lstrip().startswith(("def ", "async ", "class ")):
                break
            decorators += [line.strip()] if line.lstrip().startswith("@") else []
        return decorators

    def may_be_replaced(file, qualname, cls):
        """Whether decorators or a metaclass may replace `file`'s function named `qualname`."""
        codes = codes_by_name.get(file, {})
        decorators = list_decorators(file, codes[qualname][0])
        owner = qualname.rpartition(".")[0]
        decorators += list_decorators(file, codes[owner][0]) if owner in codes else []
        has_plain_type = type(cls).__name__ in ("type", "ABCMeta")
        return not has_plain_type or not all(line.startswith(plain) for line in decorators)

    def is_changed(function, file, qualname, cls=object):
        """Whether `function` of `cls` differs from `file`'s named `qualname`."""
        expected, codes = codes_by_name.get(file, {}).get(qualname, ()), list_codes(function)
        if not expected or any(code in expected for code in codes[:1]):
            return False
        if qualname.rpartition(".")[2] + " =" in check_sources[file].decode("utf-8", "replace"):  # assigned by the file
            return False
        if not may_be_replaced(file, qualname, cls):
            return not any(code in skip_codes for code in codes[:1])
        others = [code for each, listed in codes_by_name.get(file, {}).items() if each != qualname for code in listed]
        return bool(codes) and not any(code in expected for code in codes) and codes[-1] in others

    def is_changed_test(cls, name, function, file=""):
        """Whether test `name` of a class, or of `file`, differs from the checks' files."""
        for each in getattr(cls, "__mro__", ()):
            file, qualname = find_check_file(each.__module__), each.__qualname__ + "." + name
            if file and qualname in codes_by_name.get(file, {}):
                return is_changed(function, file, qualname, each)
        return not cls and file in check_sources and file.endswith(".py") and is_changed(function, file, name)

    def find_changed_definition():
        """Test file whose module or definitions differ from its source, or ""."""
        for module_name, module in list(sys.modules.items()):
            file = find_check_file(module_name)
            if not file or not isinstance(module, types.ModuleType):
                continue
            lines, space = list_lines(file), vars(module)
            if not index_codes(file, module):
                return file[len(root) + 1 :]
            for qualname, codes in codes_by_name.get(file, {}).items():
                owner, _, name = qualname.rpartition(".")
                line = lines[codes[0].co_firstlineno - 1]
                if name.startswith(("<", "__")) or "." in owner or (not owner and line[:1].isspace()):
                    continue
                cls = space.get(owner) if owner else object
                if owner and not isinstance(cls, type):
                    continue
                members = vars(cls) if owner else space
                if name in members:
                    differs = codes[0].co_flags & 1 and is_changed(members[name], file, qualname, cls)
                else:  # unless it is defined on a condition, or deleted
                    differs = len(line) - len(line.lstrip()) < 5 and (not owner or name.startswith("test"))
                    differs = differs and not may_be_replaced(file, qualname, cls)
                    differs = differs and not any(each.lstrip().startswith("del ") and name in each for each in lines)
                if differs:
                    return file[len(root) + 1 :] + ": " + qualname
        return ""

    return record_execution, list_codes, list_all_codes, is_changed_test, find_changed_definition
