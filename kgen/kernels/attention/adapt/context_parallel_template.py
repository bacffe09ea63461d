"""Values for the template of a context-parallel package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kgen.kernels.attention.adapt.shared import Head
from kgen.kernels.attention.targets.triton.exact import Exact
from kgen.targets.arguments import Derivatives, Numbers
from kgen.targets.template import Template

_MODULE = """
Optional Tensor bool cache first_at_least float import_module int itertools math numbers str torch
tuple where
"""
IN_MODULE = frozenset(_MODULE.split())
"""Names of the module that the function of a spec cannot have. Other names begin with `_`."""
_FUNCTIONS = """
SK SQ b back batch call ctx cu_seqlens_k cu_seqlens_q dk dlse dout dq dsinks dv first_at_least group
h heads inputs int k kv_heads kv_last kv_length kv_start learned length lse math max min out output
plan q q_last q_start ranks reduce_gradients return_lse scale sharding sinks torch v where
"""
IN_FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Names in functions that have the buffers and parameters of a spec as variables. Other names begin
with `_`.
"""


@dataclass(frozen=True)
class Usage:
    """The arguments in the example of the docstring."""

    length: str
    plan: list[str]
    call: list[str]


@dataclass(frozen=True)
class Intervals:
    """A function of the package that returns intervals of positions in the whole sequence."""

    params: list[str]
    ranges: list[tuple[str, str]]
    """Python code of the first position and the end of each interval."""


@dataclass(frozen=True)
class Kernels:
    """Python code of the arguments of the runtime's `Kernels`."""

    views: str
    tensors: str
    numbers: str
    places: str
    learned: str
    packed: bool
    listed: bool
    reads: str
    sinks: bool


@dataclass(frozen=True)
class Package(Template):
    """Values for `__init__.py`: the function over ranks and the function that makes its plans."""

    template: ClassVar[str] = "attention/adapters/context_parallel.j2"

    name: str
    package: str
    summary: str
    axis: int
    """The dimension of positions."""
    head: Head
    usage: Usage
    constants: list[str]
    """Parameters that intervals read."""
    planning_names: list[str]
    """The functions of `planning.py` that intervals call."""
    keys: Intervals
    queries: Intervals | None
    modules: list[tuple[str, str]]
    """Python code of dtype and head_dim, and the module with their kernels."""
    kernels: Kernels
    operands: list[str]
    """Tensor arguments of the operators after q, k and v."""
    runtime: list[str]
    """The run-time parameters."""
    runtime_params: list[str]
    """The same with their types."""
    reduce: list[str]
    """The argument that controls summing of gradients over ranks, if buffers or sinks have
    gradients.
    """
    given: str
    """Python code of a dictionary with all arguments of a call."""
    alike: list[str]
    """The arguments that the runtime splits."""
    sinks: str
    """Python code of the attention sinks, or None."""
    lse_shape: str
    lse_words: str
    exact: Exact
    derivatives: Derivatives
    learned: list[str]
    """Tensors with gradients after q, k and v."""
    gradient_returns: list[str]
    """A gradient or None for each operand after q, k and v."""
    packed_operands: list[str]
    keywords: list[str]
    tensors_words: str
    argument_words: list[str]
    dense_check: str
    casts: list[str]
    several_dtypes: bool
    numbers: Numbers
    plan_params: list[str]
    plan_words: list[str]
    plan_lengths: str
    """The lengths of queries and keys."""
    plan_given: str
    """Python code of a dictionary with the tensors and numbers that masks read."""
    plan_sizes: list[str]
    """The sizes that masks read."""
