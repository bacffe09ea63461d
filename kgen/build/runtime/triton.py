"""Launch the kernels of a `triton.py` from machine code, through the CUDA driver. Needs torch, not
Triton.

The emitted file launches the kernels. When it imports `triton`, it gets replacements from this
module: a kernel is a name of machine code, a descriptor holds the arguments of a TMA descriptor.
Triton compiles a call without fitting machine code, with a warning, if Triton is installed.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib
import importlib.util
import inspect
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .descriptors import Constexpr, Descriptor, Layout, for_triton
from .folder import NO_COMPILER, SOURCES, Folder, NoMachineCode, may_compile, say_once
from .parameters import MAP_BYTES, block_of, forms_of, laid_out

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
    torch.bool: "u1",
}
BITS = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}

# Constants of cuda.h.
MAX_DYNAMIC_SHARED = 8
INVALID_CONTEXT = 201
COOPERATIVE, PROGRAMMATIC = 2, 6
INTERLEAVE_NONE, L2_PROMOTION_128B, FILL_ZERO = 0, 2, 0


# --- machine code ------------------------


@dataclass(frozen=True, eq=False)
class Cubin:
    """Machine code of one kernel for some constants, and the conditions on its arguments."""

    folder: Path
    row: Mapping[str, Any]

    def fits(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
        """True if a call with these arguments and options can use this machine code."""
        asked = self.row["options"]
        return all(asked.get(name) == value for name, value in options.items()) and all(
            _same(given[name], value) if kind == "constexpr" else _is(given[name], kind, value)
            for name, kind, value in self.row["arguments"]
        )

    @functools.cached_property
    def strictness(self) -> int:
        """Number of constants and aligned arguments: the most specific machine code is tried
        first.
        """
        return sum(value is True or kind == "constexpr" for _, kind, value in self.row["arguments"])

    @functools.cached_property
    def forms(self) -> list[str]:
        """Format characters of `struct`, one per parameter.

        The last two are pointers to scratch memory, null here.
        """
        return [form for name, kind, _ in self._passed for form in forms_of(kind)] + ["Q", "Q"]

    @functools.cached_property
    def _memory(self) -> tuple[struct.Struct, list[int]]:
        """The layout of the parameter buffer, and the offset of each parameter.

        A descriptor is packed as one value.
        """
        each = [forms_of(kind) for _, kind, _ in self._passed] + [["Q"], ["Q"]]
        inner = [laid_out(forms) for forms in each]
        one = [
            f"{form.size}s" if len(forms) > 1 else forms[0]
            for forms, (form, _) in zip(each, inner, strict=True)
        ]
        whole, begins = laid_out(one)
        return whole, [
            begin + at for begin, (_, ats) in zip(begins, inner, strict=True) for at in ats
        ]

    @functools.cached_property
    def _passed(self) -> list[tuple[str, str, Any]]:
        return [
            (name, kind, value)
            for name, kind, value in self.row["arguments"]
            if kind != "constexpr"
        ]

    @functools.cached_property
    def _values(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """A function from all arguments to the values of the parameters.

        It is compiled from one generated expression. A Python loop over some thirty arguments takes
        longer than the driver takes to launch the kernel. The expression contains only indices and
        names from this function.
        """
        values, names = [], {}
        maps = iter(self.row["maps"])
        for i, (_, kind, _) in enumerate(self.row["arguments"]):
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                told = _Told(**next(maps), form=laid_out(forms_of(kind))[0])
                names[f"described_{i}"] = functools.partial(_described, told)
                values.append(f"described_{i}(a[{i}])")
            else:
                values.append(f"a[{i}].data_ptr()" if kind.startswith("*") else f"a[{i}]")
        made: Callable[[Sequence[Any]], tuple[Any, ...]] = eval(
            f"lambda a: ({', '.join([*values, '0, 0'])})", names
        )
        return made

    @functools.cached_property
    def _ready(self) -> _Ready:
        return _Ready(self)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        """Return a function that launches the kernel on this grid, with all arguments in order."""
        return lambda *args: self.launch(grid, args)

    def launch(self, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Launch on the current stream of the current device, with all arguments in order."""
        if not grid[0]:
            return
        device = torch.cuda.current_device()
        function = _function(device, self)
        ready = self._ready
        self._memory[0].pack_into(ready.values, 0, *self._values(args))
        config = ready.config
        config.grid_x = grid[0]
        if len(grid) > 1:
            config.grid_y, config.grid_z = (*grid, 1)[1:3]
        config.stream = _stream(device)
        error = _driver().cuLaunchKernelEx(ready.of_config, function, ready.parameters, None)
        if error == INVALID_CONTEXT:  # this thread has not used a GPU yet
            _begin(device)
            error = _driver().cuLaunchKernelEx(ready.of_config, function, ready.parameters, None)
        if error:
            _checked(error)


