"""Chunk output from C: what `templates/chunk_output/c` names, of the plan that the emitted launcher is made of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kgen.kernels.chunk_output.plan.planning import ChunkOutputPlan, plan_chunk_output
from kgen.kernels.chunk_output.plan.tiles import Tile, tile_tables
from kgen.kernels.chunk_output.targets.triton.native_example import chunk_output_example
from kgen.kernels.chunk_output.targets.triton.sources import sources
from kgen.spec.load import Loaded
from kgen.targets import opening
from kgen.targets.native import WORDS, Native, Tiles, prefix_of, tensor, unique
from kgen.targets.template import Untyped, names
from kgen.targets.triton import tables

Fields = dict[str, Any]
HINT = "make tensors contiguous, or name heads to `kgen build`, as `--heads` or `--gqa`"
FAR_TOKENS, FAR_COLUMNS = 24, 23
"""Kernels multiply positions by strides in 32 bits: strides below these powers of two are taken."""
_NAMES = """
o_ptr do_ptr dq_ptr dk_ptr dv_ptr dh_ptr dg_ptr stride_dg cu_seqlens_ptr chunk_indices_ptr N T NT scale H HV
BLOCK BLOCK_K BLOCK_V num_warps num_stages maxnreg
"""
"""What kernels call their arguments, beside the inputs."""


def native(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """What calls the kernels of a spec. `sizes` are those of what it leaves open that there is machine code for; all
    chips have the same kernels."""
    return _Fields(loaded, plan_chunk_output(loaded), sizes).native()


class _Fields:
    """Spells one plan."""

    def __init__(self, loaded: Loaded, plan: ChunkOutputPlan, sizes: Mapping[str, Sequence[int]]) -> None:
        self.loaded, self.plan, self.spec, self.open = loaded, plan, plan.spec, sizes
        self.name = prefix_of(loaded)
        head = self.spec.head_dim
        self.K, self.V, self.BT = head.qk, head.v, self.spec.chunk_size
        self.tables = tile_tables(plan.spec)
        self.has_dg = plan.slope is not None
        (source,) = sources(loaded)
        self.emitted = names(source.text)

    def native(self) -> Native:
        named = {"forward": self.tables.forward}
        if self.plan.backward:
            named |= {"dvdh": self.tables.dvdh, "dqdk": self.tables.dqdk}
        tiles = [
            Tiles(
                f"{name}_tiles",
                [
                    (chips, _in_c(tile))
                    for chips, tile in tables.rows({chip: [tile] for chip, tile in table.items()})
                ],
            )
            for name, table in named.items()
        ]
        context = self._context()
        context |= {"example": chunk_output_example(self.loaded, self.plan, context, self.open)}
        header, program, example = (
            Untyped(f"chunk_output/c/{file}.j2", context)
            for file in ("chunk_output.h", "chunk_output.c", "example.cpp")
        )
        return Native(header, program, example, self._names(context), tiles, HINT)

    def _names(self, context: Fields) -> list[str]:
        names = [f"{t['name']}_ptr" for t in context["inputs"]]
        axes = dict.fromkeys("qkvoxy", "bthd") | {"h": f"bnh{self.spec.state_layout}", "g": "bth"}
        names += [f"stride_{x}{axis}" for x, own in axes.items() for axis in own]
        return unique([*names, "g_ptr", "g_gamma_ptr", "stride_gamma", *_NAMES.split()])

    def _context(self) -> Fields:
        spec, plan = self.spec, self.plan
        inputs, of_backward = self._inputs(), self._of_backward()
        cu_seqlens, chunk_indices = self._packing()
        sizes = ["B", "T", "H", "HV", "NT", *["N"] * spec.varlen]
        return {
            "name": self.name,
            "guard": f"{self.name.upper()}_H",
            "license": spec.license.in_comment(),
            "summary": opening(spec, in_comment=True),
            "passes": ["forward", *["backward"] * plan.backward],
            "backward": plan.backward,
            "has_dg": self.has_dg,
            "packed": spec.varlen,
            "K": self.K,
            "V": self.V,
            "BT": self.BT,
            "default_scale": repr(self.K**-0.5),
            "chunks": "the chunks of all sequences"
            if spec.varlen
            else f"the ceil(T / {self.BT}) chunks of a row",
            # As the emitted file says it.
            **{name: self.emitted[name] for name in ("before", "between", "formula", "head_words")},
            "inputs": inputs,
            "packing": [cu_seqlens, chunk_indices] if spec.varlen else [],
            "cu_seqlens": cu_seqlens,
            "chunk_indices": chunk_indices,
            "sizes": sizes,
            "plain": [size for size in sizes if size != "B"],
            "o": self._of_tokens("o", "HV", self.V, "written by forward", contiguous=True),
            "of_backward": of_backward,
            "parts": self.parts,
            "checks": self._checks(inputs),
            "checks_of_backward": [_apart(of_backward["do"], 1, "tokens", FAR_COLUMNS)],
        }

    @property
    def parts(self) -> int:
        """Blocks of columns that leave a share of dg each, on the chip that has most."""
        return max(self.K // tile.BLOCK_K for tile in self.tables.dqdk.values())

    # --- tensors ---

    def _of_tokens(self, name: str, heads: str, width: int, said: str = "", **more: Any) -> Fields:
        """[B, T, heads, width], or as v is laid out. `said` follows shape and dtype."""
        padded = self.spec.v_layout == "chunk_padded" and name in ("v", "dv")
        length, rows = (f"p->NT * {self.BT}", f"NT * {self.BT}") if padded else ("p->T", "T")
        sizes = ["p->B", length, f"p->{heads}", str(width)]
        words = f"[B, {rows}, {heads}, {width}] {WORDS[self.spec.dtype]}"
        return self._named(name, sizes, self.spec.dtype, words, said, **more)

    def _states(self, name: str, said: str, **more: Any) -> Fields:
        """[B, NT, HV, K, V] or [B, NT, HV, V, K]."""
        sides = {"k": self.K, "v": self.V}
        state = [str(sides[side]) for side in self.spec.state_layout]
        words = f"[B, NT, HV, {', '.join(state)}] {WORDS[self.spec.state]}"
        return self._named(name, ["p->B", "p->NT", "p->HV", *state], self.spec.state, words, said, **more)

    def _named(self, name: str, sizes: list[str], dtype: str, words: str, said: str, **more: Any) -> Fields:
        words += ", contiguous" * bool(more.get("contiguous")) + (f": {said}" if said else "")
        of = tensor(name, sizes, dtype, words, **{"widest": f"(INT64_C(1) << {FAR_COLUMNS}) - 1"} | more)
        return of | {"name": name, "count": " * ".join(sizes)}

    def _inputs(self) -> list[Fields]:
        """What both passes read of real numbers, with the first of its strides' names."""
        padding = "padded to whole chunks; what is in the padding does not matter" * (
            self.spec.v_layout == "chunk_padded"
        )
        found = [
            self._of_tokens("q", "H", self.K),
            self._of_tokens("k", "H", self.K),
            self._of_tokens("v", "HV", self.V, padding),
            self._states("h", "the state that each chunk begins with"),
        ]
        strides = {x: f"stride_{x}b" for x in "qkvhg"} | {"g_gamma": "stride_gamma"}
        gate, words = self.spec.gate_dtype, WORDS[self.spec.gate_dtype]
        if "g" in self.plan.gates:
            sizes = ["p->B", "p->T", "p->HV"]
            said = "summed up inside each chunk"
            # Heads are reckoned in 64 bits.
            found.append(self._named("g", sizes, gate, f"[B, T, HV] {words}", said, widest="INT32_MAX"))
        if "g_gamma" in self.plan.gates:
            found.append(self._named("g_gamma", ["p->HV"], gate, f"[HV] {words}", ""))
        return [t | {"stride": strides[t["name"]]} for t in found]

    def _packing(self) -> tuple[Fields, Fields]:
        """Of packed sequences: where they are, and what the chunks are of. There is machine code for int32."""
        ends = (
            "where each sequence begins, from 0 on, and the last one ends; B is 1; tokens after it give zeros"
        )
        chunks = "(sequence, chunk inside it) of each chunk; NULL where the call is to find them"
        words, more = ("[N + 1] int32", "[NT, 2] int32"), {"contiguous": True}
        return (
            self._named("cu_seqlens", ["p->N + 1"], "int32", words[0], ends, **more),
            self._named("chunk_indices", ["p->NT", "2"], "int32", words[1], chunks, **more),
        )

    def _of_backward(self) -> Fields:
        """What backward alone is given: `do`, and gradients by whose strides' names they have."""
        dq, dk = (self._of_tokens(x, "H", self.K, "written", contiguous=True) for x in ("dq", "dk"))
        dv = self._of_tokens("dv", "HV", self.V, "written", contiguous=True)
        found: Fields = {
            "do": self._of_tokens("do", "HV", self.V),
            "of_keys": [dq | {"stride": "stride_xb"}, dk | {"stride": "stride_yb"}],
            "of_values": [
                dv | {"stride": "stride_vb"},
                self._states("dh", "written", contiguous=True) | {"stride": "stride_hb"},
            ],
            "dg": [],
        }
        if self.has_dg:
            sizes, words = [str(self.parts), "p->B", "p->T", "p->HV"], f"[{self.parts}, B, T, HV] float32"
            said = f"written, {'parts whose sum is ' * (self.parts > 1)}the gradient of g"
            found["dg"] = [self._named("dg", sizes, "fp32", words, said, contiguous=True)]
        # Values that are padded to chunks have no row for a token of no chunk.
        of_tokens = [
            *found["of_keys"],
            *[found["of_values"][0]] * (self.spec.v_layout == "token"),
            *found["dg"],
        ]
        tensors = [found["do"], *found["of_keys"], *found["of_values"], *found["dg"]]
        return found | {"tensors": tensors, "of_tokens": of_tokens}

    # --- checks ---

    def _checks(self, inputs: Sequence[Fields]) -> list[Fields]:
        """Of the numbers of heads and chunks and of strides, as of the emitted function."""
        heads, both = self.spec.heads, ["(long long)p->H", "(long long)p->HV"]
        if heads.qk:
            wrong = f"p->H != {heads.qk} || p->HV != {heads.v}"
            words = f"expects {heads.qk} and {heads.v} heads, got %lld and %lld"
        elif heads.group:
            wrong = f"p->HV != {heads.group} * p->H"
            words = f"expects {heads.group} value heads for each head of q: q has %lld, h has %lld"
        else:
            wrong = "p->H <= 0 || p->HV % p->H"
            words = "q has %lld heads, of which the %lld value heads are not a multiple"
        checks = [{"wrong": wrong, "message": words, "given": both}]
        if self.spec.varlen:
            one = {"wrong": "p->B != 1", "message": "packed sequences are one row, B = 1, got %lld"}
            checks.append(one | {"given": ["(long long)p->B"]})
            few = {"wrong": "p->N < 1", "message": "cu_seqlens must be [N + 1] for N sequences, got [%lld]"}
            checks.append(few | {"given": ["(long long)p->N + 1"]})
        else:
            chunks = f"kgen_cdiv(p->T, {self.BT})"
            words = f"%lld tokens are %lld chunks of {self.BT}, h has %lld states"
            numbers = [f"(long long){n}" for n in ("p->T", chunks, "p->NT")]
            checks.append({"wrong": f"p->NT != {chunks}", "message": words, "given": numbers})
        for t in inputs:
            if t["name"] in ("q", "k", "v", "g"):
                checks.append(_apart(t, 1, "tokens", FAR_TOKENS))
            elif t["name"] == "h":
                checks.append(_apart(t, 3, "rows", FAR_COLUMNS))
        return checks


def _apart(of: Fields, axis: int, what: str, power: int) -> Fields:
    wrong = f"a->{of['member']}.strides[{axis}] >= INT64_C(1) << {power}"
    return {
        "wrong": wrong,
        "message": f"{what} of {of['label']} may not lie 2**{power} elements apart",
        "given": [],
    }


def _in_c(tile: Tile) -> Mapping[str, int]:
    """No bound of registers is 0."""
    return {name: value or 0 for name, value in asdict(tile).items()}
