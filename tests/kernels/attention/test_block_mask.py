"""Block masks: the masks that get one, and a check of all pairs of the emitted lists."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.interpreters.own_process import verified
from torch.nn.attention.flex_attention import create_block_mask

from kgen.expr.nodes import Type
from kgen.expr.parse import parse_expression
from kgen.expr.scope import Scope
from kgen.kernels.attention.bench.block_mask import listed
from kgen.kernels.attention.explaining import explain as page_of
from kgen.kernels.attention.plan.block_mask import BLOCK_SIZE, period
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.verify.block_mask import _listed, block_kinds
from kgen.pages.model import Drawing
from kgen.pages.text import text as printed
from kgen.render.rendering import render_spec
from kgen.spec.load import Loaded, load, loads
from kgen.verify.families import problem_of

ROOT = Path(__file__).resolve().parents[3]
LISTED = [
    ROOT / "specs" / f"{name}.yaml" for name in ("block_sparse", "natten_2d", "causal_images")
]
LISTED += [
    ROOT / "tests/specs" / f"{name}.yaml" for name in ("clusters", "listed_anyway", "listed_heads")
]

HEAD = "kernel: attention\nname: sample\ndtype: bf16\nhead_dim: 64\n"
BUFFERS = """buffers:
  doc: {shape: [SQ], dtype: int32}
  ordered: {shape: [SQ], dtype: int32, sorted: true}
  lens: {shape: [B], dtype: int32}
