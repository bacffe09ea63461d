"""Calls of emitted launchers and of C functions with the same tensors, to compare their
launches.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.verify.problem import Problem
from kgen.kernels.chunk_output.verify import inputs as chunks
from kgen.kernels.norm.plan.planning import plan_norm
from kgen.targets.native import member
from kgen.verify.families import problem_of
from support.packages.c_on_paper import Library, Paper

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
Tensors = dict[str, Any]
Launches = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """Sizes, memory layout and options of a call."""

    batch: int = 2
    heads: int = 2
    group: int = 1
    sq: int = 200
    sk: int = 200
    layout: str = "bhsd"
    dlse: bool = False
    multiprocessors: int = 7
    deterministic: bool = False
    spare: int = 0
    """Number of chunks that belong to no sequence."""


def laid_out(case: Case, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a zero tensor [.., H, S, D] (or [T, H, D]) in the memory layout of the case."""
    *before, s, d = sizes
    match case.layout:
        case "bshd":
            return torch.zeros(*before[:-1], s, *before[-1:], d, dtype=dtype).transpose(-2, -3)
        case "guarded":  # TMA cannot load these rows
            return torch.zeros(*before, s, d + 1, dtype=dtype)[..., :d]
        case "columns":
            return torch.zeros(*before, d, s, dtype=dtype).transpose(-1, -2)
        case "offset":  # the start is not aligned for vectors
            whole = torch.zeros(1 + torch.Size(sizes).numel(), dtype=dtype)
            return whole[1:].view(sizes)
    return torch.zeros(sizes, dtype=dtype)


def attention_tensors(loaded: Any, case: Case) -> Tensors:
    """Return the tensors of a call of attention, by their names in kernels."""
    spec, problem = loaded.spec, problem_of(loaded)
    assert isinstance(problem, Problem)
    dtype, group = DTYPES[spec.dtype], case.group if spec.gqa == "any" else spec.gqa
    hq, hkv = case.heads * group, case.heads
    sizes = {"B": case.batch, "HQ": hq, "HKV": hkv, "SQ": case.sq, "SK": case.sk, "any": 5}
    if problem.varlen:
        q, k = (case.batch * case.sq, hq), (case.batch * case.sk, hkv)
        ends = {
            f"cu_seqlens_{x}": torch.arange(case.batch + 1, dtype=torch.int32) * length
            for x, length in (("q", case.sq), ("k", case.sk))
        }
    else:
        q, k, ends = (case.batch, hq, case.sq), (case.batch, hkv, case.sk), {}
    found: Tensors = {
        "q": laid_out(case, (*q, spec.head_dim.qk), dtype),
        "k": laid_out(case, (*k, spec.head_dim.qk), dtype),
        # The strides of v differ from the strides of q and k.
        "v": laid_out(
            replace(case, layout="bhsd") if case.layout == "bshd" else case,
            (*k, spec.head_dim.v),
            dtype,
        ),
        **ends,
    }
    if spec.paged_kv is not None:
        found |= pages(case, spec, hkv, dtype)
        sizes["SK"] = found["block_table"].shape[1] * spec.paged_kv.page_size
    # The buffers of the plan include the lengths of a cache.
    for name, buffer in plan_attention(loaded).spec.buffers.items():
        shape = [n if isinstance(n, int) else sizes[n] for n in buffer.shape]
        found[name] = torch.zeros([*shape, 2], dtype=DTYPES[buffer.dtype])[
            ..., int(case.layout == "guarded")
        ]
        if case.layout == "bhsd":
            found[name] = found[name].contiguous()
    found |= block_lists(plan_attention(loaded), sizes)
    if spec.sinks:
        found["sinks"] = torch.zeros(hq)
    found["scale"] = 0.3
    found |= {
        name: 2 for name, param in spec.params.items() if param.runtime and param.type == "int"
    }
    found |= {
        name: 0.5 for name, param in spec.params.items() if param.runtime and param.type == "float"
    }
    found["dout"] = laid_out(case, (*q, spec.head_dim.v), dtype)
    lse = (hq, case.batch * case.sq) if problem.varlen else (case.batch, hq, case.sq)
    found["dlse"] = torch.zeros(*lse, 3)[..., 1] if case.dlse else None
    return found


