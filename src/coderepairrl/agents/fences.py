"""Fenced code blocks in a reply, each a whole file or functions of a file (`direct`'s ``format``).

File names are recognised as for Aider's ``whole`` format (Aider-AI/aider, ``wholefile_coder.py``).
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple, get_args

from coderepairrl.agents import patching
from coderepairrl.agents.patching import Text, find_whole_lines
from coderepairrl.printable import fence_code
from coderepairrl.tokens.trie import count_common_prefix

Format = Literal["blocks", "whole", "function"]
FORMATS: tuple[Format, ...] = get_args(Format)

_OPEN = re.compile(r"([ \t]*)(`{3,}|~{3,})([^`\n]*)")  # indentation, fence, info string
_WORD = re.compile(r"[\w./@+-]*\w")  # without punctuation after it
# a path with an extension: in the format `whole`, a line of only this names a new file
_PATH = re.compile(r"(?:[\w@+-][\w.@+-]*/)*[\w@+-][\w.@+-]*\.[A-Za-z]\w{0,9}")
_NAME_CHARS = 250
"""Characters of a line that are searched for a file name."""
_NOT_FILE_CODE = frozenset({"bash", "console", "output", "sh", "shell", "shell-session", "text", "txt", "diff"})
"""Languages of blocks that are no file's code, unless they name a file."""
_MAX_CHARS = 1 << 20
"""Most characters of a file or block: it is parsed in this process, which all episodes share."""
_MAX_PARSED_CHARS = 1 << 22
"""Most characters of a file, times its blocks: it is parsed for each."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Import = ast.Import | ast.ImportFrom
_FUTURE = "from __future__ "


class Unreadable(Exception):
    """A reply or block that makes no edit; the message is the reason."""


class Fence(NamedTuple):
    """A fenced block, with the last line of text `above` it."""

    above: str
    info: str
    text: str
    closed: bool


def parse_fences(reply: str) -> list[Fence]:
    """Parse fenced blocks; the last may be unclosed. A fence's indentation is removed from its lines.

    >>> parse_fences("calc.py:\\n```python\\nx = 1\\n```")
    [Fence(above='calc.py:', info='python', text='x = 1\\n', closed=True)]
    """
    lines = reply.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    fences: list[Fence] = []
    above, at = "", 0
    while at < len(lines):
        if not (opened := _OPEN.fullmatch(lines[at])):
            above = lines[at].strip() or above
            at += 1
            continue
        indent, signs, info = opened.groups()
        end = at + 1
        while end < len(lines):
            line = lines[end].strip()
            is_fence = bool(line) and not line.strip(signs[0]) and len(line) >= len(signs)
            # as in Markdown: a deeper fence is text
            if is_fence and len(_leading_blanks(lines[end])) <= len(indent) + 3:
                break
            end += 1
        inner = [line.removeprefix(indent) for line in lines[at + 1 : end]]
        if end == len(lines) and inner and not inner[-1]:
            del inner[-1]  # `split` leaves an empty text after the last line end
        fences.append(Fence(above, info.strip(), "".join(f"{line}\n" for line in inner), end < len(lines)))
        above, at = "", end + 1
    return fences


class FileCode(NamedTuple):
    """A file and the code of its blocks."""

    path: str
    codes: list[str]


def group_by_file(
    form: Format, reply: str, paths: Sequence[str], only: str = "", cut_off: bool = False
) -> list[FileCode]:
    """Group blocks by file: one of `paths`, `only` for unnamed blocks, or a new file.

    In the format ``whole`` a file has one block: the first headed by its name, else the longest, since others quote
    parts of it. Raises `Unreadable` if there is no block, the last was `cut_off`, or no file can be determined.
    """
    fences = parse_fences(patching.extract_answer(reply))
    if not fences:
        raise Unreadable("no fenced block")
    if cut_off and not fences[-1].closed:
        raise Unreadable("the reply was cut off within a block")
    if form == "whole" and len(fences) > 1 and not fences[-1].closed and not fences[-1].text.strip():
        raise Unreadable("a fence within a block ended it: a block with fences in it needs longer outer ones")
    paths_by_name: dict[str, list[str]] = {}
    for path in paths:
        paths_by_name.setdefault(path.rpartition("/")[2], []).append(path)
    by_path: dict[str, list[tuple[bool, str]]] = {}  # whether the file's name heads the block, and its code
    has_unnamed = False
    for fence in fences:
        path, code, headed = _find_named_file(fence, paths_by_name, can_be_new=form == "whole")
        if fence.info.lower() in _NOT_FILE_CODE and not headed:
            continue
        if path or only:
            by_path.setdefault(path or only, []).append((headed, code))
        else:
            has_unnamed = True
    if not by_path:
        raise Unreadable("no block names its file, and more than one is shown" if has_unnamed else "no block of code")
    if form == "function":
        return [FileCode(path, [code for _, code in each]) for path, each in by_path.items()]
    files = []
    for path, blocks in by_path.items():
        first_headed = next((code for headed, code in blocks if headed), "")
        files.append(FileCode(path, [first_headed or max((code for _, code in blocks), key=len)]))
    return files


def _find_named_file(
    fence: Fence, paths_by_name: Mapping[str, Sequence[str]], *, can_be_new: bool
) -> tuple[str, str, bool]:
    """Find the file that a block names in its info string, above it, or in its first line.

    Returns path, code, and whether the name stands alone.
    """
    first, _, rest = fence.text.partition("\n")
    heading = fence.above[:_NAME_CHARS].strip("`*:# ")
    if path := _match_paths(fence.info[:_NAME_CHARS], paths_by_name):
        return path, fence.text, True
    if path := _match_paths(fence.above[-_NAME_CHARS:], paths_by_name):
        before = {word.strip("`*:#").lower() for word in heading.split()[:-1]}
        return path, fence.text, before <= {"file", "filename", "path"}
    if first.startswith(("#", "//")) and (path := _match_path(first.strip("#/ ")[:_NAME_CHARS], paths_by_name)):
        return path, rest, True
    return (heading, fence.text, True) if can_be_new and _PATH.fullmatch(heading) else ("", fence.text, False)


def _match_paths(text: str, paths_by_name: Mapping[str, Sequence[str]]) -> str:
    return next(filter(None, (_match_path(word, paths_by_name) for word in _WORD.findall(text))), "")


def _match_path(word: str, paths_by_name: Mapping[str, Sequence[str]]) -> str:
    name = word.removeprefix("./")
    paths = paths_by_name.get(name.rpartition("/")[2], ())
    if name in paths:
        return name
    if "." not in name:  # a word of the text rather than a file
        return ""
    matches = [path for path in paths if path.endswith(f"/{name}") or name.endswith(f"/{path}")]
    return matches[0] if len(matches) == 1 else ""


def replace_whole_file(before: str, code: str) -> str:
    """Return `code` with the outer empty lines of `before`. Raises `Unreadable` if empty.

    >>> replace_whole_file("\\nx = 1\\n", "x = 2\\n")
    '\\nx = 2\\n'
    """
    body = code.strip("\n")
    if not body.strip():
        raise Unreadable("the block is empty")
    if not before.strip("\n"):
        return f"{body}\n"
    head = len(before) - len(before.lstrip("\n"))
    return "\n" * head + body + "\n" * (len(before) - len(before.rstrip("\n")))


def express_as_edit(path: str, before: str, after: str) -> dict[str, str]:
    """Express a file's change as arguments of `Tools.apply_patch`, with enough context to be unique.

    >>> express_as_edit("a.py", "x = 1\\ny = 1\\n", "x = 1\\ny = 2\\n")
    {'file_path': 'a.py', 'old_content': 'y = 1\\n', 'new_content': 'y = 2\\n'}
    """
    old, new = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in (before, after))
    same_start = count_common_prefix(old, new)
    same_end = count_common_prefix(old[same_start:][::-1], new[same_start:][::-1])
    context_lines = 0
    while True:
        start, end = max(0, same_start - context_lines), max(0, same_end - context_lines)  # lines left out
        part = "".join(old[start : len(old) - end])
        is_unique = part.endswith("\n") and len(find_whole_lines(before, part)) == 1
        is_ended = end > 0 or (before.endswith("\n") and after.endswith("\n"))  # a last line may lack its end
        if (start, end) == (0, 0) or (is_unique and is_ended):
            return {"file_path": path, "old_content": part, "new_content": "".join(new[start : len(new) - end])}
        context_lines = 2 * context_lines or 1


# -- functions


class _Definition(NamedTuple):
    """A function or class: qualified name (``f``, ``Class.f``, ``outer.inner``) and `place`, its prefix."""

    name: str
    place: str
    node: _Function | ast.ClassDef
    nested: bool = False

    @property
    def start(self) -> int:
        """First line, including decorators."""
        return min([self.node.lineno, *(each.lineno for each in self.node.decorator_list)])

    @property
    def end(self) -> int:
        return self.node.end_lineno or self.node.lineno

    @property
    def decorators(self) -> list[str]:
        return [ast.unparse(each) for each in self.node.decorator_list]


def replace_functions(before: str, code: str) -> str:
    """Replace functions of the Python file `before` with those of the same name in `code`.

    Methods match by class, or by name if unique; nested functions likewise. New functions and classes go above the next
    matching one. Decorators stay if the block has none. Missing imports that the functions use are added. Other code is
    ignored, unless the block is the whole file and changes more than functions: then it replaces the file.

    Raises `Unreadable` for invalid Python, and for functions that the file lacks or repeats.
    """
    try:
        with warnings.catch_warnings():  # about invalid escapes
            warnings.simplefilter("ignore")
            return _replace_functions(before, code)
    except (RecursionError, MemoryError, ValueError) as error:
        raise Unreadable(f"the code cannot be parsed: {type(error).__name__}") from None


def replace_functions_by_block(before: str, codes: Sequence[str]) -> str:
    """Apply `replace_functions` per block. Raises `Unreadable` if none matches, and for too many."""
    if len(before) * len(codes) > _MAX_PARSED_CHARS:
        raise Unreadable(f"{len(codes)} blocks are too many for a file of that size")
    text, problems = before, []
    for code in codes:
        try:
            text = replace_functions(text, code)
        except Unreadable as problem:
            problems.append(problem)
    if len(problems) == len(codes):
        raise problems[0]
    return text


def _replace_functions(before: str, code: str) -> str:
    if max(len(before), len(code)) > _MAX_CHARS or "\r" in before:
        raise Unreadable("the file is too large, or has line ends that a block cannot express")
    try:
        file = ast.parse(before)
    except SyntaxError as error:
        raise Unreadable(f"the file is not Python: {error.msg}") from None
    block, lines = _parse_code(code)
    file_definitions = list(_iterate_definitions(file.body))
    file_names = {each.name for each in file_definitions} | _list_classes(file)
    block_definitions = list(_iterate_definitions(block.body, file_names=file_names))
    if _is_whole_file(file, file_definitions, block, block_definitions):
        return replace_whole_file(before, "\n".join(lines))
    targets = _match_definitions(block_definitions, file_definitions)
    if not targets:
        names = ", ".join(each.name for each in block_definitions[:5])
        raise Unreadable(f"the file has no function {names}" if names else "the block has no function")
    old = before.split("\n")
    replacements: dict[int, tuple[int, list[str]]] = {}
    """Number of the line after the replaced ones, and new lines, by number of the first replaced line."""

    def insert(at: int, text: list[str]) -> None:
        end, following = replacements.get(at, (at, []))
        replacements[at] = end, [*text, *following]

    for number, (definition, target) in targets.items():
        replacements[target.start] = target.end + 1, _reindent(definition, lines, target, old)
        for helper in reversed(_find_helpers(number, block_definitions, targets)):
            empty = [""] * (1 if target.node.col_offset else 2)
            insert(_find_first_comment(old, target.start), [*_reindent(helper, lines, target, old), *empty])
    spans = sorted((start, end) for start, (end, _) in replacements.items())
    if any(one[1] > other[0] for one, other in pairwise(spans)):
        raise Unreadable("a function of the block is nested in another one of the file")
    nodes = [node for each in block_definitions for node in ast.walk(each.node)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    for at, added in _find_missing_imports(file, block, used).items():
        insert(at, added)
    for start, (end, text) in sorted(replacements.items(), reverse=True):
        old[start - 1 : end - 1] = text
    return "\n".join(old)


def _parse_code(code: str) -> tuple[ast.Module, list[str]]:
    """Parse code, even with small models' indentation errors."""
    lines = code.replace("\r\n", "\n").replace("\r", "\n").strip("\n").split("\n")
    depths = [len(_leading_blanks(line)) for line in lines[1:] if line.strip()]
    # try the first line as it is, with the least indentation of the others, and without any
    firsts = lines[0], " " * min(depths, default=0) + lines[0].lstrip(), lines[0].lstrip()
    problem = ""
    for first in dict.fromkeys(firsts):
        candidate = [first, *lines[1:]]
        text = "\n".join(candidate)
        try:
            if not candidate[0][:1].isspace():
                return ast.parse(text), candidate
            [wrapper] = ast.parse(f"if 1:\n{text}").body  # indented code needs a statement above it
        except SyntaxError as error:
            problem = problem or str(error.msg)
            continue
        except ValueError:  # several statements: later lines are not indented
            continue
        assert isinstance(wrapper, ast.If)
        for statement in wrapper.body:
            ast.increment_lineno(statement, -1)
        return ast.Module(wrapper.body, []), candidate
    raise Unreadable(f"the block is not Python: {problem}")


