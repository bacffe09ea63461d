"""Loads of tiles of Q, K, V and dO in portable kernels: by TMA or by pointers, one block of columns
at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import (
    KEYS,
    QUERIES,
    Columns,
    Descriptor,
    Held,
    Load,
    Operands,
    Stream,
)
from kgen.kernels.attention.plan.model import AttentionPlan, Chunk
from kgen.targets.code import Assign, Code, Name, assign, conjunction, minimum, op, row
from kgen.targets.triton.printer import along_row, column

_NOTE = "the columns of a head"
# The side of the rows of an operand.
SIDES = {"q": "q", "k": "kv", "v": "kv", "do": "q"}


def load_of(chunk: Chunk, rows: Code | None, store_rows: Code | None = None) -> Load:
    """Return the load of a block of columns, with guards for rows and columns that may not
    exist.
    """
    exists = None
    if chunk.width < chunk.size:
        exists = op("({0} < {1})[None, :]", chunk.columns, chunk.start + chunk.width)
    both = conjunction(x for x in (rows, exists) if x is not None)
    stored = conjunction(x for x in (store_rows, exists) if x is not None)
    return Load(chunk.tag, Name(chunk.columns), chunk.size, guard=both, store_guard=stored)


def streamed_load(chunk: Chunk, rows: Code | None) -> Load:
    """Return the load of a block of columns inside the loop, with a guard for rows that may not
    exist.
    """
    return Load(chunk.tag, streamed_columns(chunk), chunk.size, rows)


def streamed_columns(chunk: Chunk) -> Code:
    """Return the columns of a load inside the loop. All of them exist.

    A padded block repeats its last column. The resident operand is zero there, or the product is
    not stored. A guard is not possible, because Triton 3.6 reads past it if rows are not aligned.
    """
    if chunk.width == chunk.size:
        return Name(chunk.columns)
    return minimum(chunk.columns, chunk.start + chunk.width - 1)


def block_of(chunk: Chunk, total: str) -> Columns:
    """Return a block of columns. The product of a second block is added to `total`."""
    onto = [total] if chunk.start else []
    return Columns(chunk.tag, streamed_columns(chunk), chunk.size, onto)


def columns_of(chunks: Sequence[Chunk]) -> list[Assign]:
    """Return the statements for the column offsets of blocks, one per name."""
    by_name = {c.columns: _columns(c) for c in chunks}
    return [assign(name, value, _NOTE) for name, value in by_name.items()]


def _columns(chunk: Chunk) -> Code:
    own = op("{tl}.arange(0, {0})", chunk.size)
    return row("add", chunk.start, own) if chunk.start else own


def operands_of(
    plan: AttentionPlan,
    kv_head: str,
    streamed: Sequence[Sequence[str]],
    held: Sequence[str],
    guards: Mapping[str, Code | None],
) -> Operands:
    """Return the loads of a kernel: the tiles of each stream of its loop, and the tiles that it
    holds.

    TMA reads zeros past the end of a tensor or of a packed sequence. Rows that the mask hides may
    contain NaN, so they are loaded by pointers with a guard.
    """
    hidden = {"q": plan.q.live != plan.q.bound, "kv": plan.kv.live != plan.kv.bound}
    streaming = [x for names in streamed for x in names]
    tiles = {x: _tile(plan, kv_head, x, guards[SIDES[x]]) for x in (*streaming, *held)}
    side, held_side = SIDES[streaming[0]], SIDES[held[0]]
    by_tma = [x for x in SIDES if x in streaming or (x in held and not hidden[held_side])]

    def stream(names: Sequence[str]) -> Stream:
        return Stream(
            by_tma="TMA and not MASKED" if hidden[side] else "TMA",
            guarded=guards[side] is not None,
            tma=[line for x in names for line in tiles[x].tma],
            masked=[line for x in names for line in tiles[x].streamed(guards[side])],
            whole=[line for x in names for line in tiles[x].streamed(None)],
        )

    return Operands(
        tuple(stream(names) for names in streamed),
        Held(
            by_tma=not hidden[held_side],
            tma=[line for x in held for line in tiles[x].tma],
            own=[line for x in held for line in tiles[x].own],
        ),
        tuple(block.descriptor for x in by_tma for block in tiles[x].blocks),
    )


@dataclass(frozen=True)
class _Block:
    """A block of columns of a tile of q, k, v or dO."""

    x: str
    chunk: Chunk
    rows: str
    """Number of rows, as a name."""

    @property
    def name(self) -> str:
        return f"{self.x}{self.chunk.tag}"

    @property
    def descriptor(self) -> Descriptor:
        tensor = "dout" if self.x == "do" else self.x
        return Descriptor(f"{self.x}_desc{self.chunk.tag}", tensor, self.rows, self.chunk.size)


@dataclass(frozen=True)
class _Tile:
    blocks: list[_Block]
    tma: list[Assign]
    """Loads by TMA."""
    own: list[Assign]
    """Loads by pointers, for a program that holds the tile."""
    step: Code
    """Offset in elements from the first tile to a tile of the loop."""

    def streamed(self, guard: Code | None) -> list[Assign]:
        """Return the loads of a loop, from addresses that are computed before it."""
        return [
            assign(
                block.name, _load(row("add", f"{block.x}_rows{block.chunk.tag}", self.step), guard)
            )
            for block in self.blocks
        ]


def _tile(plan: AttentionPlan, kv_head: str, x: str, guard: Code | None) -> _Tile:
    side, stride = SIDES[x], f"stride_{x}"
    of, head = (QUERIES, "h") if side == "q" else (KEYS, kv_head)
    rows, offsets = of.block, of.offsets
    chunks = plan.qk_chunks if x in ("q", "k") else plan.v_chunks
    blocks = [_Block(x, c, rows) for c in chunks]
    first = tma_row(plan.spec.varlen, side, head).indices
    by_tma = [
        op(
            f"{block.descriptor.name}.load([{first}, {block.chunk.start}]).reshape({rows}, "
            f"{block.chunk.size})"
        )
        for block in blocks
    ]
    first_column = row("add", f"{x}_ptr", row("mul", column(offsets), f"{stride}s"))
    addresses = [
        row("add", first_column, row("mul", along_row(c.columns), f"{stride}d")) for c in chunks
    ]
    own = [_load(at, load_of(c, guard).guard) for at, c in zip(addresses, chunks, strict=True)]
    return _Tile(
        blocks,
        [assign(block.name, value) for block, value in zip(blocks, by_tma, strict=True)],
        [assign(block.name, value) for block, value in zip(blocks, own, strict=True)],
        row("mul", f"{side}_start", f"{stride}s"),
    )


def _load(address: Code, guard: Code | None) -> Code:
    if guard is None:
        return op("{tl}.load({0})", address, fn="load")
    return op("{tl}.load({0}, mask={1}, other=0.0)", address, guard, fn="load")


@dataclass(frozen=True)
class TmaRow:
    """The position of the first row of a tile in a descriptor."""

    indices: str
    """Indices of the dimensions before the column."""
    names: list[str]
    """Names in `indices` that the function of a loop needs as parameters."""


def tma_row(packed: bool, side: str, head: str) -> TmaRow:
    """Return the position of the first row of a tile in a descriptor.

    `side` is `q` or `kv`. `_packed_descriptors.j2` explains the indices of packed sequences.
    """
    if not packed:
        return TmaRow(f"b, {head}, {side}_start", ["b", head])
    end, length = f"{side}_end", f"S{side[0].upper()}"
    return TmaRow(f"FAR, {end}, {head}, FAR - {length} + {side}_start", [end, length, head])
