"""`kgen verify` of linear_attention accepts a right kernel, and refuses wrong ones.

The kernel is a stand-in on PyTorch, which rounds where a kernel rounds: operands of products, and
results that other kernels read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.kernels.linear_attention.verify import cases
from kgen.kernels.linear_attention.verify.checks import (
    continues_from_states,
    keeps_sequences_apart,
    resumes_from_chunks,
)
from kgen.kernels.linear_attention.verify.inputs import Case, Inputs, draw
from kgen.kernels.linear_attention.verify.problem import Problem, problem_of
from kgen.kernels.linear_attention.verify.reference import (
    STATE,
    Call,
    Result,
    Tokens,
    outputs,
    recurrence,
    states_within,
)
from kgen.spec.load import load
from kgen.verify.families import Subject

ROOT = Path(__file__).resolve().parents[3]
C = 16


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product of two rounded operands."""
    return a.bfloat16().float() @ b.bfloat16().float()


def kept(factor: Tensor, state: Tensor) -> Tensor:
    """Return factor * state. The gradient of the factor reads the state and its gradient in
    bf16.
    """
    change = (factor - factor.detach()) * state.detach().bfloat16().float()
    if change.requires_grad:
        change.register_hook(lambda gradient: gradient.bfloat16().float())
    return factor.detach() * state + change


