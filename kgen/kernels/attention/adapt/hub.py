"""Adapter for Hugging Face's kernel hub: a repository for `kernel-builder`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Type, Var
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.flex.flexcode import mod_functions
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.adapt.shared import Head, head_of
from kgen.kernels.attention.spec import ANY, AttentionSpec, Buffer
from kgen.render.adapters import Adapter
from kgen.render.hub import Layer, Parts, Repository, repository, repository_of
from kgen.spec.load import Loaded
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

SQ, SK = Var("SQ", Type.INT), Var("SK", Type.INT)
LAST_AT_LAST = call("ge", call("sub", call("add", Q_IDX, SK), SQ), KV_IDX)
"""The causal mask of flash-attn: the last query sees the last key."""
DISTANCE = call("sub", call("sub", call("add", Q_IDX, SK), KV_IDX), SQ)
FLASH = ("flash_attn_func", "flash_attn_varlen_func")
LENGTH = 256
"""Number of queries and keys in the generated tests: a multiple of the lengths that specs
promise.
"""


@dataclass(frozen=True)
class Flash:
    """A variant as arguments of flash-attn's functions."""

    causal: bool
    window: int | None
    """Number of keys that a query sees up to its own position."""
    softcap: float | None
    sinks: bool


@dataclass(frozen=True)
class FlashFunctions:
    """The flash-attn functions of a package: their documentation and the arguments that they
    refuse.
    """

    words: str
    causal: bool
    mask: str
    softcaps: str
    """Python code of a tuple."""
    window: str
    """Python condition that is true for another window."""
    short: int | None
    """Longest sequence for which the window excludes no key."""
    sinks: list[str]
    """The name of the attention sinks, if there are any."""


@dataclass(frozen=True)
class Given:
    """An argument of a test and the Python code that creates it."""

    name: str
    made: str


@dataclass(frozen=True)
class FlashFile(Template):
    """Values for the flash-attn functions in `__init__.py` of the package."""

    template: ClassVar[str] = "attention/adapters/hub_flash.j2"

    name: str
    flash: FlashFunctions
    head: Head


@dataclass(frozen=True)
class TestFile(Template):
    """Values for `tests/test_<name>.py`, which tests the first variant."""

    template: ClassVar[str] = "attention/adapters/hub_test.py.j2"

    name: str
    repository: str
    length: int
    group: int
    """Query heads for each key-value head."""
    head: Head
    dtype: str
    mods: list[str]
    """Lines of score and mask functions in PyTorch."""
    given: str
    """Python code of a list of the arguments of these functions."""
    given_tensors: list[Given]
    varlen: bool
    gradients: bool
    learned: str
    """Python code of a list of the tensors with gradients."""
    flash: FlashFunctions | None


