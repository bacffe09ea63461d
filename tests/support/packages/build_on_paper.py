"""Packages as `kgen build --c` writes them, with fake machine code:
`build_on_paper.py OUT [ARCH...] SPEC...`.

The fake compiler only returns its input: the arguments as Triton specializes them, and the options.
A launch depends on nothing else.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kgen.render.rendering import render_spec
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[3]
ARCHS = ("sm_80", "sm_90a")
SIZES = {"gqa": (1, 2, 4), "batch": (1, 2), "width": (512, 1024, 16384), "heads": (8,)}
TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}
"""Constants of cuda.h."""


def image_of(name: str) -> bytes:
    """Return fake machine code: a valid header and a hash of `name`."""
    content = hashlib.sha256(name.encode()).digest()
    size = 64 + len(content)
    return struct.pack("<32xQQ6x4H2x", 0, size, 0, 0, 0, 0) + content


def compiled(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """Replace `triton.compile`."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    name = source.fn.__name__
    host = (
        {number: code for code, number in enumerate(TMA_DTYPE_DEVICE_TO_HOST)}
        if isinstance(TMA_DTYPE_DEVICE_TO_HOST, list)
        else {number: code for code, number in TMA_DTYPE_DEVICE_TO_HOST.items()}
    )
    maps = []
    for kind in source.signature.values():
        if isinstance(kind, str) and kind.startswith("tensordesc<"):
            dtype, _, rest = kind.removeprefix("tensordesc<").partition("[")
            block = [int(n) for n in rest.partition("]")[0].split(",")]
            size = 4 if dtype == "fp32" else 2
            moved = [*block[:-1], min(block[-1], 128 // size)]
            maps.append(
                {
                    "swizzle": 3,
                    "elem_size": size,
                    "elem_type": host[TYPES[dtype]],
                    "block_size": moved,
                }
            )
    known = {path: what for path, what in source.attrs.items() if what}
    said = repr((name, target, source.signature, source.constants, known, sorted(options.items())))
    metadata = SimpleNamespace(
        name=name,
        num_ctas=1,
        global_scratch_size=0,
        profile_scratch_size=0,
        num_warps=options["num_warps"] + 8 * ("hopper" in name),
        shared=len(name) * 4096,
        launch_pdl=options["launch_pdl"],
        launch_cooperative_grid=options["launch_cooperative_grid"],
        tensordesc_meta=maps,
    )
    digest = hashlib.sha256(said.encode()).hexdigest()
    return SimpleNamespace(
        hash=digest, src=source, metadata=metadata, asm={"cubin": image_of(said)}
    )


def worker(
    module: str, build: Any, timeout: float, environment: Mapping[str, Any]
) -> Iterator[Any]:
    """Replace the process that compiles."""
    from kgen.build import compile_triton

    rows: list[Any] = []
    sizes: list[int] = []

    def parameters(image: bytes) -> list[tuple[int, int]]:
        return [(0, size) for size in sizes]

    row = compile_triton._row

    def row_of(job: Any, launch: Any, kernel: Any) -> dict[str, Any]:
        sizes[:] = [struct.calcsize(form) for form in forms_of(kernel)]
        return row(job, launch, kernel)

    with (
        mock.patch("triton.compile", compiled),
        mock.patch("triton.compiler.compile", compiled),
        mock.patch.object(compile_triton, "resources", return_value=(0, 0)),
        mock.patch.object(compile_triton, "parameters", parameters),
        mock.patch.object(compile_triton, "_row", row_of),
    ):
        compile_triton.build_all(build, lambda said: rows.append(dict(said)))
    yield from rows


def forms_of(kernel: Any) -> list[str]:
    """Return the `struct` format of each parameter of a kernel."""
    from kgen.build.runtime.parameters import forms_of as formats

    kinds = [kind for kind in kernel.src.signature.values() if kind != "constexpr"]
    return [form for kind in kinds for form in formats(kind)] + ["Q", "Q"]


def build(out: Path, specs: list[str], archs: Sequence[str] = ARCHS) -> None:
    """Build packages of specs, by name or path."""
    from kgen.build.package import BuildOptions, build_specs

    for name in specs:
        loaded = load(name if name.endswith(".yaml") else ROOT / "specs" / f"{name}.yaml")
        for file, text in render_spec(loaded).items():
            path = out / "generated" / loaded.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        with mock.patch("kgen.build.package.messages", worker):
            chips = archs[getattr(loaded.spec, "quantize", None) is not None :]
            options = BuildOptions(chips, SIZES, targets=["triton"], c=True)
            rows = build_specs([loaded], out / "generated", out, options)
        assert all(row["ok"] for row in rows), rows


if __name__ == "__main__":
    chips = [name for name in sys.argv[2:] if name.startswith("sm_")]
    build(Path(sys.argv[1]), [name for name in sys.argv[2:] if name not in chips], chips or ARCHS)
