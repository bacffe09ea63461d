"""Adapter for Hugging Face's transformers: `attn_implementation="NAME"` in training and
generation.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from kgen.kernels.attention.adapt.derived import PLACES, Variant, checked
from kgen.kernels.attention.adapt.requests import BIDIRECTIONAL, Request, own_request
from kgen.kernels.attention.adapt.shared import Head, Verbatim, head_of
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded, loads_variants
from kgen.targets import Source, opening
from kgen.targets.template import Template

NO_WINDOW = "2**30"
"""The argument `sliding_window` of kernels for caches, in layers without a window."""


@dataclass(frozen=True)
class Kernels:
    """The kernels for one mask: the names of two functions, and the mask.

    `places` are the position arguments of the function for caches. `window` is its argument
    `sliding_window`, or None if it has no such argument.
    """

    whole: str
    cached: str
    places: tuple[str, ...]
    request: Request | None
    window: str | None = None
    packed: str | None = None
    """The function for continuous batching, or None."""

    @property
    def row(self) -> str:
        """Return the row of the adapter's table of kernels."""
        places = _tuple(f'"{name}"' for name in self.places)
        layers: tuple[int | str | None, ...] = (
            (None, "WINDOW") if self.window == "WINDOW" else (None,)
        )
        if self.request:
            layers = self.request.layers
        causal = self.request.causal if self.request else None
        return f"({self.whole}, {self.cached}, {places}, {self._more}, {_tuple(layers)}, {causal})"

    @property
    def packed_row(self) -> str:
        """Return the row of the adapter's table of kernels for continuous batching."""
        layer = "WINDOW" if self.window == "WINDOW" else "None"
        return f"{layer}: ({self.packed}, {self._more})"

    @property
    def _more(self) -> str:
        return "{}" if self.window is None else f'{{"sliding_window": {self.window}}}'


@dataclass(frozen=True)
class Family:
    """A spec and its derived specs: their text by name, and their kernels."""

    variants: Sequence[Loaded]
    made: dict[str, Sequence[Loaded]]
    kernels: tuple[Kernels, ...]


