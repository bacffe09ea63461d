"""Gradients of buffers in the launcher: the tensors that kernels write, and their reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgen.expr.nodes import reads, variables
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient
from kgen.kernels.attention.targets.triton.interface import Interface
from kgen.kernels.attention.targets.triton.torch_indices import POSITIONS, torch_index

_POSITION = {"q": "q_idx", "kv": "kv_idx"}


@dataclass(frozen=True)
class GradientSums:
    """The gradients of a backward pass other than dq, dk and dv."""

    learned: list[str]
    """The buffers that have a gradient."""
    made: tuple[tuple[str, str], ...]
    """The tensors that kernels write, as (name, expression) pairs."""
    reductions: list[str]
    """The statements that compute gradients from `made`."""
    returned: list[str]
    """The gradients to return to autograd, one per argument."""
    scattered: bool
    """True if sums are scattered to elements by index."""
    read: bool
    """True if these indices read a buffer."""

    @property
    def sum_lines(self) -> list[str]:
        """The statements that allocate the tensors that kernels write."""
        return [f"{name} = {made}" for name, made in self.made]

    @property
    def sum_names(self) -> list[str]:
        """The names of these tensors."""
        return [name for name, _ in self.made]

    @property
    def learned_gradients(self) -> list[str]:
        """The gradients, by the names in the caller of the operator."""
        return [f"d{name}" for name in self.learned]

    @property
    def gradient_results(self) -> list[str]:
        """The gradients as the operator has them."""
        return [f"grad_{name}" for name in self.learned]

    @property
    def gradient_fakes(self) -> list[str]:
        """Empty tensors with the shapes of the gradients."""
        return [f"{name}.new_empty({name}.shape)" for name in self.learned]

    @property
    def gradient_types(self) -> str:
        """The type of the operator's result."""
        return f"tuple[{', '.join(['Tensor'] * (3 + len(self.learned)))}]"


def learned_of(plan: AttentionPlan) -> list[str]:
    """Return the buffers with a gradient."""
    if not plan.backward:
        return []
    # Order: first by reads in the score, then the buffers that simplification removed from it.
    asked = [g.buffer for g in plan.gradients] + [n for n, b in plan.spec.buffers.items() if b.grad]
    return [*dict.fromkeys(asked), *(("sinks",) if plan.spec.sinks else ())]


def gradient_sums(
    interface: Interface, others: Sequence[str], scalars: Sequence[str]
) -> GradientSums:
    """Return the gradients of a plan with a backward pass. `others` are the tensors after q, k and
    v.
    """
    plan, learned = interface.plan, learned_of(interface.plan)
    scattered = [g for g in plan.gradients if g.summed is None and g.along != "pair"]
    of_others = [f"d{name}" if name in learned else "None" for name in others]
    sinks = (
        [f"d_sinks = d_sinks.sum({'1' if plan.spec.varlen else '(0, 2)'})"]
        if plan.spec.sinks
        else []
    )
    lines = [line for g in plan.gradients for line in _reduction(interface, g)]
    return GradientSums(
        learned=learned,
        made=tuple(_made(plan)),
        reductions=[*lines, *sinks, *(_total(plan, buffer) for buffer in learned)],
        returned=["dq", "dk", "dv", *of_others, *("None" for _ in scalars)],
        scattered=bool(scattered),
        read=any(reads(i) for g in scattered for i in g.indices),
    )


def _made(plan: AttentionPlan) -> list[tuple[str, str]]:
    """Return the tensors that receive sums of gradients, as (name, expression) pairs."""
    packed = plan.spec.varlen
    made = [(f"d_{g.name}", _sum_of(g, packed)) for g in plan.gradients]
    if plan.spec.sinks:
        shape = "HQ, _cdiv(TQ, 64)" if packed else "B, HQ, _cdiv(SQ, 64)"
        made.append(("d_sinks", f"q.new_zeros(({shape}), dtype=torch.float32)"))
    return made


def _sum_of(g: ReadGradient, packed: bool) -> str:
    if g.along == "pair" and g.summed is not None:
        sizes = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}
        return f"{g.buffer}.new_empty(({', '.join(sizes[n] for n in g.summed)}))"
    if g.along == "pair":
        return f"torch.zeros({g.buffer}.shape, dtype=torch.float32, device=q.device)"
    shape = "B, HQ, SQ + SK"
    if g.along != "distance":
        length = "Q" if g.along == "q" else "K"
        shape = f"HQ, T{length}" if packed else f"B, HQ, S{length}"
    return f"q.new_zeros(({shape}), dtype=torch.float32)"


