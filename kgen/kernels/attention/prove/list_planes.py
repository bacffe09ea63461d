"""The obligation that a tile reads the list of its own sequence, head and block.

Lists that do not depend on the sequence or the head are shared. The template `_block_mask.j2`
contains the rows of kinds, and the loop over their columns in `_block_lists_kernel`. This module
repeats their index arithmetic, and a test compares these lines of the template.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import z3

from kgen.kernels.attention.lowered.block_mask import plane_lines
from kgen.kernels.attention.lowered.ranges import listed_loops
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, BlockMask
from kgen.kernels.attention.plan.model import Q_AXIS, TileLoop
from kgen.kernels.attention.prove.claims import OWN_LIST
from kgen.prove.functions import Beyond
from kgen.prove.obligations import Obligation
from kgen.prove.statements import Machine, values_of
from kgen.prove.world import LONGEST, World
from kgen.targets.code import Name, cdiv, over


def of_planes(name: str, mask: BlockMask, loop: TileLoop, block: int) -> Obligation:
    """Return the obligation for the tiles of a loop, with `block` positions of its outer axis
    each.
    """
    world = World({})
    sizes = {n: world.integer(n, 1, LONGEST) for n in ("B", "HQ", "SQ", "SK")}
    names = {
        **sizes,
        "b": world.integer("b", 0, sizes["B"] - 1),
        "h": world.integer("h", 0, sizes["HQ"] - 1),
    }
    outer = "Q" if loop.outer is Q_AXIS else "K"
    start = block * world.integer("tile", 0)
    world.facts.append(start < sizes[f"S{outer}"])
    known = {**names, loop.outer.start.name: start, "BLOCK_SIZE": z3.IntVal(BLOCK_SIZE)}
    try:
        reader = Machine(world, values_of(known))
        reader.run(listed_loops(mask, loop).bounds[:1])
        counts = {x: reader.value(cdiv(f"S{x}", "BLOCK_SIZE")) for x in "QK"}
        number = reader.value(over(loop.outer.start.name, "BLOCK_SIZE"))
        inside = z3.And(number >= 0, number < counts[outer])
        # With this claim, the numbers of blocks can be arbitrary, and z3 need not know how they are
        # computed.
        blocks = {x: world.integer(f"{x.lower()}_blocks", 1) for x in "QK"}
        own = world.integer("own", 0, blocks[outer] - 1)
        row = reader.value(Name("row"))
        row = z3.substitute(row, *((counts[x], blocks[x]) for x in "QK"), (number, own))
        plane = _plane(mask, names)
        planes = (sizes["B"] if mask.by_batch else 1) * (sizes["HQ"] if mask.by_head else 1)
        claims = [
            ("a block of the tensor", inside),
            # So the row is less than the number of lists, `planes` times the number of blocks.
            (
                "a list of the mask",
                z3.And(plane >= 0, plane < planes, row == plane * blocks[outer] + own),
            ),
            *(_made_for if outer == "Q" else _column)(world, mask, names, row, own, blocks),
        ]
        return Obligation(name, OWN_LIST, None, list(world.facts), dict(world.shown), parts=claims)
    except Beyond as beyond:
        return Obligation(name, OWN_LIST, beyond=str(beyond))


def _plane(mask: BlockMask, names: Any) -> Any:
    """Return the number of the plane: of the sequence and head if their lists differ."""
    if mask.by_batch and mask.by_head:
        return names["b"] * names["HQ"] + names["h"]
    return names["b"] if mask.by_batch else names["h"] if mask.by_head else z3.IntVal(0)


def _column(
    world: World, mask: BlockMask, names: Any, row: Any, own: Any, blocks: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the claims about a list of blocks of queries, which comes from a column of the
    kinds.
    """
    entry = world.integer("q_block", 0, blocks["Q"] - 1)
    plane, column = _divided(world, "list", row, blocks["K"])
    address = plane * blocks["Q"] * blocks["K"] + column + entry * blocks["K"]
    made, place = _divided(world, "kinds", address, blocks["K"])
    yield (
        "the block of keys",
        z3.And(column == own, place == own, made == plane * blocks["Q"] + entry),
    )
    yield "the plane of a list", plane == _plane(mask, names)
    yield from _made_for(
        world, mask, names, _plane(mask, names) * blocks["Q"] + entry, entry, blocks
    )


def _divided(world: World, name: str, number: Any, by: Any) -> tuple[Any, Any]:
    """Return a quotient and its remainder as unknowns, because z3 handles division by unknowns
    badly.
    """
    quotient, rest = world.integer(f"{name}_row", 0), world.integer(f"{name}_column", 0)
    world.facts += [quotient * by + rest == number, rest < by]
    return quotient, rest


def _made_for(
    world: World, mask: BlockMask, names: Any, row: Any, own: Any, blocks: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the claims that a program builds the row of kinds of the right block, sequence and
    head.
    """
    maker = Machine(world, values_of({"row": row, "q_blocks": blocks["Q"], "HQ": names["HQ"]}))
    maker.run(plane_lines(mask))
    number, rest = _divided(world, "made", row, blocks["Q"])
    plane = _plane(mask, names)
    yield "the block of queries", z3.And(rest == own, number == plane)
    for name, made in (("b", mask.by_batch), ("h", mask.by_head)):
        if made:
            found = z3.substitute(
                maker.value(Name(name)), (maker.value(over("row", "q_blocks")), plane)
            )
            yield name, found == names[name]
