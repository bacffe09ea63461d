"""The functions for serving: the call, the size of its workspace, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import KernelParams
from kgen.kernels.attention.lowered.row_max import RowResult, RowResults, row_results_of
from kgen.kernels.attention.schedules.serve.cache import (
    Append,
    Cache,
    append_of,
    cache_of,
)
from kgen.kernels.attention.schedules.serve.kernels import ServeKernels
from kgen.kernels.attention.schedules.serve.plan import ServePlan
from kgen.kernels.attention.schedules.serve.scales import (
    SCALE_TENSORS,
    SCALE_WORDS,
    SCALES,
    scale_lines,
)
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.interface import (
    SINK_CHECKS,
    Check,
    Interface,
    dtype_check,
    heads_rule,
)
from kgen.targets.arguments import Numbers, numbers_of
from kgen.targets.signature import Signature
from kgen.targets.template import Template, filled
from kgen.targets.triton.text import TORCH_DTYPES

WAVES = 2
"""Items that fit on the device at a time, for the number of parts of split tiles."""


@dataclass(frozen=True)
class LargestScores(Template):
    """The functions that allocate the largest score of each row, and return a call's results."""

    template: ClassVar[str] = "attention/serve/_largest.j2"

    name: str
    largest: RowResult

    @property
    def own_name(self) -> str:
        """The name of the function for a call."""
        return f"{self.name}_serve"


@dataclass(frozen=True)
class ServeLauncher(RowResults, KernelParams, Template):
    """The functions `NAME_serve` and `NAME_serve_workspace`."""

    template: ClassVar[str] = "attention/serve/_launcher.j2"
    optional_fields: ClassVar[tuple[str, ...]] = (
        *RowResults.optional_fields,
        *("largest_scores", "more_parts", "results", "returned"),
    )

    name: str
    signature: str
    dtype: str
    kv_dtype: str
    torch_dtype: str
    cache: Cache
    append: Append
    width_qk: int
    width_v: int
    part_width: int
    waves: int
    slots: str
    """The number of parts for which there is room, for a target number of items."""
    gqa_words: str
    last_stride: str
    """The largest last stride of q and of the pages."""
    argument_words: list[str]
    dead_row: str
    default_scale: str
    checks: list[Check]
    """The checks before the numbers of sequences and keys are known."""
    more_checks: list[Check]
    numbers: Numbers
    given: list[str]
    """The arguments of the function that launches the kernels."""
    laid_out: list[str]
    """The tensors whose layouts decide the compiled kernels."""
    scale_words: list[str]
    """The lines of the docstring on the scales of a cache."""
    quantized_lines: list[str]
    """The statements that take a scale as a number or as a tensor."""
    interpreted_lines: list[str]
    """The conversions for Triton's interpreter."""
    first_list: list[str]
    """The statements that choose the tiles of the lists."""
    items_args: list[str]
    """The arguments of the kernel that writes the lists of items."""
    merge_args: list[str]
    """The arguments of the kernel that merges parts."""

    def launch_functions(self) -> Iterator[str]:
        yield from ("_dense", "_dtype", "_launch", "_layouts", "_multiprocessors")
        yield from ("_no_gradients", "_no_tangents", "_real", "_tile")
        if len(self.first_list) > len(_ONE_LIST):
            yield from ("_cdiv", "_next_power_of_2")
        yield from self.numbers.launch_functions()

    @property
    def own_name(self) -> str:
        """The name of the function for a call."""
        return f"{self.name}_serve"

    @property
    def largest_scores(self) -> list[LargestScores]:
        """The functions for the results of rows."""
        return [LargestScores(self.name, row) for row in self.row_results]

    @property
    def more_parts(self) -> list[str]:
        """The parts of rows after their sums, in words."""
        return ["then their largest scores"] if self.row_results else []

    @property
    def results(self) -> str:
        """The results of a call, as arguments."""
        return "*out" if self.row_results else "out, lse"

    @property
    def returned(self) -> str:
        """The results that a call returns."""
        own = "".join(f'_results(*out, {row.argument} == "head")' for row in self.row_results)
        return own or "out if lse is None else (out, lse)"


