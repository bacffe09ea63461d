"""Names of a module have the value that they have in Python, or they are refused: generated sources
are run here.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from module_sources import SIMPLE, Sources

from kgen.diagnostics import KgenError
from kgen.flex.importing import Options, imported

COUNT = 320


def ran(text: str, other: str) -> Any:
    """The value in Python; None if the source raises."""
    modules = {}
    before = {name: sys.modules.get(name) for name in ("other", "mods")}
    pi = math.pi
    try:
        for name, source in (("other", other), ("mods", text)):
            modules[name] = sys.modules[name] = type(sys)(name)
            exec(compile(source, f"{name}.py", "exec"), vars(modules[name]))
        value = modules["mods"].mod(0, 0, 0, 0, 0)
    except Exception:
        return None
    finally:
        setattr(math, "pi", pi)  # noqa: B010
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    return value


def read(text: str, other: str, folder: Path) -> Any:
    """The value that is imported, or the message."""
    (folder / "other.py").write_text(other)
    path = folder / "mods.py"
    path.write_text(text)
    try:
        spec = imported(str(path), {"score_mod": "mod"}, Options(name="names"))
    except KgenError as error:
        (found,) = error.diagnostics
        lines = Path(found.file or "").read_text().splitlines()
        assert found.source == lines[(found.line or 0) - 1]
        assert found.hint
        return error
    (written,) = re.findall(r"score_mod: (.*)", spec.text().replace("score_mod=mod", ""))
    return eval(written, {"score": 0})


def sources(seed: int, simple: bool = False) -> Any:
    """Sources that Python can run, with their values."""
    for number in itertools.count():
        made = Sources(seed * 1_000_003 + number)
        text, other = made.made(simple)
        value = ran(text, other)
        if value is not None and abs(value) < 2**31:
            yield made.used, text, other, value


def agree(text: str, other: str, value: Any, folder: Path) -> bool:
    """True if the value is that of Python, false if it is refused."""
    found = read(text, other, folder)
    if isinstance(found, KgenError):
        return False
    assert (found, type(found)) == (value, type(value)), text
    return True


@pytest.mark.parametrize("seed", range(4))
def test_generated_sources_mean_what_they_mean_in_python(seed: int, tmp_path: Path) -> None:
    taken = itertools.islice(sources(seed), COUNT // 4)
    right = [agree(text, other, value, tmp_path) for _, text, other, value in taken]
    # Most sources have a form that is refused; enough of them are read.
    assert 0.25 < sum(right) / len(right) < 0.9


def test_sources_of_constants_are_read(tmp_path: Path) -> None:
    for used, text, other, value in itertools.islice(sources(9, simple=True), 60):
        assert used <= SIMPLE
        assert agree(text, other, value, tmp_path), str(read(text, other, tmp_path))


CHANGED = {
    # name: (source, line that is refused)
    "global": ("w = 3\ndef f():\n    global w\n    w = open('x')\nf()\n", 4),
    "star": ("w = 3\nfrom numpy import *\n", 2),
    "try": ("try:\n    import numpy\n    w = 3\nexcept ImportError:\n    w = 4\n", 1),
    "condition": ("import os\nif os.path.exists('x'):\n    w = 3\nelse:\n    w = 4\n", 2),
    "exec": ("w = 3\nexec('w = 4')\n", 2),
    "globals": ("w = 3\nglobals()['w'] = 4\n", 2),
    "setattr": ("import sys\nw = 3\nsetattr(sys.modules[__name__], 'w', 4)\n", 3),
    "unread call": ("import random\nv = [1, 2]\nrandom.shuffle(v)\nw = v[0]\n", 3),
    "unread call of a function": (
        "import atexit\nw = 3\ndef f():\n    global w\n    w = 4\natexit.register(f)\n",
        6,
    ),
    "a number of torch": ("import torch\nw = torch.tensor(3)\nw.fill_(4)\n", 3),
    "torch.nn.init": ("import torch\nw = torch.tensor(3)\ntorch.nn.init.constant_(w, 4)\n", 3),
    "a mod that changes": ("v = [3]\ndef f():\n    v.append(1)\n    return len(v)\nw = 1\n", 3),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_name_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    text, line = CHANGED[name]
    value = "f()" if name == "a mod that changes" else "w"
    found = read(f"{text}def mod(s, b, h, q, k):\n    return s + {value}\n", "", tmp_path)
    assert isinstance(found, KgenError)
    assert found.diagnostics[0].line == line, str(found)


def test_what_unread_code_cannot_change_is_read(tmp_path: Path) -> None:
    """Calls of other packages, `try` around an import and conditions leave other names alone."""
    text = """
import os
import torch
from torch.nn.attention.flex_attention import create_block_mask
try:
    import triton
except ImportError:
    triton = None
w, v = 3, [4, 5]
def causal(b, h, q, k):
    return q >= k + v[0]
block_mask = create_block_mask(causal, 1, 1, 64, 64, device=os.environ.get("DEVICE", "cpu"))
compiled = torch.compile(causal)
if torch.cuda.is_available():
    device = "cuda"
else:
    device = "cpu"
print(f"{w} and {v}", os.getcwd())
def mod(s, b, h, q, k):
    return s + (w + v[0] + v[1])
"""
    assert read(text, "", tmp_path) == 12


def test_statements_of_a_mod(tmp_path: Path) -> None:
    """`del`, chained and nested unpacking, `match` on a known value."""
    text = """
def mod(s, b, h, q, k):
    del b, h
    a, (c, d) = e = 1, (2, 3)
    f = g = a + c
    match d:
        case 1 | 2:
            w = 9
        case 3:
            w = f + g
    return s + (w + len(e))
"""
    assert read(text, "", tmp_path) == 8
    after = "def mod(s, b, h, q, k):\n    del h\n    return s + h\n"
    found = read(after, "", tmp_path)
    assert isinstance(found, KgenError)
    assert found.diagnostics[0].line == 3
