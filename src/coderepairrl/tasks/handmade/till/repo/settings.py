"""Settings of the till, one `name = value` per line. Written on Windows, hence the line ends."""

DEFAULTS = {"printer": "COM1", "beep": True, "copies": 1}


def read(text):
    """The settings in `text` over the defaults, each of the type of its default."""
    found = dict(DEFAULTS)
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition(";")[0].strip()
        if not line:
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or name not in DEFAULTS:
            raise ValueError(f"line {number}: {line}")
        found[name] = type(DEFAULTS[name])(value)
    return found
