"""Adapter for Hugging Face's kernel hub: a repository for `kernel-builder`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.algebra import call
from kgen.expr.nodes import Call, Const, Type, Var
from kgen.expr.softmax_form import KV_IDX, Q_IDX
from kgen.flex.flexcode import mod_functions
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.adapt.shared import Head, head_of
from kgen.kernels.attention.spec import ANY, AttentionSpec, Buffer
from kgen.pages.markdown import fenced
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_text, render_variants
from kgen.spec.load import Loaded
from kgen.spec.user_text import UserText
from kgen.targets import Source, opening, opening_in_markdown
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

SQ, SK = Var("SQ", Type.INT), Var("SK", Type.INT)
LAST_AT_LAST = call("ge", call("sub", call("add", Q_IDX, SK), SQ), KV_IDX)
"""The causal mask of flash-attn: the last query sees the last key."""
DISTANCE = call("sub", call("sub", call("add", Q_IDX, SK), KV_IDX), SQ)
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
class Package(Template):
    """Values for `__init__.py` of the package."""

    template: ClassVar[str] = "attention/adapters/hub.j2"

    name: str
    summary: str
    repository: str
    call: str
    flash: FlashFunctions | None
    head: Head


@dataclass(frozen=True)
class BuildFile(Template):
    """Values for `build.toml`."""

    template: ClassVar[str] = "attention/adapters/build.toml.j2"

    repository: str
    license: str


@dataclass(frozen=True)
class Card(Template):
    """Values for `README.md`."""

    template: ClassVar[str] = "attention/adapters/card.md.j2"

    name: str
    paragraph: str
    repository: str
    license_id: str
    call: str
    flash: FlashFunctions | None
    gradients: bool
    yaml: str
    """The spec as a block of code."""


@dataclass(frozen=True)
class TestFile(Template):
    """Values for `tests/test_<name>.py`."""

    template: ClassVar[str] = "attention/adapters/hub_test.py.j2"

    name: str
    tested: str
    """The names that the test imports from the package."""
    pytest: str | None
    """The statement that imports pytest."""
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
    """Return `<name>_hub`: the package under `torch-ext`, which kgen updates, and initial files of
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
    root, package = f"{name}_hub", f"{name}_hub/torch-ext/{name}"
    init = Source("__init__.py", _package(variant))
    made = {package: {"__init__.py": render_source(variants, init)}}
    made |= {f"{package}/{folder}": files for folder, files in render_variants(variants).items()}
    started: dict[str, Template] = {
        f"{root}/build.toml": BuildFile(_repository(spec), spec.license.in_comment()),
        f"{root}/README.md": _card(variant),
        f"{root}/tests/test_{name}.py": _test(variant),
        f"{root}/benchmarks/benchmark.py": _benchmark(variant),
    }
    texts = {path: render_text(variants[0], template) for path, template in started.items()}
    return Adapter(made, texts, tuple(variants))


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


def _package(variant: Variant) -> Package:
    spec = variant.spec
    return Package(
        name=spec.name,
        summary=opening(spec),
        repository=_repository(spec),
        call=_call(spec),
        flash=_functions(variant),
        head=head_of(spec),
    )


def _card(variant: Variant) -> Card:
    spec = variant.spec
    text = "\n".join(line.in_comment() for line in UserText(variant.loaded.text).lines())
    return Card(
        name=spec.name,
        paragraph=opening_in_markdown(spec),
        repository=_repository(spec),
        license_id=spec.license.in_comment().lower(),
        call=_call(spec),
        flash=_functions(variant),
        gradients="backward" in spec.passes,
        yaml=fenced(text, "yaml"),
    )


def _test(variant: Variant) -> TestFile:
    spec, flash = variant.spec, _functions(variant)
    mods, given = mod_functions(variant.loaded)
    learned = ["q", "k", "v", *(n for n, b in spec.buffers.items() if b.grad)]
    if spec.sinks:
        learned.append("sinks")
    return TestFile(
        name=spec.name,
        tested=f"flash_attn_func, {spec.name}" if flash else spec.name,
        pytest="import pytest" if flash else None,
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


def _benchmark(variant: Variant) -> BenchmarkFile:
    spec = variant.spec
    return BenchmarkFile(
        name=spec.name,
        repository=_repository(spec),
        group=_group(spec),
        head=head_of(spec),
        dtype=f"torch.{TORCH_DTYPES[spec.dtype]}",
        given_tensors=_given(spec),
        varlen=spec.varlen,
    )


def _repository(spec: AttentionSpec) -> str:
    return spec.name.replace("_", "-")


def _group(spec: AttentionSpec) -> int:
    return 1 if spec.gqa == "any" else spec.gqa


def _call(spec: AttentionSpec) -> str:
    """Return the arguments of a call."""
    operands = ["q", "k", "v"]
    if spec.varlen:
        operands += ["cu_seqlens_q", "cu_seqlens_k"]
    keywords = [*spec.buffers, *(["sinks"] if spec.sinks else []), *_runtime(spec)]
    return ", ".join([*operands, *(f"{n}={n}" for n in keywords)])


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
