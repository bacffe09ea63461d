"""Scales of a quantized cache: for all keys of a KV head, or for each key.

The kernel multiplies `scale` and the result by the scales of a head. It multiplies the scores and
the weights of a tile by the scales of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.kernels.attention.lowered.model import Param
from kgen.targets.code import Code, If, Name, Statement, assign, op, row, text

SCALE_WORDS = (
    "k_scale, v_scale: the factors of the stored keys and values: numbers, or float32 [], [1], "
    "[HKV] or [pages, page_size, HKV], whose sizes may be 1 (HND: [pages, HKV, page_size]). "
    "Default: 1."
)
V_FACTOR = "v_factor"
"""The factor of the values of a quantized cache."""
SCALES = ("k_scale", "k_scales", "k_steps", "v_scale", "v_scales", "v_steps", V_FACTOR)
"""The names of the scales and of their strides in the launcher."""
SCALE_TENSORS = ("k_scale", "k_scales", "v_scale", "v_scales")
"""The tensors among them. A scale is None or a tensor."""


@dataclass(frozen=True)
class Scaled:
    """The factors of a quantized cache."""

    quantized: bool

    @property
    def values_scaled(self) -> str | None:
        """The factor of the result."""
        return V_FACTOR if self.quantized else None


@dataclass(frozen=True)
class KeyScaled(Scaled):
    """The factors in a kernel that loads keys."""

    scaled_values: bool
    """True if the kernel multiplies values by the scales of keys, not weights. In FP16, the product
    of a weight and a small scale would lose bits.
    """

    @property
    def scales_of_tile(self) -> list[list[str]]:
        """The parameters of the loop's function for the scales of keys."""
        names = ("{0}_scales_ptr", "stride_{0}sp", "stride_{0}ss")
        return [[name.format(x) for x in "kv" for name in names]] if self.quantized else []

    @property
    def scale_lines(self) -> list[Statement]:
        """The statements that load the scales of a KV head, and find the scales of its keys."""
        return [line for x in "kv" for line in _of_head(x)] if self.quantized else []

    @property
    def page_of_keys(self) -> list[Statement]:
        """The statement that names the page of a tile of keys as the page of each key."""
        return [assign("pages", Name("page"))] if self.quantized else []

    @property
    def scores_scaled(self) -> list[Statement]:
        """The statements that multiply scores by the scales of keys."""
        return self._by_key("k", "qk", "k_of_keys[None, :]") if self.quantized else []

    @property
    def weights_scaled(self) -> list[Statement]:
        """The statements that multiply weights by the scales of values, or only load them."""
        if not self.quantized:
            return []
        return self._by_key("v", None if self.scaled_values else "p", "v_of_keys[None, :]")

    def _by_key(self, x: str, changed: str | None, scales: str) -> list[Statement]:
        at = f"{x}_scales_ptr + pages * stride_{x}sp + kv_idx % PAGE * stride_{x}ss"
        loaded = If(
            Name("MASKED"),
            (assign(f"{x}_of_keys", op(f"tl.load({at}, mask=kv_live, other=0.0)")),),
            (assign(f"{x}_of_keys", op(f"tl.load({at})")),),
        )
        product = [assign(changed, row("mul", changed, scales))] if changed else []
        return [If(_by_key(x), (loaded, *product))]


def of_head(name: str, x: str) -> Statement:
    """Return the statement that multiplies a factor by the scale of a KV head, if there is one."""
    scale = op(f"tl.load({x}_scale_ptr + h_kv * stride_{x}_scale)")
    line = assign(name, row("mul", name, scale))
    return If(text(f"{x}_scale_ptr is not None"), (line,))


def _of_head(x: str) -> list[Statement]:
    own = assign(f"{x}_scales_ptr", op(f"{x}_scales_ptr + h_kv * stride_{x}sh"))
    return [of_head("scale" if x == "k" else V_FACTOR, x), If(_by_key(x), (own,))]


def _by_key(x: str) -> Code:
    return text(f"{x}_scales_ptr is not None")


def scale_params(*, merge: bool = False) -> list[Param]:
    """Return the parameters of the attention kernel or of the merging kernel for scales."""
    if merge:
        return [Param("v_scale_ptr", "v_scale"), Param("stride_v_scale", "v_steps[0]")]
    return [
        param
        for x in "kv"
        for param in (
            Param(f"{x}_scale_ptr", f"{x}_scale"),
            Param(f"{x}_scales_ptr", f"{x}_scales"),
            Param(f"stride_{x}_scale", f"*{x}_steps"),
            Param(f"stride_{x}sp", None, "tl.int64"),
            *(Param(f"stride_{x}s{d}", None) for d in "sh"),
        )
    ]


def scale_steps(*, merge: bool = False) -> list[str]:
    """Return the parameters for scales that kernels are not specialized on."""
    return [p.name for p in scale_params(merge=merge) if p.name.startswith("stride_")]


def scale_lines(function: str) -> list[str]:
    """Return the statements that take the scales of a cache as numbers or as tensors."""
    return [
        f'{x}_scale, {x}_scales, {x}_steps, {x}_factor = _serve_scale("{function}", "{x}", '
        f"{x}_scale, k_pages, kv_layout)"
        for x in "kv"
    ]
