"""Patches of Triton's interpreter: for current NumPy versions, for exact semantics, and for
speed.
"""

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
"""Environment of a process with the interpreter.

Products are so small that threads would only wait for each other: 100 times slower on busy cores.
"""


def mend() -> None:
    """Patch the interpreter. Call this before the first kernel runs.

    The interpreter calls `int` on arrays of one element, which NumPy 2.4 refuses, so such arrays
    get `__index__`. Casts from float32 to bfloat16 round to nearest, as on a GPU; the interpreter
    truncates.
    """
    import triton.runtime.interpreter as interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "kgen_mended", False):
        return

    def patch(tensor: Any, *args: Any) -> None:
        original(tensor, *args)
        # Set outside of the scope that restores attributes, which restores the previous value.
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
    """A launch argument that the kernel declares as int64."""


def _widen(interpreter: Any) -> None:
    """Pass parameters that are annotated as `tl.int64` with 64 bits, as on a GPU.

    The interpreter passes numbers below 2**31 with 32 bits, so products with strides overflow. It
    also stores numbers between 2**31 and 2**32 as unsigned, although their type is int64.
    """
    import numpy
    import triton.language as tl

    convert, executor = interpreter._implicit_cvt, interpreter.GridExecutor
    copied, names = executor._init_args_hst, cache(_wide_parameters)

    def converted(arg: Any) -> Any:
        if isinstance(arg, _Wide) or (type(arg) is int and 2**31 <= arg < 2**32):
            return tl.tensor(
                interpreter.TensorHandle(numpy.array([arg], numpy.int64), tl.int64), tl.int64
            )
        return convert(arg)

    def marked(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, keywords = copied(self, args_dev, kwargs)
        wide = names(self.fn)
        args = [
            _Wide(x) if name in wide and type(x) is int else x
            for name, x in zip(self.arg_names, args)  # noqa: B905
        ]
        return args, {
            k: _Wide(x) if k in wide and type(x) is int else x for k, x in keywords.items()
        }

    interpreter._implicit_cvt = converted
    executor._init_args_hst = marked


def _wide_parameters(kernel: Any) -> frozenset[str]:
    """Return the parameters of a kernel that are annotated as `tl.int64`, by type or by name."""
    annotations = kernel.__annotations__.items()
    return frozenset(
        name for name, of in annotations if str(of).removeprefix("tl.") in ("int64", "i64")
    )


def _keep_layouts() -> None:
    """Make `x.float()` keep the strides of x, with NaN between its elements.

    Launchers convert bfloat16 to float32, because the interpreter cannot multiply bfloat16. PyTorch
    would return a dense tensor, and kernels would not run on the layouts of the cases.
    """
    import torch

    dense = torch.Tensor.float

    def kept(self: Any, *args: Any, **options: Any) -> Any:
        learned = self.requires_grad and torch.is_grad_enabled()
        plain = (
            type(self) is torch.Tensor
            and self.device.type == "cpu"
            and not (args or options or learned)
        )
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
    """Allow compile-time constants on both sides of an operator, as the compiler does.

    In the interpreter, a constant to the left of a tensor makes a constant of the result.
    """
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
            constexpr,
            f"__r{name.strip('_')}__",
            lambda self, other, of=of: constexpr(of(other, self.value)),
        )


def _splat_truth_values(interpreter: Any) -> None:
    """Broadcast a comparison of two numbers as a truth value.

    The interpreter keeps the type of the operands.
    """
    builder = interpreter.InterpreterBuilder
    splat = builder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        return splat(self, ret_ty, interpreter.TensorHandle(arg.data, ret_ty.scalar))

    builder.create_splat = create_splat


def _rounding(convert: Any) -> Any:
    """Wrap the conversion of floats: round float32 to bfloat16 to nearest, ties to even."""
    import numpy

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if not (source.is_fp32() and target.is_bf16()):
            return convert(data, source, target, mode)
        bits = numpy.ascontiguousarray(data, dtype=numpy.float32).view(numpy.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return numpy.where(numpy.isnan(data), (bits >> 16) | 0x40, nearest).astype(numpy.uint16)

    return rounded


def _quicken(interpreter: Any) -> None:
    """Remove repeated work from the interpreter.

    It computes sums and products of integers again in 64 bits, for an assertion that only debugging
    needs. It patches the functions of the language for a launch, and again for each call of a
    helper. It creates equal types repeatedly.
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
    """Wrap `patch`, which returns an object that restores replaced functions: patch only if
    something is unpatched.
    """
    nothing: Any = None

    def patched(function: Any) -> Any:
        nonlocal nothing
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        # Functions of tensors are restored after each launch.
        theirs = [tl.core.tensor.__add__, *(language.load for language in languages)]
        if languages and not any(map(tl.core.is_builtin, theirs)):
            return nothing
        made = patch(function)
        nothing = type(made)()
        return made

    return patched


def _remembering_shapes(init: Any, constexpr: Any) -> Any:
    """Wrap `block_type.__init__`: reuse results for equal shapes."""
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
    """Wrap `tensor.__init__`: reuse results for equal types."""
    known: dict[str, dict[str, Any]] = {}

    def remembering(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            vars(self).update(known[type.name], handle=handle, type=type, dtype=type.scalar)
        else:
            init(self, handle, type)
            known[type.name] = dict(vars(self), handle=None)

    return remembering
