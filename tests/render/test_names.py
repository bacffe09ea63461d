"""Names of a spec that clash with names in emitted files are renamed or refused.

The file names are collected.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import pytest
from support.specs.collecting import (
    FAMILIES,
    collected,
    in_trees,
    scopes,
    specs_of,
    with_own_variables,
)

from kgen.diagnostics import KgenError
from kgen.family import KERNELS
from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.spec.names import FILE

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = """kernel: attention
name: sample
dtype: bf16
head_dim: 32
buffers:
  slopes: {shape: [HQ], dtype: fp32, grad: true}
params:
  cap: 30.0
  reach: {type: int, runtime: true}
  limit: {type: int, runtime: true}
  edge: {type: int, runtime: true}
score_mod: cap * tanh(score / cap) + slopes[h] * (kv_idx - q_idx)
mask_mod: q_idx - kv_idx <= reach and kv_idx - q_idx <= limit and kv_idx >= edge
"""
NORM = """kernel: norm
name: sample
norm: layer
width: any
dtype: bf16
bias: true
buffers:
  slopes: {shape: [ROWS, WIDTH], dtype: bf16, grad: true}
params:
  cap: 30.0
  reach: {type: int, runtime: true}
  limit: {type: int, runtime: true}
  edge: {type: int, runtime: true}