class _Ready(threading.local):
    """Arguments of `cuLaunchKernelEx`, reused for all launches of a kernel in a thread: the driver
    copies them.
    """

    def __init__(self, cubin: Cubin) -> None:
        memory, offsets = cubin._memory
        self.values = ctypes.create_string_buffer(memory.size)
        begin = ctypes.addressof(self.values)
        self.parameters = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))
        self.attributes = (_Attribute * 2)()
        count, row = 0, cubin.row
        for there, number in (
            (row["programmatic"], PROGRAMMATIC),
            (row["cooperative"], COOPERATIVE),
        ):
            if there:
                self.attributes[count].id, self.attributes[count].value[0] = number, 1
                count += 1
        threads = 32 * row["warps"]
        self.config = _Config(1, 1, 1, threads, 1, 1, row["shared"], None, self.attributes, count)
        self.of_config = ctypes.byref(self.config)


def _stream(device: int) -> int:
    """Return the current stream of a device.

    `torch.cuda.current_stream` is ten times as slow: it makes an object.
    """
    return int(torch._C._cuda_getCurrentRawStream(device))


def _same(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else bool(a == b)


def _is(value: Any, kind: str, aligned: Any) -> bool:
    if kind.startswith("tensordesc"):
        return (
            isinstance(value, Descriptor)
            and list(value.block_shape) == block_of(kind)
            and (kind.startswith(f"tensordesc<{DTYPES[value.base.dtype]}["))
        )
    if kind.startswith("*"):
        # Some versions of Triton call booleans i1.
        told = "u1" if kind == "*i1" else kind[1:]
        there = isinstance(value, torch.Tensor) and DTYPES.get(value.dtype) == told
        return there and (aligned is not True or value.data_ptr() % 16 == 0)
    if kind.startswith("fp"):
        return isinstance(value, float)
    if kind in ("i1", "u1"):
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return -(2 ** BITS[kind]) <= value < 2 ** BITS[kind] and (
        aligned is not True or value % 16 == 0
    )


@dataclass(frozen=True, eq=False)
class _Told:
    """The properties of a descriptor that machine code was compiled for."""

    swizzle: int
    elem_size: int
    elem_type: int
    block_size: list[int]
    form: struct.Struct


def _described(told: _Told, desc: Any) -> bytes:
    shape, strides = desc.shape, desc.strides
    if not isinstance(shape, tuple):  # Triton's descriptors have lists, which cannot be cached
        shape, strides = tuple(shape), tuple(strides)
    return _parameters(desc.base.data_ptr(), shape, strides, told)


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


def _begin(device: int) -> None:
    """Make torch's context of a device current in this thread."""
    context = ctypes.c_void_p()
    _checked(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _checked(_driver().cuCtxSetCurrent(context))


@functools.cache
def _function(device: int, cubin: Cubin) -> ctypes.c_void_p:
    """Load a kernel to a device, once, and return its handle."""
    torch.cuda.current_stream(device)
    image = (cubin.folder / cubin.row["file"]).read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    context = ctypes.c_void_p()
    _checked(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _begin(device)
    _checked(driver.cuModuleLoadData(ctypes.byref(module), image))
    _checked(
        driver.cuModuleGetFunction(ctypes.byref(function), module, cubin.row["symbol"].encode())
    )
    if cubin.row["shared"] > 48 * 1024:
        _checked(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, cubin.row["shared"]))
    return function


@functools.lru_cache(4096)
def _parameters(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], told: _Told
) -> bytes:
    """Return the parameters of a descriptor: its `CUtensorMap`, sizes and strides."""
    return told.form.pack(_encoded(address, shape, strides, told), *shape, *strides)


def _encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...], told: _Told) -> bytes:
    """Return the `CUtensorMap` of a tensor.

    Its dimensions are reversed: the first one is contiguous.
    """
    rank = len(told.block_size)
    memory = ctypes.create_string_buffer(MAP_BYTES + 64)
    at = -(-ctypes.addressof(memory) // 64) * 64
    sizes = (ctypes.c_uint64 * rank)(*shape[::-1])
    steps = (ctypes.c_uint64 * rank)(*(told.elem_size * s for s in strides[-2::-1]))
    _checked(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), told.elem_type, rank, ctypes.c_uint64(address), sizes, steps,
            (ctypes.c_uint32 * rank)(*told.block_size[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank),
            INTERLEAVE_NONE, told.swizzle, L2_PROMOTION_128B, FILL_ZERO,
        )
    )  # fmt: skip
    return ctypes.string_at(at, MAP_BYTES)


# --- replacements for Triton ------------------------


