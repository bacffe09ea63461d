"""Attention from C, of the plans that the emitted launchers are made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules.decode.plan import DecodePlan, decodes, plan_decode
from kgen.kernels.attention.schedules.hopper.native import backward_on_hopper, forward_on_hopper
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.kernels.attention.schedules.hopper.streams import Stream, streams_of
from kgen.kernels.attention.schedules.portable.kernels import portable_kernels
from kgen.kernels.attention.targets.triton.native_calls import (
    AttentionHeader,
    AttentionProgram,
    BackwardCalls,
    FirstStrides,
    ForwardCalls,
    block_mask_calls,
    decode_calls,
    portable_launches,
)
from kgen.kernels.attention.targets.triton.native_example import example_of
from kgen.kernels.attention.targets.triton.native_learned import learned_calls, learned_names, learned_tables
from kgen.kernels.attention.targets.triton.native_tensors import BLOCK_MASK, tensors_of
from kgen.kernels.attention.targets.triton.placement import placement
from kgen.kernels.attention.targets.triton.shared import narrow_values
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import DTYPES, MOST_DIMS, Check, Native, Tiles, prefix_of, refuse, unique
from kgen.targets.template import Template
from kgen.targets.triton import tables

HOPPER = 90
"""The chip that kernels of its own are for."""
_NAMES = """
q_ptr k_ptr v_ptr o_ptr do_ptr dq_ptr dk_ptr dv_ptr lse_ptr dlse_ptr delta_ptr counter_ptr dq_sum_ptr sinks_ptr
stride_sinks d_sinks_ptr o_desc dq_desc dk_desc dv_desc lse_desc delta_desc q_rope_desc k_rope_desc
dq_rope_desc dk_rope_desc GQA STORE_LSE GROUP TMA BLOCK_M BLOCK_N SLOTS DQ HAS_DLSE BEFORE_HOPPER
num_warps num_stages launch_pdl
"""
"""The names of kernels' arguments, beside those of a spec."""
_OF_DECODING = (
    *("part_ptr", "part_lse_ptr", "splits", "BATCHES", "SPLIT", "BLOCK_S"),
    *("block_table_ptr", "stride_tb", "stride_tp"),
)
_OF_LISTS = ("kinds_ptr", "planes", "q_blocks", "kv_blocks", "CHUNK")


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """The calls of a spec's kernels. `sizes` are those of what it leaves open that there is machine code for,
    `chips` those that it is for: kernels for Hopper are there where that is. Raises `KgenError` for what there is only
    in Python."""
    plan, free = plan_attention(loaded), without_promises(loaded)
    if any(len(buffer.shape) > MOST_DIMS for buffer in loaded.spec.buffers.values()):
        refuse(loaded, f"a buffer has more than {MOST_DIMS} dimensions", "leave `--c` out")
    on_hopper = plan if free.spec == loaded.spec else plan_attention(free)
    made = _Files(loaded, plan, on_hopper if HOPPER in chips else None)
    example = example_of(loaded, plan, made.tensors, sizes)
    return Native(made.header(), made.program(), example, made.names(), made.tiles())


