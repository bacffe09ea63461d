"""Emitted kernels against float64 in Triton's interpreter: stock specs, and the corners that none of them has.

`tests/specs` holds gradients that are scattered by a computed index, repeated reads of one buffer, guarded
indices, head dims that are not powers of two, promised lengths, run-time parameters, fp32 without tensor
cores, and integers of 64 bits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from apart import verified

from kgen.kernels.attention.plan.planning import plan_attention
from kgen.render.rendering import render_spec
from kgen.spec.load import load
from kgen.verify.families import family_of, problem_of
from kgen.verify.worker import case_names

ROOT = Path(__file__).resolve().parent.parent
CORNERS = sorted((ROOT / "tests" / "specs").glob("*.yaml"))
STOCK = [
    ROOT / "specs" / f"{name}.yaml"
    for name in (
        *("causal_alibi", "document_causal", "longformer", "pair_bias", "decode_gqa", "decode_paged"),
        "gated_delta_output_varlen",
    )
]


def emitted(path: Path, folder: Path) -> Path:
    """A folder of generated files with those of one spec."""
    loaded = load(path)
    (folder / loaded.spec.name).mkdir(parents=True)
    for name, text in render_spec(loaded).items():
        (folder / loaded.spec.name / name).write_text(text)
    return folder


SLOW = {
    **dict.fromkeys(("chunk_wide", "gated_delta_output_varlen", "packed_narrow", "packed_learned"), 9),
    **dict.fromkeys(
        ("documents_of_64_bits", "lengths_of_64_bits", "mixed_widths", "searched_for_64_bits"), 99
    ),
    "hashed": 16,
    **dict.fromkeys(("broad", "filled", "filled_broad", "filled_narrow", "promised_full"), 9),
    **dict.fromkeys(("learned_slopes", "packed_table", "promised_window", "steps"), 5),
    **dict.fromkeys(("clusters", "listed_heads", "packed"), 5),
    **dict.fromkeys(("chunk_mixed", "decode_small_pages", "listed_anyway", "ragged_cache", "sunk"), 3),
    **dict.fromkeys(("constants", "ends_by_head"), 3),
    **dict.fromkeys(
        ("decode_gqa", "decode_heads", "decode_paged", "norm_bare", "norm_modified", "norm_rounded"), 2
    ),
}
"""Specs that take long in the interpreter, and of how many of their cases one runs here; `kgen verify` runs all."""


LONG = (
    *("apart", "batched_documents", "broad_full", "broad_images", "broad_learned", "broad_padded"),
    *(
        "packed_broad",
        "packed_latent",
        "packed_softcap",
        "packed_window",
        "near",
        "pages_of_256",
        "by_distance",
    ),
)
"""Specs that take longest, which `scripts/test --all` runs; otherwise their verdict has to be on record."""


@pytest.mark.parametrize(
    "path", [path for path in CORNERS + STOCK if path.stem not in LONG], ids=lambda p: p.stem
)
def test_verified_in_the_interpreter(path: Path, tmp_path: Path, verdict: Any) -> None:
    _verify(path, emitted(path, tmp_path), verdict)


@pytest.mark.thorough
@pytest.mark.parametrize("path", [path for path in CORNERS if path.stem in LONG], ids=lambda p: p.stem)
def test_verdicts_of_the_interpreter(path: Path, tmp_path: Path, verdict: Any) -> None:
    _verify(path, emitted(path, tmp_path), verdict)


def _verify(path: Path, folder: Path, verdict: Any) -> None:
    loaded = load(path)
    problem = problem_of(loaded)
    verdict(problem, folder)
    names = dict.fromkeys(
        name
        for group in family_of(problem).groups(problem)
        for name in case_names(problem, group, "cpu", True)
    )
    step = SLOW.get(path.stem, 1)
    cases = [name for i, name in enumerate(names) if i % step == 0 or name == "ints-wide"]
    rows = verified([loaded], folder, device="cpu", timeout=120.0, cases=cases)
    passes = {"forward", "backward"} if "backward" in loaded.spec.passes else {"forward"}
    assert {row["pass"] for row in rows} == passes
    wrong = [f"{row['pass']} {row['case']}: {row['message']}" for row in rows if not row["ok"]]
    assert not wrong, "\n".join(wrong)


FIRST_CALL = """
import sys
import torch
sys.path.insert(0, {folder!r})
from sample import {name}
tensors = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in {shapes}]
{name}(*tensors).sum().backward()
assert tensors[0].grad is not None
assert "torch._dynamo" not in sys.modules, "imports all of torch.compile"
"""


@pytest.mark.parametrize(
    ("name", "file", "shapes"),
    [
        ("full", "triton.py", [(1, 1, 16, 128)] * 3),
        ("rms_norm", "triton.py", [(2, 64), (64,)]),
        ("rms_norm", "", [(2, 64), (64,)]),
    ],
    ids=["full", "rms_norm", "a folder"],
)
def test_a_first_call_imports_what_it_needs(
    name: str, file: str, shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """What registers an operator, or chooses a file, must not import torch.compile: seconds of each process."""
    if file:
        shutil.copy(ROOT / "generated" / name / file, tmp_path / "sample.py")
    else:
        shutil.copytree(ROOT / "generated" / name, tmp_path / "sample")
    script = FIRST_CALL.format(folder=str(tmp_path), name=name, shapes=shapes)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("head_dim", [1, 16, 24, 40, 64, 72, 80, 96, 120, 192, 200, 256, 576])
def test_blocks_of_a_head_dim(head_dim: int, tmp_path: Path) -> None:
    """Every column is in one block; two blocks of one size would be one (Triton 3.6 confuses their loads)."""
    path = tmp_path / "x.yaml"
    path.write_text(f"kernel: attention\nname: x\ndtype: bf16\nhead_dim: {head_dim}\n")
    chunks = plan_attention(load(path)).qk_chunks
    assert sum(c.width for c in chunks) == head_dim
    assert all(c.size >= 16 and c.size & (c.size - 1) == 0 and c.width <= c.size for c in chunks)
    assert [c.start for c in chunks] == [0, chunks[0].size][: len(chunks)]
    assert len({c.size for c in chunks}) == len(chunks)
    assert sum(c.size for c in chunks) < 2 * max(head_dim, 16)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "generated").glob("*/triton.py")), ids=lambda p: p.parent.name
)
def test_no_remainder_by_zero(path: Path) -> None:
    """A pipelined loop computes addresses ahead of its first iteration, also when it has none.

    A remainder by the number of tiles would then be one by zero, from which the compiler concludes that there
    are tiles: kernels have hung because of it.
    """
    text = path.read_text()
    assert text.count("% wrap *") == text.count("wrap = tl.maximum(n_tiles, 1)")
    assert "turn) % n_tiles" not in text
