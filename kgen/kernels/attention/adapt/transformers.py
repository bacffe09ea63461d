"""An adapter for Hugging Face's transformers: `attn_implementation="NAME"` in training and in generation."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import chain

from kgen.kernels.attention.adapt.derived import PLACES, Variant, checked
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded, loads_variants
from kgen.targets import Source, opening


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """`<name>_transformers`: a package that registers the kernels, with a folder for each spec that it calls.

    Raises `KgenError` for a spec that models cannot call.
    """
    variant, path = checked(variants[0]), variants[0].path
    texts = [variant.cached(), *([variant.everywhere()] if variant.window is not None else [])]
    derived = {text: loads_variants(text, path) for text in texts}
    name = f"{variant.spec.name}_transformers"
    places = [n for n in PLACES if n in derived[texts[0]][0].spec.buffers]
    package = render_source(variants, _package(variant, name, places))
    made: dict[str, dict[str, str]] = {name: {"__init__.py": package}}
    for specs in (list(variants), *derived.values()):
        made |= {f"{name}/{folder}": dict(files) for folder, files in render_variants(specs).items()}
    for text, specs in derived.items():
        source = Source("spec.yaml", "attention/adapters/spec.j2", {"text": text})
        made[f"{name}/{specs[0].spec.name}"]["spec.yaml"] = render_source(specs, source)
    return Adapter(made, specs=(*variants, *chain.from_iterable(derived.values())))


def _package(variant: Variant, package: str, places: list[str]) -> Source:
    spec, softcap = variant.spec, variant.softcap
    given = {n: f"{n}: {_shape(b.shape)} {b.dtype_words}" for n, b in spec.buffers.items()}
    given |= {n: f"{n}: {p.type}" for n, p in spec.params.items() if p.runtime}
    asked = ", ".join(f"{n}=..." for n in given)
    name = spec.name
    plain = f"`{name}`"
    if variant.window is not None:
        plain += f" (`{name}_everywhere` for layers without a window, among others that have one)"
    words = (
        f"Where queries and keys begin together and nothing is padding, {plain} runs. For caches and padded sequences "
        f"`{name}_cached` does, which is told where they stand: its spec is beside it."
    )
    context: dict[str, object] = {
        "name": name,
        "summary": opening(spec),
        "words": textwrap.fill(words, 120),
        "usage": [f"import {package}", *([f"{package}.register({asked})"] if given else [])],
        "window": variant.window,
        "softcaps": f"(None, {softcap!r})" if softcap is not None else "(None,)",
        "caps": f"at {softcap!r}" if softcap is not None else "do not",
        "sinks": spec.sinks,
        "given_keywords": "".join(f"{n}, " for n in given),
        "given_words": [
            f"{said}, or a function of module, query and key that gives it." for said in given.values()
        ],
        "given_dict": "{" + ", ".join(f'"{n}": {n}' for n in given) + "}",
        "registers": not given,
        "places": repr(tuple(places)),
        "positions": variant.sees_positions,
        "head": spec.head_dim,
    }
    return Source("__init__.py", "attention/adapters/transformers.j2", context)


def _shape(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
