"""The arguments of an attention function: names, docstring lines, and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kgen.expr.nodes import Const, Node, Var, buffers_of, measured, substitute, variables
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.spec import ANY, KV_LENS, Buffer
from kgen.spec.common import REALS
from kgen.targets.arguments import cast_lines, divisor_lines, divisors
from kgen.targets.triton.text import TORCH_DTYPES, dtype_words, other_dtype

_TYPES = {"int": "int", "float": "float"}


@dataclass(frozen=True)
class Check:
    """A condition under which the function rejects a call."""

    wrong: str
    """The condition that is true for a wrong call."""
    message: str
    error: str = "ValueError"
    shows_dtype: bool = False
    """True if the message calls `_dtype` of `_launch.py`."""


def dtype_check(name: str, called: str, dtypes: Sequence[str]) -> Check:
    words = f"{called} must be a tensor of {dtype_words(dtypes)}, got {{_dtype({name})}}"
    return Check(other_dtype(name, dtypes), words, "TypeError", shows_dtype=True)


def _differs(name: str, sizes: Sequence[str]) -> str:
    """Return the condition that a tensor has another shape. Open extents are not compared."""
    if ANY not in sizes:
        return f"{name}.shape != ({', '.join(sizes)}{',' * (len(sizes) == 1)})"
    wrong = [f"{name}.dim() != {len(sizes)}"]
    wrong += [f"{name}.shape[{axis}] != {size}" for axis, size in enumerate(sizes) if size != ANY]
    return " or ".join(wrong)


def heads_rule(gqa: int) -> str:
    """Return the condition on the numbers of heads, for messages."""
    return (
        f"q must have {f'{gqa} heads for each head of' if gqa > 1 else 'as many heads as'} k and v"
    )


def real_dtypes(buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """Return the required PyTorch dtypes of the floating-point buffers, by name."""
    return {n: f"torch.{TORCH_DTYPES[b.dtype]}" for n, b in buffers.items() if b.dtype in REALS}


class Interface:
    """The arguments of one plan's function."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.runtime = {n: p for n, p in self.spec.params.items() if p.runtime}

    def called(self, name: str) -> str:
        """Return the public name of one of the kernels."""
        return self.plan.called.get(name, name)

    def folded(self, node: Node) -> Node:
        """Return an expression with compile-time parameters replaced by numbers."""
        return substitute(
            node,
            {
                Var(n, p.scalar): Const(p.value, p.scalar)
                for n, p in self.spec.params.items()
                if p.value is not None
            },
        )

    def divisor_lines(self, params: Iterable[str]) -> list[str]:
        """Return the checks of the divisors in both expressions."""
        trees = [self.folded(t) for t in (self.plan.score_mod, self.plan.mask_mod) if t is not None]
        return divisor_lines(self.spec.name, trees, params, self.plan.called)

    def required(self) -> list[str]:
        """Return the keywords without a default, in the callers' notation."""
        spec = self.spec
        tables = ["block_table"] if spec.paged_kv is not None else []
        sinks = ["sinks"] if spec.sinks else []
        return [*tables, *map(self.called, spec.buffers), *sinks, *map(self.called, self.runtime)]

    def kv_sizes(self) -> str:
        """Number of KV heads and number of keys, as expressions."""
        if self.spec.paged_kv is None:
            return "k.shape[1], k.shape[2]"
        return f"k.shape[2], block_table.shape[1] * {self.spec.paged_kv.page_size}"

    def checked_sizes(self) -> str:
        """Return the statement for the sizes in checks.

        With pages, SK is omitted unless a check needs it.
        """
        spec = self.spec
        if spec.varlen:
            return "TK, HKV = k.shape[0], k.shape[1]"
        dims = {dim for buffer in spec.buffers.values() for dim in buffer.shape}
        promised = getattr(spec.lengths.kv, "multiple_of", 1) > 1 or self.plan.self_attention
        if spec.paged_kv is None or "SK" in dims or promised or self.plan.block_mask is not None:
            return f"HKV, SK = {self.kv_sizes()}"
        return "HKV = k.shape[2]"

    def k_shape(self) -> str:
        if self.spec.varlen:
            return "TK, HKV"
        return (
            f"k.shape[0], {self.spec.paged_kv.page_size}, HKV"
            if self.spec.paged_kv
            else "B, HKV, SK"
        )

    def gqa_words(self) -> str:
        """Return how HQ relates to HKV, for `HQ is ... HKV`."""
        words = {"any": "a multiple of", 1: "equal to"}
        return words.get(self.spec.gqa, f"{self.spec.gqa} times")

    def kv_shapes(self) -> str:
        head, paged = self.spec.head_dim, self.spec.paged_kv
        if self.spec.varlen:
            return f"k [TK, HKV, {head.qk}], v [TK, HKV, {head.v}]"
        if paged is None:
            return f"k [B, HKV, SK, {head.qk}], v [B, HKV, SK, {head.v}]"
        return (
            f"k [pages, {paged.page_size}, HKV, {head.qk}], v [pages, {paged.page_size}, HKV, "
            f"{head.v}]"
        )

    def operand_shapes(self) -> str:
        """Return the shapes of q, k and v by name, as keyword arguments."""
        if self.spec.varlen:
            q, kv = "[TQ, HQ, D]", "[TK, HKV, D]"
        else:
            q = "[B, HQ, SQ, D]"
            kv = "[B, HKV, SK, D]" if self.spec.paged_kv is None else "[pages, page_size, HKV, D]"
        return f'q="{q}", k="{kv}", v="{kv}"'

    def all_argument_words(self) -> list[str]:
        """Return the docstring lines for all arguments."""
        spec = self.spec
        words = []
        if spec.paged_kv is not None:
            words.append(
                "block_table: [B, n] int32, the page indices of each sequence in order. They are "
                "not checked. "
                f"SK = {spec.paged_kv.page_size} * n."
            )
        words += self.argument_words(spec.buffers, ())
        if spec.sinks:
            words.append(
                f"sinks: [HQ] {dtype_words(REALS)}, logits in the softmax that have no row of v."
            )
        words += self.argument_words((), self.runtime)
        if self.plan.block_mask is not None:
            words.append(
                f"block_mask: a result of {spec.name}_block_mask for these sizes. "
                "Without it, every call builds one."
            )
        if spec.aligned_to_end:
            keys = "kv_lens[b]" if spec.per_batch else "SK"
            words.append(
                f"Query i has position {keys} - SQ + i, so the last query has the position of the "
                "last key."
            )
        return words

    def argument_words(self, buffers: Iterable[str], scalars: Iterable[str]) -> list[str]:
        """Return the docstring lines for some buffers and run-time parameters."""
        words = []
        for name in buffers:
            b = self.spec.buffers[name]
            shape = f"[{', '.join(map(str, b.shape))}] {dtype_words(b.dtypes)}"
            role = (
                ", number of keys per sequence, at most SK; not checked. Later keys are not read"
            ) * (name == KV_LENS)
            role += self._used_by(name) * (name != KV_LENS)
            promised = ", ascending" * b.sorted
            promised += f", within {b.within} of zero" * (b.within is not None)
            words.append(f"{self.called(name)}: {shape}{promised}{role}.")
        return words + [
            f"{self.called(n)}: {self.runtime[n].type}{self._used_by(n)}." for n in scalars
        ]

    def _used_by(self, name: str) -> str:
        """Name the expressions that use a buffer or a parameter, for docstrings."""
        trees = {"score_mod": self.plan.score_mod, "mask_mod": self.plan.mask_mod}
        users = [
            field
            for field, tree in trees.items()
            if tree is not None and name in variables(tree) | {*buffers_of(tree)}
        ]
        return f", used by {' and '.join(users)}" if users else ", used by no expression"

    def checks(self) -> list[Check]:
        """All checks, in the order in which the function makes them."""
        spec = self.spec
        queries, keys = ("TQ", "TK") if spec.varlen else ("SQ", "SK")
        if spec.paged_kv:
            keys = f"block_table.shape[1] * {spec.paged_kv.page_size}"
        # Kernels compute positions, and their sums and differences, in int32.
        lengths = Check(
            f"max({queries}, {keys}) > 2**29",
            f"there may be at most 2**29 queries and 2**29 keys, got {{{queries}}} and {{{keys}}}",
        )
        most = self.widest_step()
        apart = Check(
            f"max(q.stride(-1), k.stride(-1), v.stride(-1)) > {most}",
            f"the last stride of q, k and v must be at most {most}: make them contiguous",
        )
        packed = _PACKED if spec.varlen else ()
        numbers = [*self.length_checks(), *self.scalar_checks(self.runtime)]
        buffers = self.buffer_checks(spec.buffers, "q.device")
        sinks = SINK_CHECKS if spec.sinks else ()
        return [self._heads(), *packed, lengths, *numbers, apart, *buffers, *sinks]

    def _heads(self) -> Check:
        gqa = self.spec.gqa
        if gqa == "any":
            words = "q has {HQ} heads, which is not a multiple of the {HKV} heads of k and v"
            return Check("HKV == 0 or HQ % HKV", words)
        wrong = "HQ != HKV" if gqa == 1 else f"HQ != {gqa} * HKV"
        return Check(wrong, f"{heads_rule(gqa)}, got {{HQ}} and {{HKV}}")

    def widest_step(self) -> str:
        """Return the maximum stride of columns, in elements. Kernels compute column times stride in
        int32.
        """
        return f"2**{31 - (max(self.spec.head_dim.qk, self.spec.head_dim.v) - 1).bit_length()}"

    def length_checks(self) -> list[Check]:
        """Return the checks of SQ and SK: promised multiples, and equality if buffers require
        it.
        """
        checks = []
        for size, length in (("SQ", self.spec.lengths.q), ("SK", self.spec.lengths.kv)):
            multiple = getattr(length, "multiple_of", None)
            if multiple and multiple > 1:
                message = f"{size} must be a multiple of {multiple}, got {{{size}}}"
                checks.append(Check(f"{size} % {multiple}", message))
        if self.plan.self_attention:
            checks.append(Check("SQ != SK", "q and k must have the same length, got {SQ} and {SK}"))
        return checks

    def scalar_checks(self, names: Iterable[str]) -> list[Check]:
        """Return the checks of run-time parameters."""
        bounds = {n: self.runtime[n].most_spelled for n in names if self.runtime[n].type == "int"}
        return [
            Check(
                f"abs({name}) > {most}",
                f"{self.called(name)} must lie within {most} of zero, got {{{name}}}",
            )
            for name, most in bounds.items()
        ]

    def casts(self, names: Iterable[str]) -> list[str]:
        """Return the statements that cast buffers under autocast."""
        return cast_lines(real_dtypes({n: self.spec.buffers[n] for n in names}))

    def buffer_checks(
        self, names: Iterable[str], device: str, params: Iterable[str] | None = None
    ) -> list[Check]:
        """Return the checks of buffers, which must be on `device`.

        `params` are run-time parameters, by default all.
        """
        names, checks = list(names), []
        sequences = "len(cu_seqlens_q) - 1"
        for name in names:
            buffer, called = self.spec.buffers[name], self.called(name)
            # Packed tensors have no batch dimension.
            sizes = [sequences if s == "B" and self.spec.varlen else str(s) for s in buffer.shape]
            checks.append(dtype_check(name, called, buffer.dtypes))
            if not sizes:
                wrong = f"{name}.dim() or {name}.device != {device}"
                words = f"{called} must be a tensor without dimensions on {{{device}}}, "
                checks.append(
                    Check(wrong, f"{words}got {{list({name}.shape)}} on {{{name}.device}}")
                )
                continue
            words = ", ".join(s if s.isdecimal() or s == ANY else f"{{{s}}}" for s in sizes)
            checks.append(
                Check(
                    f"{_differs(name, sizes)} or {name}.device != {device}",
                    (
                        f"{called} must be [{words}] on {{{device}}}, got {{list({name}.shape)}} "
                        f"on {{{name}.device}}"
                    ),
                )
            )
            length = f"{name}.shape[-1]" if sizes[-1] == ANY else sizes[-1]
            last = str(int(length) - 1) if length.isdecimal() else f"({length} - 1)"
            # As columns of q, k and v.
            row = f"a row of {called}" if len(sizes) > 1 else called
            checks.append(
                Check(
                    f"{last} * {name}.stride(-1) >= 2**31",
                    f"{row} must span fewer than 2**31 elements: make it contiguous",
                )
            )
        return checks + self._length_checks(names, self.runtime if params is None else params)

    def _length_checks(self, buffers: Sequence[str], params: Iterable[str]) -> list[Check]:
        """Return the checks of lengths in expressions. Kernels add them to positions in int32."""
        trees = [self.folded(t) for t in (self.plan.score_mod, self.plan.mask_mod) if t is not None]
        used = dict.fromkeys(name for tree in trees for name in sorted(variables(tree)))
        lengths = {name: of for name in used if (of := measured(name)) and of[0] in buffers}
        spelled = {name: f"{buffer}.shape[{axis}]" for name, (buffer, axis) in lengths.items()}
        checks = []
        for name, (buffer, axis) in lengths.items():
            words = f"{self.called(buffer)} may have at most 2**29 elements along dimension {axis}"
            checks.append(Check(f"{spelled[name]} > 2**29", f"{words}, got {{{spelled[name]}}}"))
        known = {**{param: param for param in params}, **spelled}
        for divisor, in_python, message in divisors(trees, known, self.plan.called):
            if variables(divisor) & spelled.keys():
                checks.append(Check(f"{in_python} == 0", message))
        return checks


