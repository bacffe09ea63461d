"""Equivalent expressions have one canonical form, and so the same kernels."""

from __future__ import annotations

import math
import random
from io import StringIO
from pathlib import Path

import pytest
import torch
from hypothesis import given
from ruamel.yaml import YAML
from support.specs.rewriting import REWRITES, Rewrite, rewritten
from support.specs.trees import bounded, evaluate, mask, score
from test_softmax_form import points, score_mods
from test_tile_ranges import MASKS

from kgen.expr.affine import affine
from kgen.expr.canonical import canonical, condition, value
from kgen.expr.fold import folded
from kgen.expr.mask_form import TRUE
from kgen.expr.nodes import Const, Type, Var
from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads

ROOT = Path(__file__).resolve().parents[2]

WRITTEN = {
    "causal": (
        "kv_idx <= q_idx",
        "not (kv_idx > q_idx)",
        "not (q_idx < kv_idx)",
        "kv_idx < q_idx + 1",
        "kv_idx - q_idx <= 0",
        "q_idx - kv_idx >= 0",
        "q_idx - kv_idx > -1",
        "q_idx + 1 > kv_idx",
        "0 <= q_idx - kv_idx",
        "2 * q_idx + 1 >= 2 * kv_idx",
    ),
    "sliding_window": (
        "q_idx - kv_idx < window and q_idx >= kv_idx",
        "q_idx >= kv_idx and q_idx - kv_idx <= window - 1",
        "q_idx >= kv_idx and kv_idx > q_idx - window",
        "q_idx >= kv_idx and kv_idx + window > q_idx",
        "q_idx >= kv_idx and abs(q_idx - kv_idx) < window",
        "not (q_idx < kv_idx or q_idx - kv_idx >= window)",
        "0 <= q_idx - kv_idx and window > q_idx - kv_idx",
    ),
    "document_causal": (
        "q_idx >= kv_idx and doc[q_idx] == doc[kv_idx]",
        "doc[kv_idx] == doc[q_idx] and q_idx >= kv_idx",
        "kv_idx <= q_idx and not (doc[kv_idx] != doc[q_idx])",
        "doc[q_idx] - doc[kv_idx] == 0 and q_idx >= kv_idx",
    ),
    "prefix_lm": (
        "q_idx >= kv_idx or kv_idx < prefix",
        "prefix > kv_idx or kv_idx <= q_idx",
        "not (kv_idx >= prefix and q_idx < kv_idx)",
    ),
    "padding": (
        "lens[b] > kv_idx",
        "not (kv_idx >= lens[b])",
        "kv_idx <= lens[b] - 1",
        "kv_idx + 1 <= lens[b]",
    ),
    "varlen_causal": (
        "kv_idx <= q_idx + SK - SQ",
        "kv_idx - q_idx <= SK - SQ",
        "q_idx - kv_idx >= SQ - SK",
    ),
    "longformer": (
        "kv_idx < global_tokens or abs(q_idx - kv_idx) <= window",
        "abs(kv_idx - q_idx) <= window or kv_idx < global_tokens",
        "(q_idx - kv_idx <= window and kv_idx - q_idx <= window) or kv_idx < global_tokens",
    ),
    "dilated": ("(q_idx - kv_idx) % dilation == 0 and kv_idx <= q_idx",),
    "causal_images": (
        "(image[b, kv_idx] == image[b, q_idx] and image[b, q_idx] != 0) or kv_idx <= q_idx",
    ),
    "block_sparse": ("kv_idx <= q_idx and allowed[b, h, q_idx // 128, kv_idx // 128]",),
}
"""Equivalent masks of stock specs."""

SLOPE = "slope = exp2(-8 * (h + 1) / HQ)\n"
SCORED = {
    "causal_alibi": (
        "score - slopes[h] * (q_idx - kv_idx)",
        "slopes[h] * (kv_idx - q_idx) + score",
        "score + slopes[h] * kv_idx - slopes[h] * q_idx",
        "score + (-(slopes[h] * (q_idx - kv_idx)))",
        "score - slopes[h] * abs(q_idx - kv_idx)",
        "score + (kv_idx - q_idx) * slopes[h]",
        "where(q_idx >= kv_idx, score - slopes[h] * abs(kv_idx - q_idx), -inf)",
        "where(kv_idx > q_idx, -inf, score + slopes[h] * (kv_idx - q_idx))",
        "score - slopes[h] * (q_idx - kv_idx) + where(q_idx >= kv_idx, 0.0, -inf)",
    ),
    "alibi_inline": (
        f"{SLOPE}score - slope * (q_idx - kv_idx)",
        f"{SLOPE}score + slope * kv_idx - slope * q_idx",
        "slope = exp2(-8 * (1 + h) / HQ)\nslope * (kv_idx - q_idx) + score",
    ),
    "softcap_causal": ("tanh(score / cap) * cap", "cap * tanh(score * (1 / cap))"),
    "relative_bias": (
        "score + table[h, min(abs(kv_idx - q_idx), 1023)]",
        "table[h, min(1023, abs(q_idx - kv_idx))] + score",
    ),
}
"""Equivalent scores of stock specs."""