output_mod: cap * tanh(y * slopes / cap) + reach * limit * edge
targets: {triton: {}, cuda: {}}
"""
SPELLED = {
    "slopes": ("slopes", "slopes_ptr", "stride_slopes_0"),
    "reach": ("reach",),
    "cap": ("CAP",),
}


def rendered(text: str, names: dict[str, str] | None = None) -> dict[str, str]:
    """Return the emitted files of a spec with replaced names."""
    for name, other in (names or {}).items():
        text = text.replace(name, other)
    return dict(files_of(text))


@lru_cache(64)
def files_of(text: str) -> dict[str, str]:
    """Return the emitted files of a spec.

    The cache is for specs that are rendered and then inspected.
    """
    return render_spec(loads(text, "sample.yaml"))


def refused(text: str, names: dict[str, str]) -> list[str]:
    """Return the replaced names that kgen refuses."""
    try:
        rendered(text, names)
    except KgenError as error:
        return [d.message.split("`")[1] for d in error.diagnostics]
    return []


def functions(files: dict[str, str]) -> Iterator[tuple[set[str], set[str]]]:
    """Yield the arguments and all names of each Python function."""
    for file in (f for f in files if f.endswith(".py")):
        for node in ast.walk(ast.parse(files[file])):
            if isinstance(node, ast.FunctionDef):
                arguments = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
                yield (
                    arguments,
                    arguments | {n.id for n in ast.walk(node) if isinstance(n, ast.Name)},
                )


def clashing(files: dict[str, str], name: str) -> list[str]:
    """Return the replacements of `name` that would clash with an argument of a function."""
    found = set()
    for spelled in SPELLED[name]:
        before, after = spelled.lower().split(name)
        for arguments, names in functions(files):
            for argument in arguments if spelled in names else ():
                word = argument.lower() if argument.isupper() == spelled.isupper() else ""
                if (
                    word.startswith(before)
                    and word.endswith(after)
                    and len(word) > len(before + after)
                ):
                    found.add(word[len(before) : len(word) - len(after)])
    return sorted(
        n for n in found if not any(own in n for own in ("slopes", "reach", "cap", "limit", "edge"))
    )


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("text", [ATTENTION, NORM], ids=["attention", "norm"])
def test_no_name_is_an_argument_too(text: str, every: int) -> None:
    files = rendered(text)
    slopes, reach, cap = (clashing(files, name) for name in SPELLED)
    assert slopes
    assert len(reach) > 10
    assert cap
    # Test several names at a time, which is faster.
    groups = [*zip_longest(slopes, reach[::3], reach[1::3], reach[2::3], cap)]
    for others in groups[::every]:
        names = {
            n: o
            for n, o in zip(("slopes", "reach", "limit", "edge", "cap"), others, strict=True)
            if o
        }
        if len(set(names.values())) < len(names):
            told = [other for name, other in names.items() if refused(text, {name: other})]
        else:
            told = refused(text, names)
        for name, other in names.items():
            # kgen renames its own intermediate values. The number of names per function must stay
            # the same.
            if other not in told and not refused(text, {name: other}):
                sizes = [
                    # A renamed argument has two names in the public function.
                    len(all_names)
                    - ({other, "return_lse"} <= arguments and f"{other}_arg" in all_names)
                    for arguments, all_names in functions(rendered(text, {name: other}))
                ]
                assert sizes == [len(all_names) for _, all_names in functions(files)], other


@pytest.mark.parametrize(
    ("name", "other"), [("slopes", "arg"), ("slopes", "D"), ("reach", "Tensor"), ("sample", "os")]
)
def test_names_of_the_function_and_of_modules_are_taken(name: str, other: str) -> None:
    assert refused(ATTENTION, {name: other}) == [other]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(
            ("slopes", "dq"),
            ("slopes", "delta"),
            ("reach", "m_i"),
            ("reach", "dslopes"),
            ("reach", "i"),
        ),
        *(
            ("cap", "log2e"),
            ("reach", "acc"),
            ("reach", "mask"),
            ("slopes", "W"),
            ("reach", "block_size"),
        ),
    ],
)
def test_names_of_kernels_give_way(name: str, other: str) -> None:
    """Callers use the names of the spec. The file may use other names inside."""
    (function,) = [
        node
        for node in ast.parse(rendered(ATTENTION, {name: other})["triton.py"]).body
        if isinstance(node, ast.FunctionDef) and node.name == "sample"
    ]
    arguments = {argument.arg for argument in function.args.kwonlyargs}
    assert (other in arguments) == (name != "cap")
    assert f"{other}_arg" not in arguments
    assert f"{other}_arg" not in (ast.get_docstring(function) or "")


def test_names_of_functions_without_the_specs_are_free() -> None:
    # `_tile`, `_scatter` and `_descriptors` have variables of these names.
    for other in ("table", "values", "blocks"):
        assert not refused(ATTENTION, {"slopes": other})


def test_short_names_are_free() -> None:
    names = [
        "a",
        "c",
        "d",
        "dim",
        "g",
        "index",
        "label",
        "n",
        "positions",
        "r",
        "shape",
        "size",
        "t",
        "x",
        "a",
        "c",
    ]
    for others in zip(names, names[1:], names[2:], strict=False):
        assert not refused(ATTENTION, dict(zip(("slopes", "reach", "cap"), others, strict=True)))


def test_functions_may_have_short_names() -> None:
    text = (ROOT / "specs" / "causal.yaml").read_text()
    for other in ("dim", "dims", "dtype", "label", "shape", "x"):
        assert not refused(text, {"name: causal": f"name: {other}"})


def test_names_of_functions_that_are_not_there_are_free() -> None:
    forward = ATTENTION.replace(", grad: true", "") + "passes: [forward]\n"
    assert not refused(forward, {"slopes": "dq"})


def test_scopes_are_pythons() -> None:
    """A scope includes the names that it takes from outside.

    Strings, attributes and keywords of calls do not count.
    """
    text = """
import os
def outer(a, b=1):
    def inner():
        kept = f"{a} b"
        return lambda: os.sep + call(c=kept)
class Kept:
    a = 1
    def held(self):
        return a
