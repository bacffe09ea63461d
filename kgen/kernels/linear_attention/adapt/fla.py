"""Adapter with the functions of flash-linear-attention and mamba-ssm, and a replacement of these
functions in models of transformers.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.nodes import Call, Read, Var, variables
from kgen.kernels.linear_attention.spec import LinearAttentionSpec
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded, loads_variants
from kgen.spec.source import Document
from kgen.targets import Source, opening
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

SHIPPED = Path(__file__).parents[1] / "fla"
EPS = 1e-6
"""The term of the norm of q and k in flash-linear-attention."""


@dataclass(frozen=True)
class Verbatim(Template):
    """A file with fixed text."""

    template: ClassVar[str] = "linear_attention/adapters/verbatim.j2"

    text: str


@dataclass(frozen=True)
class Convolution(Template):
    """The short causal convolution before the layer."""

    template: ClassVar[str] = "linear_attention/adapters/conv.j2"


@dataclass(frozen=True)
class GatedDeltaRule(Template):
    """The functions of the gated delta rule."""

    template: ClassVar[str] = "linear_attention/adapters/fla_gated_delta_rule.j2"


@dataclass(frozen=True)
class Kda(Template):
    """The functions of Kimi delta attention."""

    template: ClassVar[str] = "linear_attention/adapters/fla_kda.j2"


@dataclass(frozen=True)
class Mamba(Template):
    """The function of Mamba 2."""

    template: ClassVar[str] = "linear_attention/adapters/fla_mamba.j2"


@dataclass(frozen=True)
class Folder:
    """A folder of kernels and the functions that the package imports from it."""

    name: str
    functions: list[str]


@dataclass(frozen=True)
class Replaced:
    """A function in the modeling files of transformers, and the function that replaces it."""

    name: str
    function: str


@dataclass(frozen=True)
class Package(Template):
    """Values for `__init__.py`."""

    template: ClassVar[str] = "linear_attention/adapters/fla.j2"

    package: str
    opening: str
    library: str
    model: str
    """A model of transformers, for the example."""
    names: list[str]
    """The functions."""
    listed: list[str]
    """The same, as Python strings."""
    imported: list[str]
    """The names that the package imports from `calls.py`."""
    folders: list[Folder]
    kernels: str
    packed: str
    decode: str | None
    packed_decode: str | None
    state_dtype: str
    normed: bool
    functions: GatedDeltaRule | Kda | Mamba
    replacements: list[Replaced]


@dataclass(frozen=True)
class Kind:
    """A kind of layer: the functions of a library that compute it.

    `in_models` names the functions of modeling files of transformers, by function. `buffers` are
    the arguments of the kernels in addition to q, k and v, with their shapes.
    """

    library: str
    model: str
    in_models: dict[str, tuple[str, ...]]
    options: str
    functions: GatedDeltaRule | Kda | Mamba
    buffers: dict[str, list[str]]
    expressions: dict[str, str]
    packs: bool = True


GATES = {"decay": "g[t, h]", "beta": "beta[t, h]"}
GATED_DELTA_RULE = Kind(
    "flash-linear-attention",
    "qwen3_next",
    {
        "chunk_gated_delta_rule": ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
        "fused_recurrent_gated_delta_rule": (
            "fused_recurrent_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
        ),
    },
    "Delta",
    GatedDeltaRule(),
    {"g": ["T", "HV"], "beta": ["T", "HV"]},
    GATES,
)
KDA = Kind(
    "flash-linear-attention",
    "kimi_linear",
    {
        "chunk_kda": ("chunk_kda", "chunk_kimi_delta_attention"),
        "fused_recurrent_kda": ("fused_recurrent_kda", "recurrent_kimi_delta_attention"),
    },
    "Delta",
    Kda(),
    {"g": ["T", "HV", "K"], "beta": ["T", "HV"]},
    {**GATES, "decay": "g[t, h, c]"},
)
MAMBA = Kind(
    "mamba-ssm",
    "mamba2",
    {"mamba_chunk_scan_combined": ("mamba_chunk_scan_combined", "mamba2_chunk_scan")},
    "Scan",
    Mamba(),
    {"g": ["T", "HV"], "beta": ["T", "HV"], "d": ["HV"]},
    {**GATES, "skip": "d[h] * v"},
    packs=False,
)


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_fla`. Its kernels take the decay and beta as arguments.

    Raise `KgenError` for specs of other layers.
    """
    kind, spec = _kind(variants[0]), variants[0].spec
    package, name = f"{spec.name}_fla", f"{spec.name}_gates"
    texts = [_derived(variants[0], kind, name, packed=False)]
    if kind.packs:
        texts.append(_derived(variants[0], kind, f"{name}_packed", packed=True))
    derived = [loads_variants(text, f"{package}/spec.yaml") for text in texts]
    made: dict[str, dict[str, str]] = {package: {}}
    paths = {package: variants[0].path}
    for text, specs in zip(texts, derived, strict=True):
        for folder, files in render_variants(specs).items():
            made[f"{package}/{folder}"] = dict(files)
        source = Source("spec.yaml", Verbatim(text))
        made[f"{package}/{specs[0].spec.name}"]["spec.yaml"] = render_source(specs, source)
    sources = {
        "__init__.py": _package(variants[0], kind, package, [d[0].spec for d in derived]),
        "conv.py": Convolution(),
        "calls.py": Verbatim((SHIPPED / "calls.py").read_text(encoding="utf-8")),
    }
    for file, template in sources.items():
        made[package][file] = render_source(variants, Source(file, template))
    fits = f"{package} has the functions {', '.join(kind.in_models)} of {kind.library}"
    specs = [*variants, *(one for several in derived for one in several)]
    return Adapter(made, specs=tuple(specs), fits=(fits,), paths=paths)


