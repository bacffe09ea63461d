"""What Triton compiled for one launch, an emitted file keeps for later ones: are they what it was compiled for?

Triton compiles for the dtype of a tensor and whether it is aligned, and of a number for whether it is 1, a multiple of
16, or past 32 bits. A file looks up what it launches by layouts of tensors, which have to tell all of these apart.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kgen.kernels.attention.schedules import CHIP
from kgen.kernels.attention.verify.inputs import Inputs, call, differentiable, sized
from kgen.kernels.attention.verify.problem import Problem
from kgen.verify.families import Subject

SIZES = ((96, 96, 2, 2), (65, 97, 2, 2), (1, 1, 1, 1), (16, 16, 16, 16))
"""Of queries, keys, sequences and heads of keys: 1, multiples of 16 and neither, and some beside the same strides."""


def launches_what_it_compiled_for(subject: Subject) -> None:
    """Launches that an emitted file takes for alike are of what one kernel was compiled for. No kernel runs.

    One tensor after the other is laid out in each way, in calls of few sizes.
    """
    names = vars(subject.module)
    if not _kernels(names):
        return  # the file has nothing for Triton to compile
    drawn = [
        sized(subject.problem, "layouts", sq, sk, subject.device, batch=batch, heads_kv=heads)
        for sq, sk, batch, heads in SIZES
    ]
    serves = names.get(CHIP.choice) if CHIP is not None else None
    served = serves is not None and serves(drawn[0].q, drawn[0].k, drawn[0].v)
    portable = {CHIP.choice: lambda *tensors: False} if CHIP is not None else {}
    chips = [{"_arch": lambda device: 80, **portable}, {"_arch": lambda device: 90, **portable}]
    for as_on in (*chips, *([{}] if served else [])):
        with _on_paper(subject, as_on):
            for inputs in drawn:
                for changed in _each_laid_out(subject.problem, inputs):
                    changed(subject)


def columns(x: Tensor) -> Tensor:
    """Elements of a row lie two apart."""
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)


def rows(x: Tensor, more: int) -> Tensor:
    """Rows are so many elements apart."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + more)[..., :-more].copy_(x)


