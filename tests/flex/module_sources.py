"""Random sources whose names are bound and changed in many ways.

They are plain Python, which a test runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

HEAD = """import math
import operator
from contextlib import suppress
from typing import TYPE_CHECKING
from other import *
"""
OTHER = "W0 = {0}\nW1 = [{1}, {2}]\n\ndef w(x):\n    W1[0] = W1[0] + x\n    return W0\n"
NUMBERS = ("A", "B", "C", "W0")
LISTS = ("P", "Q", "R", "W1")
SIMPLE = frozenset({"number", "sum", "list", "table", "if", "loop", "comprehension", "function"})
"""Forms of plain constants. A source that has only these is never refused."""


class Sources:
    """Generator of sources.

    Each form is a method that returns lines, and forms contain other forms.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0
        self.used: set[str] = set()

    def made(self, simple: bool = False) -> tuple[str, str]:
        """Return a source, and the module that it imports."""
        self.used = set()
        lines = [f"{name} = {self.small()}" for name in NUMBERS[:3]]
        lines += [f"{name} = [{self.small()}, {self.small()}]" for name in LISTS[:3]]
        lines += ["T = {'x': 1, 'y': 2}"]
        for _ in range(self.random.randint(2, 6)):
            lines += self.form(simple)
        value = " + ".join(self.read() for _ in range(3))
        lines += ["def mod(s, b, h, q, k):", f"    return s + ({value})"]
        other = OTHER.format(*(self.small() for _ in range(3)))
        return HEAD + "\n".join(lines) + "\n", other

    def form(self, simple: bool = False, depth: int = 0) -> list[str]:
        forms = [name for name in FORMS if not simple or name in SIMPLE]
        name = self.random.choice(forms if depth < 2 else [n for n in forms if n not in NESTED])
        self.used.add(name)
        return FORMS[name](self, depth, simple)

    # Parts ------------------------

    def small(self) -> int:
        return self.random.randint(-4, 9)

    def number(self) -> str:
        return self.random.choice(NUMBERS[:3])

    def items(self) -> str:
        return self.random.choice(LISTS)

    def name(self, what: str) -> str:
        self.count += 1
        return f"{what}{self.count}"

    def read(self) -> str:
        """Return an expression over the names that the module has at its end."""
        return self.random.choice(
            [
                self.number(),
                f"{self.items()}[{self.random.choice((0, -1))}]",
                f"len({self.items()})",
                f"sum({self.items()})",
                f"max({self.items()})",
                "T['x']",
                "sum(T.values())",
                "W0",
            ]
        )

    def value(self) -> str:
        return self.random.choice(
            [str(self.small()), self.number(), f"{self.items()}[0]", f"len({self.items()})"]
        )

    def block(self, depth: int, simple: bool = False) -> list[str]:
        lines = [
            line for _ in range(self.random.randint(1, 2)) for line in self.form(simple, depth + 1)
        ]
        return [f"    {line}" for line in lines]


Form = Callable[[Sources, int, bool], list[str]]
FORMS: dict[str, Form] = {}
NESTED = (
    "if",
    "loop",
    "try",
    "try that raises",
    "finally",
    "with",
    "unknown if",
    "type checking",
    "match",
    "while",
)


def form(name: str) -> Callable[[Form], Form]:
    def add(made: Form) -> Form:
        FORMS[name] = made
        return made

    return add


# --- forms of one statement ------------------------

