"""The tensors of the attention functions in C."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from kgen.expr.nodes import Read, Type
from kgen.expr.unparse import show
from kgen.kernels.attention.lowered.ranges import lists_of
from kgen.kernels.attention.lowered.row_max import row_results_of
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE
from kgen.kernels.attention.plan.model import AttentionPlan, ReadGradient
from kgen.kernels.attention.spec import ANY, KV_LENS
from kgen.targets.code import Code, Name, op, row, text
from kgen.targets.native import WORDS, Parameter, Tensor, fixed, in_struct, member, parameters

_OWN = """
q k v out lse dout dlse dq dk dv dsinks sinks scale deterministic cu_seqlens_q cu_seqlens_k
block_table kv_num_blocks full_kv_num_blocks kv_indices q_num_blocks full_q_num_blocks q_indices
"""
OWN = frozenset(_OWN.split())
"""Members of the argument struct that the caller does not set."""
BLOCK_MASK = "block_mask"
"""Suffix of the C function that fills lists of blocks. It follows the spec's name."""
LETTERS = {"b": "B", "h": "HQ", "q_idx": "SQ", "kv_idx": "SK"}


@dataclass(frozen=True)
class OpenSize:
    """An open extent of a buffer."""

    name: str
    """The name of the extent in kernels."""
    axis: int


@dataclass(frozen=True)
class BufferTensor(Tensor):
    """An input tensor for a buffer of the spec."""

    stride: str | None = None
    """The name of its first stride in kernels. None for a single number."""
    open: tuple[OpenSize, ...] = ()


@dataclass(frozen=True)
class GradientTensor(Tensor):
    """A tensor that kernels write for the gradient through one read of a buffer."""

    of_buffer: str = ""
    """The member of the argument struct for the buffer."""
    strides: bool = False
    """True if kernels take its strides as arguments."""
    zeros: str | None = None
    """Number of elements to clear before the launch. None if kernels write all elements."""


@dataclass(frozen=True)
class Words:
    """The phrases in comments on tensors."""

    shapes: str
    heads: str
    out: str
    q: str
    k: str
    v: str
    lse: str
    dlse: str
    dsinks: str


@dataclass(frozen=True)
class Tensors:
    """The tensors and numbers of the forward and backward passes."""

    words: Words
    inputs: tuple[Tensor, ...]
    out: Tensor
    lse: Tensor
    of_rows: tuple[Tensor, ...]
    """The results of rows in addition to the log-sum-exp."""
    dlse: Tensor
    buffers: tuple[BufferTensor, ...]
    """The inputs that are buffers of the spec."""
    lists: tuple[Tensor, ...]
    """The inputs that are lists of blocks."""
    params: tuple[Parameter, ...]
    of_backward: tuple[Tensor, ...]
    learned: tuple[GradientTensor, ...]


def tensors_of(plan: AttentionPlan, name: str) -> Tensors:
    """Return the tensors of a plan. Its C functions begin with `name`."""
    return _Spelled(plan).tensors(name)


def widest_of(plan: AttentionPlan) -> str:
    """Return the maximum stride of columns, in elements. Kernels compute column times stride
    in int32.
    """
    return (
        f"INT64_C(1) << {31 - (max(plan.spec.head_dim.qk, plan.spec.head_dim.v) - 1).bit_length()}"
    )


def blocks(length: str) -> Code:
    """Return the number of blocks of a mask along a length."""
    return _rounded_up(length, BLOCK_SIZE)


def _rounded_up(length: str, each: int) -> Code:
    return op("kgen_cdiv({0}, {1})", Name(length), fixed(each), fn="cdiv")


ANY_SIZE = text("KGEN_ANY")
"""A size that is not checked."""


def _own(
    name: str,
    sizes: Sequence[Code],
    dtype: str,
    words: str,
    widest: str = "INT32_MAX",
    *,
    contiguous: bool = False,
) -> Tensor:
    """Return a tensor that the caller does not set."""
    return Tensor(name, name, name, tuple(sizes), dtype, words, contiguous, widest)


