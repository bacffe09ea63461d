"""The program in a source file: its code without comments, docstrings and layout.

Results on record belong to the program of an emitted file. A comment that is reworded, or a line
that is broken, makes none of them stale.
"""

from __future__ import annotations

import ast
import re

_NODES = (ast.AST, list)
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


def _tree(tree: ast.Module) -> list[str]:
    """Print a syntax tree in preorder, without docstrings.

    `ast.dump` differs between versions of Python, and recurses. The loop calls no functions of its
    own, because tests print millions of nodes.
    """
    printed: list[str] = []
    to_do: list[ast.AST | list[object] | str] = [tree]
    while to_do:
        node = to_do.pop()
        if isinstance(node, str):
            printed.append(node)
            continue
        if isinstance(node, list):
            printed.append(f"[{len(node)}")
            to_do += [x if isinstance(x, _NODES) else repr(x) for x in reversed(node)]
            continue
        names, values = [], []
        for name in type(node)._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                value = [x for x in value if type(x) is not ast.Expr or not _is_text(x)] or None
            if value is not None:
                names.append(name)
                values.append(value if isinstance(value, _NODES) else repr(value))
        printed.append(f"{type(node).__name__} {' '.join(names)}")
        to_do += reversed(values)
    return printed


def _is_text(node: ast.Expr) -> bool:
    """True for the docstring of a module, a function, a class or an attribute."""
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _without_c_comments(text: str) -> str:
    """Keep line breaks: directives end at them."""
    code = _C_TOKEN.sub(lambda found: " " if found["comment"] else found[0], text)
    lines = (line.rstrip() for line in code.split("\n"))
    return "\n".join(line for line in lines if line)
