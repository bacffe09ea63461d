from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.specs.hand_built import (
    CAUSAL,
    INT,
    PADDING,
    B,
    K,
    Q,
    buffer,
    call,
    causal_alibi,
    loaded,
    plain,
)

from kgen.expr.nodes import Read, Var
from kgen.kernels.attention.verify.inputs import Case, cases, draw
from kgen.kernels.attention.verify.problem import problem_of
from kgen.spec.load import loads
from kgen.verify.compare import changed, same_bits, snapshot
from kgen.verify.tensors import LAYOUTS, arrange

DOCUMENTS = call("eq", Read("doc", (B, Q), INT), Read("doc", (B, K), INT))


def documents(sorted=True):
    return problem_of(
        loaded(
            "docs", buffers={"doc": buffer(("B", "SQ"), "int32", sorted=sorted)}, mask_mod=DOCUMENTS
        )
    )


def test_names_are_unique_and_quick_is_small():
    for one in (causal_alibi(), plain()):
        problem = problem_of(one)
        quick, full = cases(problem, True), cases(problem, False)
        assert len({case.name for case in full}) == len(full)
        assert set(quick) <= set(full)
        assert all(case.sq <= 160 and case.sk <= 160 and case.batch <= 2 for case in quick)
        assert max(case.sq for case in full) > 2048


def test_buffers_read_from_both_sides_tie_the_lengths():
    for promised in (True, False):
        assert documents(sorted=promised).tied_lengths
        assert all(case.sq == case.sk for case in cases(documents(sorted=promised), False))
    assert any(case.sq != case.sk for case in cases(problem_of(plain()), True))


def test_promises_about_lengths_are_kept():
    lengths = SimpleNamespace(q=SimpleNamespace(multiple_of=64), kv=SimpleNamespace(multiple_of=32))
    problem = problem_of(loaded("even", lengths=lengths))
    assert all(case.sq % 64 == 0 and case.sk % 32 == 0 for case in cases(problem, False))


def paged(mask_mod):
    changes = {"per_batch": True, "paged_kv": SimpleNamespace(page_size=32)}
    return problem_of(
        loaded("paged", buffers={"lens": buffer(("B",), "int32")}, mask_mod=mask_mod, **changes)
    )


def test_the_number_of_keys_is_whole_pages_where_the_spec_uses_it():
    used = cases(paged(call("lt", K, call("sub", Var("SK", INT), 4))), False)
    assert all(case.sk % 32 == 0 for case in used)
    assert any(case.sk % 32 for case in cases(paged(PADDING), False))