class _Spelled:
    """Build the tensors of one plan."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.packed, self.lse = plan.spec.varlen, "fp64" if plan.exact else "fp32"
        self.rows = _named("TQ", "HQ") if self.packed else _named("B", "HQ", "SQ")
        self.keys = _named("TK", "HKV") if self.packed else _named("B", "HKV", "SK")

    def tensors(self, name: str) -> Tensors:
        words, backward = self._words(), self.plan.backward
        lse = _named("HQ", "TQ") if self.packed else self.rows
        buffers = tuple(self._buffer(n) for n in self.spec.buffers)
        params = parameters(self.spec.params, "of the scores and the mask", OWN, self.plan.called)
        lists = tuple(self._lists(name))
        return Tensors(
            words=words,
            inputs=self._inputs(words, buffers, lists),
            out=self._wide("out", self.rows, self.spec.head_dim.v, words.out),
            lse=_own("lse", lse, self.lse, "", contiguous=True),
            of_rows=tuple(self._of_rows(lse)),
            dlse=_own("dlse", lse, "fp32", ""),
            buffers=buffers,
            lists=lists,
            params=params,
            of_backward=self._of_backward(words) if backward else (),
            learned=self._learned(buffers, params) if backward else (),
        )

    def _of_rows(self, sizes: tuple[Code, ...]) -> Iterator[Tensor]:
        shape = "[HQ, TQ]" if self.packed else "[B, HQ, SQ]"
        words = f"{shape} float32, contiguous, the largest score of each row, times log2(e)"
        for result in row_results_of(self.spec):
            yield _own(result.tensor, sizes, "fp32", words, contiguous=True)

    def _wide(self, name: str, sizes: Sequence[Code], width: int, words: str) -> Tensor:
        return _own(name, (*sizes, fixed(width)), self.spec.dtype, words, widest_of(self.plan))

    def _inputs(
        self, words: Words, buffers: tuple[BufferTensor, ...], lists: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        spec, head = self.spec, self.spec.head_dim
        found = [self._wide("q", self.rows, head.qk, words.q)]
        if spec.paged_kv is None:
            found += [
                self._wide("k", self.keys, head.qk, words.k),
                self._wide("v", self.keys, head.v, words.v),
            ]
        else:
            found += self._pages(spec.paged_kv.page_size)
        if self.packed:
            said = (
                "[B + 1] int32, contiguous, on the device: where sequences begin and end, from 0 on"
            )
            ends = row("add", Name("B"), fixed(1))
            found += [_own(f"cu_seqlens_{x}", [ends], "int32", said, contiguous=True) for x in "qk"]
        found += [*buffers, *lists]
        if spec.sinks:
            said = "[HQ] float32, logits that join the softmax without a value"
            found.append(_own("sinks", _named("HQ"), "fp32", said))
        return tuple(found)

    def _pages(self, size: int) -> list[Tensor]:
        """Return the paged keys and values, and the block table that locates the pages of each
        sequence.
        """
        head, dtype = self.spec.head_dim, self.spec.dtype

        def pages(x: str, width: int) -> Tensor:
            words = f"[pages, {size}, HKV, {width}] {WORDS[dtype]}"
            return self._wide(x, [text("a->k.sizes[0]"), fixed(size), Name("HKV")], width, words)

        said = f"[B, n] int32, the pages of each sequence in order, not checked; SK is {size} n"
        table = _own("block_table", [Name("B"), ANY_SIZE], "int32", said)
        return [pages("k", head.qk), pages("v", head.v), table]

    def _buffer(self, name: str) -> BufferTensor:
        buffer, label = self.spec.buffers[name], self.plan.called.get(name, name)
        shape = buffer.shape or (1,)  # C has one number as a tensor of one element
        # C machine code has one dtype for an open dtype, as for sinks.
        dtype = buffer.dtypes[0]
        words = f"[{', '.join(map(str, shape))}] {WORDS.get(dtype, dtype)}"
        words += ", ascending" if buffer.sorted else ""
        words += ", how many keys each sequence has, at most SK" if name == KV_LENS else ""
        # Packed sequences have no common length. The Python launcher has none either.
        sizes = tuple(
            ANY_SIZE if s == ANY else Name(s) if isinstance(s, str) else fixed(s) for s in shape
        )
        opened = [axis for axis, size in enumerate(buffer.shape) if size == ANY]
        return BufferTensor(
            name,
            label,
            member(label, OWN),
            sizes,
            dtype,
            words,
            stride=f"stride_{name}_0" if buffer.shape else None,
            open=tuple(OpenSize(f"size_{name}_{axis}", axis) for axis in opened),
        )

    def _lists(self, name: str) -> list[Tensor]:
        """Return the lists for blocks of queries and, for backward, for blocks of keys."""
        mask = self.plan.block_mask
        if mask is None:
            return []
        shape = ["B" if mask.by_batch else "1", "HQ" if mask.by_head else "1"]
        planes = [fixed(1) if extent == "1" else Name(extent) for extent in shape]
        found = []
        for inner in ("kv", "q") if self.plan.backward else ("kv",):
            rows, columns = ("SQ", "SK") if inner == "kv" else ("SK", "SQ")
            for list_ in lists_of(inner):
                lengths = [rows, columns] if list_.endswith("indices") else [rows]
                sizes = [*planes, *map(blocks, lengths)]
                words = ", ".join([*shape, *(f"ceil({n} / {BLOCK_SIZE})" for n in lengths)])
                said = (
                    f"[{words}] int32, contiguous: written by {name}_{BLOCK_MASK}, read by the "
                    "passes"
                )
                found.append(_own(list_, sizes, "int32", said, contiguous=True))
        return found

    def _of_backward(self, words: Words) -> tuple[Tensor, ...]:
        head = self.spec.head_dim
        found = [
            self._wide("dout", self.rows, head.v, words.out),
            self._wide("dq", self.rows, head.qk, words.q),
            self._wide("dk", self.keys, head.qk, words.k),
            self._wide("dv", self.keys, head.v, words.v),
        ]
        if self.spec.sinks:
            sizes = [Name("HQ"), _rounded_up("TQ", 64)]
            if not self.packed:
                sizes = [*_named("B", "HQ"), _rounded_up("SQ", 64)]
            found.append(_own("dsinks", sizes, "fp32", words.dsinks, contiguous=True))
        return tuple(found)

    def _learned(
        self, buffers: tuple[BufferTensor, ...], params: tuple[Parameter, ...]
    ) -> tuple[GradientTensor, ...]:
        taken = OWN | {of.member for of in buffers} | {of.member for of in params}
        by_name = {b.name: b for b in buffers}
        return tuple(
            _Part(self.plan, g, by_name[g.buffer]).tensor(taken) for g in self.plan.gradients
        )

    def _words(self) -> Words:
        head, dtype = self.spec.head_dim, WORDS[self.spec.dtype]
        rows = "[TQ, HQ, {}]" if self.packed else "[B, HQ, SQ, {}]"
        keys = "[TK, HKV, {}]" if self.packed else "[B, HKV, SK, {}]"
        lse = "[HQ, TQ]" if self.packed else "[B, HQ, SQ]"
        times = {"any": "a multiple of", 1: "as many as"}.get(
            self.spec.gqa, f"{self.spec.gqa} times"
        )
        parts = "[HQ, ceil(TQ / 64)]" if self.packed else "[B, HQ, ceil(SQ / 64)]"
        over = "tiles" if self.packed else "sequences and tiles"
        if self.spec.paged_kv is not None:
            keys = f"[pages, {self.spec.paged_kv.page_size}, HKV, {{}}]"
        shapes = f"q {rows}, k {keys}, v {keys} -> out {rows}, {dtype}"
        return Words(
            shapes=shapes.format(head.qk, head.qk, head.v, head.v),
            heads=f"{times} the HKV heads of keys and values",
            out=f"{rows.format(head.v)} {dtype}",
            q=f"{rows.format(head.qk)} {dtype}",
            k=f"{keys.format(head.qk)} {dtype}",
            v=f"{keys.format(head.v)} {dtype}",
            lse=f"{lse} {WORDS[self.lse]}, contiguous, the log-sum-exp of scores in base 2",
            dlse=f"{lse} float32, of the log-sum-exp in base 2; NULL where there is none",
            dsinks=f"{parts} float32, contiguous: what is to be summed over {over}. Written",
        )


def _named(*names: str) -> tuple[Code, ...]:
    return tuple(map(Name, names))


def _product(sizes: Sequence[Code]) -> Code:
    """Return the number of elements."""
    return reduce(lambda product, size: row("mul", product, size), sizes)


class _Part:
    """The tensor for the gradient through one read of a buffer."""

    def __init__(self, plan: AttentionPlan, g: ReadGradient, buffer: BufferTensor) -> None:
        self.g, self.buffer, self.packed = g, buffer, plan.spec.varlen
        self.spec = plan.spec.buffers[g.buffer]
        self.count = sum(other.buffer == g.buffer for other in plan.gradients)
        self.whole = g.along == "pair" and g.summed is not None
        """True if the tensor is the gradient, and kernels write all of its elements."""

    def tensor(self, taken: frozenset[str]) -> GradientTensor:
        label, sizes = (
            f"d{self.buffer.label}{self.g.name.removeprefix(self.g.buffer)}",
            self._sizes(),
        )
        dtype = self.spec.dtypes[0] if self.whole else "fp32"
        return GradientTensor(
            f"d_{self.g.name}",
            label,
            member(label, taken),
            sizes,
            dtype,
            self._words(dtype),
            contiguous=True,
            of_buffer=self.buffer.member,
            strides=self.g.along == "pair",
            zeros=None if self.whole else in_struct(_product(sizes), "p->"),
        )

    def _sizes(self) -> tuple[Code, ...]:
        g = self.g
        if g.along == "pair" and g.summed is not None:
            return _named(*(LETTERS[n] for n in g.summed))
        if g.along == "pair":
            axes = range(len(self.spec.shape))
            return tuple(text(f"a->{self.buffer.member}.sizes[{axis}]") for axis in axes)
        if g.along == "distance":
            return (*_named("B", "HQ"), row("add", "SQ", "SK"))
        x = "Q" if g.along == "q" else "K"
        return _named("HQ", f"T{x}") if self.packed else _named("B", "HQ", f"S{x}")

    def _words(self, dtype: str) -> str:
        g, called = self.g, self.buffer.label
        whole = f"the gradient of {called}"
        if self.count > 1:
            whole = f"one of {self.count} tensors whose sum is {whole}"
        if g.along == "pair":
            shape = (
                [LETTERS[n] for n in g.summed]
                if g.summed is not None
                else [*map(str, self.spec.shape)]
            )
            return f"[{', '.join(shape)}] {WORDS[dtype]}, contiguous: {whole}. Written"
        element = show(Read(called, g.indices, Type.FLOAT))
        if g.along == "distance":
            shape, of = ["B", "HQ", "SQ + SK"], "b, h and distance = q_idx - kv_idx, from -SK on"
        elif self.packed:
            shape, of = ["HQ", f"T{'Q' if g.along == 'q' else 'K'}"], "h and token"
        else:
            position = "q_idx" if g.along == "q" else "kv_idx"
            shape, of = ["B", "HQ", LETTERS[position]], f"b, h and {position}"
        added = (
            "their sums are"
            if self.count == 1
            else "their sums are, beside those of its other reads,"
        )
        said = f"what each {of} adds to {element}: {added} the gradient of {called}. Written"
        return f"[{', '.join(shape)}] float32, contiguous: {said}"
