"""Machine code of Hopper kernels: mistakes and omissions of ptxas that the source does not show."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.compiling import CompileOptions, compile_specs
from kgen.verify.families import problem_of

ROOT = Path(__file__).resolve().parents[3]
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


@pytest.fixture
def compiled(compile_once: Callable[[str], Path], verdict: Any) -> Callable[[str], Path]:
    """Return a function that compiles a spec for Hopper and returns Triton's output folder.

    It ends the test if its verdict is on record.
    """

    def folder(name: str) -> Path:
        loaded = load(_spec(name))
        verdict(problem_of(loaded), *render_spec(loaded).values())
        return compile_once(name)

    return folder


def _spec(name: str) -> Path:
    paths = (ROOT / folder / f"{name}.yaml" for folder in ("specs", "tests/specs"))
    return next(path for path in paths if path.exists())


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:

    @functools.cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        spec = load(_spec(name))
        (path / name).mkdir()
        for file, text in render_spec(spec).items():
            (path / name / file).write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_CACHE_DIR", str(path / "cache"))
            options = CompileOptions(["sm_90"], targets=["triton"])
            assert not any(row["error"] for row in compile_specs([spec], path, options))
        return path / "cache"

    return folder


@pytest.mark.parametrize("name", ["sliding_window", "packed_latent", "causal_d64", "gpt_oss"])
def test_what_is_stored_is_not_where_a_barrier_is(
    name: str, compiled: Callable[[str], Path]
) -> None:
    """Triton reuses the memory of unused barriers for other data.

    The GPU lost this data when it switched between processes.
    """
    kernels = list(compiled(name).rglob("*_hopper_kernel.cubin"))
    assert kernels
    for path in kernels:
        code = subprocess.run(
            [NVDISASM, "-c", path], capture_output=True, text=True, check=True
        ).stdout
        barriers, stored = _places(code)
        assert len(barriers) > 8
        assert stored
        assert not barriers & stored, path.name


def test_a_place_of_two_is_found() -> None:
    code = (
        "SYNCS.EXCH.64 URZ, [UR5+0x30400], UR16 ;\n@P0 STS [UR14+0x30400], R4 ;\n"
        "STS.64 [UR4+0x30480], R2 ;\n"
    )
    barriers, stored = _places(code)
    assert barriers & stored == {0x30400}


def _places(code: str) -> tuple[set[int], set[int]]:
    """Return the shared memory addresses of the words of barriers, and of other stores."""
    barriers = {int(x, 16) for x in re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x\w+)\]", code)}
    stored = {int(x, 16) for x in re.findall(r"STS\S* \[UR\d+\+(0x\w+)\]", code)}
    return barriers | {at + 4 for at in barriers}, stored


# Operands in registers: Q of a half or a third of a tile, or in two parts. Also K, whole or in two
# parts, and K and V.
@pytest.mark.parametrize(
    ("name", "kernels"),
    [("sliding_window", 1), ("packed_latent", 2), ("causal_d64", 2), ("gpt_oss", 1)],
)
def test_operands_in_registers_stay(
    name: str, kernels: int, compiled: Callable[[str], Path]
) -> None:
    held = set()
    for path in compiled(name).rglob("*_hopper_kernel.cubin"):
        code = subprocess.run(
            [NVDISASM, "-c", path], capture_output=True, text=True, check=True
        ).stdout
        found = _held(code)
        assert not any(overwritten for _, overwritten in found), path.name
        held |= {path.name for outside, _ in found if outside}
    assert len(held) == kernels


def test_an_operand_that_is_overwritten_is_found() -> None:
    code = """
