"""The C interface of attention, from the same plans as the emitted launchers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kgen.kernels.attention.lowered.lowering import Lowering
from kgen.kernels.attention.lowered.row_max import row_results_of
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import AttentionPlan
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules import SCHEDULES
from kgen.kernels.attention.targets.triton.interface import heads_rule
from kgen.kernels.attention.targets.triton.native_calls import (
    AttentionHeader,
    AttentionProgram,
    BackwardCalls,
    Calls,
    FirstStrides,
    ForwardCalls,
    Prepared,
    Vectors,
    block_mask_calls,
)
from kgen.kernels.attention.targets.triton.native_example import example_of
from kgen.kernels.attention.targets.triton.native_learned import learned_names, learned_tables
from kgen.kernels.attention.targets.triton.native_operators import (
    call_of,
    operators_of,
    why_in_python,
)
from kgen.kernels.attention.targets.triton.native_tensors import BLOCK_MASK, tensors_of
from kgen.kernels.attention.targets.triton.placement import (
    ROWS_OF_KEYS,
    ROWS_OF_QUERIES,
    placement,
)
from kgen.kernels.attention.targets.triton.shared import narrow_values
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import DTYPES, MOST_DIMS, Check, Native, Tiles, prefix_of, refuse, unique
from kgen.targets.template import Template

_NAMES = """
q_ptr k_ptr v_ptr o_ptr do_ptr dq_ptr dk_ptr dv_ptr lse_ptr dlse_ptr delta_ptr counter_ptr
dq_sum_ptr sinks_ptr stride_sinks d_sinks_ptr o_desc dq_desc dk_desc dv_desc lse_desc delta_desc
q_rope_desc k_rope_desc dq_rope_desc dk_rope_desc GQA STORE_LSE GROUP TMA BLOCK_M BLOCK_N SLOTS DQ
HAS_DLSE START_NEXT num_warps num_stages launch_pdl
"""
"""Names of kernel arguments that do not depend on the spec."""
_OF_LISTS = ("kinds_ptr", "planes", "q_blocks", "kv_blocks", "CHUNK")


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """Build the C interface of a spec.

    Args:
        sizes: The values of open sizes (`gqa`, `batch`) that have machine code.
        chips: The compute capabilities that have machine code.

    Raise `KgenError` for specs that only Python supports.
    """
    plan = plan_attention(loaded)
    if any(len(buffer.shape) > MOST_DIMS for buffer in loaded.spec.buffers.values()):
        refuse(loaded, f"a buffer has more than {MOST_DIMS} dimensions", "leave `--c` out")
    made = _Files(loaded, plan, chips)
    few = any(of.decodes for of in made.calls)
    example = example_of(loaded, plan, made.tensors, sizes, few)
    why = why_in_python(plan)
    return Native(
        made.header(),
        made.program(),
        example,
        made.names(),
        made.tiles(),
        operators=None if why else operators_of(plan, made.name, made.license, made.tensors),
        call=None if why else call_of(plan),
        why_in_python=why or "",
    )


def _calls(prepared: Prepared) -> list[Calls]:
    """Return the C parts of each schedule, in the order in which calls look for kernels."""
    found: list[Calls] = []
    for schedule in reversed(SCHEDULES):
        if schedule.calls is not None:
            found.insert(0, schedule.calls(prepared, tuple(found)))
    return found


class _Files:
    """Build the C files of one plan."""

    def __init__(self, loaded: Loaded, plan: AttentionPlan, chips: Collection[int]) -> None:
        self.plan, self.spec, self.name = plan, plan.spec, prefix_of(loaded)
        self.license = plan.spec.license.in_comment()
        self.packed = plan.spec.varlen
        free = without_promises(loaded)
        free_plan = plan if free.spec == loaded.spec else plan_attention(free)
        self.lowering = Lowering(plan)
        at = placement(self.packed, plan.grouped, plan.spec.head_dim.v, "")
        self.group = at.group
        self.tensors = tensors_of(plan, self.name)
        self.dims, self.rows = ("shd", "hs") if self.packed else ("bhsd", "bhs")
        kv_dims = "pshd" if plan.spec.paged_kv is not None else self.dims
        self.dims_of = dict.fromkeys((*ROWS_OF_QUERIES, *ROWS_OF_KEYS), self.dims)
        self.dims_of |= dict.fromkeys(("k", "v"), kv_dims)
        self.first = FirstStrides(
            **{x: f"stride_{x}{dims[0]}" for x, dims in self.dims_of.items()},
            dlse=f"stride_l{self.rows[0]}",
        )
        prepared = Prepared(
            loaded=loaded,
            plan=plan,
            free_plan=free_plan,
            chips=chips,
            lowering=self.lowering,
            free_lowering=self.lowering if free_plan is plan else Lowering(free_plan),
            at=at,
            tensors=self.tensors,
            first=self.first,
        )
        self.calls = _calls(prepared)
        self.launches = {name: launch for of in self.calls for name, launch in of.launches.items()}
        self.portable = any(of.portable for of in self.calls)
        self.chips = [of.chip for of in self.calls if of.chip is not None] if plan.backward else []
        self.learned = next((of.learned for of in self.calls if of.learned is not None), None)

    def header(self) -> AttentionHeader:
        """Return the header."""
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
        """Return the source file with the functions."""
        plan, spec, learned = self.plan, self.spec, self.learned
        dtype, size = DTYPES[spec.dtype]
        narrow = self.portable and narrow_values(plan)
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
            tiled=any(of.tiled for of in self.calls),
            portable=self.portable,
            decodes=any(of.decodes for of in self.calls),
            pairs=learned is not None and bool(learned.pairs),
            diagonals=learned is not None and bool(learned.diagonals),
            flags=[chip.flag for chip in self.chips],
            parts=self._parts(),
        )

    def _parts(self) -> list[Template]:
        """Return the forward and backward passes, in the order of the file."""
        mask = self.plan.block_mask
        found: list[Template] = []
        if mask is not None:
            found.append(block_mask_calls(mask, self.name, self.plan.backward))
        found.append(self._forward())
        if not self.plan.backward:
            return found
        calls = BackwardCalls(
            name=self.name,
            first=self.first,
            lse=self.tensors.lse,
            vectors=Vectors(self.packed),
            sinks=bool(self.spec.sinks),
            group=self.group,
            chips=self.chips,
            dq=self.launches["dq"],
            dkdv=self.launches["dkdv"],
            learned=self.learned,
        )
        return [*found, calls]

    def _forward(self) -> ForwardCalls:
        ordered = sorted(self.calls, key=lambda of: of.late)
        *ways, last = [of.way for of in self.calls if of.way is not None]
        return ForwardCalls(
            name=self.name,
            first=self.first,
            lse=self.tensors.lse,
            sinks=bool(self.spec.sinks),
            row_results=row_results_of(self.spec),
            functions=[function for of in ordered for function in of.functions],
            workspace=[line for of in self.calls for line in of.workspace],
            ways=ways,
            last=last,
        )

    # --- arguments of kernels, and tiles ----------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of all kernel arguments."""
        of_tensors = [f"stride_{x}{d}" for x, dims in self.dims_of.items() for d in dims]
        of_tensors += [f"stride_l{d}" for d in self.rows]
        tags = unique(["", *(c.tag for c in (*self.plan.qk_chunks, *self.plan.v_chunks))])
        descs = [f"{x}_desc{tag}" for x in ("q", "k", "v", "do") for tag in tags]
        descs += [desc for of in self.calls for desc in of.descs]
        lists = self.tensors.lists
        more = [*(f"{t.label}_ptr" for t in lists), *_OF_LISTS] if lists else []
        for row in row_results_of(self.spec):
            more += [row.param.name, row.option]
        more += [*learned_names(self.plan), *(name for of in self.calls for name in of.names)]
        return unique([*of_tensors, *descs, *self.lowering.problem, *more, *_NAMES.split()])

    def tiles(self) -> list[Tiles]:
        """Return the tile tables."""
        found = [table for of in reversed(self.calls) for table in of.tiles]
        return found + (learned_tables(self.plan) if self.plan.backward else [])

    # --- sizes and checks -------------------------------------------------------------------------

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
        words = "there may be at most 2**29 queries and 2**29 keys, got %lld and %lld"
        found = [
            self._heads(),
            _check(f"kgen_max({queries}, {keys}) > INT64_C(1) << 29", words, queries, keys),
        ]
        if self.packed:
            found.append(
                _check(
                    "p->B < 1", "cu_seqlens_q must be [N + 1] for N sequences, got %lld", "p->B + 1"
                )
            )
        for size, length in (("SQ", spec.lengths.q), ("SK", spec.lengths.kv)):
            multiple = getattr(length, "multiple_of", None)
            if multiple and multiple > 1:
                words = f"{size} must be a multiple of {multiple}, got %lld"
                found.append(_check(f"p->{size} % {multiple}", words, f"p->{size}"))
        if self.plan.self_attention:
            words = "q and k must have the same length, got %lld and %lld"
            found.append(_check("p->SQ != p->SK", words, "p->SQ", "p->SK"))
        for param in self.tensors.params:
            if not param.real:
                at, bound = f"a->{param.member}", spec.params[param.name]
                one_bit = bound.most.bit_count() == 1
                limit = (
                    f"INT64_C(1) << {bound.most.bit_length() - 1}"
                    if one_bit
                    else f"INT64_C({bound.most})"
                )
                words = f"{param.label} must lie within {bound.most_spelled} of zero, got %lld"
                found.append(_check(f"{at} > {limit} || {at} < -({limit})", words, at))
        return found

    def _heads(self) -> Check:
        gqa, heads = self.spec.gqa, ("p->HQ", "p->HKV")
        if gqa == "any":
            words = "q has %lld heads, which is not a multiple of the %lld heads of k and v"
            return _check("p->HKV <= 0 || p->HQ < 0 || p->HQ % p->HKV", words, *heads)
        return _check(f"p->HQ != {gqa} * p->HKV", f"{heads_rule(gqa)}, got %lld and %lld", *heads)


def _check(wrong: str, message: str, *given: str) -> Check:
    return Check(wrong, message, tuple(f"(long long){g}" for g in given))
