"""The CUDA target of attention: the delta of its backward pass. The target has no other pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.plan.delta import DeltaPlan, plan_delta
from kgen.spec.load import Loaded
from kgen.targets import Source
from kgen.targets.arguments import (
    NO_BACKWARD,
    Derivatives,
    cast_lines,
    dense,
    derivatives_of,
)
from kgen.targets.cuda.elements import ELEMENTS, Elements, used
from kgen.targets.cuda.loader import Loader
from kgen.targets.launching import ImportsLaunch
from kgen.targets.template import Template
from kgen.targets.triton.text import TORCH_DTYPES

TENSORS = ("out", "dout", "dlse")


@dataclass(frozen=True)
class Kernel(Template):
    """`cuda.cu`: the kernel."""

    template: ClassVar[str] = "attention/cuda/delta.cu.j2"

    name: str
    summary: str
    width: int
    """Elements of a row."""
    dtype: str
    element: str
    """The C++ type of an element."""
    elements: Elements
    plan: DeltaPlan


@dataclass(frozen=True)
class CLauncher(Template):
    """`cuda_launch.cu`: the function that launches the kernel from C and C++."""

    template: ClassVar[str] = "attention/cuda/delta_launch.cu.j2"

    name: str
    summary: str
    element: str
    plan: DeltaPlan


@dataclass(frozen=True)
class Module(ImportsLaunch):
    """`cuda.py`: the PyTorch operator."""

    template: ClassVar[str] = "attention/cuda/delta.py.j2"

    spec: str
    """The name of the spec and of its folder."""
    name: str
    summary: str
    width: int
    dtype: str
    torch_dtype: str
    plan: DeltaPlan
    divisible: str
    """Prefix of the condition for vector loads. `False and ` if they are impossible."""
    casts: list[str]
    dense_check: str
    derivatives: Derivatives
    loader: Loader

    def launch_functions(self) -> Iterable[str]:
        names = ("_cast", "_dense", "_dtype", "_library", "_operator")
        return (*names, *self.derivatives.launch_functions())


def sources(loaded: Loaded) -> list[Source]:
    """Return `cuda.cu` (the kernel), `cuda_launch.cu` (its launcher in C) and `cuda.py` (the
    PyTorch operator).
    """
    spec, plan = loaded.spec, plan_delta(loaded.spec)
    name, summary = f"{spec.name}_delta", f"The delta of the backward pass of `{spec.name}`."
    dtypes = {"out": spec.dtype, "dout": spec.dtype, "dlse": "fp32"}
    kernel = Kernel(
        name=name,
        summary=summary,
        width=spec.head_dim.v,
        dtype=spec.dtype,
        element=ELEMENTS[spec.dtype],
        elements=used({spec.dtype}, loaded_once=True),
        plan=plan,
    )
    launcher = CLauncher(name, summary, ELEMENTS[spec.dtype], plan)
    module = Module(
        spec=spec.name,
        name=name,
        summary=summary,
        width=spec.head_dim.v,
        dtype=spec.dtype,
        torch_dtype=TORCH_DTYPES[spec.dtype],
        plan=plan,
        divisible="" if spec.head_dim.v % plan.vector == 0 else "False and ",
        casts=cast_lines({n: f"torch.{TORCH_DTYPES[d]}" for n, d in dtypes.items()}),
        dense_check=dense(name, TENSORS),
        derivatives=derivatives_of(TENSORS, dict.fromkeys(TENSORS, NO_BACKWARD), derived=False),
        loader=Loader(name, 8, 0),
    )
    return [
        Source("cuda.cu", kernel, comment="//"),
        Source("cuda_launch.cu", launcher, comment="//"),
        Source("cuda.py", module, launches=True),
    ]
