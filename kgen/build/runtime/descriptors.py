"""What launchers make of tensors and numbers, in place of Triton's own: descriptors, layouts and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Descriptor:
    """A tensor, and the block of it that TMA moves at a time."""

    def __init__(
        self,
        base: Any,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any = None,
        padding: str = "zero",
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.layout, self.padding = layout, padding


class Layout:
    """`gl.NVMMASharedLayout`, of tiles in shared memory: what Gluon is told."""

    def __init__(self, **told: Any) -> None:
        self.told = told


class Constexpr:
    """`tl.constexpr`, of which launchers take the value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def for_triton(args: Sequence[Any]) -> list[Any]:
    """Arguments as Triton takes them."""
    return [_described_to_triton(x) if isinstance(x, Descriptor) else x for x in args]


def _described_to_triton(x: Descriptor) -> Any:
    """Triton's own descriptor; of a kernel in Gluon that has a layout."""
    told = (x.base, list(x.shape), list(x.strides), list(x.block_shape))
    if isinstance(x.layout, Layout):
        from triton.experimental.gluon import language
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*told, language.NVMMASharedLayout(**x.layout.told))
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(*told)
