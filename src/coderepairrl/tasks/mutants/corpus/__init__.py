"""Small, well-written functions to break and repair: the material of `crrl hello`.

A module here holds pure functions without imports; its ``check_`` twin holds one plain ``assert`` per line.
`coderepairrl.tasks.mutants.slices` cuts both into repositories of a few dozen lines.
"""
