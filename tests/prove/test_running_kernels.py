"""Kernels that run on lanes: the values of names in branches."""

from __future__ import annotations

import z3

from kgen.prove.lanes import Num, Pointer, Tensor
from kgen.prove.running import KernelWalker
from kgen.prove.walking import File

BRANCHES = """
def kernel(x_ptr, n):
    at = 0
    if n > 3:
        at = 100
    else:
        tl.store(x_ptr + at, 1.0)
"""


def test_a_branch_does_not_see_the_values_of_the_other() -> None:
    kernel = KernelWalker(File.of(BRANCHES), programs=z3.Int("programs"))
    x = Pointer(Tensor("x", (z3.IntVal(8),)))
    kernel.function("kernel", {"x_ptr": x, "n": Num(z3.Int("n"))})
    (store,) = kernel.accesses
    assert store.indices[0].eq(z3.IntVal(0))
