"""The C side of packages: it makes the same launches as the Python side, and reports errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.packages.c_calls import (
    Case,
    attention_launches,
    chunk_launches,
    differences,
    norm_launches,
)
from support.packages.c_layers import LAYER_CASES, layer_launches
from support.packages.c_on_paper import Library, Paper, loaded_package, packages_on_paper

from kgen.kernels.attention.schedules.decode.plan import decodes
from kgen.spec.load import load

ROOT = Path(__file__).resolve().parents[2]
FEW = ("causal_alibi", "varlen_alibi", "decode_gqa", "causal_images", "layer_norm")
FEW += ("gated_delta_output_varlen", "retention_output", "retnet")
MANY = (
    *(
        "causal",
        "full",
        "sliding_window",
        "llama3_gqa",
        "gemma2",
        "gpt_oss",
        "document_causal",
        "mla_prefill",
    ),
    *(
        "rms_norm",
        "qk_norm",
        "fused_add_rms_norm",
        "gated_rms_norm",
        "causal_d64",
        "causal_fp32",
        "padding",
    ),
    *("prefix_lm", "softcap_causal", "siglip", "varlen_causal", "head_scale", "relative_bias"),
    *("gated_delta_output", "gated_delta_output_fla", "linear_attention_output"),
    *("gated_delta_rule", "gated_delta_net", "kda", "gla", "mamba2", "linear_attention_elu"),
    *("decode_alibi", "decode_sliding_window", "decode_paged", "natten_2d", "block_sparse"),
)
"""Other stock specs that are called from C."""
Packages = Callable[[str], Path]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Return a function that builds the package of a spec and returns its folder.

    The packages have fake machine code. Each is built once, and several in parallel.
    """
    folder = tmp_path_factory.mktemp("paper")

    def made(*specs: str) -> None:
        packages_on_paper(folder, specs)

    @cache
    def package(spec: str) -> Path:
        if not (folder / spec).exists():
            made(*(FEW if spec in FEW else [spec]))
        return folder / spec

    return package


CASES = (
    Case(),
    Case(sq=256, sk=256, layout="bshd", dlse=True, group=2),
    Case(layout="guarded", dlse=True),
    Case(layout="columns"),
    Case(batch=1, heads=1, sq=1, sk=1),
    Case(batch=1, sq=130, sk=130, layout="offset", group=4),
    Case(batch=1, heads=2, sq=192, sk=4096, dlse=True),
    Case(batch=1, heads=2, sq=4096, sk=4096, deterministic=True),
    Case(batch=1, heads=2, sq=4096, sk=4096, multiprocessors=50),
    Case(batch=1, heads=2, sq=2500, sk=2500),
    Case(sq=0, sk=128),
    Case(sq=128, sk=0),
)
FEW_QUERIES = (
    Case(batch=1, sq=1, sk=5000),
    Case(batch=1, heads=1, sq=4, sk=5000, group=2, layout="bshd", multiprocessors=50),
    Case(batch=1, heads=8, sq=64, sk=300, layout="guarded", multiprocessors=4),
    Case(batch=1, sq=65, sk=200, group=4),
    Case(batch=1, sq=1, sk=64, multiprocessors=132),
    Case(batch=1, sq=3, sk=0),
    Case(batch=1, sq=0, sk=128),
)
"""Decoding cases: some fill a device, in some the keys are split. Packages with fake machine code
have one sequence.
"""
NORM_CASES = (
    Case(sq=3, sk=1024, multiprocessors=4),
    Case(sq=700, sk=512, dlse=True, multiprocessors=4),
    Case(sq=5, sk=512, layout="guarded", multiprocessors=4),
    Case(sq=3, sk=16384, multiprocessors=4),
    Case(sq=0, sk=512, multiprocessors=4),
)
CHUNK_CASES = (
    Case(heads=8, sq=256),
    Case(heads=8, sq=133, sk=7, group=2),
    Case(batch=1, heads=8, sq=1, sk=1, group=4),
    Case(batch=3, heads=8, sq=64, sk=0, layout="offset"),
    Case(heads=8, layout="guarded", group=2),
    Case(heads=8, sq=0, sk=0),
    Case(heads=8, sq=0, sk=0, spare=1),
    Case(heads=8, sq=70, spare=2),
)
LAUNCHES = {
    "attention": attention_launches,
    "norm": norm_launches,
    "chunk_output": chunk_launches,
    "linear_attention": layer_launches,
}


def compared(package: Path, name: str, arch: int) -> list[str]:
    """Return the differences between launches from C and from Python, as text."""
    loaded = load(ROOT / "specs" / f"{name}.yaml")
    paper, library = Paper(package), Library(package, name)
    launcher = loaded_package(package, f"{name}_on_paper")
    found: list[str] = []
    for case in cases_of(loaded):
        want, got = LAUNCHES[loaded.spec.kernel](paper, library, launcher, loaded, case, arch)
        assert any(want.values()) or 0 in (case.sq, case.sk)
        found += [f"{case}: {said}" for said in differences(want, got)]
    return found


def cases_of(loaded: Any) -> list[Case]:
    """Return the cases that a spec accepts."""
    if loaded.spec.kernel == "chunk_output":
        return [c for c in CHUNK_CASES if loaded.spec.varlen or not c.spare]
    if loaded.spec.kernel == "linear_attention":
        return [*LAYER_CASES]
    if loaded.spec.kernel == "norm":
        width = loaded.spec.width
        if loaded.spec.heads is not None:
            return [replace(c, heads=8, sk=64) for c in NORM_CASES]
        cases = (
            [replace(c, sk=width) for c in NORM_CASES] if isinstance(width, int) else [*NORM_CASES]
        )
        return cases
    if decodes(loaded):
        return [*FEW_QUERIES]
    tied = any("SQ" in b.shape or "SK" in b.shape for b in loaded.spec.buffers.values())
    # Packed sequences without queries still launch programs, and the pointer of an empty
    # log-sum-exp is NULL.
    return [c for c in CASES if (not tied or c.sq == c.sk) and (c.sq or not loaded.spec.varlen)]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(n, marks=pytest.mark.thorough) for n in MANY)]
)
def test_c_launches_what_python_does(name: str, arch: int, packages: Packages) -> None:
    assert compared(packages(name), name, arch) == []
