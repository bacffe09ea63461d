"""Tensors and matrix products of each kernel, from which `kgen explain` computes bytes and
multiplications.

A kernel reads and writes each of its tensors once, if caches keep the data that programs share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kgen.kernels.linear_attention.plan.planning import ELEMENT_SIZE, LinearAttentionPlan
from kgen.kernels.linear_attention.plan.tiles import tile_tables

_RECOMPUTED = ("gates", "q_map", "k_map", "pairs", "equations", "inverse", "solve", "states")


@dataclass(frozen=True)
class Size:
    """Bytes of a tensor per token and head."""

    bytes: float
    heads: str = "HV"
    """`H` for q and k, `HV` for all others."""

    def of(self, heads: int, heads_v: int) -> float:
        """Return the bytes per token of H heads and HV value heads."""
        return self.bytes * (heads if self.heads == "H" else heads_v)


@dataclass(frozen=True)
class Kernel:
    """One kernel: the tensors that it reads and writes, and its multiplications.

    `multiplications` is their number in matrix products, for each chunk of a value head.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    multiplications: int
    backward: bool
    sizes: Mapping[str, Size]
    chunk: int

    def bytes(self, heads: int, heads_v: int) -> float:
        """Return the bytes per token if every tensor is read and written once."""
        return sum(self.sizes[name].of(heads, heads_v) for name in (*self.reads, *self.writes))

    def products(self, heads_v: int) -> float:
        """Return the multiplications of matrix products per token."""
        return heads_v * self.multiplications / self.chunk


def kernels(plan: LinearAttentionPlan) -> tuple[Kernel, ...]:
    """Return the kernels of the forward pass, then of the backward pass, in the order of
    launches.
    """
    sizes, chunk = tensor_sizes(plan), plan.spec.chunk_size
    own = _Kernels(plan)
    listed = [(False, own.forward()), *([(True, own.backward())] if plan.backward else [])]
    return tuple(
        Kernel(name, tuple(reads), tuple(writes), count, backward, sizes, chunk)
        for backward, some in listed
        for name, reads, writes, count in some
    )


def recomputed(plan: LinearAttentionPlan) -> tuple[str, ...]:
    """Return the kernels that backward runs again if forward saves nothing."""
    names = (*_RECOMPUTED, *(["output"] if plan.finishes else []))
    return tuple(one.name for one in kernels(plan) if one.name in names)


def saved(plan: LinearAttentionPlan) -> tuple[str, ...]:
    """Return the tensors that forward keeps for backward, apart from its arguments."""
    if not (plan.backward and plan.spec.saves_states):
        return ()
    again = recomputed(plan)
    written = [n for one in kernels(plan) if one.name in again for n in one.writes]
    kept = {n: None for one in kernels(plan) if one.backward for n in one.reads if n in written}
    return tuple(name for name in dict.fromkeys(written) if name in kept)


def tensor_sizes(plan: LinearAttentionPlan) -> dict[str, Size]:
    """Return the bytes per token of each tensor by name."""
    spec, size = plan.spec, ELEMENT_SIZE[plan.spec.dtype]
    k, v, chunk = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    columns = {"K": k, "V": v, None: 1}
    found = {n: Size(size * k, "H") for n in ("q", "k", "q_mapped", "k_mapped", "dq", "dk")}
    found |= dict.fromkeys(_OF_VALUES, Size(size * v))
    found |= dict.fromkeys(("W", "dW", "dq_parts", "dk_parts"), Size(size * k))
    found |= dict.fromkeys(("P", "inverse"), Size(size * chunk))
    found |= dict.fromkeys(("A", "dP", "dA"), Size(4 * chunk))
    found |= dict.fromkeys(("G", "dG"), Size(4 * (k if plan.by_column else 1)))
    found |= dict.fromkeys(("betas", "dbetas"), Size(4))
    found |= dict.fromkeys(("states", "dstates"), Size(size * k * v / chunk))
    for name, buffer in spec.buffers.items():
        width = columns[buffer.columns]
        # The gradient of a buffer without tokens is a sum over chunks, or over blocks of rows.
        found[name] = Size(ELEMENT_SIZE[buffer.dtype] * width if buffer.tokens else 0)
        rows = _rows_of_parts(plan, name)
        found[f"grad_{name}"] = found[name] if buffer.tokens else Size(4 * width / rows)
    return found


