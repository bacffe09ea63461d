"""Adapter for context parallelism: sequences sharded over ranks with torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.nodes import Type
from kgen.family import family
from kgen.kernels.attention.adapt.context_parallel_template import (
    IN_FUNCTIONS,
    IN_MODULE,
    Intervals,
    Kernels,
    Package,
    Usage,
)
from kgen.kernels.attention.adapt.intervals import Ranges
from kgen.kernels.attention.adapt.part import PartSpec, part_of
from kgen.kernels.attention.adapt.shared import Verbatim, head_of
from kgen.kernels.attention.plan.model import AttentionPlan, exact
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.kernels.attention.targets.triton.interface import real_dtypes
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.common import ParamSpec
from kgen.spec.load import Loaded, loads_variants
from kgen.targets import Source, opening
from kgen.targets.arguments import Derivatives, Refused, cast_lines, dense, numbers_of
from kgen.targets.ranks import FOLDER, SHARED

SHIPPED = Path(__file__).parents[1] / "parallel"
RUNS_BESIDE = (
    "sharding kernel_calls planning merging partial_sums queries peer_memory transfers "
    "key_gradients exchange call_plans runtime layout"
)
FILES = tuple(f"{name}.py" for name in RUNS_BESIDE.split())
"""Runtime files of the package, identical for all specs, without those that families share."""


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return the package `<name>_context_parallel`, whose function takes the rows of one rank.

    Raise `KgenError` if the spec has paged keys or no pass `forward`.
    """
    part, path = part_of(variants[0]), variants[0].path
    text = part.text()
    parts = loads_variants(text, path)
    name = f"{variants[0].spec.name}_context_parallel"
    _require_names(variants[0])
    package = _package(_Facts(variants[0], part, parts))
    files = {"__init__.py": render_source(variants[:1], Source("__init__.py", package))}
    for file in (*(SHIPPED / name for name in FILES), *(FOLDER / name for name in SHARED)):
        shipped = file.read_text(encoding="utf-8")
        files[file.name] = render_source(variants, Source(file.name, Verbatim(shipped)))
    made = {name: files}
    made |= {f"{name}/{folder}": dict(texts) for folder, texts in render_variants(parts).items()}
    said = Source("spec.yaml", Verbatim(text))
    made[f"{name}/{parts[0].spec.name}"]["spec.yaml"] = render_source(parts, said)
    return Adapter(made, specs=tuple(parts))


def _require_names(loaded: Loaded) -> None:
    """Raise `KgenError` if a name of the spec conflicts with a name in the package's file."""
    spec = loaded.spec
    taken = dict.fromkeys((*spec.buffers, *spec.params), IN_FUNCTIONS) | {spec.name: IN_MODULE}
    for name, own in taken.items():
        if name in own:
            message = f"`{name}` is already a name in the package for several ranks"
            path = loaded.path.as_posix()
            raise KgenError(
                Diagnostic("no-adapter", message, path, 1, 1, hint="choose another name")
            )


