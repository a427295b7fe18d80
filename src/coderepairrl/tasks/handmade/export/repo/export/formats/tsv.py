"""Separated by tabs; tabs and line ends inside cells become blanks."""


def _cell(value):
    return " ".join(str(value).split())


def write(rows):
    return "".join("\t".join(map(_cell, row)) + "\n" for row in rows)
