"""Compile a script so that code under test cannot replace its exit functions."""


def seal_exits(source, script):
    """Compile a script; also return the first line number of its exits, and names for its namespace.

    Exits are calls of `sys.exit`, `exit`, `quit`, `unittest.main`, and ``raise SystemExit``. Their line numbers lie
    beyond the file; they call Python's function by a name that is not an identifier, and raise if it returns.
    """
    import sys

    only_ast = 0x400  # ast.PyCF_ONLY_AST: importing ast takes longer than most scripts run
    tree = compile(source, script, "exec", only_ast, dont_inherit=True)
    first_exit_line = source.count(b"\n") + 2
    exits_by_module = {"sys": ("exit",), "os": ("_exit", "abort"), "unittest": ("main",)}
    modules, names = {}, {"exit": "exit", "quit": "exit"}  # of exits, by their names in the script
    bound = set()  # other names that the script defines

    def walk(node):
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            for each in value if isinstance(value, list) else [value]:
                if hasattr(each, "_fields"):
                    yield from walk(each)

    def parse_expression(text):
        return compile(text, script, "eval", only_ast, dont_inherit=True).body

    def move_beyond(node, line):
        node.lineno = node.end_lineno = first_exit_line + line
        node.col_offset = node.end_col_offset = 0

    for node in walk(tree):
        kind = type(node).__name__
        if kind in ("FunctionDef", "ClassDef", "arg"):
            bound.add(getattr(node, "name", None) or getattr(node, "arg", None))
        elif kind == "Name" and type(node.ctx).__name__ == "Store":
            bound.add(node.id)
        for alias in node.names if kind in ("Import", "ImportFrom") else []:
            bound_name = alias.asname or alias.name
            if kind == "Import" and alias.name in exits_by_module:
                modules[bound_name] = alias.name
            elif kind == "ImportFrom" and alias.name in exits_by_module.get(node.module, ()):
                names[bound_name] = alias.name
            else:
                bound.add(bound_name)
    for name in ("exit", "quit"):
        if name in bound:
            del names[name]

    def find_exit_name(call):
        """``exit``, ``main``, ... for a call that never returns; else None."""
        target, kind = call.func, type(call.func).__name__
        if kind == "Attribute" and type(target.value).__name__ == "Name":
            name = target.attr if target.attr in exits_by_module.get(modules.get(target.value.id), ()) else None
        else:
            name = names.get(target.id) if kind == "Name" else None
        # unittest.main returns with exit=False, perhaps in **options
        return None if name == "main" and any(each.arg in ("exit", None) for each in call.keywords) else name

    def guard_exit(call, name):
        """Pair of the call and an expression that raises KeyError if it returns."""
        line = call.lineno
        pair = parse_expression("(0, {}['code under test kept the script from ending'])")
        for node in walk(pair):
            if hasattr(node, "lineno"):
                move_beyond(node, line)
        if name == "exit":
            call.func = parse_expression("x")
            call.func.id = ".exit"
        for node in (call, *walk(call.func)):
            if hasattr(node, "lineno"):
                move_beyond(node, line)
        pair.elts[0] = call
        return pair

    for node in list(walk(tree)):
        for field in node._fields:
            value = getattr(node, field, None)
            for at, each in enumerate(value if isinstance(value, list) else [value]):
                name = find_exit_name(each) if type(each).__name__ == "Call" else None
                if name and isinstance(value, list):
                    value[at] = guard_exit(each, name)
                elif name:
                    setattr(node, field, guard_exit(each, name))
        if type(node).__name__ == "Raise" and node.exc is not None:
            target = getattr(node.exc, "func", node.exc)
            if getattr(target, "id", "") == "SystemExit":
                target.id = ".SystemExit"
                move_beyond(node, node.lineno)
    code = compile(tree, script, "exec", dont_inherit=True)
    return code, first_exit_line, {".exit": sys.exit, ".SystemExit": SystemExit}
