"""Triton's interpreter, made to work with the NumPy that is installed, and to do nothing twice."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

ENVIRONMENT: Mapping[str, str] = {
    "TRITON_INTERPRET": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Of a process with the interpreter. What it multiplies, and what references do of small cases, is so little that
threads would only wait for each other, which takes a hundred times as long where the cores have other work."""


def mend() -> None:
    """Let run-time integers bound loops in the interpreter under NumPy 2.4 and later.

    The interpreter keeps scalars as arrays of one element and calls `int` on them, which NumPy 2.4 refuses.
    Harmless where that is not so. Casts from float32 to bfloat16 round to the nearest, as those of a GPU do: the
    interpreter's own truncate. Call it before the first kernel runs.
    """
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "kgen_mended", False):
        return

    def patch(tensor: Any, *args: Any) -> None:
        original(tensor, *args)
        # Past the scope that restores attributes: it restores this one's predecessor, as it should.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch.kgen_mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = _rounding(interpreter._convert_float)
    _calculate_with_constants()
    _splat_truth_values(interpreter)
    _keep_layouts()
    _widen(interpreter)
    _quicken(interpreter)


class _Wide(int):
    """A launch argument that the kernel takes as int64."""


def _widen(interpreter: Any) -> None:
    """Give a parameter that is annotated as `tl.int64` 64 bits, as a GPU does.

    The interpreter gives every number below 2**31 32 bits, so that products with strides overflow. It also holds a
    number between 2**31 and 2**32 as unsigned, though its type is int64.
    """
    import numpy
    import triton.language as tl

    convert, executor = interpreter._implicit_cvt, interpreter.GridExecutor
    copied, names = executor._init_args_hst, cache(_wide_parameters)

    def converted(arg: Any) -> Any:
        if isinstance(arg, _Wide) or (type(arg) is int and 2**31 <= arg < 2**32):
            return tl.tensor(interpreter.TensorHandle(numpy.array([arg], numpy.int64), tl.int64), tl.int64)
        return convert(arg)

    def marked(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, keywords = copied(self, args_dev, kwargs)
        wide = names(self.fn)
        args = [_Wide(x) if name in wide and type(x) is int else x for name, x in zip(self.arg_names, args)]  # noqa: B905
        return args, {k: _Wide(x) if k in wide and type(x) is int else x for k, x in keywords.items()}

    interpreter._implicit_cvt = converted
    executor._init_args_hst = marked


def _wide_parameters(kernel: Any) -> frozenset[str]:
    """The parameters of a kernel that are annotated as `tl.int64`, by a type or by its name."""
    annotations = kernel.__annotations__.items()
    return frozenset(name for name, of in annotations if str(of).removeprefix("tl.") in ("int64", "i64"))


def _keep_layouts() -> None:
    """Let `x.float()` have the strides of x, with NaN between its elements.

    Launchers let float32 stand in for bfloat16, which the interpreter cannot multiply. PyTorch would make that dense,
    and kernels would never meet the layouts that verification draws.
    """
    import torch

    dense = torch.Tensor.float

    def kept(self: Any, *args: Any, **options: Any) -> Any:
        learned = self.requires_grad and torch.is_grad_enabled()
        plain = type(self) is torch.Tensor and self.device.type == "cpu" and not (args or options or learned)
        if (
            not plain
            or self.dtype != torch.bfloat16
            or self.is_contiguous()
            or 0 in (*self.shape, *self.stride())
        ):
            return dense(self, *args, **options)
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride(), strict=True))
        return torch.full((extent,), torch.nan).as_strided(self.shape, self.stride()).copy_(self)

    torch.Tensor.float = kept


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
)


_REFLECTED = ("mod", "and_", "or_", "xor", "lshift", "rshift")


def _calculate_with_constants() -> None:
    """Let compile-time constants stand left of an operator, as they may where kernels are compiled: with a tensor they
    would make a constant of it. And let them stand right of a number."""
    import triton.language as tl

    constexpr, tensor = tl.core.constexpr, tl.core.tensor

    def beside(ours: Any, theirs: Any) -> Any:
        def calculated(self: Any, other: Any) -> Any:
            return theirs(self.value, other) if isinstance(other, tensor) else ours(self, other)

        return calculated

    for name in _OPERATORS:
        own = f"__{name}__"
        setattr(constexpr, own, beside(getattr(constexpr, own), getattr(operator, own)))
    for name in _REFLECTED:
        of = getattr(operator, name)
        setattr(
            constexpr, f"__r{name.strip('_')}__", lambda self, other, of=of: constexpr(of(other, self.value))
        )


def _splat_truth_values(interpreter: Any) -> None:
    """Let a comparison of two numbers be a truth value of each element of a tile. The interpreter has it in the type of
    what was compared."""
    builder = interpreter.InterpreterBuilder
    splat = builder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        return splat(self, ret_ty, interpreter.TensorHandle(arg.data, ret_ty.scalar))

    builder.create_splat = create_splat


def _rounding(convert: Any) -> Any:
    """The interpreter's conversion of floats, with float32 to bfloat16 rounded to nearest, ties to even."""
    import numpy

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if not (source.is_fp32() and target.is_bf16()):
            return convert(data, source, target, mode)
        bits = numpy.ascontiguousarray(data, dtype=numpy.float32).view(numpy.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return numpy.where(numpy.isnan(data), (bits >> 16) | 0x40, nearest).astype(numpy.uint16)

    return rounded


def _quicken(interpreter: Any) -> None:
    """Spare the interpreter most of its time: it works out again and again what it knows.

    Sums and products of integers are made a second time in 64 bits, for an assertion that is left out unless kernels
    are debugged. The functions of the language are replaced for a launch, and again for each call of a helper in it.
    Types, and what a tensor has of its type, are always the same.
    """
    import triton.language as tl

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang, tl)

    numpys: dict[str, Any] = {}
    original = interpreter._get_np_dtype

    def numpy_type(type_: Any) -> Any:
        if type_.name not in numpys:
            numpys[type_.name] = original(type_)
        return numpys[type_.name]

    interpreter._get_np_dtype = numpy_type
    core = tl.core
    core.block_type.__init__ = _remembering_shapes(core.block_type.__init__, core.constexpr)
    core.tensor.__init__ = _remembering_types(core.tensor.__init__)


def _once_a_launch(patch: Any, tl: Any) -> Any:
    """`patch(function)`, which has an object that restores what was replaced, where there is something to replace."""
    nothing: Any = None

    def patched(function: Any) -> Any:
        nonlocal nothing
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        # Those of tensors are restored after each launch.
        theirs = [tl.core.tensor.__add__, *(language.load for language in languages)]
        if languages and not any(map(tl.core.is_builtin, theirs)):
            return nothing
        made = patch(function)
        nothing = type(made)()
        return made

    return patched


def _remembering_shapes(init: Any, constexpr: Any) -> Any:
    """`block_type.__init__`, which makes the same of the same shape."""
    known: dict[Any, dict[str, Any]] = {}

    def remembering(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(x.value if isinstance(x, constexpr) else x for x in shape))
        if key in known:
            vars(self).update(known[key], element_ty=element_ty)
        else:
            init(self, element_ty, shape)
            known[key] = dict(vars(self))

    return remembering


def _remembering_types(init: Any) -> Any:
    """`tensor.__init__`, which makes the same of the same type."""
    known: dict[str, dict[str, Any]] = {}

    def remembering(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)
        else:
            init(self, handle, type)
            known[type.name] = dict(vars(self), handle=None)

    return remembering
