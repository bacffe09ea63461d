"""Adapters whose package has the kernels of several specs: for PyTorch's flash attention, and with
FlashAttention's functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

from kgen.diagnostics import Diagnostic, KgenError
from kgen.kernels.attention.adapt.covered import Covered, at_field, covered
from kgen.kernels.attention.adapt.shared import Verbatim
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded
from kgen.targets import Source, opening
from kgen.targets.template import Template, filled

SHIPPED = Path(__file__).parents[1] / "flash"


@dataclass(frozen=True)
class Package(Template):
    """Values for `__init__.py` of a package with FlashAttention's functions."""

    template: ClassVar[str] = "attention/adapters/flash_attn.j2"

    package: str
    opening: str
    lines: list[str]
    """A line about the attention of each spec."""
    rows: list[str]
    """The rows of the table of kernels."""


@dataclass(frozen=True)
class RegisteredPackage(Package):
    """The same for PyTorch's registry."""

    template: ClassVar[str] = "attention/adapters/torch.j2"

    name: str
    """The name in the registry."""


@dataclass(frozen=True)
class Kind:
    """A kind of package: the callers of its kernels, and its runtime files.

    `names` are names of `__init__.py`, which specs cannot have. With `everything`, the callers
    support capped scores, caches and all dtypes.
    """

    word: str
    callers: str
    files: tuple[str, ...]
    names: frozenset[str]
    everything: bool


SHARED = ("covering",)
TORCH = Kind(
    "torch",
    "PyTorch's flash operators",
    (*SHARED, "asked", "operators"),
    frozenset({"register", "unregister", "explain"}),
    everything=False,
)
FLASH_ATTN = Kind(
    "flash_attn",
    "FlashAttention's functions",
    (*SHARED, "functions"),
    frozenset({"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"}),
    everything=True,
)


def torch_adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_torch`, whose `register` lets PyTorch call the kernels."""
    return torch_package([variants], variants[0].spec.name)


def torch_package(specs: Sequence[Sequence[Loaded]], name: str) -> Adapter:
    """Return the package `<name>_torch` with the kernels of several specs.

    Raise `KgenError` for specs that PyTorch's flash operators cannot call.
    """
    return _package(TORCH, specs, name)


def flash_attn_adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_flash_attn` with FlashAttention's functions."""
    return flash_attn_package([variants], variants[0].spec.name)


def flash_attn_package(specs: Sequence[Sequence[Loaded]], name: str) -> Adapter:
    """Return the package `<name>_flash_attn` with the kernels of several specs.

    Raise `KgenError` for specs whose attention is not in FlashAttention's arguments.
    """
    return _package(FLASH_ATTN, specs, name)


def _package(kind: Kind, specs: Sequence[Sequence[Loaded]], name: str) -> Adapter:
    specs = sorted(specs, key=lambda variants: str(variants[0].spec.name))
    _require_names(kind, specs)
    found = _all_covered(kind, chain.from_iterable(specs))
    loaded = [one.loaded for one in found]
    package = f"{name}_{kind.word}"
    # If several kernels fit a call, the first row runs. Kernels with promises about lengths come
    # first, because they omit checks.
    rows = sorted(found, key=lambda one: not one.promises)
    lines = list(dict.fromkeys(f"{one.spec.name}: {one.words}" for one in found))
    text = Package(package, _opening(specs), lines, [_row(one) for one in rows])
    if kind is TORCH:
        text = filled(RegisteredPackage, text, name=name)
    made = {package: {"__init__.py": render_source(loaded, Source("__init__.py", text))}}
    for file in kind.files:
        shipped = Verbatim((SHIPPED / f"{file}.py").read_text(encoding="utf-8"))
        made[package][f"{file}.py"] = render_source(loaded, Source(f"{file}.py", shipped))
    paths: dict[str, Path] = {package: specs[0][0].path}
    for variants in specs:
        for folder, files in render_variants(variants).items():
            made[f"{package}/{folder}"] = dict(files)
            paths[f"{package}/{folder}"] = variants[0].path
    fits = (f"{package} has kernels for {kind.callers}:", *(f"  {line}" for line in lines))
    return Adapter(made, specs=tuple(loaded), fits=fits, paths=paths)


def _row(one: Covered) -> str:
    return one.row(f".{one.loaded.folder}.triton".replace("/", "."))


def _opening(specs: Sequence[Sequence[Loaded]]) -> str:
    if len(specs) == 1:
        return opening(specs[0][0].spec)
    return f"Attention of {len(specs)} specs."


def _all_covered(kind: Kind, loaded: Iterable[Loaded]) -> list[Covered]:
    """Return the attention of all specs, or raise the errors of all."""
    found: list[Covered] = []
    wrong: list[Diagnostic] = []
    for one in loaded:
        try:
            found.append(covered(one, kind.callers, everything=kind.everything))
        except KgenError as error:
            wrong += error.diagnostics
        wrong += () if kind.everything else _other_tensors(kind, one)
    if wrong:
        raise KgenError(dict.fromkeys(wrong))
    return found


def _other_tensors(kind: Kind, loaded: Loaded) -> Iterator[Diagnostic]:
    """Yield the tensors of a spec that PyTorch does not pass to its flash operators."""
    spec = loaded.spec
    if spec.dtype == "fp32":
        message = f"{kind.callers} have tensors of bf16 and fp16, not fp32"
        yield at_field(loaded, "dtype", message, "write `dtype: bf16`")
    if spec.head_dim.qk != spec.head_dim.v:
        message = f"{kind.callers} have one head dim for q, k and v"
        yield at_field(loaded, "head_dim", message, "write one number")


def _require_names(kind: Kind, specs: Sequence[Sequence[Loaded]]) -> None:
    """Raise `KgenError` if two specs have one name, or if a name is already in the package."""
    wrong: list[Diagnostic] = []
    taken = {*kind.names, *kind.files}
    for variants in specs:
        name = variants[0].spec.name
        if name in taken:
            message = "the package already has this name"
            wrong.append(at_field(variants[0], "name", message, "choose another name"))
        taken.add(name)
    if wrong:
        raise KgenError(wrong)
