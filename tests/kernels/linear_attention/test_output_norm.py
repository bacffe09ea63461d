"""The norm, the gate and the expression of the output: reference, kernels, and wrong kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted, verified
from torch import Tensor
from torch.nn import functional

from kgen.diagnostics import KgenError
from kgen.kernels.linear_attention.adapt.fla import adapter
from kgen.kernels.linear_attention.explaining import explain_linear_attention
from kgen.kernels.linear_attention.plan.kernels import kernels, saved
from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.verify import cases
from kgen.kernels.linear_attention.verify.inputs import Case, differentiable, draw
from kgen.kernels.linear_attention.verify.problem import Problem, problem_of
from kgen.kernels.linear_attention.verify.reference import STATE, Call, linear_attention
from kgen.pages.text import text as printed
from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads
from kgen.verify.families import Subject
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parents[3]
HEAD = "kernel: linear_attention\nname: finished\ndtype: bf16\nhead_dim: 64\nchunk_size: 16\n"
GATED = (
    HEAD
    + """buffers:
  g: {shape: [T, HV], dtype: fp32, grad: true}
  z: {shape: [T, HV, V], dtype: bf16, grad: true}
  s: {shape: [T, HV, V], dtype: fp32, grad: true}
  w: {shape: [V], dtype: fp32, grad: true}
  d: {shape: [HV, V], dtype: fp32, grad: true}
decay: -abs(g[t, h])
output_gate: sigmoid(s[t, h, c])
output_norm: rms
output_eps: 1e-4
output: w[c] * o * silu(z[t, h, c]) + d[h, c]
passes: [forward, backward, decode]
"""
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products take longer in several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the reference ------------------------


def by_hand(t: dict[str, Tensor], o: Tensor) -> Tensor:
    """Return the output of `GATED` from the output before the gate, with PyTorch's norm."""
    o = functional.rms_norm(o * t["s"].sigmoid(), (64,), t["w"], 1e-4)
    return o * functional.silu(t["z"]) + t["d"]


def drawn(name: str = "drawn", **case: Any) -> tuple[Problem, dict[str, Tensor], Call]:
    problem = problem_of(loads(GATED, "finished.yaml"))
    inputs = draw(problem, Case(name, (21,), heads=2, **case), "cpu")
    wanted = tuple(differentiable(problem, inputs))
    return problem, inputs.tensors, inputs.call(problem, wanted)


@pytest.mark.parametrize("values", ["random", "zeros", "small"])
def test_the_reference_by_hand(values: str) -> None:
    problem, t, call = drawn(values=values)
    got = linear_attention(problem, t, call)
    plain = replace(problem, output_gate=None, output_eps=None, output=None)
    leaves = {n: x.detach().double().requires_grad_() for n, x in t.items()}
    raw = linear_attention(plain, t).o.requires_grad_()
    want = by_hand(leaves, raw)
    torch.testing.assert_close(got.o, want.detach())
    change = call.cotangents["o"].double()
    names = ("s", "z", "w", "d")
    grads = torch.autograd.grad(want, [raw, *(leaves[n] for n in names)], change)
    for name, grad in zip(names, grads[1:], strict=True):
        torch.testing.assert_close(got.grads[name], grad)
    # The gradient of the output before the gate is the cotangent of a spec without the fields.
    before = replace(call, cotangents=call.cotangents | {"o": grads[0]})
    others = linear_attention(plain, t, before).grads
    for name in ("q", "k", "v", "g", STATE):
        torch.testing.assert_close(got.grads[name], others[name])


def test_parts_of_gradients_add_up() -> None:
    problem, t, call = drawn()
    got = linear_attention(problem, t, call)
    assert {*got.parts} == {"w", "d"}
    torch.testing.assert_close(got.parts["w"].sum((0, 1)), got.grads["w"])
    torch.testing.assert_close(got.parts["d"].sum(0), got.grads["d"])
    assert all((got.natural[n] >= got.grads[n].abs() * 0.99).all() for n in ("z", "s"))


