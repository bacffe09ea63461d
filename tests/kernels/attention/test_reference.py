from __future__ import annotations

import math

import pytest
import torch
from support.specs.hand_built import (
    ALIBI,
    CAUSAL,
    FLOAT,
    INT,
    PADDING,
    SCORE,
    B,
    H,
    K,
    Q,
    call,
    number,
)

from kgen.expr.nodes import Read, Var
from kgen.kernels.attention.verify.reference import Call, attention, eager, to_tf32
from kgen.verify.evaluate import evaluate

torch.manual_seed(0)


def operands(b=2, hq=4, hkv=2, sq=5, sk=7, d=4, dv=3):
    return (
        torch.randn(b, hq, sq, d, dtype=torch.float64),
        torch.randn(b, hkv, sk, d, dtype=torch.float64),
        torch.randn(b, hkv, sk, dv, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call("div", 1, 3), 1 / 3),
        (call("floordiv", -7, 2), -4),
        (call("mod", -7, 3), 2),
        (call("sqrt", 2), math.sqrt(2)),
        (call("max", 1, call("min", 2.5, 4), 2), 2.5),
        (call("where", call("lt", 1, 2), 3, 4.5), 3.0),
        (call("clamp", 7, 0, 5), 5),
        (call("exp2", call("neg", 3)), 0.125),
        (call("not", call("and", call("lt", 1, 2), call("ge", 1, 2))), True),
    ],
)
def test_evaluate_gives_python_numbers(node, expected):
    value = evaluate(node, {}, torch)
    assert value.dtype in (torch.int64, torch.float64, torch.bool)
    assert value.item() == pytest.approx(expected, rel=1e-15)


def test_variables_broadcast():
    env = {"q_idx": torch.arange(3)[:, None], "kv_idx": torch.arange(4)[None, :]}
    assert evaluate(call("sub", K, Q), env, torch).tolist() == [
        [j - i for j in range(4)] for i in range(3)
    ]


def test_reads_out_of_range_are_zero_and_do_not_wrap():
    table = torch.tensor([10, 20, 30], dtype=torch.int32)
    env = {"t": table, "q_idx": torch.tensor([-1, 0, 2, 3, 100])}
    value = evaluate(Read("t", (Q,), INT), env, torch)
    assert value.tolist() == [0, 10, 30, 0, 0]
    assert value.dtype == torch.int64


def test_reads_of_empty_and_zero_dimensional_buffers():
    env = {"none": torch.zeros(0), "one": torch.tensor(3.0), "q_idx": torch.arange(2)}
    assert evaluate(Read("none", (Q,), FLOAT), env, torch).tolist() == [0.0, 0.0]
    assert evaluate(Read("one", (), FLOAT), env, torch).item() == 3.0


def test_reads_are_differentiable():
    table = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    read = Read("t", (Q,), FLOAT)
    value = evaluate(
        call("mul", read, read), {"t": table, "q_idx": torch.tensor([0, 1, 1, 5])}, torch
    )
    assert torch.autograd.grad(value.sum(), table)[0].tolist() == [2.0, 8.0]


def test_unknown_name():
    with pytest.raises(KeyError):
        evaluate(Var("nobody", INT), {}, torch)


def test_attention_is_sdpa():
    q, k, v = operands(sq=6, sk=6)
    got = attention(q, k, v, Call(mask_mod=CAUSAL))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(got.out, want)


def test_score_mod_by_hand():
    q, k, v = operands(b=1, hq=2, hkv=1, sq=1, sk=2)
    slopes = torch.tensor([0.5, 2.0])
    got = attention(q, k, v, Call(score_mod=ALIBI, buffers={"slopes": slopes}, scale=0.1))
    for h in range(2):
        s = [0.1 * float(q[0, h, 0] @ k[0, 0, j]) + float(slopes[h]) * j for j in range(2)]
        weights = [math.exp(x) / sum(map(math.exp, s)) for x in s]
        want = weights[0] * v[0, 0, 0] + weights[1] * v[0, 0, 1]
        torch.testing.assert_close(got.out[0, h, 0], want)
        assert float(got.lse[0, h, 0]) == pytest.approx(math.log(sum(map(math.exp, s))))