ONE = {
    "number": "{n} = {v}",
    "sum": "{n} = {m} * 2 - {v}",
    "list": "{l} = [{v}, {v2}, 3]",
    "table": "T = {{'x': {v}, 'y': {m}}}",
    "comprehension": "{l} = [i * 2 for i in range(4) if i != {i}]",
    "add to number": "{n} += {v}",
    "alias": "{l} = {l2}",
    "append": "{l}.append({v})",
    "insert": "{l}.insert(0, {v})",
    "pop": "{l}.append(1); {l}.pop(0)",
    "extend": "{l}.extend([{v}, {m}])",
    "extend itself": "{l} += {l2}",
    "add": "{l} += [6]",
    "add a tuple": "{l} += (6, {v})",
    "repeat": "{l} *= 2",
    "item": "{l}[0] = {v}",
    "add to item": "{l}[-1] += {v}",
    "slice": "{l}[1:] = [{v}]",
    "sort": "{l}.sort()",
    "sort by": "{l} = sorted({l2}, key=lambda x: -x)",
    "reverse": "{l}.reverse()",
    "reversed": "{l} = list(reversed({l2}))",
    "walrus": "{l} = [({n} := {v}), {m}]",
    "walrus in a comprehension": "{l} = [({n} := i + {v}) for i in range(3)]",
    "walrus that is skipped": "{l} = [0 if {n} < ({m} := {v}) < {i} < ({n} := 7) else 2]",
    "unpack": "{n}, *{l} = {v}, {m}, {v2}",
    "chained": "{n} = {m} = {v}",
    "nested unpack": "({n}, ({m}, *{l})) = 1, (2, {v}, {v2})",
    "delete item": "{l}.append(2); del {l}[0]",
    "delete and bind": "del {n}; {n} = {v}",
    "key": "{n} = max({l}, key=abs)",
    "key of a lambda": "{n} = min({l}, key=lambda x: (x - 2) * (x - 2))",
    "default": "{n} = max([], default={v})",
    "enumerate": "{n} = sum(i * x for i, x in enumerate({l}, 1))",
    "zip": "{n} = sum(x * y for x, y in zip({l}, {l2}))",
    "map": "{l} = list(map(lambda x: x + 1, {l2}))",
    "iterator": "it = map(abs, {l}); {n} = sum(it) + sum(it)",
    "generator": "g = ({n} + x for x in [1, 2]); {n} = 5; {m} = sum(g)",
    "set item of table": "T['x'] = {v}",
    "update table": "T.update(y={v})",
    "table of lists": "T2 = {{'k': {l}}}; T2['k'].append({v})",
    "default of table": "{n} = T.setdefault('z', {v})",
    "get": "{n} = T.get('w', {v})",
    "globals": "globals()['{n}'] = {v}",
    "vars": "vars()['{n}'] = {v}",
    "exec": "exec('{n} = {v}')",
    "exec by another name": "e = exec; e('{n} = {v}')",
    "setattr": "import sys; setattr(sys.modules[__name__], '{n}', {v})",
    "module by name": "import sys; sys.modules[__name__].{n} = {v}",
    "other module": "import other; other.W1.append({v})",
    "name of another module": "import other; other.W0 = {v}; {n} = other.W0",
    "call of another module": "{n} = w({v})",
    "patched": "math.pi = {v}; {n} = math.pi",
    "operator": "operator.iadd({l}, [{v}])",
    "operator on an item": "operator.setitem({l}, 0, {v})",
    "unread call": "list.append({l}, {v})",
    "unread method": "from collections import deque; d = deque({l}); {n} = d.pop()",
    "unread text": "{n} = len('ab' + 'c') + {v}",
    "f-string": "t = f'{{{l}.append({v})}}'",
    "set": "{n} = len({{{l}.append({v}), 1}})",
    "lambda": "{n} = (lambda x: x * 2 + {m})({v})",
    "identity": "{n} = 1 if {l} is {l2} else 2",
    "in": "{n} = 3 if {v} in {l} else 4",
    "conditional": "{n} = {v} if {m} > {i} else {v2}",
    "or": "{n} = {m} or {v}",
    "nested lists": "N = [{l}, {l2}]; N[0].append({v}); {n} = len(N[1])",
    "repeated list": "N = [[0]] * 2; N[0].append({v}); {n} = len(N[1])",
    "copy": "{l} = {l2}.copy(); {l}.append({v})",
    "slice copy": "{l} = {l2}[:]; {l}[0] = {v}",
    "import again": "from other import W0 as {n}",
    "star again": "from other import *",
    "star of math": "from math import *; {n} = floor(e) + {v}",
    "annotated": "{n}: int = {v}",
    "annotated only": "{n}: int",
    "class body": "class K: {l}.append({v})",
    "assert": "assert ({n} := {v}) == {n}",
}