.L_x_1:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, R132, gdesc[UR16], RZ, !UPT ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R136, gdesc[UR16], R24, gsb0 ;
        /*0030*/                   F2FP.BF16.F32.PACK_AB R133, R23, R22 ;
        /*0038*/                   HGMMA.64x64x16.F32.BF16 R56, R132, gdesc[UR16], R56, gsb0 ;
        /*0040*/              @P0 BRA `(.L_x_1) ;
"""
    assert _held(code) == [(set(range(132, 140)), {133})]


@pytest.mark.parametrize("name", ["sliding_window", "packed_latent", "causal_d64"])
def test_a_slot_is_freed_after_its_loads(name: str, compiled: Callable[[str], Path]) -> None:
    """The slot of Q: Q goes to registers while TMA waits to write Q of the next tile."""
    kernels = [path.read_text() for path in compiled(name).rglob("_forward_hopper_kernel.ptx")]
    assert kernels
    for code in kernels:
        assert "ldmatrix" in code
        assert _all_fenced(code)


def test_a_slot_that_is_freed_too_early_is_found() -> None:
    code = (
        "ldmatrix.sync {%r1}, [%r9];\nbar.sync 0, 128;\nmbarrier.arrive.shared::cta.b64 _, [%r2];\n"
    )
    assert not _all_fenced(code)
    assert _all_fenced(code.replace("bar", "fence.proxy.async.shared::cta;\nbar", 1))


def _all_fenced(code: str) -> bool:
    """True if a fence is between `ldmatrix` and the next arrival at a barrier.

    Without a fence, ptxas allows loads to be in flight when the thread arrives. TMA uses another
    proxy and would overwrite their source.
    """
    before = code.split("mbarrier.arrive.shared::cta.b64")[:-1]
    return all(
        "fence.proxy.async" in x.rpartition("ldmatrix")[2] for x in before if "ldmatrix" in x
    )


def _held(code: str) -> list[tuple[set[int], set[int]]]:
    """Return two sets of registers for each innermost loop with products.

    The first set has left operands from outside the loop or from the previous iteration. The second
    set has the registers that later hold another left operand.
    """
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            lines.append(instruction[1])
    jumps = [
        (labels.get(m[1], i), i)
        for i, x in enumerate(lines)
        if (m := re.search(r"BRA.*`\((\.\w+)\)", x))
    ]
    loops = [(a, b) for a, b in jumps if a < b and any("HGMMA" in x for x in lines[a:b])]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return [_of_loop(lines[a : b + 1]) for a, b in inner]


def _of_loop(lines: list[str]) -> tuple[set[int], set[int]]:
    outside: set[int] = set()
    inside: set[int] = set()
    written: set[int] = set()
    for line in lines:
        if product := re.match(r"HGMMA\S* R\d+, R(\d+)", line):
            left = set(range(int(product[1]), int(product[1]) + 4))
            outside |= left - written
            inside |= left & written
        elif result := re.match(r"(?!HGMMA|ST|RED|BAR|SYNCS)(\S+) R(\d+)", line):
            four, two = (
                any(x in result[1] for x in sizes)
                for sizes in (("M88.4", ".128"), (".64", "CS2R", "WIDE"))
            )
            written |= set(range(int(result[2]), int(result[2]) + (4 if four else 2 if two else 1)))
    return outside, outside & inside


@pytest.mark.thorough
def test_a_bias_of_pairs_is_copied_16_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Any
) -> None:
    """Portable kernels copy 16 bytes at a time in tiles without a mask, if rows are aligned to 16
    bytes.

    A guard that differs between keys would force copies of 4 bytes.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "pair_bias.yaml"
    text = (ROOT / "specs" / "pair_bias.yaml").read_text()
    path.write_text(
        text.replace(", grad: true", "").replace("passes: [forward, backward]", "passes: [forward]")
    )
    spec = load(path)
    (tmp_path / "pair_bias").mkdir()
    for file, text in render_spec(spec).items():
        (tmp_path / "pair_bias" / file).write_text(text)
    verdict(problem_of(spec), tmp_path / "pair_bias")
    options = CompileOptions(["sm_100"], targets=["triton"])
    assert not any(row["error"] for row in compile_specs([spec], tmp_path, options))
    ptx = [path.read_text() for path in (tmp_path / "cache").rglob("_forward_kernel.ptx")]
    by_tma = [text for text in ptx if "cp.async.bulk.tensor" in text]  # K and V
    wide = [
        re.search(r"cp\.async\.cg\.shared\.global .*, 0x10, %r\d+;", text) is not None
        for text in by_tma
    ]
    # Aligned rows and other rows, each with and without the log-sum-exp.
    assert sorted(wide) == [False, False, True, True]
