"""Launches kernels from machine code beside this file, through the CUDA driver. Needs torch, not Triton.

The launcher is the emitted file itself. Where it says `triton`, it gets what stands in for that here: kernels are names
of machine code, descriptors are what TMA is told. What no machine code fits goes to Triton, if it is there, with a
warning.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib.util
import inspect
import json
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
FORMATS = {
    "i1": "b",
    "i8": "b",
    "u8": "B",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
}
BITS = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}
MAP_BYTES = 128
"""Of what TMA is told of a tensor, which begins at a multiple of 64 bytes."""

# Numbers of cuda.h.
MAX_DYNAMIC_SHARED = 8
COOPERATIVE, PROGRAMMATIC = 2, 6
INTERLEAVE_NONE, L2_PROMOTION_128B, FILL_ZERO = 0, 2, 0


# --- what is launched ------------------------


@dataclass(frozen=True, eq=False)
class Cubin:
    """Machine code of one kernel for some constants, and what its arguments have to be."""

    folder: Path
    row: Mapping[str, Any]

    def fits(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
        """Whether a call may be launched with it."""
        asked = self.row["options"]
        return all(asked.get(name) == value for name, value in options.items()) and all(
            _same(given[name], value) if kind == "constexpr" else _is(given[name], kind, value)
            for name, kind, value in self.row["arguments"]
        )

    @functools.cached_property
    def strictness(self) -> int:
        """How many arguments it wants to be aligned, or one."""
        return sum(value is True or kind == "constexpr" for _, kind, value in self.row["arguments"])

    @functools.cached_property
    def forms(self) -> list[str]:
        """Of each parameter of the kernel, as `struct` has it. Scratch memory, the last two, is none."""
        return [form for name, kind, _ in self._passed for form in _forms(kind)] + ["Q", "Q"]

    @functools.cached_property
    def _layout(
        self,
    ) -> tuple[struct.Struct, list[int], list[Callable[[Mapping[str, Any]], tuple[Any, ...]]]]:
        """Of the memory that parameters are put into: where each lies, and what gives their values."""
        form, size, offsets = "<", 0, []
        for one in self.forms:
            bytes_ = struct.calcsize(one)
            pad = -size % min(bytes_, 64)
            offsets.append(size + pad)
            form, size = f"{form}{pad}x{one}", size + pad + bytes_
        maps = iter(self.row["maps"])
        return struct.Struct(form), offsets, [_getter(name, kind, maps) for name, kind, _ in self._passed]

    @functools.cached_property
    def _passed(self) -> list[tuple[str, str, Any]]:
        return [(name, kind, value) for name, kind, value in self.row["arguments"] if kind != "constexpr"]

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        """What launches it again, given all arguments in their order."""
        names = [name for name, _, _ in self.row["arguments"]]
        return lambda *args: self.launch(grid, dict(zip(names, args, strict=True)))

    def launch(self, grid: Sequence[int], given: Mapping[str, Any]) -> None:
        """On the current stream of the current device."""
        if not grid[0]:
            return
        function = _function(torch.cuda.current_device(), self)
        memory, offsets, getters = self._layout
        values = ctypes.create_string_buffer(memory.size)
        memory.pack_into(values, 0, *(x for getter in getters for x in getter(given)), 0, 0)
        begin = ctypes.addressof(values)
        parameters = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        row = self.row
        attributes = (_Attribute * 2)()
        count = 0
        for there, number in ((row["programmatic"], PROGRAMMATIC), (row["cooperative"], COOPERATIVE)):
            if there:
                attributes[count].id, attributes[count].value[0] = number, 1
                count += 1
        stream = torch.cuda.current_stream().cuda_stream
        config = _Config(
            *grid, *[1] * (3 - len(grid)), 32 * row["warps"], 1, 1, row["shared"], stream, attributes, count
        )
        _checked(_driver().cuLaunchKernelEx(ctypes.byref(config), function, parameters, None))


def _same(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else bool(a == b)


def _is(value: Any, kind: str, aligned: Any) -> bool:
    if kind.startswith("tensordesc"):
        return (
            isinstance(value, Descriptor)
            and list(value.block_shape) == _block(kind)
            and (kind.startswith(f"tensordesc<{DTYPES[value.base.dtype]}["))
        )
    if kind.startswith("*"):
        there = isinstance(value, torch.Tensor) and DTYPES.get(value.dtype) == kind[1:]
        return there and (aligned is not True or value.data_ptr() % 16 == 0)
    if kind.startswith("fp"):
        return isinstance(value, float)
    if kind == "i1":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return -(2 ** BITS[kind]) <= value < 2 ** BITS[kind] and (aligned is not True or value % 16 == 0)


def _block(kind: str) -> list[int]:
    """tensordesc<bf16[1, 1, 64, 128], ...> -> [1, 1, 64, 128]"""
    return [int(n) for n in kind.partition("[")[2].partition("]")[0].split(",")]


def _forms(kind: str) -> list[str]:
    if kind.startswith("tensordesc"):
        rank = len(_block(kind))
        return [f"{MAP_BYTES}s", *["i"] * rank, *["q"] * rank]
    return ["Q" if kind.startswith("*") else FORMATS[kind]]


def _getter(
    name: str, kind: str, maps: Iterator[Mapping[str, Any]]
) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    if kind.startswith("tensordesc"):
        return functools.partial(_described, name, next(maps))
    return functools.partial(_pointer if kind.startswith("*") else _number, name)


def _pointer(name: str, given: Mapping[str, Any]) -> tuple[int]:
    return (given[name].data_ptr(),)


def _number(name: str, given: Mapping[str, Any]) -> tuple[Any]:
    return (given[name],)


def _described(name: str, told: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Any, ...]:
    desc = given[name]
    shape, strides = tuple(desc.shape), tuple(desc.strides)
    encoded = _encoded(
        desc.base.data_ptr(),
        shape,
        strides,
        told["swizzle"],
        told["elem_size"],
        told["elem_type"],
        tuple(told["block_size"]),
    )
    return encoded, *shape, *strides


# --- the driver ------------------------


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _checked(error: int) -> None:
    if error:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(name))
        raise RuntimeError(f"CUDA driver: {(name.value or b'unknown error').decode()} ({error})")


@functools.cache
def _function(device: int, cubin: Cubin) -> ctypes.c_void_p:
    """The kernel, loaded to a device, whose context torch has made current."""
    torch.cuda.current_stream(device)
    image = (cubin.folder / cubin.row["file"]).read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    context = ctypes.c_void_p()
    _checked(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:  # in a thread that has not done anything on a GPU
        _checked(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _checked(driver.cuCtxSetCurrent(context))
    _checked(driver.cuModuleLoadData(ctypes.byref(module), image))
    _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, cubin.row["symbol"].encode()))
    if cubin.row["shared"] > 48 * 1024:
        _checked(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, cubin.row["shared"]))
    return function


@functools.lru_cache(4096)
def _encoded(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    swizzle: int,
    size: int,
    dtype: int,
    block: tuple[int, ...],
) -> bytes:
    """What TMA is told of a tensor. Dimensions count from the last one there, whose elements lie side by side."""
    rank = len(block)
    memory = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = -(-ctypes.addressof(memory) // 64) * 64
    sizes = (ctypes.c_uint64 * rank)(*shape[::-1])
    steps = (ctypes.c_uint64 * rank)(*(size * s for s in strides[-2::-1]))
    _checked(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), dtype, rank, ctypes.c_uint64(address), sizes, steps,
            (ctypes.c_uint32 * rank)(*block[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank),
            INTERLEAVE_NONE, swizzle, L2_PROMOTION_128B, FILL_ZERO,
        )
    )  # fmt: skip
    return ctypes.string_at(at, MAP_BYTES)


# --- what stands in for Triton ------------------------


class Descriptor:
    """A tensor, and the block of it that TMA moves at a time."""

    def __init__(
        self,
        base: Any,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any = None,
        padding: str = "zero",
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.layout, self.padding = layout, padding


class Constexpr:
    """`tl.constexpr`, of which launchers take the value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Kernel:
    """A function that ran through `triton.jit`: launched as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any], package: Package) -> None:
        self.function, self.package = function, package
        self.__name__ = function.__name__
        self.arg_names = list(inspect.signature(function).parameters)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *args: Any, enable_fp_fusion: bool = True, **meta: Any) -> Any:
        given = dict(zip(self.arg_names, args, strict=False))
        given |= {name: meta.pop(name) for name in self.arg_names if name in meta}
        arch = _arch(args)
        for cubin in self.package.cubins(self.__name__, arch):
            if cubin.fits(given, meta):
                cubin.launch(grid, given)
                return cubin
        self.package.by_triton(self, arch)[grid](*_for_triton(args), **meta, **_rest(given, len(args)))
        return None  # launchers keep what they are given, and call it with descriptors of this module


def _rest(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    return dict(list(given.items())[count:])


def _arch(args: Sequence[Any]) -> int:
    """The compute capability of the device that the arguments are on, as 90; 0 for the CPU."""
    found = (getattr(x, "base", x) for x in args)
    device = next(x.device for x in found if isinstance(x, torch.Tensor))
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return int(major * 10 + minor)


def _for_triton(args: Sequence[Any]) -> list[Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return [
        TensorDescriptor(x.base, list(x.shape), list(x.strides), list(x.block_shape))
        if isinstance(x, Descriptor)
        else x
        for x in args
    ]


class StandIn:
    """Any module of Triton, and what is in it: a few things that launchers use, and otherwise nothing in particular."""

    def __init__(self, package: Package) -> None:
        self.__version__ = package.manifest["triton"]
        self.__file__ = str(package.folder / "triton.py")
        self._known = {
            "jit": functools.partial(_jit, package),
            "constexpr": Constexpr,
            "TensorDescriptor": Descriptor,
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._known.get(name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


def _jit(package: Package, function: Any = None, **options: Any) -> Any:
    return Kernel(function, package) if function else functools.partial(_jit, package, **options)


@dataclass(frozen=True, eq=False)
class Package:
    """A folder that `kgen build` made."""

    name: str
    folder: Path

    @functools.cached_property
    def manifest(self) -> Any:
        """What was compiled, and from what."""
        return json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))

    @functools.cache  # noqa: B019
    def cubins(self, kernel: str, arch: int) -> list[Cubin]:
        """Of a kernel for a chip: those that ask for most first."""
        rows = [
            row for row in self.manifest["kernels"] if row["kernel"] == kernel and row["capability"] == arch
        ]
        return sorted((Cubin(self.folder, row) for row in rows), key=lambda cubin: -cubin.strictness)

    def by_triton(self, kernel: Kernel, arch: int) -> Any:
        """The kernel as Triton compiles it from the source. Raises RuntimeError without Triton."""
        chips = {row["capability"]: row["arch"] for row in self.manifest["kernels"]}
        why = "for these arguments" if arch in chips else f"for sm_{arch}"
        flag = "name their sizes to `kgen build`, as `--gqa` or `--width`"
        hint = flag if arch in chips else f"`kgen build --arch sm_{arch}` makes it"
        if importlib.util.find_spec("triton") is None:
            raise RuntimeError(
                f"{self.name}: no machine code of {kernel.__name__} {why}, and no Triton here: {hint}"
            )
        if arch:
            _say_once(f"{self.name}: no machine code of {kernel.__name__} {why}: Triton compiles it; {hint}")
        return getattr(self._source(), kernel.__name__)

    @functools.cache  # noqa: B019
    def _source(self) -> ModuleType:
        return _imported(f"{self.name}._source", self.folder / "triton.py", {})

    def load(self) -> ModuleType:
        """The emitted file, with machine code for kernels."""
        here = {"__builtins__": {**vars(builtins), "__import__": _importer(StandIn(self))}}
        module = _imported(f"{self.name}.triton", self.folder / "triton.py", here)
        if "hopper.py" in self.manifest["compiled"]:
            _imported(f"{self.name}.hopper", self.folder / "hopper.py", here)
        else:
            sys.modules[f"{self.name}.hopper"] = None  # type: ignore[assignment]
        return module


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=5)


def _importer(standin: StandIn) -> Callable[..., Any]:
    """`import`, but for Triton."""

    def imported(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level == 0 and name.partition(".")[0] == "triton":
            return standin
        return builtins.__import__(name, globals, locals, fromlist, level)

    return imported


def _imported(name: str, path: Path, scope: Mapping[str, Any]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(scope)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