def one(text: str) -> Form:
    def lines(g: Sources, depth: int, simple: bool) -> list[str]:
        a, b = g.random.sample(NUMBERS[:3], 2)
        c, d = g.random.choices(LISTS[:3], k=2)
        values = {"n": a, "m": b, "l": c, "l2": d, "v": str(g.small()) if simple else g.value()}
        return text.format(**values, v2=g.small(), i=g.small()).split("; ")

    return lines


FORMS.update({name: one(text) for name, text in ONE.items()})


# --- functions ------------------------

BODIES = {
    "function": ("(x)", "return x * 2 + {n}", "{m} = {f}({v})"),
    "reads later": ("()", "return {n}", "{n} = {v}\n{m} = {f}()"),
    "global": ("()", "global {n}\n{n} = {v}", "{f}()"),
    "global that is not called": ("()", "global {n}\n{n} = {v}", "pass"),
    "global in a condition": ("(x)", "global {n}\nif x > 2:\n    {n} = {v}", "{f}({m})"),
    "global of a callback": ("(x)", "global {n}\n{n} = {v}\nreturn x", "list(filter({f}, [1]))"),
    "appends": ("(x)", "{l}.append(x)", "{f}({v})"),
    "appends to an argument": ("(x)", "x.append({v})", "{f}({l})"),
    "appends to a local alias": ("()", "x = {l}\nx += [{v}]", "{f}()"),
    "default list": ("(x, seen=[])", "seen.append(x)\nreturn len(seen)", "{f}(1)\n{n} = {f}({v})"),
    "default is kept": ("(x={m})", "return x", "{m} = {v}\n{n} = {f}()"),
    "shadows": ("()", "{n} = {v}\nreturn {n}", "{m} = {f}()"),
    "returns a list": ("()", "return {l}", "{f}().append({v})"),
    "sorts an argument": ("(x)", "x.sort()\nreturn x[0]", "{n} = {f}({l})"),
    "callback that appends": ("(x)", "{l}.append(x)\nreturn True", "list(filter({f}, [3]))"),
    "key that appends": ("(x)", "{l}.append(x)\nreturn x", "{n} = max([1, 2], key={f})"),
    "map that appends": ("(x)", "{l}.append(x)\nreturn x", "m = map({f}, [1])"),
    "any that stops": (
        "(x)",
        "{l}.append(x)\nreturn x > 1",
        "{n} = int(any({f}(x) for x in [1, 2, 3]))",
    ),
    "closure": (
        "()",
        "n = {v}\ndef up():\n    nonlocal n\n    n += 1\n    return n\nreturn up",
        "u = {f}()\nu()\n{n} = u()",
    ),
    "keeps results": (
        "(x)",
        "{l}.append(x)\nreturn x",
        "from functools import lru_cache\nc = lru_cache({f})\nc(1)\nc(1)",
    ),
    "defaults are set": ("(x=1)", "return x", "{f}.__defaults__ = (5,)\n{n} = {f}()"),
    "name is set": (
        "(x=1)",
        "return x",
        "{f}.__name__ = 'g'\n{n} = 1 if {f}.__name__ == 'g' else 2",
    ),
    "attribute": ("()", "return 1", "{f}.w = {l}\n{f}.w.append({v})"),
    "recursion": ("(x)", "return 0 if x <= 0 else x + {f}(x - 1)", "{n} = {f}(3)"),
    "varargs": ("(*x, **y)", "return len(x) + len(y)", "{n} = {f}(*{l}, a=1)"),
    "loop that appends": (
        "()",
        "for x in {l}:\n    if len({l}) < 6:\n        {l}.append(x)",
        "{f}()",
    ),
    "enumerated loop that appends": (
        "()",
        "for i, x in enumerate({l}):\n    if len({l}) < 6:\n        {l}.append(x)",
        "{f}()",
    ),
    "early return": (
        "(x)",
        "for i in range(5):\n    if i > x:\n        return i\nreturn {m}",
        "{n} = {f}(2)",
    ),
    "try in a function": (
        "()",
        "try:\n    return {l}[99]\nexcept IndexError:\n    {l}.append({v})\n    return 2",
        "{n} = {f}()",
    ),
    "raises half way": (
        "()",
        "{l}.append({v})\nraise ValueError",
        "try:\n    {f}()\nexcept ValueError:\n    {n} = 4",
    ),
    "decorator": (
        "(g)",
        "{l}.append({v})\nreturn lambda: {i}",
        "@{f}\ndef z():\n    return 1\n{n} = z()",
    ),
}


