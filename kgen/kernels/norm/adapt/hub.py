"""Adapter for Hugging Face's kernel hub: a repository for `kernel-builder`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kgen.expr.nodes import Type
from kgen.flex.flexcode import printed_over
from kgen.kernels.norm.plan.planning import Operand, plan_norm
from kgen.kernels.norm.spec import NormSpec
from kgen.kernels.norm.targets.arguments import norm_signature
from kgen.render.adapters import Adapter
from kgen.render.hub import Layer, Parts, Repository, repository, repository_of
from kgen.spec.load import Loaded
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

WIDTH, HEADS = 256, 4
"""The sizes in the generated tests, if the spec does not state them."""


@dataclass(frozen=True)
class Given:
    """An argument of a test and the Python code that creates it."""

    name: str
    made: str


@dataclass(frozen=True)
class TestFile(Template):
    """Values for `tests/test_<name>.py`, which tests the first variant."""

    template: ClassVar[str] = "norm/adapters/hub_test.py.j2"

    name: str
    repository: str
    dtype: str
    width: int
    heads: int | None
    tensors: list[Given]
    numbers: list[Given]
    """Run-time parameters, which are numbers."""
    constants: list[Given]
    """Compile-time parameters."""
    row_tensors: list[str]
    """Tensors without the last dimension of x."""
    positional: str
    """Python code of a list of the positional arguments."""
    learned: str
    """Python code of a list of the tensors with gradients."""
    gradients: bool
    h: str
    """Python code of the value to normalize."""
    centred: str
    """Python code of the rows without their mean."""
    y: str
    out: str
    eps: str
    outputs: str
    """Python code of a tuple of the outputs in the reference."""
    scale: str | None
    """Python code of the scale of quantized outputs; None if they are not quantized."""


@dataclass(frozen=True)
class BenchmarkFile(Template):
    """Values for `benchmarks/benchmark.py`."""

    template: ClassVar[str] = "norm/adapters/hub_benchmark.py.j2"

    name: str
    repository: str
    width: int
    heads: int | None
    given: list[Given]
    call: str


def adapter(variants: Sequence[Loaded]) -> Adapter:
    """Return `<name>_hub`: the package below `torch-ext`, which kgen updates, and initial files of
    a repository.
    """
    made = repository_of(variants)
    loaded = made.variants[0]
    return repository(made, Parts(_layer(made, loaded), _test(made, loaded), _timed(made, loaded)))


def _layer(made: Repository, loaded: Loaded) -> Layer:
    """Return a layer that reads weights from the module whose `forward` it replaces."""
    signature = norm_signature(plan := plan_norm(loaded))
    own = {o.name for o in plan.operands if o.along == "column"}
    given = [n for n in (*signature.tensors, *signature.required) if n not in own]
    tensors = [n for n in given if any(o.name == n for o in plan.operands)]
    numbers = [n for n in given if n not in tensors]
    values = {n: f"self.{n}" for n in own} | {"eps": f"_eps(self, {loaded.spec.eps!r})"}
    reads = " and ".join([f"`{n}`" for n in _names(loaded) if n in own] + ["the epsilon"])
    return Layer(
        name=made.name,
        layer=made.layer,
        words=f"It reads {reads} of the module whose `forward` it replaces.",
        signature=", ".join([*tensors, *(["*", *numbers] if numbers else [])]),
        arguments=[
            *(values.get(n, n) for n in signature.tensors),
            *(f"{n}={values.get(n, n)}" for n in (*signature.required, "eps")),
        ],
        gradients=made.gradients,
        eps=True,
    )


def _test(made: Repository, loaded: Loaded) -> TestFile:
    spec: NormSpec = loaded.spec
    plan = plan_norm(loaded)
    names = {o.name for o in plan.operands} | {"y", "x"}
    trees = {field: printed_over(tree, names) for field, tree in loaded.trees.items()}
    weight = " * (weight + 1)" if spec.weight_offset else " * weight"
    learned = [o.name for o in plan.operands if o.grad]
    return TestFile(
        name=made.name,
        repository=made.repository,
        dtype=f"torch.{TORCH_DTYPES[spec.dtypes['input']]}",
        width=_width(spec),
        heads=_heads(spec),
        tensors=_tensors(loaded),
        numbers=_numbers(spec),
        constants=[Given(n, repr(p.value)) for n, p in spec.params.items() if p.value is not None],
        row_tensors=[o.name for o in plan.operands if o.along == "row"],
        positional=json.dumps(norm_signature(plan).tensors),
        learned=json.dumps(learned),
        gradients=made.gradients,
        h=trees.get("input_mod", "x + residual" if spec.residual else "x"),
        centred="h - h.mean(-1, keepdim=True)" if spec.norm == "layer" else "h",
        y=f"x_hat{weight * spec.weight}{' + bias' * spec.bias}",
        out=trees.get("output_mod", "y"),
        eps=repr(spec.eps),
        outputs="(out, h)" if spec.residual == "in_out" else "(out,)",
        scale=_scale(spec),
    )


def _timed(made: Repository, loaded: Loaded) -> BenchmarkFile:
    positional = norm_signature(plan_norm(loaded)).tensors
    given = [f'self.given["{n}"]' for n in positional]
    given += [f'{n}=self.given["{n}"]' for n in _names(loaded) if n not in positional]
    return BenchmarkFile(
        name=made.name,
        repository=made.repository,
        width=_width(loaded.spec, 4096),
        heads=_heads(loaded.spec),
        given=[*_tensors(loaded), *_numbers(loaded.spec)],
        call=", ".join(given),
    )


def _names(loaded: Loaded) -> list[str]:
    signature = norm_signature(plan_norm(loaded))
    return [*signature.tensors, *signature.required]


def _tensors(loaded: Loaded) -> list[Given]:
    """Return the tensors of a call, with Python code that creates them."""
    given = [Given(o.name, _tensor(o)) for o in plan_norm(loaded).operands]
    if loaded.spec.quantize and loaded.spec.quantize.scale == "per_tensor":
        given.append(Given("scale", "torch.full((), 0.1, device=DEVICE)"))
    return given


def _tensor(operand: Operand) -> str:
    sizes = {"element": "SHAPE", "row": "SHAPE[:-1]", "column": "COLUMNS"}[operand.along]
    if operand.dtype == "bool":
        return f"torch.rand({sizes}, device=DEVICE) < 0.6"
    dtype = f"torch.{TORCH_DTYPES[operand.dtype]}"
    if operand.type is Type.INT:
        return f"torch.randint(0, 9, {sizes}, device=DEVICE).to({dtype})"
    return f"torch.randn({sizes}, device=DEVICE).to({dtype})"


def _numbers(spec: NormSpec) -> list[Given]:
    runtime = ((n, p) for n, p in spec.params.items() if p.runtime)
    return [Given(n, "2" if p.type == "int" else "0.5") for n, p in runtime]


def _width(spec: NormSpec, default: int = WIDTH) -> int:
    if spec.width == "any":
        return default
    return spec.width if isinstance(spec.width, int) else spec.width[0]


def _heads(spec: NormSpec) -> int | None:
    return HEADS if spec.heads == "any" else spec.heads


def _scale(spec: NormSpec) -> str | None:
    if spec.quantize is None:
        return None
    return "results[1]" if spec.quantize.scale == "per_row" else 'tensors["scale"]'
