"""Attention from C: what `templates/attention/c` names, of the plans that the emitted launchers are made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.kernels.attention.plan.decode import decodes, plan_decode
from kgen.kernels.attention.plan.extents import without_promises
from kgen.kernels.attention.plan.model import AttentionPlan, Chunk
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.schedules.hopper.plan import plan_hopper
from kgen.kernels.attention.schedules.hopper.streams import streams_of
from kgen.kernels.attention.spec import ANY, KV_LENS
from kgen.kernels.attention.targets.triton.kernels import KernelFields
from kgen.kernels.attention.targets.triton.native_decode import NAMES as DECODE_NAMES
from kgen.kernels.attention.targets.triton.native_decode import decode_fields, decode_tables, paged_inputs
from kgen.kernels.attention.targets.triton.native_example import example_fields
from kgen.kernels.attention.targets.triton.native_hopper import hopper_fields
from kgen.kernels.attention.targets.triton.native_learned import learned_fields, learned_names, learned_tables
from kgen.kernels.attention.targets.triton.native_lists import PASS as LISTS
from kgen.kernels.attention.targets.triton.native_lists import (
    list_example,
    list_fields,
    list_inputs,
    list_names,
)
from kgen.kernels.attention.targets.triton.sources import sources
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import DTYPES, MOST_DIMS, WORDS, Native, Tiles, prefix_of, refuse, tensor, unique
from kgen.targets.template import names
from kgen.targets.triton import tables

Fields = dict[str, Any]
HOPPER = 90
"""The chip that kernels of its own are for."""
_OWN = """
q k v out lse dout dlse dq dk dv dsinks sinks scale deterministic cu_seqlens_q cu_seqlens_k block_table
kv_num_blocks full_kv_num_blocks kv_indices q_num_blocks full_q_num_blocks q_indices
"""
OWN = frozenset(_OWN.split())
"""Members of the struct of arguments that are no user's."""
_NAMES = """
q_ptr k_ptr v_ptr o_ptr do_ptr dq_ptr dk_ptr dv_ptr lse_ptr dlse_ptr delta_ptr counter_ptr dq_sum_ptr sinks_ptr
stride_sinks d_sinks_ptr o_desc dq_desc dk_desc dv_desc lse_desc delta_desc q_rope_desc k_rope_desc
dq_rope_desc dk_rope_desc GQA STORE_LSE GROUP TMA BLOCK_M BLOCK_N SLOTS DQ HAS_DLSE BEFORE_HOPPER
num_warps num_stages launch_pdl
"""
"""What kernels call their arguments, beside those of a spec."""


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """What calls the kernels of a spec. `sizes` are those of what it leaves open that there is machine code for,
    `chips` those that it is for: kernels for Hopper are there where that is. Raises `KgenError` for what there is only
    in Python."""
    plan, free = plan_attention(loaded), without_promises(loaded)
    _refuse(loaded)
    on_hopper = plan if free.spec == loaded.spec else plan_attention(free)
    return _Fields(loaded, plan, on_hopper if HOPPER in chips else None, sizes).native()


def _refuse(loaded: Loaded) -> None:
    if any(len(buffer.shape) > MOST_DIMS for buffer in loaded.spec.buffers.values()):
        refuse(loaded, f"a buffer has more than {MOST_DIMS} dimensions", "leave `--c` out")