_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
_PACKED = (
    *(dtype_check(name, name, ("int32",)) for name in _ENDS),
    Check(
        (
            "cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or "
            "len(cu_seqlens_q) < 2"
        ),
        "cu_seqlens_q and cu_seqlens_k must both be [N + 1] for N sequences, "
        "got {list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}",
    ),
    Check(
        f"any(x.device != q.device or not x.is_contiguous() for x in ({', '.join(_ENDS)}))",
        "cu_seqlens_q and cu_seqlens_k must be contiguous on {q.device}",
    ),
)
SINK_CHECKS = (
    dtype_check("sinks", "sinks", REALS),
    Check(
        "sinks.shape != (HQ,) or sinks.device != q.device",
        "sinks must be [{HQ}] on {q.device}, got {list(sinks.shape)} on {sinks.device}",
    ),
)


@dataclass(frozen=True)
class Operator:
    """The arguments of a file's operators."""

    passed: list[str]
    """The tensors that the caller passes."""
    lists: list[str]
    """The lists of a block mask."""
    input_scalars: list[str]
    typed_inputs: list[str]
    """All arguments with their types."""

    @property
    def input_tensors(self) -> list[str]:
        """The arguments that are tensors."""
        return [*self.passed, *self.lists]

    @property
    def typed_backward(self) -> list[str]:
        """The arguments of the backward operator, with types."""
        return [
            "dout: Tensor",
            "dlse: Optional[Tensor]",
            "out: Tensor",
            "lse: Tensor",
            *self.typed_inputs,
        ]

    @property
    def inputs(self) -> list[str]:
        """The names of all arguments."""
        return [*self.input_tensors, *self.input_scalars]


def operator_of(interface: Interface) -> Operator:
    """Return the arguments of a spec's operators."""
    plan, spec, runtime = interface.plan, interface.spec, interface.runtime
    packed = ["cu_seqlens_q", "cu_seqlens_k"] if spec.varlen else []
    tables = ["block_table"] if spec.paged_kv is not None else []
    sinks = ["sinks"] if spec.sinks else []
    sides = ("kv", "q") if plan.backward else ("kv",)
    lists = (
        [name for side in sides for name in lists_of(side)] if plan.block_mask is not None else []
    )
    passed = ["q", "k", "v", *packed, *tables, *spec.buffers, *sinks]
    typed = [f"{name}: Tensor" for name in (*passed, *lists)] + ["scale: float"]
    typed += [f"{name}: {_TYPES[p.type]}" for name, p in runtime.items()]
    return Operator(passed, lists, ["scale", *runtime], typed)