def _rows_of_parts(plan: LinearAttentionPlan, name: str) -> int:
    """Return the number of tokens of each part of the gradient of a buffer."""
    fields = {field for field, formula in plan.formulas.items() if name in formula.slopes}
    if not fields or fields - {"output_gate", "output"}:
        return int(plan.spec.chunk_size)
    rows = tile_tables(plan)["finish_back"][0].ROWS
    assert rows is not None
    return rows


_OF_VALUES = ("v", "o", "o_raw", "U", "new", "do", "do_raw", "dnew", "dv")
"""Tensors of V columns for each token and value head, in the dtype of q."""
_Listed = tuple[str, Iterable[str], Iterable[str], int]


class _Kernels:
    """Build the list of kernels of one plan."""

    def __init__(self, plan: LinearAttentionPlan) -> None:
        self.plan, self.delta = plan, plan.delta
        size, self.c = plan.spec.head_dim, plan.spec.chunk_size
        self.k, self.v = size.qk, size.v
        self.do = "do_raw" if plan.finishes else "do"
        self.decays = ["G"] if "decay" in plan.formulas else []
        self.betas = ["betas"] if "beta" in plan.formulas else []
        self.q, self.key = (
            f"{n}_mapped" if f"{n}_map" in plan.formulas or plan.spec.qk_norm else n for n in "qk"
        )

    def read_by(self, *fields: str) -> list[str]:
        """Return the buffers that expressions read."""
        read = {n for f in fields if f in self.plan.formulas for n in self.plan.formulas[f].read}
        return [name for name in self.plan.buffers if name in read]

    def learned(self, *fields: str) -> list[str]:
        """Return the gradients of buffers through some expressions."""
        of = {n for f in fields if f in self.plan.formulas for n in self.plan.formulas[f].slopes}
        return [f"grad_{name}" for name in self.plan.learned if name in of]

    def forward(self) -> Iterator[_Listed]:
        """Yield the kernels of the forward pass."""
        c, k, v, column = self.c, self.k, self.v, self.plan.by_column
        pairs = ["P"] if column else []
        if self.decays or self.betas:
            yield "gates", self.read_by("decay", "beta"), [*self.decays, *self.betas], 0
        for name, mapped in (("q", self.q), ("k", self.key)):
            if mapped != name:
                yield f"{name}_map", [name], [mapped], 0
        if column:
            written = ["P", *(["A"] if self.delta else [])]
            reads = [self.q, self.key, "G", *(self.betas if self.delta else [])]
            # One product of all pairs for each bit of an index.
            yield "pairs", reads, written, len(written) * c * c * k * (c.bit_length() - 1)
        elif self.delta:
            yield "equations", [self.key, *self.decays, *self.betas], ["A"], c * c * k
        if self.delta:
            # Inverses of blocks of 16 rows become inverses of twice the size.
            yield "inverse", ["A"], ["inverse"], sum(c * n**2 for n in (16, 32, 64) if n < c)
            reads = [self.key, "v", *self.decays, *self.betas, "inverse"]
            yield "solve", reads, ["W", "U"], c * c * (v + k)
        updates = ["W", "U"] if self.delta else ["v", *self.betas]
        results = ["new", "states"] if self.delta else ["states"]
        count = c * k * v * (2 if self.delta else 1)
        yield "states", [self.key, *updates, *self.decays], results, count
        skip = ["v", *self.read_by("skip")] if "skip" in self.plan.formulas else []
        updates = ["new"] if self.delta else ["v", *self.betas]
        reads = [self.q, *(pairs or [self.key]), *updates, *self.decays, "states", *skip]
        count = c * k * v + c * c * v + (0 if column else c * c * k)
        yield "output", dict.fromkeys(reads), ["o_raw" if self.plan.finishes else "o"], count
        if self.plan.finishes:
            yield "finish", ["o_raw", *self.read_by("output_gate", "output")], ["o"], 0

    def backward(self) -> Iterator[_Listed]:
        """Yield the kernels of the backward pass."""
        c, k, v, column = self.c, self.k, self.v, self.plan.by_column
        pairs = ["P"] if column else [self.q, self.key, *self.decays]
        if self.plan.finishes:
            given = ["o_raw", "do", *self.read_by("output_gate", "output")]
            yield "finish_back", given, ["do_raw", *self.learned("output_gate", "output")], 0
        yield "values_back", [*pairs, self.do], ["dnew"], c * c * v + (0 if column else c * c * k)
        solution = ["W"] if self.delta else []
        reads = [self.q, self.key, self.do, *self.decays, *solution, "dnew"]
        yield "states_back", reads, ["dnew", "dstates"], c * k * v * (3 if self.delta else 2)
        yield self.keys_back()
        yield self.solve_back() if self.delta else self.updates_back()
        dG = ["dG"] if self.learned("decay") else []
        dbetas = ["dbetas"] if self.learned("beta") else []
        if column:
            equations = [*self.betas, *dbetas, "dA"] if self.delta else []
            changed = ["dq_parts", "dk_parts", *dG]
            reads = [self.q, self.key, "G", "dP", *equations, *changed]
            changed += dbetas if self.delta else []
            # Products with all rows, and one for each bit of an index among 16 rows.
            yield "pairs_back", reads, changed, c * k * (c + 64) * (4 if self.delta else 2)
        if gates := self.learned("decay", "beta"):
            yield "gates_back", [*self.read_by("decay", "beta"), *dG, *dbetas], gates, 0
        if skip := self.learned("skip"):
            yield "skip_back", ["v", self.do, *self.read_by("skip")], skip, 0
        for name, mapped in (("q", self.q), ("k", self.key)):
            raw = [name] if mapped != name else []
            yield f"{name}_map_back", [*raw, f"d{name}_parts"], [f"d{name}"], 0

    def keys_back(self) -> _Listed:
        """Return the kernel of the gradients of q and k for each value head."""
        c, k, v, column = self.c, self.k, self.v, self.plan.by_column
        updates = ["new", "dnew"] if self.delta else ["v", *self.betas]
        reads = [self.q, self.key, self.do, *updates, *self.decays, "states", "dstates"]
        writes = ["dq_parts", "dk_parts", *(["dG"] if self.learned("decay") else [])]
        writes += [*(["dW"] if self.delta else []), *(["dP"] if column else [])]
        count = c * c * v + c * k * v * (3 if self.delta else 2)
        return "keys_back", reads, writes, count + (0 if column else 2 * c * c * k)

    def solve_back(self) -> _Listed:
        """Return the kernel of the gradients of the triangular system."""
        c, k, v, column = self.c, self.k, self.v, self.plan.by_column
        skip = [self.do, *self.read_by("skip")] if "skip" in self.plan.formulas else []
        changed = ["dk_parts", *(["dG"] if self.learned("decay") else [])]
        dbetas = ["dbetas"] if self.learned("beta") else []
        given = ["inverse", "dnew", "dW", *changed]
        reads = [self.key, "v", *skip, *self.decays, *self.betas, *given]
        writes = [*changed, *dbetas, *(["dA"] if column else []), "dv"]
        count = 2 * c * c * (c + k + v) + (0 if column else 2 * c * c * k)
        return "solve_back", reads, writes, count

    def updates_back(self) -> _Listed:
        """Return the kernel of dv without the delta rule."""
        skip = [self.do, *self.read_by("skip")] if "skip" in self.plan.formulas else []
        dbetas = ["dbetas"] if self.learned("beta") else []
        values = ["v"] if skip or dbetas else []
        return "updates_back", [*values, *skip, *self.betas, "dnew"], [*dbetas, "dv"], 0
