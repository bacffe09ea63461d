"""An adapter for sequences that are spread over ranks: context parallel, by torch.distributed."""

from __future__ import annotations

import functools
import symtable
from collections.abc import Sequence
from pathlib import Path

from kgen.diagnostics import Diagnostic, KgenError
from kgen.expr.nodes import FIRST_AT_LEAST, Const, Node, Type, Var, substitute, variables, walk
from kgen.expr.show import show
from kgen.family import family
from kgen.kernels.attention.adapt.part import PartSpec, part_of
from kgen.kernels.attention.plan.model import AttentionPlan, TileLoop, exact
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.spec import AttentionSpec
from kgen.kernels.attention.targets.triton.exact import exact_fields
from kgen.kernels.attention.targets.triton.launcher import real_dtypes
from kgen.render.adapters import Adapter
from kgen.render.rendering import render_source, render_variants
from kgen.spec.load import Loaded, loads_variants
from kgen.targets import Source, opening
from kgen.targets.arguments import cast_lines, dense, number_fields

SHIPPED = Path(__file__).parents[1] / "parallel"
TEMPLATE = "attention/adapters/context_parallel.j2"
RUNS_BESIDE = (
    "sharding calls planning merging sums queries words peers transfers home exchange runtime layout"
)
FILES = tuple(f"{name}.py" for name in RUNS_BESIDE.split())
"""What runs beside the kernels, the same for all specs."""


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """`<name>_context_parallel`: a package whose function takes the rows of a rank, with the kernels of parts.

    Raises `KgenError` for a spec whose keys are in pages, and for one without the pass `forward`.
    """
    part, path = part_of(variants[0]), variants[0].path
    text = part.text()
    parts = loads_variants(text, path)
    name = f"{variants[0].spec.name}_context_parallel"
    _require_names(variants[0])
    files = {"__init__.py": _package(variants[0], part, parts)}
    for file in FILES:
        shipped = (SHIPPED / file).read_text(encoding="utf-8")
        files[file] = render_source(variants, Source(file, "attention/adapters/spec.j2", {"text": shipped}))
    made = {name: files}
    made |= {f"{name}/{folder}": dict(texts) for folder, texts in render_variants(parts).items()}
    said = Source("spec.yaml", "attention/adapters/spec.j2", {"text": text})
    made[f"{name}/{parts[0].spec.name}"]["spec.yaml"] = render_source(parts, said)
    return Adapter(made, specs=tuple(parts))


def _package(loaded: Loaded, part: PartSpec, parts: Sequence[Loaded]) -> str:
    """`__init__.py`."""
    context = _context(loaded, part, parts, f"{loaded.spec.name}_context_parallel")
    return render_source([loaded], Source("__init__.py", TEMPLATE, context))


def _require_names(loaded: Loaded) -> None:
    """Raise `KgenError` for a name of the spec that is another name too in the package's file."""
    spec = loaded.spec
    names = {spec.name: "own", **dict.fromkeys((*spec.buffers, *spec.params), "given")}
    for name, kind in names.items():
        if name in _names(kind):
            message = f"`{name}` is a name of the package for several ranks, too"
            path = loaded.path.as_posix()
            raise KgenError(Diagnostic("no-adapter", message, path, 1, 1, hint="choose another name"))


PROBES = """kernel: attention
name: own
dtype: bf16
head_dim: 16
sinks: true
varlen: {varlen}
buffers: {{given_learned: {{shape: [HQ], dtype: fp32, grad: true}}}}
params: {{given_number: {{type: int, runtime: true}}, given_real: {{type: float, runtime: true}}}}
score_mod: score * given_real + given_learned[h]
mask_mod: q_idx >= kv_idx - given_number
"""
"""Specs whose own names nothing else has, and whose files have all that there may be in one."""


@functools.cache
def _names(kind: str) -> frozenset[str]:
    """The names of the package's file that a spec's own ones of a kind meet in a scope: its name, or what is given."""
    found = set()
    for varlen in ("false", "true"):
        (loaded,) = loads_variants(PROBES.format(varlen=varlen), Path("own.yaml"))
        part = part_of(loaded)
        text = _package(loaded, part, loads_variants(part.text(), loaded.path))
        scopes = [symtable.symtable(text, "", "exec")]
        for scope in scopes:  # grows meanwhile
            scopes += scope.get_children()
            names = scope.get_identifiers()
            found |= {*names} if any(name.removeprefix("d").startswith(kind) for name in names) else set()
    return frozenset(found)


