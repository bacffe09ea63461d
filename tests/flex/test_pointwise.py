"""Torch's functions of elements: each has torch's values, at random and at edge points, or is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pointwise_table import INTERNAL, REFUSED, SERIES, accepted, calls, refused

from kgen.diagnostics import KgenError
from kgen.expr.algebra import Algebra
from kgen.expr.differentiate import derivative
from kgen.expr.nodes import Type, Var
from kgen.flex import spec as live_spec
from kgen.flex.importing import Options, imported
from kgen.spec.load import loads
from kgen.verify.evaluate import evaluate

EDGES = (
    *(
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        -1.5,
        2.5,
        3.5,
        -2.5,
        1.0,
        -1.0,
        2.0,
    ),
    *(3.0, -3.0, 20.0, 20.5, -20.0, 1e-8, -1e-8, 0.2, 0.99, -5.0, 7.0),
)
SCORE = Var("score", Type.FLOAT)
HEAD = "import torch\nfrom math import inf\n\nT = torch.zeros(2048)\n\n\n"
MOD = (
    "def mod(s, b, h, q, k):\n    t = T[k]\n    n = q - 3\n    m = k % 8\n    c = k % 3 == 1\n"
    "    return {}\n"
)
WRAPPED = "torch.where({}, 1.5, 2.5)"


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def points() -> dict[str, torch.Tensor]:
    """Combine every edge value with every other, and add random numbers."""
    make = torch.Generator().manual_seed(3)
    edges = torch.tensor(EDGES, dtype=torch.float64)
    drawn = torch.randn(2, 300, generator=make, dtype=torch.float64) * 3
    s = torch.cat([edges.repeat_interleave(len(edges)), drawn[0]])
    t = torch.cat([edges.repeat(len(edges)), drawn[1]])
    return {"score": s, "T": t, "q_idx": torch.arange(len(s)) % 11, "kv_idx": torch.arange(len(s))}


def source_of(call: str, tmp_path: Path) -> tuple[Path, str]:
    """Write a mod that makes a call. A truth value selects a number."""
    known = {"torch": torch, "inf": math.inf, "s": torch.tensor(1.0), "t": torch.tensor(1.0)}
    known |= {"n": torch.tensor(1), "m": torch.tensor(1), "c": torch.tensor(True)}
    truth = eval(call, known).dtype is torch.bool
    text = HEAD + MOD.format(WRAPPED.format(call) if truth else call)
    path = tmp_path / "mods.py"
    path.write_text(text)
    return path, text


def run(text: str, values: dict[str, torch.Tensor]) -> torch.Tensor:
    scope: dict[str, Any] = {}
    exec(text, scope)
    scope["T"] = values["T"]
    zero = torch.zeros_like(values["q_idx"])
    found: torch.Tensor = scope["mod"](
        values["score"], zero, zero, values["q_idx"], values["kv_idx"]
    )
    return found.to(torch.float64)


def of_spec(tree: Any, values: dict[str, torch.Tensor]) -> torch.Tensor:
    zero = torch.zeros_like(values["q_idx"])
    env = {**values, "b": zero, "h": zero, "inf": torch.inf}
    return evaluate(tree, env, torch).expand(len(values["score"])).to(torch.float64)


def is_a_series(call: str) -> bool:
    return any(f".{name}(" in call for name in SERIES)


@pytest.mark.parametrize("call", calls())
def test_values_are_those_of_torch(call: str, tmp_path: Path) -> None:
    path, text = source_of(call, tmp_path)
    spec = imported(str(path), {"score_mod": "mod"}, Options(name="one"))
    tree = loads(spec.text(), "one.yaml").trees.get("score_mod", SCORE)
    values = points()
    bound = 2e-7 if is_a_series(call) else 1e-9
    torch.testing.assert_close(
        of_spec(tree, values), run(text, values), rtol=bound, atol=1e-15, equal_nan=True
    )


def test_functions_that_are_captured_by_their_own_names() -> None:
    """Torch's own name of some functions differs from the name in the package."""
    from torch.nn.functional import logsigmoid
    from torch.special import entr

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return entr(score) + logsigmoid(score)

    values = points()
    zero = torch.zeros_like(values["q_idx"])
    tree = loads(live_spec(score_mod=mod, name="one"), "one.yaml").trees["score_mod"]
    want = mod(values["score"], zero, zero, values["q_idx"], values["kv_idx"])
    torch.testing.assert_close(of_spec(tree, values), want, equal_nan=True)


@pytest.mark.parametrize("call", refused())
def test_others_are_refused_at_their_line(call: str, tmp_path: Path) -> None:
    path = tmp_path / "mods.py"
    path.write_text(HEAD + MOD.format(call))
    with pytest.raises(KgenError) as caught:
        imported(str(path), {"score_mod": "mod"}, Options(name="one"))
    (found,) = caught.value.diagnostics
    assert found.code == "not-in-language"
    assert (found.line, found.column) == (12, 12)


def test_no_function_of_torch_is_left_out() -> None:
    """Every pointwise operator of torch is either accepted or refused."""
    names = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        if any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads):
            names.add(name)
    public = {name for name in names if not name.endswith(("_", "_backward"))} - {*INTERNAL}
    known = accepted() | {*REFUSED}
    assert {
        name for name in public if name not in known and name.removeprefix("special_") not in known
    } == set()
    assert not accepted() & {*REFUSED}


@pytest.mark.thorough
@pytest.mark.parametrize("call", [call for call in calls() if "heaviside" not in call])
def test_gradients_are_those_of_torch(call: str, tmp_path: Path) -> None:
    """Compare gradients of the score at random points with finite values. Torch has no derivative
    of `heaviside`.
    """
    path, text = source_of(call, tmp_path)
    spec = imported(str(path), {"score_mod": "mod"}, Options(name="one"))
    tree = loads(spec.text(), "one.yaml").trees.get("score_mod", SCORE)
    values = {name: value[len(EDGES) ** 2 :] for name, value in points().items()}
    values["T"] = points()["T"]
    score = values["score"].requires_grad_()
    found = run(text, values)
    want = torch.zeros_like(score)
    if found.requires_grad:
        (want,) = torch.autograd.grad(found.sum(), score)
    got = of_spec(derivative(tree, SCORE, Algebra()), values | {"score": score.detach()})
    finite = found.isfinite()
    bound = 1e-5 if is_a_series(call) else 1e-7
    torch.testing.assert_close(got[finite], want[finite], rtol=bound, atol=1e-12)