def test_a_buffer_of_the_decay_and_of_the_output_has_one_gradient() -> None:
    text = HEAD + (
        "buffers: {a: {shape: [HV], dtype: fp32, grad: true}}\ndecay: -abs(a[h])\n"
        "output: tanh(a[h] * o)\n"
    )
    problem = problem_of(loads(text, "finished.yaml"))
    inputs = draw(problem, Case("shared", (9,), heads=2), "cpu")
    call = inputs.call(problem, tuple(differentiable(problem, inputs)))
    got = linear_attention(problem, inputs.tensors, call)
    torch.testing.assert_close(got.parts["a"].sum((0, 2)), got.grads["a"])


def test_zero_rows_are_zero_and_small_rows_depend_on_eps() -> None:
    problem, t, _ = drawn("zeros", values="zeros", states="none")
    plain = replace(problem, output=None)
    assert (linear_attention(plain, t).o[:, :10] == 0).all()
    assert (linear_attention(plain, t).o[:, 11:] != 0).any(-1).all()
    problem, t, _ = drawn("small", values="small")
    plain = replace(problem, output=None)
    got = linear_attention(plain, t).o
    other = linear_attention(replace(plain, output_eps=1e-9), t).o
    assert float((other - got).norm() / got.norm()) > 0.1


def test_gates_are_saturated_in_hard_cases() -> None:
    _, t, _ = drawn("hard", gates="hard")
    assert {*t["z"].flatten().tolist()} == {*t["s"].flatten().tolist()} == {-20.0, 0.0, 20.0}


# --- the page ------------------------