def _context(loaded: Loaded, part: PartSpec, parts: Sequence[Loaded], package: str) -> dict[str, object]:
    spec: AttentionSpec = part.variant.spec
    plan, own = plan_attention(parts[0]), plan_attention(loaded)
    runtime = {n: p for n, p in spec.params.items() if p.runtime}
    packed = ["cu_seqlens_q", "cu_seqlens_k"] * spec.varlen
    sinks = ["sinks"] * spec.sinks
    operands = [*packed, *spec.buffers, *sinks]
    keys = _Ranges(own, own.forward)
    queries = None if own.dkdv is None else _Ranges(own, own.dkdv)
    texts = [text for ranges in (keys, queries) if ranges for pair in ranges.texts for text in pair]
    reads = sorted({*keys.names, *(queries.names if queries else ())})
    learned = _learned(plan)
    buffers = {view.name: view.buffer for view in part.views}
    learned_buffers = list(dict.fromkeys(buffers[name] for name in learned)) + (sinks if own.backward else [])
    kinds = {"int": "int", "float": "float"}
    asked = [n for n in (*packed, *spec.buffers, *runtime) if n in reads or n in packed]
    varies = family("attention").varies
    inside = f"{parts[0].spec.name}." * (len(parts) > 1 and parts[0].variant is None)
    modules = [f"{inside}{one.folder}".replace("/", ".") for one in parts]
    given = {n: n for n in ("scale", *runtime, *packed, *spec.buffers)}
    sizes = {word: _size_of(spec, asked, size) for word, size in SIZES.items()}
    refused = [] if own.backward else ["q", "k", "v", *sinks]
    refused += [n for n, b in spec.buffers.items() if b.element is Type.FLOAT and n not in learned_buffers]
    tensor = "[S, H, D]" if spec.varlen else "[B, H, S, D]"
    return {
        "name": spec.name,
        "package": package,
        "summary": opening(spec),
        "axis": 0 if spec.varlen else 2,
        "head": spec.head_dim,
        "usage_length": ", ".join(packed) if spec.varlen else "length",
        "usage_args": [f"{n}={n}" for n in asked if n not in packed],
        "usage_call": [*packed, *(f"{n}={n}" for n in (*spec.buffers, *sinks, *runtime))],
        "constants": [f"{n} = {p.value!r}" for n, p in spec.params.items() if not p.runtime and n in reads],
        "planning_names": [n for n in ("first_at_least", "where") if any(f"{n}(" in text for text in texts)],
        "key_params": keys.params,
        "key_ranges": keys.texts,
        "query_params": queries.params if queries else [],
        "query_ranges": queries.texts if queries else [],
        "queries": "_queries" if queries and queries.texts else "None",
        "modules": [
            (f"({varies['dtype'].literal(one.spec)}, {varies['head_dim'].literal(one.spec)})", module)
            for one, module in zip(parts, modules, strict=True)
        ],
        "views": repr(tuple((v.name, v.buffer, v.sides) for v in part.views)),
        "part_tensors": repr(tuple(parts[0].spec.buffers)),
        "part_numbers": repr(tuple(n for n, p in parts[0].spec.params.items() if p.runtime)),
        "places": repr(part.places),
        "learned_views": repr(tuple(learned)),
        "packed": spec.varlen,
        "listed": plan.block_mask is not None,
        "reads": repr(tuple(n for n in reads if n not in spec.params or n in runtime)),
        "operands": operands,
        "operand_params": [f"{n}: Tensor" for n in operands],
        "runtime": list(runtime),
        "runtime_params": [f"{n}: {kinds[p.type]}" for n, p in runtime.items()],
        "given": "{" + ", ".join(f'"{n}": {x}' for n, x in given.items()) + "}",
        "alike": [f"{n}={n}" for n in (*sinks, *["reduce_gradients"] * bool(learned_buffers))],
        "sinks": "sinks" if spec.sinks else "None",
        "has_sinks": bool(spec.sinks),
        "lse_shape": "(q.shape[1], q.shape[0])" if spec.varlen else "q.shape[:-1]",
        "exact": exact_fields(exact(spec)),
        "lse_words": " [H, S]" if spec.varlen else " [B, H, S]",
        "derived": own.backward,
        "transformed": bool(refused),
        "underived": ", ".join(f"{n}={n}" for n in refused),
        "learned": learned_buffers,
        "reduce": {
            "name": ["reduce_gradients"] * bool(learned_buffers),
            "param": ["reduce_gradients: bool"] * bool(learned_buffers),
            "keyword": ["reduce_gradients=True"] * bool(learned_buffers),
        },
        "gradient_types": f"tuple[{', '.join(['Tensor'] * (3 + len(learned_buffers)))}]",
        "gradient_returns": [
            *(f"d{n}" if n in learned_buffers else "None" for n in operands), "None", "None",
            *["None"] * (len(runtime) + 1 + bool(learned_buffers)),
        ],
        "packed_operands": packed,
        "keywords": [*spec.buffers, *sinks, *runtime],
        "tensors_words": tensor,
        "argument_words": _words(spec, packed),
        "dense_check": dense(["q", "k", "v", *operands]),
        **_casts(parts, spec),
        **number_fields(runtime),
        "number_lines": number_fields(runtime)["numbers"]["lines"],  # type: ignore[index]
        "plan_params": [*(packed or ["length", "kv_length=None"]), "*", *(n for n in asked if n not in packed),
                        *(f"{word}={'None' if found else 1}" for word, found in sizes.items()),
                        "ranks=None", 'sharding="auto"'],
        "plan_sizes": [f"{found} if {word} is None else {word}" if found else word for word, found in sizes.items()],
        "plan_words": _plan_words(spec, packed, asked),
        "plan_lengths": "(int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1]))" if spec.varlen
        else "(length, length if kv_length is None else kv_length)",
        "plan_given": "{" + ", ".join(f'"{n}": {n}' for n in asked) + "}",
    }  # fmt: skip


