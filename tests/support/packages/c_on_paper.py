"""Launches of a package from C and from Python for the same tensors, recorded by a simulated
driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kgen.build.runtime import triton as runtime
from kgen.build.runtime.parameters import forms_of
from support.packages.loading import package_of

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("paper_cuda.c")
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
_SET = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """C struct `kgen_tensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
    ]


def tensor(x: torch.Tensor | None) -> Tensor:
    """Return a tensor as a C struct, with a NULL pointer for None."""
    found = Tensor()
    if x is not None:
        found.data = x.data_ptr()
        for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            found.sizes[i], found.strides[i] = size, stride
    return found


class Copy(ctypes.Structure):
    """Arguments of a two-dimensional copy (CUDA_MEMCPY2D)."""

    _fields_ = [
        *[(n, ctypes.c_size_t) for n in ("from_x", "from_y")],
        ("from_type", ctypes.c_int),
        *[(n, ctypes.c_void_p) for n in ("from_host", "source", "from_array")],
        ("from_pitch", ctypes.c_size_t),
        *[(n, ctypes.c_size_t) for n in ("to_x", "to_y")],
        ("to_type", ctypes.c_int),
        *[(n, ctypes.c_void_p) for n in ("to_host", "target", "to_array")],
        *[(n, ctypes.c_size_t) for n in ("to_pitch", "width", "height")],
    ]


def compiled(command: Sequence[str | Path]) -> None:
    """Run a compiler. Raise with its output if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the library of the simulated driver.

    A process loads it once, and every lookup of libcuda finds it.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        compiled(
            ["gcc", *STRICT, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, SOURCE]
        )
        found = ctypes.CDLL(str(library))
    found.paper_context.argtypes = [ctypes.c_void_p]
    return found


class Paper:
    """Simulated driver.

    `launched` has a row for each launch (`launch_of`); `events` also has copies and fills.
    """

    def __init__(
        self, package: Path, run: Callable[[Any, int, dict[str, Any]], None] | None = None
    ) -> None:
        self.driver = driver()
        self.package, self.run = package, run
        self.rows = json.loads((package / "manifest.json").read_text())["kernels"]
        self.images = [(row, (package / row["file"]).read_bytes()) for row in self.rows]
        self.launched: list[dict[str, Any]] = []
        self.events: list[tuple[Any, ...]] = []
        self.known: list[tuple[str, int, int]] = []
        self.others: list[int] = []
        self.bytes_of: dict[int, int] = {}
        self.loads = 0
        self.calls = (_LOAD(self._load), _LAUNCH(self._launch), _SET(self._set), _COPY(self._copy))
        self.driver.paper_calls(*self.calls)

    def device(self, arch: int, multiprocessors: int) -> None:
        """Set the device for the following calls."""
        self.driver.paper_device(arch, multiprocessors)

    def begin(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Clear the records.

        Addresses inside `tensors` are known by name, others by their order of appearance.
        """
        self.launched, self.events, self.others = [], [], []
        there = {name: x for name, x in tensors.items() if x is not None and x.numel()}
        self.known = [(name, x.data_ptr(), _end(x)) for name, x in there.items()]

    def place(self, address: int) -> tuple[str | int, int]:
        """Return the tensor and offset of an address, or the order of appearance of an unknown
        address.
        """
        for name, begin, end in self.known:
            if begin <= address < end:
                return name, address - begin
        if address not in self.others:
            self.others.append(address)
        return self.others.index(address), 0

    def rooms(self) -> list[int]:
        """Return the sizes in bytes of the tensors at unknown addresses, as in the Python call."""
        return [self.bytes_of.get(address, 0) for address in self.others]

    def crowded(self, rooms: Sequence[int], workspace: torch.Tensor) -> list[str]:
        """Return the tensors in the C workspace that overlap or exceed it.

        `rooms` has their sizes in Python.
        """
        begin, size = workspace.data_ptr(), workspace.numel()
        ranges = sorted((at - begin, room) for at, room in zip(self.others, rooms, strict=False))
        ranges = [(at, room) for at, room in ranges if 0 <= at <= size and room]
        ends = [*(at for at, _ in ranges[1:]), *[size] * bool(ranges)]
        return [
            f"{room} bytes at {at}"
            for (at, room), end in zip(ranges, ends, strict=True)
            if at + room > end
        ]

    def _load(self, module: Any, image: int) -> int:
        self.loads += 1
        # Compare only the bytes of the image. Rows with the same bytes share one image.
        size = _size_of(image)
        content = ctypes.string_at(image, size)
        numbers = [i for i, (_, known) in enumerate(self.images) if known[:size] == content]
        module[0] = 1 + numbers[0]
        return 0

    def _launch(self, config: int, function: int, parameters: Any) -> int:
        numbers = struct.unpack("<7I", ctypes.string_at(config, 28))
        stream, attributes, count = struct.unpack("<QQI", ctypes.string_at(config + 32, 20))
        # Rows that share an image differ only in their conditions on arguments.
        row, _ = self.images[function - 1]
        found: dict[str, Any] = {}
        sizes, at = [size for _, size in row["parameters"]], 0
        raw: dict[str, int] = {}
        for name, kind, _ in row["arguments"]:
            if kind == "constexpr":
                continue
            forms = forms_of(kind)
            content = [
                ctypes.string_at(parameters[at + i], struct.calcsize(f))
                for i, f in enumerate(forms)
            ]
            assert [len(part) for part in content] == sizes[at : at + len(forms)]
            at += len(forms)
            if kind.startswith("tensordesc"):
                place = self.place(struct.unpack("<Q", content[0][:8])[0])
                found[name] = place, content[0][8:], content[1:]
            elif kind.startswith("*"):
                (raw[name],) = struct.unpack("<Q", content[0])
                found[name] = self.place(raw[name])
            else:
                (found[name],) = struct.unpack(f"<{forms[0]}", content[0])
                raw[name] = found[name]
        assert [ctypes.string_at(parameters[at + i], 8) for i in (0, 1)] == [bytes(8)] * 2
        ids = [
            struct.unpack("<ixxxxi", ctypes.string_at(attributes + 72 * i, 12))
            for i in range(count)
        ]
        self.launched.append(
            {
                "kernel": row["kernel"],
                "image": row["sha256"],
                "grid": numbers[:3],
                "block": numbers[3:6],
                "shared": numbers[6],
                "stream": stream,
                "attributes": ids,
                "parameters": found,
            }
        )
        self.events.append((row["kernel"],))
        if self.run is not None:
            self.run(row, numbers[0], raw)
        return 0

    def _set(self, address: int, value: int, count: int, stream: Any) -> int:
        self.events.append(("zeros", 4 * count))
        assert value == 0
        ctypes.memset(address, 0, 4 * count)
        return 0

    def _copy(self, asked: int, stream: Any) -> int:
        told = Copy.from_address(asked)
        self.events.append(("copy", told.width, told.height, told.from_pitch, told.to_pitch))
        for row in range(told.height):
            ctypes.memmove(
                told.target + row * told.to_pitch, told.source + row * told.from_pitch, told.width
            )
        return 0

    @contextlib.contextmanager
    def under_python(self, launcher: ModuleType, arch: int, multiprocessors: int) -> Iterator[None]:
        """Record the launches of the package from Python on this chip."""

        launch = runtime.Cubin.launch

        def remembering(cubin: runtime.Cubin, grid: Any, args: Any) -> None:
            for x in (getattr(x, "base", x) for x in args):
                if isinstance(x, torch.Tensor):
                    self.bytes_of[x.data_ptr()] = _end(x) - x.data_ptr() if x.numel() else 0
            launch(cubin, grid, args)

        def function(device: int, cubin: runtime.Cubin) -> ctypes.c_void_p:
            module = ctypes.c_void_p()
            image = ctypes.create_string_buffer((cubin.folder / cubin.row["file"]).read_bytes())
            assert self.driver.cuModuleLoadData(ctypes.byref(module), image) == 0
            return module

        instead: dict[str, Any] = {
            "_driver": lambda: self.driver,
            "_function": function,
            "_stream": lambda device: 0,
            "_arch": lambda args: arch,
        }
        hopper = sys.modules.get(f"{launcher.__package__}.hopper")
        with contextlib.ExitStack() as stack:
            for name, value in instead.items():
                stack.enter_context(mock.patch.object(runtime, name, value))
            stack.enter_context(mock.patch("torch.cuda.current_device", return_value=0))
            stack.enter_context(mock.patch.object(launcher, "_arch", return_value=arch))
            stack.enter_context(mock.patch.object(runtime.Cubin, "launch", remembering))
            for module in (launcher, hopper):
                if hasattr(module, "_multiprocessors"):
                    stack.enter_context(
                        mock.patch.object(module, "_multiprocessors", return_value=multiprocessors)
                    )
            if hasattr(launcher, "_portable_because"):
                launcher._portable_because.cache_clear()
            sys.modules[f"{launcher.__package__}._launch"]._COMPILED.clear()
            yield


def _size_of(image: int) -> int:
    """Return the size of a machine code file, from its header."""
    head = ctypes.string_at(image, 64)
    (programs, sections) = struct.unpack("<QQ", head[32:48])
    (program_size, program_count, section_size, section_count) = struct.unpack("<4H", head[54:62])
    return int(
        max(programs + program_size * program_count, sections + section_size * section_count)
    )


def _end(x: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()


def loaded_package(folder: Path, name: str) -> ModuleType:
    """Return the Python launcher of a package."""
    return package_of(name, folder).load("triton")


def packages_on_paper(out: Path, specs: Sequence[str]) -> None:
    """Build packages of specs, by name or path, in a separate process."""
    done = python(
        ["tests/support/packages/build_on_paper.py", str(out), *specs], {"TRITON_INTERPRET": None}
    )
    assert done.returncode == 0, done.stderr


def packages_of(specs: Mapping[str, str], out: Path, archs: Sequence[str] = ()) -> Path:
    """Write the texts of specs and build their packages. Return the folder."""
    for name, text in specs.items():
        (out / f"{name}.yaml").write_text(text)
    packages_on_paper(out, [*archs, *(str(out / f"{name}.yaml") for name in specs)])
    return out


def run_example(package: Path) -> subprocess.CompletedProcess[str]:
    """Run the example of a package, with its kernels in Triton's interpreter."""
    from kgen.verify.interpreter import ENVIRONMENT

    return python(["tests/support/packages/c_example.py", str(package)], ENVIRONMENT)


def python(
    command: Sequence[str], more: Mapping[str, str | None]
) -> subprocess.CompletedProcess[str]:
    """Run Python in a separate process in the project's root. A variable that is None is unset."""
    environment = {name: value for name, value in (os.environ | more).items() if value is not None}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, *command]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False
    )


class Library:
    """C functions of a package."""

    def __init__(self, package: Path, name: str, *, cpp: bool = False) -> None:
        source, self.name = package / "c" / f"{name}.c", name
        target = package / f"lib{name}{'_cpp' * cpp}.so"
        if not target.exists():
            language = ["g++", "-std=c++17", "-x", "c++"] if cpp else ["gcc", "-std=c11"]
            pedantic = STRICT[:-1] if cpp else STRICT
            compiled(
                [
                    *language,
                    *pedantic,
                    "-O1",
                    "-shared",
                    "-fPIC",
                    "-o",
                    target,
                    source,
                    "-ldl",
                    "-pthread",
                ]
            )
        self.library = ctypes.CDLL(str(target))
        self.arguments = _struct(package / "c" / f"{name}.h")
        for function in (
            f"{name}_{pass_}_workspace" for pass_ in ("block_mask", "forward", "backward")
        ):
            if hasattr(self.library, function):
                getattr(self.library, function).restype = ctypes.c_size_t
        getattr(self.library, f"{name}_error").restype = ctypes.c_char_p

    def made(self, given: Mapping[str, Any]) -> ctypes.Structure:
        """Return the struct of arguments. Missing fields are zero."""
        found = self.arguments()
        for name, value in given.items():
            is_tensor = value is None or isinstance(value, torch.Tensor)
            setattr(found, name, tensor(value) if is_tensor else value)
        return found

    def query(self, pass_: str, given: Mapping[str, Any]) -> int:
        """Return the bytes of workspace, or -1 on failure."""
        function = getattr(self.library, f"{self.name}_{pass_}_workspace")
        size = function(ctypes.byref(self.made(given)))
        return -1 if size == ctypes.c_size_t(-1).value else int(size)

    def call(
        self, pass_: str, given: Mapping[str, Any], workspace: torch.Tensor | None = None
    ) -> int:
        """Return the status of a call, by default with a workspace of the required size."""
        if workspace is None:
            bytes_ = self.query(pass_, given)
            assert bytes_ >= 0, self.error()
            # Fill the workspace with garbage, and give it exactly the required size.
            workspace = torch.full((bytes_ + 16,), 0x7F, dtype=torch.uint8)
            workspace = workspace[-workspace.data_ptr() % 16 :][:bytes_]
        function = getattr(self.library, f"{self.name}_{pass_}")
        self.workspace = workspace
        pointer, size = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(workspace.numel())
        return int(function(ctypes.byref(self.made(given)), pointer, size, ctypes.c_void_p(0)))

    def error(self) -> str:
        """Return the last error message."""
        words: bytes = getattr(self.library, f"{self.name}_error")()
        return words.decode()


def _struct(header: Path) -> type[ctypes.Structure]:
    """Return the struct of arguments that the header of a package declares."""
    text = header.read_text(encoding="utf-8")
    body = text.partition("_args {")[2].partition("\n}")[0]
    kinds = {
        "kgen_tensor": Tensor,
        "double": ctypes.c_double,
        "int64_t": ctypes.c_int64,
        "int": ctypes.c_int,
    }
    fields: list[tuple[str, Any]] = []
    for line in body.splitlines():
        kind, _, rest = line.partition("/*")[0].strip().partition(" ")
        if kind in kinds:
            fields += [(name.strip(), kinds[kind]) for name in rest.rstrip("; ").split(",")]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})