def function(signature: str, body: str, call: str) -> Form:
    def lines(g: Sources, depth: int, simple: bool) -> list[str]:
        a, b = g.random.sample(NUMBERS[:3], 2)
        values = {
            "n": a,
            "m": b,
            "l": g.random.choice(LISTS[:3]),
            "f": g.name("f"),
            "v": g.small(),
            "i": g.small(),
        }
        inner = [f"    {line}" for line in body.format(**values).split("\n")]
        return [
            f"def {values['f']}{signature.format(**values)}:",
            *inner,
            *call.format(**values).split("\n"),
        ]

    return lines


FORMS.update({name: function(*parts) for name, parts in BODIES.items()})


# --- control flow ------------------------


@form("if")
def _if(g: Sources, depth: int, simple: bool) -> list[str]:
    test = f"{g.number()} > {g.small()}"
    return [f"if {test}:", *g.block(depth, simple), "else:", *g.block(depth, simple)]


@form("unknown if")
def _unknown_if(g: Sources, depth: int, simple: bool) -> list[str]:
    tests = (
        "sys.platform.startswith('linux')",
        "hasattr(sys, 'argv')",
        "sys.version_info >= (3, 8)",
        "__name__ == '__main__'",
    )
    return [
        "import sys",
        f"if {g.random.choice(tests)}:",
        *g.block(depth),
        "else:",
        *g.block(depth),
    ]


@form("type checking")
def _type_checking(g: Sources, depth: int, simple: bool) -> list[str]:
    return ["if TYPE_CHECKING:", *g.block(depth), "else:", *g.block(depth)]


@form("loop")
def _loop(g: Sources, depth: int, simple: bool) -> list[str]:
    head = f"for {g.number()} in {g.random.choice(('range(3)', '[2, 5]', '(1, 4)'))}:"
    return [head, *g.block(depth, simple)]


@form("while")
def _while(g: Sources, depth: int, simple: bool) -> list[str]:
    i = g.name("i")
    return [
        f"{i} = 0",
        f"while {i} < 3:",
        f"    {i} += 1",
        f"    if {i} == {g.small()}:",
        "        break",
        *g.block(depth),
        "else:",
        *g.block(depth),
    ]


@form("try")
def _try(g: Sources, depth: int, simple: bool) -> list[str]:
    return [
        "try:",
        *g.block(depth),
        "except ValueError as B:",
        *g.block(depth),
        "else:",
        *g.block(depth),
    ]


@form("try that raises")
def _raises(g: Sources, depth: int, simple: bool) -> list[str]:
    raised = g.random.choice(
        ("import nowhere_to_be_found", "int('x')", "[][1]", "1 // 0", "raise KeyError")
    )
    errors = "(ImportError, ValueError, IndexError, ZeroDivisionError, KeyError)"
    return [
        "try:",
        *g.block(depth),
        f"    {raised}",
        *g.block(depth),
        f"except {errors}:",
        *g.block(depth),
    ]


@form("finally")
def _finally(g: Sources, depth: int, simple: bool) -> list[str]:
    return ["try:", *g.block(depth), "finally:", *g.block(depth)]


@form("with")
def _with(g: Sources, depth: int, simple: bool) -> list[str]:
    return [
        "with suppress(ZeroDivisionError):",
        *g.block(depth),
        f"    1 // {g.number()}",
        *g.block(depth),
    ]


@form("match")
def _match(g: Sources, depth: int, simple: bool) -> list[str]:
    subject, pattern = g.random.choice(
        [("P", "[A, *R]"), ("B", "3 | 4"), ("(A, B)", "(1, C)"), ("A", "int(C)"), ("Q", "[]")]
    )
    lines = [f"    {line}" for line in g.block(depth)]
    rest = [f"    {line}" for line in g.block(depth)]
    return [f"match {subject}:", f"    case {pattern}:", *lines, "    case _:", *rest]
