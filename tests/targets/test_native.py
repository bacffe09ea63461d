"""Calls from C: names that C reserves, and C++ expressions with the values of the table."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import pytest

from kgen.diagnostics import KgenError
from kgen.expr.functions import TABLE
from kgen.expr.nodes import Call, Const, Node, Type
from kgen.expr.rows import Function
from kgen.kernels.attention.targets.triton.native_tensors import blocks
from kgen.spec.load import loads
from kgen.targets import code
from kgen.targets.code import Code, Name
from kgen.targets.native import DTYPES, Tensor, fixed, in_struct, member, prefix_of
from kgen.targets.native_reference import FUNCTIONS, Sized, dtype_of, in_cpp, sized

ROOT = Path(__file__).resolve().parents[2]
REALS, WHOLES = (0.3, -1.75, 2.5), (7, -3, 2)


def test_every_function_of_the_table_is_spelled() -> None:
    assert set(TABLE) == FUNCTIONS


def test_words_of_c_give_way() -> None:
    assert member("double", ()) == "double_"
    assert member("q", {"q", "q_"}) == "q__"
    assert member("slopes", {"q"}) == "slopes"


@pytest.mark.parametrize(
    ("size", "in_program", "in_example"),
    [
        (fixed(64), "64", "64"),
        (Name("HQ"), "p->HQ", "sizes.HQ"),
        (code.row("mul", Name("NT"), fixed(64)), "p->NT * 64", "sizes.NT * 64"),
        (code.row("add", "SQ", "SK"), "p->SQ + p->SK", "sizes.SQ + sizes.SK"),
        (blocks("SQ"), "kgen_cdiv(p->SQ, 128)", "kgen_cdiv(sizes.SQ, 128)"),
    ],
)
def test_a_size_is_printed_for_the_struct_that_holds_it(
    size: Code, in_program: str, in_example: str
) -> None:
    assert in_struct(size, "p->") == in_program
    assert in_struct(size, "sizes.") == in_example
    assert Tensor("x", "x", "x", (size,), "bf16", "").sizes == (in_program,)


def test_every_family_has_the_same_tensors_in_its_example() -> None:
    rows, ends = Name("rows"), code.row("add", Name("N"), fixed(1))
    tensor = Tensor("x", "x", "x_", (rows, ends, blocks("SQ")), "fp8_e4m3", "")
    others: dict[Code, Code] = {rows: Name("R"), ends: code.text("int64_t(ends.size())")}
    assert sized(tensor, "sizes.", others) == Sized(
        "x_", "FP8", ("sizes.R", "int64_t(ends.size())", "kgen_cdiv(sizes.SQ, 128)")
    )


@pytest.mark.parametrize("element", DTYPES)
def test_the_example_has_every_dtype(element: str) -> None:
    header = (ROOT / "templates/c/kgen_example.h").read_text(encoding="utf-8")
    assert re.search(rf"\b{dtype_of(element)}\b", header)


def test_a_header_of_c_is_no_name_of_a_package() -> None:
    loaded = loads("kernel: norm\nname: stdio\nnorm: rms\nwidth: any\ndtype: bf16\n", "stdio.yaml")
    with pytest.raises(KgenError, match=r"`stdio.h` is a header of C"):
        prefix_of(loaded)


def _calls() -> list[tuple[str, float]]:
    """Return C++ expressions over some numbers, with the values of the table."""
    found = []
    for name, row in TABLE.items():
        least, most = row.arity
        count = min(3, most or 3) if name != "clamp" else least
        for kind, numbers in (
            (Type.FLOAT, REALS),
            (Type.INT, WHOLES),
            (Type.BOOL, (True, False, True)),
        ):
            for shift in range(3):
                given = [numbers[(shift + i) % 3] for i in range(count)]
                found += _value(name, row, [Const(n, kind) for n in given])
    return found


def _value(name: str, row: Function, given: list[Const]) -> list[tuple[str, float]]:
    if name == "where":
        given = [Const(True, Type.BOOL), *given[1:]]
    try:
        kind = row.typed(tuple(c.type for c in given))
        value = row.value(*(c.value for c in given))
    except Exception:  # the row refuses these types, or has no value there
        return []
    if isinstance(value, complex) or not math.isfinite(value):
        return []
    nodes: tuple[Node, ...] = tuple(given)
    return [(in_cpp(Call(name, nodes, kind), {}), float(value))]


def test_expressions_in_cpp_have_the_values_of_the_table(tmp_path: Path) -> None:
    calls = _calls()
    assert len(calls) > 80
    lines = [f'    std::printf("%.17g\\n", double({text}));' for text, _ in calls]
    source = ['#include "kgen_example.h"', "int main()", "{", *lines, "}", ""]
    (tmp_path / "values.cpp").write_text("\n".join(source))
    folder = ROOT / "templates" / "c"
    command = ["g++", "-std=c++17", "-w", f"-I{folder}", "values.cpp", "-ldl", "-o", "values"]
    subprocess.run(command, cwd=tmp_path, check=True)
    said = subprocess.run(
        [tmp_path / "values"], capture_output=True, text=True, check=True
    ).stdout.split()
    for (text, want), got in zip(calls, said, strict=True):
        assert float(got) == pytest.approx(want, rel=1e-12, abs=1e-12), text
