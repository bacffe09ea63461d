"""The launches of an emitted file, and each launched kernel after its run on lanes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import z3

from kgen.kernels.linear_attention.plan.planning import LinearAttentionPlan
from kgen.kernels.linear_attention.schedules import CHOICES
from kgen.kernels.linear_attention.spec import LinearAttentionSpec
from kgen.prove.lanes import Num, Pointer, Stride, Tensor
from kgen.prove.launching import (
    Launch,
    LauncherWalker,
    shapes,
    stride_bounds,
)
from kgen.prove.running import KernelWalker, ceiling
from kgen.prove.walking import Env, File
from kgen.prove.world import LONGEST

MOST_HEADS = 2**15
MOST_TOKENS = 2**30
"""More rows take over 128 GiB for each of q, k, v and o."""
GRID = 2**31
"""The limit of CUDA for programs of a launch, which is exclusive."""
TRACKED = frozenset({"G"})
"""The sums of decays."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call, as terms."""

    B: Any
    T: Any
    H: Any
    HV: Any
    N: Any
    facts: tuple[Any, ...]

    @staticmethod
    def of(spec: LinearAttentionSpec) -> Sizes:
        """Return the sizes of a spec, with the facts about them."""
        B, T, N = z3.IntVal(1) if spec.varlen else z3.Int("B"), z3.Int("T"), z3.Int("N")
        heads = spec.heads
        H = z3.IntVal(heads.qk) if heads.qk else z3.Int("H")
        group = z3.Int("group")
        if heads.group:
            group = z3.IntVal(heads.group)
        if heads.qk and heads.v:
            group = z3.IntVal(heads.v // heads.qk)
        HV = z3.simplify(H * group)
        facts = [B >= 1, B <= LONGEST, T >= 1, T <= LONGEST, N >= 1, N <= LONGEST]
        facts += [B * T <= MOST_TOKENS, B * ceiling(T, spec.chunk_size) <= B * T]
        facts += [H >= 1, group >= 1, HV <= MOST_HEADS, H <= MOST_HEADS, group <= MOST_HEADS]
        return Sizes(B, T, H, HV, N if spec.varlen else B, tuple(facts))


@dataclass(frozen=True)
class Run:
    """One kernel after its run, with the launch that it belongs to."""

    launch: Launch
    kernel: KernelWalker

    @property
    def name(self) -> str:
        """The name of the kernel, with its tile."""
        name = self.launch.kernel.removeprefix("_").removesuffix("_kernel")
        tile = [str(self.launch.tile[n]) for n in TILES if n in self.launch.tile]
        return f"{name} {'x'.join(tile)}".strip()


TILES = ("ROWS", "BLOCK_K", "BLOCK_V")


@dataclass(frozen=True)
class Calls:
    """All launches of the functions of a file, for all chips, and the sums after them."""

    file: File
    sizes: Sizes
    inputs: Mapping[str, Tensor]
    launches: tuple[Launch, ...]
    gradients: Mapping[str, Tensor]
    """The results of backward, by the input to which they belong."""
    facts: tuple[Any, ...]


def calls(
    spec: LinearAttentionSpec,
    text: str,
    buffers: Sequence[str],
    chips: Sequence[int] | None = None,
) -> Calls:
    """Run the launchers of a file for some chips, or for each chip of its tile tables."""
    file, sizes = File.of(text), Sizes.of(spec)
    inputs = _inputs(spec, file, sizes)
    launches: list[Launch] = []
    found: list[LauncherWalker] = []
    gradients: dict[str, Tensor] = {}
    for arch in _chips(file) if chips is None else chips:
        walker = LauncherWalker(file, arch=arch, facts=list(sizes.facts), declined=CHOICES)
        gradients = _run(walker, spec, inputs, buffers)
        found.append(walker)
        launches += walker.launches
    unique: dict[str, Launch] = {}
    for one in launches:
        unique.setdefault(_written(one), one)
    facts = {f.get_id(): f for walker in found for f in walker.facts}
    return Calls(
        file,
        sizes,
        inputs,
        tuple(unique.values()),
        gradients,
        tuple(facts.values()),
    )


def _written(launch: Launch) -> str:
    """Return the kernel, the number of programs and the values of all parameters, as text."""
    texts = [launch.kernel, launch.programs.sexpr()]
    for name, value in launch.arguments.items():
        match value:
            case Tensor():
                value = value.name, [str(size) for size in value.shape], value.zeros
            case Stride():
                value = value.tensor.name, value.dim, value.bits
            case Num():
                value = value.term.sexpr()
        texts.append(f"{name} = {value}")
    return "; ".join(texts)


def _chips(file: File) -> list[int]:
    """Return the chips of the tile tables, and one that they do not name."""
    walker = LauncherWalker(file)
    tables = [walker.constant(name) for name in file.constants if name.endswith("_TILES")]
    return [0, *sorted({chip for rows in tables for chips, _ in rows for chip in chips})]


def _inputs(spec: LinearAttentionSpec, file: File, sizes: Sizes) -> dict[str, Tensor]:
    """Return the tensors of a call: their shapes and strides are those that it checks."""
    functions = [*spec.called, "_backward_op"]
    known: Env = {n: Num(getattr(sizes, n)) for n in ("B", "T", "H", "HV", "N")}
    bounds: dict[str, dict[int, int]] = {}
    required = shapes(file, functions)
    if "v" in required:
        required["do"] = required["v"]
    if "initial_state" in required:
        required["dfinal_state"] = required["initial_state"]
    walker = LauncherWalker(file)
    tensors: dict[str, Tensor] = {}
    for name, shape in required.items():
        terms = [one.term if isinstance(one, Num) else one for one in walker.value(shape, known)]
        tensors[name] = Tensor(name, tuple(terms))
    for name, dim, most in stride_bounds(file, functions):
        if name in tensors:
            at = dim % len(tensors[name].shape)
            of = bounds.setdefault(name, {})
            of[at] = min(most, of.get(at, most))
    found = {name: replace(one, most=bounds.get(name, {})) for name, one in tensors.items()}
    if spec.varlen:
        found["cu_seqlens"] = Tensor("cu_seqlens", (z3.Int("offsets"),), integer=True)
    return found


def _run(
    walker: LauncherWalker,
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    buffers: Sequence[str],
) -> dict[str, Tensor]:
    """Run forward, backward and a decoding step. Return the gradients."""
    if spec.varlen:
        walker.facts.append(z3.Int("offsets") == z3.Int("N") + 1)
    gradients = forward_and_backward(walker, inputs, buffers, scale=1.0)
    decoding(walker, inputs, scale=1.0)
    return gradients


def forward_and_backward(
    walker: LauncherWalker, inputs: Mapping[str, Tensor], buffers: Sequence[str], scale: float
) -> dict[str, Tensor]:
    """Run both operators. Return the gradients by input."""
    values: Env = {**inputs, "scale": scale, "final": True, "within": True, "keep": True}
    args = {name: values[name] for name in _parameters(walker, "_forward_op")}
    saved = walker.function("_forward_op", args)
    if "_backward_op" not in walker.file.functions:
        return {}
    kept = values | dict(zip(_results(walker.file, "_forward_op"), saved, strict=True))
    args = {name: kept[name] for name in _parameters(walker, "_backward_op")}
    results = walker.function("_backward_op", args)
    return dict(zip(["q", "k", "v", *buffers, "initial_state"], results, strict=True))


def decoding(walker: LauncherWalker, inputs: Mapping[str, Tensor], scale: float) -> None:
    """Run the operator of decoding, if the file has it."""
    if "_decode_op" in walker.file.functions:
        values: Env = {**inputs, "scale": scale}
        args = {name: values[name] for name in _parameters(walker, "_decode_op")}
        walker.function("_decode_op", args)


def _parameters(walker: LauncherWalker, name: str) -> list[str]:
    return [one.arg for one in walker.file.functions[name].args.args]


def _results(file: File, function: str) -> list[str]:
    """Return the names that the last statement of a function returns."""
    last = file.functions[function].body[-1]
    assert isinstance(last, ast.Return)
    assert isinstance(last.value, ast.Tuple)
    return [one.id for one in last.value.elts if isinstance(one, ast.Name)]


def functions(plan: LinearAttentionPlan) -> frozenset[str]:
    """Return the functions of a file that compute expressions and their derivatives."""
    slopes = {f"_{field}_by_{n}" for field, of in plan.formulas.items() for n in of.slopes}
    return frozenset({*(f"_{field}" for field in plan.formulas), *slopes})


def runs(of: Calls, expressions: frozenset[str]) -> Iterator[Run]:
    """Run the kernel of each launch. `expressions`: the functions of expressions."""
    for launch in of.launches:
        kernel = KernelWalker(
            of.file,
            programs=launch.programs,
            facts=[*of.facts, launch.programs < GRID],
            tracked=TRACKED,
            not_above_zero=frozenset({"_decay"}),
            opaque=expressions,
        )
        kernel.function(
            launch.kernel,
            {
                name: Pointer(value) if isinstance(value, Tensor) else value
                for name, value in launch.arguments.items()
            },
        )
        yield Run(launch, kernel)