class _Files:
    """Makes the files of one plan."""

    def __init__(self, loaded: Loaded, plan: AttentionPlan, on_hopper: AttentionPlan | None) -> None:
        self.plan, self.spec, self.name = plan, plan.spec, prefix_of(loaded)
        self.license = plan.spec.license.in_comment()
        self.packed = plan.spec.varlen
        self.decode = plan_decode(loaded) if decodes(loaded) else None
        self.hopper = plan_hopper(on_hopper) if on_hopper is not None else None
        self.lowering = Lowering(plan)
        self.of_hopper = self.lowering if on_hopper is None or on_hopper is plan else Lowering(on_hopper)
        at = placement(self.packed, plan.grouped, plan.spec.head_dim.v, "")
        self.group = at.of.group
        self.kernels = portable_kernels(self.lowering, at, self.decode is None or not self.decode.alone, None)
        loops = {name: loop.operands for name, loop in self.kernels.loops.items()}
        if not self.kernels.many_queries:
            del loops["forward"]
        self.launches = portable_launches(loops)
        self.tensors = tensors_of(plan, self.name)
        self.dims, self.rows = ("shd", "hs") if self.packed else ("bhsd", "bhs")
        self.kv_dims = "pshd" if plan.spec.paged_kv is not None else self.dims
        self.first = FirstStrides(
            **{x: f"stride_{x}{self.dims[0]}" for x in "qgow"},
            **{x: f"stride_{x}{self.kv_dims[0]}" for x in "kv"},
            l=f"stride_l{self.rows[0]}",
        )

    def header(self) -> AttentionHeader:
        """The header."""
        spec, backward = self.spec, self.plan.backward
        lists = [BLOCK_MASK] if self.tensors.lists else []
        return AttentionHeader(
            name=self.name,
            license=self.license,
            summary=opening(spec, in_comment=True).replace("*/", "* /"),
            passes=(*lists, "forward", *(("backward",) if backward else ())),
            tensors=self.tensors,
            width=spec.head_dim.qk,
            backward=backward,
            sinks=bool(spec.sinks),
        )

    def program(self) -> AttentionProgram:
        """The functions."""
        plan, spec, backward = self.plan, self.spec, self.kernels.backward
        dtype, size = DTYPES[spec.dtype]
        narrow = bool(self.launches) and narrow_values(plan)
        forward_on_hopper = self.hopper is not None and self.hopper.forward is not None
        return AttentionProgram(
            name=self.name,
            license=self.license,
            tensors=self.tensors,
            first=self.first,
            packed=self.packed,
            grouped=plan.grouped,
            paged=spec.paged_kv is not None,
            backward=plan.backward,
            dims=len(self.dims),
            dtype=dtype,
            bytes=size,
            default_scale=repr(spec.head_dim.qk**-0.5),
            programs_of_queries=self._programs("q"),
            programs_of_keys=self._programs("kv") if plan.backward else None,
            plain=list(self.lowering.sizes),
            sizes=self._sizes(),
            checks=self._checks(),
            aligned=["v"] if narrow else [],
            aligned_backward=["dout"] if narrow else [],
            tiled=bool(self.launches) or forward_on_hopper,
            portable=bool(self.launches),
            decodes=self.decode is not None,
            pairs=backward is not None and bool(backward.pairs),
            diagonals=backward is not None and bool(backward.diagonals),
            parts=self._parts(),
        )

    def _parts(self) -> list[Template]:
        """The passes, in the order of the file."""
        mask, backward = self.plan.block_mask, self.kernels.backward
        found: list[Template] = []
        if mask is not None:
            found.append(block_mask_calls(mask, self.name, self.plan.backward))
        found.append(self._forward())
        if backward is None:
            return found
        calls = BackwardCalls(
            name=self.name,
            first=self.first,
            lse=self.tensors.lse,
            packed=self.packed,
            sinks=bool(self.spec.sinks),
            group=self.group,
            hopper=backward_on_hopper(self.hopper) if self.hopper is not None else None,
            dq=self.launches["dq"],
            dkdv=self.launches["dkdv"],
            learned=learned_calls(self.tensors.learned, backward),
        )
        return [*found, calls]

    def _forward(self) -> ForwardCalls:
        tensors, hopper = self.tensors, None
        if self.hopper is not None:
            hopper = forward_on_hopper(self.hopper, self._streams(), tensors.buffers, self.group)
        decode = None
        if self.decode is not None:
            decode = decode_calls(self.decode, self.spec.head_dim.v, tensors.lse, hopper is not None)
        return ForwardCalls(
            name=self.name,
            first=self.first,
            lse=tensors.lse,
            paged=self.spec.paged_kv is not None,
            sinks=bool(self.spec.sinks),
            group=self.group,
            hopper=hopper,
            portable=self.launches.get("forward"),
            decode=decode,
        )

    def _streams(self) -> list[Stream]:
        hopper = self.hopper
        return streams_of(hopper, self.of_hopper) if hopper is not None and hopper.forward is not None else []

    # --- arguments of kernels, and tiles -------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all arguments of kernels."""
        of_tensors = [f"stride_{x}{d}" for x in "qkvgow" for d in (self.kv_dims if x in "kv" else self.dims)]
        of_tensors += [f"stride_l{d}" for d in self.rows]
        tags = unique(["", *(c.tag for c in (*self.plan.qk_chunks, *self.plan.v_chunks))])
        descs = [f"{x}_desc{tag}" for x in ("q", "k", "v", "do") for tag in tags]
        descs += [f"{s.name}_desc" for s in self._streams()]
        lists = self.tensors.lists
        more = [*(f"{t.label}_ptr" for t in lists), *_OF_LISTS] if lists else []
        more += [*learned_names(self.plan), *(_OF_DECODING if self.decode is not None else ())]
        return unique([*of_tensors, *descs, *self.lowering.problem, *more, *_NAMES.split()])

    def tiles(self) -> list[Tiles]:
        """The tables of tiles."""
        tiles = self.plan.tiles
        named = {"forward": tiles.forward, "dq": tiles.dq, "dkdv": tiles.dkdv}
        found = [
            Tiles(f"{name}_tiles", [(c, asdict(t)) for c, t in tables.rows(table)], kernel=f"_{name}_kernel")
            for name, table in named.items()
            if name in self.launches
        ]
        found += _decode_tables(self.decode) if self.decode is not None else []
        return found + (learned_tables(self.plan) if self.plan.backward else [])

    # --- sizes and checks ----------------------------------------------------------------------------------------

    def _programs(self, side: str) -> str:
        heads = "p->HKV" if self.plan.grouped and side == "kv" else "p->HQ"
        length = side[0].upper()
        if self.packed:
            return f"(p->T{length} / rows + p->B + 1) * {heads}"
        return f"kgen_cdiv(p->S{length}, rows) * p->B * {heads}"

    def _sizes(self) -> list[str]:
        if self.packed:
            return [
                "p->TQ = a->q.sizes[0];",
                "p->HQ = a->q.sizes[1];",
                "p->TK = a->k.sizes[0];",
                "p->HKV = a->k.sizes[1];",
                "p->B = a->cu_seqlens_q.sizes[0] - 1;",
            ]
        queries = ["p->B = a->q.sizes[0];", "p->HQ = a->q.sizes[1];", "p->SQ = a->q.sizes[2];"]
        if self.spec.paged_kv is not None:
            keys = f"a->block_table.sizes[1] * {self.spec.paged_kv.page_size}"
            return [*queries, "p->HKV = a->k.sizes[2];", f"p->SK = {keys};"]
        return [*queries, "p->HKV = a->k.sizes[1];", "p->SK = a->k.sizes[2];"]

    def _checks(self) -> list[Check]:
        spec = self.spec
        queries, keys = ("p->TQ", "p->TK") if self.packed else ("p->SQ", "p->SK")
        words = "there may be 2**29 queries and as many keys, got %lld and %lld"
        found = [
            self._heads(),
            _check(f"kgen_max({queries}, {keys}) > INT64_C(1) << 29", words, queries, keys),
        ]
        if self.packed:
            found.append(
                _check("p->B < 1", "cu_seqlens_q must be [N + 1] for N sequences, got %lld", "p->B + 1")
            )
        for size, length in (("SQ", spec.lengths.q), ("SK", spec.lengths.kv)):
            multiple = getattr(length, "multiple_of", None)
            if multiple and multiple > 1:
                words = f"{size} must be a multiple of {multiple}, got %lld"
                found.append(_check(f"p->{size} % {multiple}", words, f"p->{size}"))
        if self.plan.self_attention:
            words = "q and k must be equally long, got %lld and %lld"
            found.append(_check("p->SQ != p->SK", words, "p->SQ", "p->SK"))
        for param in self.tensors.params:
            if not param.real:
                at, limit = f"a->{param.member}", "INT64_C(1) << 30"
                words = f"{param.label} must lie within 2**30 of zero, got %lld"
                found.append(_check(f"{at} > {limit} || {at} < -({limit})", words, at))
        return found

    def _heads(self) -> Check:
        gqa, heads = self.spec.gqa, ("p->HQ", "p->HKV")
        if gqa == "any":
            words = "q has %lld heads, which is not a multiple of the %lld heads of k and v"
            return _check("p->HKV <= 0 || p->HQ < 0 || p->HQ % p->HKV", words, *heads)
        many = "1 head" if gqa == 1 else f"{gqa} heads"
        words = f"q must have {many} for each of k and v, got %lld and %lld"
        return _check(f"p->HQ != {gqa} * p->HKV", words, *heads)


def _check(wrong: str, message: str, *given: str) -> Check:
    return Check(wrong, message, tuple(f"(long long){g}" for g in given))


def _decode_tables(plan: DecodePlan) -> list[Tiles]:
    """A row for each chip. A tile has as many rows as there are, up to what is said here: no constant of a kernel."""
    rows = tables.rows({chip: [tile] for chip, tile in plan.tiles.items()})
    return [Tiles("decode_tiles", [(chips, asdict(tile)) for chips, tile in rows], struct="decode_tile")]