def shifted(x: Tensor) -> Tensor:
    """The first element is not aligned."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def turned(x: Tensor) -> Tensor:
    """Dimensions lie in memory the other way around."""
    around = range(x.dim())[::-1]
    return x.permute(*around).contiguous().permute(*around)


WAYS: tuple[Callable[[Tensor], Tensor], ...] = (
    columns,
    partial(rows, more=1),
    partial(rows, more=8),
    turned,
    shifted,
)
SAVED = 16
"""Tensors that a forward pass saves, at most."""


def _each_laid_out(problem: Problem, inputs: Inputs) -> Iterator[Callable[[Subject], None]]:
    """Calls as they are, without and with gradients; and with one tensor laid out in one way."""
    yield partial(_call, inputs)
    for (name, x), way in itertools.product(inputs.tensors.items(), WAYS):
        # Offsets have to be next to each other, and one number has no strides.
        if way is shifted or (x.dim() and not name.startswith("cu_seqlens_")):
            yield partial(_call, _with(inputs, name, way(x)))
    if "backward" in problem.passes:
        rows_of_lse = inputs.dout.shape[:-1][:: -1 if problem.varlen else 1]
        dlse = torch.zeros(rows_of_lse, device=inputs.dout.device)
        yield partial(_call, replace(inputs, dlse=dlse))
        for way in WAYS:
            yield partial(_call, replace(inputs, dlse=way(dlse)))
        for number in range(SAVED):
            yield partial(_call, inputs, moved=number)


def _with(inputs: Inputs, name: str, x: Tensor) -> Inputs:
    if name.startswith("cu_seqlens_"):
        queries, keys = inputs.cu_seqlens
        return replace(inputs, cu_seqlens=(x, keys) if name.endswith("q") else (queries, x))
    if name in inputs.buffers:
        return replace(inputs, buffers={**inputs.buffers, name: x})
    if name in inputs.cache:
        return replace(inputs, cache={**inputs.cache, name: x})
    return replace(inputs, **{name: x})


def _call(inputs: Inputs, subject: Subject, moved: int | None = None) -> None:
    """A call with gradients, and one without: hooks may hand what was saved over from another place, here one of it."""
    inputs = replace(inputs, **{name: getattr(inputs, name).detach() for name in ("q", "k", "v")})
    asked: Mapping[str, Any] = {} if inputs.dlse is None else {"return_lse": True}
    if subject.backward:
        wanted = [*differentiable(subject.problem, inputs).values()]
        count = itertools.count()

        def unpacked(saved: tuple[int, Tensor]) -> Tensor:
            number, x = saved
            return shifted(x) if number == moved else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: (next(count), x), unpacked):
            found = call(subject.function, inputs, **asked)
            outputs = found if asked else (found,)
            cotangents = (inputs.dout, inputs.dlse)[: len(outputs)]
            torch.autograd.grad(outputs, wanted, cotangents, materialize_grads=True)
        assert next(count) <= SAVED, "more is saved than is handed over from another place"
    with torch.no_grad():
        call(subject.function, inputs, **asked)


def _kernels(names: Mapping[str, Any]) -> dict[str, Any]:
    """What is for Triton to compile."""
    from triton.runtime.jit import KernelInterface

    return {name: x for name, x in names.items() if isinstance(x, KernelInterface)}


@contextlib.contextmanager
def _on_paper(subject: Subject, as_on: Mapping[str, Any]) -> Iterator[None]:
    """The file of the subject meanwhile compiles and launches on paper, on the CPU as on a GPU, with some functions
    replaced by those of another chip."""
    names = vars(subject.module)
    launching: dict[str, Any] = names["_layouts"].__globals__
    wrong: list[threading.ExceptHookArgs] = []
    new: dict[str, Any] = {"_COMPILED": {}, "_AHEAD": {}}
    beside = names[CHIP.module]() if CHIP is not None and not as_on and CHIP.module in names else None
    with contextlib.ExitStack() as stack:
        for own in [names, *([vars(beside)] if beside else [])]:
            kernels = {name: _Kernel(name, kernel) for name, kernel in _kernels(own).items()}
            stack.enter_context(mock.patch.dict(own, kernels))
        stack.enter_context(mock.patch.dict(launching, new))
        stack.enter_context(mock.patch.dict(names, {"_COMPILED": new["_COMPILED"], **as_on}))
        stack.enter_context(mock.patch.object(threading, "excepthook", wrong.append))
        if subject.device == "cpu":
            stack.enter_context(mock.patch.object(Tensor, "is_cuda", True))
            stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
            stack.enter_context(mock.patch("torch.cuda.device", contextlib.nullcontext))
        yield
    assert not wrong, (
        f"a thread that compiles ahead ends in {wrong[0].exc_type.__name__}: {wrong[0].exc_value}"
    )
    ahead = {kernel.name for kernel, *_ in new["_AHEAD"]}
    assert not ahead, f"{', '.join(sorted(ahead))}: compiled ahead for what is not launched"


class _Kernel:
    """A kernel that is compiled on paper."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.arg_names = name, kernel.arg_names
        # The interpreter keeps what it was decorated with.
        options = vars(kernel).get("kwargs", vars(kernel))
        self.any_number = set(options.get("do_not_specialize") or ())

    def __getitem__(self, grid: Any) -> Callable[..., _Compiled]:
        return lambda *args, **meta: self.warmup(*args, grid=grid, **meta)

    def warmup(self, *args: Any, grid: Any, **meta: Any) -> _Compiled:
        return _Compiled(self, {**dict(zip(self.arg_names, args, strict=False)), **meta}, {*meta})


class _Compiled:
    """What it was compiled for, of each argument. Raises `AssertionError` when it is launched with something else."""

    def __init__(self, kernel: _Kernel, given: Mapping[str, Any], constants: set[str]) -> None:
        self.kernel, self.constants = kernel, constants
        self.kinds = {name: self._kind(name, given[name]) for name in kernel.arg_names}

    def _kind(self, name: str, x: Any) -> Any:
        if name in self.constants or x is None or isinstance(x, bool):
            return x
        if isinstance(x, int):
            fits = -(2**31) <= x < 2**31
            return fits if name in self.kernel.any_number else (x == 1, x % 16 == 0, fits)
        if isinstance(x, float):
            return float
        if isinstance(x, Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        return type(x), x.base.dtype, [*x.block_shape]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launched

    def _launched(self, *args: Any) -> None:
        for name, x in zip(self.kernel.arg_names, args, strict=True):
            kind = self._kind(name, x)
            assert kind == self.kinds[name], (
                f"{self.kernel.name} was compiled for {self.kinds[name]} of {name}, and is launched with {kind}"
            )
