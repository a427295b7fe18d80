"""Detect replaced functions and classes of `builtins`."""


def kept():
    """Record `builtins`; return a function that names a part replaced since, or returns ""."""
    import builtins

    free = ("open", "print", "input", "__import__", "breakpoint", "compile", "exec", "eval")  # programs replace them
    space, kinds = vars(builtins), (type, type(len))
    originals = [(name, value) for name, value in space.items() if isinstance(value, kinds) and name not in free]

    def replaced():
        for name, value in originals:
            if space.get(name) is not value:
                return "builtins." + name
        return ""

    return replaced
