"""Kernels that use lengths of buffers: right in the interpreter, proved, and the same for all
spellings.

The cases: portable kernels with a gradient through a length, block masks, decoding, pages, packed
sequences, and both Hopper kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.interpreters.own_process import interpreted
from support.interpreters.single_file import single
from support.interpreters.some_cases import emitted, failures

from kgen.kernels.attention.adapt.context_parallel import adapter
from kgen.kernels.attention.adapt.derived import Variant
from kgen.kernels.attention.adapt.part import part_of
from kgen.kernels.attention.plan.picture import Run, picture
from kgen.kernels.attention.plan.planning import plan_attention
from kgen.kernels.attention.prove.obligations import obligations
from kgen.kernels.attention.prove.points import differences
from kgen.kernels.attention.prove.setting import Extent
from kgen.prove.obligations import Verdict, decide
from kgen.spec.load import loads

HEAD = "kernel: attention\nname: measured\ndtype: {dtype}\nhead_dim: {head_dim}\n"
CU = "cu: {shape: [any], dtype: int32}"
SPECS = {
    "plain": (
        f"gqa: 2\nbuffers: {{{CU}, t: {{shape: [HQ, any], dtype: fp32, grad: true}}}}",
        "score_mod: score + t[h, -1] * t[h, min(q_idx, t.shape[1] - 1)] / t.size(-1) + 0.1 * "
        "len(cu) "
        "+ t[h, (q_idx - kv_idx) % t.size(1)]",
        "mask_mod: q_idx < cu[-1] and kv_idx < cu[len(cu) - 2] + 9 and kv_idx >= q_idx - len(cu)",
    ),
    "lists": (
        f"block_mask: always\nbuffers: {{{CU}, u: {{shape: [any], dtype: fp32}}}}",
        "score_mod: score * (1.0 + 0.01 * len(u))",
        "mask_mod: kv_idx % len(cu) < 3 and kv_idx < len(u) or q_idx == cu[-1]",
    ),
    "decoding": (
        (
            "gqa: any\npasses: [forward, backward, decode]\n"
            "buffers: {cu: {shape: [any], dtype: int64}}"
        ),
        "mask_mod: kv_idx <= q_idx and kv_idx >= cu[-1] - len(cu)",
    ),
    "pages": (
        f"gqa: 2\npaged_kv: {{page_size: 16}}\npasses: [forward, decode]\nbuffers: {{{CU}}}",
        "mask_mod: kv_idx < cu[-1] or q_idx - kv_idx < len(cu)",
    ),
    "packed": (
        "varlen: true\nbuffers: {slopes: {shape: [any], dtype: fp32, grad: true}}",
        "score_mod: score + slopes[h % len(slopes)] * (kv_idx - q_idx) + slopes[-1] * q_idx",
        "mask_mod: q_idx - kv_idx < len(slopes) * 16",
    ),
    "Hopper's mask": (
        "buffers: {t: {shape: [any], dtype: fp32}}",
        "mask_mod: q_idx >= kv_idx and q_idx - kv_idx < len(t)",
    ),
    "Hopper's score": (
        "buffers: {t: {shape: [any], dtype: fp32, grad: true}}",
        "score_mod: score + t[-1] * (kv_idx - q_idx)",
        "mask_mod: q_idx >= kv_idx",
    ),
}
CASES = ("tile", "q-shorter", "off-tile", "no-keys")
PACKED = ("several", "empty")


def text_of(name: str) -> str:
    head = HEAD.format(dtype="bf16", head_dim=128 if "Hopper" in name else 32)
    return head + "\n".join(SPECS[name]) + "\n"


def own(mask: str, buffers: str = CU, more: str = "") -> str:
    return (
        f"{HEAD.format(dtype='bf16', head_dim=64)}buffers: {{{buffers}}}\nmask_mod: {mask}\n{more}"
    )


@pytest.mark.parametrize(
    "name",
    [name if name == "plain" else pytest.param(name, marks=pytest.mark.thorough) for name in SPECS],
)
def test_kernels_are_right(name: str, tmp_path: Path) -> None:
    text = text_of(name)
    cases = CASES[:1] if name == "plain" else PACKED if name == "packed" else CASES
    assert interpreted(failures, text, emitted(text, tmp_path), cases) == []


@pytest.mark.parametrize("name", SPECS)
def test_plans_are_right_at_points(name: str) -> None:
    assert [*differences(loads(text_of(name), "spec.yaml"))] == []


def test_kernels_are_proved() -> None:
    loaded = loads(own("kv_idx < cu[-1] and q_idx - kv_idx < len(cu)"), "spec.yaml")
    found = [decide(one, 10) for one in obligations(loaded, Extent(lambda shapes: shapes[:1]))]
    assert found
    assert {decision.verdict for decision in found} == {Verdict.PROVED}


def test_spellings_of_one_length_are_one_kernel() -> None:
    masks = (
        "kv_idx < cu[-1]",
        "kv_idx < cu[len(cu) - 1]",
        "cu[cu.size(0) - 1] > kv_idx",
        "kv_idx < cu[cu.shape[-1] - 1]",
    )
    texts = {single(loads(own(mask), "spec.yaml")).partition("import torch")[2] for mask in masks}
    assert len(texts) == 1


def test_tiles_beyond_a_length_are_skipped() -> None:
    plan = plan_attention(loads(own("kv_idx < len(cu) and q_idx >= kv_idx"), "spec.yaml"))
    shown = picture(plan, Run(1024))
    assert "len(cu) = 768" in shown.assumed
    beyond = (1024 - 768) // shown.tile[1]
    assert beyond > 0
    assert all(set(row[-beyond:]) == {"."} for row in shown.rows)
    assert "." not in {row[-beyond - 1] for row in shown.rows[-1:]}


def test_a_call_is_refused_where_a_length_is_no_divisor_or_too_large() -> None:
    text = single(loads(own("kv_idx % len(cu) < 3"), "spec.yaml"))
    assert "cu.shape[0] == 0" in text
    assert "len(cu) is a divisor in the spec and must not be 0" in text
    assert "cu.shape[0] > 2**29" in text
    assert "2**29 elements" not in single(loads(own("kv_idx < cu[b]"), "spec.yaml"))


def test_a_buffer_may_be_used_for_its_length_alone() -> None:
    text = single(
        loads(own("q_idx - kv_idx < len(u)", "u: {shape: [any], dtype: fp32}"), "spec.yaml")
    )
    assert "size_u_0" in text
    assert ".load(u_ptr" not in text


def test_specs_that_are_made_of_another_keep_its_lengths() -> None:
    """These are cache specs, and specs for parts of a sequence, where a buffer [SK] is a slice."""
    loaded = loads(
        own("q_idx - kv_idx < len(cu) + u.shape[1]", f"{CU}, u: {{shape: [2, any], dtype: int32}}"),
        "spec.yaml",
    )
    for text in (Variant(loaded).cached(), part_of(loaded).text()):
        made = loads(text, "made.yaml")
        assert "len(cu) + u.shape[1]" in made.spec.mask_mod.written
        assert {name: made.spec.buffers[name].shape for name in ("cu", "u")} == {
            "cu": ("any",),
            "u": (2, "any"),
        }
    sliced = loads(own("ids[kv_idx] == ids[-1]", "ids: {shape: [SK], dtype: int32}"), "spec.yaml")
    assert "ids[kv_length - 1]" in part_of(sliced).text()


def test_plans_over_ranks_read_the_first_length_and_no_other() -> None:
    def file(mask: str, buffers: str) -> str:
        made = adapter([loads(own(mask, buffers), "spec.yaml")])
        return dict(made.folders)["measured_context_parallel"]["__init__.py"]

    assert "len(cu.values)" in file("q_idx >= kv_idx and kv_idx < len(cu)", CU)
    wide = file("q_idx >= kv_idx and kv_idx < u.shape[1]", "u: {shape: [2, any], dtype: int32}")
    assert "(0, SK)" in wide