class _Fields:
    """Spells one plan."""

    def __init__(
        self,
        loaded: Loaded,
        plan: AttentionPlan,
        on_hopper: AttentionPlan | None,
        sizes: Mapping[str, Sequence[int]],
    ) -> None:
        self.open = sizes
        self.loaded, self.plan, self.spec = loaded, plan, plan.spec
        self.name = prefix_of(loaded)
        self.packed = self.spec.varlen
        self.kernels = KernelFields(plan)
        self.hopper = plan_hopper(on_hopper) if on_hopper is not None else None
        self.of_hopper = self.kernels if on_hopper is None or on_hopper is plan else KernelFields(on_hopper)
        # What the emitted files have.
        self.emitted: dict[str, Any] = next(
            names(source.text) for source in sources(loaded) if source.filename == "triton.py"
        )
        self.lists = list_inputs(self.plan.block_mask, self.plan.backward, self.name)
        self.decode = plan_decode(loaded) if decodes(loaded) else None
        self.lse = "fp64" if plan.exact else "fp32"
        self.dims, self.rows = ("shd", "hs") if self.packed else ("bhsd", "bhs")
        self.kv_dims = "pshd" if self.spec.paged_kv is not None else self.dims
        self.dtype, self.bytes = DTYPES[self.spec.dtype]
        self.widest = (
            f"INT64_C(1) << {31 - (max(self.spec.head_dim.qk, self.spec.head_dim.v) - 1).bit_length()}"
        )

    def native(self) -> Native:
        portable = {"forward": self.emitted["forward"]} if self.emitted["forward_kernel"] else {}
        if self.plan.backward:
            portable |= {name: self.emitted[name] for name in ("dq", "dkdv")}
        context = self._context(portable)
        tiles = self.plan.tiles
        named = {"forward": tiles.forward, "dq": tiles.dq, "dkdv": tiles.dkdv}
        found = [
            Tiles(f"{name}_tiles", [(c, asdict(t)) for c, t in tables.rows(table)], kernel=f"_{name}_kernel")
            for name, table in named.items()
            if name in portable
        ]
        found += decode_tables(self.decode)
        found += learned_tables(self.plan) if self.plan.backward else []
        files = {".h": "attention/c/attention.h.j2", ".c": "attention/c/attention.c.j2"}
        files["example.cpp"] = "attention/c/example.cpp.j2"
        return Native(files, self._names(), context, found)

    # --- arguments of kernels ---

    def _names(self) -> list[str]:
        of_tensors = [f"stride_{x}{d}" for x in "qkvgow" for d in (self.kv_dims if x in "kv" else self.dims)]
        of_tensors += [f"stride_l{d}" for d in self.rows]
        tags = unique(["", *(c.tag for c in (*self.plan.qk_chunks, *self.plan.v_chunks))])
        descs = [f"{x}_desc{tag}" for x in ("q", "k", "v", "do") for tag in tags]
        descs += [f"{s.name}_desc" for s in self._streams()]
        more = list_names(self.lists) if self.lists else []
        more += [*learned_names(self.plan), *(DECODE_NAMES if self.decode is not None else ())]
        return unique([*of_tensors, *descs, *self.kernels.problem, *more, *_NAMES.split()])

    def _streams(self) -> list[Any]:
        hopper = self.hopper
        return streams_of(hopper, self.of_hopper) if hopper is not None and hopper.forward is not None else []

    # --- what the templates name ---

    def _context(self, portable: Mapping[str, Any]) -> Fields:
        spec, plan = self.spec, self.plan
        narrow = bool(self.emitted["narrow_values"] and portable)
        lse = ["p->HQ", "p->TQ"] if self.packed else ["p->B", "p->HQ", "p->SQ"]
        tensors, learned = self._tensors(), self._learned()
        blocks = {name: self._blocks(fields["tma_tensors"]) for name, fields in portable.items()}
        return {
            "name": self.name,
            "guard": f"{self.name.upper()}_H",
            "license": spec.license.in_comment(),
            "summary": opening(spec, in_comment=True).replace("*/", "* /"),
            "passes": [*[LISTS] * bool(self.lists), "forward", *["backward"] * plan.backward],
            "backward": plan.backward,
            "sinks": spec.sinks,
            "head_dim": spec.head_dim,
            "packed": self.packed,
            "grouped": plan.grouped,
            "queries": "TQ" if self.packed else "SQ",
            "keys": "TK" if self.packed else "SK",
            "dims": len(self.dims),
            "dtype": self.dtype,
            "bytes": self.bytes,
            "default_scale": repr(spec.head_dim.qk**-0.5),
            "words": self._words(),
            "first": {x: f"stride_{x}{self.dims[0]}" for x in "qgow"}
            | {x: f"stride_{x}{self.kv_dims[0]}" for x in "kv"}
            | {"l": f"stride_l{self.rows[0]}"},
            "plain": list(self.kernels.sizes),
            "programs": {x: self._programs(x) for x in ("q", "kv")},
            "rows": "p->HQ * p->TQ" if self.packed else "p->B * p->HQ * p->SQ",
            "delta_programs": "kgen_cdiv(p->TQ, 64) * p->HQ"
            if self.packed
            else "kgen_cdiv(p->SQ, 64) * p->B * p->HQ",
            "sink_parts": "p->HQ * kgen_cdiv(p->TQ, 64)"
            if self.packed
            else "p->B * p->HQ * kgen_cdiv(p->SQ, 64)",
            "sizes": self._sizes(),
            "checks": self._checks(),
            **tensors,
            "lse": tensor("lse", lse, self.lse, "", contiguous=True),
            "dlse": tensor("dlse", lse, "fp32", ""),
            "buffers": self._buffers(),
            "params": self._params(),
            "aligned": [{"member": "v"}] * narrow,
            "aligned_backward": [{"member": "dout"}] * narrow,
            "group": self.emitted["group"],
            "tma": {
                name: " && ".join(f"by_tma(&a->{x})" for x in fields["tma_tensors"])
                for name, fields in portable.items()
            },
            "descs": blocks,
            "portable": bool(portable),
            "tiled": bool(portable) or (self.hopper is not None and self.hopper.forward is not None),
            "portable_tiles": max((len(found) for found in blocks.values()), default=0),
            "paged": spec.paged_kv is not None,
            **list_fields(plan.block_mask, self.lists, plan.backward),
            **decode_fields(self.decode, self.hopper is not None and self.hopper.forward is not None),
            **hopper_fields(self.hopper, self._streams(), self._buffers(), str(self.emitted["group"])),
            "shapes": self._shapes(),
            "sum_over": {"batches": "1", "tiles": "(ends.back() + 63) / 64", "at": "h, tile"}
            if self.packed
            else {"batches": "sizes.B", "tiles": "(sizes.SQ + 63) / 64", "at": "b, h, tile"},
            **learned,
            "example": example_fields(
                self.loaded, plan, self._buffers(), self._params(), self.open, learned["learned"]
            )
            | {"lists": list_example(self.lists)},
        }

    def _learned(self) -> Fields:
        others = [*self._buffers(), *self._params()]
        return learned_fields(
            self.plan, self._buffers(), self.emitted, OWN.union(of["member"] for of in others)
        )

    def _programs(self, side: str) -> str:
        heads = "p->HKV" if self.plan.grouped and side == "kv" else "p->HQ"
        length = side[0].upper()
        if self.packed:
            return f"(p->T{length} / rows + p->B + 1) * {heads}"
        return f"kgen_cdiv(p->S{length}, rows) * p->B * {heads}"

    def _blocks(self, tensors: Iterable[str]) -> list[Fields]:
        """Descriptors of the portable kernels: a tensor's tiles by blocks of columns."""
        found: list[Fields] = []
        for of in tensors:
            x = "do" if of == "dout" else of
            rows = "BLOCK_M" if x in ("q", "do") else "BLOCK_N"
            chunks: Iterable[Chunk] = self.plan.qk_chunks if x in ("q", "k") else self.plan.v_chunks
            for c in chunks:
                desc = {"name": f"{x}_desc{c.tag}", "tensor": of, "rows": rows, "columns": c.size}
                found.append(desc | {"at": len(found)})
        return found

    def _shapes(self) -> Fields:
        """Of the example's tensors."""
        spec, n = self.spec, "sizes."
        head = spec.head_dim
        rows = f"ends.back(), {n}HQ" if self.packed else f"{n}B, {n}HQ, {n}SQ"
        keys = f"ends.back(), {n}HKV" if self.packed else f"{n}B, {n}HKV, {n}SK"
        if spec.paged_kv is not None:
            size = spec.paged_kv.page_size
            keys = f"{n}B * ({n}SK / {size}), {size}, {n}HKV"
        lse = f"{n}HQ, ends.back()" if self.packed else rows
        parts = f"{n}HQ, (ends.back() + 63) / 64" if self.packed else f"{n}B, {n}HQ, ({n}SQ + 63) / 64"
        shapes = {"q": f"{rows}, {head.qk}", "k": f"{keys}, {head.qk}", "v": f"{keys}, {head.v}"}
        return shapes | {"out": f"{rows}, {head.v}", "lse": lse, "dsinks": parts}

    def _words(self) -> Fields:
        head, dtype = self.spec.head_dim, WORDS[self.spec.dtype]
        rows = "[TQ, HQ, {}]" if self.packed else "[B, HQ, SQ, {}]"
        keys = "[TK, HKV, {}]" if self.packed else "[B, HKV, SK, {}]"
        lse = "[HQ, TQ]" if self.packed else "[B, HQ, SQ]"
        times = {"any": "a multiple of", 1: "as many as"}.get(self.spec.gqa, f"{self.spec.gqa} times")
        parts = "[HQ, ceil(TQ / 64)]" if self.packed else "[B, HQ, ceil(SQ / 64)]"
        over = "tiles" if self.packed else "sequences and tiles"
        if self.spec.paged_kv is not None:
            keys = f"[pages, {self.spec.paged_kv.page_size}, HKV, {{}}]"
        shapes = f"q {rows}, k {keys}, v {keys} -> out {rows}, {dtype}"
        return {
            "shapes": shapes.format(head.qk, head.qk, head.v, head.v),
            "heads": f"{times} the HKV heads of keys and values",
            "out": f"{rows.format(head.v)} {dtype}",
            "q": f"{rows.format(head.qk)} {dtype}",
            "k": f"{keys.format(head.qk)} {dtype}",
            "v": f"{keys.format(head.v)} {dtype}",
            "lse": f"{lse} {WORDS[self.lse]}, contiguous, the log-sum-exp of scores in base 2",
            "dlse": f"{lse} float32, of the log-sum-exp in base 2; NULL where there is none",
            "dsinks": f"{parts} float32, contiguous: what is to be summed over {over}. Written",
        }

    def _tensors(self) -> Fields:
        """What a call is given, of both passes and of backward alone."""
        head, words = self.spec.head_dim, self._words()
        rows = ["p->TQ", "p->HQ"] if self.packed else ["p->B", "p->HQ", "p->SQ"]
        keys = ["p->TK", "p->HKV"] if self.packed else ["p->B", "p->HKV", "p->SK"]

        def wide(label: str, sizes: list[str], width: int, of: str) -> Fields:
            return tensor(label, [*sizes, str(width)], self.spec.dtype, words[of], widest=self.widest)

        inputs = [wide("q", rows, head.qk, "q"), wide("k", keys, head.qk, "k"), wide("v", keys, head.v, "v")]
        if self.spec.paged_kv is not None:
            pages = paged_inputs(self.spec.paged_kv.page_size, head, self.spec.dtype, self.widest)
            inputs = [inputs[0], *pages.values()]
        if self.packed:
            for x in "qk":
                said = "[B + 1] int32, contiguous, on the device: where sequences begin and end, from 0 on"
                inputs.append(tensor(f"cu_seqlens_{x}", ["p->B + 1"], "int32", said, contiguous=True))
        inputs += [*self._buffers(), *self.lists]
        if self.spec.sinks:
            said = "[HQ] float32, logits that join the softmax without a value"
            inputs.append(tensor("sinks", ["p->HQ"], "fp32", said))
        backward = [wide("dout", rows, head.v, "out"), wide("dq", rows, head.qk, "q")]
        backward += [wide("dk", keys, head.qk, "k"), wide("dv", keys, head.v, "v")]
        if self.spec.sinks:
            length = "kgen_cdiv(p->TQ, 64)" if self.packed else "kgen_cdiv(p->SQ, 64)"
            sizes = ["p->HQ", length] if self.packed else ["p->B", "p->HQ", length]
            backward.append(tensor("dsinks", sizes, "fp32", words["dsinks"], contiguous=True))
        return {"inputs": inputs, "out": wide("out", rows, head.v, "out"), "of_backward": backward}

    def _buffers(self) -> list[Fields]:
        found = []
        for name, buffer in self.spec.buffers.items():
            called = self.plan.called.get(name, name)
            shape = ", ".join(map(str, buffer.shape or (1,)))
            # Machine code for C has one dtype for what is open, as it has for sinks.
            dtype = buffer.dtypes[0]
            said = f"[{shape}] {WORDS.get(dtype, dtype)}{', ascending' * buffer.sorted}"
            said += ", how many keys each sequence has, at most SK" * (name == KV_LENS)
            # C has one number as a tensor of one element.
            sizes = ["KGEN_ANY" if s == ANY else self._size(s) for s in buffer.shape or (1,)]
            of = tensor(called, sizes, dtype, said, OWN)
            extents = [
                {"name": f"size_{name}_{axis}", "axis": axis}
                for axis, size in enumerate(buffer.shape)
                if size == ANY
            ]
            stride = f"stride_{name}_0" if buffer.shape else None
            found.append(of | {"name": name, "stride": stride, "open": extents})
        return found

    def _size(self, size: int | str) -> str:
        # Packed sequences have no length in common; the launcher of Python has none either.
        return f"p->{size}" if isinstance(size, str) else str(size)

    def _params(self) -> list[Fields]:
        found = []
        for name, param in self.spec.params.items():
            if param.runtime:
                called, real = self.plan.called.get(name, name), param.type == "float"
                of = tensor(called, [], "fp32", "of the scores and the mask" if real else "an integer", OWN)
                make = "kgen_real" if real else "kgen_integer"
                value = f"{make}(a->{of['member']})"
                kind = "double" if real else "int64_t"
                found.append(of | {"name": name, "type": kind, "real": real, "value": value})
        return found

    # --- checks ---

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

    def _checks(self) -> list[Fields]:
        spec, checks = self.spec, list[Fields]()

        def check(wrong: str, message: str, *given: str) -> None:
            checks.append({"wrong": wrong, "message": message, "given": [f"(long long){g}" for g in given]})

        heads = ("p->HQ", "p->HKV")
        if spec.gqa == "any":
            words = "q has %lld heads, which is not a multiple of the %lld heads of k and v"
            check("p->HKV <= 0 || p->HQ < 0 || p->HQ % p->HKV", words, *heads)
        else:
            words = (
                f"q must have {spec.gqa} head{'s' * (spec.gqa != 1)} for each of k and v, got %lld and %lld"
            )
            check(f"p->HQ != {spec.gqa} * p->HKV", words, *heads)
        queries, keys = ("p->TQ", "p->TK") if self.packed else ("p->SQ", "p->SK")
        words = "there may be 2**29 queries and as many keys, got %lld and %lld"
        check(f"kgen_max({queries}, {keys}) > INT64_C(1) << 29", words, queries, keys)
        if self.packed:
            check("p->B < 1", "cu_seqlens_q must be [N + 1] for N sequences, got %lld", "p->B + 1")
        for size, length in (("SQ", spec.lengths.q), ("SK", spec.lengths.kv)):
            multiple = getattr(length, "multiple_of", None)
            if multiple and multiple > 1:
                check(
                    f"p->{size} % {multiple}",
                    f"{size} must be a multiple of {multiple}, got %lld",
                    f"p->{size}",
                )
        if self.plan.self_attention:
            check("p->SQ != p->SK", "q and k must be equally long, got %lld and %lld", "p->SQ", "p->SK")
        for param in self._params():
            if not param["real"]:
                at, limit = f"a->{param['member']}", "INT64_C(1) << 30"
                words = f"{param['label']} must lie within 2**30 of zero, got %lld"
                check(f"{at} > {limit} || {at} < -({limit})", words, at)
        return checks
