"""States within a call of linear_attention, from which other calls continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreters.own_process import interpreted
from torch import Tensor

from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.toolchain import import_file

SPEC = """kernel: linear_attention
name: stated
dtype: bf16
head_dim: 64
chunk_size: 16
buffers: {g: {shape: [T, HV], dtype: fp32, grad: true}}
decay: -abs(g[t, h])
rule: delta
qk_norm: l2
passes: [forward, backward, decode]
"""


def emitted(folder: Path, text: str = SPEC) -> Path:
    path = folder / "stated.py"
    path.write_text(next(iter(render_spec(loads(text, "stated.yaml"), single=True).values())))
    return path


def module_at(path: Path) -> Any:
    from kgen.verify import interpreter

    interpreter.mend()
    return import_file(path, "kgen_test_stated")


def drawn(batch: int, tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shape = (batch, tokens, 2, 64)
    found = {n: torch.randn(shape).bfloat16() for n in ("q", "k", "v")}
    return {**found, "g": torch.rand(batch, tokens, 2)}


def cut(x: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    return {name: one[:, begin:end] for name, one in x.items()}


def accepted(path: Path) -> None:
    """Check that a state after a draft continues with the same bits as a state without drafts."""
    decode, x = module_at(path).stated_decode, drawn(2, 5)
    for dtype in (torch.float32, torch.bfloat16):
        state = torch.randn(2, 2, 64, 64)
        states = torch.full((2, 5, 2, 64, 64), torch.nan, dtype=dtype)
        drafted = state.clone()
        o = decode(**x, state=drafted, states=states)
        for n in range(1, 6):
            alone = state.clone()
            assert torch.equal(decode(**cut(x, 0, n), state=alone), o[:, :n])
            assert torch.equal(states[:, n - 1], alone.to(dtype))
        assert torch.equal(states[:, 4], drafted.to(dtype))


def test_a_state_after_accepted_tokens(tmp_path: Path) -> None:
    interpreted(accepted, emitted(tmp_path))


def compiled(path: Path) -> None:
    decode, x = module_at(path).stated_decode, drawn(1, 3)
    state = torch.randn(1, 2, 64, 64)
    before = state.clone()
    states = torch.zeros(1, 3, 2, 64, 64)
    o = decode(**x, state=state, states=states)

    def step(state: Tensor, states: Tensor | None) -> Tensor:
        return decode(**x, state=state, states=states) + 0

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    for own in (torch.zeros_like(states), None):
        again = before.clone()
        assert torch.equal(whole(again, own), o)
        assert torch.equal(again, state)
        assert own is None or torch.equal(own, states)


def test_states_of_tokens_in_a_compiled_graph(tmp_path: Path) -> None:
    interpreted(compiled, emitted(tmp_path))


def resumed(path: Path) -> None:
    """Check gradients of a call that returns states, and that states have none."""
    function, x = module_at(path).stated, drawn(2, 37)
    leaves = {n: one.requires_grad_() for n, one in x.items()}
    plain, final = function(**leaves, output_final_state=True)
    change = torch.randn(plain.shape).bfloat16()
    wanted = torch.autograd.grad(plain, [*leaves.values()], change)
    for compiles in (False, True):
        call = (
            torch.compile(function, fullgraph=True, backend="aot_eager") if compiles else function
        )
        o, states = call(**leaves, return_states=True)
        got = torch.autograd.grad(o, [*leaves.values()], change)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert torch.equal(o, plain)
        assert states.shape == (2, 3, 2, 64, 64)
        assert not states.requires_grad
        assert torch.equal(states[:, 2], final)
    o, last, states = function(**x, output_final_state=True, return_states=True)
    assert torch.equal(last, states[:, -1])
    none = function(**{n: one[:, :0] for n, one in x.items()}, return_states=True)[1]
    assert none.shape == (2, 0, 2, 64, 64)


@pytest.mark.parametrize("save", ["states", "recompute"])
def test_states_of_chunks_beside_gradients(save: str, tmp_path: Path) -> None:
    interpreted(resumed, emitted(tmp_path, f"{SPEC}save: {save}\n"))


def far_apart(path: Path) -> None:
    decode = module_at(path).stated_decode
    x = {n: one.to("meta") for n, one in drawn(1, 3).items()}
    state = torch.zeros(1, 2, 64, 64, device="meta")
    strides = (0, 0, 0, 2**23, 1)
    states = torch.empty_strided((1, 3, 2, 64, 64), strides, device="meta")
    with pytest.raises(ValueError, match=r"columns of a state must be less than 2\*\*23"):
        decode(**x, state=state, states=states)
    state = torch.empty_strided((1, 2, 64, 64), (0, 0, 1, 2**23), device="meta")
    with pytest.raises(ValueError, match=r"columns of a state must be less than 2\*\*23"):
        decode(**x, state=state)


def test_states_with_rows_far_apart(tmp_path: Path) -> None:
    interpreted(far_apart, emitted(tmp_path))
