"""No emitted launcher waits for the device.

The tests check the calls in its source, and the operators that PyTorch runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from kgen.render.rendering import render_spec
from kgen.sizes import SHARED_LIMITS
from kgen.spec.load import load
from kgen.verify.families import family_of, problem_of
from kgen.verify.toolchain import import_file

ROOT = Path(__file__).resolve().parent.parent
EMITTED = sorted(ROOT.glob("generated/*/*.py"))
WAITING = {
    *("item", "tolist", "cpu", "numpy", "is_nonzero", "synchronize", "equal", "allclose"),
    # The size of the result depends on the contents.
    *(
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    ),
    # These copy from memory that is not pinned.
    *("tensor", "as_tensor", "from_numpy", "pin_memory"),
}
"""Methods of tensors, and functions of torch, that wait for the device."""


def waits(source: str) -> list[str]:
    """Return the calls of a file that wait, outside of kernels."""
    return [ast.unparse(call) for call in _calls(ast.parse(source)) if _waits(call)]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    if any(
        "jit" in ast.unparse(d) or "kernel" in ast.unparse(d)
        for d in getattr(node, "decorator_list", ())
    ):
        return
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)


def _waits(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    return call.func.attr in WAITING or (call.func.attr == "where" and len(call.args) == 1)


@pytest.mark.parametrize("path", EMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_call_waits(path: Path) -> None:
    assert waits(path.read_text()) == []


def test_calls_that_wait_are_found() -> None:
    source = (
        "def f(x):\n    return x.max().item(), torch.tensor(3, device=x.device), torch.where(x)\n"
    )
    assert len(waits(source)) == 3
    assert waits(f"@triton.jit\n{source}") == []


# --- as it runs ------------------------

DEPENDS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "lift_fresh",
}
"""Operators that wait or copy host data to the device. `torch.tensor` does this by `lift_fresh`."""


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert name not in DEPENDS, f"{op} waits"
        assert not by_mask, f"{op} by a mask waits"
        assert op is not torch.ops.aten.repeat_interleave.Tensor, f"{op} waits"
        return op(*args, **(kwargs or {}))


class _Watched:
    """Function of an emitted file, watched while it runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__globals__ = function.__globals__  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched, _Watch():
            # These methods read CPU memory without an operator.
            for name in (
                "tolist",
                "cpu",
                "numpy",
                "item",
                "__bool__",
                "__int__",
                "__float__",
                "__index__",
            ):
                patched.setattr(Tensor, name, _refuse)
            return self.function(*args, **kwargs)


def _refuse(x: Tensor, *args: Any) -> Any:
    raise AssertionError("a launcher reads what is in a tensor")


CALLED = [
    *(
        "causal/triton",
        "gpt_oss/triton",
        "varlen_alibi/triton",
        "decode_paged/triton",
        "decode_gqa/triton",
    ),
    *(
        "natten_2d/triton",
        "relative_bias/triton",
        "head_scale/triton",
        "padding/triton",
        "causal_images/triton",
    ),
    *("rms_norm/triton", "layer_norm_wide/triton", "qk_norm/triton", "rms_norm_fp8/triton"),
    *(
        "gated_delta_output_fla/triton",
        "gated_delta_output_varlen/triton",
        "retention_output/triton",
    ),
    *("rms_norm/cuda", "rms_norm_fp8/cuda", "causal/cuda"),
]


@pytest.mark.parametrize("name", CALLED)
def test_no_launcher_waits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forward and backward run as on an H200, but nothing is launched."""
    folder, stem = name.split("/")
    if stem == "cuda":
        pytest.importorskip("cuda.core")
    loaded = load(ROOT / "specs" / f"{folder}.yaml")
    for filename, text in render_spec(loaded).items():
        (tmp_path / filename).write_text(text)
    watch_all(monkeypatch)
    module: Any = import_file(tmp_path / f"{stem}.py", f"kgen_waiting_{folder}_{stem}")
    for place, stand_in in {
        "_arch": lambda device: "sm_90" if stem == "cuda" else 90,
        "_resident": lambda *args: 1,
        "_shared_limit": lambda device: SHARED_LIMITS[90],
    }.items():
        monkeypatch.setattr(module, place, stand_in, raising=False)
    if stem == "cuda":
        monkeypatch.setattr(module, "_launch", lambda *args, **kwargs: None)
    problem = problem_of(loaded, stem)
    calls = list(family_of(problem).compile_calls(problem))[-3:]
    for _, call in calls:
        call(_Watched(getattr(module, problem.name)))


def watch_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch no Triton kernels, and watch all operators that are defined afterwards."""
    impl = torch.library.Library.impl

    def watched(library: Any, name: str, function: Any, *key: str, **options: Any) -> None:
        impl(
            library,
            name,
            _Watched(function) if key == ("CompositeExplicitAutograd",) else function,
            *key,
            **options,
        )

    monkeypatch.setattr(torch.library.Library, "impl", watched)
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