def test_rows_without_a_key():
    q, k, v = operands()
    lens = torch.tensor([0, 3], dtype=torch.int32)
    dout, dlse = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5)
    got = attention(q, k, v, Call(mask_mod=PADDING, buffers={"lens": lens}, dout=dout, dlse=dlse))
    assert (got.out[0] == 0).all()
    assert (got.lse[0] == -torch.inf).all()
    assert all((got.grads[n][0] == 0).all() for n in "qkv")
    assert (got.grads["k"][1, :, 3:] == 0).all()
    assert all(torch.isfinite(g).all() and g[1].abs().max() > 0 for g in got.grads.values())
    assert got.seen.sum(-1).tolist() == [[0, 0], [3, 3]]


def test_minus_infinity_from_the_score_mod_is_a_mask():
    q, k, v = operands()
    hide = call("where", CAUSAL, SCORE, number(-math.inf))
    a = attention(q, k, v, Call(score_mod=hide, dout=torch.ones(2, 4, 5, 3)))
    b = attention(q, k, v, Call(mask_mod=CAUSAL, dout=torch.ones(2, 4, 5, 3)))
    torch.testing.assert_close(a.out, b.out)
    torch.testing.assert_close(a.grads["q"], b.grads["q"])


def test_infinite_derivatives_behind_the_mask_do_not_leak():
    # sqrt(q - kv) has an infinite derivative on the diagonal, which the mask hides.
    distance = call("sqrt", call("mul", Read("t", (H,), FLOAT), call("sub", Q, K)))
    q, k, v = operands()
    got = attention(
        q,
        k,
        v,
        Call(
            score_mod=call("add", SCORE, distance),
            mask_mod=call("gt", Q, K),
            buffers={"t": torch.rand(4) + 1},
            dout=torch.ones(2, 4, 5, 3),
            wanted=("q", "k", "v", "t"),
        ),
    )
    assert all(torch.isfinite(g).all() for g in got.grads.values())
    assert got.grads["t"].abs().min() > 0


@pytest.mark.parametrize("mask", [None, CAUSAL, PADDING])
def test_gradients_are_finite_differences(mask):
    q, k, v = operands(b=1, hq=2, hkv=1, sq=3, sk=4)
    slopes = torch.randn(2, dtype=torch.float64)
    lens = torch.tensor([3], dtype=torch.int32)
    dout, dlse = (
        torch.randn(1, 2, 3, 3, dtype=torch.float64),
        torch.randn(1, 2, 3, dtype=torch.float64),
    )
    leaves = {"q": q, "k": k, "v": v, "slopes": slopes}

    def run(**more):
        return attention(
            leaves["q"],
            leaves["k"],
            leaves["v"],
            Call(
                score_mod=ALIBI,
                mask_mod=mask,
                buffers={"slopes": leaves["slopes"], "lens": lens},
                **more,
            ),
        )

    def value():
        result = run()
        return float((result.out * dout).sum() + (result.lse * dlse).sum())

    grads = run(dout=dout, dlse=dlse, wanted=tuple(leaves)).grads
    for name, leaf in leaves.items():
        for i in range(min(leaf.numel(), 8)):
            flat, kept = leaf.view(-1), float(leaf.view(-1)[i])
            flat[i] = kept + 1e-6
            above = value()
            flat[i] = kept - 1e-6
            below = value()
            flat[i] = kept
            assert float(grads[name].view(-1)[i]) == pytest.approx(
                (above - below) / 2e-6, rel=1e-5, abs=1e-7
            )


def test_eager_is_close_and_rounded():
    q, k, v = (t.bfloat16() for t in operands(sq=64, sk=64, d=16, dv=16))
    dout = torch.randn(2, 4, 64, 16).bfloat16()
    exact = attention(q, k, v, Call(mask_mod=CAUSAL, dout=dout))
    rough = eager(q, k, v, Call(mask_mod=CAUSAL, dout=dout))
    assert rough.out.dtype == rough.grads["q"].dtype == torch.bfloat16
    for a, b in [(rough.out, exact.out), *((rough.grads[n], exact.grads[n]) for n in "qkv")]:
        assert 1e-4 < float((a.double() - b).norm() / b.norm()) < 1e-2


def test_sizes_and_batch_index_are_there():
    q, k, v = operands(b=2, hq=2, hkv=2, sq=2, sk=3)
    mask = call("lt", K, call("sub", Var("SK", INT), B))
    assert attention(q, k, v, Call(mask_mod=mask)).seen.sum(-1).tolist() == [[3, 3], [2, 2]]


