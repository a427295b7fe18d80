"""Comma separated, quoted where needed."""


def _cell(value):
    text = str(value)
    if any(char in text for char in ',"\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def write(rows):
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)
