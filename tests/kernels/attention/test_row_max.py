"""The largest score of each row: calls with `return_max`, and kernels whose result is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from support.interpreters.some_cases import emitted, failures
from torch import Tensor

from kgen.kernels.attention.verify.inputs import Case
from kgen.kernels.attention.verify.row_max import of_heads
from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.families import problem_of
from kgen.verify.toolchain import import_file

HEAD = "kernel: attention\nname: peaks\ndtype: {dtype}\nhead_dim: {head_dim}\n"
ASKED = "row_max: true\n"
CAUSAL = "mask_mod: q_idx >= kv_idx\n"
LINEAR = (
    "buffers: {slopes: {shape: [HQ], dtype: fp32}}\n"
    "score_mod: score + slopes[h] * (kv_idx - q_idx)\n"
)
FORWARD, BOTH = "passes: [forward]\n", "passes: [forward, backward]\n"


def text_of(*lines: str, dtype: str = "fp32", head_dim: int = 16) -> str:
    return HEAD.format(dtype=dtype, head_dim=head_dim) + ASKED + "".join(lines)


def test_only_who_asks_has_the_argument() -> None:
    plain = HEAD.format(dtype="bf16", head_dim=128) + CAUSAL + BOTH
    without = render_spec(loads(plain, "peaks.yaml"))
    assert render_spec(loads(f"{plain}row_max: false\n", "peaks.yaml")) == without
    assert not any("return_max" in text or "STORE_MAX" in text for text in without.values())
    files = render_spec(loads(plain + ASKED, "peaks.yaml"))
    assert "return_max=False" in files["triton.py"]
    assert "STORE_MAX" in files["hopper.py"]
    # Other specs may have a buffer of that name.
    named = "buffers: {return_max: {shape: [HQ], dtype: fp32}}\nscore_mod: score + return_max[h]\n"
    assert "*, return_max, " in render_spec(loads(plain + named, "peaks.yaml"))["triton.py"]


SPECS = {
    "dense": ((CAUSAL, LINEAR, FORWARD), ("tile", "q-longer", "no-keys", "no-queries")),
    "sunk": ((CAUSAL, "sinks: true\n", FORWARD), ("tile", "q-longer", "no-keys")),
    "packed": (("varlen: true\n", "mask_mod: q_idx + SK - SQ >= kv_idx\n", FORWARD), ("tail",)),
    "listed": ((CAUSAL, "block_mask: always\n", FORWARD), ("blocks",)),
    "few": ((CAUSAL, LINEAR, "passes: [forward, decode]\n"), ("decode-some", "decode-splits")),
    "pages": ((CAUSAL, "paged_kv: {page_size: 16}\n", "passes: [decode]\n"), ("decode-some",)),
}


DTYPES = {"dense": "bf16"}
"""The dtypes of specs whose loops leave out a term of a row. In fp32, they keep it."""


@pytest.mark.parametrize("name", SPECS)
def test_the_largest_score_is_right(name: str, tmp_path: Path, verdict: Any) -> None:
    lines, cases = SPECS[name]
    text = text_of(*lines, dtype=DTYPES.get(name, "fp32"))
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "peaks.yaml")), path)
    assert not interpreted(failures, text, path, cases)


SERVED = {"window": "sinks: true\n", "batch": "deterministic: batch\nsinks: true\n"}


@pytest.mark.parametrize("name", SERVED)
def test_the_largest_score_of_a_batch(name: str, tmp_path: Path, verdict: Any) -> None:
    text = text_of(CAUSAL, SERVED[name], "passes: [forward, serve]\n", dtype="bf16", head_dim=32)
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "peaks.yaml")), path)
    assert not interpreted(failures, text, path, ["serve-mixed", "serve-one-long", "serve-chunk"])


STORED = "tl.store(max_ptr + b_h.to(tl.int64) * SQ + q_idx, "
FOLLOWED = "m_top = tl.maximum(m_top, tl.max(qk, 1) * qk_scale)"
PARTS = "tl.load(part_max_ptr + at, mask=split < "
MUTANTS = {
    "the sink as a score": ("sunk", f"{STORED}m_top", f"{STORED}m_i"),
    "the last tile alone": ("sunk", FOLLOWED, "m_top = tl.max(qk, 1) * qk_scale"),
    "the term of the row left out": ("dense", "q_idx, m_i + ", "q_idx, m_i + 0.0 * "),
    "the first split alone": ("few", f"{PARTS}splits", f"{PARTS}1"),
}
"""Kernels whose largest score is wrong: the spec, a text, and its replacement."""


@pytest.mark.parametrize("what", MUTANTS)
def test_a_wrong_score_is_found(what: str, tmp_path: Path, verdict: Any) -> None:
    name, old, new = MUTANTS[what]
    lines, cases = SPECS[name]
    text = text_of(*lines, dtype=DTYPES.get(name, "fp32"))
    path = emitted(text, tmp_path)
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    verdict(problem_of(loads(text, "peaks.yaml")), path)
    wrong = interpreted(failures, text, path, cases)
    assert wrong
    assert all("max" in message for message in wrong)


HOPPER = {
    "lazy": (CAUSAL, FORWARD),
    "bounded": (CAUSAL, "score_mod: 30 * tanh(score / 30)\n", FORWARD),
}
ON_HOPPER = (Case("steep", 197, 197, 2, 1, layout="padded", scale=1.0, lse=True),)


@pytest.mark.parametrize("name", HOPPER)
def test_the_reference_of_the_softmax_is_not_the_maximum(
    name: str, tmp_path: Path, verdict: Any
) -> None:
    """On Hopper, `m_i` lags behind the largest score, so a result from it would be wrong."""
    text = text_of(*HOPPER[name], dtype="bf16", head_dim=128)
    path = emitted(text, tmp_path)
    source = path.read_text()
    stored = "args.max_ptr + b_h.to(gl.int64) * problem.SQ + q_idx, m_top"
    lagging = tmp_path / "lagging.py"
    lagging.write_text(source.replace(stored, stored.replace("m_top", "m_i")))
    assert source != lagging.read_text()
    verdict(problem_of(loads(text, "peaks.yaml")), path, lagging)
    assert not interpreted(failures, text, path, ON_HOPPER, True)
    wrong = interpreted(failures, text, lagging, ON_HOPPER, True)
    assert wrong
    assert all("max" in message for message in wrong)


def test_calls(tmp_path: Path, verdict: Any) -> None:
    text = text_of(CAUSAL, "gqa: 2\n", BOTH)
    path = emitted(text, tmp_path)
    verdict(problem_of(loads(text, "peaks.yaml")), path)
    interpreted(_check_calls, path)


def _check_calls(path: Path) -> None:
    from kgen.verify import interpreter

    interpreter.mend()
    torch.set_num_threads(1)
    module: Any = import_file(path, "kgen_test_row_max")
    peaks, operator = module.peaks, module._out_lse_max_op
    q, k, v = (torch.randn(1, heads, 24, 16) for heads in (4, 2, 2))
    _refuse(peaks, q, k, v)
    _check_results(peaks, q, k, v)
    _check_gradients(peaks, q, k, v)
    _check_transforms(peaks, q, k, v)
    torch.library.opcheck(operator, (q, k, v, 0.25))
    learned = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(operator, (*learned, 0.25))
    for form in (True, "head"):
        compiled = torch.compile(peaks, fullgraph=True, backend="aot_eager")
        for tensors in ((q, k, v), learned):
            found = compiled(*tensors, return_lse=True, return_max=form)
            wanted = peaks(*tensors, return_lse=True, return_max=form)
            torch.testing.assert_close(found, wanted)
            assert not found[2].requires_grad


def _refuse(peaks: Any, *tensors: Tensor) -> None:
    for wrong in (1, None, "rows", "Head", torch.tensor(True)):
        with pytest.raises(ValueError, match="return_max must be True, False or 'head'"):
            peaks(*tensors, return_max=wrong)


def _check_results(peaks: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = peaks(q, k, v, return_lse=True)
    same, rows = peaks(q, k, v, return_max=True)
    again, log_sums, heads = peaks(q, k, v, return_lse=True, return_max="head")
    for one, other in ((out, same), (out, again), (lse, log_sums)):
        assert torch.equal(one, other)
    scores = 0.25 * q @ k.repeat_interleave(2, 1).mT
    scores = scores.masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf)
    torch.testing.assert_close(rows, scores.amax(-1))
    assert (rows <= lse + 1e-6).all()
    assert torch.equal(heads, of_heads(rows))
    _, none = peaks(q, k[:, :, :0], v[:, :, :0], return_max=True)
    assert (none == -torch.inf).all()
    for empty in (q[:, :, :0], q[:0]):
        keys = k[: len(empty)], v[: len(empty)]
        assert peaks(empty, *keys, return_max="head")[1].tolist() == [-torch.inf] * 4


def _check_gradients(peaks: Any, *tensors: Tensor) -> None:
    learned = [x.clone().requires_grad_() for x in tensors]
    out, lse, rows = peaks(*learned, return_lse=True, return_max=True)
    assert not rows.requires_grad
    found = torch.autograd.grad((out.sum(), lse.sum()), learned, (torch.ones(()),) * 2)
    out, lse = peaks(*learned, return_lse=True)
    wanted = torch.autograd.grad((out.sum(), lse.sum()), learned, (torch.ones(()),) * 2)
    assert all(map(torch.equal, found, wanted))
    out, rows = peaks(*learned, return_max="head")
    assert out.requires_grad
    assert not rows.requires_grad


def _check_transforms(peaks: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    def total(x: Tensor) -> tuple[Tensor, Tensor]:
        out, rows = peaks(x, k, v, return_max=True)
        return out.sum(), rows

    found, rows = torch.func.grad(total, has_aux=True)(q)
    learned = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(peaks(learned, k, v).sum(), learned)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(rows, peaks(q, k, v, return_max=True)[1])
    several = torch.stack([q, 2 * q])
    each = torch.func.vmap(lambda x: peaks(x, k, v, return_max=True)[1])(several)
    torch.testing.assert_close(each[1], 2 * each[0])


def test_bench_has_a_peer_with_the_largest_scores(tmp_path: Path) -> None:
    for name, lines in {"dense": (CAUSAL,), "pages": SPECS["pages"][0]}.items():
        text = text_of(*lines)
        interpreted(_check_peer, text, emitted(text, tmp_path), name)


def _check_peer(text: str, path: Path, name: str) -> None:
    from kgen.kernels.attention.bench.peers import DoesNotApply, prepare
    from kgen.kernels.attention.bench.workload import draw_workload
    from kgen.verify import interpreter

    interpreter.mend()
    module: Any = import_file(path, f"kgen_test_peer_{name}")
    workload = draw_workload(problem_of(loads(text, "peaks.yaml")), 1, 1, 64, "cpu")
    operands, functions = (workload.q, workload.k, workload.v), {"kgen": module.peaks}
    calls = [prepare(peer, workload, functions) for peer in ("kgen", "kgen-max")]
    operators: list[str] = []
    known = module._out_lse_max_op

    def counted(*given: Any) -> Any:
        operators.append("max")
        return known(*given)

    module._out_lse_max_op = counted
    plain, largest = (call(*operands) for call in calls)
    assert torch.equal(plain, largest)
    assert operators == ["max"]
    without = draw_workload(problem_of(loads(text.replace(ASKED, ""), "x.yaml")), 1, 1, 64, "cpu")
    with pytest.raises(DoesNotApply):
        prepare("kgen-max", without, functions)
