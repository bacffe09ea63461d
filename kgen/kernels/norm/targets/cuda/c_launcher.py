"""`cuda_launch.cu` of a norm: functions that launch the kernels from C and C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.norm.targets.cuda.backward import OF_ALL, OF_HEADS, Backward, ColumnLaunch, Grid
from kgen.kernels.norm.targets.cuda.forward import Forward
from kgen.kernels.norm.targets.cuda.parts import Launch
from kgen.kernels.norm.targets.cuda.spelled import Spelled
from kgen.targets import opening
from kgen.targets.code import CUDA
from kgen.targets.template import Template


@dataclass(frozen=True)
class LaunchBackward(Template):
    """The function that launches the backward pass."""

    template: ClassVar[str] = "norm/cuda/_launch_backward.j2"
    language: ClassVar[str] = CUDA

    name: str
    launch: Launch
    grid: Grid
    columns: ColumnLaunch | None


@dataclass(frozen=True)
class CLauncher(Template):
    """`cuda_launch.cu`: the tables of shapes, and the functions that launch kernels."""

    template: ClassVar[str] = "norm/cuda/launch.cu.j2"
    language: ClassVar[str] = CUDA

    name: str
    summary: str
    least_capability: int
    vector: int
    clusters: bool
    multiple: tuple[str, ...]
    """The parameter `multiple`, if the rows of a thread are a multiple of it apart."""
    multiple_passed: tuple[str, ...]
    """The argument for `multiple`."""
    launches: tuple[Launch, ...]
    forward: Launch
    null_words: str | None
    backward: LaunchBackward | None


def c_launcher_of(
    spelled: Spelled, least_capability: int, forward: Forward, backward: Backward | None
) -> CLauncher:
    """Return the file of a plan."""
    name = spelled.spec.name
    words = "Only backward needs the statistics: forward accepts null."
    called = None
    if backward is not None:
        grid = OF_HEADS if spelled.spec.heads else OF_ALL
        called = LaunchBackward(name, backward.launch, grid, backward.column_launch)
    return CLauncher(
        name=name,
        summary=opening(spelled.spec, in_comment=True),
        least_capability=least_capability,
        vector=spelled.vector,
        clusters=spelled.clusters,
        multiple=("long long multiple",) if spelled.multiples else (),
        multiple_passed=("multiple",) if spelled.multiples else (),
        launches=(forward.launch, backward.launch) if backward else (forward.launch,),
        forward=forward.launch,
        null_words=words if spelled.plan.saves else None,
        backward=called,
    )
