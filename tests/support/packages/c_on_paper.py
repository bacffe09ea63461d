"""Calls of a package from C, and what the package for Python launches for the same tensors, by a driver on paper."""

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
from support.packages.loading import package_of

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("paper_cuda.c")
STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")
_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    """`kgen_tensor`."""

    _fields_ = [("data", ctypes.c_void_p), ("sizes", ctypes.c_int64 * 5), ("strides", ctypes.c_int64 * 5)]


def tensor(x: torch.Tensor | None) -> Tensor:
    """A tensor as C has it; no tensor is NULL."""
    found = Tensor()
    if x is not None:
        found.data = x.data_ptr()
        for i, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            found.sizes[i], found.strides[i] = size, stride
    return found


class Copy(ctypes.Structure):
    """What a copy of rows is asked for."""

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
    """Run a compiler, whose words are those of what it raises."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def driver() -> ctypes.CDLL:
    """The library, of which a process has one: what is called so is then found by everything."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        compiled(["gcc", *STRICT, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, SOURCE])
        found = ctypes.CDLL(str(library))
    found.paper_context.argtypes = [ctypes.c_void_p]
    return found


class Paper:
    """The driver. `launched` has a row for each launch, as `launch_of` makes it; `events` has copies and zeros, too."""

    def __init__(self, package: Path, run: Callable[[Any, int, dict[str, Any]], None] | None = None) -> None:
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
        """What calls find from now on."""
        self.driver.paper_device(arch, multiprocessors)

    def begin(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Forget what was launched. Addresses in tensors are known by their names, others by when they came."""
        self.launched, self.events, self.others = [], [], []
        there = {name: x for name, x in tensors.items() if x is not None and x.numel()}
        self.known = [(name, x.data_ptr(), _end(x)) for name, x in there.items()]

    def place(self, address: int) -> tuple[str | int, int]:
        """Where an address is: a tensor and an offset, or how many other addresses came before."""
        for name, begin, end in self.known:
            if begin <= address < end:
                return name, address - begin
        if address not in self.others:
            self.others.append(address)
        return self.others.index(address), 0

    def rooms(self) -> list[int]:
        """Bytes of the tensors at other addresses, as Python has them."""
        return [self.bytes_of.get(address, 0) for address in self.others]

    def crowded(self, rooms: Sequence[int], workspace: torch.Tensor) -> list[str]:
        """Of what a call from C has in its workspace, what has no such rooms of its own there."""
        begin, size = workspace.data_ptr(), workspace.numel()
        ranges = sorted((at - begin, room) for at, room in zip(self.others, rooms, strict=False))
        ranges = [(at, room) for at, room in ranges if 0 <= at <= size and room]
        ends = [*(at for at, _ in ranges[1:]), *[size] * bool(ranges)]
        return [
            f"{room} bytes at {at}" for (at, room), end in zip(ranges, ends, strict=True) if at + room > end
        ]

    def _load(self, module: Any, image: int) -> int:
        self.loads += 1
        # What is behind the image is not read: rows of one length and content are one image.
        size = _size_of(image)
        content = ctypes.string_at(image, size)
        numbers = [i for i, (_, known) in enumerate(self.images) if known[:size] == content]
        module[0] = 1 + numbers[0]
        return 0

    def _launch(self, config: int, function: int, parameters: Any) -> int:
        numbers = struct.unpack("<7I", ctypes.string_at(config, 28))
        stream, attributes, count = struct.unpack("<QQI", ctypes.string_at(config + 32, 20))
        # Several rows may share an image; they differ in what they ask of arguments alone.
        row, _ = self.images[function - 1]
        found: dict[str, Any] = {}
        sizes, at = [size for _, size in row["parameters"]], 0
        raw: dict[str, int] = {}
        for name, kind, _ in row["arguments"]:
            if kind == "constexpr":
                continue
            forms = runtime._forms(kind)
            content = [ctypes.string_at(parameters[at + i], struct.calcsize(f)) for i, f in enumerate(forms)]
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
        ids = [struct.unpack("<ixxxxi", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)]
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
            ctypes.memmove(told.target + row * told.to_pitch, told.source + row * told.from_pitch, told.width)
        return 0

    @contextlib.contextmanager
    def under_python(self, launcher: ModuleType, arch: int, multiprocessors: int) -> Iterator[None]:
        """What the package launches from Python on this chip comes here."""

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
    """Of a file of machine code, by its own header."""
    head = ctypes.string_at(image, 64)
    (programs, sections) = struct.unpack("<QQ", head[32:48])
    (program_size, program_count, section_size, section_count) = struct.unpack("<4H", head[54:62])
    return int(max(programs + program_size * program_count, sections + section_size * section_count))


def _end(x: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()


def loaded_package(folder: Path, name: str) -> ModuleType:
    """The launcher of a package, as Python has it."""
    return package_of(name, folder).load("triton")


def packages_on_paper(out: Path, specs: Sequence[str]) -> None:
    """Packages of specs, by name or path, under a folder; in a process of its own."""
    done = python(["tests/support/packages/build_on_paper.py", str(out), *specs], {"TRITON_INTERPRET": None})
    assert done.returncode == 0, done.stderr


def packages_of(specs: Mapping[str, str], out: Path, archs: Sequence[str] = ()) -> Path:
    """The folder, with the texts of specs and their packages on paper."""
    for name, text in specs.items():
        (out / f"{name}.yaml").write_text(text)
    packages_on_paper(out, [*archs, *(str(out / f"{name}.yaml") for name in specs)])
    return out


def run_example(package: Path) -> subprocess.CompletedProcess[str]:
    """The example of a package, whose kernels Triton's interpreter runs."""
    from kgen.verify.interpreter import ENVIRONMENT

    return python(["tests/support/packages/c_example.py", str(package)], ENVIRONMENT)


def python(command: Sequence[str], more: Mapping[str, str | None]) -> subprocess.CompletedProcess[str]:
    """A process of its own from the project's root, with some variables set or, by None, not."""
    environment = {name: value for name, value in (os.environ | more).items() if value is not None}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


class Library:
    """A package's functions of C."""

    def __init__(self, package: Path, name: str, *, cpp: bool = False) -> None:
        source, self.name = package / "c" / f"{name}.c", name
        target = package / f"lib{name}{'_cpp' * cpp}.so"
        if not target.exists():
            language = ["g++", "-std=c++17", "-x", "c++"] if cpp else ["gcc", "-std=c11"]
            pedantic = STRICT[:-1] if cpp else STRICT
            compiled(
                [*language, *pedantic, "-O1", "-shared", "-fPIC", "-o", target, source, "-ldl", "-pthread"]
            )
        self.library = ctypes.CDLL(str(target))
        self.arguments = _struct(package / "c" / f"{name}.h")
        for function in (f"{name}_{pass_}_workspace" for pass_ in ("block_mask", "forward", "backward")):
            if hasattr(self.library, function):
                getattr(self.library, function).restype = ctypes.c_size_t
        getattr(self.library, f"{name}_error").restype = ctypes.c_char_p

    def made(self, given: Mapping[str, Any]) -> ctypes.Structure:
        """The struct of arguments; what is not given is zero."""
        found = self.arguments()
        for name, value in given.items():
            is_tensor = value is None or isinstance(value, torch.Tensor)
            setattr(found, name, tensor(value) if is_tensor else value)
        return found

    def query(self, pass_: str, given: Mapping[str, Any]) -> int:
        """Bytes of workspace; -1 where that fails."""
        function = getattr(self.library, f"{self.name}_{pass_}_workspace")
        size = function(ctypes.byref(self.made(given)))
        return -1 if size == ctypes.c_size_t(-1).value else int(size)

    def call(self, pass_: str, given: Mapping[str, Any], workspace: torch.Tensor | None = None) -> int:
        """The status of a call, in a workspace of as many bytes as it asks for."""
        if workspace is None:
            bytes_ = self.query(pass_, given)
            assert bytes_ >= 0, self.error()
            # As garbage, and as large as it has to be.
            workspace = torch.full((bytes_ + 16,), 0x7F, dtype=torch.uint8)
            workspace = workspace[-workspace.data_ptr() % 16 :][:bytes_]
        function = getattr(self.library, f"{self.name}_{pass_}")
        self.workspace = workspace
        pointer, size = ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(workspace.numel())
        return int(function(ctypes.byref(self.made(given)), pointer, size, ctypes.c_void_p(0)))

    def error(self) -> str:
        """What went wrong last."""
        words: bytes = getattr(self.library, f"{self.name}_error")()
        return words.decode()


def _struct(header: Path) -> type[ctypes.Structure]:
    """The arguments of a package, as its header declares them."""
    text = header.read_text(encoding="utf-8")
    body = text.partition("_args {")[2].partition("\n}")[0]
    kinds = {"kgen_tensor": Tensor, "double": ctypes.c_double, "int64_t": ctypes.c_int64, "int": ctypes.c_int}
    fields: list[tuple[str, Any]] = []
    for line in body.splitlines():
        kind, _, rest = line.partition("/*")[0].strip().partition(" ")
        if kind in kinds:
            fields += [(name.strip(), kinds[kind]) for name in rest.rstrip("; ").split(",")]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})
