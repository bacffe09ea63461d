"""The chunked form against the recurrence: all kernels run on a small call, exactly.

The file is rendered with 4 columns of keys and 2 of values, and tiles of half of them. The chunks
have the size of the spec. One sequence has a whole chunk and a short one. A second call has several
sequences and heads of keys, which show wrong numbers of sequences and heads. Its chunks are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from random import Random
from typing import Any

import z3

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan, plan_linear_attention
from kgen.kernels.linear_attention.prove.claims import EXACT, EXACT_BACK, EXACT_STEP
from kgen.kernels.linear_attention.prove.recurrence import Recurrence, Sizes, decay, unknown
from kgen.kernels.linear_attention.prove.setting import decoding, forward_and_backward
from kgen.kernels.linear_attention.schedules import CHOICES
from kgen.prove.arrays import PRIME, Array, field_of, root, strides, summed
from kgen.prove.exact import ExactWalker, Outside
from kgen.prove.functions import Beyond
from kgen.prove.lanes import Tensor
from kgen.prove.launching import LauncherWalker
from kgen.prove.obligations import Obligation
from kgen.prove.walking import File
from kgen.spec.load import Loaded
from kgen.spec.names import named_apart

K, V = 4, 2
TILE = {"BLOCK_K": 2, "BLOCK_V": 1, "ROWS": 16}
OF_ROWS = ("_finish_kernel", "_finish_back_kernel")
"""The kernels of the output's norm and expression, whose roots a field may lack."""
Text = Callable[[Loaded], str]
Wrong = Iterator[tuple[str, str, dict[str, str]]]
"""A kernel, its obligation, and tensors with messages, which are empty if nothing is wrong."""


@dataclass(frozen=True)
class Extent:
    """The sizes of a call. `words` follow the names of its tensors."""

    words: str
    B: int
    H: int
    HV: int
    chunk: int | None = None
    """The size of chunks, if it is not that of the spec."""


EXTENTS = (
    Extent("", B=1, H=1, HV=2),
    Extent(" of several sequences and heads", B=2, H=2, HV=4, chunk=16),
)


@dataclass
class Call:
    """A call with random inputs, and the memory of its tensors."""

    plan: LinearAttentionPlan
    file: File
    sizes: Sizes
    tensors: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, list[Any]] = field(default_factory=dict)
    random: Random = field(default_factory=lambda: Random(0))
    scale: int = 12345

    def add(self, name: str, *shape: int, values: Sequence[int] | None = None) -> None:
        """Add an input with random elements, or with these."""
        self.tensors[name] = Tensor(name, shape, integer=values is not None)
        self.memory[name] = list(values) if values is not None else self.numbers(prod(shape))

    def numbers(self, count: int) -> list[int]:
        """Return random numbers."""
        return [self.random.randrange(1, PRIME) for _ in range(count)]

    def launch(self, launcher: LauncherWalker) -> None:
        """Run the launches of a launcher."""
        stubs: dict[str, Callable[..., int]] = {"_decay": decay}
        for name, of in self.plan.formulas.items():
            stubs.setdefault(f"_{name}", unknown(name))
            stubs |= {f"_{name}_by_{x}": unknown(f"{name}_by_{x}") for x in of.slopes}
        kernels = ExactWalker(self.file, memory=self.memory, stubs=stubs)
        for launch in launcher.launches:
            for tensor in launch.arguments.values():
                if isinstance(tensor, Tensor) and tensor.name not in self.memory:
                    count = prod(tensor.shape)
                    made = [0] * count if tensor.zeros else self.numbers(count)
                    self.memory[tensor.name] = made
            if launch.kernel not in OF_ROWS:
                kernels.launch(launch.kernel, launch.programs.as_long(), launch.arguments)

    def recurrence(self, varied: str = "", direction: Sequence[int] = ()) -> Recurrence:
        """Return the recurrence of the inputs."""
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return Recurrence(self.plan, self.sizes, shapes, self.memory, self.scale, varied, direction)


def small(loaded: Loaded, chunk: int | None) -> Loaded:
    """Return a spec with few columns, which no check of specs allows."""
    spec = loaded.spec
    head_dim = type(spec.head_dim).model_construct(qk=K, v=V)
    changes = {"head_dim": head_dim, "chunk_size": chunk or spec.chunk_size}
    return replace(loaded, spec=spec.model_copy(update=changes))


def call_of(loaded: Loaded, text: str, extent: Extent) -> Call:
    """Return a call of the file of a small spec."""
    plan = plan_linear_attention(named_apart(loaded))
    chunk, packed = plan.spec.chunk_size, plan.spec.varlen
    H, HV = extent.H, extent.HV
    T, B = (chunk + 7, 1) if packed else (chunk + 3, extent.B)
    offsets = [0, chunk + 3, chunk + 3, chunk + 5]
    rows = [(row, 0, T) for row in range(B)]
    sequences = tuple((0, *ends) for ends in pairwise(offsets)) if packed else tuple(rows)
    call = Call(plan, File.of(text), Sizes(H, HV, K, V, sequences))
    for name, heads, width in (("q", H, K), ("k", H, K), ("v", HV, V), ("do", HV, V)):
        call.add(name, B, T, heads, width)
    for name in ("initial_state", "dfinal_state", "state"):
        call.add(name, len(sequences), HV, K, V)
    call.add("states", B, T, HV, K, V)
    for name, buffer in plan.spec.buffers.items():
        of = {"T": (B, T), "HV": (HV,), "K": (K,), "V": (V,)}
        call.add(name, *(size for one in buffer.shape for size in of[one]))
    if packed:
        call.add("cu_seqlens", len(offsets), values=offsets)
    _norms_have_roots(call, B, T)
    return call


