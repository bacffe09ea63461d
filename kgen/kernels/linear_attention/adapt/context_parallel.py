"""Adapter for context parallelism: sequences sharded over ranks with torch.distributed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ruamel.yaml import YAML

from kgen.diagnostics import Diagnostic, KgenError
from kgen.kernels.linear_attention.adapt.fla import Verbatim
from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.schedules import keeps
from kgen.kernels.linear_attention.targets.triton.interface import Arguments, Interface
from kgen.kernels.linear_attention.targets.triton.launcher import Launcher
from kgen.kernels.linear_attention.targets.triton.sources import module
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded, loads_variants
from kgen.spec.names import named_apart
from kgen.spec.source import Document
from kgen.targets import Source, opening
from kgen.targets.arguments import Derivatives
from kgen.targets.launching import ImportsLaunch
from kgen.targets.ranks import FOLDER, SHARED
from kgen.targets.signature import Signature

SHIPPED = Path(__file__).parents[1] / "parallel"
FILES = (
    *(SHIPPED / f"{n}.py" for n in ("shares", "kernels", "states")),
    *map(FOLDER.joinpath, SHARED),
)
"""Runtime files of the package, identical for all specs."""
KEYWORDS = ("group", "reduce_gradients")
"""The arguments that only the function over ranks has."""
BY_TOKEN = ("q_mapped", "k_mapped", "o_raw")
"""The tensors for backward that have tokens. The others have chunks."""


@dataclass(frozen=True)
class Package(ImportsLaunch):
    """Values for `__init__.py`: the function over ranks."""

    template: ClassVar[str] = "linear_attention/adapters/context_parallel.j2"
    import_indent: ClassVar[int] = 0

    name: str
    package: str
    part: str
    """The folder of the kernels."""
    summary: str
    usage: str
    K: int
    V: int
    dtype: str
    head_words: str
    buffer_words: list[str]
    sequences: str
    """The number of sequences, in a shape."""
    scale: str
    """The default of `scale`."""
    state_dtype: str
    by_token: str
    """A Python tuple with True for each of q, k, v and the buffers that has tokens."""
    saved: str
    """The same for the tensors that forward saves for backward."""
    flags: str
    """A Python tuple with the arguments of forward that make it save them."""
    learned: str
    """A Python tuple with the positions of the buffers with gradients."""
    packed: bool
    delta: bool
    decay: int | None
    """The position of the decays in the results of `_chunks`."""
    by_column: bool
    chunk: int
    signature: str
    arguments: Arguments
    derivatives: Derivatives
    given: list[str]
    """The tensors with the names of callers."""
    tensors: list[str]
    """The same with the names of this file."""
    offsets: str
    """The argument with the offsets of packed sequences, or None."""
    reduce: list[str]
    """The argument that controls sums of gradients over ranks, if there is a backward pass."""
    replicated: list[str]
    """The tensors whose gradients ranks sum."""


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_context_parallel`, whose function takes the tokens of one rank.

    Raise `KgenError` if the spec lists dtypes or head dims, or if a buffer has the name of an
    argument.
    """
    wrong = list(_wrong(variants))
    if wrong:
        raise KgenError(wrong)
    loaded = variants[0]
    text = _part(loaded)
    parts = loads_variants(text, loaded.path)
    package, part = f"{loaded.spec.name}_context_parallel", str(parts[0].spec.name)
    source = Source("__init__.py", _package(named_apart(loaded), package, part))
    files = {"__init__.py": render_source(variants, source)}
    for file in FILES:
        shipped = Verbatim(file.read_text(encoding="utf-8"))
        files[file.name] = render_source(variants, Source(file.name, shipped))
    made = {package: files}
    made |= {f"{package}/{folder}": dict(texts) for folder, texts in render_variants(parts).items()}
    described = Source("spec.yaml", Verbatim(text))
    made[f"{package}/{part}"]["spec.yaml"] = render_source(parts, described)
    return Adapter(made, specs=tuple(parts))


def _wrong(variants: Sequence[Loaded]) -> Iterator[Diagnostic]:
    """Yield the diagnostics of fields that the package cannot have."""
    loaded = variants[0]
    document = Document(loaded.text, loaded.path.as_posix())
    if len(variants) > 1:
        field = loaded.listed[0]
        message = f"`{loaded.spec.name}`: a package for several ranks has one variant"
        yield document.value("no-adapter", message, (field,), f"write one `{field}`")
    for name in KEYWORDS:
        if name in loaded.spec.buffers:
            message = f"`{name}` is already an argument of the function for several ranks"
            yield document.key("no-adapter", message, ("buffers", name), "choose another name")


def _part(loaded: Loaded) -> str:
    """Return the YAML of the same layer with states in float32, which pass between ranks."""
    data: dict[str, Any] = dict(Document(loaded.text, loaded.path.as_posix()).data)
    data["name"] = f"{loaded.spec.name}_part"
    data["summary"] = f"{loaded.spec.name} for the tokens of one rank."
    data["passes"] = [name for name in loaded.spec.passes if name != "decode"]
    data.pop("adapters", None)
    if loaded.spec.state_dtype != "fp32":
        data["state_dtype"] = "fp32"
    yaml, out = YAML(typ="rt"), io.StringIO()
    yaml.width, yaml.default_flow_style = 2**20, None
    yaml.dump(data, out)
    return out.getvalue()


def _package(loaded: Loaded, package: str, part: str) -> Package:
    plan = plan_linear_attention(loaded)
    spec, interface = plan.spec, Interface(plan, loaded.called)
    launcher: Launcher = module(plan, loaded.called, single=False).launcher
    words, own = interface.docstring(), interface.signature()
    reduce = ["reduce_gradients"] if plan.backward else []
    defaults = [("scale", "None"), ("initial_state", "None"), ("output_final_state", "False")]
    defaults += [("group", "None"), *((name, "True") for name in reduce)]
    tokens = {name: spec.buffers[name].tokens for name in plan.buffers}
    learned = plan.learned if plan.backward else ()
    replicated = [interface.label(name) for name in learned if not tokens[name]]
    return Package(
        name=spec.name,
        package=package,
        part=part,
        summary=opening(spec),
        usage=own.usage,
        K=words.K,
        V=words.V,
        dtype=words.dtype,
        head_words=words.head_words,
        buffer_words=words.buffer_words,
        sequences=words.sequences,
        scale=words.scale,
        state_dtype=words.state_dtype,
        by_token=repr((True, True, True, *tokens.values())),
        saved=repr(tuple(name in BY_TOKEN for name in launcher.saved)),
        flags=repr((True,) if keeps(plan) else ()),
        learned=repr(tuple(map(plan.buffers.index, learned))),
        packed=spec.varlen,
        delta=plan.delta,
        decay=2 + launcher.held.index("G") if "G" in launcher.held else None,
        by_column=plan.by_column,
        chunk=spec.chunk_size,
        signature=str(Signature(own.tensors, own.required, tuple(defaults))),
        arguments=interface.arguments(spec.name),
        derivatives=interface.derivatives(),
        given=[*map(interface.label, interface.tensors), "initial_state"],
        tensors=interface.tensors,
        offsets=", ".join(interface.packing) or "None",
        reduce=reduce,
        replicated=[*replicated, "initial_state"],
    )
