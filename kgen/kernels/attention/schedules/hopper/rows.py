"""Row addresses in the Hopper kernels: TMA coordinates, and vectors of log-sum-exp and delta."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.expr.spelling import ADD
from kgen.kernels.attention.lowered.model import Param
from kgen.targets.code import Code, Run, Statement, assign, op

VECTORS = ("lse", "delta")


@dataclass(frozen=True)
class Rows:
    """Rows of tensors [B, H, S, D], or of packed sequences [T, H, D]. TMA counts packed rows
    from their ends.
    """

    before_q: list[str]
    """The coordinates of a query before its row."""
    before_kv: list[str]
    q_row: str
    """The first row of a tile of queries."""
    kv_row: str
    at_q: str
    """The coordinates of the first row of a tile, except the column."""
    at_kv: str
    at_v: str
    stored_at: str
    """The coordinates at which a tile of keys is stored. At that time, the next tile is already
    known.
    """
    SQ: str
    """Number of queries in the tile's sequence, or in the problem."""
    SK: str
    rows_and_columns: str
    """The shape of a slot without its first dimensions."""
    vector_params: list[Param]
    """Log-sum-exp and delta, as parameters of the dk and dv kernel."""


def rows_of(packed: bool, kv_head: str, queries: int) -> Rows:
    """Return the row addresses. The dk and dv kernel has tiles of `queries` rows."""
    q, kv = (
        ([["FAR", "q_end", "h"], ["FAR", "kv_end", kv_head]])
        if packed
        else (["b", "h"], ["b", kv_head])
    )
    q_row, kv_row, v_row = "q_start", "kv_start", "v_start"
    if packed:
        q_row, kv_row, v_row = f"FAR - SQ + {q_row}", f"FAR - SK + {kv_row}", f"FAR - SK + {v_row}"
    return Rows(
        before_q=q,
        before_kv=kv,
        q_row=q_row,
        kv_row=kv_row,
        at_q=", ".join([*q, q_row]),
        at_kv=", ".join([*kv, kv_row]),
        at_v=", ".join([*kv, v_row]),
        stored_at=", ".join([*kv, "kv_row" if packed else "kv_start"]),
        SQ="SQ" if packed else "problem.SQ",
        SK="SK" if packed else "problem.SK",
        rows_and_columns="tile.shape[3], tile.shape[4]"
        if packed
        else "tile.shape[2], tile.shape[3]",
        vector_params=vectors_of(packed, queries),
    )


def vectors_of(packed: bool, queries: int) -> list[Param]:
    """Return the parameters of log-sum-exp and delta for tiles of `queries` rows.

    TMA loads from multiples of 16 bytes. Rows of packed sequences may begin anywhere, so the
    producer copies them.
    """
    if packed:
        return [Param(f"{x}_ptr", x) for x in VECTORS]
    return [Param(f"{x}_desc", f"_gluon_rows({x}, {queries})") for x in VECTORS]


def load_of_row(name: str, vectors: Code, guard: Code | None) -> Statement:
    """Return the load of one number per row of a consumer. `vectors` is the offset of the head's
    rows.
    """
    address = _address(name, vectors)
    if guard is None:
        return assign(name, op("gl.load({0})", address))
    return assign(name, op("gl.load({0}, mask={1}, other=0.0)", address, guard))


def store_of_row(name: str, value: Code, vectors: Code, guard: Code | None) -> Statement:
    """Return the store of one number per row of a consumer."""
    address = _address(name, vectors)
    if guard is None:
        return Run(op("gl.store({0}, {1})", address, value))
    return Run(op("gl.store({0}, {1}, mask={2})", address, value, guard))


def _address(name: str, vectors: Code) -> Code:
    return op(f"args.{name}_ptr + {{0}} + q_idx", vectors, binds=ADD, operand=ADD)
