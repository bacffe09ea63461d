"""Rows of the function table for activation functions of neural networks."""

from __future__ import annotations

import math

from kgen.expr.helpers import ELU, LOG_SIGMOID, SOFTPLUS
from kgen.expr.rows import function
from kgen.expr.spelling import MUL, UNARY, Spelling, helped


def _sigmoid(x: float) -> float:
    """Logistic function without an intermediate overflow."""
    return 0.5 * (1 + math.tanh(0.5 * x))


ACTIVATIONS = [
    function(
        "sigmoid",
        lambda t, x: t.sigmoid(x),
        lambda f, x: (f("sigmoid", x) * (1 - f("sigmoid", x)),),
        value=_sigmoid,
        gluon=helped(
            "_sigmoid_gluon({0})",
            """
            @gluon.jit
            def _sigmoid_gluon(x):
                return 1.0 / (1.0 + gl.exp(-x))
            """,
        ),
        cuda=helped(
            "_sigmoid({0})",
            "DEVICE float _sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }",
        ),
        cute=Spelling("1.0 / (1.0 + cute.math.exp(-({0})))", MUL),
    ),
    function(
        "silu",
        lambda t, x: t.nn.functional.silu(x),
        lambda f, x: (f("sigmoid", x) * (x * (1 - f("sigmoid", x)) + 1),),
        value=lambda x: x * _sigmoid(x),
        torch=Spelling("{0} * torch.sigmoid({0})", MUL, MUL),
        triton=helped(
            "_silu({0})",
            """
            @triton.jit
            def _silu(x):
                return x * tl.sigmoid(x)
            """,
        ),
        gluon=helped(
            "_silu_gluon({0})",
            """
            @gluon.jit
            def _silu_gluon(x):
                return x / (1.0 + gl.exp(-x))
            """,
        ),
        cuda=helped(
            "_silu({0})",
            "DEVICE float _silu(float x) { return x / (1.0f + expf(-x)); }",
        ),
        cute=Spelling("({0}) / (1.0 + cute.math.exp(-({0})))", MUL),
    ),
    function(
        "softplus",
        # The softplus of PyTorch is x above 20, so it lacks up to 2e-9 there.
        lambda t, x: -t.nn.functional.logsigmoid(-x),
        lambda f, x: (f("sigmoid", x),),
        value=lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
        torch=Spelling("-torch.nn.functional.logsigmoid(-({0}) * 1.0)", UNARY),
        triton=SOFTPLUS["triton"],
        gluon=SOFTPLUS["gluon"],
        cuda=helped(
            "_softplus({0})",
            "DEVICE float _softplus(float x) { return max(x, 0.0f) + log1pf(expf(-fabsf(x))); }",
        ),
        cute=(
            "(cutlass.max({0}, 0.0) + cute.math.log1p(cute.math.exp(-cutlass.max({0}, -({0})))))"
        ),
    ),
    function(
        "log_sigmoid",
        lambda t, x: t.nn.functional.logsigmoid(x),
        lambda f, x: (f("sigmoid", -x),),
        value=lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))),
        torch="torch.nn.functional.logsigmoid(({0}) * 1.0)",
        triton=LOG_SIGMOID["triton"],
        gluon=LOG_SIGMOID["gluon"],
        cuda=helped(
            "_log_sigmoid({0})",
            "DEVICE float _log_sigmoid(float x) { return min(x, 0.0f) - log1pf(expf(-fabsf(x))); }",
        ),
        cute=(
            "(cutlass.min({0}, 0.0) - cute.math.log1p(cute.math.exp(-cutlass.max({0}, -({0})))))"
        ),
    ),
    # The derivative is 1 above zero and e^x below. The bound keeps e^x finite.
    function(
        "elu",
        lambda t, x: t.nn.functional.elu(x),
        lambda f, x: (f("exp", f("min", x, 0)),),
        value=lambda x: x if x > 0 else math.expm1(x),
        torch="torch.nn.functional.elu(({0}) * 1.0)",
        triton=ELU["triton"],
        gluon=ELU["gluon"],
        cuda=helped(
            "_elu({0})",
            "DEVICE float _elu(float x) { return x > 0.0f ? x : expm1f(x); }",
        ),
        cute="(cutlass.max({0}, 0.0) + cute.math.expm1(cutlass.min({0}, 0.0)))",
    ),
]