"""


def sample(mask: str, more: str = "") -> Loaded:
    head, *lines = BUFFERS.splitlines()
    used = [line for line in lines if f"{line.split(':')[0].strip()}[" in mask]
    buffers = "\n".join([head, *used]) + "\n" if used else ""
    return loads(f"{HEAD}{buffers}mask_mod: {mask}\n{more}", "sample.yaml")


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        ("q_idx >= kv_idx", False),
        ("abs(q_idx - kv_idx) <= 64", False),
        ("kv_idx < lens[b]", False),
        ("ordered[q_idx] == ordered[kv_idx]", False),
        ("doc[q_idx] == doc[kv_idx]", True),
        ("q_idx >= kv_idx or doc[q_idx] == doc[kv_idx]", True),
        ("q_idx >= kv_idx and (q_idx - kv_idx) % 4 == 0", False),
        ("(q_idx - kv_idx) % 128 < 3", False),
        ("(q_idx - kv_idx) % 129 < 3", True),
        # The first repeats every 112 positions, the second every 130.
        ("q_idx % 16 == kv_idx % 7", False),
        ("q_idx % 13 == kv_idx % 10", True),
        ("q_idx // 7 % 2 == 0", True),
        ("kv_idx // 64 <= q_idx // 64 and abs(q_idx % 64 - kv_idx % 64) <= 2", False),
        ("abs(q_idx // 64 - kv_idx // 64) <= 2 and abs(q_idx % 64 - kv_idx % 64) <= 2", False),
        ("abs(q_idx // 200 - kv_idx // 200) <= 2 and abs(q_idx % 200 - kv_idx % 200) <= 2", True),
        ("kv_idx * kv_idx <= q_idx", True),
        # The order of the windows is unknown, and their hull is larger than they are.
        ("q_idx == kv_idx or kv_idx == q_idx - 1000 or kv_idx == q_idx - 2000", True),
    ],
)
def test_which_masks_get_one(mask: str, wanted: bool) -> None:
    plan = plan_attention(sample(mask))
    assert plan.choice.listed == wanted
    assert (plan.block_mask is not None) == wanted
    assert plan.forward.listed == wanted
    always, never = (
        plan_attention(sample(mask, f"block_mask: {asked}\n")) for asked in ("always", "never")
    )
    assert always.block_mask is not None
    assert never.block_mask is None


@pytest.mark.parametrize("more", ["passes: [forward, decode]\nalign: start\n", "varlen: true\n"])
def test_what_does_not_support_it_keeps_ranges(more: str) -> None:
    plan = plan_attention(sample("kv_idx * kv_idx <= q_idx", more))
    assert plan.block_mask is None
    assert plan.choice.conditions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 1),
        ("q_idx", None),
        ("b", 1),
        ("q_idx % 6 + kv_idx % 4", 12),
        ("(3 * q_idx - kv_idx) % 5", 5),
        ("q_idx // 2 % 5", None),
        ("(q_idx % 6) // 2", 6),
        ("h % 3", 1),
        ("(q_idx % 4) * kv_idx", None),
    ],
)
def test_periods(text: str, expected: int | None) -> None:
    names = dict.fromkeys(("b", "h", "q_idx", "kv_idx"), Type.INT)
    assert period(parse_expression(text, Scope(names, {}), Type.INT)) == expected


def emitted(loaded: Loaded, folder: Path, wrong: tuple[str, str] | None = None) -> Path:
    """Write the files of a spec, with one piece of text replaced."""
    (folder / loaded.spec.name).mkdir(parents=True)
    files = render_spec(loaded)
    if wrong is not None:
        assert any(wrong[0] in text for text in files.values())
        files = {name: text.replace(*wrong) for name, text in files.items()}
    for name, text in files.items():
        (folder / loaded.spec.name / name).write_text(text)
    return folder


def failures(loaded: Loaded, generated: Path, case: str) -> list[str]:
    rows = verified([loaded], generated, device="cpu", timeout=120.0, cases=[case])
    assert rows
    return [row["message"] for row in rows if not row["ok"]]


CALLED = ("block-mask-reuse", "block-mask-compiled", "blocks-in-runs")


@pytest.mark.parametrize(
    ("path", "case"),
    [(path, "block-mask-lists") for path in LISTED] + [(LISTED[2], case) for case in CALLED],
    ids=lambda p: getattr(p, "stem", p),
)
def test_verified_in_the_interpreter(path: Path, case: str, tmp_path: Path, verdict: Any) -> None:
    loaded = load(path)
    folder = emitted(loaded, tmp_path)
    verdict(problem_of(loaded), folder)
    assert not failures(loaded, folder, case)


@pytest.mark.parametrize(
    ("case", "right", "wrong"),
    [
        # Mistakes: a partial block becomes full, or empty, or the order of the list changes.
        ("block-mask-lists", "(side_2_min >= side_3_max)", "(side_2_max >= side_3_min)"),
        ("block-mask-lists", "(side_5_min <= side_6_max)", "(side_5_min < side_6_max)"),
        ("block-mask-lists", "n_partial + twos - 1", "n_partial + n_full - twos"),
        ("block-mask-lists", "counts += ", "counts = "),
        # Mistakes: the visited blocks differ from the listed ones.
        ("blocks-in-runs", "kv_blocks + n_partial, n_full", "kv_blocks, n_full"),
        ("blocks-in-runs", "q_blocks + n_partial, n_full", "q_blocks, n_full"),
        ("block-mask-reuse", "block_mask.shape != ", "() != "),
    ],
)
def test_the_checks_see_what_is_wrong(
    case: str, right: str, wrong: str, tmp_path: Path, verdict: Any
) -> None:
    loaded = load(ROOT / "specs/causal_images.yaml")
    folder = emitted(loaded, tmp_path, (right, wrong))
    verdict(problem_of(loaded), folder)
    assert failures(loaded, folder, case)


def test_kinds_of_blocks() -> None:
    allowed = torch.ones(BLOCK_SIZE + 1, 2 * BLOCK_SIZE, dtype=torch.bool)
    allowed[0, 0] = False
    # The second row of blocks extends past the last query.
    assert block_kinds(allowed).tolist() == [[1, 2], [1, 1]]
    assert _listed(torch.tensor([[0, 2, 1, 1, 0, 2]])).tolist() == [[2, 3, 1, 5, 0, 4]]


@pytest.mark.parametrize("length", [1, 128, 300, 640])
def test_flexattention_lists_the_same_blocks(length: int) -> None:
    """Compare the helper that checks and benchmarks use with `create_block_mask`."""

    def near(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return ((q - kv).abs() < 150) | (q // 128 == 3)

    flex = create_block_mask(near, None, None, length, length, device="cpu", _compile=False)
    index = torch.arange(length)
    kinds = block_kinds(near(index, index, index[:, None], index[None, :]))
    ours = SimpleNamespace(
        kv_num_blocks=(kinds == 1).sum(1).int()[None, None],
        full_kv_num_blocks=(kinds == 2).sum(1).int()[None, None],
        kv_indices=_listed(kinds)[None, None],
    )
    assert all(torch.equal(a, b) for a, b in zip(listed(ours), listed(flex), strict=True))
    ours.kv_indices = ours.kv_indices.flip(-1)
    same = [torch.equal(a, b) for a, b in zip(listed(ours), listed(flex), strict=True)]
    assert all(same) == (length <= 128)


def explain(loaded: Loaded, drawing: Drawing | None = None) -> str:
    return printed(page_of(loaded, drawing))


def test_explained() -> None:
    text = explain(load(LISTED[1]), Drawing(2048))
    assert "conditions that no range describes" in text
    assert "natten_2d_block_mask" in text
    assert "evaluates the mask in partial blocks" in text
    assert "++......++......" in text
    dilated = explain(load(ROOT / "specs/dilated.yaml"))
    assert "repeats every 4 positions" in dilated
    never = explain(sample("doc[q_idx] == doc[kv_idx]", "block_mask: never\n"))
    assert "the spec sets `block_mask: never`" in never
    packed = explain(sample("kv_idx * kv_idx <= q_idx", "varlen: true\n"))
    assert "do not support one" in packed


def test_a_spec_without_the_field_is_hashed_as_before() -> None:
    assert "block_mask" not in sample("q_idx >= kv_idx").spec.model_dump()
    assert (
        sample("q_idx >= kv_idx", "block_mask: never\n").spec.model_dump()["block_mask"] == "never"
    )