def _reduction(interface: Interface, g: ReadGradient) -> list[str]:
    """Return the lines that reduce the tensor of a kernel to the gradient."""
    if g.along == "pair":
        return []
    if g.along == "distance":
        return _by_distance(interface, g)
    if g.summed is None:
        return _scattered(interface, g)
    position, packed = _POSITION[g.along], interface.spec.varlen
    dims = ["h", position] if packed else ["b", "h", position]
    summed = [i for i, d in enumerate(dims) if d not in g.summed]
    kept = [d for d in dims if d in g.summed]
    total = f"d_{g.name}"
    if summed:
        total += f".sum(({', '.join(map(str, summed))}{',' if len(summed) == 1 else ''}))"
    order = [kept.index(n) for n in g.summed]
    if order != sorted(order):
        total += f".permute({', '.join(map(str, order))})"
    return [f"d_{g.name} = {total}"]


def _scattered(interface: Interface, g: ReadGradient) -> list[str]:
    """Return the lines that add a value per row to an element of the buffer."""
    packed = interface.spec.varlen
    # In packed sequences each token has its own lengths.
    tensors = POSITIONS | {"SQ", "SK"} if packed else POSITIONS
    index = ", ".join(torch_index(interface.folded(i), tensors) for i in g.indices)
    added = f"d_{g.name} = _scatter(d_{g.name}, ({index},), {g.buffer})"
    if packed:
        return [*_tokens(g), added]
    length = "SQ" if g.along == "q" else "SK"
    ranges = f"(torch.arange(n, device=q.device) for n in (B, HQ, {length}))"
    return [f'b, h, {_POSITION[g.along]} = torch.meshgrid(*{ranges}, indexing="ij")', added]


def _total(plan: AttentionPlan, buffer: str) -> str:
    """Return the sum of a buffer's gradients over all of its reads."""
    parts = [f"d_{g.name}" for g in plan.gradients if g.buffer == buffer]
    if plan.spec.sinks and buffer == "sinks":
        parts.append("d_sinks")
    if not parts:
        return f"grad_{buffer} = torch.zeros_like({buffer}, memory_format=torch.contiguous_format)"
    total = " + ".join(parts) if len(parts) == 1 else f"({' + '.join(parts)})"
    return f"grad_{buffer} = {total}.to({buffer}.dtype).contiguous()"


def _by_distance(interface: Interface, g: ReadGradient) -> list[str]:
    """Return the lines that reduce sums by distance over absent indices, and scatter them to the
    elements.
    """
    used = frozenset().union(*(variables(i) for i in g.indices))
    sizes = {"b": "B", "h": "HQ"}
    absent = [i for i, n in enumerate(sizes) if n not in used]
    total = f"d_{g.name}.sum({absent})" if absent else f"d_{g.name}"
    ranges = {n: f"torch.arange({size}, device=q.device)" for n, size in sizes.items() if n in used}
    ranges["distance"] = "torch.arange(-SK, SQ, device=q.device)"
    grid = ", ".join(ranges) + "," * (len(ranges) == 1)
    index = ", ".join(torch_index(interface.folded(i)) for i in g.indices)
    return [
        f'{grid} = torch.meshgrid({", ".join(ranges.values())}, indexing="ij")',
        f"d_{g.name} = _scatter({total}, ({index},), {g.buffer})",
    ]


def _tokens(g: ReadGradient) -> list[str]:
    """Return the positions, heads and sequences of packed tokens, from which gradient indices are
    computed.
    """
    x = g.along[0]
    side = {"q": "q", "k": "k"}[x]
    used = frozenset().union(*(variables(i) for i in g.indices))
    lines = [
        f"token_idx = torch.arange(T{side.upper()}, dtype=torch.int32, device=q.device)",
        "h = torch.arange(HQ, device=q.device)[:, None]",
        f"b = torch.bucketize(token_idx, cu_seqlens_{side}[1:], right=True)",
    ]
    position = "q_idx" if x == "q" else "kv_idx"
    if position in used:
        lines.append(f"{position} = token_idx - cu_seqlens_{side}[b]")
    lengths = (("SQ", "q"), ("SK", "k"))
    # Tokens after the last sequence have no length and contribute zero.
    return lines + [
        f"{n} = cu_seqlens_{s}.diff()[b.clamp(max=B - 1)]" for n, s in lengths if n in used
    ]
