"""Replacements for Triton's descriptors, layouts and constants, which launchers create."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Descriptor:
    """A TMA descriptor: a tensor, and the shape of the block that one copy moves."""

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
    """Arguments of a `gl.NVMMASharedLayout`, the layout of a tile in shared memory."""

    def __init__(self, **told: Any) -> None:
        self.told = told


class Constexpr:
    """A `tl.constexpr`: launchers read its `value`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def for_triton(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with Triton's own descriptors."""
    return [_described_to_triton(x) if isinstance(x, Descriptor) else x for x in args]


def _described_to_triton(x: Descriptor) -> Any:
    """Return Triton's own descriptor, or Gluon's if it has a layout."""
    told = (x.base, list(x.shape), list(x.strides), list(x.block_shape))
    if isinstance(x.layout, Layout):
        from triton.experimental.gluon import language
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*told, language.NVMMASharedLayout(**x.layout.told))
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(*told)