class Kernel:
    """A function decorated with `triton.jit`, launched as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any], package: Package) -> None:
        self.function, self.package = function, package
        self.__name__ = function.__name__
        self.stem = function.__module__.rpartition(".")[2]
        self.arg_names = list(inspect.signature(function).parameters)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def _launch(
        self, grid: Sequence[int], *args: Any, enable_fp_fusion: bool = True, **meta: Any
    ) -> Any:
        given, options = self._told(args, meta)
        if cubin := self._found(given, options, args):
            cubin.launch(grid, [given[name] for name in self.arg_names])
            return cubin
        source = self.package.by_triton(self, _arch(args))
        options = {**options, "enable_fp_fusion": enable_fp_fusion}
        source[grid](*for_triton(args), **options, **_rest(given, len(args)))
        # a launcher would keep Triton's kernel, and call it with this module's descriptors
        return None

    def warmup(
        self, *args: Any, grid: Sequence[int], enable_fp_fusion: bool = True, **meta: Any
    ) -> Cubin | Kernel:
        """Load the machine code of a launch to the current device. Do nothing if none fits."""
        if cubin := self._found(*self._told(args, meta), args):
            _function(torch.cuda.current_device(), cubin)
        return cubin or self

    def _told(
        self, args: Sequence[Any], meta: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments by name, and the options."""
        given = dict(zip(self.arg_names, args, strict=False))
        given |= {name: meta[name] for name in self.arg_names if name in meta}
        return given, {name: value for name, value in meta.items() if name not in given}

    def _found(
        self, given: Mapping[str, Any], options: Mapping[str, Any], args: Sequence[Any]
    ) -> Cubin | None:
        fit = (
            cubin
            for cubin in self.package.cubins(self.__name__, _arch(args))
            if cubin.fits(given, options)
        )
        return next(fit, None)


def _rest(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    return dict(list(given.items())[count:])


def _arch(args: Sequence[Any]) -> int:
    """Return the compute capability of the arguments' device, such as 90; 0 for the CPU."""
    found = (getattr(x, "base", x) for x in args)
    device = next(x.device for x in found if isinstance(x, torch.Tensor))
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return int(major * 10 + minor)


class StandIn:
    """A replacement for Triton's modules and their attributes: a few that launchers use, and itself
    for all others.
    """

    def __init__(self, package: Package) -> None:
        self.__version__ = package.manifest["compilers"]["triton"]
        self.__file__ = str(package.folder / "triton.py")
        self._known = {
            "jit": functools.partial(_jit, package),
            "constexpr": Constexpr,
            "TensorDescriptor": Descriptor,
            "NVMMASharedLayout": Layout,
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


class Package(Folder):
    """A folder that `kgen build` wrote."""

    @functools.cache  # noqa: B019
    def cubins(self, kernel: str, arch: int) -> list[Cubin]:
        """Return the machine code of a kernel for a compute capability, the most specific first."""
        rows = [
            row
            for row in self.manifest["kernels"]
            if row["kernel"] == kernel and row["capability"] == arch
        ]
        return sorted(
            (Cubin(self.folder, row) for row in rows), key=lambda cubin: -cubin.strictness
        )

    def by_triton(self, kernel: Kernel, arch: int) -> Any:
        """Return Triton's own kernel from the source, which Triton compiles.

        Raises NoMachineCode without Triton.
        """
        chips = {row["capability"]: row["arch"] for row in self.manifest["kernels"]}
        where = f"for sm_{arch}" if arch else "for CPUs"
        why = "for these arguments" if arch in chips else where
        flags = "(--gqa, --batch, --width, --heads)"
        sizes = f"make tensors contiguous, or pass the sizes of the call to `kgen build` {flags}"
        hint = sizes if arch in chips else self.hint_of(arch)
        lacks = "Triton is not installed" if may_compile() else f"{NO_COMPILER} is set"
        if not may_compile() or importlib.util.find_spec("triton") is None:
            raise NoMachineCode(
                f"{self.name}: no machine code of {kernel.__name__} {why}, and {lacks}: {hint}"
            )
        if arch:
            say_once(f"{self.name}: no machine code {why}. Triton compiles it; {hint}")
        return getattr(self.source(kernel.stem), kernel.__name__)

    @functools.cache  # noqa: B019
    def source(self, stem: str) -> Any:
        """Import an emitted file unchanged, for Triton, in a package with the files that it
        imports.
        """
        name = f"{self.name}._{SOURCES}"
        if name not in sys.modules:
            sys.modules[name] = beside = ModuleType(name)
            beside.__path__ = [str(self.folder / SOURCES)]
        return importlib.import_module(f"{name}.{stem}")

    def load(self, stem: str) -> Any:
        """Import the emitted file, with machine code for its kernels."""
        here = {"__builtins__": {**vars(builtins), "__import__": _importer(StandIn(self))}}
        self.import_launch_functions()
        module = self.emitted(stem, scope=here)
        for beside in self.manifest["beside"]:
            if (self.folder / SOURCES / f"{beside}.py").is_file():
                self.emitted(beside, scope=here)
            else:
                sys.modules[f"{self.name}.{beside}"] = None  # type: ignore[assignment]
        return module


def _importer(standin: StandIn) -> Callable[..., Any]:
    """Return an `__import__` that replaces Triton's modules."""

    def imported(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if level == 0 and name.partition(".")[0] == "triton":
            return standin
        return builtins.__import__(name, globals, locals, fromlist, level)

    return imported
