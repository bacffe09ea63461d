"""An adapter for the kernel hub of Hugging Face: a repository as its builder takes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Type, Var
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.flex.flexcode import mod_functions
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.spec import ANY, AttentionSpec, Buffer
from kgen.pages.markdown import fenced
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_text, render_variants
from kgen.spec.load import Loaded
from kgen.spec.user_text import UserText
from kgen.targets import Source, opening, opening_in_markdown
from kgen.targets.template import Untyped
from kgen.targets.triton.text import TORCH_DTYPES

SQ, SK = Var("SQ", Type.INT), Var("SK", Type.INT)
LAST_AT_LAST = call("ge", call("sub", call("add", Q_IDX, SK), SQ), KV_IDX)
"""A causal mask as flash-attn has it: the last query sees the last key."""
DISTANCE = call("sub", call("sub", call("add", Q_IDX, SK), KV_IDX), SQ)
TEMPLATES = "attention/adapters/"
LENGTH = 256
"""Queries and keys of the tests that a repository starts with: a multiple of what specs promise."""


@dataclass(frozen=True)
class Flash:
    """A variant in the words of flash-attn's functions."""

    causal: bool
    window: int | None
    """Keys that a query sees up to its own."""
    softcap: float | None
    sinks: bool


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """`<name>_hub`: the package under `torch-ext`, which kgen keeps, and the rest of a repository to start from.

    Raises `KgenError` for a spec of a cache, whose arguments belong to a server.
    """
    variant = Variant(variants[0])
    spec, name = variant.spec, variant.spec.name
    if spec.per_batch or spec.paged_kv is not None:
        message, hint = "a spec of a cache has no adapter for hub", "leave out `per_batch` and `paged_kv`"
        raise KgenError(Diagnostic("no-adapter", message, variants[0].path.as_posix(), 1, 1, hint=hint))
    root, package = f"{name}_hub", f"{name}_hub/torch-ext/{name}"
    context = _context(variant)
    init = Source("__init__.py", Untyped(f"{TEMPLATES}hub.j2", context))
    made = {package: {"__init__.py": render_source(variants, init)}}
    made |= {f"{package}/{folder}": files for folder, files in render_variants(variants).items()}
    started = {
        f"{root}/build.toml": "build.toml.j2",
        f"{root}/README.md": "card.md.j2",
        f"{root}/tests/test_{name}.py": "hub_test.py.j2",
        f"{root}/benchmarks/benchmark.py": "hub_benchmark.py.j2",
    }
    texts = {
        path: render_text(variants[0], Untyped(TEMPLATES + template, context))
        for path, template in started.items()
    }
    return Adapter(made, texts, tuple(variants))


def flash(variant: Variant) -> Flash | None:
    """What flash_attn_varlen_func would be asked for to compute this; None where it has no words for it."""
    spec = variant.spec
    if not spec.varlen or spec.buffers or any(p.runtime for p in spec.params.values()):
        return None
    if "score_mod" in variant.trees and variant.softcap is None:
        return None
    causal, window = False, None
    for condition in map(variant.with_numbers, variant.conditions):
        match condition:
            case _ if condition == LAST_AT_LAST:
                causal = True
            case Call("lt" | "le" as fn, (left, Const(int(width)))) if left == DISTANCE and window is None:
                window = width + (fn == "le")
            case _:
                return None
    return Flash(causal, window, variant.softcap, spec.sinks) if causal or window is None else None


def _context(variant: Variant) -> dict[str, object]:
    spec = variant.spec
    operands = ["q", "k", "v", *["cu_seqlens_q", "cu_seqlens_k"] * spec.varlen]
    keywords = [*spec.buffers, *["sinks"] * spec.sinks, *(n for n, p in spec.params.items() if p.runtime)]
    said = flash(variant)
    mods, given = mod_functions(variant.loaded)
    tensors = {n: _tensor(b) for n, b in spec.buffers.items()}
    tensors |= {n: "100" if p.type == "int" else "0.5" for n, p in spec.params.items() if p.runtime}
    tensors |= {"sinks": "torch.randn(HQ, device=DEVICE)"} if spec.sinks else {}
    learned = ["q", "k", "v", *(n for n, b in spec.buffers.items() if b.grad), *["sinks"] * spec.sinks]
    return {
        "name": spec.name,
        "summary": opening(spec),
        "paragraph": opening_in_markdown(spec),
        "repository": spec.name.replace("_", "-"),
        "license": spec.license.in_comment(),
        "license_id": spec.license.in_comment().lower(),
        "call": ", ".join([*operands, *(f"{n}={n}" for n in keywords)]),
        "keywords": keywords,
        "yaml": fenced(
            "\n".join(line.in_comment() for line in UserText(variant.loaded.text).lines()), "yaml"
        ),
        "head": spec.head_dim,
        "dtype": f"torch.{TORCH_DTYPES[spec.dtype]}",
        "group": 1 if spec.gqa == "any" else spec.gqa,
        "flash": said and _words(spec, said),
        "mods": "\n".join(mods),
        "given": json.dumps(given),
        "given_tensors": [{"name": n, "made": made} for n, made in tensors.items()],
        "varlen": spec.varlen,
        "sinks": spec.sinks,
        "gradients": "backward" in spec.passes,
        "tested": ", ".join([*["flash_attn_func"] * bool(said), spec.name]),
        "pytest": "import pytest" if said else None,
        "learned": json.dumps(learned),
        "length": LENGTH,
    }


def _words(spec: AttentionSpec, said: Flash) -> dict[str, object]:
    """How flash-attn's functions are told apart from what the variant does."""
    window, shape = said.window, "causal" if said.causal else "full"
    seen = (
        f"the last {window} keys up to its own"
        if window
        else "all keys up to its own"
        if said.causal
        else "all keys"
    )
    caps = "" if said.softcap is None else f" Scores are capped at {said.softcap}."
    return {
        "words": f"Each query sees {seen}; the last query stands at the last key.{caps}",
        "causal": said.causal,
        "mask": shape,
        "softcaps": f"({said.softcap},)" if said.softcap is not None else "(None, 0.0)",
        # A window is not said where no sequence is longer.
        "window": f"(window_size[0] + 1 != {window} and not (window_size[0] < 0 and short))"
        if window
        else "window_size[0] >= 0 and not (isinstance(max_seqlen_k, int) and max_seqlen_k <= window_size[0] + 1)",
        "short": window,
        "sinks": ", s_aux=None" * said.sinks,
        "given": "sinks=s_aux, " * said.sinks,
        "passed": ", s_aux" * said.sinks,
    }


def _tensor(buffer: Buffer) -> str:
    """Python that makes a tensor for a test."""
    sizes = {"B": "2", "HKV": "2", "HQ": "HQ", "SQ": "LENGTH", "SK": "LENGTH", ANY: "2 * LENGTH"}
    shape = ", ".join(sizes.get(str(n), str(n)) for n in buffer.shape) or "()"
    dtype = f"torch.{TORCH_DTYPES[buffer.dtypes[0]]}"
    if buffer.element is Type.FLOAT:
        return f"(0.1 * torch.randn({shape}, device=DEVICE)).to({dtype})"
    if buffer.dtype == "bool":
        return f"torch.rand({shape}, device=DEVICE) < 0.6"
    if buffer.sorted:
        last = shape.rpartition(", ")[2]
        return f"(torch.arange({last}, device=DEVICE) // 50).expand({shape}).to({dtype}).contiguous()"
    size = f"({shape},)" if buffer.shape else shape
    return f"torch.randint(0, 100, {size}, device=DEVICE).to({dtype})"