"""
    found = list(scopes(text))
    inner = {"a", "kept", "os", "call"}
    for scope in ({"os", "outer", "Kept", "call", "a"}, {"a", "b", "inner", "os", "call"}, inner):
        assert scope in found
    assert [scope for scope in found if "held" in scope] == [{"a", "held"}]


def test_variables_of_comprehensions_are_no_others() -> None:
    text = "def f(x):\n    return x, [t for t in x], {t: y for t in x for y in t}, [t for t in t]\n"
    (names,) = [scope for scope in scopes(with_own_variables(text)) if "x" in scope]
    assert {"x", "t"} == {
        name for name in names if "__" not in name
    }  # the last `t` is outside of a comprehension


def test_two_names_of_a_spec_do_not_meet() -> None:
    text = ATTENTION.replace(
        "params:", "  d_slopes: {shape: [HQ], dtype: fp32, grad: true}\nparams:"
    )
    files = rendered(text.replace("slopes[h] *", "(slopes[h] + d_slopes[h]) *"))
    assert "d_slopes_arg_ptr" in files["triton.py"]
    assert "d_slopes: [HQ] float32" in files["triton.py"]
    assert refused(NORM.replace("limit", "dslopes"), {}) == ["dslopes"]


QUICK = (
    "causal_alibi",
    "decode_paged",
    "by_distance",
    "rms_norm",
    "norm_modified",
    "retention_output",
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["some", "all"]
)
def test_own_names_are_as_collected(family: str, every: bool) -> None:
    """`scripts/update` regenerates the recorded names. No collected name may be missing."""
    path = KERNELS / family / FILE
    specs = [one for one in specs_of(family) if every or one.path.stem in QUICK]
    found = collected(specs) | {"trees": in_trees(family)}
    if every and os.environ.get("KGEN_UPDATE_GOLDEN") == "1":
        path.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(path.read_text())
    if every:
        assert found == recorded
    assert {*found["function"]} <= {*recorded["function"]}
    for name, names in found["of_passes"].items():
        assert {*names} <= {*recorded["function"], *recorded["of_passes"][name]}
    assert found["trees"] == recorded["trees"]
    assert {*found["every"]} <= {*recorded["every"]}
    for kind, of in found["kinds"].items():
        for part in ("forms", "own"):
            assert {*of[part]} <= {*recorded["kinds"][kind][part]}, "run scripts/update"


def test_names_in_cuda() -> None:
    assert not refused(NORM, {"slopes": "asm"})
    assert not refused(NORM, {"slopes": "t"})  # a variable of a comprehension in the launcher
    # kgen may rename names inside of kernels, because callers do not see them.
    cuda = NORM.replace("{triton: {}, cuda: {}}", "{cuda: {}}")
    assert "next_rstd__ptr" in rendered(cuda, {"slopes": "next_rstd"})["cuda.cu"]
    both = rendered(cuda, {"slopes": "a_1", "reach": "a1"})["cuda.cu"]
    assert "using A1Slots" in both
    assert "int a1_," in both
    # Functions are not renamed: `forward_kernels` would name a function and its namespace.
    assert refused(cuda, {"sample": "forward"}) == ["forward"]


CONSTANTS = (
    "block",
    "distance",
    "qk",
    "q_start",
    "kv_live",
    "own_length",
    "offs_n",
    "group",
)
ARGUMENTS = (
    "k_1",
    "q_0",
    "acc_0",
    "dk_3",
    "do_1",
    "offs_d_0",
    "k_desc",
    "v_rows_2",
    "side_6_max",
    "side_12_min",
    "k_page",
)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_keep_away_from_names_beside_any_kind(name: str) -> None:
    """Also avoid names that no spec of the repository has next to a constant."""
    text = rendered(ATTENTION, {"cap": name})["triton.py"]
    assert f"{name.upper()}_ARG = tl.constexpr(30.0)" in text


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("of", ["slopes", "reach"])
def test_arguments_keep_away_from_names_beside_any_kind(name: str, of: str) -> None:
    text = rendered(ATTENTION, {of: name})["triton.py"]
    kernels = {a for arguments, _ in functions({"triton.py": text}) for a in arguments}
    assert f"{name}_arg" in kernels or f"{name}_arg_ptr" in kernels


@pytest.mark.parametrize(
    "name", ["rstd_ptr", "mean_ptr", "scale_ptr", "largest", "FP8_MAX", "TINY", "x_hat_rounded"]
)
def test_norms_refuse_names_beside_any_kind(name: str) -> None:
    assert refused(NORM, {"reach": name}) == [name]


def test_norms_refuse_constants_beside_any_kind() -> None:
    assert refused(NORM, {"cap": "fp8_max"}) == ["fp8_max"]
