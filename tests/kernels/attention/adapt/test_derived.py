"""Specs that adapters derive from others: their text, and their kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.diagnostics import KgenError
from kgen.kernels.attention.adapt.derived import Variant, checked
from kgen.spec.load import load, loads

SPECS = Path(__file__).parents[4] / "specs"


def variant(mods: str) -> Variant:
    return checked(
        loads(f"kernel: attention\nname: own\ndtype: bf16\nhead_dim: 64\n{mods}\n", "own.yaml")
    )


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("q_idx >= kv_idx and q_idx - kv_idx < 8", 8),
        ("kv_idx <= q_idx and kv_idx > q_idx - 8", 8),
        ("0 <= q_idx - kv_idx <= 7", 8),
        ("not (kv_idx > q_idx) and kv_idx + 8 > q_idx", 8),
        ("q_idx >= kv_idx", None),
        ("abs(q_idx - kv_idx) < 8", None),
        ("q_idx >= kv_idx and (q_idx - kv_idx < 8 or kv_idx < 4)", None),
    ],
)
def test_a_window_is_one_in_any_spelling(mask: str, window: int | None) -> None:
    assert variant(f"mask_mod: {mask}").window == window


@pytest.mark.parametrize(
    ("score", "cap"),
    [
        ("30.0 * tanh(score / 30.0)", 30.0),
        ("tanh(score / 30) * 30", 30.0),
        ("score", None),
        ("30.0 * tanh(score / 20.0)", None),
        ("30.0 * tanh(score / 30.0) + 0.5 * (kv_idx - q_idx)", None),
    ],
)
def test_a_cap_is_one_in_any_spelling(score: str, cap: float | None) -> None:
    assert variant(f"score_mod: {score}").softcap == cap


def test_what_is_left_out_is_the_window() -> None:
    one = loads(
        variant("params: {w: 8}\nmask_mod: q_idx >= kv_idx and q_idx - kv_idx < w").everywhere(),
        "own.yaml",
    )
    assert one.spec.name == "own_everywhere"
    assert one.spec.mask_mod.written == "q_idx >= kv_idx"
    assert one.spec.params == {}


def test_buffers_are_as_long_as_a_cache() -> None:
    mods = (
        "buffers: {doc: {shape: [B, SK], dtype: int32}}\nmask_mod: doc[b, q_idx] == doc[b, kv_idx]"
    )
    spec = loads(variant(mods).cached(), "own.yaml").spec
    assert spec.buffers["doc"].shape == ("B", "any")
    assert spec.mask_mod.written.splitlines() == [
        "q_at = q_idx + q_start[b]",
        "kv_at = kv_idx + kv_start[b]",
        "doc[b, q_at] == doc[b, kv_at] and kv_first[b] <= kv_idx and kv_idx < kv_end[b]",
    ]


def test_sinks_have_no_pass_for_few_queries() -> None:
    assert loads(variant("sinks: true").cached(), "own.yaml").spec.passes == ("forward", "backward")
    assert "decode" in loads(variant("").cached(), "own.yaml").spec.passes


@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ("mask_mod: q_idx + SK - SQ >= kv_idx", "`mask_mod` reads SK"),
        (
            "params: {q_start: {type: int, runtime: true}}\nmask_mod: q_idx < q_start",
            "`q_start` is an argument",
        ),
        ("varlen: true", "its sequences are packed"),
        ("passes: [decode]", "it has no pass `forward`"),
        ("lengths: {kv: {per_batch: true}}", "each sequence has its own number of keys"),
    ],
)
def test_what_has_no_adapter_is_refused(mods: str, message: str) -> None:
    with pytest.raises(KgenError) as error:
        variant(mods).cached()
    (found,) = error.value.diagnostics
    assert message in found.message
    assert found.hint


NONE = ("decode_gqa", "decode_paged", "decode_sliding_window", "varlen_causal", "varlen_alibi")


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_stock_specs_have_specs_for_caches(path: Path) -> None:
    loaded = load(path)
    if loaded.spec.kernel != "attention":
        return
    if path.stem in NONE:
        with pytest.raises(KgenError):
            checked(loaded)
    else:
        assert loads(checked(loaded).cached(), path).spec.name == f"{path.stem}_cached"


def test_what_is_verified_is_what_is_made() -> None:
    """A corner spec is a derived cache spec, so that its kernels are verified like other corner
    specs.
    """
    mods = "params: {cap: 5.0, window: 8}\nscore_mod: cap * tanh(score / cap)\ngqa: 2\n"
    made = variant(mods + "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < window").cached()
    assert (SPECS.parent / "tests" / "specs" / "own_cached.yaml").read_text() == made
