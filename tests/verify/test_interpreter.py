"""What Triton's interpreter remembers once it is mended is what it would have worked out."""

from __future__ import annotations

import importlib

from apart import interpreted


def test_what_is_remembered_is_right() -> None:
    before, once, twice = interpreted(_three_times)
    assert before == once == twice
    assert len(set(before)) == len(before)


def _three_times() -> tuple[list[str], list[str], list[str]]:
    """Types and tensors as the interpreter makes them, as it does once it is mended, and again."""
    from kgen.verify.interpreter import mend

    before = _described()
    mend()
    return before, _described(), _described()


def _described() -> list[str]:
    import triton.language as tl

    interpreter = importlib.import_module("triton.runtime.interpreter")
    elements = (tl.int32, tl.bfloat16, tl.pointer_type(tl.int32), tl.pointer_type(tl.int32, const=True))
    blocks = [
        tl.block_type(element, shape)
        for element in elements
        for shape in ([16], [16, 1], [1, 16], [tl.constexpr(2), 16])
    ]
    tensors = [tl.core.tensor(number, type_) for number, type_ in enumerate((*elements, *blocks))]
    return [
        f"{_own(x)}, {_own(x.type)}, {x.type.scalar}: {interpreter._get_np_dtype(x.type)}" for x in tensors
    ]


def _own(x: object) -> dict[str, str]:
    return {name: str(value) for name, value in vars(x).items()}
