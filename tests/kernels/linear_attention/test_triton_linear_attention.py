"""The Triton kernels of linear attention: their operands, launches and tiles."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from support.interpreters.own_process import interpreted

from kgen.kernels.linear_attention.plan.kernels import kernels as listed_kernels
from kgen.kernels.linear_attention.plan.kernels import saved
from kgen.kernels.linear_attention.plan.planning import plan_linear_attention
from kgen.kernels.linear_attention.plan.tiles import tile_tables
from kgen.kernels.linear_attention.targets.triton.functions import Functions
from kgen.kernels.linear_attention.targets.triton.gradients import BackwardBuilder
from kgen.kernels.linear_attention.targets.triton.kernels import Builder
from kgen.kernels.linear_attention.targets.triton.signatures import KernelSignature
from kgen.kernels.linear_attention.targets.triton.sources import signatures
from kgen.kernels.linear_attention.targets.triton.steps import Steps
from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads
from kgen.verify.toolchain import import_file

SPECS = Path(__file__).resolve().parents[3] / "specs"
STOCK = sorted(
    path
    for path in SPECS.glob("*.yaml")
    if "kernel: linear_attention\n" in path.read_text(encoding="utf-8")
)
OF_STATES = {"ends", "initial_state", "final_state", "dfinal_state", "dinitial_state"}
APART = {"seqs", "cu_seqlens", *OF_STATES}
"""Operands that `kgen explain` does not list: offsets, and states that are arguments or results."""


def signatures_of(text: str) -> dict[str, KernelSignature]:
    plan = plan_linear_attention(loads(text, "spec.yaml"))
    functions = Functions(plan, set())
    builder = Builder(plan, functions)
    backward = BackwardBuilder(builder, functions).kernels() if plan.backward else None
    return signatures(builder.kernels(), backward)


@pytest.mark.parametrize("path", STOCK, ids=lambda path: path.stem)
def test_explain_lists_the_operands_of_the_kernels(path: Path) -> None:
    plan = plan_linear_attention(load(path))
    launched = signatures_of(path.read_text(encoding="utf-8"))
    launched.pop("decode")
    maps = {n for n in "qk" if f"{n}_map" in launched}
    found = {}
    for name, signature in launched.items():
        operands = {operand.name for operand in signature.operands} - APART
        # After the feature maps, launchers pass their results under the names of q and k.
        if not name.endswith(("_map", "_map_back")):
            operands = {f"{n}_mapped" if n in maps else n for n in operands}
        if name.endswith("_map_back"):
            operands = {n.removesuffix("_raw") for n in operands}
        if plan.finishes and not name.startswith("finish"):
            # Kernels of rows follow, and come first in backward.
            operands = {{"o": "o_raw", "do": "do_raw"}.get(n, n) for n in operands}
        found[name] = {re.sub("^(skip|finish)_", "grad_", n) for n in operands}
    assert {k.name: {*k.reads, *k.writes} for k in listed_kernels(plan)} == found


@pytest.mark.parametrize("path", STOCK, ids=lambda path: path.stem)
def test_explain_lists_the_tensors_that_forward_saves(path: Path) -> None:
    plan = plan_linear_attention(load(path))
    kernels = Builder(plan, Functions(plan, set())).kernels()
    of_rows = {"o_raw"} if plan.finishes else set()
    assert set(Steps(plan).held(kernels)) - APART | of_rows == {*saved(plan)}


SPEC = """
kernel: linear_attention
name: sized
dtype: bf16
head_dim: {{qk: {qk}, v: {v}}}
chunk_size: {chunk}
buffers: {{g: {{shape: {shape}, dtype: fp32, grad: true}}}}
decay: g[{index}]
rule: delta
output_norm: rms
passes: [forward, backward, decode]
"""


@pytest.mark.parametrize("shape", [("[T, HV]", "t, h"), ("[T, HV, K]", "t, h, c")])
def test_tiles_have_the_fields_of_their_kernels_and_divide_head_dims(
    shape: tuple[str, str],
) -> None:
    for qk, v, chunk in product((64, 128, 256), (64, 128, 256), (16, 32, 64, 128)):
        text = SPEC.format(qk=qk, v=v, chunk=chunk, shape=shape[0], index=shape[1])
        tables = tile_tables(plan_linear_attention(loads(text, "spec.yaml")))
        for kernel, signature in signatures_of(text).items():
            for tile in tables[kernel].values():
                assert {*signature.tile} <= tile.used.keys()
                assert qk % (tile.BLOCK_K or 1) == v % (tile.BLOCK_V or 1) == 0


UPDATE = """
kernel: linear_attention
name: update
dtype: fp16
head_dim: 64
chunk_size: 16
buffers: {b: {shape: [HV], dtype: fp32}}
beta: b[h]
rule: delta
passes: [forward, backward]
"""


def test_factors_of_updates_are_not_rounded(tmp_path: Path) -> None:
    path = tmp_path / "update.py"
    path.write_text(next(iter(render_spec(loads(UPDATE, "update.yaml"), single=True).values())))
    for name, factor in interpreted(_factors_of_one_update, path).items():
        assert abs(factor) < 1e-4, f"{name} is off by a factor of {1 + factor:.5f}"


def _factors_of_one_update(path: Path) -> dict[str, float]:
    """Return the errors along the results of one token. beta is in the middle of two fp16."""
    from kgen.verify import interpreter

    interpreter.mend()
    random = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 1, 1, 64), "k": (1, 1, 1, 64), "v": (1, 1, 1, 64), "change": (1, 1, 64, 64)}
    x = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    q, k, v = (x[name].half().requires_grad_() for name in "qkv")
    beta = 1434.49 / 2048
    update = import_file(path, "kgen_test_update").update
    _, state = update(q, k, v, b=torch.tensor([beta]), output_final_state=True)
    (dv,) = torch.autograd.grad(state, v, x["change"])
    key, value, change = (one.detach().double().squeeze() for one in (k, v, x["change"]))
    wanted = {"final_state": beta * torch.outer(key, value), "dv": beta * key @ change}
    found = {"final_state": state.detach().double().squeeze(), "dv": dv.double().squeeze()}
    return {
        name: float(((found[name] - want) * want).sum() / want.square().sum())
        for name, want in wanted.items()
    }