def launcher_of(plan: ServePlan, kernels: ServeKernels, quantized: bool) -> ServeLauncher:
    """Return the functions for serving."""
    interface = Interface(plan.attention)
    spec, own = interface.spec, interface.spec.name
    buffers = [*spec.buffers, *(["sinks"] if spec.sinks else [])]
    sequences = ["block_table", "seq_lens", "cu_seqlens_q"]
    tensors = ["q", "k_pages", "v_pages", *sequences, *buffers]
    scales = SCALES if quantized else ()
    kv_dtype = spec.kv_dtype or spec.dtype
    names, rows = [*spec.buffers, *interface.runtime], row_results_of(spec)
    divisors = interface.divisor_lines(interface.runtime)
    return filled(
        ServeLauncher,
        kernels.params,
        name=own,
        signature=str(_signature(interface, quantized)),
        dtype=spec.dtype,
        kv_dtype=kv_dtype,
        torch_dtype=TORCH_DTYPES[spec.dtype],
        cache=cache_of(spec),
        append=append_of(spec),
        width_qk=spec.head_dim.qk,
        width_v=spec.head_dim.v,
        part_width=spec.head_dim.v + 1 + len(rows),
        row_results=rows,
        waves=WAVES,
        # A split tile has a part for each segment of its keys.
        slots="4 * target + 64" if plan.in_batches else "2 * target",
        gqa_words=interface.gqa_words(),
        last_stride=interface.widest_step(),
        argument_words=_words(interface),
        dead_row="zeros and its sink" if spec.sinks else "zeros and -inf",
        default_scale=f"{spec.head_dim.qk} ** -0.5",
        checks=_checks(),
        more_checks=_more_checks(spec, interface),
        numbers=numbers_of(
            f"{own}_serve", interface.runtime, plan.attention.called, names, divisors
        ),
        given=[*tensors, "scale", *interface.runtime, *scales],
        laid_out=[*tensors, *(SCALE_TENSORS if quantized else ())],
        scale_words=[SCALE_WORDS] if quantized else [],
        quantized_lines=[*scale_lines(f"{own}_serve"), "scale *= k_factor"] if quantized else [],
        interpreted_lines=_interpreted(spec.dtype, kv_dtype),
        first_list=_first_list(plan),
        items_args=_args(kernels.items_params),
        merge_args=_args(kernels.merge_params),
    )


def _args(params: KernelParams) -> list[str]:
    return [*params.tensor_args, *params.stride_args, *params.problem_args]


def _interpreted(dtype: str, kv_dtype: str) -> list[str]:
    """Return the conversions for Triton's interpreter: it cannot multiply bfloat16 or load FP8."""
    given = ["    q = q.float()"] if dtype == "bf16" else []
    if kv_dtype.startswith("fp8"):
        given.append("    k_pages, v_pages = k_pages.float(), v_pages.float()")
    return ["if _arch(q.device) == 0:  # Triton's interpreter", *given] if given else []


def _signature(interface: Interface, quantized: bool) -> Signature:
    scales = ("k_scale", "v_scale") if quantized else ()
    rows = row_results_of(interface.spec)
    outputs = ("out", "lse", *(row.tensor for row in rows))
    optional = ("scale", *outputs, *scales, "workspace", "max_seqlen_q")
    asked = ("return_lse", *(row.argument for row in rows))
    defaults = [*((name, "None") for name in optional), *((name, "False") for name in asked)]
    required = ("block_table", "seq_lens", "cu_seqlens_q", *interface.required())
    return Signature(("q", "k_pages", "v_pages"), required, (*defaults, ("kv_layout", '"NHD"')))