def _casts(parts: Sequence[Loaded], spec: AttentionSpec) -> dict[str, object]:
    """How operands are cast under autocast."""
    dtypes = list(dict.fromkeys(family("attention").varies["dtype"].literal(one.spec) for one in parts))
    several = len(dtypes) > 1
    wanted = f"_wanted(q, ({', '.join(dtypes)}))" if several else dtypes[0]
    lines = cast_lines(dict.fromkeys(("q", "k", "v"), wanted)) + cast_lines(real_dtypes(spec.buffers))
    return {"casts": lines, "several_dtypes": several}


SIZES = {"batch": "B", "heads": "HQ", "kv_heads": "HKV"}
"""What a plan may depend on besides lengths, by argument."""


def _size_of(spec: AttentionSpec, asked: Sequence[str], size: str) -> str:
    """How many there are, by a buffer that a plan is asked for; empty where none has them."""
    shapes = ((name, spec.buffers[name].shape) for name in asked if name in spec.buffers)
    return next((f"{name}.shape[{shape.index(size)}]" for name, shape in shapes if size in shape), "")


class _Ranges:
    """The spans of a loop as Python over positions of the whole sequence."""

    def __init__(self, plan: AttentionPlan, loop: TileLoop) -> None:
        known: dict[Node, Node] = {
            Var(n, p.scalar): Const(p.value, p.scalar)
            for n, p in plan.spec.params.items()
            if p.value is not None
        }
        bounds = [tuple(substitute(b, known) for b in (span.lo, span.hi)) for span in loop.spans]
        self.texts = [tuple(map(show, pair)) for pair in bounds]
        nodes = [node for pair in bounds for bound in pair for node in walk(bound)]
        read = {n.buffer.removesuffix(FIRST_AT_LEAST) for n in nodes if hasattr(n, "buffer")}
        tile = {loop.outer.start.name, loop.outer.last.name}
        used = read | {name for pair in bounds for bound in pair for name in variables(bound)}
        self.names = sorted(used - tile)
        self.params = [loop.outer.start.name, loop.outer.last.name, *self.names]


def _learned(plan: AttentionPlan) -> list[str]:
    """The buffers of a part with a gradient, in the order of the gradients."""
    if not plan.backward:
        return []
    asked = (*(g.buffer for g in plan.gradients), *(n for n, b in plan.spec.buffers.items() if b.grad))
    return [plan.called.get(name, name) for name in dict.fromkeys(asked)]


def _words(spec: AttentionSpec, packed: Sequence[str]) -> list[str]:
    words = [
        "cu_seqlens_q, cu_seqlens_k: [N + 1] int32, of the whole sequence, the same on all ranks."
    ] * bool(packed)
    for name, buffer in spec.buffers.items():
        shape = ", ".join(map(str, buffer.shape))
        words.append(f"{name}: [{shape}] {buffer.dtype_words}, of the whole sequence, the same on all ranks.")
    words += ["sinks: [HQ], logits that join the softmax without a value."] * spec.sinks
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
        "batch, heads, kv_heads: sequences, heads, heads of keys, where the mask reads them and no buffer has them.",
    ]
