"""The attention of FlashAttention's arguments that a spec computes: causal, full, windows, caps.

A spec qualifies only if it computes exactly this attention. The check compares trees, so each
equivalent expression qualifies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.canonical import canonical
from kgen.expr.mask_form import conjuncts
from kgen.expr.nodes import Call, Const, Node, Read, Type, Var
from kgen.expr.softmax_form import KV_IDX, Q_IDX, SCORE
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.spec import AttentionSpec
from kgen.spec.load import Loaded
from kgen.spec.source import Document
from kgen.targets.triton.text import TORCH_DTYPES

SQ, SK = Var("SQ", Type.INT), Var("SK", Type.INT)
SHIFT = call("sub", SK, SQ)
FROM_START, FROM_END = Q_IDX, call("add", Q_IDX, SHIFT)
"""The position of a query, with the first query at the first key, or the last at the last key."""


@dataclass(frozen=True)
class Window:
    """The keys that a query sees: from `left` positions before it to `right` positions after it.

    None is no bound. Positions are `from_end` if the last query has the position of the last key.
    """

    left: int | None
    right: int | None
    from_end: bool


@dataclass(frozen=True)
class Covered:
    """The attention of a spec in FlashAttention's arguments."""

    loaded: Loaded
    window: Window
    softcap: float | None
    slopes: str | None
    """The buffer with the slopes of ALiBi."""

    @property
    def spec(self) -> AttentionSpec:
        """The model of the spec."""
        spec: AttentionSpec = self.loaded.spec
        return spec

    @property
    def layout(self) -> str:
        """The layout of the tensors of a call."""
        if self.spec.varlen:
            return "packed"
        if self.spec.paged_kv is not None:
            return "pages"
        return "cache" if self.spec.per_batch else "dense"

    @property
    def promises(self) -> bool:
        """True if lengths must be multiples of a number above 1."""
        lengths = self.spec.lengths
        return max(lengths.q.multiple_of, lengths.kv.multiple_of) > 1

    def row(self, module: str) -> str:
        """Return Python code of the kernels, which are in `module`."""
        spec, lengths = self.spec, self.spec.lengths
        fields: dict[str, object] = {
            "name": spec.name,
            "module": module,
            "layout": self.layout,
            "head": (spec.head_dim.qk, spec.head_dim.v),
            "group": None if spec.gqa == "any" else spec.gqa,
            "left": self.window.left,
            "right": self.window.right,
            "from_end": self.window.from_end,
            "backward": "backward" in spec.passes,
        }
        code = [f"{name}={_literal(value)}" for name, value in fields.items()]
        code.insert(3, f"dtype=torch.{TORCH_DTYPES[spec.dtype]}")
        if self.softcap is not None:
            code.append(f"softcap={self.softcap!r}")
        if self.slopes is not None:
            axes = len(spec.buffers[self.slopes].shape)
            code += [f"slopes={_literal(self.slopes)}", f"slope_axes={axes}"]
        if self.promises:
            code.append(f"multiples={(lengths.q.multiple_of, lengths.kv.multiple_of)!r}")
        if spec.paged_kv is not None:
            code.append(f"page={spec.paged_kv.page_size}")
        return f"Kernels({', '.join(code)})"

    @property
    def words(self) -> str:
        """A description of the attention for the docstring of a package."""
        left, right = self.window.left, self.window.right
        words = "full"
        if (left, right) == (None, 0):
            words = "causal"
        elif (left, right) != (None, None):
            bounds = ", ".join("-1" if bound is None else str(bound) for bound in (left, right))
            words = f"window_size ({bounds})"
        if self.softcap is not None:
            words += f", softcap {self.softcap!r}"
        words += ", ALiBi" if self.slopes is not None else ""
        layouts = {"packed": ", packed", "cache": ", for caches", "pages": ", for paged caches"}
        return words + layouts.get(self.layout, "")


def covered(loaded: Loaded, callers: str, *, everything: bool) -> Covered:
    """Return the attention of a spec for `callers`.

    `everything` is true if they support capped scores and caches. Raise `KgenError` if the spec
    computes anything else.
    """
    variant = Variant(loaded)
    window, slopes = _window(variant)
    wrong = [*_wrong(variant, callers, slopes, everything=everything)]
    if window is None:
        hint = "write a causal mask or a window of positions, such as `q_idx >= kv_idx`"
        message = f"{callers} compute causal, full and window attention, and this mask is another"
        wrong.append(at_field(loaded, "mask_mod", message, hint))
    if wrong or window is None:
        raise KgenError(wrong)
    return Covered(loaded, window, variant.softcap, slopes)


