"""Type rule, derivative and spellings of every row of the function table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import sympy as sp
import torch
from support.specs.trees import BOOL, FLOAT, INT, LONG

from kgen.expr.algebra import Algebra, apply
from kgen.expr.algebra import call as typed_call
from kgen.expr.functions import TABLE, in_order
from kgen.expr.hoist import hoist
from kgen.expr.index_ranges import IndexRanges
from kgen.expr.nodes import Call, Const, Node, Type, Var
from kgen.expr.parse import parse_expression
from kgen.expr.rows import Finite
from kgen.expr.scope import Scope
from kgen.expr.spelling import Accuracy
from kgen.expr.text_checks import ExpressionError
from kgen.expr.type_rules import TypeRuleError
from kgen.expr.unparse import show
from kgen.kernels.norm.targets.cuda.spelled import SCALARS
from kgen.targets.code import CUDA, spell
from kgen.targets.cuda.printer import Printer as CudaPrinter
from kgen.targets.cuda.printer import literal
from kgen.targets.triton.printer import Printer
from kgen.verify.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(TABLE)
ARITHMETIC = {"add", "sub", "mul", "neg", "min", "max", "abs", "clamp", "detach"}
BITS = {"bitand", "bitor", "bitxor", "invert", "lshift", "rshift"}
INTEGRAL = {"floordiv", "mod", *BITS}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
LOGICAL = {"and", "or", "not"}
REAL = {*NAMES} - ARITHMETIC - INTEGRAL - COMPARISONS - LOGICAL - {"where", "int"}


def arity(name: str) -> int:
    return TABLE[name].arity[0]


def expected_type(name: str, types: tuple[Type, ...]) -> Type | None:
    """Return the type of a call by the rules of the language, or None if it is refused."""
    if name in LOGICAL:
        return BOOL if set(types) == {BOOL} else None
    if name == "where":
        condition, *values = types
        if condition is not BOOL or (BOOL in values and set(values) != {BOOL}):
            return None
        return BOOL if BOOL in values else FLOAT if FLOAT in values else wider(*values)
    if BOOL in types:
        return None
    if name == "int":
        return INT if types in ((FLOAT,), (INT,)) else None
    if name in INTEGRAL:
        return wider(*types) if set(types) <= {INT, LONG} else None
    if name in COMPARISONS:
        return BOOL
    return FLOAT if FLOAT in types or name in REAL else wider(*types)


def wider(*types: Type) -> Type:
    return LONG if LONG in types else INT


@pytest.mark.parametrize("name", NAMES)
def test_types(name: str) -> None:
    for types in product(Type, repeat=arity(name)):
        expected = expected_type(name, types)
        if expected is None:
            with pytest.raises(TypeRuleError):
                TABLE[name].typed(types)
        else:
            assert TABLE[name].typed(types) is expected


# --- points at which everything is smooth and defined ------------------------

POINTS = 64


def operands(name: str, types: tuple[Type, ...], seed: int = 0) -> list[torch.Tensor]:
    """Draw values of all signs.

    They are positive where the function needs that, and away from its kinks.
    """
    make = torch.Generator().manual_seed(seed)
    result = []
    for i, type_ in enumerate(types):
        if type_ is BOOL:
            values = torch.rand(POINTS, generator=make) < 0.5
        elif type_.integral:
            values = torch.randint(-9, 10, (POINTS,), generator=make)
            if name in ("floordiv", "mod", "div") and i == 1:
                values = torch.where(values == 0, 3, values)
            if name in ("lshift", "rshift") and i == 1:
                result.append(values.abs())
                continue
            if type_ is LONG and name not in REAL:
                values = values * 2**20  # beyond 32 bits as products, but exact in a float
        else:
            values = torch.randn(POINTS, generator=make, dtype=torch.float64) * 2
            values = torch.where(values.abs() < 0.05, 0.3, values)
            if name == "div" and i == 1:
                values = values + values.sign()
        if TABLE[name].callable and TABLE[name].finite in (
            Finite.WHERE_DEFINED,
            Finite.AWAY_FROM_POLES,
        ):
            values = values.abs() + 1
        result.append(values)
    return result


def variables(types: tuple[Type, ...]) -> tuple[Var, ...]:
    return tuple(Var(name, type_) for name, type_ in zip("xyz", types, strict=False))


def typings(name: str) -> list[tuple[Type, ...]]:
    """Return the argument types that a row accepts."""
    return [t for t in product(Type, repeat=arity(name)) if expected_type(name, t) is not None]


def reference(name: str, types: tuple[Type, ...], values: list[torch.Tensor]) -> torch.Tensor:
    node = Call(name, variables(types), TABLE[name].typed(types))
    return evaluate(node, dict(zip("xyz", values, strict=False)), torch)


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_the_value_of_numbers(name: str) -> None:
    for types in typings(name):
        values = operands(name, types)
        got = reference(name, types, values)
        type_ = TABLE[name].typed(types)
        assert {FLOAT: torch.float64, BOOL: torch.bool}.get(type_, torch.int64) == got.dtype
        want = [TABLE[name].value(*(v[i].item() for v in values)) for i in range(POINTS)]
        torch.testing.assert_close(got, torch.tensor(want, dtype=got.dtype), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_python_spelling_is_read_back(name: str) -> None:
    for types in typings(name):
        scope = Scope(dict(zip("xyz", types, strict=False)), {})
        node: Node = Call(name, variables(types), TABLE[name].typed(types))
        assert parse_expression(show(node), scope, node.type) == node


def test_operators_are_not_functions() -> None:
    for name, row in TABLE.items():
        scope = Scope(dict.fromkeys("xyz", FLOAT), {})
        text = f"{name}({', '.join('xyz'[: arity(name)])})"
        if not row.callable and name not in ("and", "or", "not"):
            with pytest.raises(ExpressionError):
                parse_expression(text, scope, FLOAT)


@pytest.mark.parametrize("name", NAMES)
def test_torch_spelling(name: str) -> None:
    row = TABLE[name]
    for types in typings(name):
        # Emitted eager code has tensors of float32 and int64.
        values = operands(name, types)
        args = [v.float() if v.dtype == torch.float64 else v for v in values]
        text = row.spelled["torch"].form.format(*"xyz"[: len(args)])
        got = eval(text, {"torch": torch}, dict(zip("xyz", args, strict=False)))
        want = reference(name, types, values)
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-5, atol=1e-5)


# --- derivatives ------------------------


def partials(name: str, types: tuple[Type, ...]) -> list[Node | None]:
    """Return the derivative of a row as trees over x, y and z."""
    algebra = Algebra()
    rule = TABLE[name].derivative
    assert rule is not None
    given = rule(apply, *(algebra.symbol(v) for v in variables(types)))
    assert len(given) == len(types)
    return [None if p is None else algebra.to_tree(sp.sympify(p)) for p in given]


def at(node: Node, values: list[torch.Tensor]) -> torch.Tensor:
    return evaluate(node, dict(zip("xyz", values, strict=False)), torch).double().expand(POINTS)


@pytest.mark.parametrize("name", [n for n in NAMES if TABLE[n].derivative])
def test_derivative(name: str) -> None:
    types = (BOOL, FLOAT, FLOAT) if name == "where" else (FLOAT,) * arity(name)
    step = 1e-6
    for seed in range(3):
        values = operands(name, types, seed)
        for i, partial in enumerate(partials(name, types)):
            if partial is None:
                assert types[i] is BOOL
                continue
            up, down = list(values), list(values)
            up[i], down[i] = values[i] + step, values[i] - step
            numeric = (reference(name, types, up) - reference(name, types, down)) / (2 * step)
            got = at(partial, values)
            torch.testing.assert_close(got, numeric, rtol=1e-5, atol=1e-6)
            leaf = values[i].clone().requires_grad_()
            result = reference(name, types, [*values[:i], leaf, *values[i + 1 :]])
            (exact,) = torch.autograd.grad(result.sum(), leaf)
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)


FLAT = [n for n in NAMES if TABLE[n].derivative is None and n != "detach"]
"""Functions without a derivative. `detach` has none by definition, although it is not flat."""


@pytest.mark.parametrize("name", FLAT)
def test_without_a_derivative_a_row_is_flat(name: str) -> None:
    for types in typings(name):
        node = typed_call(name, *variables(types))
        if node.type is FLOAT:
            values = operands(name, types)
            nearby = [v + 1e-7 if v.dtype == torch.float64 else v for v in values]
            assert torch.equal(at(node, values), at(node, nearby))


# --- the kernels' spelling ------------------------


# Triton's own functions accept no integers: the printer of `log2(kv_idx)` converts the operand.
INTEGERS = [
    (name, types)
    for name in sorted(REAL - {"div", "float"})
    for types in typings(name)
    if any(type_.integral for type_ in types)
]


def kernel_source(accuracy: Accuracy) -> tuple[str, list[tuple[str, tuple[Type, ...]]]]:
    """Return a kernel that computes every row for every typing, and its rows.

    Operands are float32, int32 and int64. Each result is a row of `out`. `accuracy` selects the
    usual spellings, or only those that differ if precise.
    """
    helpers = "\n\n\n".join(
        s.helper for row in TABLE.values() for s in row.spellings("triton") if s.helper
    )
    names = (
        NAMES
        if accuracy == "usual"
        else [name for name in NAMES if "triton" in TABLE[name].precise]
    )
    cases = [
        (name, types) for name in names for types in typings(name) if (name, types) not in INTEGERS
    ]
    body = []
    for row, (name, types) in enumerate(cases):
        for i, (variable, type_) in enumerate(zip("xyz", types, strict=False)):
            body.append(f"{variable} = tl.load(in_ptr + ({3 * row + i}) * N + i)")
            body.append(
                {
                    FLOAT: "",
                    INT: f"{variable} = {variable}.to(tl.int32)",
                    LONG: f"{variable} = {variable}.to(tl.int64)",
                    BOOL: f"{variable} = {variable} != 0",
                }[type_]
            )
        spelling = TABLE[name].spelling("triton", accuracy).form.format(*"xyz"[: len(types)])
        body.append(f"tl.store(out_ptr + {row} * N + i, ({spelling}).to(tl.float32))")
    lines = "\n".join(f"    {line}" for line in ("i = tl.arange(0, N)", *body) if line)
    kernel = f"@triton.jit\ndef kernel(in_ptr, out_ptr, N: tl.constexpr):\n{lines}\n"
    return (
        f"import torch\nimport triton\nimport triton.language as tl\n{helpers}\n\n{kernel}",
        cases,
    )


@pytest.mark.parametrize(
    ("accuracy", "bound"),
    [("usual", {"rtol": 3e-6, "atol": 3e-6}), ("precise", {"rtol": 4e-7, "atol": 1e-9})],
)
def test_triton_spelling(accuracy: Accuracy, bound: dict[str, float], tmp_path: Path) -> None:
    source, cases = kernel_source(accuracy)
    assert cases
    inputs, wanted = [], []
    for name, types in cases:
        values = [
            v.float().double() if v.dtype == torch.float64 else v for v in operands(name, types)
        ]
        wanted.append(reference(name, types, values).double())
        padded = [v.double() for v in values] + [torch.zeros(POINTS, dtype=torch.float64)] * (
            3 - len(values)
        )
        inputs += padded
    (tmp_path / "in.json").write_text(json.dumps(torch.stack(inputs).tolist()))
    program = tmp_path / "program.py"
    program.write_text(
        f"import json\n{source}\n"
        f"given = torch.tensor(json.load(open('in.json')), dtype=torch.float32)\n"
        f"out = torch.full(({len(cases)}, {POINTS}), float('nan'))\n"
        f"kernel[(1,)](given, out, N={POINTS})\n"
        f"json.dump(out.tolist(), open('out.json', 'w'))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, program.name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    out = torch.tensor(json.loads((tmp_path / "out.json").read_text()), dtype=torch.float64)
    for (name, types), got, want in zip(cases, out, wanted, strict=True):
        torch.testing.assert_close(got, want, **bound, msg=lambda m, c=(name, types): f"{c}: {m}")


def test_printed_operands_of_real_functions_are_real() -> None:
    printer = Printer(
        hoist({}, {}), "q", {}, IndexRanges({}, frozenset()), frozenset(), accuracy="usual"
    )
    for name, types in INTEGERS:
        assert "float32" in str(printer.own(typed_call(name, *variables(types))))


# Definitions that NVRTC has and a C++ compiler lacks.
CUDA_ON_CPU = """
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#define DEVICE inline
using std::max;
using std::min;
static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
"""


def test_cuda_spelling(tmp_path: Path) -> None:
    """Compile every row for every typing on the CPU: expressions are plain C++ of float, int and
    long long.
    """
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("g++ is not installed")
    cases = [(name, types) for name in NAMES for types in typings(name)]
    printer, lines, wanted = CudaPrinter(), [], []
    for name, types in cases:
        values = [
            v.float().double() if v.dtype == torch.float64 else v for v in operands(name, types)
        ]
        wanted.append(reference(name, types, values).double())
        text = spell(printer.value(typed_call(name, *variables(types))), CUDA)
        for point in zip(*(v.tolist() for v in values), strict=True):
            spelled = {
                variable: (
                    f"const {SCALARS[t]} {variable} = {spell(literal(Const(value, t)), CUDA)};"
                )
                for variable, t, value in zip("xyz", types, point, strict=False)
            }
            inputs = " ".join(spelled.values())
            lines.append(f'{{ {inputs} std::printf("%.9g ", (double)({text})); }}')
        lines.append('std::puts("");')
    helpers = "\n".join(in_order(printer.helpers))
    body = "\n".join(lines)
    program = tmp_path / "program.cpp"
    program.write_text(f"{CUDA_ON_CPU}{helpers}\nint main() {{\n{body}\n}}\n")
    command = [
        compiler,
        "-std=c++17",
        "-ffp-contract=off",
        str(program),
        "-o",
        str(tmp_path / "program"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    run = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True, check=True)
    for case, row, want in zip(cases, run.stdout.splitlines(), wanted, strict=True):
        got = torch.tensor([float(x) for x in row.split()], dtype=torch.float64)
        torch.testing.assert_close(
            got, want, rtol=3e-6, atol=3e-6, msg=lambda m, c=case: f"{c}: {m}"
        )


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("1 / n - (x - (y - 1)) * 2", "1.0f / float(n) - (x - (y - 1.0f)) * 2.0f"),
        ("x if n == 0 and not (x < y or y > 2) else -x", "n == 0 && !(x < y || y > 2.0f) ? x : -x"),
        ("min(n, x) + where(x < 1, 1, 0)", "min(float(n), x) + float(x < 1.0f ? 1 : 0)"),
        ("x - (y if x > 0 else 1) * 0.5", "x - (x > 0.0f ? y : 1.0f) * 0.5f"),
        (
            "float(n * 1103515245 - 3)",
            "float(int(unsigned(int(unsigned(n) * unsigned(1103515245))) - unsigned(3)))",
        ),
        ("exp(x / inf)", "expf(x / __int_as_float(0x7f800000))"),
    ],
)
def test_cuda_brackets_and_types(text: str, printed: str) -> None:
    scope = Scope({"x": FLOAT, "y": FLOAT, "n": INT}, {})
    assert spell(CudaPrinter().value(parse_expression(text, scope, FLOAT)), CUDA) == printed
