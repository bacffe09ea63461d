"""linear_attention: its reference against the definitions of its rules, and the eager computation
against the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kgen.kernels.linear_attention.verify.eager import chunked, eager, eager_steps
from kgen.kernels.linear_attention.verify.inputs import Case, cases, differentiable, draw, drawn
from kgen.kernels.linear_attention.verify.problem import Problem, problem_of
from kgen.kernels.linear_attention.verify.reference import (
    STATE,
    Call,
    Result,
    computed,
    linear_attention,
)
from kgen.spec.load import load, loads

ROOT = Path(__file__).resolve().parents[3]
STOCK = sorted(
    path
    for path in (ROOT / "specs").glob("*.yaml")
    if "kernel: linear_attention\n" in path.read_text()
)
IDS = [path.stem for path in STOCK]
HEAD = "kernel: linear_attention\nname: sample\ndtype: bf16\nhead_dim: 64\nchunk_size: 16\n"
H, HV, K, V = 2, 4, 3, 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products take longer in several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def of(text: str = "", **changes: object) -> Problem:
    """Return a problem with small heads."""
    problem = problem_of(loads(HEAD + text, "sample.yaml"))
    return replace(problem, head_qk=K, head_v=V, chunk_size=4, **changes)


def small(path: Path) -> Problem:
    return replace(problem_of(load(path)), head_qk=8, head_v=4, chunk_size=4)


def numbers(T: int, batch: int = 1, **more: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (batch, T, H, K), "k": (batch, T, H, K), "v": (batch, T, HV, V), **more}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


# --- the rules, by their definitions ------------------------


def steps(t: Mapping[str, Tensor], b: int, h: int, **by: object) -> tuple[Tensor, Tensor]:
    """Return the outputs of one head and its last state, by products of whole matrices.

    `decay(t, h)` [K] or a number, `beta(t, h)`; `delta` is the rule.
    """
    decay, beta = by.get("decay", lambda t, h: 0.0), by.get("beta", lambda t, h: 1.0)
    q, k = (t[n][b, :, h // (HV // H)] for n in ("q", "k"))
    state = t[STATE][b, h] if STATE in t else torch.zeros(K, V, dtype=torch.float64)
    eye, outputs = torch.eye(K, dtype=torch.float64), []
    for i, value in enumerate(t["v"][b, :, h]):
        factor = torch.as_tensor(decay(i, h), dtype=torch.float64).exp() * torch.ones(K)
        kept = eye
        if by.get("delta"):
            kept = eye - beta(i, h) * torch.outer(k[i], k[i])
        state = kept @ torch.diag(factor.double()) @ state
        state = state + beta(i, h) * torch.outer(k[i], value)
        outputs.append(by.get("scale", K**-0.5) * q[i] @ state)
    return torch.stack(outputs), state


def agrees(problem: Problem, t: dict[str, Tensor], **by: object) -> None:
    got = linear_attention(problem, t)
    for b in range(len(t["q"])):
        for h in range(HV):
            o, state = steps(t, b, h, **by)
            torch.testing.assert_close(got.o[b, :, h], o)
            torch.testing.assert_close(got.final_state[b, h], state)


def test_the_sum_of_outer_products() -> None:
    agrees(of(), numbers(7, 2))


def test_a_decay_of_each_head() -> None:
    t = numbers(6, g=(1, 6, HV), a=(HV,))
    problem = of(
        "buffers: {g: {shape: [T, HV], dtype: fp32}, a: {shape: [HV], dtype: fp32}}\n"
        "decay: -exp(a[h]) * abs(g[t, h]) - h / HV\ngate_base: 2\n"
    )

    def decay(i: int, h: int) -> Tensor:
        return (-t["a"][h].exp() * t["g"][0, i, h].abs() - h / HV) * math.log(2)

    agrees(problem, t, decay=decay)


@pytest.mark.parametrize("rule", ["add", "delta"])
def test_a_decay_of_each_column_and_beta(rule: str) -> None:
    t = numbers(6, 2, g=(2, 6, HV, K), b=(2, 6, HV), a=(HV, K), **{STATE: (2, HV, K, V)})
    problem = of(
        "buffers:\n  g: {shape: [T, HV, K], dtype: fp32}\n  a: {shape: [HV, K], dtype: fp32}\n"
        "  b: {shape: [T, HV], dtype: fp32}\n"
        f"decay: -abs(g[t, h, c]) - abs(a[h, c]) - c\nbeta: sigmoid(b[t, h])\nrule: {rule}\n"
    )
    for row in range(2):
        one = {n: x if n == "a" else x[row : row + 1] for n, x in t.items()}

        def decay(i: int, h: int, one: dict[str, Tensor] = one) -> Tensor:
            return -one["g"][0, i, h].abs() - one["a"][h].abs() - torch.arange(K)

        def beta(i: int, h: int, one: dict[str, Tensor] = one) -> Tensor:
            return one["b"][0, i, h].sigmoid()

        agrees(problem, one, decay=decay, beta=beta, delta=rule == "delta")
    both = linear_attention(problem, t)
    alone = linear_attention(problem, {n: x if n == "a" else x[1:] for n, x in t.items()})
    torch.testing.assert_close(both.o[1:], alone.o)


def test_feature_maps_norm_scale_and_skip() -> None:
    t = numbers(5, d=(HV,))
    problem = of(
        "buffers: {d: {shape: [HV], dtype: fp32}}\nq_map: x + 2\nk_map: max(x, 0) ** 2\n"
        "qk_norm: l2\neps: 0.5\nscale: 3\nskip: d[h] * v + c\n"
    )

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt()

    mapped = t | {"q": norm(t["q"] + 2), "k": norm(t["k"].clamp_min(0).square())}
    got, want = linear_attention(problem, t).o, torch.empty_like(t["v"])
    given = linear_attention(problem, t, Call(scale=-0.5)).o
    for h in range(HV):
        skip = t["d"][h] * t["v"][0, :, h] + torch.arange(V)
        want[0, :, h] = steps(mapped, 0, h, scale=3.0)[0] + skip
        torch.testing.assert_close(given[0, :, h], steps(mapped, 0, h, scale=-0.5)[0] + skip)
    torch.testing.assert_close(got, want)


def test_packed_sequences_are_calls_of_their_own() -> None:
    lengths = (3, 0, 5, 1)
    t = numbers(11, g=(1, 11, HV), **{STATE: (4, HV, K, V)})
    problem = of(
        "buffers: {g: {shape: [T, HV], dtype: fp32, grad: true}}\ndecay: -abs(g[t, h])\n"
        "rule: delta\nqk_norm: l2\nvarlen: true\n"
    )
    for x in (t["q"], t["k"], t["v"], t["g"]):
        x[:, 9:] = torch.nan
    wanted, cotangents = tuple(t), {"o": torch.randn(1, 11, HV, V)}
    cotangents["o"][:, 9:] = torch.nan
    got = linear_attention(problem, t, Call(lengths, None, cotangents, wanted))
    assert (got.o[:, 9:] == 0).all()
    assert all((got.grads[name][:, 9:] == 0).all() for name in ("q", "k", "v", "g"))
    assert torch.equal(got.final_state[1], t[STATE][1])
    begin = 0
    for n, length in enumerate(lengths):
        rows = slice(begin, begin + length)
        own = {m: x[n : n + 1] if m == STATE else x[:, rows] for m, x in t.items()}
        change = {"o": cotangents["o"][:, rows]}
        alone = linear_attention(problem, own, Call(None, None, change, wanted))
        torch.testing.assert_close(got.o[:, rows], alone.o)
        torch.testing.assert_close(got.final_state[n : n + 1], alone.final_state)
        for name in ("q", "g"):
            torch.testing.assert_close(got.grads[name][:, rows], alone.grads[name])
        begin += length


# --- the eager computation, and gradients ------------------------


def close(got: Tensor, want: Tensor, bound: float) -> bool:
    size = max(float(want.norm()), 1e-6)
    return float((got.double() - want).norm()) <= bound * size


def of_case(problem: Problem, case: Case) -> tuple[dict[str, Tensor], Call]:
    inputs = draw(problem, case, "cpu")
    wanted = tuple(differentiable(problem, inputs))
    return {n: x.detach() for n, x in inputs.tensors.items()}, inputs.call(problem, wanted)


@pytest.mark.parametrize("path", STOCK, ids=IDS)
def test_chunks_give_the_results_of_steps(path: Path) -> None:
    """In float64, the chunked form of the yardstick has the reference's outputs and gradients."""
    problem = small(path)
    t, call = of_case(problem, Case("chunks", (6, 5), heads=1))
    leaves = {n: x.detach().double().requires_grad_(n in call.wanted) for n, x in t.items()}
    got = computed(problem, leaves, call, partial(chunked, size=4), torch.float64)
    want = linear_attention(problem, t, call)
    assert close(got.o, want.o, 1e-5)
    assert close(got.final_state, want.final_state, 1e-5)
    assert [n for n in want.grads if not close(got.grads[n], want.grads[n], 1e-4)] == []