@dataclass(frozen=True)
class _Facts:
    """A spec with its part, and properties from which fields of the package are derived."""

    loaded: Loaded
    part: PartSpec
    parts: Sequence[Loaded]

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the whole sequence."""
        return self.part.variant.spec

    @cached_property
    def plan(self) -> AttentionPlan:
        """The plan of the part."""
        return plan_attention(self.parts[0])

    @cached_property
    def own(self) -> AttentionPlan:
        """The plan of the whole sequence."""
        return plan_attention(self.loaded)

    @property
    def runtime(self) -> Mapping[str, ParamSpec]:
        """The run-time parameters."""
        return {n: p for n, p in self.spec.params.items() if p.runtime}

    @property
    def packed(self) -> list[str]:
        """The tensors with the offsets of packed sequences."""
        return ["cu_seqlens_q", "cu_seqlens_k"] if self.spec.varlen else []

    @property
    def sinks(self) -> list[str]:
        """The attention sinks."""
        return ["sinks"] if self.spec.sinks else []

    @cached_property
    def keys(self) -> Ranges:
        """The ranges of keys for a tile of queries."""
        return Ranges(self.own, self.own.forward)

    @cached_property
    def queries(self) -> Ranges | None:
        """The ranges of queries for a tile of keys."""
        return None if self.own.dkdv is None else Ranges(self.own, self.own.dkdv)

    @property
    def reads(self) -> list[str]:
        """The names that these intervals read."""
        return sorted({*self.keys.names, *(self.queries.names if self.queries else ())})

    @property
    def asked(self) -> list[str]:
        """The arguments of a plan."""
        reads = self.reads
        return [
            n
            for n in (*self.packed, *self.spec.buffers, *self.runtime)
            if n in reads or n in self.packed
        ]

    @cached_property
    def learned(self) -> list[str]:
        """Tensors with gradients after q, k and v."""
        buffers = {view.name: view.buffer for view in self.part.views}
        found = list(dict.fromkeys(buffers[name] for name in _learned(self.plan)))
        return found + self.sinks if self.own.backward else found


def _package(facts: _Facts) -> Package:
    spec, packed, sinks = facts.spec, facts.packed, facts.sinks
    several, casts = _casts(facts.parts, spec)
    refused = _refused(_without_gradient(facts))
    reduce = ["reduce_gradients"] if facts.learned else []
    given = {n: n for n in ("scale", *facts.runtime, *packed, *spec.buffers)}
    sizes = {word: _size_of(spec, facts.asked, size) for word, size in SIZES.items()}
    return Package(
        name=spec.name,
        package=f"{spec.name}_context_parallel",
        summary=opening(spec),
        axis=0 if packed else 2,
        head=head_of(spec),
        usage=_usage(facts),
        constants=_constants(facts),
        planning_names=_planning_names(facts),
        keys=_intervals(facts.keys),
        queries=_intervals(facts.queries) if facts.queries and facts.queries.texts else None,
        modules=_modules(facts.parts),
        kernels=_kernels(facts),
        operands=[*packed, *spec.buffers, *sinks],
        runtime=list(facts.runtime),
        runtime_params=[f"{n}: {p.type}" for n, p in facts.runtime.items()],
        reduce=reduce,
        given=_as_dict(given),
        alike=[f"{n}={n}" for n in (*sinks, *reduce)],
        sinks="sinks" if sinks else "None",
        lse_shape="(q.shape[1], q.shape[0])" if packed else "q.shape[:-1]",
        lse_words=" [H, S]" if packed else " [B, H, S]",
        exact=Exact(exact(spec)),
        derivatives=Derivatives("", refused, facts.own.backward, "", transformed=bool(refused)),
        learned=facts.learned,
        gradient_returns=_returned(facts),
        packed_operands=packed,
        keywords=[*spec.buffers, *sinks, *facts.runtime],
        tensors_words="[S, H, D]" if packed else "[B, H, S, D]",
        argument_words=_words(spec, packed),
        dense_check=dense(spec.name, ["q", "k", "v", *packed, *spec.buffers, *sinks]),
        casts=casts,
        several_dtypes=several,
        numbers=numbers_of(spec.name, facts.runtime),
        plan_params=_plan_params(facts, sizes),
        plan_words=_plan_words(spec, packed, facts.asked),
        plan_lengths="(int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1]))"
        if packed
        else "(length, length if kv_length is None else kv_length)",
        plan_given=_as_dict({n: n for n in facts.asked}),
        plan_sizes=[
            f"{found} if {word} is None else {word}" if found else word
            for word, found in sizes.items()
        ],
    )


def _usage(facts: _Facts) -> Usage:
    packed = facts.packed
    by_name = (*facts.spec.buffers, *facts.sinks, *facts.runtime)
    return Usage(
        length=", ".join(packed) if packed else "length",
        plan=[f"{n}={n}" for n in facts.asked if n not in packed],
        call=[*packed, *(f"{n}={n}" for n in by_name)],
    )


def _constants(facts: _Facts) -> list[str]:
    params = facts.spec.params.items()
    return [f"{n} = {p.value!r}" for n, p in params if not p.runtime and n in facts.reads]


def _planning_names(facts: _Facts) -> list[str]:
    ranges = [r for r in (facts.keys, facts.queries) if r is not None]
    return sorted({name for r in ranges for name in r.calls})


def _intervals(ranges: Ranges) -> Intervals:
    return Intervals(ranges.params, ranges.texts)


def _modules(parts: Sequence[Loaded]) -> list[tuple[str, str]]:
    varies = family("attention").varies
    folder = f"{parts[0].spec.name}." if len(parts) > 1 and parts[0].variant is None else ""
    return [
        (
            f"({varies['dtype'].literal(one.spec)}, {varies['head_dim'].literal(one.spec)})",
            f"{folder}{one.folder}".replace("/", "."),
        )
        for one in parts
    ]


def _kernels(facts: _Facts) -> Kernels:
    part, spec = facts.parts[0].spec, facts.spec
    return Kernels(
        views=repr(tuple((v.name, v.buffer, v.sides) for v in facts.part.views)),
        tensors=repr(tuple(part.buffers)),
        numbers=repr(tuple(n for n, p in part.params.items() if p.runtime)),
        places=repr(facts.part.places),
        learned=repr(tuple(_learned(facts.plan))),
        packed=spec.varlen,
        listed=facts.plan.block_mask is not None,
        reads=repr(tuple(n for n in facts.reads if n not in spec.params or n in facts.runtime)),
        sinks=bool(spec.sinks),
    )


def _without_gradient(facts: _Facts) -> list[str]:
    """Return the real tensors without a gradient."""
    found = [] if facts.own.backward else ["q", "k", "v", *facts.sinks]
    buffers = facts.spec.buffers.items()
    return found + [n for n, b in buffers if b.element is Type.FLOAT and n not in facts.learned]


def _returned(facts: _Facts) -> list[str]:
    """Return the gradients of all operands after q, k and v; None for numbers and flags."""
    tensors = (*facts.packed, *facts.spec.buffers, *facts.sinks)
    others = (
        "plan",
        "scale",
        *facts.runtime,
        "group",
        *(["reduce_gradients"] if facts.learned else []),
    )
    return [
        *(f"d{n}" if n in facts.learned else "None" for n in tensors),
        *("None" for _ in others),
    ]


def _plan_params(facts: _Facts, sizes: Mapping[str, str]) -> list[str]:
    """Return the parameters of the function that makes a plan.

    Sizes come from buffers where possible.
    """
    lengths = facts.packed or ["length", "kv_length=None"]
    by_name = [n for n in facts.asked if n not in facts.packed]
    by_default = [f"{word}={'None' if found else 1}" for word, found in sizes.items()]
    return [*lengths, "*", *by_name, *by_default, "ranks=None", 'sharding="auto"']


def _as_dict(values: Mapping[str, str]) -> str:
    """Return Python code of a dictionary."""
    return "{" + ", ".join(f'"{n}": {x}' for n, x in values.items()) + "}"


def _refused(names: Sequence[str]) -> tuple[Refused, ...]:
    """Return the tensors for which a function over ranks computes no gradient."""
    given = ", ".join(f"{n}={n}" for n in names)
    return (Refused(given, "but a function over ranks gives it none:"),) if given else ()


def _casts(parts: Sequence[Loaded], spec: AttentionSpec) -> tuple[bool, list[str]]:
    """Return true if there are kernels for several dtypes, and the casts under autocast."""
    dtypes = list(
        dict.fromkeys(family("attention").varies["dtype"].literal(one.spec) for one in parts)
    )
    several = len(dtypes) > 1
    wanted = f"_wanted(q, ({', '.join(dtypes)}))" if several else dtypes[0]
    lines = cast_lines(dict.fromkeys(("q", "k", "v"), wanted)) + cast_lines(
        real_dtypes(spec.buffers)
    )
    return several, lines


SIZES = {"batch": "B", "heads": "HQ", "kv_heads": "HKV"}
"""Sizes besides lengths that a plan may depend on, by argument."""


def _size_of(spec: AttentionSpec, asked: Sequence[str], size: str) -> str:
    """Return Python code that reads a size from an argument of the plan, or an empty string."""
    shapes = ((name, spec.buffers[name].shape) for name in asked if name in spec.buffers)
    return next(
        (f"{name}.shape[{shape.index(size)}]" for name, shape in shapes if size in shape), ""
    )


def _learned(plan: AttentionPlan) -> list[str]:
    """Return the buffers of a part with gradients, in the order of the gradients."""
    if not plan.backward:
        return []
    asked = (
        *(g.buffer for g in plan.gradients),
        *(n for n, b in plan.spec.buffers.items() if b.grad),
    )
    return [plan.called.get(name, name) for name in dict.fromkeys(asked)]


def _words(spec: AttentionSpec, packed: Sequence[str]) -> list[str]:
    words = []
    if packed:
        words.append(
            "cu_seqlens_q, cu_seqlens_k: [N + 1] int32, of the whole sequence, the same on all "
            "ranks."
        )
    for name, buffer in spec.buffers.items():
        shape = ", ".join(map(str, buffer.shape))
        words.append(
            f"{name}: [{shape}] {buffer.dtype_words}, of the whole sequence, the same on all ranks."
        )
    if spec.sinks:
        words.append("sinks: [HQ], logits that join the softmax without a value.")
    return words + [f"{n}: {p.type}." for n, p in spec.params.items() if p.runtime]


def _plan_words(spec: AttentionSpec, packed: Sequence[str], asked: Sequence[str]) -> list[str]:
    words = (
        ["cu_seqlens_q, cu_seqlens_k: [N + 1] int32. They are brought to the host."]
        if packed
        else [
            "length: of the whole sequence; kv_length that of keys, where it is another.",
        ]
    )
    brought = [n for n in asked if n in spec.buffers]
    words += (
        [f"{', '.join(brought)}: as in {spec.name}. Their elements are brought to the host."]
        if brought
        else []
    )
    return [
        *words,
        (
            "batch, heads, kv_heads: sequences, heads, heads of keys, where the mask reads them "
            "and no buffer has them."
        ),
    ]
