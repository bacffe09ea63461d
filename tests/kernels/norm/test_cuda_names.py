"""Names of a spec do not collide with names in the CUDA files.

The test checks definitions in the C++ text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path

from support.specs.collecting import apart

from kgen.kernels.norm.plan.planning import plan_norm
from kgen.kernels.norm.spec import RESERVED
from kgen.kernels.norm.targets.cuda.names import given_way
from kgen.kernels.norm.targets.cuda.spelled import Spelled
from kgen.render.rendering import render_spec
from kgen.spec.common import checked_name
from kgen.spec.load import Loaded, load, loads

ROOT = Path(__file__).resolve().parents[3]
SPECS = sorted([*(ROOT / "specs").glob("*.yaml"), *(ROOT / "tests" / "specs").glob("*.yaml")])
SAMPLE = """kernel: norm
name: sample
norm: NORM
width: any
dtype: bf16
BIAS
HEADS
buffers:
  slopes: {shape: [ROWS, WIDTH], dtype: bf16, grad: true}
  tilts: {shape: [ROWS], dtype: fp32, grad: true}
  lifts: {shape: [COLUMNS], dtype: fp32, grad: true}
params:
  cap: 30.0
  reach: {type: int, runtime: true}
output_mod: cap * tanh(y * slopes * tilts * lifts / cap) + reach
targets: {cuda: {}}
"""
SILENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
WORD = re.compile(r"(?<![\w.])(?<!->)[^\W\d]\w*")
MARK = re.compile(r"(?:__)?\d+z\dz", re.IGNORECASE)


def definitions(text: str) -> Iterator[set[str]]:
    """Yield the words of each definition that contains a name of the spec."""
    for part in re.split(r"^\}", SILENT.sub('""', text), flags=re.MULTILINE):
        words = set(WORD.findall(part))
        if any(MARK.search(word) for word in words):
            yield words


def samples() -> list[Loaded]:
    found = [loaded for path in SPECS if (loaded := load(path)).spec.kernel == "norm"]
    for norm, bias, heads in (
        ("rms", "", ""),
        ("layer", "bias: true", ""),
        ("rms", "", "heads: any"),
    ):
        text = SAMPLE.replace("NORM", norm).replace("BIAS", bias).replace("HEADS", heads)
        found.append(
            loads(text.replace("COLUMNS", "H, WIDTH" if heads else "WIDTH"), "sample.yaml")
        )
    return [loaded for loaded in found if loaded.spec.targets.cuda is not None]


def legal(name: str) -> bool:
    try:
        return checked_name(name) not in RESERVED
    except ValueError:
        return False


def in_the_way(loaded: Loaded) -> set[str]:
    """Return possible spec names for which the file would define a name that it has already."""
    other = apart(loaded)
    spelled, found = Spelled(plan_norm(loaded)), set[str]()
    files = render_spec(other, ["cuda"])
    for words in chain(*(definitions(files[name]) for name in ("cuda.cu", "cuda_launch.cu"))):
        # Constants are in capitals. Names in mixed case are not derived from spec names.
        own = {w.lower() for w in words if not MARK.search(w) and w in (w.lower(), w.upper())}
        for word, name in product(map(str.lower, words), (*other.spec.buffers, *other.spec.params)):
            if name in word:
                before, after = word.split(name)
                alike = (w for w in own if w.startswith(before) and w.endswith(after))
                found |= {
                    core for w in alike if legal(core := w[len(before) : len(w) - len(after)])
                }
    return {name for name in found if given_way([name], spelled.taken()) == {name: name}}


def test_no_name_of_the_file_is_missing() -> None:
    assert set().union(*map(in_the_way, samples())) == set()


MACROS = ("errno", "linux", "unix", "stdin", "stdout", "stderr", "math_errhandling")
SPEC_OF_MACROS = """kernel: norm
name: sample
norm: rms
width: any
dtype: bf16
buffers:
  linux: {shape: [ROWS, WIDTH], dtype: bf16, grad: true}
  stdin: {shape: [WIDTH], dtype: fp32, grad: true}
params:
  errno: {type: float, runtime: true}
  unix: {type: float, runtime: true}
  stdout: 2.0
output_mod: |
  stderr = y * silu(linux) + errno
  math_errhandling = stderr * tanh(stdin) * unix
  math_errhandling * stderr + stdout
targets: {cuda: {}}
"""


def test_names_of_macros_give_way() -> None:
    """g++ defines `linux` and `unix`, also for nvcc. Headers of C define the others."""
    files = render_spec(loads(SPEC_OF_MACROS, "sample.yaml"), ["cuda"])
    for name in ("cuda.cu", "cuda_launch.cu"):
        assert {*MACROS}.isdisjoint(WORD.findall(SILENT.sub('""', files[name])))
