"""Norms: the plan has the derivatives of the reference, and features that no stock spec has are
right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kgen.diagnostics import KgenError
from kgen.expr.unparse import show
from kgen.kernels.norm.plan.planning import NormPlan, plan_norm
from kgen.kernels.norm.plan.tiles import SIZES, norm_tiles
from kgen.kernels.norm.verify.cases import compile_calls
from kgen.kernels.norm.verify.inputs import Case, cases, draw, sized
from kgen.kernels.norm.verify.problem import problem_of
from kgen.kernels.norm.verify.reference import exact
from kgen.render.rendering import render_spec
from kgen.sizes import SHARED_MEMORY
from kgen.spec.load import Loaded, load, loads
from kgen.verify.evaluate import evaluate
from kgen.verify.options import VerifyOptions
from kgen.verify.verifying import verify_specs

ROOT = Path(__file__).resolve().parents[3]
STOCK = [p for p in sorted((ROOT / "specs").glob("*.yaml")) if load(p).spec.kernel == "norm"]
CORNERS = sorted((ROOT / "tests" / "specs").glob("norm_*.yaml"))
HEAD = "kernel: norm\nname: sample\nnorm: rms\nwidth: any\ndtype: bf16\n"


def planned(path: Path) -> tuple[Loaded, NormPlan]:
    loaded = load(path)
    return loaded, plan_norm(loaded)


@pytest.mark.parametrize(
    "path", [p for p in STOCK + CORNERS if "backward" in load(p).spec.passes], ids=lambda p: p.stem
)
def test_plan_is_the_derivative(path: Path) -> None:
    """In float64, the gradients of the plan equal autograd through the reference."""
    loaded, plan = planned(path)
    problem = problem_of(loaded)
    width = problem.widths[-1] if problem.widths else 24
    case = Case("plan", min(width, 24), (5,), heads=3 if problem.heads else 0)
    inputs = draw(problem, case, "cpu")
    want = exact(
        problem, inputs.operands, eps=inputs.eps, params=inputs.params, cotangents=inputs.cotangents
    )
    assert plan.backward is not None
    rows = {o.name for o in problem.operands if o.along == "row"}
    env = {
        n: (t[..., None] if n in rows else t) for n, t in inputs.operands.items()
    } | inputs.params
    env = {
        n: t.double() if hasattr(t, "is_floating_point") and t.is_floating_point() else t
        for n, t in env.items()
    }

    def let(name: str, value: torch.Tensor) -> None:
        env[name] = value.expand(inputs.operands["x"].shape)

    let("h", evaluate(plan.forward.h.tree, env, torch))
    mean = env["h"].mean(-1, keepdim=True) if plan.layer else torch.zeros(())
    env["mean"] = mean
    env["rstd"] = torch.rsqrt((env["h"] - mean).square().mean(-1, keepdim=True) + inputs.eps)
    env |= {
        "dout": inputs.cotangents["out"].double(),
        "dh_out": inputs.cotangents.get("h", torch.zeros(())).double(),
    }
    for value in plan.backward.before:
        let(value.name, evaluate(value.tree, env, torch))
    for value in plan.backward.means:
        env[value.name] = evaluate(value.tree, env, torch).mean(-1, keepdim=True)
    let("dh", evaluate(plan.backward.dh.tree, env, torch))
    for gradient in plan.backward.gradients:
        got = evaluate(gradient.tree, env, torch).expand(inputs.operands["x"].shape)
        target = want.grads[gradient.of]
        got = got.sum(-1) if gradient.along == "row" else got.sum_to_size(target.shape)
        torch.testing.assert_close(got, target, rtol=1e-9, atol=1e-9)


def test_equal_gradients_are_stored_once() -> None:
    _, plan = planned(ROOT / "specs" / "fused_add_rms_norm.yaml")
    assert plan.backward is not None
    assert [g.same_as for g in plan.backward.gradients] == [None, "x", None]
    assert [g.of for g in plan.backward.elements] == ["x"]
    assert [o.name for o in plan.backward.loads] == ["h", "weight"]


def test_what_is_returned_is_what_is_normed() -> None:
    _, plan = planned(ROOT / "specs" / "fused_add_rms_norm.yaml")
    assert (show(plan.forward.h.tree), plan.forward.h.rounded) == ("x + residual", "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_pipelines_fit_in_shared_memory(dtype: str) -> None:
    for norm in ("rms", "layer"):
        text = HEAD.replace("bf16", dtype).replace("rms", norm) + "residual: in_out\nbias: true\n"
        plan = plan_norm(loads(text, "sample.yaml"))
        assert plan.backward is not None
        reads = {"forward": plan.forward.loads, "backward": (*plan.backward.loads, *plan.upstream)}
        for pass_, operands in reads.items():
            size = sum(SIZES[o.dtype] for o in operands)
            for chip, tiles in norm_tiles(plan.spec, pass_, operands).items():
                for t in tiles:
                    held = t.elements * size * (t.STAGES - 1) * max(1, t.programs)
                    assert t.STAGES >= 1
                    assert held <= SHARED_MEMORY[chip]


def test_programs_that_share_a_row_can_all_run() -> None:
    """Every supported chip has at least 32 multiprocessors, which is enough programs for the widest
    row.
    """
    for path in STOCK:
        _, plan = planned(path)
        tiles = norm_tiles(plan.spec, "forward", plan.forward.loads)
        assert all(
            max(1, t[-1].programs) * 32 >= t[-1].width // t[-1].elements for t in tiles.values()
        )


def test_eight_bits_with_a_given_scale(tmp_path: Path, verdict: Any) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text(HEAD + "quantize: {dtype: fp8_e4m3, scale: per_tensor}\npasses: [forward]\n")
    loaded = load(path)
    (tmp_path / "sample").mkdir()
    for name, text in render_spec(loaded).items():
        (tmp_path / "sample" / name).write_text(text)
    verdict(problem_of(loaded), tmp_path / "sample")
    rows = verify_specs([loaded], tmp_path, VerifyOptions("cpu", timeout=120.0))
    wrong = [f"{row['case']}: {row['message']}" for row in rows if not row["ok"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["tl", "x", "y", "weight"])
def test_names_of_the_kernels_are_taken(name: str) -> None:
    with pytest.raises(KgenError):
        loads(
            HEAD + f"buffers:\n  {name}: {{shape: [ROWS], dtype: fp32}}\noutput_mod: y * {name}\n",
            "sample.yaml",
        )


def test_eight_bits_are_not_compiled_for_chips_without() -> None:
    assert problem_of(load(ROOT / "specs" / "rms_norm_fp8.yaml")).least_capability == 89
    assert problem_of(load(ROOT / "specs" / "rms_norm.yaml")).least_capability == 0


@pytest.mark.parametrize("heads", ["", "heads: any\n", "heads: 2\n"])
@pytest.mark.parametrize("width", ["1", "64", "100", "127", "[2, 40]", "128", "4096", "32768"])
def test_one_width_has_every_hard_case(width: str, heads: str) -> None:
    """Rows have the width of the spec, except in cases about other widths."""
    problem = problem_of(loads(HEAD.replace("any", width) + heads, "sample.yaml"))
    quick = {case.name: case for case in cases(problem, quick=True)}
    assert {case.width for case in quick.values()} <= set(problem.widths)
    # Other cases may coincide in a spec with heads, because only the width differs. These cases
    # differ in more.
    for name in (
        "plain",
        "no-rows",
        "odd",
        "padded",
        "constant",
        "zero-weight",
        "huge",
        "tiny-without-eps",
    ):
        assert name in quick
    assert sized(problem, "small", "cpu").operands["x"].shape[-1] in problem.widths
    assert {name for name, _ in compile_calls(problem)} >= {f"width-{w}" for w in problem.widths}
