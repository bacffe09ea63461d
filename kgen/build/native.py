"""The folder `c/` of a package: calls from C and C++ that use the CUDA driver alone.

A family provides the files of its launchers (`kgen.targets.native`). This module adds the files
that all packages share, and the machine code. Rows of machine code have the order in which the
launcher tries them, as in Python.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family
from kgen.render.environment import rendered, template_root
from kgen.render.layout import laid_out_in_c
from kgen.spec.load import Loaded
from kgen.targets.native import File, Native, Table, Tiles, prefix_of, with_tables

FOLDER = "c"
AS_THEY_ARE = ("kgen.h", "kgen_driver.h", "kgen_runtime.h", "kgen_calls.h", "kgen_example.h")
"""Files of `templates/c` that are the same in all packages."""
MOST_PARAMETERS, MOST_MAPS = 158, 16
"""The sizes of the arrays in `kgen_launch`."""
ELEMENTS = {"u1": "I1"}
"""The C runtime's name of a dtype that has several names in versions of Triton."""
INTEGERS = {"i8": 8, "u8": 8, "i16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Image:
    """One file of machine code."""

    file: str
    name: str
    words: str
    """The bytes, as the text of 64-bit integers."""


@dataclass(frozen=True)
class Map:
    """A `kgen_map`: how TMA loads the tiles of a descriptor."""

    type: int
    bytes: int
    swizzle: int
    tile: tuple[str, ...]
    """Sizes of a tile in Triton."""
    block: tuple[int, ...]
    """Sizes of the part that one copy loads."""

    @property
    def rank(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class Argument:
    """A `kgen_argument`: an argument of a kernel, or a constant that it was compiled with."""

    name: str
    kind: str
    constant: int = 0
    dtype: str = "0"
    aligned: int = 0
    bits: int = 0
    map: int = 0
    integer: int = 0
    real: str = "0"


@dataclass(frozen=True)
class Cubin:
    """A `kgen_cubin`: a kernel in machine code, and its launch configuration."""

    number: int
    kernel: str
    capability: int
    image: str
    symbol: str
    threads: int
    shared: int
    programmatic: int
    cooperative: int
    arguments: tuple[Argument, ...]
    maps: tuple[Map, ...]

    @property
    def count(self) -> int:
        return len(self.arguments)


@dataclass(frozen=True, kw_only=True)
class MachineCode(File):
    """The file `_cubins.inc`: images, and rows that the launcher matches with a call."""

    template: ClassVar[str] = "c/_cubins.inc.j2"

    hint: str
    """The hint for a call that no machine code fits."""
    kernels: tuple[str, ...]
    names: tuple[str, ...]
    """The arguments of kernels."""
    images: tuple[Image, ...]
    cubins: tuple[Cubin, ...]


@dataclass(frozen=True, kw_only=True)
class Build(File):
    """The file `CMakeLists.txt`."""

    template: ClassVar[str] = "c/CMakeLists.txt.j2"


def native_of(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """Return the files of a spec's launcher in C.

    `sizes` has the values of the sizes that the spec leaves open, `chips` the compute capabilities
    with machine code. Raises `KgenError` if the family has no launcher in C.
    """
    prefix_of(loaded)
    target = family(loaded.spec.kernel).targets["triton"]
    if target.native is None:
        message = (
            f"`{loaded.spec.name}` cannot be called from C: `{loaded.spec.kernel}` has no "
            "launcher in C"
        )
        raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint="remove `--c`"))
    found: Native = target.native(loaded, sizes, chips)
    return found


def write_native(
    loaded: Loaded, native: Native, rows: Sequence[Row], package: Path, out: Path
) -> None:
    """Write the folder `c/` into `out`.

    `package` holds the cubins, and `rows` are the kernels of its manifest.
    """
    name, root = prefix_of(loaded), template_root()
    folder = out / FOLDER
    folder.mkdir()
    for file in AS_THEY_ARE:
        shutil.copyfile(root / "c" / file, folder / file)
    license = loaded.spec.license.in_comment()
    if native.kernels is not None:
        rows = [row for row in rows if row["kernel"] in native.kernels]
    tables = [_resolved(table, rows) for table in native.tiles]
    files = {
        f"{name}.h": native.header,
        f"{name}.c": with_tables(native.program, tables),
        "example.cpp": native.example,
        f"{name}_cubins.inc": _machine_code(name, license, native, rows, package),
        "CMakeLists.txt": Build(name=name, license=license),
    }
    for file, template in files.items():
        text = rendered(template).rstrip("\n") + "\n"
        text = text if isinstance(template, Build) else laid_out_in_c(text)
        (folder / file).write_text(text, encoding="utf-8")


def _machine_code(
    name: str, license: str, native: Native, rows: Sequence[Row], package: Path
) -> MachineCode:
    """Return the images and rows.

    Rows of a kernel for a chip are sorted, the most specific first.
    """
    known = frozenset(native.names)
    unknown = {n for row in rows for n, *_ in row["arguments"] if n not in known}
    unknown |= {n for row in rows for n in row["options"] if n not in known}
    if unknown:
        raise ValueError(
            f"the launcher of {name} in C has no value for kernel arguments {sorted(unknown)}"
        )
    ordered = sorted(rows, key=lambda row: (row["kernel"], row["capability"], -_strictness(row)))
    files = dict.fromkeys(row["file"] for row in ordered)
    images = {
        file: Image(file, f"image_{i}", _words((package / file).read_bytes()))
        for i, file in enumerate(files)
    }
    return MachineCode(
        name=name,
        license=license,
        hint=native.hint,
        kernels=tuple(sorted({row["kernel"] for row in rows})),
        names=tuple(native.names),
        images=tuple(images.values()),
        cubins=tuple(_cubin(i, row, images[row["file"]].name) for i, row in enumerate(ordered)),
    )


def _strictness(row: Row) -> int:
    """Return the number of constants and aligned arguments, as `Cubin.strictness` of the
    runtime.
    """
    return sum(value is True or kind == "constexpr" for _, kind, value in row["arguments"])


def _words(image: bytes) -> str:
    padded = image + bytes(-len(image) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    return "\n".join(
        ",".join(f"{word:#x}" if word else "0" for word in words[at : at + 16]) + ","
        for at in range(0, len(words), 16)
    )


def _cubin(number: int, row: Row, image: str) -> Cubin:
    if len(row["parameters"]) > MOST_PARAMETERS or len(row["maps"]) > MOST_MAPS:
        raise ValueError(
            f"{row['kernel']} has {len(row['parameters'])} parameters and {len(row['maps'])} TMA "
            "descriptors: "
            f"a launch from C holds at most {MOST_PARAMETERS} and {MOST_MAPS}"
        )
    return Cubin(
        number=number,
        kernel=row["kernel"],
        capability=row["capability"],
        image=image,
        symbol=row["symbol"],
        threads=32 * row["warps"],
        shared=row["shared"],
        programmatic=int(row["programmatic"]),
        cooperative=int(row["cooperative"]),
        arguments=(*_arguments(row), *_options(row)),
        maps=tuple(_maps(row)),
    )


def _maps(row: Row) -> Iterator[Map]:
    described = [kind for _, kind, _ in row["arguments"] if kind.startswith("tensordesc<")]
    for m, kind in zip(row["maps"], described, strict=True):
        tile = kind.partition("[")[2].partition("]")[0].split(", ")
        yield Map(m["elem_type"], m["elem_size"], m["swizzle"], tuple(tile), tuple(m["block_size"]))


def _arguments(row: Row) -> Iterator[Argument]:
    maps = 0
    for name, kind, value in row["arguments"]:
        if kind == "constexpr":
            yield _constant(name, value)
        elif kind.startswith("tensordesc<"):
            dtype = kind.partition("<")[2].partition("[")[0]
            yield Argument(name, "TILES", dtype=f"KGEN_{dtype.upper()}", map=maps)
            maps += 1
        elif kind.startswith("*"):
            dtype = ELEMENTS.get(kind[1:], kind[1:].upper())
            yield Argument(name, "POINTER", dtype=f"KGEN_{dtype}", aligned=int(value is True))
        elif kind == "fp32":
            yield Argument(name, "REAL")
        else:
            yield Argument(name, "INTEGER", aligned=int(value is True), bits=INTEGERS[kind])


def _options(row: Row) -> Iterator[Argument]:
    for name, value in row["options"].items():
        yield _constant(name, value)


def _constant(name: str, value: Any) -> Argument:
    if value is None:
        return Argument(name, "NOTHING", constant=1)
    if isinstance(value, float):
        return Argument(name, "REAL", constant=1, real=repr(value))
    return Argument(name, "INTEGER", constant=1, integer=int(value))


def _resolved(table: Tiles, rows: Sequence[Row]) -> Table:
    """Return the tiles of each chip that have machine code, in the table's order."""
    chips = sorted({row["capability"] for row in rows})
    found = list[tuple[int, ...]]()
    for chip in chips:
        compiled = [
            {name: value for name, kind, value in row["arguments"] if kind == "constexpr"}
            | row["options"]
            for row in rows
            if row["kernel"] == table.kernel and row["capability"] == chip
        ]
        for names, tile in table.rows:
            there = not table.kernel or any(
                all(constants[n] == value for n, value in tile.items()) for constants in compiled
            )
            if there and (chip in names or not names):
                found.append((chip, *map(int, tile.values())))
    fields = max((len(tile) for _, tile in table.rows), default=0)
    return Table(table.name, table.struct, tuple(found), (0,) * (1 + fields))
