"""Statements and values of a source: a mod returns the values of Python, or the source is refused
at its line.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import captured, expected, got, same

from kgen.diagnostics import KgenError
from kgen.flex.importing import Options, imported
from kgen.flex.writing import settled

HEAD = """import enum
from collections import namedtuple
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple
import numpy as np
import torch
class Mode(enum.Enum):
    NEAR = "near"
    FAR = "far"
@dataclass(frozen=True)
class Window:
    size: int
    sink: int = 2
    MOST: ClassVar[int] = 50
    def keeps(self, q, k):
        return (q - k < self.size) | (k < self.sink)
@dataclass(frozen=True)
class Wide(Window):
    more: int = 3
@dataclass
class Both:
    size: int
    sink: int = 2
    heads: list = field(default_factory=list)
    mode: Mode = Mode.FAR
    def __post_init__(self):
        self.total = self.size + self.sink
Point = namedtuple("Point", "row column")
Last = namedtuple("Last", ["row", "column"], defaults=(9,))
Typed = NamedTuple("Typed", [("row", int), ("column", int)])
def mod(b, h, q, k):
"""
RIGHT = {
    "chained names": ("x = y = 7", "return q - k < x + y"),
    "chained unpacking": (
        "x, (y, z) = w = 1, (2, 3)\na = c, d = (5, 6)",
        "return q - k < y + z + w[0] + a[1] + c + d",
    ),
    "starred": ("x, *y, z = (3, 4, 5, 6)", "return q - k < x + y[1] + z"),
    "match of a string": (
        "w = 'near'",
        "match w:\n    case 'far': return q < k\n    case 'near': return q - k < 4",
    ),
    "match of an enumeration": (
        "w = Mode.FAR",
        "match w:\n    case Mode.NEAR: return q < k\n    case Mode.FAR: return q >= k",
    ),
    "match of a sequence": (
        "w = (3, 4, 5)",
        "match w:\n    case [x, *y]: return q - k < x + len(y)",
    ),
    "match of a dictionary": (
        "w = {'a': 3, 'c': 4}",
        "match w:\n    case {'z': x}: return q < k\n    case {'a': 3, 'c': x}: return q - k < x",
    ),
    "match of a dataclass": (
        "w = Window(5)",
        "match w:\n    case Both(): return q < k\n    case Window(x, sink=2): return q - k < x",
    ),
    "match of a subclass": (
        "w = Wide(5)",
        "match w:\n    case Both(): return q < k\n    case Window(size=x): return q - k < x",
    ),
    "match of a named tuple": (
        "w = Point(5, 6)",
        "match w:\n    case Point(row=4): return q < k\n    case Point(5, x): return q - k < x",
    ),
    "an enumeration of strings": (
        "w = Mode('far')",
        "if w == Mode.FAR and w.value == 'far':\n    return q >= k\nreturn q < k",
    ),
    "a dataclass": ("w = Window(5, sink=3)", "return w.keeps(q, k) & (k < w.MOST)"),
    "a field of a call": (
        "w = Both(5, heads=[1, 2])",
        "return (q - k < w.total + w.heads[1]) & (w.mode == Mode.FAR)",
    ),
    "members of an enumeration": (
        (
            "class Kind(enum.IntEnum):\n    TEXT = 0\n    IMAGE = 4\n    SAME = 4\n"
            "w = [kind.value for kind in Kind]"
        ),
        (
            "ok = q < 0\nfor kind in Kind:\n    ok = ok | (q - k == kind)\n"
            "return ok | (k < len(Kind) + w[1])"
        ),
    ),
    "a dictionary by members": (
        (
            "class Kind(enum.IntEnum):\n    TEXT = 0\n    IMAGE = 4\n"
            "w = {Kind.TEXT: 3, Kind.IMAGE: 9, 'x': 2}"
        ),
        "return q - k < w[Kind.IMAGE] + w[0] * {Mode.FAR.value: 2, 5: 7}[5] + w['x']",
    ),
    "own lists of instances": (
        "v = Both(1)\nv.heads.append(3)\nw = Both(2)",
        "return q - k < len(w.heads) + len(v.heads)",
    ),
    "an instance that is changed": ("w = Both(5)\nw.size = 9", "return q - k < w.size + w.total"),
    "a named tuple": (
        "w = Point(1, column=5)",
        "return q - k < w.row + w.column + w[1] + Last(2).column",
    ),
    "a typed tuple": ("w = Typed(4, 5)", "r, c = w\nreturn q - k < r + w.column"),
    "a scalar of numpy": (
        "x, y = np.float32(3.3), np.int8(4)",
        "return (q - k < y) | ((q - k) * x < 20)",
    ),
    "an assertion": ("w = 4\nassert w > 3, 'small'", "assert w < 9\nreturn q - k < w"),
    "the last element": ("w = torch.tensor([3, 9, 20, 40])", "return (k < w[-1]) | (q < w[-4])"),
    "the last of a row": (
        "w = torch.tensor([[3, 9, 20], [40, 50, 60]])",
        "return k < w[b, -1] - w[-1, 0] // 8",
    ),
    "the last sequence": ("w = torch.tensor([20, 40])", "return (k < w[b]) & (q < w[-1])"),
    "the last position": ("w = torch.arange(64) // 5", "return (w[k] == w[q]) | (w[-2] == w[k])"),
}
REFUSED = {
    "an assertion that fails": (
        "w = 4\nassert w > 5, 'too small'",
        "return q - k < w",
        2,
        "an assertion of the source fails here: too small",
    ),
    "an assertion of a mod": (
        "w = 4",
        "assert w > 5\nreturn q - k < w",
        3,
        "an assertion of the source fails",
    ),
    "an exception": (
        "def f(w):\n    if w < 5:\n        raise ValueError('too small')\n    return w\nw = f(4)",
        "return q - k < w",
        3,
        "here: too small",
    ),
    "no such element": (
        "w = torch.tensor([3, 9])",
        "return k < w[2]",
        3,
        "the index 2 is out of bounds",
    ),
    "no such element from the end": (
        "w = torch.tensor([3, 9])",
        "return k < w[-3]",
        3,
        "the index -3 is out of bounds",
    ),
    "arithmetic of numpy": ("w = np.uint8(200) + 100", "return k < w", 1, "wrap around"),
    "a number that does not fit": ("w = np.int8(200)", "return k < w", 1, "does not fit into int8"),
    "a frozen instance": ("w = Window(5)\nw.size = 9", "return q - k < w.size", 2, "is frozen"),
    "a change behind its back": (
        "w = Window(5)\nobject.__setattr__(w, 'size', 9)",
        "return q - k < w.size",
        2,
        "",
    ),
    "equal instances": (
        "w = Window(5) == Window(5)",
        "return q >= k if w else q < k",
        1,
        "used as a number",
    ),
    "a missing field": ("w = Window()", "return q - k < w.size", 1, "wrong arguments for"),
    "options of a dataclass": (
        "@dataclass(init=False)\nclass V:\n    w: int = 3\nv = V()",
        "return q - k < v.w",
        2,
        "the class `V`",
    ),
    "a renamed field": (
        "P = namedtuple('P', 'a class', rename=True)\nw = P(3, 4)",
        "return q - k < w[0]",
        1,
        "this named tuple",
    ),
    "a loop over flags": (
        "class Kind(enum.IntFlag):\n    A = 1\n    B = 3\nw = [kind.value for kind in Kind]",
        "return q - k < w[0]",
        4,
        "cannot be looped over",
    ),
    "a match on the pair": (
        "",
        "match q:\n    case 3: return q < k\n    case _: return q >= k",
        4,
        "`match` depends",
    ),
}


def written(setup: str, body: str) -> str:
    head, mod = HEAD.split("def mod", 1)
    return f"{head}{setup}\ndef mod{mod}" + "".join(f"    {line}\n" for line in body.split("\n"))


def loaded(path: Path) -> Any:
    return settled(imported(str(path), {"mask_mod": "mod"}, Options(name="one")), "one.yaml")


@pytest.mark.parametrize("name", RIGHT)
def test_a_mod_gives_what_python_gives(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mods.py"
    path.write_text(written(*RIGHT[name]))
    module = type(sys)("mods")
    monkeypatch.setitem(sys.modules, "mods", module)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    tensors = captured(module.mod) | {n: v for n, v in vars(module).items() if hasattr(v, "dim")}
    same(got(loaded(path)[1], "mask_mod", tensors), expected(module.mod, "mask_mod"))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_at_their_line(name: str, tmp_path: Path) -> None:
    setup, body, line, words = REFUSED[name]
    path = tmp_path / "mods.py"
    path.write_text(written(setup, body))
    with pytest.raises(KgenError) as caught:
        loaded(path)
    (found,) = caught.value.diagnostics
    assert words in found.message
    assert found.line == line + HEAD.count("\n") - 1


def test_a_check_that_is_not_known_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    setup = (
        "t, u = torch.load('t.pt'), torch.load('u.pt')\nassert t.dim() == 1\nif u.dim() != 1:\n"
        "    raise ValueError"
    )
    path.write_text(written(setup, "assert q >= 0\nreturn t[q] >= k"))
    text, _ = loaded(path)
    first = HEAD.count("\n") - 1
    assert f"# not checked in kernels: line {first + 2} of mods.py asserts `t.dim() == 1`\n" in text
    assert f"# not checked in kernels: line {first + 6} of mods.py asserts `q >= 0`\n" in text
    assert "u.dim" not in text
    path.write_text(written(setup, "return u[q] >= k"))
    text, _ = loaded(path)
    assert (
        f"# not checked in kernels: line {first + 3} of mods.py raises if `u.dim() != 1`\n" in text
    )
    assert "asserts" not in text