def test_formulas_and_bytes() -> None:
    loaded = loads(GATED, "finished.yaml")
    page = printed(explain_linear_attention(loaded))
    for line in (
        "o[t] = o[t] * (sigmoid(s[t, h, c]))",
        "o[t] = o[t] / sqrt(mean(o[t]**2) + 0.0001)",
        "o[t] = w[c] * o * silu(z[t, h, c]) + d[h, c], with o = o[t]",
    ):
        assert f"      {line}\n" in page, line
    plan = plan_linear_attention(loaded)
    assert saved(plan)[-1] == "o_raw"
    named = {one.name: one for one in kernels(plan)}
    # o_raw, z and o in bf16, and s in float32.
    assert named["finish"].bytes(1, 2) == 2 * 64 * (2 + 2 + 2 + 4)
    # o_raw, do, z, do_raw and dz in bf16, s and ds in float32, and parts of dw and dd.
    of_parts = 2 * 4 * 64 / (4096 // 64)
    assert named["finish_back"].bytes(1, 2) == 2 * (64 * (5 * 2 + 2 * 4) + of_parts)
    again = plan_linear_attention(loads(f"{GATED}save: recompute\n", "finished.yaml"))
    assert saved(again) == ()
    text = f"{GATED}save: recompute\n"
    page = printed(explain_linear_attention(loads(text, "finished.yaml")))
    assert "Backward first runs gates, states, output again" in " ".join(page.split())


def test_the_adapter_refuses_what_it_would_drop() -> None:
    with pytest.raises(KgenError) as caught:
        adapter([load(ROOT / "specs/gated_delta_net.yaml")])
    messages = [one.message for one in caught.value.diagnostics]
    assert len(messages) == 2
    assert all("before norm and gate" in message for message in messages)
    assert [one.line for one in caught.value.diagnostics] == [18, 19]


# --- kernels ------------------------

SAMPLES = {
    "gated_before": ("specs", 1),
    "gated_delta_net": ("stock", 7),
    "kimi_linear": ("stock", 11),
}


@pytest.mark.parametrize("name", [*SAMPLES])
def test_verified_in_the_interpreter(name: str, tmp_path: Path, verdict: Any) -> None:
    """One of several cases of a stock spec, which has wide heads, and all of the corner spec."""
    folder, step = SAMPLES[name]
    loaded = load(ROOT / ("specs" if folder == "stock" else "tests/specs") / f"{name}.yaml")
    (tmp_path / name).mkdir()
    for file, text in render_spec(loaded).items():
        (tmp_path / name / file).write_text(text)
    problem = problem_of(loaded)
    verdict(problem, tmp_path)
    named = dict.fromkeys(n for g in problem.passes for n in cases.case_names(problem, g, True))
    own = ("zero-rows", "small-rows", "small-steps", "hard-gates")
    chosen = [n for i, n in enumerate(named) if i % step == 0 or n in own]
    rows = verified([loaded], tmp_path, device="cpu", timeout=120.0, cases=chosen)
    assert {row["pass"] for row in rows} == {"forward", "backward", "decode"}
    wrong = [f"{row['pass']} {row['case']}: {row['message']}" for row in rows if not row["ok"]]
    assert not wrong, "\n".join(wrong)


EPS = "tl.rsqrt(tl.sum(x * x, 1) / V + 0.0001)"
WRONG = {
    "no eps": (EPS, "tl.rsqrt(tl.sum(x * x, 1) / V)", "forward", "small-rows"),
    "no eps in backward": (EPS, EPS.replace("0.0001", "1e-9"), "backward", "small-rows"),
    "no eps in a step": (EPS, EPS.replace("0.0001", "1e-9"), "decode", "small-steps"),
    "a sum of squares": (EPS, EPS.replace(" / V", ""), "forward", "one-chunk"),
    "no gate before the norm": (
        "x = x * _output_gate(s_tile)\n",
        "x = x + 0 * _output_gate(s_tile)\n",
        "forward",
        "one-chunk",
    ),
    "no gate": ("return d + o * w * _silu(z)", "return d + o * w", "forward", "one-chunk"),
    "the gate of another head": (
        "h * stride_z_h",
        "(HV - 1 - h) * stride_z_h",
        "forward",
        "one-token",
    ),
    "the gate of another token": (
        "(first + i)[:, None] * stride_z_t",
        "first * stride_z_t",
        "forward",
        "off-chunk",
    ),
    "a gradient without the mean": (
        "dx - x * (tl.sum(x * dx, 1) / V)[:, None]",
        "dx",
        "backward",
        "one-chunk",
    ),
    "a gradient without the gate": ("    dx = dx * pre_norm\n", "", "backward", "one-chunk"),
    "dw of one head": ("finish_w.sum((0, 1))", "finish_w[:, 0].sum(0)", "backward", "one-token"),
    "dz without o": (
        "return o * w * (1 + z * (1 - value_q)) * value_q",
        "return w * (1 + z * (1 - value_q)) * value_q",
        "backward",
        "one-chunk",
    ),
    "do before the norm": ("        do = do_raw\n", "", "backward", "one-chunk"),
}


def _wrong(path: Path, group: str, case: str) -> list[str]:
    """Return the messages of failed outputs of one case."""
    from kgen.verify import interpreter

    interpreter.mend()
    problem = problem_of(loads(GATED, "finished.yaml"))
    subject = Subject(problem, "triton", path, import_file(path, "kgen_test_finished"), "cpu")
    return [one.message for one in cases.run_case(subject, group, case) if not one.ok]


@pytest.mark.parametrize("name", ["right", *WRONG])
def test_wrong_kernels_fail(name: str, tmp_path: Path) -> None:
    (text,) = render_spec(loads(GATED, "finished.yaml"), single=True).values()
    path = tmp_path / "finished.py"
    path.write_text(text)
    if name == "right":
        tried = dict.fromkeys((group, case) for *_, group, case in WRONG.values())
        for group, case in tried:
            assert interpreted(_wrong, path, group, case) == []
        return
    before, after, group, case = WRONG[name]
    assert before in text
    path.write_text(text.replace(before, after))
    assert interpreted(_wrong, path, group, case) != []


def _stepped(path: Path) -> None:
    """Check that a state after accepted tokens has the bits of a call with only these tokens."""
    from kgen.verify import interpreter

    interpreter.mend()
    decode = import_file(path, "kgen_test_finished").finished_decode
    problem = problem_of(loads(GATED, "finished.yaml"))
    t = draw(problem, Case("drafted", (5,), batch=2, heads=2), "cpu").tensors
    state = t.pop(STATE)
    states = torch.full((2, 5, *state.shape[1:]), torch.nan)
    drafted = state.clone()
    o = decode(**t, state=drafted, states=states)
    tokens = {"q", "k", "v", *(b.name for b in problem.buffers if b.tokens)}
    for n in range(1, 6):
        alone = state.clone()
        own = {m: x[:, :n] if m in tokens else x for m, x in t.items()}
        assert torch.equal(decode(**own, state=alone), o[:, :n])
        assert torch.equal(states[:, n - 1], alone)


def test_states_of_drafted_tokens(tmp_path: Path) -> None:
    path = tmp_path / "finished.py"
    (text,) = render_spec(loads(GATED, "finished.yaml"), single=True).values()
    path.write_text(text)
    interpreted(_stepped, path)
