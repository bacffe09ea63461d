"""Tensors and matrix products of each kernel, from which `kgen explain` computes bytes and
products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kgen.kernels.linear_attention.plan.planning import ELEMENT_SIZE, LinearAttentionPlan


@dataclass(frozen=True)
class Size:
    """Bytes of a tensor per token and head."""

    bytes: float
    heads: str
    """`H` for q and k, `HV` for all others."""

    def of(self, heads: int, heads_v: int) -> float:
        """Return the bytes per token of H heads and HV value heads."""
        return self.bytes * (heads if self.heads == "H" else heads_v)


@dataclass(frozen=True)
class Kernel:
    """One kernel: the tensors that it reads and writes, and its products.

    A product (m, n, k) multiplies [m, k] by [k, n], once for each chunk of a value head.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    matrices: tuple[tuple[int, int, int], ...]
    sizes: Mapping[str, Size]
    chunk: int

    def bytes(self, heads: int, heads_v: int) -> float:
        """Return the bytes per token if every tensor is read and written once."""
        return sum(self.sizes[name].of(heads, heads_v) for name in (*self.reads, *self.writes))

    def products(self, heads_v: int) -> float:
        """Return the multiplications of matrix products per token."""
        return heads_v * sum(m * n * k for m, n, k in self.matrices) / self.chunk


def kernels(plan: LinearAttentionPlan) -> tuple[Kernel, ...]:
    """Return the kernels of the forward pass, then of the backward pass."""
    sizes, chunk = tensor_sizes(plan), plan.spec.chunk_size
    return tuple(
        Kernel(name, tuple(reads), tuple(writes), tuple(matrices), sizes, chunk)
        for name, reads, writes, matrices in _listed(plan)
    )


def tensor_sizes(plan: LinearAttentionPlan) -> dict[str, Size]:
    """Return the bytes per token of each tensor by name. G, W, N and S are those of the chunked
    form.
    """
    spec, size = plan.spec, ELEMENT_SIZE[plan.spec.dtype]
    k, v, chunk = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    by_heads = {
        "v": size * v,
        "o": size * v,
        "N": size * v,
        "W": size * k,
        "U": size * v,
        "G": 4 * (k if plan.by_column else 1),
        "S": size * k * v / chunk,
    }
    by_heads |= {
        name: ELEMENT_SIZE[buffer.dtype]
        * ({"K": k, "V": v, None: 1}[buffer.columns] if buffer.tokens else 0)
        for name, buffer in spec.buffers.items()
    }
    found = {name: Size(one, "HV") for name, one in by_heads.items()}
    found |= dict.fromkeys(("q", "k"), Size(size * k, "H"))
    return found | {f"d{name}": of for name, of in found.items()}


_Listed = tuple[str, list[str], list[str], list[tuple[int, int, int]]]


def _listed(plan: LinearAttentionPlan) -> Iterator[_Listed]:
    yield from _forward(plan)
    if plan.backward:
        yield from _backward(plan)


def _forward(plan: LinearAttentionPlan) -> Iterator[_Listed]:
    spec = plan.spec
    k, v, c = spec.head_dim.qk, spec.head_dim.v, spec.chunk_size
    gate, beta, skip = (_buffers(plan, field) for field in ("decay", "beta", "skip"))
    decays = ["G"] if "decay" in plan.formulas else []
    if decays:
        yield "sums", gate, ["G"], []
    if plan.delta:
        inverse = [(c, c, c)]
        yield (
            "solve",
            ["k", "v", *beta, *decays],
            ["W", "U"],
            [
                (c, c, k),
                *inverse,
                (c, k, c),
                (c, v, c),
            ],
        )
        yield "states", ["k", "W", "U", *decays], ["N", "S"], [(c, v, k), (k, v, c)]
    else:
        yield "states", ["k", "v", *beta, *decays], ["S"], [(k, v, c)]
    new = ["N", *(["v"] if "skip" in plan.formulas else [])] if plan.delta else ["v", *beta]
    reads = dict.fromkeys(["q", "k", *new, *decays, "S", *skip])
    yield "output", [*reads], ["o"], [(c, v, k), (c, c, k), (c, v, c)]


def _backward(plan: LinearAttentionPlan) -> Iterator[_Listed]:
    return iter(())


def _buffers(plan: LinearAttentionPlan, field: str) -> list[str]:
    """Return the buffers of an expression that have tokens."""
    formula = plan.formulas.get(field)
    return [
        name
        for name in plan.buffers
        if formula is not None and name in formula.read and plan.spec.buffers[name].tokens
    ]