def _norms_have_roots(call: Call, B: int, T: int) -> None:
    """Choose rows of q and k whose sum of squares plus eps is a square."""
    eps = call.plan.spec.norm_eps
    if eps is None:
        return
    for name in ("q", "k"):
        function = unknown(f"{name}_map") if f"{name}_map" in call.plan.formulas else None
        for start in range(0, B * T * call.sizes.H * K, K):
            while True:
                row = call.memory[name][start : start + K]
                mapped = row if function is None else [function(x) for x in row]
                if root(sum(x * x for x in mapped) + field_of(eps)):
                    break
                call.memory[name][start : start + K] = call.numbers(K)


def exact(loaded: Loaded, text_of: Text) -> Iterator[Obligation]:
    """Yield that results and gradients of the kernels are those of the recurrence."""
    steps = {("forward", EXACT): _whole}
    if "decode" in loaded.spec.passes:
        steps["decode", EXACT_STEP] = _decoded
    for (kernel, what), step in steps.items():
        wrong: dict[tuple[str, str], dict[str, str]] = {}
        try:
            for extent in EXTENTS:
                own = small(loaded, extent.chunk)
                for *key, found in step(call_of(own, text_of(own), extent)):
                    named = {f"{name}{extent.words}": message for name, message in found.items()}
                    wrong.setdefault((key[0], key[1]), {}).update(named)
        except Beyond as beyond:
            yield Obligation(kernel, what, beyond=str(beyond))
            continue
        except Outside as outside:
            yield _stated(kernel, what, {"": str(outside)})
            continue
        for (of, claim), found in wrong.items():
            yield _stated(of, claim, found)


def _whole(call: Call) -> Wrong:
    """Yield the tensors of forward and backward that differ from the recurrence."""
    launcher = LauncherWalker(call.file, tile=TILE, declined=CHOICES)
    gradients = forward_and_backward(launcher, call.tensors, call.plan.learned, call.scale)
    call.launch(launcher)
    out, final = call.recurrence().run()
    found = {"o": out, "final_state": final}
    yield "forward", EXACT, {n: _differs(call, n, x) for n, x in found.items()}
    if gradients:
        yield "backward", EXACT_BACK, dict(_wrong_gradients(call, gradients))


def _stated(kernel: str, what: str, wrong: Mapping[str, str]) -> Obligation:
    """Return an obligation with a part for each tensor, which holds if nothing is wrong."""
    parts = [(f"{name}{message}", z3.BoolVal(not message)) for name, message in wrong.items()]
    return Obligation(kernel, what, parts=parts)


def _differs(call: Call, name: str, wanted: Mapping[tuple[int, ...], tuple[int, int]]) -> str:
    """Return where a tensor first differs from the recurrence, or nothing."""
    shape = call.tensors["v" if name == "o" else "initial_state"].shape
    steps = strides(shape)
    for index, (value, _) in wanted.items():
        got = call.memory[name][sum(i * s for i, s in zip(index, steps, strict=True))]
        if (got - value) % PRIME:
            return f" differs at {list(index)}"
    return ""


def _wrong_gradients(call: Call, gradients: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield each input with a message if its gradient is wrong along a random direction."""
    formulas, rows = call.plan.formulas, ("output_gate", "output")
    through = {n for f, of in formulas.items() if f in rows for n in of.slopes}
    do = "do_raw" if call.plan.finishes else "do"
    for name, tensor in gradients.items():
        if name in through:
            continue
        direction = call.numbers(prod(tensor.shape))
        out, final = call.recurrence(name, direction).run()
        wanted = _sum(call, do, "v", out) + _sum(call, "dfinal_state", "initial_state", final)
        got = sum(a * b for a, b in zip(_value(call, tensor), direction, strict=True))
        yield f"the gradient of {name}", " differs" if (got - wanted) % PRIME else ""


def _sum(call: Call, factor: str, of: str, found: Mapping[tuple[int, ...], Any]) -> int:
    """Return the derivative of the sum of products of results and their gradients."""
    steps, values = strides(call.tensors[of].shape), call.memory[factor]
    return sum(
        values[sum(i * s for i, s in zip(index, steps, strict=True))] * change
        for index, (_, change) in found.items()
    )


def _value(call: Call, tensor: Tensor) -> list[int]:
    """Return the elements of a gradient, which may be a sum of sums of parts."""
    if not tensor.terms:
        return call.memory[tensor.name]
    total = [0] * prod(tensor.shape)
    for term in tensor.terms:
        one = Array(tuple(term.tensor.shape), call.memory[term.tensor.name])
        for axis in sorted(term.axes, reverse=True):
            one = summed(one, axis)
        total = [a + b for a, b in zip(total, one.data, strict=True)]
    return total


def _decoded(call: Call) -> Wrong:
    """Yield the tensors of decoding that differ from the recurrence."""
    call.memory["initial_state"] = list(call.memory["state"])
    launcher = LauncherWalker(call.file, tile=TILE, declined=CHOICES)
    decoding(launcher, call.tensors, call.scale)
    call.launch(launcher)
    out, final = call.recurrence().run()
    found = {"o": out, "state": final}
    yield "decode", EXACT_STEP, {n: _differs(call, n, x) for n, x in found.items()}