@pytest.mark.parametrize("path", STOCK, ids=IDS)
def test_eager_is_as_close_as_its_dtype(path: Path) -> None:
    problem = small(path)
    t, call = of_case(problem, Case("rounded", (9, 4), heads=1))
    got, want = eager(problem, t, call), linear_attention(problem, t, call)
    assert got.o.dtype is torch.bfloat16
    assert {n: x.dtype for n, x in got.grads.items()} == {n: t[n].dtype for n in call.wanted}
    assert close(got.o, want.o, 3e-2)
    assert [n for n in ("q", "k", "v") if not close(got.grads[n], want.grads[n], 6e-2)] == []
    stepped = eager_steps(problem, t, call)
    assert close(stepped.o, want.o, 4e-3)
    assert close(stepped.final_state, want.final_state, 1e-5)


def test_parts_of_shared_gradients_add_up() -> None:
    problem = small(ROOT / "specs/mamba2.yaml")
    t, call = of_case(problem, Case("parts", (9,)))
    want = linear_attention(problem, t, call)
    assert set(want.parts) == {"a_log", "dt_bias", "d"}
    for name, parts in want.parts.items():
        torch.testing.assert_close(parts.sum((0, 2)), want.grads[name])
        assert (want.natural[name] > 0).all()


def test_natural_size_of_a_gate_is_the_size_of_its_terms() -> None:
    """Without cancellation, it has the size of the gradient. A cancelling sum is smaller."""
    problem = small(ROOT / "specs/simple_gla.yaml")
    t, call = of_case(problem, Case("natural", (40,), batch=2))
    want = linear_attention(problem, t, call)
    ratio = float(want.natural["g"].norm() / want.grads["g"].norm())
    assert 0.3 < ratio < 30


