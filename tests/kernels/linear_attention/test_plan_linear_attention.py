"""linear_attention: specs, plans, the page of `kgen explain`, and the sizes of benchmarks."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.bench.timing import BenchJob
from kgen.diagnostics import KgenError
from kgen.expr.nodes import variables
from kgen.expr.unparse import show
from kgen.kernels.linear_attention.bench.race import race
from kgen.kernels.linear_attention.bench.shape import Shape
from kgen.kernels.linear_attention.explaining import explain_linear_attention
from kgen.kernels.linear_attention.plan.kernels import kernels, saved, tensor_sizes
from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.spec import values
from kgen.kernels.linear_attention.verify.eager import eager
from kgen.kernels.linear_attention.verify.problem import problem_of
from kgen.kernels.linear_attention.verify.reference import STATE, Call, linear_attention
from kgen.pages.text import text as printed
from kgen.spec.load import Loaded, load, loads, loads_variants
from kgen.verify.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[3]
STOCK = sorted(
    path
    for path in (ROOT / "specs").glob("*.yaml")
    if "kernel: linear_attention\n" in path.read_text()
)
IDS = [path.stem for path in STOCK]
HEAD = "kernel: linear_attention\nname: sample\ndtype: bf16\nhead_dim: 128\n"


def spec(text: str = "") -> Loaded:
    return loads(HEAD + text, "sample.yaml")


def explained(loaded: Loaded) -> str:
    return printed(explain_linear_attention(loaded))


# --- the spec ------------------------


def test_defaults() -> None:
    found = spec().spec
    assert (found.rule, found.gate_base, found.state_dtype) == ("add", "e", "fp32")
    assert (found.norm_eps, found.scale, found.saves_states) == (None, None, True)
    assert found.called == ("sample",)
    assert spec("qk_norm: l2\n").spec.norm_eps == 1e-6
    assert spec("qk_norm: l2\neps: 0\n").spec.norm_eps == 0
    assert spec("passes: [forward, decode]\n").spec.called == ("sample", "sample_decode")
    assert spec("heads: {qk: 4, v: 8}\n").spec.heads.ratio == 2


def test_a_variant_of_twelve_lines() -> None:
    """A decay for each column, the delta rule, and a map of squared relu."""
    text = """kernel: linear_attention
name: squared
dtype: bf16
head_dim: 64
buffers:
  g: {shape: [T, HV, K], dtype: fp32, grad: true}
