"""Adapter for torchtitan: an attention module for packed sequences, on one rank or over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.diagnostics import Diagnostic, KgenError
from kgen.kernels.attention.adapt import context_parallel
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.adapt.hub import flash
from kgen.kernels.attention.adapt.shared import Head, head_of
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES


@dataclass(frozen=True)
class Package(Template):
    """Values for `__init__.py`."""

    template: ClassVar[str] = "attention/adapters/torchtitan.j2"

    name: str
    summary: str
    package: str
    head: Head
    dtypes: list[str]
    """The dtypes of the kernels, in PyTorch."""
    window: str
    """Python code of the only `window_size` of torchtitan that the kernels compute."""
    checks_window: bool
    """True if the kernels compute an attention that torchtitan describes by a window."""


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_torchtitan`, with the kernels for one rank and for several.

    Raise `KgenError` for a spec without packed sequences, or with arguments that torchtitan does
    not pass.
    """
    variant = _checked(variants[0])
    spec, said = variant.spec, flash(variant)
    name = f"{spec.name}_torchtitan"
    window = (-1, 0)
    if said is not None:
        window = (said.window - 1, 0) if said.window else (-1, 0 if said.causal else -1)
        if said.softcap is not None:
            said = None
    package = Package(
        name=spec.name,
        summary=opening(spec),
        package=name,
        head=head_of(spec),
        dtypes=[f"torch.{TORCH_DTYPES[d]}" for d in dict.fromkeys(v.spec.dtype for v in variants)],
        window=repr(window),
        checks_window=said is not None,
    )
    folders = {name: {"__init__.py": render_source(variants, Source("__init__.py", package))}}
    for folder, files in render_variants(variants).items():
        folders[f"{name}/{folder}"] = dict(files)
    ranks = context_parallel.adapter(variants)
    folders |= {f"{name}/{folder}": dict(files) for folder, files in ranks.folders.items()}
    return Adapter(folders, specs=(*variants, *ranks.specs))


def _checked(loaded: Loaded) -> Variant:
    spec = loaded.spec
    given = [*spec.buffers, *(n for n, p in spec.params.items() if p.runtime)]
    reasons = (
        (not spec.varlen, "its sequences are not packed", "add `varlen: true`"),
        (spec.paged_kv is not None, "its keys are in pages", "leave out `paged_kv`"),
        (spec.sinks, "torchtitan applies sinks to the output", "leave out `sinks`"),
        (bool(given), f"torchtitan does not pass `{', '.join(given)}`", "write numbers instead"),
    )
    for holds, reason, hint in reasons:
        if holds:
            message = f"modules of torchtitan cannot call `{spec.name}`: {reason}"
            path = loaded.path.as_posix()
            raise KgenError(Diagnostic("no-adapter", message, path, 1, 1, hint=hint))
    return Variant(loaded)