@dataclass(frozen=True)
class BenchmarkFile(Template):
    """Values for `benchmarks/benchmark.py`."""

    template: ClassVar[str] = "attention/adapters/hub_benchmark.py.j2"

    name: str
    repository: str
    group: int
    """Query heads for each key-value head."""
    head: Head
    dtype: str
    given_tensors: list[Given]
    varlen: bool


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return `<name>_hub`: the package below `torch-ext`, which kgen updates, and initial files of
    a repository.

    Raise `KgenError` for a spec of a cache, because a server passes its arguments.
    """
    variant = Variant(variants[0])
    spec, name = variant.spec, variant.spec.name
    if spec.per_batch or spec.paged_kv is not None:
        message, hint = (
            "`--for hub` does not support specs of caches",
            "leave out `per_batch` and `paged_kv`",
        )
        raise KgenError(
            Diagnostic("no-adapter", message, variants[0].path.as_posix(), 1, 1, hint=hint)
        )
    made, functions = repository_of(variants), _functions(variant)
    signature = made.file.signature
    layer = Layer(
        name=name,
        layer=made.layer,
        words="The arguments and results are those of the function.",
        signature=str(signature),
        arguments=signature.arguments,
        gradients=made.gradients,
        eps=False,
    )
    parts = Parts(layer, _test(variant, made), _benchmark(variant, made))
    if functions:
        parts = replace(
            parts,
            more=FlashFile(name, functions, head_of(spec)),
            more_names=FLASH,
            further=_further(made, functions),
        )
    return repository(made, parts)


def flash(variant: Variant) -> Flash | None:
    """Return the arguments with which flash_attn_varlen_func computes this variant, or None."""
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
            case Call("lt" | "le" as fn, (left, Const(int(width)))) if (
                left == DISTANCE and window is None
            ):
                window = width + (fn == "le")
            case _:
                return None
    return Flash(causal, window, variant.softcap, spec.sinks) if causal or window is None else None


def _test(variant: Variant, made: Repository) -> TestFile:
    spec, flash = variant.spec, _functions(variant)
    mods, given = mod_functions(variant.loaded)
    learned = ["q", "k", "v", *(n for n, b in spec.buffers.items() if b.grad)]
    if spec.sinks:
        learned.append("sinks")
    return TestFile(
        name=spec.name,
        repository=made.repository,
        length=LENGTH,
        group=_group(spec),
        head=head_of(spec),
        dtype=f"torch.{TORCH_DTYPES[spec.dtype]}",
        mods=list(mods),
        given=json.dumps(given),
        given_tensors=_given(spec),
        varlen=spec.varlen,
        gradients="backward" in spec.passes,
        learned=json.dumps(learned),
        flash=flash,
    )


def _benchmark(variant: Variant, made: Repository) -> BenchmarkFile:
    spec = variant.spec
    return BenchmarkFile(
        name=spec.name,
        repository=made.repository,
        group=_group(spec),
        head=head_of(spec),
        dtype=f"torch.{TORCH_DTYPES[spec.dtype]}",
        given_tensors=_given(spec),
        varlen=spec.varlen,
    )


def _further(made: Repository, functions: FlashFunctions) -> str:
    """Return the paragraph of the card about the flash-attn functions."""
    return (
        "`flash_attn_func` and `flash_attn_varlen_func` are flash-attn's functions for this "
        f'variant, for models of transformers (`attn_implementation="OWNER/{made.repository}"`). '
        f"{functions.words}"
    )


def _group(spec: AttentionSpec) -> int:
    return 1 if spec.gqa == "any" else spec.gqa


def _runtime(spec: AttentionSpec) -> list[str]:
    return [n for n, p in spec.params.items() if p.runtime]


def _given(spec: AttentionSpec) -> list[Given]:
    """Return the keyword arguments of a call in tests."""
    given = [Given(n, _tensor(b)) for n, b in spec.buffers.items()]
    given += [Given(n, "100" if spec.params[n].type == "int" else "0.5") for n in _runtime(spec)]
    return [*given, Given("sinks", "torch.randn(HQ, device=DEVICE)")] if spec.sinks else given


def _functions(variant: Variant) -> FlashFunctions | None:
    """Return the flash-attn functions for a variant, or None."""
    said = flash(variant)
    if said is None:
        return None
    caps = "" if said.softcap is None else f" Scores are capped at {said.softcap}."
    return FlashFunctions(
        words=f"Each query sees {_seen(said)}; the last query stands at the last key.{caps}",
        causal=said.causal,
        mask="causal" if said.causal else "full",
        softcaps="(None, 0.0)" if said.softcap is None else f"({said.softcap},)",
        window=_other_window(said.window),
        short=said.window,
        sinks=["s_aux"] if said.sinks else [],
    )


def _seen(said: Flash) -> str:
    if said.window:
        return f"the last {said.window} keys up to its own"
    return "all keys up to its own" if said.causal else "all keys"


def _other_window(window: int | None) -> str:
    """Return a Python condition that is true for another window.

    Callers may omit a window that excludes no key.
    """
    if window:
        return f"(window_size[0] + 1 != {window} and not (window_size[0] < 0 and short))"
    return (
        "window_size[0] >= 0 and not (isinstance(max_seqlen_k, int) and max_seqlen_k <= "
        "window_size[0] + 1)"
    )


def _tensor(buffer: Buffer) -> str:
    """Return Python code that creates a tensor for a test."""
    sizes = {"B": "2", "HKV": "2", "HQ": "HQ", "SQ": "LENGTH", "SK": "LENGTH", ANY: "2 * LENGTH"}
    shape = ", ".join(sizes.get(str(n), str(n)) for n in buffer.shape) or "()"
    dtype = f"torch.{TORCH_DTYPES[buffer.dtypes[0]]}"
    if buffer.element is Type.FLOAT:
        return f"(0.1 * torch.randn({shape}, device=DEVICE)).to({dtype})"
    if buffer.dtype == "bool":
        return f"torch.rand({shape}, device=DEVICE) < 0.6"
    if buffer.sorted:
        last = shape.rpartition(", ")[2]
        return (
            f"(torch.arange({last}, device=DEVICE) // 50).expand({shape}).to({dtype}).contiguous()"
        )
    size = f"({shape},)" if buffer.shape else shape
    return f"torch.randint(0, 100, {size}, device=DEVICE).to({dtype})"