MINUS_INFINITIES = (
    *(
        "-math.inf",
        "-torch.inf",
        "-np.inf",
        "-numpy.inf",
        "+(-inf)",
        "-(-(-inf))",
        "float(-math.inf)",
    ),
    *("float('-inf')", '-float("inf")', "-float('+Infinity')", "float(' -INF ')", "-float(inf)"),
    *(
        "torch.finfo(torch.float32).min",
        "torch.finfo(score.dtype).min",
        "-torch.finfo(torch.half).max",
    ),
    *("np.finfo(np.float32).min", "numpy.finfo(numpy.float64).min"),
)


def body(text: str) -> str:
    """Return the text of `triton.py` after the docstring that quotes the spec."""
    _, _, rest = render_spec(loads(text, "spec.yaml"))["triton.py"].partition('"""')
    return rest.partition('"""')[2]


def respelled(name: str, **fields: str | None) -> str:
    yaml, text = YAML(), StringIO()
    spec = yaml.load((ROOT / "specs" / f"{name}.yaml").read_text())
    for field, written in fields.items():
        spec.pop(field, None)
        if written is not None:
            spec[field] = written
    yaml.dump(spec, text)
    return text.getvalue()


@pytest.mark.parametrize("name", [*WRITTEN, *SCORED])
def test_other_words_give_the_same_kernels(name: str) -> None:
    masks = [{"mask_mod": written} for written in WRITTEN.get(name, ())]
    scores = [{"score_mod": written} for written in SCORED.get(name, ())]
    wanted = body(respelled(name))
    for fields in masks + scores:
        assert body(respelled(name, **fields)) == wanted, fields


def test_a_mask_may_be_written_into_the_score() -> None:
    wanted = body(respelled("causal"))
    for written in (
        "where(q_idx >= kv_idx, score, -inf)",
        "where(q_idx < kv_idx, -inf, score)",
        "score + where(q_idx >= kv_idx, 0.0, -inf)",
        "where(q_idx < kv_idx, -inf, 0) + score",
    ):
        assert body(respelled("causal", score_mod=written, mask_mod=None)) == wanted
    for minus_infinity in MINUS_INFINITIES:
        written = f"where(q_idx >= kv_idx, score, {minus_infinity})"
        assert body(respelled("causal", score_mod=written, mask_mod=None)) == wanted, written


def test_gradients_stand_in_the_order_of_the_buffers() -> None:
    """The order in which the score uses the buffers does not matter."""
    buffers = (
        "buffers: {a: {shape: [B, 3], dtype: fp32, grad: true}, c: {shape: [HQ], dtype: fp32, "
        "grad: true}}\n"
    )
    spec = f"kernel: attention\nname: x\ndtype: bf16\nhead_dim: 64\n{buffers}score_mod: "
    wanted = body(spec + "score - (a[b, 2] + a[b, 1] + c[h])")
    assert body(spec + "score - (c[h] + a[b, 1] + a[b, 2])") == wanted


# --- random words ------------------------


def stock() -> list[Path]:
    paths = sorted((ROOT / "specs").glob("*.yaml"))
    return [path for path in paths if "kernel: attention" in path.read_text()]


@pytest.mark.parametrize("path", stock(), ids=lambda p: p.stem)
def test_random_words_mean_the_same(path: Path) -> None:
    trees = load(path).trees
    wanted, rng = canonical(trees), random.Random(path.stem)
    for _ in range(20):
        others = {name: rewritten(rng, tree) for name, tree in trees.items()}
        assert canonical(others) == wanted, others


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda r: r.__name__)
def test_each_rewrite_is_needed(rewrite: Rewrite) -> None:
    """Each rewrite changes an expression of a stock spec, and would change its plan without a
    canonical form.
    """
    rng, changed = random.Random(0), 0
    for path in stock():
        trees = load(path).trees
        for _ in range(5):
            changed += {
                name: rewritten(rng, tree, (rewrite,)) for name, tree in trees.items()
            } != trees
    assert changed


# --- what it keeps ------------------------


@bounded
@given(MASKS)
def test_masks_keep_their_value(text: str) -> None:
    tree = mask(text)
    found = condition(tree)
    got, want = evaluate(found, points(0)), evaluate(tree, points(0))
    assert torch.equal(*torch.broadcast_tensors(got, want))
    assert condition(found) == found