@dataclass(frozen=True)
class Package(Template):
    """Values for `__init__.py`: the function that a layer calls and the function that makes its
    masks.
    """

    template: ClassVar[str] = "attention/adapters/transformers.j2"

    name: str
    summary: str
    words: str
    usage: list[str]
    head: Head
    window: int | None
    """Number of keys that a query sees in a layer with a window."""
    functions: list[str]
    """The functions of all kernels."""
    kernels: list[str]
    """The rows of the table of kernels."""
    answers: list[str]
    """The rows of the table of masks."""
    masks: str
    """A description of the masks of all kernels."""
    bidirectional: str
    """The function of transformers for a mask with all keys."""
    softcaps: str
    """Python code of a tuple of score caps that a layer may pass."""
    caps: str
    """A description of the score cap of the kernels."""
    sinks: bool
    positions: bool
    """True if the result depends on the positions of queries and keys."""
    given: list[str]
    """The buffers and run-time parameters that `register` takes."""
    packed: list[str]
    """The rows of the table of kernels for continuous batching."""
    given_words: list[str]
    given_dict: str
    """Python code of a dictionary of them."""
    registers: bool
    """True if importing the package registers the kernels."""


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_transformers`, which registers the kernels and has a folder for
    each spec.

    Raise `KgenError` if models cannot call the spec.
    """
    variant = checked(variants[0])
    family = _family(variant, variants)
    name = f"{variant.spec.name}_transformers"
    package = render_source(variants, Source("__init__.py", _package(variant, family, name)))
    made: dict[str, dict[str, str]] = {name: {"__init__.py": package}}
    for specs in (list(variants), *family.made.values()):
        made |= {
            f"{name}/{folder}": dict(files) for folder, files in render_variants(specs).items()
        }
    for text, specs in family.made.items():
        source = Source("spec.yaml", Verbatim(text))
        made[f"{name}/{specs[0].spec.name}"]["spec.yaml"] = render_source(specs, source)
    heading, *lines = _fits(variant, family)
    fits = (f"{name} fits {heading}", *(f"  {line}" for line in lines))
    return Adapter(made, specs=(*variants, *chain.from_iterable(family.made.values())), fits=fits)


def _family(variant: Variant, variants: Sequence[Loaded]) -> Family:
    """Return the kernels for each mask: kernels of the spec first, then of its derived specs."""
    path = variants[0].path
    made: dict[str, Sequence[Loaded]] = {}

    def load(text: str) -> Variant:
        made[text] = loads_variants(text, path)
        return Variant(made[text][0])

    def of(whole: Variant, cached: Variant, window: str | None = None) -> Kernels:
        places = tuple(n for n in PLACES if n in cached.spec.buffers)
        return Kernels(whole.spec.name, cached.spec.name, places, own_request(whole), window)

    def packed(whole: Variant) -> str | None:
        request = own_request(whole)
        packs = request is not None and request.causal and whole.packs
        return str(load(whole.packed()).spec.name) if packs else None

    cached = load(variant.cached())
    kernels: tuple[Kernels, ...] = (of(variant, cached),)
    if variant.window is not None:
        everywhere = load(variant.everywhere())
        kernels = (of(variant, cached, "WINDOW"), of(everywhere, cached, NO_WINDOW))
        function = packed(variant)
        kernels = tuple(replace(one, packed=function) for one in kernels)
    elif own_request(variant) == Request(causal=False):
        causal = load(variant.causal())
        kernels += (replace(of(causal, load(causal.cached())), packed=packed(causal)),)
    else:
        kernels = (replace(kernels[0], packed=packed(variant)),)
    return Family(variants, made, kernels)


def _package(variant: Variant, family: Family, package: str) -> Package:
    spec, softcap, given = variant.spec, variant.softcap, _given(variant)
    asked = ", ".join(f"{n}=..." for n in given)
    register = [f"{package}.register({asked})"] if given else []
    return Package(
        name=spec.name,
        summary=opening(spec),
        words=textwrap.fill(_words(variant, family), 120, break_on_hyphens=False),
        usage=[f"import {package}", *register],
        head=head_of(spec),
        window=variant.window,
        functions=sorted(
            {f for k in family.kernels for f in (k.whole, k.cached, k.packed) if f is not None}
        ),
        kernels=[k.row for k in family.kernels],
        answers=[_answer(i, k.request) for i, k in enumerate(family.kernels) if k.request],
        masks="; ".join(_mask_words(k) for k in family.kernels),
        bidirectional=BIDIRECTIONAL,
        softcaps=f"(None, {softcap!r})" if softcap is not None else "(None,)",
        caps=f"at {softcap!r}" if softcap is not None else "do not",
        sinks=spec.sinks,
        positions=variant.sees_positions,
        packed=[k.packed_row for k in family.kernels if k.packed],
        given=list(given),
        given_words=[
            f"{said}, or a function of module, query and key that gives it."
            for said in given.values()
        ],
        given_dict="{" + ", ".join(f'"{n}": {n}' for n in given) + "}",
        registers=not given,
    )


def _given(variant: Variant) -> dict[str, str]:
    """Return descriptions of the buffers and run-time parameters by name."""
    spec = variant.spec
    given = {n: f"{n}: {_shape(b.shape)} {b.dtype_words}" for n, b in spec.buffers.items()}
    return given | {n: f"{n}: {p.type}" for n, p in spec.params.items() if p.runtime}


def _words(variant: Variant, family: Family) -> str:
    """Return sentences about the layers of the package and the functions that run."""
    heading, *lines = _fits(variant, family)
    whole = " or ".join(f"`{k.whole}`" for k in family.kernels)
    cached = " or ".join(dict.fromkeys(f"`{k.cached}`" for k in family.kernels))
    return (
        f"For {heading} {', or '.join(lines)}. Where queries and keys begin together and nothing "
        "is padding, "
        f"{whole} runs. For caches and padded sequences {cached} does, which takes the positions "
        f"of queries and keys: its spec is beside it. {_batching(family)}"
    )


def _batching(family: Family) -> str:
    """Return a sentence about continuous batching."""
    function = next((k.packed for k in family.kernels if k.packed), None)
    if function is None:
        return "There are no kernels for continuous batching."
    return f"In continuous batching (`generate_batch`) `{function}` runs."


def _answer(number: int, request: Request) -> str:
    """Return a row of the adapter's table of masks."""
    parts = _tuple(f'"{part}"' for part in request.parts)
    return f"{parts}: {number}"


def _tuple(items: Iterable[object]) -> str:
    """Return Python code of a tuple."""
    first, *rest = map(str, items)
    return f"({', '.join([first, *rest])})" if rest else f"({first},)"


def _mask_words(kernels: Kernels) -> str:
    return f"{kernels.whole}: {kernels.request.words if kernels.request else 'a mask of its own'}"


def _fits(variant: Variant, family: Family) -> list[str]:
    """Return a heading and, for each mask, a line about the layers that the kernels fit."""
    spec = variant.spec
    heading = f"layers with head_dim {spec.head_dim.qk}"
    if spec.head_dim.v != spec.head_dim.qk:
        heading += f" ({spec.head_dim.v} of values)"
    heading += f", scores capped at {variant.softcap!r}" if variant.softcap is not None else ""
    heading += ", attention sinks" if spec.sinks else ""
    lines = [
        f"that see {k.request.words}: `{k.whole}`, {_as_in(k, k.request)}"
        for k in family.kernels
        if k.request
    ]
    own = "whose mask `register(any_mask=True)` replaces: no model asks for the mask of the spec"
    return [heading, *(lines or [own])]


def _as_in(kernels: Kernels, request: Request) -> str:
    return (
        "beside layers with that window"
        if kernels.window == NO_WINDOW
        else f"as in {request.models}"
    )


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