def _package(
    loaded: Loaded, kind: Kind, package: str, specs: Sequence[LinearAttentionSpec]
) -> Package:
    whole, packed = specs[0], specs[-1]
    decodes = "decode" in whole.passes
    pairs = [(name, function) for function, of in kind.in_models.items() for name in of]
    pairs += [(name, name) for name in CONVOLUTIONS]
    names = [*kind.in_models, *CONVOLUTIONS]
    return Package(
        package=package,
        opening=opening(loaded.spec),
        library=kind.library,
        model=kind.model,
        names=names,
        listed=[f'"{name}"' for name in names],
        imported=sorted(("Layer", "Replacements", kind.options)),
        folders=[Folder(spec.name, [*spec.called]) for spec in specs],
        kernels=whole.name,
        packed=packed.name,
        decode=f"{whole.name}_decode" if decodes else None,
        packed_decode=f"{packed.name}_decode" if decodes else None,
        state_dtype=TORCH_DTYPES[whole.state_dtype],
        normed=whole.qk_norm is not None,
        functions=kind.functions,
        replacements=[Replaced(name, function) for name, function in pairs],
    )


def _kind(loaded: Loaded) -> Kind:
    """Return the layer of a spec, or raise `KgenError`."""
    wrong = list(_wrong(loaded))
    if wrong:
        raise KgenError(wrong)
    if loaded.spec.rule == "add":
        return MAMBA
    return KDA if "c" in variables(loaded.trees["decay"]) else GATED_DELTA_RULE


