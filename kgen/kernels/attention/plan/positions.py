"""Rewrite of `align`, `per_batch` and `gqa: 1` into the expressions.

Kernels use rows: query `i` of a call is `q_idx = i`, and there are SK keys. This step rewrites
other conventions into the expressions. Later steps (tile ranges, guards, gradients) need no case
for them.

    align: end                   q_idx is row + SK - SQ: the last query has the position of the last
                                 key
    lengths: {kv: {per_batch}}   a buffer kv_lens [B], `kv_idx < kv_lens[b]` in the mask, and
                                 kv_lens[b] instead of SK above
    gqa: 1                       HKV is HQ, in expressions and in shapes of buffers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kgen.expr.algebra import call
from kgen.expr.nodes import Node, Read, Type, Var, substitute
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.kernels.attention.spec import KV_LENS, AttentionSpec, Buffer
from kgen.spec.load import Loaded

HQ, HKV = Var("HQ", Type.INT), Var("HKV", Type.INT)


def positioned(loaded: Loaded) -> Loaded:
    """Return the spec with `align`, `per_batch` and `gqa: 1` written into its expressions and
    buffers.
    """
    loaded = _with_one_number_of_heads(loaded) if loaded.spec.gqa == 1 else loaded
    spec = loaded.spec
    end: Node = (
        Read(KV_LENS, (Var("b", Type.INT),), Type.INT) if spec.per_batch else Var("SK", Type.INT)
    )
    trees, named = dict(loaded.trees), dict(loaded.locals)
    # The queries of a cache are its latest tokens. Counted from zero, a causal mask would let a
    # single query see only the first key. flash-attn aligns in the same way.
    if spec.aligned_to_end:
        shifted = call("add", Q_IDX, call("sub", end, Var("SQ", Type.INT)))
        trees = _with(trees, {Q_IDX: shifted})
        named = _with(named, {Q_IDX: shifted})
    if spec.per_batch:
        exists = call("lt", KV_IDX, end)
        trees["mask_mod"] = (
            call("and", exists, trees["mask_mod"]) if "mask_mod" in trees else exists
        )
        spec = _with_lengths(spec)
    return replace(loaded, spec=spec, trees=trees, locals=named)


def _with(trees: Mapping[str, Node], values: Mapping[Node, Node]) -> dict[str, Node]:
    return {name: substitute(tree, values) for name, tree in trees.items()}


def _with_one_number_of_heads(loaded: Loaded) -> Loaded:
    """Replace HKV by HQ, because kernels for `gqa: 1` have no argument HKV."""
    trees, named = _with(loaded.trees, {HKV: HQ}), _with(loaded.locals, {HKV: HQ})
    buffers = {
        name: buffer.model_copy(
            update={"shape": tuple("HQ" if s == "HKV" else s for s in buffer.shape)}
        )
        for name, buffer in loaded.spec.buffers.items()
    }
    return replace(
        loaded, spec=loaded.spec.model_copy(update={"buffers": buffers}), trees=trees, locals=named
    )


def _with_lengths(spec: AttentionSpec) -> AttentionSpec:
    lengths = Buffer(shape=("B",), dtype="int32")
    return spec.model_copy(update={"buffers": {KV_LENS: lengths, **spec.buffers}})
