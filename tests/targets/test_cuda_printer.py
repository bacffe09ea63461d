"""Expressions in CUDA: every function is one that NVRTC knows."""

from __future__ import annotations

import contextlib
from itertools import product
from pathlib import Path

from cuda.core import Program, ProgramOptions

from kgen.expr.algebra import call
from kgen.expr.functions import TABLE, in_order
from kgen.expr.nodes import Type, Var
from kgen.expr.type_rules import TypeRuleError
from kgen.targets.code import CUDA, spell
from kgen.targets.cuda.printer import Printer

ROOT = Path(__file__).resolve().parents[2]


def test_device_code_includes_nothing():
    """The launcher for C and C++ is a file of its own, which includes the kernels."""
    paths = sorted((ROOT / "generated").glob("*/cuda.cu"))
    assert len(paths) == 10
    for path in paths:
        device, host = path.read_text(), path.with_name("cuda_launch.cu").read_text()
        assert not any(word in device for word in ("#include", 'extern "C"', "__CUDACC_RTC__"))
        assert host.count("__global__") == 0
        assert '#include "cuda.cu"' in host
        assert 'extern "C" cudaError_t' in host


def test_every_function_is_one_of_cuda(verdict):
    """Each row of the table compiles in a kernel: NVRTC knows the names, and none is ambiguous."""
    lines, helpers = [], set[str]()
    names = {Type.FLOAT: "xyz", Type.INT: "ijk", Type.LONG: "lmn", Type.BOOL: "pqr"}
    for name, row in TABLE.items():
        for types in product(Type, repeat=row.arity[0]):
            arguments = [Var(names[t][i], t) for i, t in enumerate(types)]
            with contextlib.suppress(TypeRuleError):
                for fast in (False, True):
                    value = Printer(accuracy="fast" if fast else "usual", helpers=helpers).value(
                        call(name, *arguments)
                    )
                    lines.append(f"    total += float({spell(value, CUDA)});")
    source = "\n".join(["#define DEVICE __device__ __forceinline__", *in_order(helpers)])
    body = "\n".join(lines)
    kernel = (
        "__global__ void every(float* out, float x, float y, float z, int i, int j, int k, "
        "long long l, long long m, long long n, bool p, bool q, bool r) {\n"
    )
    verdict(None, source, kernel, body)
    program = Program(
        f"{source}\n{kernel}    float total = 0.0f;\n{body}\n    *out = total;\n}}",
        "c++",
        ProgramOptions(arch="sm_90", std="c++17"),
    )
    assert program.compile("cubin", name_expressions=("every",)).code


def test_a_cheaper_tanh_is_asked_for():
    tanh = call("tanh", Var("x", Type.FLOAT))
    assert spell(Printer().value(tanh), CUDA) == "tanhf(x)"
    assert spell(Printer(accuracy="fast").value(tanh), CUDA) == "_tanh_approx(x)"
