"""Hostile sources: nothing of them runs, and they end soon, in little memory."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from support.running.measured import measured

from kgen.cli import app

SECONDS, BYTES = 2.0, 1 << 30
RUNS = """
import os
open("ran", "w").write("imported")
os.system("touch ran")
__import__("os").system("touch ran")
exec("open('ran', 'w')")
eval("open('ran', 'w')")
class Runs:
    open("ran", "w")
def decorate(f, *, done=open("ran", "w")):
    open("ran", "w")
    return f
@decorate
def mod(b, h, q, k, n=open("ran", "w")):
    open("ran", "w")
    return q >= k
"""
MOD = "def mod(b, h, q, k):\n    return {}\n"
LOOPED = "def mod(b, h, q, k):\n    x = q\n    {}\n    return x > k\n"
HOSTILE = {
    "runs": RUNS,
    "import hook": "import sitecustomize, ran\n" + MOD.format("ran.x(q) > k"),
    "brackets": MOD.format("(" * 90 + "q" + ")" * 90 + " + k[0]"),
    "deep": MOD.format("(" * 10_000 + "q" + ")" * 10_000),
    "minus": MOD.format("-" * 200_000 + "q"),
    "long sum": MOD.format("+".join(["q"] * 200_000)),
    "long and": MOD.format("&".join(["(q>k)"] * 5_000)),
    "attributes": MOD.format("q" + ".a" * 50_000),
    "calls": MOD.format("q" + "()" * 50_000),
    "recursion": "def mod(b, h, q, k):\n    return mod(b, h, q, k)\n",
    "mutual": "def f(x):\n    return g(x)\ndef g(x):\n    return f(x)\n" + MOD.format("f(q)"),
    "two calls": "def f(x, n):\n    return x if n == 0 else f(x, n - 1) + f(x, n - 1)\n"
    + MOD.format("f(q, 40) > k"),
    "doubling": LOOPED.format("for i in range(60):\n        x = x + x * k"),
    "twice": LOOPED.format("y = q\n    for i in range(60):\n        x, y = x + y, x - y * k"),
    "huge loop": LOOPED.format("for i in range(10**12):\n        x = x + 1"),
    "endless": LOOPED.format("while True:\n        pass"),
    "list": LOOPED.format("z = list(range(10**9))"),
    "list of lists": LOOPED.format("z = [0]\n    for i in range(99):\n        z = z + z"),
    "repeated": LOOPED.format("z = [0] * 10**10"),
    "nested repeat": LOOPED.format("z = (0,)\n    for i in range(99):\n        z = (z, z) * 9000"),
    "power": LOOPED.format("z = 9 ** 9 ** 9 ** 9"),
    "shift": LOOPED.format("z = 1 << 10**12"),
    "product": LOOPED.format("z = 3\n    for i in range(99):\n        z = z * z"),
    "factorial": LOOPED.format("z = math.comb(10**9, 10**8)"),
    "text": LOOPED.format("z = 'a' * 10**12"),
    "format": LOOPED.format("z = f'{1:>1000000000}'\n    x = z"),
    "percent": LOOPED.format("z = '%01000000000d' % 1"),
    "comprehension": LOOPED.format("z = [i for i in range(10**4) for j in range(10**4)]"),
    "shape": "t = torch.zeros(10**12)\n" + LOOPED.format("x = t[q] + x.foo()"),
    "cyclic name": "A = B\nB = A\n" + MOD.format("q > A"),
    "null": "def mod(b, h, q, k):\n    return q >= k\0\n",
    "large": "# " + "x" * 2_000_000 + "\n" + MOD.format("q >= k"),
    "escape": "def mod(b, h, q, k):\n    return '\x1b[31m' + q\n",
    "names": MOD.format("__builtins__['open'](q)"),
    "getattr": MOD.format("getattr(q, '__class__')"),
    "dunder": MOD.format("q.__class__.__mro__[1].__subclasses__()"),
    "numbers": MOD.format("9" * 100_000),
}


def put(name: str, folder: Path) -> None:
    head = "" if name == "runs" else "import math\nimport torch\n"
    (folder / "mods.py").write_text(head + HOSTILE[name])
    (folder / "sitecustomize.py").write_text("open('ran', 'w')\n")
    (folder / "ran.py").write_text("open('ran', 'w')\n")


def check(code: object, said: str, folder: Path) -> None:
    assert code == 2, said
    assert said.count("error[") == 1, said
    assert said.count("--> ") == said.count("hint: ") == 1, said
    assert "Traceback" not in said
    assert all(c.isprintable() or c == "\n" for c in said)
    assert sorted(os.listdir(folder)) == ["mods.py", "ran.py", "sitecustomize.py"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    begin = time.process_time()
    with pytest.raises(SystemExit) as caught:
        app(["import", "mods.py", "--mask", "mod"], prog_name="kgen")
    # Measure the time of this process, because others share the machine.
    assert time.process_time() - begin < SECONDS
    out, err = capsys.readouterr()
    assert out == ""
    check(caught.value.code, err, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("runs", "minus") else [pytest.mark.thorough])
        for n in HOSTILE
    ],
)
def test_hostile_in_a_process(name: str, tmp_path: Path) -> None:
    """Run the import in its own process, to measure its memory."""
    put(name, tmp_path)
    # Without this, Python itself would import modules from the folder of the source.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "kgen", "import", "mods.py", "--mask", "mod"]
    used = measured(command, tmp_path, environment)
    check(used.code, used.err, tmp_path)
    assert used.seconds < SECONDS
    assert used.bytes < BYTES
