"""Values that `mend` caches in Triton's interpreter equal the values that Triton computes."""

from __future__ import annotations

import importlib
from pathlib import Path

from support.interpreters.own_process import interpreted


def test_what_is_remembered_is_right() -> None:
    before, once, twice = interpreted(_three_times)
    assert before == once == twice
    assert len(set(before)) == len(before)


def _three_times() -> tuple[list[str], list[str], list[str]]:
    """Return descriptions of types and tensors before `mend`, after it, and from its cache."""
    from kgen.verify.interpreter import mend

    before = _described()
    mend()
    return before, _described(), _described()


def _described() -> list[str]:
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    elements = (
        tl.int32,
        tl.bfloat16,
        tl.pointer_type(tl.int32),
        tl.pointer_type(tl.int32, const=True),
    )
    blocks = [
        tl.block_type(element, shape)
        for element in elements
        for shape in ([16], [16, 1], [1, 16], [tl.constexpr(2), 16])
    ]
    tensors = [tl.core.tensor(number, type_) for number, type_ in enumerate((*elements, *blocks))]
    return [
        f"{_own(x)}, {_own(x.type)}, {x.type.scalar}: {interpreter._get_np_dtype(x.type)}"
        for x in tensors
    ]


def _own(x: object) -> dict[str, str]:
    return {name: str(value) for name, value in vars(x).items()}


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def products(out, wide: tl.int64, narrow, large, N: tl.constexpr):
    i = tl.arange(0, N) - 1
    tl.store(out + tl.arange(0, N), i * wide)
    tl.store(out + N + tl.arange(0, N), i * narrow)
    tl.store(out + 2 * N + tl.arange(0, N), i * large)
"""


def test_integers_are_as_wide_as_on_a_gpu(tmp_path: Path) -> None:
    """Integers have 64 bits if a parameter is annotated so or the number needs them.

    Otherwise 32 bits wrap.
    """
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    wide, narrow, large = interpreted(_products, path)
    assert wide == [-(2**30), 0, 2**30, 2**31]
    assert narrow == [-(2**30), 0, 2**30, -(2**31)]
    assert large == [-(2**31), 0, 2**31, 2**32]


def _products(path: Path) -> list[list[int]]:
    import torch

    from kgen.verify.interpreter import mend
    from kgen.verify.toolchain import import_file

    mend()
    out = torch.zeros(3, 4, dtype=torch.int64)
    import_file(path, "kgen_test_products").products[(1,)](out, 2**30, 2**30, 2**31, N=4)
    return out.tolist()