def _words(interface: Interface) -> list[str]:
    spec = interface.spec
    sinks = ["sinks: [HQ], logits that join the softmax without a value."] if spec.sinks else []
    return [
        *interface.argument_words(spec.buffers, ()),
        *sinks,
        *interface.argument_words((), interface.runtime),
    ]


def _checks() -> list[Check]:
    """Return the checks of the tensors that describe the sequences."""
    found = [dtype_check(name, name, ("int32",)) for name in _SEQUENCES]
    wrong = "seq_lens.dim() != 1 or cu_seqlens_q.shape != (len(seq_lens) + 1,)"
    words = "seq_lens must be [B] and cu_seqlens_q [B + 1], got {list(seq_lens.shape)} and "
    found.append(Check(wrong, f"{words}{{list(cu_seqlens_q.shape)}}"))
    wrong = "block_table.dim() != 2 or block_table.shape[0] != len(seq_lens)"
    words = "block_table must be [{len(seq_lens)}, n], got {list(block_table.shape)}"
    found.append(Check(wrong, words))
    others = ", ".join(("k_pages", "v_pages", *_SEQUENCES))
    wrong = f"any(x.device != q.device for x in ({others}))"
    found.append(Check(wrong, f"{others} must be on {{q.device}}"))
    wrong = "not (seq_lens.is_contiguous() and cu_seqlens_q.is_contiguous())"
    return [*found, Check(wrong, "seq_lens and cu_seqlens_q must be contiguous")]


_SEQUENCES = ("block_table", "seq_lens", "cu_seqlens_q")


def _more_checks(spec: AttentionSpec, interface: Interface) -> list[Check]:
    """Return the checks of sizes, numbers and buffers."""
    if spec.gqa == "any":
        words = "q has {HQ} heads, which is not a multiple of the {HKV} heads of the cache"
        heads = Check("HKV == 0 or HQ % HKV", words)
    else:
        words = heads_rule(spec.gqa).replace("k and v", "the cache")
        heads = Check(f"HQ != {spec.gqa} * HKV or not HKV", f"{words}, got {{HQ}} and {{HKV}}")
    most = interface.widest_step()
    lengths = Check(
        "max(T, SK_MAX) > 2**29",
        "there may be at most 2**29 queries and 2**29 keys, got {T} and {SK_MAX}",
    )
    row = "(block_table.shape[1] - 1) * block_table.stride(1) >= 2**31"
    return [
        heads,
        lengths,
        *interface.scalar_checks(interface.runtime),
        Check(
            f"max(q.stride(-1), k_pages.stride(-1), v_pages.stride(-1)) > {most}",
            f"the last stride of q and of the cache must be at most {most}: make them contiguous",
        ),
        Check(row, "a row of block_table must span fewer than 2**31 elements: make it contiguous"),
        *interface.buffer_checks(spec.buffers, "q.device"),
        *(SINK_CHECKS if spec.sinks else ()),
    ]


_FEW = "tile = _tile(_SERVE_FEW_TILES, arch)"
_ONE_LIST = [_FEW, 'rows, tiles = 2**31 - 1, [(tile, tile["BLOCK_M"], B)]']


def _first_list(plan: ServePlan) -> list[str]:
    """Return the statements that choose the tiles of the lists, and the sequences of each."""
    if plan.in_batches:
        return _ONE_LIST
    return [
        _FEW,
        "rows = max(16, _next_power_of_2(min(_cdiv(T, B), longest) * group))",
        'rows = min(tile["BLOCK_M"], rows)',
        "tiles = [(tile, rows, B)]",
        "if longest * group > rows:",
        "    tile = _tile(_SERVE_TILES, arch)",
        '    tiles.append((tile, tile["BLOCK_M"], min(B, T * group // (rows + 1))))',
        "else:",
        "    rows = 2**31 - 1  # list 0 has every sequence",
    ]
