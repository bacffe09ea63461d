"""Races of attention: workloads, peers, their arguments, and their timing."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.specs.hand_built import (
    ALIBI,
    BOOL,
    CAUSAL,
    FLOAT,
    INT,
    PADDING,
    SCORE,
    B,
    H,
    K,
    Q,
    buffer,
    call,
    loaded,
    number,
    plain,
)

from kgen.bench.options import BenchOptions
from kgen.bench.running import bench_specs
from kgen.bench.timing import BenchJob
from kgen.expr.nodes import Const, Read, Var
from kgen.kernels.attention.bench import delta, first_call, libraries, packed, peers, plot
from kgen.kernels.attention.bench.shape import Shape
from kgen.kernels.attention.bench.source import modification, python_source
from kgen.kernels.attention.bench.workload import draw_workload, visible
from kgen.kernels.attention.verify.problem import problem_of
from kgen.spec.load import load
from kgen.verify.evaluate import evaluate
from kgen.verify.toolchain import import_file

CAP = Var("cap", FLOAT)
BUFFERS = {
    "slopes": buffer(("HQ",), "fp32"),
    "lens": buffer(("B",), "int32"),
    "table": buffer((5,), "bf16"),
    "doc": buffer(("B", "SQ"), "int32", sorted=True),
}
PARAMS = {
    "window": SimpleNamespace(type="int", value=3, runtime=False),
    "cap": SimpleNamespace(type="float", value=None, runtime=True),
}
DISTANCE = call("sub", Q, K)
TREES = [
    ALIBI,
    CAUSAL,
    PADDING,
    call("mul", CAP, call("tanh", call("div", SCORE, CAP))),
    call("sub", SCORE, call("sub", call("float", Q), call("float", K))),
    call("div", SCORE, call("mul", call("add", SCORE, 2.0), 3)),
    call("neg", call("sub", SCORE, 1)),
    call("and", CAUSAL, call("or", call("le", DISTANCE, Var("window", INT)), call("not", PADDING))),
    call("add", SCORE, Read("table", (call("add", DISTANCE, 2),), FLOAT)),
    call("add", SCORE, Read("table", (number(1),), FLOAT)),
    call("eq", Read("doc", (B, Q), INT), Read("doc", (B, K), INT)),
    call("max", 1, call("min", DISTANCE, 4, K), -2),
    call("clamp", SCORE, -1.0, 1.0),
    call("mod", call("floordiv", DISTANCE, 2), 3),
    call("where", CAUSAL, SCORE, number(-float("inf"))),
    call("mul", SCORE, call("exp2", call("neg", call("div", 8, Var("HQ", INT))))),
    call("and", CAUSAL, Const(True, BOOL)),
]


def workload():
    problem = problem_of(loaded("w", buffers=BUFFERS, params=PARAMS))
    return draw_workload(problem, 2, 4, 8, "cpu")


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_printed_source_is_the_tree(tree):
    load = workload()
    made = modification(tree, load, score=True)
    score = torch.randn(2, 4, 8, 8)
    b, h, q, k = (
        torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate((2, 4, 8, 8))
    )
    env = {
        **load.sizes,
        **load.params,
        **load.buffers,
        "score": score,
        "b": b,
        "h": h,
        "q_idx": q,
        "kv_idx": k,
    }
    got, want = made(score, b, h, q, k), evaluate(tree, env, torch)
    torch.testing.assert_close(
        got.to(want.dtype).expand_as(score), want.expand_as(score), rtol=1e-5, atol=1e-6
    )


def test_visible_counts_exactly():
    problem = problem_of(loaded("c", mask_mod=CAUSAL))
    assert visible(draw_workload(problem, 2, 3, 2000, "cpu")) == 2 * 3 * 2000 * 2001 // 2
    load = draw_workload(problem_of(plain()), 2, 4, 100, "cpu")
    assert visible(load) == 2 * 4 * 100 * 75


def test_sdpa_only_where_it_applies():
    for mask, score, applies in [
        (None, None, True),
        (CAUSAL, None, True),
        (PADDING, None, False),
        (None, ALIBI, False),
    ]:
        problem = problem_of(loaded("s", mask_mod=mask, score_mod=score, buffers=BUFFERS))
        load = draw_workload(problem, 1, 2, 16, "cpu")
        if applies:
            assert peers.prepare("sdpa", load, {})(load.q, load.k, load.v).shape == load.q.shape
        else:
            with pytest.raises(peers.DoesNotApply):
                peers.prepare("sdpa", load, {})
    assert H.name == "h"


def test_reads_are_guarded_where_an_index_may_leave_the_buffer():
    """FlexAttention gets the code that a user would write: no guard if there are as many queries as
    keys.
    """
    problem = problem_of(
        load(Path(__file__).resolve().parents[3] / "specs" / "document_causal.yaml")
    )
    same = draw_workload(problem, 1, 1, 64, "cpu")
    assert (
        python_source(problem.mask_mod, same) == "(doc[q_idx] == doc[kv_idx]) & (q_idx >= kv_idx)"
    )
    fewer = replace(same, buffers={"doc": same.buffers["doc"][:16]})
    assert python_source(problem.mask_mod, fewer).count("torch.clamp(") == 2


def test_kernels_for_every_chip_beside_those_for_hopper():
    root = Path(__file__).resolve().parents[3]
    specs = [load(root / "specs" / f"{name}.yaml") for name in ("causal", "causal_fp32")]
    rows = bench_specs(
        specs, root / "generated", BenchOptions(("kgen-triton",), "1x1x64", None, device="cpu")
    )
    assert [(r["spec"], r["peer"]) for r in rows if r["pass"] == "forward"] == [
        ("causal", "kgen"), ("causal", "kgen-triton"), ("causal_fp32", "kgen"),
    ]  # fmt: skip
    assert all(row["error"] is None for row in rows)


def test_kernels_for_every_chip_leave_those_for_hopper_alone(monkeypatch):
    """Both modules are in one process, and each runs its own kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    root = Path(__file__).resolve().parents[3]
    module = import_file(root / "generated" / "causal" / "triton.py", "kgen_test_every_chip")
    load_ = draw_workload(problem_of(load(root / "specs" / "causal.yaml")), 1, 1, 64, "cpu")
    other = peers.prepare("kgen-triton", load_, {"kgen": module.causal})
    found = []
    for name in ("kgen_test_every_chip.triton", "kgen_for_every_chip_causal.triton"):
        chosen = sys.modules[name]._on_hopper
        monkeypatch.setattr(sys.modules[name], "_arch", lambda device: 90)
        found.append(chosen(load_.q, load_.k, load_.v))
        seen = lambda *tensors, name=name: found.append(name) or 1 / 0  # noqa: E731
        monkeypatch.setattr(sys.modules[name], "_on_hopper", seen)
    assert found == [True, False]
    for attention in (module.causal, other):
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            attention(load_.q, load_.k, load_.v)
    assert found[2:] == ["kgen_test_every_chip.triton", "kgen_for_every_chip_causal.triton"]