def test_tf32_is_rounded_to_nearest():
    step = 2.0**-10
    x = torch.tensor(
        [1 + step / 2, 1 + step / 2 - 2e-7, -(1 + step / 2), 3e38, 0.0, torch.inf, torch.nan]
    )
    got = to_tf32(x)
    assert got[:3].tolist() == [1 + step, 1.0, -(1 + step)]
    assert got[3] == pytest.approx(3e38, rel=step)
    assert got[4:6].tolist() == [0.0, torch.inf]
    assert got[6].isnan()


def test_eager_in_tf32_is_coarser_than_fp32():
    q, k, v = (t.float() for t in operands(sq=64, sk=64, d=16, dv=16))
    dout = torch.randn(2, 4, 64, 16)
    exact, rough, fine = (
        attention(q, k, v, Call(dout=dout)),
        eager(q, k, v, Call(dout=dout), tf32=True),
        eager(q, k, v, Call(dout=dout)),
    )
    for name in "qkv":
        size = exact.grads[name].norm()
        assert 1e-4 < float((rough.grads[name] - exact.grads[name]).norm() / size) < 1e-3
        assert float((fine.grads[name] - exact.grads[name]).norm() / size) < 1e-6


def test_a_sink_is_a_key_without_a_value():
    q, k, v = operands(b=1, hq=2, hkv=1)
    sinks = torch.tensor([0.5, -torch.inf], dtype=torch.float64)
    got = attention(q, k, v, Call(sinks=sinks, dout=torch.ones(1, 2, 5, 3), wanted=("q", "sinks")))
    plain = attention(q, k, v)
    torch.testing.assert_close(got.lse[0, 0], torch.logaddexp(plain.lse[0, 0], sinks[0]))
    share = torch.exp(plain.lse - got.lse)[..., None]
    torch.testing.assert_close(got.out, plain.out * share)
    torch.testing.assert_close(got.grads["sinks"][0], -((1 - share) * got.out)[0, 0].sum())
    assert got.grads["sinks"][1] == 0


def test_rows_without_a_key_have_their_sink():
    q, k, v = operands()
    lens = torch.tensor([0, 3], dtype=torch.int32)
    sinks = torch.tensor([0.5, -1.0, 2.0, 7.0])
    got = attention(q, k, v, Call(mask_mod=PADDING, buffers={"lens": lens}, sinks=sinks))
    assert (got.out[0] == 0).all()
    assert (got.lse[0] == sinks[:, None]).all()
    assert got.dead.tolist() == [[[True] * 5] * 4, [[False] * 5] * 4]


def test_packed_sequences_are_sequences():
    lengths = [(3, 5), (0, 2), (4, 0), (2, 7)]
    q, k, v = torch.randn(11, 4, 4), torch.randn(16, 2, 4), torch.randn(16, 2, 3)
    cu = ([0, 3, 3, 7, 9], [0, 5, 7, 7, 14])
    dout, dlse = torch.randn(11, 4, 3), torch.randn(4, 11)
    # The mask reads the lengths and the number of the sequence.
    mask = call("lt", call("add", K, B), call("add", Q, Var("SK", INT)))
    got = attention(q, k, v, Call(mask_mod=mask, cu_seqlens=cu, dout=dout, dlse=dlse))
    for b, (sq, sk) in enumerate(lengths):
        rows, columns = slice(cu[0][b], cu[0][b] + sq), slice(cu[1][b], cu[1][b] + sk)
        one = [t.transpose(0, 1)[None] for t in (q[rows], k[columns], v[columns])]
        alone = attention(
            *one,
            Call(
                mask_mod=call("lt", call("add", K, b), call("add", Q, Var("SK", INT))),
                dout=dout[rows].transpose(0, 1)[None],
                dlse=dlse[None, :, rows],
            ),
        )
        torch.testing.assert_close(got.out[rows], alone.out[0].transpose(0, 1))
        torch.testing.assert_close(got.lse[:, rows], alone.lse[0])
        for name, at in (("q", rows), ("k", columns), ("v", columns)):
            torch.testing.assert_close(got.grads[name][at], alone.grads[name][0].transpose(0, 1))
    assert got.dead[3:7].all()
    assert got.dead[9:].all()
    assert all((got.grads[n][end:] == 0).all() for n, end in (("q", 9), ("k", 14), ("v", 14)))