@bounded
@given(score_mods())
def test_scores_keep_their_value(text: str) -> None:
    tree = score(text)
    found = value(tree)
    got, want = torch.broadcast_tensors(evaluate(found, points(0)), evaluate(tree, points(0)))
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert found.type is tree.type
    assert value(found) == found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("not (score < gain)", "not (score < gain)"),
        ("gain < score", "gain < score"),
        ("2 * q_idx > 2 * kv_idx + 1", "q_idx > kv_idx"),
        ("q_idx == kv_idx + 3", "q_idx - kv_idx == 3"),
        ("2 * q_idx == 2 * kv_idx + 1", "2 * q_idx - 2 * kv_idx == 1"),
        ("window < 3", "window < 3"),
        ("q_idx < 2147483647 + kv_idx + 2147483647", "q_idx < 2147483647 + kv_idx + 2147483647"),
        ("SQ - q_idx < -2147483647", "SQ - q_idx < -2147483647"),
        ("lens[b] - kv_idx >= -1073741824", "lens[b] - kv_idx >= -1073741824"),
        ("q_idx - kv_idx <= 2147483646", "q_idx - kv_idx < 2147483647"),
    ],
)
def test_what_is_not_a_comparison_of_positions(text: str, wanted: str) -> None:
    """Reals that may be NaN, numbers beyond 32 bits, and sums with a common factor."""
    assert condition(mask(text)) == mask(wanted)


ONE_BLOCK = "q_idx // 5 == kv_idx // 5 and "


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ONE_BLOCK + "q_idx % 5 >= kv_idx % 5", ONE_BLOCK + "q_idx >= kv_idx"),
        (ONE_BLOCK + "abs(q_idx % 5 - kv_idx % 5) < 3", ONE_BLOCK + "abs(q_idx - kv_idx) < 3"),
        (ONE_BLOCK + "(q_idx % 5 > kv_idx % 5 or h > 0)", ONE_BLOCK + "(q_idx > kv_idx or h > 0)"),
        (
            "kv_idx < 3 or ((kv_idx - 3) // window == q_idx // window"
            " and (kv_idx - 3) % window <= q_idx % window)",
            "kv_idx < 3 or ((kv_idx - 3) // window == q_idx // window and kv_idx - 3 <= q_idx)",
        ),
    ],
)
def test_places_within_a_block_compare_as_positions(text: str, wanted: str) -> None:
    trees = {"mask_mod": mask(text)}
    found = canonical(trees)
    assert found == canonical({"mask_mod": mask(wanted)})
    assert found["mask_mod"] != condition(trees["mask_mod"])
    got, want = evaluate(found["mask_mod"], points(0)), evaluate(trees["mask_mod"], points(0))
    assert torch.equal(*torch.broadcast_tensors(got, want))


@pytest.mark.parametrize(
    "text",
    [
        "q_idx % 5 >= kv_idx % 5",
        "q_idx // 4 == kv_idx // 4 and q_idx % 5 >= kv_idx % 5",
        "q_idx // 5 == kv_idx // 5 or q_idx % 5 >= kv_idx % 5",
        ONE_BLOCK + "2 * (q_idx % 5) >= kv_idx % 5",
        ONE_BLOCK + "q_idx % 5 + kv_idx % 5 < 4",
    ],
)
def test_other_places_stay(text: str) -> None:
    assert canonical({"mask_mod": mask(text)})["mask_mod"] == condition(mask(text))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("31 <= 16 and q_idx >= kv_idx", "False"),
        ("31 != 2 and q_idx >= kv_idx", "q_idx >= kv_idx"),
        ("window != window or q_idx >= kv_idx", "q_idx >= kv_idx"),
        ("q_idx - q_idx < 1 and q_idx >= kv_idx", "q_idx >= kv_idx"),
        ("where(2.0 >= 3.0, h == 1, q_idx >= kv_idx)", "q_idx >= kv_idx"),
        ("not (3 > 2 and gain < gain + cap)", "not (gain < gain + cap)"),
        ("q_idx < 40 // 3", "q_idx < 13"),
    ],
)
def test_conditions_on_numbers_are_decided(text: str, wanted: str) -> None:
    assert condition(folded(mask(text), {})) == condition(mask(wanted))


def test_conditions_on_params_are_decided_and_their_names_stay() -> None:
    numbers = {
        Var("window", Type.INT): Const(7, Type.INT),
        Var("gain", Type.FLOAT): Const(2.0, Type.FLOAT),
    }
    trees = {
        "mask_mod": mask("q_idx - kv_idx < window and (gain <= 1.0 or window > 3)"),
        "score_mod": score("score * (gain if window == 7 else cap) + tanh(3.0)"),
    }
    found = canonical(trees, numbers)
    assert found["mask_mod"] == condition(mask("q_idx - kv_idx < window"))
    assert found["score_mod"] == value(score(f"score * gain + {math.tanh(3.0)!r}"))
    assert "mask_mod" not in canonical({"mask_mod": mask("window > 3 or q_idx > 5")}, numbers)