def _wrong(loaded: Loaded) -> Iterator[Diagnostic]:
    """Yield the fields that no function of the libraries computes."""
    spec, delta = loaded.spec, loaded.spec.rule == "delta"
    if "decay" not in loaded.trees:
        message = "the functions need a `decay`"
        yield _at(loaded, "decay", message, "write `decay: g[t, h]` or `decay: g[t, h, c]`")
    elif not delta and "c" in variables(loaded.trees["decay"]):
        message = "no function has a `decay` by column without the delta rule"
        yield _at(loaded, "decay", message, "write `rule: delta`, or a decay without `c`")
    for field in ("q_map", "k_map"):
        if field in loaded.trees:
            yield _at(loaded, field, f"the functions have no `{field}`", "remove it")
    if delta and "skip" in loaded.trees:
        yield _at(loaded, "skip", "the functions of a delta rule have no `skip`", "remove it")
    if not delta and not _by_head(loaded):
        message = "the function of Mamba 2 has a `skip` of one factor for each head"
        yield _at(loaded, "skip", message, "write `skip: d[h] * v`")
    if not delta and spec.scale != 1:
        message = "the function of Mamba 2 does not scale queries"
        yield _at(loaded, "scale", message, "write `scale: 1`")
    if not delta and spec.qk_norm is not None:
        yield _at(loaded, "qk_norm", "the function of Mamba 2 has no norm", "remove it")
    if delta and spec.scale is not None:
        message = "the default scale of the functions is 1 / sqrt(K)"
        yield _at(loaded, "scale", message, "remove it: the functions have the argument `scale`")
    for field in ("output_gate", "output_norm", "output"):
        if getattr(spec, field) is not None:
            message = f"the functions return the output before norm and gate, without `{field}`"
            yield _at(loaded, field, message, "remove it")
    if spec.norm_eps not in (None, EPS):
        message = f"the norm of the functions adds {EPS}, got {spec.norm_eps}"
        yield _at(loaded, "eps", message, "remove it")
    if spec.varlen:
        message = "the package derives its kernels for packed sequences"
        yield _at(loaded, "varlen", message, "remove it")


def _by_head(loaded: Loaded) -> bool:
    """True if `skip` is the product of v and one buffer element for each head."""
    match loaded.trees.get("skip"):
        case None:
            return True
        case Call("mul", (Read(_, (Var("h", _),)), Var("v", _))) | Call(
            "mul", (Var("v", _), Read(_, (Var("h", _),)))
        ):
            return True
    return False


def _at(loaded: Loaded, field: str, message: str, hint: str) -> Diagnostic:
    """Return a diagnostic at a field of a spec, or at its beginning."""
    document = Document(loaded.text, loaded.path.as_posix())
    message = f"`{loaded.spec.name}`: {message}"
    if field in document.data:
        return document.value("no-adapter", message, (field,), hint)
    return Diagnostic("no-adapter", message, loaded.path.as_posix(), 1, 1, hint=hint)


CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
"""The functions of causal-conv1d, which models call before the layer."""
KEPT = ("license", "dtype", "state_dtype", "head_dim", "heads", "qk_norm", "eps", "scale", "save")
"""The fields of a derived spec that are fields of the original one."""


def _derived(loaded: Loaded, kind: Kind, name: str, *, packed: bool) -> str:
    """Return the YAML of the same layer with decay and beta as arguments."""
    given: dict[str, Any] = dict(Document(loaded.text, loaded.path.as_posix()).data)
    learns = "backward" in loaded.spec.passes
    buffers = {
        buffer: _in_flow({"shape": shape, "dtype": "fp32", **({"grad": True} if learns else {})})
        for buffer, shape in kind.buffers.items()
    }
    words = "for packed sequences" if packed else "for callers"
    data = {
        "kernel": "linear_attention",
        "name": name,
        "summary": f"{loaded.spec.name} {words}, with decay and beta as arguments.",
        **{field: given[field] for field in KEPT if field in given},
        "buffers": buffers,
        "rule": loaded.spec.rule,
        **kind.expressions,
        **({"varlen": True} if packed else {}),
        "chunk_size": loaded.spec.chunk_size,
        "passes": list(loaded.spec.passes),
        **({"targets": given["targets"]} if "targets" in given else {}),
    }
    yaml, out = YAML(typ="rt"), io.StringIO()
    yaml.width, yaml.default_flow_style = 2**20, None
    yaml.dump(data, out)
    return out.getvalue()


def _in_flow(mapping: dict[str, Any]) -> CommentedMap:
    found = CommentedMap(mapping)
    found.fa.set_flow_style()
    return found