def _iterate_definitions(
    body: Sequence[ast.AST], place: str = "", *, nested: bool = False, file_names: set[str] | None = None
) -> Iterator[_Definition]:
    """Yield the definitions in `body`.

    With `file_names`, `body` is a block's: nested functions are skipped, unknown classes kept whole.
    """
    for node in body:
        if isinstance(node, _Function):
            name = f"{place}{node.name}"
            yield _Definition(name, place, node, nested)
            if file_names is None:
                yield from _iterate_definitions(node.body, f"{name}.", nested=True)
        elif isinstance(node, ast.ClassDef):
            if file_names is not None and f"{place}{node.name}" not in file_names:
                yield _Definition(f"{place}{node.name}", place, node)
            else:
                yield from _iterate_definitions(node.body, f"{place}{node.name}.", nested=nested, file_names=file_names)
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            inner = [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
            yield from _iterate_definitions(inner, place, nested=nested, file_names=file_names)


def _list_classes(file: ast.Module) -> set[str]:
    # qualified names, without classes in functions
    def iterate(body: Sequence[ast.AST], place: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield f"{place}{node.name}"
                yield from iterate(node.body, f"{place}{node.name}.")
            elif isinstance(node, ast.stmt) and not isinstance(node, _Function):
                yield from iterate([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)], place)

    return set(iterate(file.body, ""))


def _match_definitions(
    block: Sequence[_Definition], file: Sequence[_Definition]
) -> dict[int, tuple[_Definition, _Definition]]:
    """Match the block's functions to the file's, by index in `block`."""
    targets: dict[int, tuple[_Definition, _Definition]] = {}
    for number, definition in enumerate(block):
        if isinstance(definition.node, ast.ClassDef):
            continue
        matches = [each for each in file if each.name == definition.name]
        if not matches and not definition.place:
            matches = [each for each in file if each.node.name == definition.node.name]
        if len(matches) > 1:
            # a property's getter and setter have one name, and other decorators
            is_one_name = len({each.name for each in matches}) == 1
            same_decorators = [
                each
                for each in matches
                if each.decorators == definition.decorators and (is_one_name or definition.decorators)
            ]
            same_name = [each for each in block if each.name == definition.name]
            if len(same_decorators) == 1:
                matches = same_decorators
            elif len(same_name) == len(matches):  # in the same order
                matches = [matches[[each is definition for each in same_name].index(True)]]
            else:
                raise Unreadable(f"the file has {len(matches)} functions {definition.node.name}")
        if matches:
            # of two that match the same function, the last one wins
            targets = {at: pair for at, pair in targets.items() if pair[1] is not matches[0]}
            targets[number] = definition, matches[0]
    return targets


def _find_helpers(
    number: int, block: Sequence[_Definition], targets: Mapping[int, tuple[_Definition, _Definition]]
) -> list[_Definition]:
    """New definitions between the previous matching function and `number`, or after the last."""
    place = block[number].place
    siblings = [at for at in sorted(targets) if block[at].place == place]
    previous = max((at for at in siblings if at < number), default=-1)
    end = len(block) if number == siblings[-1] else number
    names = {block[at].name for at in targets}
    return [
        block[at]
        for at in range(previous + 1, end)
        if block[at].place == place and at not in targets and block[at].name not in names
    ]


def _reindent(definition: _Definition, lines: Sequence[str], target: _Definition, old: Sequence[str]) -> list[str]:
    """Indent the block's definition like `target`, and keep `target`'s decorators if it has none."""
    node, text = definition.node, list(lines[definition.start - 1 : definition.end])
    block_indent, file_indent = _leading_blanks(lines[node.lineno - 1]), _leading_blanks(old[target.node.lineno - 1])
    fixed_lines = _find_string_lines(definition)
    body, file_body = node.body[0].lineno, target.node.body[0].lineno
    are_both_below = body > node.lineno and file_body > target.node.lineno  # not on the line of the ``def``
    if are_both_below and _leading_blanks(lines[body - 1]) == _leading_blanks(old[file_body - 1]):
        fixed_lines |= set(range(body, definition.end + 1))  # only the first line has another indentation
    if block_indent != file_indent:
        for at, line in enumerate(text):
            if definition.start + at not in fixed_lines and line.strip() and line.startswith(block_indent):
                text[at] = file_indent + line[len(block_indent) :]
    if node.name == target.node.name and not node.decorator_list:
        text = [*old[target.start - 1 : target.node.lineno - 1], *text]
    return text


def _leading_blanks(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _find_string_lines(definition: _Definition) -> set[int]:
    """Lines inside multi-line strings (not docstrings), which must not be reindented."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(definition.node)
        if isinstance(node, _Function | ast.ClassDef) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return {
        line
        for node in ast.walk(definition.node)
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings
        for line in range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        if isinstance(node, ast.JoinedStr) or isinstance(node.value, str | bytes)
    }


def _find_first_comment(old: Sequence[str], start: int) -> int:
    # return the first of the comment lines directly above line `start`, else `start`
    while start > 1 and old[start - 2].lstrip().startswith("#") and not old[start - 2].startswith("#!"):
        start -= 1
    return start


def _list_imports(tree: ast.Module) -> dict[str, str]:
    """Name that each import binds, by its line; imports of several names are split."""
    imports = {}
    for node in tree.body:
        for alias in node.names if isinstance(node, _Import) else ():
            one = ast.ImportFrom(node.module, [alias], node.level) if isinstance(node, ast.ImportFrom) else None
            imports[ast.unparse(one or ast.Import([alias]))] = alias.asname or alias.name.partition(".")[0]
    return imports


def _find_missing_imports(file: ast.Module, block: ast.Module, used: set[str]) -> dict[int, list[str]]:
    # find the block's imports of `used` names that the file lacks; return lines by the line that they go above
    present, imports = _list_imports(file), _list_imports(block)
    needed = [line for line, name in imports.items() if name in {*used, "*"} or line.startswith(_FUTURE)]
    missing = [line for line in needed if line not in present]
    if not missing:
        return {}
    has_docstring = ast.get_docstring(file, clean=False) is not None
    body = file.body[1:] if has_docstring else file.body
    leading_imports = list(takewhile(lambda node: isinstance(node, _Import), body))
    first = min([body[0].lineno, *(each.lineno for each in getattr(body[0], "decorator_list", []))]) if body else 1
    last = first
    if leading_imports:  # below the last import, and statements on the same line
        bottom = leading_imports[-1].end_lineno or leading_imports[-1].lineno
        last = max(node.end_lineno or node.lineno for node in body if node.lineno <= bottom) + 1
    if any(line.startswith(_FUTURE) for line in missing) and has_docstring and first <= (file.body[0].end_lineno or 0):
        raise Unreadable("the file's first statement is on the line of its docstring")
    insertions: dict[int, list[str]] = {}
    for line in missing:
        insertions.setdefault(first if line.startswith(_FUTURE) else last, []).append(line)
    if not leading_imports:
        insertions = {at: [*text, "", ""] for at, text in insertions.items()}
    return insertions


def _is_whole_file(
    file: ast.Module,
    file_definitions: Sequence[_Definition],
    block: ast.Module,
    block_definitions: Sequence[_Definition],
) -> bool:
    """Whether the block has all names of the file, and changes more than functions."""
    in_block, in_file = _statements_by_key(block), _statements_by_key(file)
    names = {each.name for each in block_definitions}
    return (
        {each.name for each in file_definitions if not each.nested} <= names
        and _list_classes(file) <= _list_classes(block)
        and _list_imports(file).keys() <= _list_imports(block).keys()
        and in_file.keys() <= in_block.keys()
        and any(in_block[key] != in_file[key] for key in in_file)
    )


def _statements_by_key(tree: ast.Module) -> dict[str, str]:
    # statements except definitions, imports and texts, by assigned or tested expression, else by their whole text
    statements = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom():
                continue
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=targets):
                key = " ".join(map(ast.unparse, targets))
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                key = ast.unparse(target)
            case ast.If(test=test):
                key = f"if {ast.unparse(test)}"
            case _:
                key = ast.unparse(node)
        statements[key] = ast.unparse(node)
    return statements


# -- writing


def format_reply(form: Format, path: str, before: bytes, after: bytes) -> str:
    """Write a reply in the format `form` that makes the change. Raises `patching.Inexpressible`."""
    if form == "blocks":
        return patching.write_blocks(patching.compute_blocks(path, before, after))
    try:
        old, new = (Text.parse(data).text for data in (before, after))
        code = new if form == "whole" else _write_changed_functions(old, new)
        result = replace_whole_file(old, code) if form == "whole" else replace_functions(old, code)
    except (SyntaxError, Unreadable) as error:
        raise patching.Inexpressible(f"{path}: {error}", fix="leave it out, or another format") from None
    if result != new:
        problem = f"{path}: format {form} cannot express this change"
        raise patching.Inexpressible(problem, fix="leave it out, or another format")
    code, language = code.strip("\n"), "python" if path.endswith(".py") else ""
    return f"{path}\n{fence_code(code, language)}\n"


def _write_changed_functions(old: str, new: str) -> str:
    """New or changed functions, methods in their classes, below new imports."""
    trees = ast.parse(old), ast.parse(new)
    sides = [{each.name: each for each in _iterate_definitions(tree.body) if not each.nested} for tree in trees]
    texts = old.split("\n"), new.split("\n")

    def text(side: int, each: _Definition) -> str:
        return "\n".join(texts[side][each.start - 1 : each.end])

    present = _list_imports(trees[0])
    imports = [line for line in _list_imports(trees[1]) if line not in present]
    parts = ["\n".join(imports)] if imports else []
    place = ""
    for name, each in sides[1].items():
        if name in sides[0] and text(0, sides[0][name]) == text(1, each):
            continue
        opening = f"class {each.place.rstrip('.')}:\n" if each.place and each.place != place else ""
        parts.append(opening + text(1, each))
        place = each.place
    return "\n\n\n".join(parts)


def fence_file(path: str, text: str) -> str:
    """Format a file for a prompt."""
    return f"{path}\n{fence_code(text.rstrip())}"
