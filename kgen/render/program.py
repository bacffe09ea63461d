"""The program in a source file: its code without comments, docstrings and layout.

Results on record belong to the program of an emitted file. A comment that is reworded, or a line
that is broken, makes none of them stale.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

C_SUFFIXES = frozenset({".c", ".cu", ".cuh", ".h"})

_C_TOKEN = re.compile(
    r"""
    (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
    | (?P<kept> R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)"
        | "(?:\\.|[^"\\])*" | \d(?:'?[\w.])* | '(?:\\.|[^'\\])+' )
    """,
    re.VERBOSE | re.DOTALL,
)
_NAMED_AFTER_CODE = re.compile(rb"\bkgen_[0-9a-f]{16}\b")
"""A name of operators that is made of a digest of the code, so it changes with nothing else."""


def program(content: bytes, suffix: str) -> bytes:
    """Return the program in a file with this suffix (`.py`, `.cu`).

    The result is the same in every version of Python. It is for hashing and comparing, not for
    running. A file that does not parse, or of another kind, is its own program.
    """
    content = _NAMED_AFTER_CODE.sub(b"kgen", content)
    try:
        text = content.decode()
        if suffix == ".py":
            return "\n".join(_tree(ast.parse(text))).encode()
        if suffix in C_SUFFIXES:
            return _without_c_comments(text).encode()
    except (SyntaxError, UnicodeDecodeError, ValueError):
        pass
    return content


def _tree(tree: ast.Module) -> Iterator[str]:
    """Print a syntax tree in preorder.

    `ast.dump` differs between versions of Python, and recurses.
    """
    to_do: list[ast.AST | list[object] | str] = [tree]
    while to_do:
        node = to_do.pop()
        if isinstance(node, str):
            yield node
            continue
        if isinstance(node, list):
            yield f"[{len(node)}"
            to_do += [_item(value) for value in reversed(node)]
            continue
        fields = [
            (name, value) for name, value in _fields(node) if value is not None and value != []
        ]
        yield f"{type(node).__name__} {' '.join(name for name, _ in fields)}"
        to_do += [_item(value) for _, value in reversed(fields)]


def _item(value: object) -> ast.AST | list[object] | str:
    return value if isinstance(value, ast.AST | list) else repr(value)


def _fields(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield the fields of a node without docstrings, those of modules, functions, classes and
    attributes.
    """
    for name, value in ast.iter_fields(node):
        yield name, [x for x in value if not _is_text(x)] if isinstance(value, list) else value


def _is_text(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _without_c_comments(text: str) -> str:
    """Keep line breaks: directives end at them."""
    code = _C_TOKEN.sub(lambda found: " " if found["comment"] else found[0], text)
    lines = (line.rstrip() for line in code.split("\n"))
    return "\n".join(line for line in lines if line)