def _wrong(
    variant: Variant, callers: str, slopes: str | None, *, everything: bool
) -> Iterator[Diagnostic]:
    """Yield the features of a spec that `callers` do not have, apart from its mask."""
    spec, loaded = variant.spec, variant.loaded
    score = variant.with_numbers(variant.trees.get("score_mod", SCORE))
    known = variant.softcap is not None or slopes is not None
    if score != SCORE and not (everything and known):
        only = " except `cap * tanh(score / cap)` and ALiBi" if everything else ""
        message = f"{callers} have no `score_mod`{only}"
        yield at_field(loaded, "score_mod", message, "remove `score_mod`")
    runtime = any(p.runtime for p in spec.params.values())
    fields = (
        ("buffers", bool(spec.buffers) and not everything, "pass no buffers", "remove the buffers"),
        (
            "buffers",
            bool(spec.buffers) and everything and slopes is None,
            "pass no buffers except slopes of ALiBi, [HQ] or [B, HQ] fp32",
            "remove the buffers",
        ),
        ("params", runtime, "pass no run-time parameters", "make them compile-time constants"),
        ("sinks", spec.sinks, "have no attention sinks", "remove `sinks`"),
        ("block_mask", spec.block_mask == "always", "pass no block mask", "remove `block_mask`"),
        (
            "backward_in_parts",
            spec.backward_in_parts,
            "compute gradients in one call",
            "remove `backward_in_parts`",
        ),
        ("passes", "forward" not in spec.passes, "need the pass `forward`", "add `forward`"),
        (
            "targets",
            spec.targets.triton is None,
            "call the files of the target `triton`",
            "add the target `triton`",
        ),
        (
            "paged_kv" if spec.paged_kv is not None else "lengths",
            spec.per_batch and not everything,
            "have no caches with a length per sequence",
            "write a spec of whole sequences or of packed sequences",
        ),
    )
    for field, holds, message, hint in fields:
        if holds:
            yield at_field(loaded, field, f"{callers} {message}", hint)


def _window(variant: Variant) -> tuple[Window | None, str | None]:
    """Return the window that the mask of a spec is, or None, and the buffer of ALiBi slopes."""
    spec = variant.spec
    shifted: list[Node] = [] if spec.aligned_to_end or spec.per_batch else [FROM_END]
    windows: list[tuple[Window, str | None]] = []
    for position in (FROM_START, *shifted):
        if (found := _bounds(variant, position)) is not None:
            slopes = slopes_of(variant, position, causal=found[1] == 0)
            # Without slopes, a full mask is the same from both ends.
            same = found == (None, None) and slopes is None
            from_end = spec.aligned_to_end or position is FROM_END or same
            windows.append((Window(*found, from_end), slopes))
    with_slopes = [one for one in windows if one[1] is not None]
    return next(iter((*with_slopes, *windows)), (None, None))


def slopes_of(variant: Variant, position: Node, *, causal: bool) -> str | None:
    """Return the buffer of slopes if the score is that of ALiBi, or None."""
    spec = variant.spec
    shapes: dict[tuple[object, ...], tuple[str, ...]]
    shapes = {("HQ",): ("h",), ("B", "HQ"): ("b", "h")}
    name, buffer = next(iter(spec.buffers.items()), ("", None))
    if buffer is None or len(spec.buffers) > 1 or buffer.dtype != "fp32":
        return None
    if (indices := shapes.get(buffer.shape)) is None:
        return None
    slope = Read(name, tuple(Var(index, Type.INT) for index in indices), Type.FLOAT)
    far = call("abs", call("sub", position, KV_IDX))
    forms = [
        call("sub", SCORE, call("mul", slope, far)),
        call("sub", SCORE, call("mul", far, slope)),
        call("add", SCORE, call("mul", call("neg", slope), far)),
    ]
    if causal:  # no key is after its query
        after = call("sub", KV_IDX, position)
        forms += [
            call("add", SCORE, call("mul", *pair)) for pair in ((slope, after), (after, slope))
        ]
    score = variant.with_numbers(variant.trees.get("score_mod", SCORE))
    found = (canonical({"score_mod": form})["score_mod"] for form in forms)
    return name if score in [variant.with_numbers(one) for one in found] else None


def _bounds(variant: Variant, position: Node) -> tuple[int | None, int | None] | None:
    """Return the bounds of a mask around `position`, or None for another mask."""
    left = right = None
    for condition in map(variant.with_numbers, variant.conditions):
        width, before = width_of(condition, position), reach_of(condition, position)
        if width is not None and width > 0 and left is None:
            left = width - 1
        elif before is not None and before >= 0 and right is None:
            right = before
        else:
            return None
    return left, right


def width_of(condition: Node, position: Node) -> int | None:
    """Return w of a condition `position - kv_idx < w`, or None."""
    match condition:
        case Call("lt", (_, Const(int(w)))) if condition == _canonical(
            "lt", call("sub", position, KV_IDX), w
        ):
            return w
    return None


def reach_of(condition: Node, position: Node) -> int | None:
    """Return w of a condition `kv_idx <= position + w`, or None."""
    if condition == only(call("ge", position, KV_IDX)):
        return 0
    match condition:
        case Call("ge", (_, Const(int(w)))) if condition == _canonical(
            "ge", call("sub", position, KV_IDX), w
        ):
            return -w
    return None


def _canonical(fn: str, left: Node, width: int) -> Node:
    return only(call(fn, left, Const(width, Type.INT)))


def only(condition: Node) -> Node:
    """Return a condition in canonical form."""
    (found,) = conjuncts(canonical({"mask_mod": condition})["mask_mod"])
    return found


def at_field(loaded: Loaded, field: str, message: str, hint: str) -> Diagnostic:
    """Return a diagnostic at a field of a spec, or at its beginning."""
    message = f"`{loaded.spec.name}`: {message}"
    document = Document(loaded.text, loaded.path.as_posix())
    if field in document.data:
        return document.value("no-adapter", message, (field,), hint)
    return Diagnostic("no-adapter", message, loaded.path.as_posix(), 1, 1, hint=hint)


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