decay: -abs(g[t, h, c])
rule: delta
q_map: max(x, 0) ** 2
k_map: max(x, 0) ** 2
qk_norm: l2
"""
    plan = plan_linear_attention(loads(text, "squared.yaml"))
    assert plan.by_column
    assert plan.delta
    assert show(plan.formulas["k_map"].slopes["x"]) != "1"


@pytest.mark.parametrize(
    ("decay", "by_column", "by_token"),
    [
        ("0 - 0.5", False, False),
        ("log(1 - exp2(-5 - h))", False, False),
        ("-a[h]", False, False),
        ("-0.01 * (c + 1)", True, False),
        ("-abs(g[t, h])", False, True),
        ("-abs(g[t, h]) * (c + 1)", True, True),
        ("-abs(w[t, h, c])", True, True),
        ("-abs(d[h, c])", True, False),
    ],
)
def test_kinds_of_decays(decay: str, by_column: bool, by_token: bool) -> None:
    shapes = {"a": "[HV]", "g": "[T, HV]", "w": "[T, HV, K]", "d": "[HV, K]"}
    used = {name: shape for name, shape in shapes.items() if f"{name}[" in decay}
    buffers = "".join(f"  {n}: {{shape: {shape}, dtype: fp32}}\n" for n, shape in used.items())
    text = f"buffers:\n{buffers}" if used else ""
    loaded = spec(f"{text}decay: {decay}\n")
    plan = plan_linear_attention(loaded)
    assert (plan.by_column, plan.by_token) == (by_column, by_token)
    assert problem_of(loaded).by_column == by_column


def test_dtypes_and_widths_may_be_lists() -> None:
    text = HEAD.replace("bf16", "[bf16, fp16]").replace("128", "[64, {qk: 128, v: 64}]")
    found = [one.variant for one in loads_variants(text, "sample.yaml")]
    assert found == ["bf16_d64", "bf16_d128_64", "fp16_d64", "fp16_d128_64"]


# --- the plan ------------------------


@pytest.mark.parametrize("path", STOCK, ids=IDS)
def test_simplified_values_and_slopes_are_those_of_the_written_trees(path: Path) -> None:
    loaded = load(path)
    for formula in plan_linear_attention(loaded).formulas.values():
        names = sorted(formula.read | {n for s in formula.slopes.values() for n in variables(s)})
        torch.manual_seed(0)
        env: dict[str, Any] = {name: torch.randn(50, dtype=torch.float64) for name in names}
        env |= {n: torch.arange(50) for n in ("h", "c") if n in names} | {"H": 50, "HV": 50}
        leaves = {n: env[n].requires_grad_() for n in formula.slopes}
        written = evaluate(values(formula.tree), env, torch)
        torch.testing.assert_close(evaluate(formula.value, env, torch), written)
        for name, leaf in leaves.items():
            (want,) = torch.autograd.grad(written.sum(), leaf, retain_graph=True)
            got = evaluate(formula.slopes[name], env, torch).double().expand_as(want)
            torch.testing.assert_close(got, want)


def test_slopes_are_of_learned_buffers_and_inputs() -> None:
    text = (
        "buffers: {g: {shape: [T, HV], dtype: fp32}, a: {shape: [HV], dtype: fp32, grad: true}}\n"
        "decay: -exp(a[h]) * abs(g[t, h])\nskip: 2 * v\n"
    )
    plan = plan_linear_attention(spec(text))
    assert {f: set(x.slopes) for f, x in plan.formulas.items()} == {"decay": {"a"}, "skip": {"v"}}
    assert plan.learned == ("a",)
    forward = plan_linear_attention(spec(f"{text}passes: [forward]\n".replace(", grad: true", "")))
    assert forward.learned == ()
    assert forward.formulas["decay"].value == plan.formulas["decay"].value


# --- the page ------------------------


def test_recurrence_and_chunked_form() -> None:
    found = explained(load(ROOT / "specs/kda.yaml"))
    for line in (
        "k = k / sqrt(sum(k**2) + 1e-06)",
        "S' = diag(exp(decay[t])) * S[t - 1]",
        "beta[t] = sigmoid(b[t, h])",
        "u[t] = beta[t] * (v[t] - S'^T @ k[t])",
        "S[t] = S' + outer(k[t], u[t])",
        "o[t] = scale * S[t]^T @ q[t]",
        "A[i, j] = beta(i) * (k(i) * exp(G(i) - G(j))) . k(j), j < i",
        "N = (I + A)^-1 @ (beta * v) - W @ S",
        "S = exp(G(last)) * S + (exp(G(last) - G) * k)^T @ N",
    ):
        assert f"      {line}\n" in found, line
    plain = explained(spec("gate_base: 2\ndecay: 0 - 0.5\nk_map: exp(x)\nskip: 3 * v\n"))
    for line in (
        "k = exp(x), with x = k",
        "S' = 2**(decay[t]) * S[t - 1]",
        "u[t] = v[t]",
        "o[t] = scale * S[t]^T @ q[t] + 3 * v",
        "N = v",
    ):
        assert f"      {line}\n" in plain, line
    assert "S[t] = S[t - 1] + outer(k[t], u[t])" in explained(spec())


def test_saved_tensors_are_stated_in_bytes() -> None:
    plan = plan_linear_attention(spec("rule: delta\nheads: {qk: 16, v: 32}\n"))
    assert saved(plan) == ("inverse", "W", "new", "states")
    sizes = tensor_sizes(plan)
    size = sum(sizes[name].of(16, 32) for name in saved(plan))
    # In bf16: C numbers of the inverse, K of W, V of new, and a state for each chunk.
    assert size == 32 * 2 * (64 + 128 + 128 + 128 * 128 / 64)
    assert f"Forward saves {size:,.0f} bytes" in explained(
        spec("rule: delta\nheads: {qk: 16, v: 32}\n")
    )
    again = explained(spec("rule: delta\nsave: recompute\n"))
    assert "Backward first runs equations, inverse, solve, states again" in again
    assert saved(plan_linear_attention(spec("passes: [forward]\n"))) == ()


@pytest.mark.parametrize("path", STOCK, ids=IDS)
def test_kernels_read_tensors_that_others_write(path: Path) -> None:
    plan = plan_linear_attention(load(path))
    there = {"q", "k", "v", "do", *plan.buffers}
    for one in kernels(plan):
        assert set(one.reads) <= there, one.name
        assert one.bytes(1, 1) > 0
        there |= {*one.writes}
    assert {"o", "dq", "dk", "dv"} <= there
    assert {f"grad_{name}" for name in plan.learned} <= there


def test_products_of_the_output() -> None:
    plan = plan_linear_attention(spec("passes: [forward]\n"))
    (output,) = (one for one in kernels(plan) if one.name == "output")
    # For each token: K * V with the state, and C * (K + V) in the chunk.
    assert output.products(3) == 3 * (128 * 128 + 64 * (128 + 128))
    assert output.bytes(2, 3) == 2 * (2 * 2 * 128 + 2 * 3 * 128) + 2 * 3 * 128 * 128 / 64


def test_facts_are_those_that_the_page_of_commands_lists() -> None:
    facts = explain_linear_attention(load(ROOT / "specs/mamba2.yaml")).facts
    commands = (ROOT / "docs/commands.md").read_text()
    listed = re.findall(r"^\| (`[^|]+) \| linear_attention \|", commands, re.MULTILINE)
    assert {name.strip("`") for row in listed for name in row.split(", ")} == {*facts}


def test_a_step_is_explained() -> None:
    lines = "state_dtype: bf16\npasses: [forward, decode]\n"
    assert "reads and writes each state once: 65,536 bytes" in " ".join(
        explained(spec(lines)).split()
    )
    assert "each state once" not in " ".join(explained(spec()).split())


# --- benchmarks ------------------------


def test_shapes() -> None:
    assert Shape.parse("4x8192") == Shape(4, (8192,), states=(4,))
    assert Shape.parse("1x100x2x8") == Shape(1, (100,), 2, 8, (1,))
    for wrong in ("8192", "1x2x3", "0x5", "1x8x3x4", "1xa", "1x2x3x4x5", ""):
        with pytest.raises(KgenError, match="is not a shape"):
            Shape.parse(wrong)


def test_a_race_on_stand_ins() -> None:
    """The rows of all passes, with an emitted function that is the eager computation."""
    loaded = loads(
        "kernel: linear_attention\nname: sample\ndtype: bf16\nhead_dim: 64\nheads: {group: 1}\n"
        "chunk_size: 16\nbuffers: {g: {shape: [T, HV], dtype: fp32}}\n"
        "decay: -abs(g[t, h])\npasses: [forward, decode]\n",
        "sample.yaml",
    )
    problem = problem_of(loaded)

    def sample(q: Tensor, k: Tensor, v: Tensor, **buffers: Tensor) -> Tensor:
        return eager(problem, {"q": q, "k": k, "v": v, **buffers}).o

    def decode(q: Tensor, k: Tensor, v: Tensor, state: Tensor, **buffers: Tensor) -> Tensor:
        tensors = {"q": q, "k": k, "v": v, STATE: state, **buffers}
        found = linear_attention(problem, tensors, Call())
        state.copy_(found.final_state)
        return found.o.to(v.dtype)

    made = FunctionType(
        sample.__code__,
        {**sample.__globals__, "sample_decode": decode},
        closure=sample.__closure__,
    )
    shape = Shape(1, (40,), 1, 1, (2,))
    job = BenchJob(problem, {}, ("kgen", "eager"), shape, "cpu", rounds=2)
    rows = list(race(job, {"kgen": made}))
    assert rows[0]["workload"]["shape"]["g"] == [1, 40, 1]
    assert [(row["pass"], row["peer"], row["error"]) for row in rows[1:]] == [
        ("forward 40", "kgen", None),
        ("forward 40", "eager", None),
        ("forward 40", "copy", None),
        ("decode 2", "kgen", None),
        ("decode 2", "copy", None),
    ]
    assert rows[2]["distance"] == 0.0
