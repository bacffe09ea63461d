"""Arguments that emitted functions refuse: derivatives that do not exist, and numbers beyond
float32.

Tensors are fake, without memory, so autograd works as on a GPU and no kernel runs.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kgen.render.rendering import render_spec
from kgen.spec.load import load, loads
from kgen.targets import asked_targets
from kgen.verify.families import NOT_NUMBERS, Subject, family_of, must_refuse, problem_of
from kgen.verify.integration import refuses_derivatives
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parent.parent
SPECS = (
    *(
        "causal",
        "causal_alibi",
        "relative_bias",
        "softcap_fast",
        "gpt_oss",
        "block_sparse",
        "full_d64_fp16",
    ),
    *(
        "varlen_alibi",
        "decode_gqa",
        "decode_paged",
        "gated_delta_output_varlen",
        "retention_output",
    ),
    *("layer_norm", "fused_add_rms_norm", "gated_rms_norm", "rms_norm_fp8"),
)
FILES = {
    f"{name}/{file.name}": (ROOT / "specs" / f"{name}.yaml", target, file)
    for name in SPECS
    for target in asked_targets(load(ROOT / "specs" / f"{name}.yaml"))
    for file in sorted((ROOT / "generated" / name).glob(f"{target}*.py"))
}


def subject(which: str) -> Subject:
    spec, target, file = FILES[which]
    module = import_file(file, f"kgen_test_{spec.stem}_{file.stem}")
    return Subject(problem_of(load(spec), target), target, file, module, "meta")


@pytest.mark.parametrize("which", FILES)
def test_what_does_not_exist_raises(which: str) -> None:
    if which.split("/")[1].startswith("cute"):
        pytest.importorskip("cutlass")
    emitted = subject(which)
    refuses_derivatives(emitted)
    example = family_of(emitted.problem).example(emitted, "numbers")
    example.call(emitted.function)
    parameters = inspect.signature(emitted.function).parameters.keys()
    names = {"eps", "scale"} & parameters - {
        n for n, x in example.kwargs.items() if isinstance(x, torch.Tensor)
    }
    names |= {n for n, x in example.kwargs.items() if isinstance(x, int | float)}
    must_refuse(
        {
            f"{name} is {what}": partial(
                emitted.function, *example.args, **{**example.kwargs, name: x}
            )
            for name in names
            for what, x in NOT_NUMBERS.items()
        }
    )


@pytest.mark.parametrize("which", FILES)
def test_tensors_that_kernels_cannot_read(which: str) -> None:
    """A sparse or nested tensor raises an error that names the argument, for every tensor
    argument.
    """
    if which.split("/")[1].startswith("cute"):
        pytest.importorskip("cutlass")
    emitted = subject(which)
    example = family_of(emitted.problem).example(emitted, "numbers")
    parameters = inspect.signature(emitted.function).parameters
    given = dict(zip(parameters, example.args, strict=False)) | example.kwargs
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        dense = torch.zeros(tensor.shape, dtype=torch.float32)
        for other in (dense.to_sparse(), torch.nested.nested_tensor([dense])):
            with pytest.raises(TypeError, match=f": {name} must be a dense tensor, got "):
                emitted.function(**given | {name: other})


BIASED = """kernel: attention
name: biased
dtype: bf16
head_dim: 64
buffers: {slopes: {shape: [HQ], dtype: fp32}, edges: {shape: [B], dtype: fp32}}
params: {cap: {type: float, runtime: true}, window: {type: int, runtime: true}}
score_mod: score / cap + slopes[h] * (kv_idx - q_idx)
mask_mod: kv_idx < edges[b] and q_idx - kv_idx < window and kv_idx % (window - 2) == 0
"""


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"slopes": True},
            RuntimeError,
            "slopes requires grad, .*set `grad: true` in the spec, or pass slopes.detach",
        ),
        (
            {"edges": True},
            RuntimeError,
            r"edges requires grad, .*no derivative .* pass edges.detach\(\)",
        ),
        ({"cap": 1e39}, ValueError, "cap must be finite and must not underflow in float32"),
        ({"cap": 1e-60}, ValueError, "cap must be finite and must not underflow in float32"),
        ({"cap": "8"}, TypeError, "cap must be a number, got str"),
        ({"cap": torch.tensor(8.0)}, TypeError, "cap must be a number, got Tensor"),
        ({"window": 8.0}, TypeError, "window must be an integer, got float"),
        ({"window": True}, TypeError, "window must be an integer, got bool"),
        ({"window": 2**40}, ValueError, "window must be an int32"),
        ({"cap": 0.0}, ValueError, "cap is a divisor in the spec and must not be 0"),
        (
            {"cap": 4.0, "window": 2},
            ValueError,
            r"window - 2 is a divisor in the spec and must not be 0",
        ),
        ({"scale": 2.0**127.5}, ValueError, r"scale must be positive and at most 2\*\*127"),
        ({"cap": np.float32(8), "window": np.int64(8)}, None, ""),
    ],
)
def test_messages_name_the_argument(
    changes: dict[str, Any], error: type[Exception] | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "biased.py"
    path.write_text(next(iter(render_spec(loads(BIASED, "biased.yaml"), single=True).values())))
    biased = import_file(path, "kgen_test_biased").biased
    q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16, device="meta")
    given: dict[str, Any] = {"cap": 8.0, "window": 4} | changes
    for name in ("slopes", "edges"):
        given[name] = torch.empty(1, device="meta", requires_grad=name in changes)
    if error is None:
        biased(q, q, q, **given)
        return
    with pytest.raises(error, match=words):
        biased(q, q, q, **given)
    if error is RuntimeError:
        with torch.no_grad():
            biased(q, q, q, **given)