@pytest.mark.parametrize(
    ("text", "ok"), [("(out.float() * dout.float()).sum(3)", True), ("out.float().sum(3)", False)]
)
def test_a_delta_beside_what_pytorch_makes_of_it(text, ok, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(
        delta, "measure", lambda found, job: [one.samples.extend([1e-3] * 2) for one in found]
    )
    path = tmp_path / "cuda.py"
    path.write_text(f"def d_delta(out, dout):\n    return {text}\n")
    problem = problem_of(loaded("d", mask_mod=CAUSAL))
    job = BenchJob(problem, {}, (), Shape(), "cpu", rounds=2, budget=0.0, parts={"delta": path})
    load = draw_workload(problem, 1, 2, 64, "cpu")
    rows = {row["peer"]: row for row in delta.race_delta(job, load)}
    assert list(rows) == (
        ["kgen", "compile", "eager", "copy"] if ok else ["kgen", "copy", "compile", "eager"]
    )
    assert all(row["pass"] == "delta" for row in rows.values())
    nbytes = 2 * load.dout.nbytes + 4 * 2 * 64
    assert rows["kgen"]["tbps"] == round(nbytes / 1e-3 / 1e9, 3) > 0
    assert ("disagrees with kgen" in (rows["eager"]["error"] or "")) != ok


def test_plot_shows_decoding_by_length(tmp_path):
    drawn = {}

    def bars(axis, groups, series, form, best):
        drawn[tuple(groups)] = series, best

    def row(pass_, peer, **rate):
        return {"spec": "s", "pass": pass_, "peer": peer, "tflops": None, "tbps": None, **rate}

    rows = [
        row("forward", "kgen", tflops=500.0),
        row("forward", "sdpa", tflops=450.0),
        row("forward", "flex", tflops=300.0),
        row("decode 16384", "kgen", tbps=4.0),
        row("decode 16384", "copy", tbps=4.2),
        row("delta", "kgen", tbps=4.1),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot.plotting, "bars", bars)
        assert plot.plot([{"rows": rows, "facts": {}}], tmp_path / "x.png")
    assert drawn == {
        ("s",): (
            {"kgen": {"s": 500.0}, "sdpa": {"s": 450.0}, "flex": {"s": 300.0}, "copy": {}},
            {"s": "sdpa"},
        ),
        ("s, 16384",): (
            {"kgen": {"s, 16384": 4.0}, "sdpa": {}, "flex": {}, "copy": {"s, 16384": 4.2}},
            {},
        ),
    }


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert not plot.plot([], tmp_path / "x.png")
    assert "matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [1, 3, 5, 100, 4096, 16384, 16385])
def test_ragged_lengths_add_up(tokens):
    lengths = packed.ragged(tokens)
    assert sum(lengths) == tokens
    assert min(lengths) >= 1
    assert tokens < 8 or len(set(lengths)) > 2


def test_packed_sequences_are_documents_to_the_peers():
    """Peers get one sequence with documents.

    Its results equal the packed sequences, one after the other.
    """
    mask = call("ge", call("sub", call("add", Q, Var("SK", INT)), Var("SQ", INT)), K)
    slopes = {"slopes": buffer(("HQ",), "fp32"), "lens": buffer(("B",), "int32")}
    shown = call("and", mask, call("ge", K, call("sub", Read("lens", (B,), INT), 60)))
    problem = replace(
        problem_of(loaded("v", mask_mod=shown, score_mod=ALIBI, buffers=slopes)), varlen=True
    )
    load = draw_workload(problem, 2, 4, 100, "cpu")
    load.buffers["lens"].copy_(torch.arange(len(load.buffers["lens"])) % 60)
    got = peers.prepare("eager", load, {})(load.q, load.k, load.v)
    assert load.packing is not None
    ends = load.packing.cu_seqlens.tolist()
    assert ends[-1] == 200
    assert len(ends) > 4
    pairs = 0
    for i, (start, end) in enumerate(pairwise(ends)):
        one = draw_workload(replace(problem, varlen=False), 1, 4, end - start, "cpu")
        one.buffers["slopes"].copy_(load.buffers["slopes"])
        one.buffers["lens"].copy_(load.buffers["lens"][i])
        part = [x[:, :, start:end] for x in (load.q, load.k, load.v)]
        torch.testing.assert_close(got[:, :, start:end], peers.prepare("eager", one, {})(*part))
        pairs += visible(one)
    assert visible(load) == pairs


def test_varlen_attn_only_where_it_applies():
    for mask, score, wanted in [
        (None, None, {}),
        (CAUSAL, None, {"window_size": (-1, 0)}),
        (call("gt", Q, K), None, None),
        (PADDING, None, None),
        (CAUSAL, ALIBI, None),
    ]:
        problem = replace(
            problem_of(loaded("s", mask_mod=mask, score_mod=score, buffers=BUFFERS)), varlen=True
        )
        load = draw_workload(problem, 1, 2, 16, "cpu")
        if wanted is None:
            with pytest.raises(peers.DoesNotApply):
                peers.prepare("varlen", load, {})
        else:
            assert peers.prepare("varlen", load, {})
            assert load.packing is not None
            assert libraries.causal_when_packed(load.packing) == bool(wanted)


def test_gradients_of_packed_views_are_views():
    """Peers store the gradient without a copy, which would add to their time."""
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    grad = torch.randn(16, 2, 8)
    (found,) = torch.autograd.grad(libraries.by_token(x), x, grad)
    assert found.data_ptr() == grad.data_ptr()


def test_the_script_of_a_user_of_flex_attention():
    load = workload()
    problem = replace(load.problem, mask_mod=call("and", CAUSAL, PADDING), score_mod=ALIBI)
    script = first_call.flex_script(replace(load, problem=problem))
    compile(script, "script", "exec")
    assert "create_block_mask(mask_mod, 2, None, 8, 8, device=device)" in script
    assert "score_mod=score_mod" in script
