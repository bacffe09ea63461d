"""Tensors that the producer of forward loads for each tile of keys in addition to K and V.

Templates loop over them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.hoist import Binding
from kgen.expr.nodes import Read
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.schedules.hopper.conditions import PAIR_BYTES
from kgen.kernels.attention.schedules.hopper.plan import PAIR_ROOM, HopperPlan
from kgen.targets.code import Assign, Name, as_type, assign, op


@dataclass(frozen=True)
class Stream:
    """A stream of tiles [queries, keys].

    Each consumer has its own ring, with its rows of the tiles.
    """

    name: str
    binding: Binding
    """Its binding in the plan."""
    line: Assign
    """The load of a tile in a consumer, from its ring `<name>_ring` at turn `i - item`.

    K and V use one more turn than the stream for each item."""
    buffer: str
    index: str
    """The index that makes the buffer four-dimensional. Empty if it has four dimensions."""
    axes: str
    bits: int
    """Bits of an element."""
    at: str
    """The first two TMA coordinates."""
    slots: int
    of_heads: bool
    """True if all batches share the tensor. Programs then process the batches of one head in
    sequence.
    """

    @property
    def tensor(self) -> str:
        """The four-dimensional tensor from which the launcher builds a descriptor."""
        return f"{self.buffer}{self.index}"

    @property
    def layout(self) -> str:
        return self.name.upper()

    @property
    def rings(self) -> list[str]:
        """The names of the rings of both consumers."""
        return [f"{self.name}_ring_{letter}" for letter in "ab"]


def streams_of(plan: HopperPlan, kernels: Lowering) -> list[Stream]:
    """Return the streams of forward."""
    return (
        [_pair(plan, plan.pair, kernels)]
        if plan.forward is not None and plan.pair is not None
        else []
    )


def _pair(plan: HopperPlan, pair: Binding, kernels: Lowering) -> Stream:
    """Return the stream of a buffer with one number per (query, key)."""
    tile = plan.forward
    assert tile is not None
    assert isinstance(pair.node, Read)
    buffer, (*before, _, _) = pair.node.buffer, pair.node.indices
    element = PAIR_BYTES[kernels.layouts[buffer].dtype]
    # The descriptor has two dimensions before the positions, so missing ones are added.
    missing = 2 - len(before)
    printer = kernels.printer(kernels.plan.forward)
    own = [printer.own(index) for index in before]
    of_tile = op("_consumer_load({0}, i - {1}, SCORES)", "pair_ring", "item")
    axes = ["1"] * missing + [str(n) for n in kernels.layouts[buffer].shape]
    return Stream(
        name="pair",
        binding=pair,
        line=assign(pair.name, as_type(of_tile, "float32") if element == 2 else of_tile),
        buffer=buffer,
        index=f"[{', '.join(['None'] * missing)}]" if missing else "",
        axes=", ".join(axes),
        bits=8 * element,
        at=", ".join(["0"] * missing + [str(index) for index in own]),
        slots=PAIR_ROOM // (tile.BLOCK_M * tile.BLOCK_N * element),
        of_heads=Name("b") not in own,
    )
