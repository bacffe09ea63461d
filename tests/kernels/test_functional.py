"""`torch.func` transforms: gradients, vjp and vmap of emitted functions equal those of plain
PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from kgen.render.rendering import render_spec
from kgen.spec.load import loads
from kgen.verify.families import problem_of
from kgen.verify.interpreter import ENVIRONMENT

SPECS = {
    "attention": (
        "kernel: attention\nname: sample\ndtype: fp32\nhead_dim: 16\nmask_mod: q_idx >= kv_idx\n"
    ),
    "norm": "kernel: norm\nname: sample\nnorm: rms\nwidth: any\ndtype: fp32\n",
    "chunk_output": "kernel: chunk_output\nname: sample\ndtype: fp16\nhead_dim: 64\n",
    "forward": (
        "kernel: norm\nname: sample\nnorm: rms\nwidth: any\ndtype: fp32\npasses: [forward]\n"
    ),
}
OPENING = """
import sys
import torch
from torch import func
from kgen.verify import interpreter
interpreter.mend()
from sample.triton import sample

torch.manual_seed(0)

def same(transformed):
    ours, theirs = transformed(sample), transformed(plain)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

def refused(call, error, words):
    try:
        call()
    except error as said:
        assert words in str(said), said
    else:
        raise AssertionError(f"{words}: nothing was raised")
"""
PROGRAMS = {
    "attention": """
tolerance = 1e-4
q, k, v = torch.randn(3, 2, 1, 1, 5, 16).unbind(0)

def plain(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

def loss(f):
    return lambda *tensors: f(*tensors).square().sum()

every = (0, 1, 2)
same(lambda f: func.grad(loss(f), every)(q[0], k[0], v[0]))
same(lambda f: func.vjp(f, q[0], k[0], v[0])[1](v[0]))
same(lambda f: [func.vmap(f, (0, None, 0))(q, k[0], v)])
same(lambda f: func.vmap(func.grad(loss(f), every))(q, k, v))
squares = lambda f: lambda q, k, v: func.vmap(f, (0, None, None))(q, k, v).square().sum()
same(lambda f: func.grad(squares(f), every)(q, k[0], v[0]))
again = lambda q: func.grad(loss(lambda q: sample(q, k[0], v[0])))(q).sum()
refused(lambda: func.grad(again)(q[0]), NotImplementedError, "second derivatives are not supported")
forward = lambda q: sample(q, k[0], v[0])
refused(lambda: func.jvp(forward, (q[0],), (q[0],)), NotImplementedError, "forward-mode")
""",
    "norm": """
tolerance = 1e-4
x, weight = torch.randn(2, 3, 16), torch.randn(16)

def plain(x, weight):
    return torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)

def loss(f):
    return lambda *tensors: f(*tensors).square().sum()

same(lambda f: func.grad(loss(f), (0, 1))(x, weight))
same(lambda f: func.vmap(func.grad(loss(f), (0, 1)), (0, None))(x, weight))
squares = lambda f: lambda x, w: func.vmap(f, (0, None))(x, w).square().sum()
same(lambda f: func.grad(squares(f), (0, 1))(x, weight))
same(lambda f: [func.vmap(f, (0, None))(x, weight)])
""",
    "chunk_output": """
tolerance = 2e-2
q, k, v = torch.randn(3, 1, 64, 1, 64).half().unbind(0)
h = torch.randn(1, 1, 1, 64, 64).half() / 8

def plain(q, k, v, h):
    scores = torch.einsum("bihd,bjhd->bhij", q, k).float().tril().half()
    within = torch.einsum("bhij,bjhv->bihv", scores, v)
    return 64 ** -0.5 * (torch.einsum("bihk,bhkv->bihv", q, h[:, 0]) + within)

same(lambda f: func.grad(lambda *tensors: f(*tensors).float().sum(), (0, 1, 2, 3))(q, k, v, h))
""",
    "forward": """
x, weight = torch.randn(2, 3, 16), torch.randn(16)
words = "requires grad, but the spec has no backward pass"
refused(lambda: func.grad(lambda x: sample(x, weight).sum())(x), RuntimeError, words)
# Inside vmap a tensor does not tell that it requires grad outside.
mapped = lambda x: func.vmap(sample, (0, None))(x, weight).sum()
refused(lambda: func.grad(mapped)(x), RuntimeError, words)
""",
}


@pytest.mark.parametrize("which", SPECS)
def test_transforms(which: str, tmp_path: Path, verdict: Any) -> None:
    loaded = loads(SPECS[which], tmp_path / "sample.yaml")
    folder = tmp_path / "sample"
    folder.mkdir()
    for name, text in render_spec(loaded).items():
        (folder / name).write_text(text)
    verdict(problem_of(loaded), folder)
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    program = [sys.executable, "-c", OPENING + PROGRAMS[which]]
    run = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
