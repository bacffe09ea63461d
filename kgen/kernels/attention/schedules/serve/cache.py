"""The kernel and the function that write new keys and values into a cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.lowered.model import arguments, declared
from kgen.kernels.attention.schedules.serve.scales import (
    SCALE_TENSORS,
    SCALE_WORDS,
    scale_lines,
    scale_params,
    scale_steps,
)
from kgen.kernels.attention.spec import AttentionSpec
from kgen.targets.code import If, Name, Run, Statement, assign, op, text
from kgen.targets.signature import Signature
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

KV_DTYPES: Mapping[str, str] = {
    **TORCH_DTYPES,
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}
"""The PyTorch dtypes of a cache."""
_LARGEST = {"fp8_e4m3": "448.0", "fp8_e5m2": "57344.0", "int8": "127.0"}
"""The largest numbers of quantized dtypes."""
_ROUNDING = "12582912.0"
"""1.5 * 2^23: float32 numbers of this size have no fraction."""


@dataclass(frozen=True)
class Cache(Template):
    """The checks of a cache that several functions share."""

    template: ClassVar[str] = "attention/serve/_cache.j2"

    width_qk: int
    width_v: int
    kv_torch_dtype: str
    quantized: bool
    chip_lines: list[str]
    """The statements that refuse a chip without the dtype of the cache."""

    def launch_functions(self) -> Iterable[str]:
        return ("_dtype", "_real") if self.quantized else ()


@dataclass(frozen=True)
class Appended:
    """Keys or values that the kernel writes."""

    name: str
    width: int
    """Number of columns."""
    size: int
    """The same, padded to a power of two."""
    stored: list[Statement]
    """The statements that quantize them."""


@dataclass(frozen=True)
class AppendKernel(Template):
    """The kernel that writes keys and values into pages."""

    template: ClassVar[str] = "attention/serve/_append.j2"

    no_specialize: str
    scale_params: list[str]
    factor_params: list[str]
    set_params: list[str]
    tensors: list[Appended]


@dataclass(frozen=True)
class Append(Template):
    """The function `NAME_append`."""

    template: ClassVar[str] = "attention/serve/_append_launcher.j2"

    name: str
    signature: str
    dtype: str
    kv_dtype: str
    torch_dtype: str
    width_qk: int
    width_v: int
    quantized_words: str
    """The quantization, for the end of a sentence of the docstring."""
    scale_words: list[str]
    """The lines of the docstring on scales."""
    quantized_lines: list[str]
    """The statements that take a scale as a number or as a tensor."""
    scales: list[str]
    """The tensors of scales."""
    scale_args: list[str]
    """The arguments for tensors of scales."""
    factor_args: list[str]
    """The arguments for scales as numbers."""
    set_args: list[str]
    """The argument that lets the kernel set scales."""
    interpreted_lines: list[str]
    """The statements that store float32 in Triton's interpreter."""
    written_lines: list[str]
    """The statements that convert these numbers."""

    def launch_functions(self) -> Iterable[str]:
        return ("_dense", "_dtype", "_launch", "_layouts", "_next_power_of_2")


_INTERPRETED = [
    "pages = k_pages, v_pages",
    "if _arch(k.device) == 0:",
    "    k_pages, v_pages = k_pages.float(), v_pages.float()  # Triton's interpreter",
]
_WRITTEN = [
    "if _arch(k.device) == 0:",
    "    pages[0].copy_(k_pages)",
    "    pages[1].copy_(v_pages)",
]


_SET_WORDS = (
    "set_scales: True to set the scales of the written tokens and heads to their largest absolute "
    "value, divided by the largest number of the cache."
)


def _quantized_lines(function: str) -> list[str]:
    """Return the statements that take the scales, and check that they can be set."""
    return [
        *scale_lines(function),
        "if set_scales and 0 in (*k_steps[1:], *v_steps[1:]):",
        '    needs = "set_scales needs a k_scale and a v_scale for each token and head"',
        f'    raise ValueError(f"{function}: {{needs}}")',
    ]


_OLDER_CHIPS = [
    "if 0 < (arch := _arch(k_pages.device)) < 89:",
    '    needs = "a cache in float8_e4m3fn needs compute capability 8.9 or newer"',
    '    raise ValueError(f"{name}: {needs}, got {arch / 10}")',
]