def test_a_key_in_the_page_that_sequences_share_is_hidden_from_all_or_none():
    after = call("ge", K, Read("lens", (B,), INT))
    inputs = draw(paged(after), Case("first", 8, 100, batch=2, hidden=True), "cpu")
    table, lens, first = (
        inputs.cache["block_table"],
        inputs.cache["kv_lens"],
        inputs.buffers["lens"],
    )
    assert table[0, 0] == table[1, 0]
    assert first.tolist() == [51, 0]
    for b, (start, end) in enumerate(zip(first.tolist(), lens.tolist(), strict=True)):
        keys = inputs.k[table[b, : -(-end // 32)].long()].flatten(0, 1)
        assert torch.isfinite(keys[start:end]).all()
        assert torch.isnan(keys[32:start]).all()


def test_groups():
    assert {case.group for case in cases(problem_of(causal_alibi()), True)} == {2}
    assert {case.group for case in cases(problem_of(plain()), True)} == {1, 2, 3, 4}


def test_same_name_same_numbers():
    problem = problem_of(plain())
    case = cases(problem, True)[0]
    assert same_bits(draw(problem, case, "cpu").q, draw(problem, case, "cpu").q)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_values(layout):
    values = torch.randn(2, 3, 5, 8)
    if layout == "broadcast":
        values = values[:1].expand_as(values)
    view = arrange(values, layout)
    assert torch.equal(view, values)
    assert view.is_contiguous() == (layout in ("contiguous", "offset"))
    assert (view.stride(3) == 2) == (layout == "stepped")
    assert (0 in view.stride()) == (layout == "broadcast")
    if layout in ("guarded", "padded"):
        storage = torch.empty(0).set_(view.untyped_storage())
        assert int(torch.isnan(storage).sum()) == storage.numel() - view.numel() > 0
    if layout == "padded":
        assert view.stride(2) % 8 == 0
        assert view.storage_offset() % 8 == 0


def test_writes_next_to_a_view_are_seen():
    view = arrange(torch.randn(1, 1, 4, 4), "guarded")
    before = snapshot({"x": view})
    assert changed({"x": view}, before) == []
    torch.as_strided(view, (1,), (1,), view.storage_offset() + 4)[0] = 0.0
    assert changed({"x": view}, before) == ["x"]


def test_hidden_keys_are_nan_for_the_kernel_and_zero_for_the_reference():
    problem = problem_of(plain())
    case = next(case for case in cases(problem, True) if case.hidden)
    inputs = draw(problem, case, "cpu")
    for b, length in enumerate(inputs.buffers["lens"].tolist()):
        assert torch.isnan(inputs.k[b, :, length:]).all()
        assert (inputs.clean_v[b, :, length:] == 0).all()
        assert torch.isfinite(inputs.v[b, :, :length]).all()
    assert torch.isnan(inputs.v).any()


def test_only_conjuncts_without_the_query_hide_keys():
    both = problem_of(loaded("both", mask_mod=call("and", CAUSAL, PADDING)))
    either = problem_of(loaded("either", mask_mod=call("or", CAUSAL, PADDING)))
    assert both.key_conjuncts == (PADDING,)
    assert either.key_conjuncts == ()


def test_buffers_look_like_what_they_are():
    problem = documents()
    doc = draw(problem, Case("x", 64, 64, batch=2), "cpu").buffers["doc"]
    assert doc.dtype == torch.int32
    assert doc.shape == (2, 64)
    assert (doc.diff(dim=-1) >= 0).all()
    assert doc.max() > 0
    lens = draw(problem_of(plain()), Case("x", 50, 60, batch=2, ints="zero"), "cpu").buffers["lens"]
    assert lens.tolist() == [0, 0]


def test_runtime_params_meet_their_edges():
    params = {
        "window": SimpleNamespace(type="int", value=None, runtime=True),
        "cap": SimpleNamespace(type="float", value=20.0, runtime=False),
    }
    problem = problem_of(loaded("p", params=params))
    drawn = [draw(problem, case, "cpu") for case in cases(problem, True)]
    assert {0, 1, 34, 100_000} == {inputs.runtime["window"] for inputs in drawn}
    assert all(inputs.params["cap"] == 20.0 and "cap" not in inputs.runtime for inputs in drawn)


def test_operands_have_strides_and_places_of_their_own():
    problem = problem_of(loaded("full"))
    for layout in ("bshd", "guarded", "padded", "spaced", "stepped"):
        inputs = draw(
            problem, Case("x", 20, 20, 2, 2, layout=layout, dout="strided", lse=True), "cpu"
        )
        operands = (inputs.q, inputs.k, inputs.v)
        assert len({t.stride() for t in operands}) == 3, layout
        assert len({t.stride()[-2:] if layout != "bshd" else t.stride(2) for t in operands}) == 3, (
            layout
        )
        assert inputs.dout.stride() not in {t.stride() for t in operands}
        assert not inputs.dlse.is_contiguous()
    starts = [
        arrange(torch.zeros(2, 3, 4, 5), "offset", place).storage_offset() for place in range(4)
    ]
    assert len(set(starts)) == 4


def test_what_no_visible_pair_reads_is_anything():
    lines = (
        "kernel: attention\nname: x\ndtype: fp32\nhead_dim: 16\n"
        "buffers: {a: {shape: [HQ], dtype: fp32}, "
    )
    lines += "c: {shape: [B, SK], dtype: fp32}, on: {shape: [HQ], dtype: bool}}\n"
    lines += (
        "score_mod: score * a[h] + c[b, kv_idx]\n"
        "mask_mod: on[h] and kv_idx < 60 and q_idx >= kv_idx\n"
    )
    problem = problem_of(loads(lines, "x.yaml"))
    case = next(case for case in cases(problem, True) if case.unread)
    buffers = draw(problem, case, "cpu").buffers
    assert not buffers["on"].all()
    assert (buffers["a"].isfinite() == buffers["on"]).all()
    assert buffers["c"][:, :60].isfinite().all()
    assert not buffers["c"][:, 60:].isfinite().any()