def test_numbers_that_kernels_do_not_have_stay_expressions() -> None:
    for text in ("exp(100.0)", "exp(-100.0)", "log(0.0)", "1e30 * 1e30"):
        assert folded(score(f"score * ({text})"), {}) == score(f"score * ({text})"), text


def test_only_what_a_mask_has_above_zero_loses_its_abs() -> None:
    trees = {"score_mod": score("score - gain * abs(q_idx - kv_idx)")}
    assert canonical(trees) == trees | {"score_mod": value(trees["score_mod"])}
    assert "abs" in str(canonical(trees | {"mask_mod": mask("q_idx - kv_idx < window")}))
    assert "abs" not in str(canonical(trees | {"mask_mod": mask("q_idx > kv_idx")})["score_mod"])


OWN_FACTS = (
    "abs(q_idx - kv_idx) <= 0",
    "abs(q_idx - kv_idx) < 1",
    "0 >= abs(q_idx - kv_idx)",
    "1 > abs(kv_idx - q_idx)",
    "not abs(q_idx - kv_idx) > 0",
    "not (0 < abs(q_idx - kv_idx))",
    "2 * abs(q_idx - kv_idx) <= 1",
    "-abs(q_idx - kv_idx) >= 0",
    "0 <= -abs(q_idx - kv_idx)",
    "abs(q_idx - kv_idx) - 1 < 0",
    "abs(doc[q_idx] - doc[kv_idx]) <= 0",
    "abs(kind[kv_idx] - 1) <= 0",
    "abs(q_idx - 3) <= 0",
    "0 <= abs(q_idx - kv_idx) <= 0",
    "abs(abs(q_idx - kv_idx)) <= 0",
    "abs(q_idx // 2 - kv_idx // 2) < 1",
    "abs((q_idx - kv_idx) // 2) <= 0",
    "abs(q_idx % 3 - kv_idx % 3) <= 0",
    "abs(q_idx - kv_idx) <= 0 and h == 0",
    "abs(q_idx - kv_idx) <= 0 or h == 0",
    "abs(q_idx - kv_idx) <= 0 and abs(kv_idx - q_idx) < 4",
    "abs(q_idx - kv_idx) <= abs(kv_idx - q_idx)",
    "abs(q_idx - kv_idx) >= q_idx - kv_idx and q_idx - kv_idx >= abs(kv_idx - q_idx)",
    "where(abs(q_idx - kv_idx) <= 0, True, False)",
    "max(abs(q_idx - kv_idx), 0) <= 0",
    "min(abs(q_idx - kv_idx), 4) < 1",
    "clamp(abs(q_idx - kv_idx), 0, 4) <= 0",
    "abs(where(q_idx > kv_idx, q_idx - kv_idx, kv_idx - q_idx)) <= 0",
    "abs(q_idx - kv_idx) // 2 <= 0",
    "abs(q_idx - kv_idx) % 2 <= 0",
    "floor(abs(q_idx - kv_idx) / 2) <= 0.0",
    "abs(0.5 * (q_idx - kv_idx)) <= 0.0",
    "abs(float(q_idx - kv_idx)) < 1.0",
)
"""Masks with the `abs` of a value that the mask itself makes non-negative."""


@pytest.mark.parametrize("text", OWN_FACTS)
def test_a_fact_does_not_remove_the_abs_it_comes_from(text: str) -> None:
    tree = mask(text)
    found = canonical({"mask_mod": tree}).get("mask_mod", TRUE)
    for seed in range(4):
        got, want = evaluate(found, points(seed)), evaluate(tree, points(seed))
        assert torch.equal(*torch.broadcast_tensors(got, want))


def test_a_fact_removes_the_abs_of_other_conditions_and_of_the_score() -> None:
    trees = {
        "mask_mod": mask("q_idx >= kv_idx and abs(q_idx - kv_idx) < window"),
        "score_mod": score("score"),
    }
    assert "abs" not in str(canonical(trees))
    trees = {
        "mask_mod": mask("abs(q_idx - kv_idx) <= 0"),
        "score_mod": score("score - abs(q_idx - kv_idx)"),
    }
    assert "abs" not in str(canonical(trees))


def test_affine() -> None:
    found = affine(mask("2 * (q_idx - 3) - (kv_idx - q_idx) > 0").args[0])  # type: ignore[union-attr]
    assert (sorted(found.terms.values()), found.number) == ([-1, 3], -6)
