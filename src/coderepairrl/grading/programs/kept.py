"""Finds functions and classes of `builtins` that code under test has replaced."""


def kept():
    """Remember `builtins`; returns a function that names one that was replaced since, or returns an empty string."""
    import builtins

    free = ("open", "print", "input", "__import__", "breakpoint", "compile", "exec", "eval")  # programs replace them
    space, kinds = vars(builtins), (type, type(len))
    found = [(name, value) for name, value in space.items() if isinstance(value, kinds) and name not in free]

    def replaced():
        for name, value in found:
            if space.get(name) is not value:
                return "builtins." + name
        return ""

    return replaced