def learned_tensors(loaded: Any, given: Tensors) -> Tensors:
    """Return the buffers for gradients that C writes, by the names of the struct."""
    plan, packed = plan_attention(loaded), loaded.spec.varlen
    heads, queries, keys = (given[x].shape[:-1] for x in ("q", "q", "k"))
    found: Tensors = {}
    for g in plan.gradients:
        called = loaded.called.get(g.buffer, g.buffer) + g.name.removeprefix(g.buffer)
        buffer, sizes = given[g.buffer], (queries[0], queries[1])
        if g.along == "pair":
            dtype = buffer.dtype if g.summed is not None else torch.float32
            found[f"d{called}"] = torch.ones(buffer.shape, dtype=dtype)
            continue
        if packed:
            sizes = (heads[1], (queries if g.along == "q" else keys)[0])
        else:
            length = {"q": queries[2], "kv": keys[2], "distance": queries[2] + keys[2]}[g.along]
            sizes = (*sizes, length)
        found[f"d{called}"] = torch.ones(sizes)
    return found


def pages(case: Case, spec: Any, heads: int, dtype: torch.dtype) -> Tensors:
    """Return paged keys and values, with the maximum number of pages for each sequence."""
    size = spec.paged_kv.page_size
    count = -(-case.sk // size)
    sizes = (1 + case.batch * count, size, heads)
    strided = replace(case, layout="guarded" if case.layout == "guarded" else "bhsd")
    return {
        "k": laid_out(strided, (*sizes, spec.head_dim.qk), dtype),
        "v": laid_out(strided, (*sizes, spec.head_dim.v), dtype),
        "block_table": torch.zeros(case.batch, count, 2, dtype=torch.int32)[..., 0],
    }


def block_lists(plan: Any, sizes: dict[str, int]) -> Tensors:
    """Return the lists of a block mask, for each block of queries and of keys."""
    mask, blocks = plan.block_mask, {x: -(-sizes[n] // 128) for x, n in (("q", "SQ"), ("kv", "SK"))}
    if mask is None:
        return {}
    planes = (sizes["B"] if mask.by_batch else 1, sizes["HQ"] if mask.by_head else 1)
    found: Tensors = {}
    for inner, outer in (("kv", "q"), ("q", "kv"))[: 1 + plan.backward]:
        for name in (f"{inner}_num_blocks", f"full_{inner}_num_blocks"):
            found[name] = torch.zeros(*planes, blocks[outer], dtype=torch.int32)
        found[f"{inner}_indices"] = torch.zeros(
            *planes, blocks[outer], blocks[inner], dtype=torch.int32
        )
    return found


def attention_launches(
    paper: Paper, library: Library, launcher: ModuleType, loaded: Any, case: Case, arch: int
) -> tuple[Launches, Launches]:
    """Return the launches of Python and of C by pass: without log-sum-exp, with it, and
    backward.
    """
    given = attention_tensors(loaded, case)
    names = list(inspect.signature(launcher._forward).parameters)[:-1]
    passed = [given[name] for name in names]
    inputs = {name: given[name] for name in names if isinstance(given[name], torch.Tensor)}
    masked = {name: given[name] for name in loaded.spec.buffers}
    backward = "backward" in loaded.spec.passes
    paper.device(arch, case.multiprocessors)
    want: Launches = {}
    rooms: dict[str, list[int]] = {}
    torch.use_deterministic_algorithms(case.deterministic)
    try:
        with paper.under_python(launcher, arch, case.multiprocessors):
            if "kv_indices" in given:
                paper.begin(masked)
                sides = {"B": case.batch, "HQ": given["q"].shape[1], "HKV": case.heads}
                sides |= {"SQ": case.sq, "SK": case.sk, "device": torch.device("cpu")}
                asked = [argument.name for argument in launcher._block_mask_op._schema.arguments]
                launcher._block_mask_op(*[sides.get(name, given.get(name)) for name in asked])
                want["block mask"], rooms["block mask"] = paper.launched, paper.rooms()
            paper.begin(inputs)
            launcher._forward(*passed, False)
            want["forward"], rooms["forward"] = paper.launched, paper.rooms()
            paper.begin(inputs)
            out, lse = launcher._forward(*passed, True)
            want["with lse"], rooms["with lse"] = paper.launched, paper.rooms()
            outputs = {"out": out, "lse": lse}
            if backward:
                known = inputs | outputs | {name: given[name] for name in ("dout", "dlse")}
                paper.begin(known)
                dq, dk, dv, *_ = launcher._backward_op(
                    given["dout"], given["dlse"], out, lse, *passed
                )
                want["backward"], rooms["backward"] = paper.launched, paper.rooms()
                outputs |= {"dq": dq, "dk": dk, "dv": dv}
    finally:
        torch.use_deterministic_algorithms(False)
    called = {
        member(loaded.called.get(name, name), ()): value
        for name, value in given.items()
        if name not in outputs
    }
    if not backward:
        called = {name: value for name, value in called.items() if name not in ("dout", "dlse")}
    called |= outputs
    if backward:
        called["deterministic"] = int(case.deterministic)
        if loaded.spec.sinks:
            queries = -(-lse.shape[-1] // 64)
            called["dsinks"] = torch.ones(*lse.shape[:-1], queries)
        called |= learned_tensors(loaded, given)
    got: Launches = {}
    for name, pass_, more, tensors in (
        *([("block mask", "block_mask", {}, masked)] if "block mask" in want else []),
        ("forward", "forward", {"lse": None}, inputs),
        ("with lse", "forward", {}, inputs),
        *([("backward", "backward", {}, known)] if backward else []),
    ):
        paper.begin(tensors)
        assert library.call(pass_, called | more) == 0, library.error()
        got[name] = paper.launched
        if len(got[name]) == len(want[name]):
            assert paper.crowded(rooms[name], library.workspace) == []
    return want, got


def norm_launches(
    paper: Paper, library: Library, launcher: ModuleType, loaded: Any, case: Case, arch: int
) -> tuple[Launches, Launches]:
    """Return the launches of Python and of C for norms: `sq` rows of `sk` elements, with `heads` if
    the spec has heads.

    The CPU counts as a device with four multiprocessors.
    """
    spec = loaded.spec
    rows = (case.sq, *([case.heads] if spec.heads is not None else []))
    paper.device(arch, case.multiprocessors)
    dtypes = {name: DTYPES[dtype] for name, dtype in spec.dtypes.items() if dtype in DTYPES}

    def of_rows(dtype: torch.dtype, extra: int = 8) -> torch.Tensor:
        extra *= case.layout == "guarded"
        return torch.zeros(*rows, case.sk + extra, dtype=dtype)[..., : case.sk]

    names = [argument.name for argument in launcher._forward_op._schema.arguments]
    given: Tensors = {}
    columns = (*rows[1:], case.sk)
    for name in names:
        if name in spec.buffers:
            along = {"ROWS": case.sq, "H": case.heads, "WIDTH": case.sk}
            buffer = spec.buffers[name]
            given[name] = torch.zeros([along[n] for n in buffer.shape], dtype=DTYPES[buffer.dtype])
        elif name in ("weight", "bias"):
            given[name] = torch.zeros(columns, dtype=dtypes["weight"])
        elif name == "scale":
            given[name] = torch.zeros(1)
        elif name in ("x", "residual"):
            given[name] = of_rows(dtypes["input" if name == "x" else "residual"])
        elif name in spec.params:
            given[name] = 0.5
    given |= {"eps": 1e-3}
    plan = plan_norm(loaded)
    returned = ["out", *["scale"] * bool(spec.quantize and spec.quantize.scale == "per_row")]
    returned += [*["h"] * plan.stores_h, *plan.saves]
    want: Launches = {}
    outputs: Tensors = {}
    backward = "backward" in spec.passes
    with paper.under_python(launcher, arch, case.multiprocessors):
        inputs = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        for name, save in (("forward", False), ("saving", True)):
            paper.begin(inputs)
            results = launcher._forward_op(*[given.get(n, save) for n in names])
            outputs = dict(zip(returned, results, strict=True))
            want[name] = paper.launched
        known: Tensors = {}
        if backward:
            given["dout"] = of_rows(outputs["out"].dtype, 16)
            if "h" in outputs:
                given["dh_out"] = of_rows(outputs["h"].dtype)
            known = given | outputs
            arguments = [a.name for a in launcher._backward_op._schema.arguments]
            paper.begin({n: x for n, x in known.items() if isinstance(x, torch.Tensor)})
            gradients = launcher._backward_op(*[known.get(n) for n in arguments])
            want["backward"], rooms = paper.launched, paper.rooms()
    called = {n: v for n, v in (given | outputs).items() if hasattr(library.arguments, n)}
    if plan.backward:
        stored = (*plan.backward.elements, *plan.backward.rows, *plan.backward.columns)
        called |= dict(zip([g.name for g in stored], gradients, strict=True))
    got: Launches = {}
    saved = {n: None for n in ("mean", "rstd") if hasattr(library.arguments, n)}
    for name, pass_, more, tensors in (
        ("forward", "forward", saved, inputs),
        ("saving", "forward", {}, inputs),
        *([("backward", "backward", {}, known)] if backward else []),
    ):
        paper.begin({n: x for n, x in tensors.items() if isinstance(x, torch.Tensor)})
        assert library.call(pass_, called | more) == 0, library.error()
        got[name] = paper.launched
        if pass_ == "backward" and len(got[name]) == len(want[name]):
            assert paper.crowded(rooms, library.workspace) == []
    return want, got


def chunk_tensors(loaded: Any, case: Case) -> Tensors:
    """Return the tensors of a call of chunk_output, by their names in Python.

    The call has `batch` rows of `sq` tokens, or that many packed sequences, of which the last has
    `sk` tokens.
    """
    packed, heads = loaded.spec.varlen, loaded.spec.heads
    lengths = (*[case.sq] * (case.batch - 1), case.sk) if packed else (case.sq,)
    layout = {"bhsd": "contiguous"}.get(case.layout, case.layout)
    drawn = chunks.Case(
        name="paper",
        lengths=lengths,
        batch=1 if packed else case.batch,
        heads=heads.qk or case.heads,
        layout=layout,
        do={"guarded": "strided"}.get(layout, layout),
        indices=packed,
    )
    inputs = chunks.draw(replace(problem_of(loaded), group=heads.ratio or case.group), drawn, "cpu")
    given = inputs.tensors | {name: x.int() for name, x in inputs.keywords.items()}
    behind = {"h": (1, case.spare), "chunk_indices": (0, case.spare)}
    if loaded.spec.v_layout == "chunk_padded":
        behind["v"] = (1, case.spare * loaded.spec.chunk_size)
    for name, (axis, count) in behind.items() if case.spare else ():
        x = given[name]
        given[name] = torch.cat(
            [x, x.new_zeros(*x.shape[:axis], count, *x.shape[axis + 1 :])], axis
        )
    return {**given, "do": inputs.do, "scale": 0.3}


def chunk_launches(
    paper: Paper, library: Library, launcher: ModuleType, loaded: Any, case: Case, arch: int
) -> tuple[Launches, Launches]:
    """Return the launches of Python and of C for chunk_output: with computed and with passed chunks
    of packed sequences.
    """
    given = chunk_tensors(loaded, case)
    names = [argument.name for argument in launcher._forward_op._schema.arguments]
    want: Launches = {}
    got: Launches = {}
    paper.device(arch, case.multiprocessors)
    # C passes NULL both for an empty list of chunks and for a missing one.
    for given_too in (False, True)[: 1 + bool(given.get("chunk_indices", torch.empty(0)).numel())]:
        passed = given if given_too else given | {"chunk_indices": None}
        known = {name: x for name, x in passed.items() if isinstance(x, torch.Tensor)}
        called = {member(name, ()): x for name, x in passed.items()}
        words = ", chunks given" * given_too
        rooms = {}
        with paper.under_python(launcher, arch, case.multiprocessors):
            paper.begin(known)
            called["o"] = launcher._forward_op(*[passed[name] for name in names])
            want[f"forward{words}"], rooms["forward"] = paper.launched, paper.rooms()
            if "backward" in loaded.spec.passes:
                paper.begin(known)
                results = launcher._backward_op(passed["do"], *[passed[name] for name in names])
                called |= dict(zip(("dq", "dk", "dv", "dh"), results, strict=False))
                want[f"backward{words}"], rooms["backward"] = paper.launched, paper.rooms()
                if len(results) > 4:
                    parts, most = parts_of_dg(launcher, arch)
                    called["dg"] = torch.ones(most, *passed["g"].shape)
        called = {name: x for name, x in called.items() if hasattr(library.arguments, name)}
        for pass_, room in rooms.items():
            paper.begin(known)
            assert library.call(pass_, called) == 0, library.error()
            got[pass_ + words] = paper.launched
            assert paper.crowded(room, library.workspace) == []
        if "dg" in called:
            # No kernel runs here, so the parts of this chip keep their ones. The launcher fills the
            # rest with zeros.
            assert called["dg"][:parts].all()
            assert not called["dg"][parts:].any()
    return want, got


def parts_of_dg(launcher: ModuleType, arch: int) -> tuple[int, int]:
    """Return the number of partial gradients of a gate on a chip, and the maximum over all
    chips.
    """
    width, table = launcher.K.value, launcher._DQDK_TILES
    own = launcher._tile(table, arch)["BLOCK_K"]
    return width // own, max(width // tile["BLOCK_K"] for _, tile in table)


def differences(want: Launches, got: Launches) -> list[str]:
    """Return the differences by pass, launch and property."""
    found = []
    for pass_, launches in want.items():
        names, others = ([one["kernel"] for one in side] for side in (launches, got[pass_]))
        if names != others:
            found.append(f"{pass_}: {names} and not {others}")
            continue
        for one, other in zip(launches, got[pass_], strict=True):
            parts = one["parameters"]
            found += [
                f"{pass_} {one['kernel']} {n}: {parts[n]} and not {other['parameters'].get(n)}"
                for n in parts
                if parts[n] != other["parameters"].get(n)
            ]
            found += [
                f"{pass_} {one['kernel']} {n}"
                for n in one
                if n != "parameters" and one[n] != other[n]
            ]
    return found