# --- difficult inputs ------------------------


@pytest.mark.parametrize("path", STOCK, ids=IDS)
def test_cases_are_finite_and_distinct(path: Path) -> None:
    problem = replace(small(path), chunk_size=16)
    names = [case.name for case in cases(problem, quick=False)]
    assert len(names) == len({*names}) > 10
    assert {case.name for case in cases(problem, quick=True)} <= {*names}
    for case in cases(problem, quick=True):
        t, call = of_case(problem, replace(case, layout="contiguous"))
        steps = linear_attention(problem, t, replace(call, wanted=(), cotangents={}))
        for result in (steps, eager(problem, t, call)):
            found = [result.o, result.final_state, *result.grads.values()]
            assert all(bool(x.isfinite().all()) for x in found), case.name


def gates(problem: Problem, t: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the decays and betas of all tokens."""
    found: list[tuple[Tensor, Tensor]] = []

    def keep(one: object) -> tuple[Tensor, Tensor]:
        found.append((one.decay, one.beta))  # type: ignore[attr-defined]
        return one.v, one.state  # type: ignore[attr-defined]

    leaves = {n: x.detach().double() for n, x in t.items()}
    computed(problem, leaves, Call(), keep, torch.float64)
    return found[0]


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "gla", "simple_gla", "mamba2"])
def test_hard_gates_keep_and_forget_everything(name: str) -> None:
    problem = small(ROOT / f"specs/{name}.yaml")
    t, _ = of_case(problem, Case("hard", (40,), gates="hard"))
    decay, _ = gates(problem, t)
    assert float(decay.min()) < -500
    assert float(decay.max()) > -1e-1
    usual, _ = gates(problem, of_case(problem, Case("usual", (40,)))[0])
    assert (usual <= 0).all()
    assert 0.05 < float(-usual.median()) * problem.chunk_size < 50, "it lasts for about a chunk"


def test_raw_gates_are_zero_and_far_below() -> None:
    t, _ = of_case(small(ROOT / "specs/simple_gla.yaml"), Case("hard", (40,), gates="hard"))
    assert {*t["g"].flatten().tolist()} == {0.0, -1e4}


@pytest.mark.parametrize(
    ("name", "values"),
    [("gated_delta_rule", {0, 1}), ("deltanet_negative", {0, 2}), ("delta_rule", {0, 1})],
)
def test_hard_gates_write_nothing_and_everything(name: str, values: set[int]) -> None:
    problem = small(ROOT / f"specs/{name}.yaml")
    t, _ = of_case(problem, Case("hard", (60,), gates="hard"))
    _, beta = gates(problem, t)
    assert values <= {*beta.flatten().tolist()}


def test_keys_have_length_one_without_a_norm() -> None:
    for text in ("rule: delta\n", "rule: delta\nk_map: exp(x) - 1\n"):
        problem = of(text)
        t, _ = of_case(problem, Case("keys", (30,), heads=2))
        keys = t["k"].double() if "k_map" not in text else t["k"].double().exp() - 1
        assert float(keys.norm(dim=-1).max()) < 1.01
    with pytest.raises(ValueError, match="use `qk_norm: l2`"):
        draw(of("rule: delta\nk_map: exp(x) + 3\n"), Case("keys", (30,)), "cpu")


def test_repeated_keys() -> None:
    problem = small(ROOT / "specs/delta_rule.yaml")
    t, _ = of_case(problem, Case("keys", (9,), keys="repeated"))
    assert (t["k"] == t["k"][:, :1]).all()
    t, _ = of_case(problem, Case("keys", (9,), keys="few"))
    assert torch.equal(t["k"][:, 2], -t["k"][:, 0])
    assert torch.equal(t["k"][:, 4], t["k"][:, 0])


def test_gates_that_cannot_be_bounded_are_an_error() -> None:
    text = "buffers: {g: {shape: [T, HV], dtype: fp32}}\ndecay: sin(9 * g[t, h])\n"
    with pytest.raises(ValueError, match="the decay is above 0"):
        drawn(of(text))


def test_the_state_of_bf16_is_rounded_at_the_ends() -> None:
    problem = of("state_dtype: bf16\n")
    t, call = of_case(problem, Case("bf16", (9,), heads=2))
    assert t[STATE].dtype is torch.bfloat16
    result: Result = eager(problem, t, call)
    assert result.final_state.dtype is torch.bfloat16
    assert result.grads[STATE].dtype is torch.bfloat16
