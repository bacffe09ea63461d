"""Check that kept launches of an emitted file match the calls that reuse them.

Triton specializes on the dtype and alignment of a tensor, and on numbers that are 1, multiples of
16, or above 32 bits. A file looks up its launches by the layouts of tensors, which must distinguish
all of these.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kgen.kernels.attention.schedules import CHIPS
from kgen.kernels.attention.verify import serving
from kgen.kernels.attention.verify.inputs import Inputs, call, differentiable, sized
from kgen.kernels.attention.verify.problem import Problem
from kgen.verify.families import Subject

SIZES = ((96, 96, 2, 2), (65, 97, 2, 2), (1, 1, 1, 1), (16, 16, 16, 16))
"""Queries, keys, sequences and KV heads: 1, multiples of 16, others, and different sizes with equal
strides.
"""


def launches_what_it_compiled_for(subject: Subject) -> None:
    """Check that a kernel is reused only for arguments of its specialization. No kernel runs.

    Each tensor in turn gets each layout, in calls of few sizes.
    """
    names = vars(subject.module)
    if not _kernels(names):
        return  # the file has no kernel in Triton
    drawn = [
        sized(subject.problem, "layouts", sq, sk, subject.device, batch=batch, heads_kv=heads)
        for sq, sk, batch, heads in SIZES
    ]
    chips = [
        chip
        for chip in CHIPS
        if chip.choice in names and names[chip.choice](drawn[0].q, drawn[0].k, drawn[0].v)
    ]
    portable = {chip.choice: lambda *tensors: False for chip in CHIPS}
    # A cache in FP8 E4M3 needs 8.9.
    oldest = 89 if subject.problem.kv_dtype == "fp8_e4m3" else 80
    others = [{"_arch": lambda _, n=n: n, **portable} for n in (oldest, 90)]
    # Without a replaced function, calls run the kernels for this GPU.
    for as_on in (*others, *([{}] if chips else [])):
        files = [] if as_on else [names[chip.module]() for chip in chips if chip.module in names]
        with _on_paper(subject, as_on, files):
            for inputs in drawn:
                for changed in _each_laid_out(subject.problem, inputs):
                    changed(subject)
            if "serve" in subject.problem.passes:
                _serve_laid_out(subject)


def columns(x: Tensor) -> Tensor:
    """Put elements of a row two apart."""
    return x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)


def rows(x: Tensor, more: int) -> Tensor:
    """Put `more` elements between rows."""
    return x.new_empty(*x.shape[:-1], x.shape[-1] + more)[..., :-more].copy_(x)


def shifted(x: Tensor) -> Tensor:
    """Misalign the first element."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def turned(x: Tensor) -> Tensor:
    """Reverse the order of dimensions in memory."""
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
"""Maximum number of tensors that a forward pass saves."""


def _each_laid_out(problem: Problem, inputs: Inputs) -> Iterator[Callable[[Subject], None]]:
    """Yield calls without and with gradients: unchanged, and with one tensor in one other
    layout.
    """
    yield partial(_call, inputs)
    for (name, x), way in itertools.product(inputs.tensors.items(), WAYS):
        # Offsets must be contiguous, and a scalar has no strides.
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


def _serve_laid_out(subject: Subject) -> None:
    """Call the functions for serving, unchanged and with one tensor in one other layout."""
    problem, names = subject.problem, vars(subject.module)
    group = 2 if problem.gqa == "any" else int(problem.gqa)
    for batch in serving.compiled(group):
        served = serving.drawn(problem, batch, subject.device)
        q, pages = served.inputs.q, (served.k_pages, served.v_pages)
        tensors = dict(zip(("q", "k_pages", "v_pages"), (q, *pages), strict=True))
        tensors |= {"block_table": served.block_table, "out": served.out, "lse": served.lse}
        tensors |= {"row_max": served.lse.clone()} if problem.row_max else {}
        right = {**tensors, **serving.keywords(served)}
        scales = {n: x for n, x in served.scales.items() if isinstance(x, Tensor) and x.dim() == 3}
        tensors |= scales
        changes = [{}, *({name: way(x)} for name, x in tensors.items() for way in WAYS)]
        changes += [{"seq_lens": shifted(served.seq_lens)}, {"lse": None}]
        for change in changes:
            names[f"{problem.name}_serve"](**{**right, **change})
        serving.append(names, problem, served)
        for name, way in itertools.product(("k", "v", "k_pages", "v_pages", *scales), WAYS):
            serving.append(names, problem, served, **{name: way})
        serving.append(names, problem, served, slot_mapping=shifted)


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
    """Run a call without and with gradients.

    Saved-tensor hooks return the tensor `moved` at another address.
    """
    inputs = replace(inputs, **{name: getattr(inputs, name).detach() for name in ("q", "k", "v")})
    asked: dict[str, Any] = {} if inputs.dlse is None else {"return_lse": True}
    if asked and subject.problem.row_max:
        asked["return_max"] = True
    if subject.backward:
        wanted = [*differentiable(subject.problem, inputs).values()]
        count = itertools.count()

        def unpacked(saved: tuple[int, Tensor]) -> Tensor:
            number, x = saved
            return shifted(x) if number == moved else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: (next(count), x), unpacked):
            found = call(subject.function, inputs, **asked)
            outputs = found[:2] if asked else (found,)
            cotangents = (inputs.dout, inputs.dlse)[: len(outputs)]
            torch.autograd.grad(outputs, wanted, cotangents, materialize_grads=True)
        assert next(count) <= SAVED, "more is saved than is handed over from another place"
    with torch.no_grad():
        call(subject.function, inputs, **asked)


def _kernels(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions that Triton compiles."""
    from triton.runtime.jit import KernelInterface

    return {name: x for name, x in names.items() if isinstance(x, KernelInterface)}


@contextlib.contextmanager
def _on_paper(
    subject: Subject, as_on: Mapping[str, Any], files: Sequence[ModuleType]
) -> Iterator[None]:
    """Replace compilation and launches of the file by records within the context, on the CPU as on
    a GPU.

    `as_on` has functions of the file that are replaced, to simulate another GPU. `files` are the
    modules of the kernels for this GPU.
    """
    names = vars(subject.module)
    launching: dict[str, Any] = names["_layouts"].__globals__
    wrong: list[threading.ExceptHookArgs] = []
    new: dict[str, Any] = {"_COMPILED": {}, "_AHEAD": {}}
    with contextlib.ExitStack() as stack:
        for own in [names, *map(vars, files)]:
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
    """A kernel that records its specializations."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.arg_names = name, kernel.arg_names
        # The interpreter keeps the options of the decorator.
        options = vars(kernel).get("kwargs", vars(kernel))
        self.any_number = set(options.get("do_not_specialize") or ())

    def __getitem__(self, grid: Any) -> Callable[..., _Compiled]:
        return lambda *args, **meta: self.warmup(*args, grid=grid, **meta)

    def warmup(self, *args: Any, grid: Any, **meta: Any) -> _Compiled:
        return _Compiled(self, {**dict(zip(self.arg_names, args, strict=False)), **meta}, {*meta})


class _Compiled:
    """Specialization of each argument. A launch with another one raises `AssertionError`."""

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
                f"{self.kernel.name} was compiled for {self.kinds[name]} of {name}, and is "
                f"launched with {kind}"
            )