def chunk(one: Tokens, rows: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk of C tokens: the outputs [HV, C, V], and the state."""
    q, k, v = (x[rows].transpose(0, 1).float() for x in (one.q, one.k, one.v))
    n = q.shape[1]
    i = torch.arange(n)
    none = torch.zeros(len(q), n, 1)
    g = none if one.decay is None else one.decay[rows].transpose(0, 1).cumsum(1)
    beta = none + 1 if one.beta is None else one.beta[rows].transpose(0, 1)

    def pairs(a: Tensor, before: Tensor) -> Tensor:
        between = (g[:, :, None] - g[:, None]).masked_fill(~before[..., None], -torch.inf)
        if g.shape[-1] == 1:
            return product(a, k.mT) * between[..., 0].exp()
        half = (between / 2).exp()
        left, right = (half * a[:, :, None]).bfloat16(), (half * k[:, None]).bfloat16()
        return (left.float() * right.float()).sum(-1)

    new = (beta * v).bfloat16()
    if one.delta:
        lower = beta * pairs(k, i[:, None] > i)
        inverse = torch.linalg.inv(lower + torch.eye(n))
        keys = product(inverse, beta * g.exp() * k).bfloat16()
        new = (product(inverse, new).bfloat16() - product(keys, state)).bfloat16()
    o = product(q * g.exp(), state) + product(pairs(q, i[:, None] >= i), new)
    last = g[:, -1:]
    return one.scale * o, kept(last.exp().mT, state) + product((k * (last - g).exp()).mT, new)


def kernel(one: Tokens) -> tuple[Tensor, Tensor]:
    state, found = one.state, [one.v[:0].float()]
    for begin in range(0, one.length, C):
        o, state = chunk(one, slice(begin, begin + C), state)
        found.append(o.transpose(0, 1))
        one.record(min(begin + C, one.length), state)
    return torch.cat(found), state


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products take longer in several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Change = Callable[[Tokens], Tokens]


def module(problem: Problem, change: Change = lambda one: one, steps: Any = kernel) -> ModuleType:
    """Return an emitted file whose kernels are the stand-in, on changed tokens."""
    made = ModuleType(problem.name)

    def computed(steps: Any, tensors: dict[str, Tensor], more: dict[str, Any]) -> dict[str, Tensor]:
        starts = more.get("cu_seqlens")
        lengths = None if starts is None else starts.diff().tolist()
        options = Call(lengths, more.get("scale"), every=more.get("every"))

        def changed(one: Tokens) -> tuple[Tensor, Tensor]:
            other = change(one)
            one.skip, one.expression = other.skip, other.expression
            return steps(other)

        found, sequences = outputs(problem, tensors, options, changed, torch.float32)
        if options.every:
            found["states"] = states_within(problem, sequences, options.every, tensors)
        return found

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        output_final_state: bool = False,
        return_states: bool = False,
        cu_seqlens: Tensor | None = None,
        **others: Tensor,
    ) -> Any:
        tensors = {n: x if n == STATE else x.float() for n, x in others.items()}
        more = {"scale": scale, "cu_seqlens": cu_seqlens, "every": C if return_states else None}
        found = computed(steps, {"q": q, "k": k, "v": v, **tensors}, more)
        asked = {"final_state": output_final_state, "states": return_states}
        names = ["o", *(name for name, wanted in asked.items() if wanted)]
        return tuple(found[n] for n in names) if len(names) > 1 else found["o"]

    def decode(q: Tensor, k: Tensor, v: Tensor, state: Tensor, **others: Any) -> Tensor:
        names, states = ("scale", "cu_seqlens"), others.pop("states", None)
        tensors = {n: x.float() for n, x in others.items() if n not in names}
        wide = {"q": q.float(), "k": k.float(), "v": v.float(), STATE: state.float(), **tensors}
        found = computed(recurrence, wide, {"every": 1, **{n: others.get(n) for n in names}})
        state.copy_(found["final_state"])
        if states is not None:
            states.copy_(found["states"])
        return found["o"].to(v.dtype)

    setattr(made, problem.name, forward)
    setattr(made, f"{problem.name}_decode", decode)
    return made


def subject(name: str, change: Change = lambda one: one, **changes: Any) -> Subject:
    """Return the stand-in of a stock spec with narrow heads; `changes` make it another spec's."""
    problem = replace(problem_of(load(ROOT / f"specs/{name}.yaml")), chunk_size=C)
    problem = replace(problem, head_qk=32, head_v=32, passes=("forward", "backward", "decode"))
    made = module(replace(problem, **changes), change)
    return Subject(problem, "triton", Path("stand_in.py"), made, "cpu")


def wrong(of: Subject, group: str, names: tuple[str, ...]) -> list[str]:
    """Return the messages of failed outputs of some cases."""
    assert {*names} <= {*cases.case_names(of.problem, group, True)}
    found = [check for name in names for check in cases.run_case(of, group, name)]
    return [check.message for check in found if not check.ok]


FORWARD = (
    *("one-chunk", "off-chunk", "short", "tail", "kept-states"),
    *("hard-gates", "repeated-keys", "guarded"),
)
BACKWARD = ("one-token", "off-chunk", "hard-gates", "no-gates", "stepped")
STEPS = ("one-step", "few-steps", "uneven-steps", "kept-steps", "rounded-steps", "hard-steps")


@pytest.mark.parametrize(
    "name", ["gated_delta_rule", "gated_delta_net", "kda", "mamba2", "linear_attention_elu"]
)
def test_a_right_kernel_passes(name: str) -> None:
    of = subject(name)
    steps = STEPS if of.problem.varlen else tuple(n for n in STEPS if n != "uneven-steps")
    names = [n for n in FORWARD if n in cases.case_names(of.problem, "forward", True)]
    assert wrong(of, "forward", tuple(names)) == []
    assert wrong(of, "backward", BACKWARD) == []
    assert wrong(of, "decode", tuple(n for n in STEPS if n in steps)) == []


def test_a_right_kernel_passes_with_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decay of one token has the error of few numbers, which is small by chance."""
    of = subject("gated_delta_rule")
    for seed in range(20):

        def other(problem: Problem, case: Case, device: str, seed: int = seed) -> Inputs:
            return draw(problem, replace(case, name=f"{case.name} {seed}"), device)

        monkeypatch.setattr(cases, "draw", other)
        assert wrong(of, "backward", ("one-token",)) == []


@pytest.mark.parametrize(("share", "right"), [(0.01, True), (0.05, False)])
def test_errors_of_few_chunks_may_be_small_by_chance(share: float, right: bool) -> None:
    """The eager error of the large chunk is small. Most chunks have a larger share of the terms."""
    problem = subject("gated_delta_rule").problem
    sizes = torch.tensor([10.0, 0.1]).repeat_interleave(C)[None, :, None].double()
    shares = torch.tensor([2e-4, 2e-2]).repeat_interleave(C)[None, :, None]
    empty = torch.zeros(0)
    truth = Result(empty, empty, grads={"a": sizes}, natural={"a": sizes})
    eager = Result(empty, empty, grads={"a": sizes * (1 + shares)})
    got = {"da": (sizes * (1 + share)).bfloat16()}
    (check,) = cases._compare(problem, got, truth, eager, {})
    assert check.ok == right


@pytest.mark.parametrize(("value", "right"), [(40.75, True), (40.25, False)])
def test_rounding_may_cancel_an_eager_error(value: float, right: bool) -> None:
    """The eager gradient is 40.88 before it is rounded to 41, next to the truth."""
    problem = subject("gated_delta_rule").problem
    want, size, low, exact = (torch.full((1, 1, 1), x).double() for x in (40.98, 36, 41, 40.88))
    empty = torch.zeros(0)
    truth = Result(empty, empty, grads={"a": want}, natural={"a": size})
    eager = Result(empty, empty, grads={"a": low}, unrounded={"a": exact})
    got = {"da": torch.full((1, 1, 1), value).bfloat16()}
    (check,) = cases._compare(problem, got, truth, eager, {})
    assert check.ok == right


def without(name: str) -> Change:
    return lambda one: replace(one, **{name: None})


def late(one: Tokens) -> Tokens:
    """Let each token decay by the gate of the token before it."""
    assert one.decay is not None
    return replace(one, decay=torch.cat([one.decay[:1], one.decay[:-1]]))


def detached(name: str) -> Change:
    return lambda one: replace(one, **{name: getattr(one, name).detach()})


def times(name: str, factor: float) -> Change:
    return lambda one: replace(one, **{name: getattr(one, name) * factor})


def slope(name: str, factor: float) -> Change:
    """Multiply the gradient of a value, but not the value."""

    def change(one: Tokens) -> Tokens:
        value = getattr(one, name)
        if not value.requires_grad:
            return one
        same = value.detach() + (value - value.detach()) * factor
        return replace(one, **{name: same})

    return change


def of_output(change: Callable[[Tensor], Tensor]) -> Change:
    """Change the output from its value after the norm."""

    def changed(one: Tokens) -> Tokens:
        right = one.expression
        assert right is not None
        return replace(one, expression=lambda o: change(right(o)))

    return changed


def times_output(factor: float) -> Change:
    return of_output(lambda o: o * factor)


def slope_of_output(factor: float) -> Change:
    return of_output(lambda o: o.detach() + (o - o.detach()) * factor)


@pytest.mark.parametrize(
    ("name", "group", "case", "change"),
    [
        ("gated_delta_rule", "forward", "one-chunk", without("decay")),
        ("gated_delta_rule", "forward", "off-chunk", late),
        ("gated_delta_rule", "forward", "off-chunk", without("beta")),
        ("gated_delta_rule", "forward", "one-chunk", lambda one: replace(one, delta=False)),
        ("gated_delta_rule", "forward", "off-chunk", times("state", 0.98)),
        ("gated_delta_rule", "forward", "stepped", times("state", 0.0)),
        ("mamba2", "forward", "one-token", without("skip")),
        ("mamba2", "forward", "off-chunk", times("skip", 1.05)),
        ("kda", "forward", "one-chunk", lambda one: replace(one, decay=one.decay.roll(1, -1))),
        ("gated_delta_rule", "backward", "off-chunk", detached("decay")),
        ("gated_delta_rule", "backward", "off-chunk", slope("decay", 1.05)),
        ("gated_delta_rule", "backward", "off-chunk", slope("beta", 1.03)),
        ("gated_delta_rule", "backward", "stepped", slope("state", 1.03)),
        ("gated_delta_rule", "backward", "off-chunk", slope("k", 1.03)),
        ("kda", "backward", "off-chunk", slope("decay", 1.05)),
        ("mamba2", "backward", "off-chunk", slope("skip", 1.03)),
        ("gated_delta_net", "forward", "one-chunk", without("expression")),
        ("gated_delta_net", "forward", "one-token", times_output(1.02)),
        ("gated_delta_net", "backward", "off-chunk", slope_of_output(1.03)),
        ("gated_delta_net", "decode", "few-steps", times_output(1.01)),
        ("gated_delta_rule", "decode", "few-steps", without("decay")),
        ("gated_delta_rule", "decode", "few-steps", times("beta", 1.01)),
    ],
)
def test_a_wrong_kernel_fails(name: str, group: str, case: str, change: Change) -> None:
    assert wrong(subject(name, change), group, (case,))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gated_delta_rule", {"gate_base": 2}),
        ("gated_delta_rule", {"norm_eps": None}),
        ("linear_attention_elu", {"k_map": None}),
        ("lightning", {"scale": None}),
        ("gated_delta_net", {"output_eps": 1e-2}),
        ("gated_delta_net", {"output_eps": None}),
    ],
)
def test_the_kernel_of_another_spec_fails(name: str, changes: dict[str, Any]) -> None:
    assert wrong(subject(name, **changes), "forward", ("one-chunk",))


def test_a_final_state_without_the_last_decay_fails() -> None:
    of = subject("simple_gla")

    def early(one: Tokens) -> tuple[Tensor, Tensor]:
        o, state = kernel(one)
        assert one.decay is not None
        return o, state / one.decay[-1].exp()[..., None]

    right = of.function
    made = module(of.problem, steps=early)

    def forward(*tensors: Tensor, **more: Any) -> Any:
        found = right(*tensors, **more)
        return (found[0], getattr(made, of.problem.name)(*tensors, **more)[1])

    setattr(of.module, of.problem.name, lambda q, k, v, **more: forward(q, k, v, **more))
    messages = wrong(of, "forward", ("guarded",))
    assert [message.partition(":")[0] for message in messages] == ["final_state"]


def test_checks_pass_and_fail() -> None:
    right = subject("linear_attention_elu")
    keeps_sequences_apart(right)
    continues_from_states(subject("gated_delta_rule"))
    ignoring = subject("gated_delta_rule", times("state", 0.5))
    with pytest.raises(AssertionError, match="differs by"):
        continues_from_states(ignoring)
    for name in ("linear_attention_elu", "gated_delta_rule"):
        resumes_from_chunks(subject(name))
        with pytest.raises(AssertionError, match="o after a chunk has other bits"):
            resumes_from_chunks(subject(name, times("state", 0.5)))
        forgetting = subject(name, times("state", 0.5))
        low = replace(forgetting, problem=replace(forgetting.problem, state_dtype="bf16"))
        with pytest.raises(AssertionError, match="o after a chunk differs by"):
            resumes_from_chunks(low)
    mixing = subject("gated_delta_rule")
    function = mixing.function

    def mixed(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        o, state = function(q, k, v, **more)
        return o + 0 * o.sum(0, keepdim=True), state

    setattr(mixing.module, mixing.problem.name, mixed)
    with pytest.raises(AssertionError, match="depends on another sequence"):
        keeps_sequences_apart(mixing)


def test_a_state_beside_the_state_of_a_step_stays() -> None:
    of = subject("gated_delta_rule")
    decode = getattr(of.module, f"{of.problem.name}_decode")

    def writing(q: Tensor, k: Tensor, v: Tensor, state: Tensor, **more: Any) -> Tensor:
        whole = state.as_strided((1,), (1,), 0)
        whole.fill_(1.0)
        return decode(q, k, v, state, **more)

    setattr(of.module, f"{of.problem.name}_decode", writing)
    with pytest.raises(AssertionError, match="wrote next to `state`"):
        cases.run_case(of, "decode", "few-steps")


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention_elu"])
@pytest.mark.parametrize("case", ["kept-steps", "rounded-steps"])
def test_states_of_other_tokens_fail(name: str, case: str) -> None:
    of = subject(name)
    decode = getattr(of.module, f"{of.problem.name}_decode")

    def early(*tensors: Tensor, states: Tensor, **more: Any) -> Tensor:
        o = decode(*tensors, states=states, **more)
        states[:, 1:] = states[:, :-1].clone()
        return o

    setattr(
        of.module,
        f"{of.problem.name}_decode",
        lambda q, k, v, state, **m: early(q, k, v, state, **m),
    )
    messages = wrong(of, "decode", (case,))
    assert [message.partition(":")[0] for message in messages] == ["states"]


def test_memory_beside_the_states_of_tokens_stays() -> None:
    of = subject("gated_delta_rule")
    decode = getattr(of.module, f"{of.problem.name}_decode")

    def writing(q: Tensor, k: Tensor, v: Tensor, state: Tensor, **more: Any) -> Tensor:
        more["states"].as_strided((1,), (1,), 0).fill_(1.0)
        return decode(q, k, v, state, **more)

    setattr(of.module, f"{of.problem.name}_decode", writing)
    with pytest.raises(AssertionError, match="wrote next to `states`"):
        cases.run_case(of, "decode", "rounded-steps")


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention_elu"])
def test_states_of_other_chunks_fail(name: str) -> None:
    of = subject(name)
    right = of.function

    def early(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        *others, states = right(q, k, v, **more)
        return *others, states.roll(1, -4)

    setattr(of.module, of.problem.name, early)
    messages = wrong(of, "forward", ("kept-states",))
    assert [message.partition(":")[0] for message in messages] == ["states"]
