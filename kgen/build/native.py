"""The folder `c/` of a package: its kernels called from C and C++, through the driver alone.

What a family says of a spec (`kgen.targets.native`) and what the compiler says of machine code become the names of
templates. Rows of machine code lie in the order in which they are tried, as in the runtime for Python.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kgen.diagnostics import Diagnostic, KgenError
from kgen.family import family
from kgen.render.environment import environment, template_root
from kgen.spec.load import Loaded
from kgen.targets.native import Native, Tiles, prefix_of

FOLDER = "c"
AS_THEY_ARE = ("kgen.h", "kgen_driver.h", "kgen_runtime.h", "kgen_calls.h", "kgen_example.h")
"""Files of `templates/c` that are the same in all packages."""
MOST_PARAMETERS, MOST_MAPS = 158, 16
"""Of `kgen_launch`, which holds them in arrays."""
ELEMENTS = {"u1": "I1"}
"""What the runtime in C calls a dtype that Tritons have several names for."""
INTEGERS = {"i8": 8, "u8": 8, "i16": 16, "i32": 32, "u32": 32, "i64": 64, "u64": 64}

Row = Mapping[str, Any]
Fields = dict[str, Any]


def native_of(loaded: Loaded, sizes: Mapping[str, Sequence[int]], chips: Collection[int]) -> Native:
    """What a spec says of calls from C; `sizes` are those of what it leaves open, `chips` those that there is machine
    code for. Raises `KgenError` where there are none."""
    prefix_of(loaded)
    target = family(loaded.spec.kernel).targets["triton"]
    if target.native is None:
        message = f"`{loaded.spec.name}` cannot be called from C: `{loaded.spec.kernel}` is called from Python alone"
        raise KgenError(Diagnostic("no-c", message, file=str(loaded.path), hint="leave `--c` out"))
    found: Native = target.native(loaded, sizes, chips)
    return found


def write_native(loaded: Loaded, native: Native, rows: Sequence[Row], package: Path, out: Path) -> None:
    """Write the folder into `out`, for a package that has its cubins. `rows` are those of the manifest."""
    name, root = prefix_of(loaded), template_root()
    folder = out / FOLDER
    folder.mkdir()
    for file in AS_THEY_ARE:
        shutil.copyfile(root / "c" / file, folder / file)
    context = {
        **native.context,
        **_machine_code(native, rows, package),
        "hint": native.hint,
        "tables": [_resolved(table, rows) for table in native.tables],
    }
    common = {"_cubins.inc": "c/_cubins.inc.j2", "CMakeLists.txt": "c/CMakeLists.txt.j2"}
    for ending, template in {**native.templates, **common}.items():
        file = f"{name}{ending}" if ending[0] in "._" else ending
        text = environment(root).get_template(template).render(context)
        (folder / file).write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _machine_code(native: Native, rows: Sequence[Row], package: Path) -> Fields:
    """Images and rows, those of a kernel for a chip that ask for most first."""
    numbers = {name: i for i, name in enumerate(native.names)}
    unknown = {n for row in rows for n, *_ in row["arguments"] if n not in numbers}
    unknown |= {n for row in rows for n in row["options"] if n not in numbers}
    if unknown:
        raise ValueError(f"nothing gives kernels of {native.context['name']} these: {sorted(unknown)}")
    ordered = sorted(rows, key=lambda row: (row["kernel"], row["capability"], -_strictness(row)))
    files = list(dict.fromkeys(row["file"] for row in ordered))
    images = {file: f"image_{i}" for i, file in enumerate(files)}
    return {
        "kernels": sorted({row["kernel"] for row in rows}),
        "names": list(native.names),
        "images": [
            {"file": file, "name": name, "words": _words((package / file).read_bytes())}
            for file, name in images.items()
        ],
        "cubins": [_cubin(i, row, images[row["file"]]) for i, row in enumerate(ordered)],
    }


def _strictness(row: Row) -> int:
    """As `Cubin.strictness` of the runtime."""
    return sum(value is True or kind == "constexpr" for _, kind, value in row["arguments"])


def _words(image: bytes) -> str:
    padded = image + bytes(-len(image) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    return "\n".join(
        ",".join(f"{word:#x}" if word else "0" for word in words[at : at + 16]) + ","
        for at in range(0, len(words), 16)
    )


def _cubin(number: int, row: Row, image: str) -> Fields:
    arguments = [*_arguments(row), *_options(row)]
    if len(row["parameters"]) > MOST_PARAMETERS or len(row["maps"]) > MOST_MAPS:
        raise ValueError(f"{row['kernel']} has more parameters than a launch from C holds")
    described = [kind for _, kind, _ in row["arguments"] if kind.startswith("tensordesc<")]
    name, maps = f"arguments_{number}", f"maps_{number}" if row["maps"] else "NULL"
    fields = [f"K{row['kernel']}", row["capability"], image, f'"{row["symbol"]}"', 32 * row["warps"]]
    fields += [row["shared"], int(row["programmatic"]), int(row["cooperative"]), len(arguments), name, maps]
    return {
        "arguments": name,
        "rows": arguments,
        "map_name": maps,
        "maps": [
            {
                "numbers": [m["elem_type"], m["elem_size"], m["swizzle"], len(m["block_size"])],
                "tile": kind.partition("[")[2].partition("]")[0].split(", "),
                "block": m["block_size"],
            }
            for m, kind in zip(row["maps"], described, strict=True)
        ],
        "fields": fields,
    }


def _arguments(row: Row) -> Iterator[list[Any]]:
    """Of `kgen_argument`: name, constant, kind, dtype, aligned, bits, map, integer, real."""
    maps = 0
    for name, kind, value in row["arguments"]:
        if kind == "constexpr":
            yield _constant(name, value)
        elif kind.startswith("tensordesc<"):
            dtype = kind.partition("<")[2].partition("[")[0]
            yield [f"A_{name}", 0, "KGEN_TILES", f"KGEN_{dtype.upper()}", 0, 0, maps, 0, 0]
            maps += 1
        elif kind.startswith("*"):
            dtype = ELEMENTS.get(kind[1:], kind[1:].upper())
            yield [f"A_{name}", 0, "KGEN_POINTER", f"KGEN_{dtype}", int(value is True), 0, 0, 0, 0]
        elif kind == "fp32":
            yield [f"A_{name}", 0, "KGEN_REAL", 0, 0, 0, 0, 0, 0]
        else:
            yield [f"A_{name}", 0, "KGEN_INTEGER", 0, int(value is True), INTEGERS[kind], 0, 0, 0]


def _options(row: Row) -> Iterator[list[Any]]:
    for name, value in row["options"].items():
        yield _constant(name, value)


def _constant(name: str, value: Any) -> list[Any]:
    if value is None:
        return [f"A_{name}", 1, "KGEN_NOTHING", 0, 0, 0, 0, 0, 0]
    if isinstance(value, float):
        return [f"A_{name}", 1, "KGEN_REAL", 0, 0, 0, 0, 0, repr(value)]
    return [f"A_{name}", 1, "KGEN_INTEGER", 0, 0, 0, 0, int(value), 0]


def _resolved(table: Tiles, rows: Sequence[Row]) -> Fields:
    """The tiles of each chip that there is machine code for, in their order."""
    chips = sorted({row["capability"] for row in rows})
    found = []
    for chip in chips:
        compiled = [
            {name: value for name, kind, value in row["arguments"] if kind == "constexpr"} | row["options"]
            for row in rows
            if row["kernel"] == table.kernel and row["capability"] == chip
        ]
        for names, tile in table.rows:
            there = not table.kernel or any(
                all(constants[n] == value for n, value in tile.items()) for constants in compiled
            )
            if there and (chip in names or not names):
                found.append([chip, *map(int, tile.values())])
    fields = max((len(tile) for _, tile in table.rows), default=0)
    return {"name": table.name, "struct": table.struct, "rows": found, "end": [0] * (1 + fields)}
