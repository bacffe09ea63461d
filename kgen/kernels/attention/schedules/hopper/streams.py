"""What the producer of forward fetches for each tile of keys beside K and V. Templates loop over it."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.hoist import Binding
from kgen.expr.nodes import Read
from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.schedules.hopper.conditions import PAIR_BYTES
from kgen.kernels.attention.schedules.hopper.plan import PAIR_ROOM, HopperPlan
from kgen.targets.code import Assign, as_type, assign, op


@dataclass(frozen=True)
class Stream:
    """Tiles of queries by keys. Each consumer has a ring of the rows that it reads, and which it alone reads."""

    name: str
    binding: Binding
    """What it is to the plan."""
    line: Assign
    """How a consumer has that of a tile: from its ring `<name>_ring`, at `i - item`. Of each item K and V have a slot
    more."""
    buffer: str
    tensor: str
    """What the launcher makes a descriptor of, in four dimensions."""
    axes: str
    bits: int
    """Of an element."""
    at: str
    """The first two coordinates."""
    slots: int
    of_heads: bool
    """Whether batches share it: those of one head then come one after the other."""

    @property
    def layout(self) -> str:
        return self.name.upper()

    @property
    def rings(self) -> list[str]:
        """Of both consumers."""
        return [f"{self.name}_ring_{letter}" for letter in "ab"]


def streams_of(plan: HopperPlan, kernels: Lowering) -> list[Stream]:
    """The streams of forward."""
    return [_pair(plan, plan.pair, kernels)] if plan.forward is not None and plan.pair is not None else []


def _pair(plan: HopperPlan, pair: Binding, kernels: Lowering) -> Stream:
    """A number for each pair of positions."""
    tile = plan.forward
    assert tile is not None
    assert isinstance(pair.node, Read)
    buffer, (*before, _, _) = pair.node.buffer, pair.node.indices
    element = PAIR_BYTES[kernels.layouts[buffer].dtype]
    # With two dimensions ahead of the positions, whatever it has.
    missing = 2 - len(before)
    printer = kernels.printer(kernels.plan.forward)
    at = ["0"] * missing + [str(printer.own(index)) for index in before]
    of_tile = op("_consumer_load({0}, i - {1}, SCORES)", "pair_ring", "item")
    axes = ["1"] * missing + [str(n) for n in kernels.layouts[buffer].shape]
    return Stream(
        name="pair",
        binding=pair,
        line=assign(pair.name, as_type(of_tile, "float32") if element == 2 else of_tile),
        buffer=buffer,
        tensor=f"{buffer}[{', '.join(['None'] * missing)}]" if missing else buffer,
        axes=", ".join(axes),
        bits=8 * element,
        at=", ".join(at),
        slots=PAIR_ROOM // (tile.BLOCK_M * tile.BLOCK_N * element),
        of_heads="b" not in at,
    )