def cache_of(spec: AttentionSpec) -> Cache:
    """Return the checks of a spec's cache."""
    dtype = spec.kv_dtype or spec.dtype
    return Cache(
        width_qk=spec.head_dim.qk,
        width_v=spec.head_dim.v,
        kv_torch_dtype=KV_DTYPES[dtype],
        quantized=spec.kv_dtype is not None,
        chip_lines=_OLDER_CHIPS if dtype == "fp8_e4m3" else [],
    )


def append_kernel(spec: AttentionSpec) -> AppendKernel:
    """Return the kernel that writes keys and values into pages."""
    quantized = spec.kv_dtype is not None
    scales = scale_params() if quantized else []
    factors = ["k_factor", "v_factor"] if quantized else []
    numbers = ["capacity", "HKV", *factors, *(scale_steps() if quantized else [])]
    return AppendKernel(
        no_specialize=json.dumps(numbers),
        scale_params=declared(scales),
        factor_params=factors,
        set_params=["SET_SCALES: tl.constexpr"] if quantized else [],
        tensors=[
            Appended(x, width, 1 << (width - 1).bit_length(), _quantized(spec, x))
            for x, width in (("k", spec.head_dim.qk), ("v", spec.head_dim.v))
        ],
    )


def _quantized(spec: AttentionSpec, x: str) -> list[Statement]:
    """Return the statements that divide values by their scale, and round to the cache's dtype."""
    if spec.kv_dtype is None:
        return []
    most = _LARGEST[spec.kv_dtype]
    scale = op(f"tl.load({x}_scale_ptr + heads * stride_{x}_scale, mask=heads < HKV, other=1.0)")
    divided = assign("values", op("tl.div_rn(values, {0})", scale))
    lines: list[Statement] = [
        assign("values", op(f"tl.div_rn(values.to(tl.float32), {x}_factor)")),
        If(text(f"{x}_scale_ptr is not None"), (divided,)),
        If(text(f"{x}_scales_ptr is not None"), _by_token(x, most)),
        assign("values", op(f"tl.clamp(values, -{most}, {most}, tl.PropagateNan.ALL)")),
    ]
    if spec.kv_dtype == "int8":
        # Round to nearest, ties to even.
        lines.append(assign("values", op(f"(values + {_ROUNDING}) - {_ROUNDING}")))
    return lines


def _by_token(x: str, most: str) -> tuple[Statement, ...]:
    """Return the statements that divide values by the scales of a token, which they may set."""
    at = f"{x}_scales_ptr + page * stride_{x}sp + row * stride_{x}ss + heads * stride_{x}sh"
    # With a bound, a token of zeros has a scale above zero.
    largest = "tl.maximum(tl.max(tl.abs(values), 1, keep_dims=True), 2.0**-100)"
    store = "tl.store(scale_ptrs, scales, mask=heads < HKV)"
    return (
        assign("scale_ptrs", op(at)),
        If(
            Name("SET_SCALES"),
            (assign("scales", op(f"tl.div_rn({largest}, {most})")), Run(op(store))),
            (assign("scales", op("tl.load(scale_ptrs, mask=heads < HKV, other=1.0)")),),
        ),
        assign("values", op("tl.div_rn(values, scales)")),
    )


def append_of(spec: AttentionSpec) -> Append:
    """Return the function that writes keys and values into pages."""
    quantized = spec.kv_dtype is not None
    scales = ("k_scale", "v_scale") if quantized else ()
    fp8 = spec.kv_dtype in ("fp8_e4m3", "fp8_e5m2")
    defaults = [*((name, "None") for name in scales), ("kv_layout", '"NHD"')]
    if quantized:
        defaults.append(("set_scales", "False"))
    positional = ("k", "v", "k_pages", "v_pages")
    return Append(
        name=spec.name,
        signature=str(Signature(positional, ("slot_mapping",), tuple(defaults))),
        dtype=spec.dtype,
        kv_dtype=spec.kv_dtype or spec.dtype,
        torch_dtype=TORCH_DTYPES[spec.dtype],
        width_qk=spec.head_dim.qk,
        width_v=spec.head_dim.v,
        quantized_words=", quantized" if quantized else "",
        scale_words=[SCALE_WORDS, _SET_WORDS] if quantized else [],
        quantized_lines=_quantized_lines(f"{spec.name}_append") if quantized else [],
        scales=[*SCALE_TENSORS] if quantized else [],
        scale_args=arguments(scale_params()) if quantized else [],
        set_args=["SET_SCALES=set_scales"] if quantized else [],
        factor_args=["k_factor", "v_factor"] if quantized else [],
        interpreted_lines=_INTERPRETED if fp8 else [],
        written_lines=_WRITTEN if fp8 else [],
    )
